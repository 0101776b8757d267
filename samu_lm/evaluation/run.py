"""`eval.py`: a checkpoint in, figures or sampled text out."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from samu_lm.data import LMDataModule, Tokenizer, tokenizer_from_state
from samu_lm.data.files import launch_path
from samu_lm.environment import environment
from samu_lm.errors import ConfigError, SamuLMError
from samu_lm.evaluation import report
from samu_lm.evaluation.build import (
    build_data,
    build_model,
    describe_data,
    describe_model,
    refuse_tokenizer_contradictions,
)
from samu_lm.evaluation.checkpoint import Checkpoint, load_checkpoint
from samu_lm.evaluation.generation import generate, never_sampled, prompt_tokens
from samu_lm.evaluation.perplexity import StreamCounts, accumulate
from samu_lm.evaluation.settings import Settings, overrides_of, precision_of
from samu_lm.evaluation.totals import Totals, summarise
from samu_lm.model import RecurrentLM


def evaluate(cfg: DictConfig) -> dict[str, Any]:
    """Evaluates a checkpoint or samples from it as `configs/eval.yaml` says, prints the outcome and writes it down.

    Args:
        cfg: composed from eval.yaml, without Hydra's own node.

    Returns:
        What the JSON file holds: `evaluation.json`, or with a prompt `samples.json`.

    Raises:
        ConfigError: what the user can put right, before data is read, memory taken or a file written.
        SamuLMError: the model's losses are not finite.
    """
    settings = Settings.from_config(cfg)
    checkpoint = load_checkpoint(launch_path(settings.checkpoint))
    tokenizer = tokenizer_from_state(checkpoint.tokenizer)
    refuse_tokenizer_contradictions(checkpoint, overrides_of(cfg, "tokenizer"))
    precision = settings.precision or _trained_precision(checkpoint)
    weights, autocast = precision_of(precision)
    if settings.prompt is None:
        data = build_data(checkpoint, tokenizer, overrides_of(cfg, "data"))
    else:
        prompt = prompt_tokens(tokenizer, settings.prompt)
    names = (report.JSON_NAME, report.PLOT_NAME) if settings.prompt is None else (report.SAMPLES_NAME,)
    folder = settings.output_folder()
    report.refuse_taken(folder, names)
    model = build_model(checkpoint, tokenizer, overrides_of(cfg, "model"))
    report.make_folder(folder)

    device = settings.torch_device()
    model = model.to(device=device, dtype=weights)
    origin = {
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.step,
        "epoch": checkpoint.epoch,
        "device": str(device),
        "precision": precision,
    }
    title = f"{describe_model(model)}, step {checkpoint.step:,}"
    with torch.autocast(device.type, autocast or torch.bfloat16, enabled=autocast is not None):
        if settings.prompt is None:
            outcome, text = _measure(model, data, settings, device, title, folder / report.PLOT_NAME)
        else:
            outcome, text = _sample(model, tokenizer, prompt, settings, device, title)
    result = origin | outcome | {"environment": environment()}
    report.write_json(folder / names[0], result)
    print(f"{text}\n\nwritten to {folder}/: {', '.join(names)}")
    return result


def _trained_precision(checkpoint: Checkpoint) -> str:
    trainer = checkpoint.config.get("trainer") or {}
    precision = trainer.get("precision") if isinstance(trainer, dict) else None
    return "32-true" if precision is None else str(precision)


def _measure(
    model: RecurrentLM, data: LMDataModule, settings: Settings, device: torch.device, title: str, plot: Path
) -> tuple[dict[str, Any], str]:
    """Losses over the rows of a split: what the JSON says of them, and the table."""
    data.setup()
    totals = Totals(data.tokenizer.num_bytes(np.arange(data.tokenizer.vocab_size)))
    batches = data.sequential_dataloader(settings.split)
    rows = data.size(settings.split).rows
    began = time.perf_counter()
    counts = accumulate(
        model,
        batches,
        totals,
        device=device,
        compiled=settings.compile,
        max_rows=settings.max_rows,
        report=_progress(min(rows, settings.max_rows or rows)),
    )
    seconds = time.perf_counter() - began
    if not math.isfinite(totals.nats):
        raise SamuLMError("the model's losses are not finite; the checkpoint's weights are broken, take an earlier one")
    if not totals.targets:
        raise ConfigError("max_rows", settings.max_rows, "these rows hold nothing to predict; take more")
    figures = summarise(totals, data.byte_unigram_entropy(settings.split).bits)
    title = f"{title}\n{describe_data(data, settings.split)}"
    report.plot_loss_by_position(plot, figures, title=title)
    outcome = {
        "split": settings.split,
        "data": describe_data(data, settings.split),
        "seq_len": data.seq_len,
        "max_rows": settings.max_rows,
        **_counts(counts),
        **figures,
        "notes": report.notes(counts.continued_rows, settings.max_rows is not None and counts.rows < rows),
        "seconds": seconds,
    }
    return outcome, report.table(outcome, title=title)


def _counts(counts: StreamCounts) -> dict[str, int]:
    return {
        "rows": counts.rows,
        "documents": counts.documents,
        "continued_rows": counts.continued_rows,
        "tokens": counts.tokens,
    }


def _progress(rows: int) -> Callable[[int], None] | None:
    """Rewrites one line on a terminal, at most a few times a second."""
    if not sys.stderr.isatty():
        return None
    last = 0.0

    def show(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done >= rows:
            print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
        elif now - last > 0.3:
            last = now
            print(f"\rrow {done:,} of {rows:,}", end="", file=sys.stderr, flush=True)

    return show


def _sample(
    model: RecurrentLM,
    tokenizer: Tokenizer,
    prompt: list[int],
    settings: Settings,
    device: torch.device,
    title: str,
) -> tuple[dict[str, Any], str]:
    """Continuations of the prompt: what the JSON says of them, and the text."""
    sampling = settings.sampling
    samples = generate(
        model,
        prompt,
        sampling,
        device=device,
        stop_id=tokenizer.eos_id,
        never=never_sampled(tokenizer, model.vocab_size),
    )
    texts = [tokenizer.decode(chain(prompt, sample)) for sample in samples]
    outcome = {
        "prompt": settings.prompt,
        "prompt_tokens": prompt,
        "sampling": vars(sampling),
        "samples": [
            {
                "seed": sampling.seed + i,
                "text": text,
                "continuation": tokenizer.decode(sample),
                "tokens": sample,
                "ended": len(sample) < sampling.max_new_tokens,
            }
            for i, (sample, text) in enumerate(zip(samples, texts, strict=True))
        ],
    }
    return outcome, report.samples_text(texts, title=title)
