"""`samu-lm prepare`: tokenizes a corpus into shards for training on corpora of any size."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samu_lm.errors import ConfigError, SamuLMError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from samu_lm.data.preparation import Progress
    from samu_lm.data.sources import Source
    from samu_lm.data.tokenizers import Tokenizer

KNOWN = dict.fromkeys(("data", "tokenizer", "out", "workers", "shard_tokens", "seed"))
_LINE_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.epilog = "example: samu-lm prepare data=jsonl data.path=corpus tokenizer=bpe out=shards"
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="config overrides as train.py takes them: data=, tokenizer= and their keys, out=, workers=, shard_tokens=",
    )


def run(args: argparse.Namespace) -> int:
    """Writes the shards and says what they hold."""
    from samu_lm.data.files import launch_path
    from samu_lm.data.preparation import prepare_shards

    cfg = compose_config(args.overrides)
    source, tokenizer = build(cfg)
    folder = launch_path(cfg.out)
    _refuse_inside(folder, cfg.data.get("path"))
    workers = _processors() if cfg.workers is None else cfg.workers
    line = ProgressLine()
    try:
        manifest = prepare_shards(
            source,
            tokenizer,
            folder,
            workers=workers,
            shard_tokens=cfg.shard_tokens,
            val_fraction=cfg.data.val_fraction,
            report=line.show,
        )
    except KeyboardInterrupt:
        line.end()
        print(f"samu-lm prepare: stopped; run the same command to go on in {folder}", file=sys.stderr)
        return 130
    finally:
        line.end()
    print(summary(manifest, cfg.out))
    return 0


def compose_config(overrides: list[str]) -> DictConfig:
    """The config of ``configs/prepare.yaml`` with the command line's overrides, checked.

    Raises:
        SamuLMError: an override that cannot be read, a key nobody reads, a value of a wrong type.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from samu_lm.config import check_config, config_dir
    from samu_lm.entry import refuse_null_groups, reword

    refuse_null_groups(overrides)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            cfg = compose("prepare", overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise SamuLMError(reword(error, overrides, "prepare")) from error
    finally:
        GlobalHydra.instance().clear()
    check_config(cfg, KNOWN)
    if not isinstance(cfg.out, str) or not cfg.out.strip():
        raise ConfigError("out", cfg.out, "give the folder to write the shards to")
    for key, least in (("workers", 0), ("shard_tokens", 1)):
        value = cfg[key]
        if key == "workers" and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(key, value, f"give a whole number, {least} or more")
    fraction = cfg.data.get("val_fraction")
    if fraction is not None and not 0 < fraction < 1:
        raise ConfigError("data.val_fraction", fraction, "give a number between 0 and 1, both excluded")
    return cfg


def build(cfg: DictConfig) -> tuple[Source, Tokenizer]:
    """The source and the tokenizer of a config, checked but not read.

    Raises:
        ConfigError: settings that cannot work, or data that is no text.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import get_object, instantiate
    from omegaconf import OmegaConf

    from samu_lm.data.presets import source_of

    settings = OmegaConf.to_container(cfg.data, resolve=True)
    assert isinstance(settings, dict)
    target = settings["_target_"]
    source = source_of(get_object(target), {str(key): value for key, value in settings.items()})
    if source is None:
        name = target.rpartition(".")[2].removesuffix("_data")
        remedy = (
            "has no texts to tokenize; prepare stdlib, text, jsonl, parquet or hub, for a mixture each source alone"
        )
        raise ConfigError("data", name, remedy)
    try:
        tokenizer: Tokenizer = instantiate(cfg.tokenizer)
    except InstantiationException as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None
    tokenizer.check()
    source.check()
    return source, tokenizer


def _refuse_inside(folder: Path, paths: Any) -> None:
    from samu_lm.data.files import launch_path

    for path in [paths] if isinstance(paths, str) else paths or []:
        corpus = launch_path(path).resolve()
        if corpus.is_dir() and folder.resolve().is_relative_to(corpus):
            raise ConfigError("out", folder, f"lies in the corpus' own folder {corpus}; choose a folder outside it")


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ProgressLine:
    """One line that is rewritten on a terminal; elsewhere a line every ten seconds."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._last = self._began
        self._terminal = sys.stderr.isatty()
        self._shown = False

    def show(self, progress: Progress) -> None:
        """Says how far a preparation has come."""
        now = time.monotonic()
        if not self._terminal and now - self._last < _LINE_SECONDS:
            return
        self._last = now
        rate = (progress.bytes - progress.resumed_bytes) / 1e6 / max(now - self._began, 1e-9)
        text = (
            f"{progress.documents:,} documents, {progress.bytes / 1e6:,.0f} MB of text, {progress.tokens:,} tokens, "
            f"{rate:.1f} MB/s"
        )
        if progress.read is not None:
            done, total = progress.read
            share = done / max(total, 1)
            bar = f"[{'#' * round(20 * share):20}] " if self._terminal else ""
            text = f"{bar}{share:4.0%} {text}"
        if self._terminal:
            print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = True
        else:
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clears the line."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = False


def summary(manifest: dict[str, Any], out: str) -> str:
    """What the shards hold, and how to train on them."""
    tokens, size = manifest["tokens"], manifest["bytes"]
    return "\n".join(
        [
            f"{manifest['documents']:,} documents, {size:,} bytes of text, {tokens:,} tokens "
            f"({size / max(tokens, 1):.2f} bytes a token)",
            f"left out: {manifest['empty']:,} empty, {manifest['skipped']:,} faulty",
            f"tokenizer: {manifest['tokenizer']['kind']}",
            f"written to {out}/: {len(manifest['shards'])} shards, manifest.json",
            f"train with: python train.py data=shards data.path={json.dumps(out) if ' ' in out else out}",
        ]
    )
