"""``samu-lm bench decode``: tokens a second, one token after another, as a CUDA graph.

Matrices and the residual stream are bfloat16, the recurrences' own parameters and states float32. The ceiling is the
time to move the bytes of every parameter once, at the copy rate measured in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samu_lm.benchmarks import report, timing
from samu_lm.benchmarks.arguments import check_output, check_positive
from samu_lm.benchmarks.cases import MIXERS, CheckFailed
from samu_lm.benchmarks.float64 import relative_error
from samu_lm.benchmarks.shapes import require_gpu
from samu_lm.benchmarks.step import SIZES
from samu_lm.model import RecurrentLM

DEVICE = "cuda"
# Tokens that are compared with a parallel pass before anything is timed.
CHECKED = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``samu-lm bench decode``."""
    parser.epilog = "example: samu-lm bench decode --model 400m --batch-sizes 1 8 --output decode.json"
    parser.add_argument("--model", choices=list(SIZES), default="400m")
    parser.add_argument("--architectures", nargs="+", choices=MIXERS, default=list(MIXERS))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1], help="rows that are decoded together")
    parser.add_argument("--repeats", type=int, default=100, help="tokens that are timed")
    parser.add_argument("--output", type=Path, default=Path("decode.json"), help="JSON; table (.md) beside")


class Decoder:
    """Greedy decoding in place: each call of :meth:`advance` reads ``tokens`` and ``state`` and replaces them.

    Args:
        model: the model, on its device.
        batch: rows.
    """

    def __init__(self, model: RecurrentLM, batch: int) -> None:
        self.model = model
        self.state = model.init_state(batch)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, model.vocab_size, (batch,), generator=generator).to(self.state.tokens.device)
        self.logits = torch.empty(
            batch, model.vocab_size, dtype=model.embedding.weight.dtype, device=self.tokens.device
        )

    @torch.no_grad()
    def advance(self) -> None:
        """One token per row."""
        logits, after = self.model.step(self.tokens, self.state)
        self.logits.copy_(logits)
        old = (*self.state.conv, *self.state.recurrent, self.state.tokens)
        for place, value in zip(old, (*after.conv, *after.recurrent, after.tokens), strict=True):
            place.copy_(value)
        self.tokens.copy_(logits.argmax(-1))

    def captured(self) -> Callable[[], Any]:
        """A call that replays :meth:`advance` as a CUDA graph."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.advance()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.advance()
        return graph.replay


def build(sizes: dict[str, Any], mixer: str) -> RecurrentLM:
    """The model with bfloat16 matrices."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = RecurrentLM(**sizes, mixer=mixer).eval()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.to(torch.bfloat16)
    return model


def check(model: RecurrentLM, start: Callable[[Decoder], Callable[[], Any]]) -> float:
    """Holds decoded logits to a parallel pass over the same tokens.

    Args:
        model: the model.
        start: a decoder to the call that advances it.

    Returns:
        The relative difference of the logits.

    Raises:
        CheckFailed: more than roundings of bfloat16 apart.
    """
    decoder = Decoder(model, 2)
    advance = start(decoder)
    for place in (*decoder.state.conv, *decoder.state.recurrent, decoder.state.tokens):
        place.zero_()  # capturing has advanced it
    tokens: list[Tensor] = []
    logits: list[Tensor] = []
    for _ in range(CHECKED):
        tokens.append(decoder.tokens.clone())
        advance()
        logits.append(decoder.logits.clone())
    with torch.no_grad():
        expected = model(torch.stack(tokens, 1))
    error = relative_error(torch.stack(logits, 1), expected)
    if not error < 2e-2:
        raise CheckFailed(f"{model.mixer}: decoded logits are {error:.1e} from the parallel pass's (bound 2e-02)")
    return error


def measure(name: str, mixer: str, batches: list[int], repeats: int, copy_tb_s: float) -> list[dict[str, Any]]:
    """Rows of one mixer, by batch size."""
    model = build(SIZES[name], mixer)
    error = check(model, Decoder.captured)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    ceiling = copy_tb_s * 1e12 / size
    rows = []
    for batch in batches:
        decoder = Decoder(model, batch)
        samples = timing.event_samples(decoder.captured(), repeats)
        steps = 1e3 / timing.median(samples)
        rows.append(
            {
                "architecture": mixer,
                "batch": batch,
                "samples_ms": samples,
                "tokens_per_second": steps * batch,
                "parameter_bytes": size,
                "steps_per_second": steps,
                "ceiling_steps_per_second": ceiling,
                "fraction_of_ceiling": steps / ceiling,
                "error": error,
            }
        )
    return rows


def table(result: dict[str, Any]) -> str:
    """Markdown table of a result."""
    lines = [
        report.origin(result),
        "",
        f"`{result['model']}`; the ceiling reads every parameter once a step.",
        "",
        "| mixer | rows | tokens/s | steps/s | of the ceiling |",
        "|---" * 5 + "|",
    ]
    for row in result["rows"]:
        cells = [row["architecture"], str(row["batch"]), f"{row['tokens_per_second']:,.0f}"]
        cells += [f"{row['steps_per_second']:,.0f}", f"{row['fraction_of_ceiling']:.0%}"]
        lines.append(report.line(cells))
    return "\n".join(lines) + "\n"


def run(args: argparse.Namespace) -> int:
    """Measures, writes JSON and table, prints the table."""
    check_positive(batch_sizes=args.batch_sizes, repeats=args.repeats)
    require_gpu()
    check_output(args.output)
    ceiling = timing.copy_rate()
    result: dict[str, Any] = {
        "schema_version": 1,
        "environment": timing.environment(),
        "command": report.command(),
        "copy_tb_s": ceiling,
        "model": args.model,
        "rows": [],
    }
    for mixer in args.architectures:
        result["rows"] += measure(args.model, mixer, args.batch_sizes, args.repeats, ceiling)
        report.write_json(args.output, result)
    report.write_table(args.output, table(result))
    return 0
