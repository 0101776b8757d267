"""`samu-lm presets`: what each model preset weighs, computed from the built module without allocating its weights."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from samu_lm.errors import ConfigError

BYTE_VOCABULARY = 258  # of the default tokenizer, for presets that take the tokenizer's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.epilog = "example: samu-lm presets --vocab-size 32000 --json"
    parser.add_argument("names", nargs="*", metavar="PRESET", help="presets to show, e.g. samu_400m; default: all")
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=BYTE_VOCABULARY,
        metavar="N",
        help=f"vocabulary of presets that take their tokenizer's (default: {BYTE_VOCABULARY}, bytes)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Prints the presets, smallest first."""
    if args.vocab_size < 1:
        raise ConfigError("--vocab-size", args.vocab_size, "must be 1 or more")
    rows = preset_figures(args.names, args.vocab_size)
    print(json.dumps(rows, indent=2) if args.json else table(rows))
    return 0


def preset_figures(names: list[str], vocab_size: int) -> list[dict[str, Any]]:
    """Figures of model presets.

    Args:
        names: files of configs/model without their ending; empty for all.
        vocab_size: for presets whose own vocab_size is null.

    Returns:
        One dict a preset, by number of parameters: name, mixer, width, rnn_width, depth, vocab_size, parameters,
        non_embedding_parameters, forward_flops_per_token, training_flops_per_token, state_bytes (one sequence).

    Raises:
        ConfigError: a name that is no preset.
    """
    import torch
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    from samu_lm.config import config_dir, nearest

    files = {path.stem: path for path in sorted(Path(config_dir(), "model").glob("*.yaml"))}
    for name in names:
        if name not in files:
            raise ConfigError("PRESET", name, f"no such model preset; {nearest(name, files)}")
    rows = []
    for name in names or files:
        config = {**OmegaConf.load(files[name])}
        config["vocab_size"] = config["vocab_size"] or vocab_size
        with torch.device("meta"):
            model = instantiate(config)
        rows.append(
            {
                "name": name,
                **{key: config[key] for key in ("mixer", "width", "rnn_width", "depth", "vocab_size")},
                "parameters": model.num_parameters(),
                "non_embedding_parameters": model.num_parameters(non_embedding=True),
                "forward_flops_per_token": model.flops_per_token(training=False),
                "training_flops_per_token": model.flops_per_token(training=True),
                "state_bytes": model.state_bytes(batch_size=1),
            }
        )
    return sorted(rows, key=lambda row: (row["parameters"], row["name"]))


def table(rows: list[dict[str, Any]]) -> str:
    """The figures in aligned columns."""
    header = ["preset", "vocabulary", "parameters", "non-embedding", "forward", "training", "state bytes"]
    units = ["", "", "", "", "FLOPs/token", "FLOPs/token", "per sequence"]
    cells = [header, units] + [
        [
            row["name"],
            f"{row['vocab_size']:,}",
            f"{row['parameters']:,}",
            f"{row['non_embedding_parameters']:,}",
            f"{row['forward_flops_per_token']:,}",
            f"{row['training_flops_per_token']:,}",
            f"{row['state_bytes']:,}",
        ]
        for row in rows
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in cells
    ]
    return "\n".join(lines)
