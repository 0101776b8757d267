"""One training run from a composed config: checks, data, model, training, results.

The path of a newcomer: here what is built and in which order, `module.py` for the loss and the optimizer step,
`samu_lm.data.packing` for the data's order, `samu_lm.model.lm` for the model.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import get_object, instantiate
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from torch import nn

from samu_lm.config import signature_of
from samu_lm.data import LMDataModule, Tokenizer, tokenizer_from_state
from samu_lm.entry import job_errors, one_line
from samu_lm.errors import ConfigError, SamuLMError
from samu_lm.model.fp8 import convert_to_fp8
from samu_lm.ops.backend import interpreting
from samu_lm.training.callbacks import BestCheckpoint, GracefulStop, StopOnSignal
from samu_lm.training.checkpoint_io import AtomicCheckpointIO, writing
from samu_lm.training.checks import check, check_fp8, check_writable, fp8_recipe, refuse_overwriting
from samu_lm.training.curve import draw_curve
from samu_lm.training.hardware import announce, settle
from samu_lm.training.loggers import CSVLogger, ResumePoint
from samu_lm.training.loop import make_exact, validation_owed
from samu_lm.training.module import TrainingModule
from samu_lm.training.optimizer import AdamW
from samu_lm.training.record import is_completed, read_results, set_aside, with_absolute_paths, write_json, write_record
from samu_lm.training.resume import check_weights, find_checkpoint, find_last, merge_config, without_foreign_paths
from samu_lm.training.schedule import Schedule

log = logging.getLogger(__name__)


@dataclass
class Plan:
    """A checked run: everything that can be known before data is read.

    Attributes:
        cfg: the config that holds, the checkpoint's included.
        run_dir: the run's folder, absolute.
        trainer: Lightning's trainer with callbacks and loggers.
        data: the data module, nothing read yet.
        optimizer: AdamW's settings.
        schedule: the learning rate's schedule.
        checkpoint: the file to go on from.
        step: the checkpoint's optimizer step, 0 for a new run.
        completed: the run of that length ended at that step, and ``results.json`` says so.
    """

    cfg: DictConfig
    run_dir: Path
    trainer: pl.Trainer
    data: LMDataModule
    optimizer: AdamW
    schedule: Schedule
    checkpoint: Path | None = None
    step: int = 0
    completed: bool = False

    def config(self) -> dict[str, Any]:
        """The config as plain values; how the run was resumed is not part of it."""
        config = OmegaConf.to_container(self.cfg, resolve=True)
        assert isinstance(config, dict)
        plain = {str(key): value for key, value in config.items()} | {"resume": None}
        return with_absolute_paths(plain)


def train(cfg: DictConfig) -> float | None:
    """The task of train.py: trains, and returns the last validation loss for sweepers that optimise it."""
    hydra = HydraConfig.get()
    quieten()
    overrides = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    run_dir = Path(hydra.runtime.output_dir)
    try:
        with job_errors():
            results = run(cfg, run_dir, overrides)  # type: ignore[arg-type]
    except BaseException as error:
        if hydra.mode == RunMode.MULTIRUN:  # for the sweep's table
            status = "stopped" if isinstance(error, GracefulStop) else "failed"
            write_json(run_dir / "results.json", {"status": status, "error": one_line(error)})
        raise
    loss = results.get("val/loss")
    return None if loss is None else float(loss)


def quieten() -> None:
    """Leaves out of the log what libraries say about matters that are settled here."""
    for name in ("lightning.pytorch", "lightning.fabric"):  # their advice is not about this program
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")  # Lightning's use of PyTorch
    warnings.filterwarnings(
        "ignore", message=".*sync_dist=True.*"
    )  # validation sums are reduced before they are logged
    if os.environ.get("LOCAL_RANK", "0") != "0":
        logging.getLogger("samu_lm").setLevel(logging.WARNING)  # all ranks would say the same


def run(cfg: DictConfig, run_dir: Path, overrides: Sequence[str] | None = None) -> dict[str, Any]:
    """Checks a config and trains with it.

    Args:
        cfg: the composed config, without Hydra's own node.
        run_dir: folder of the run.
        overrides: what the command line set; None takes every key as set by the user (it matters to a resumed run).

    Returns:
        What ``results.json`` holds.

    Raises:
        ConfigError: before data is read, memory taken or a file of an existing run touched.
    """
    plan = make_plan(cfg, run_dir.absolute(), overrides)
    if plan.checkpoint is not None and 0 <= plan.trainer.max_steps < plan.step:
        remedy = f"lies before the checkpoint's step {plan.step}; give a later end, or an earlier checkpoint"
        raise ConfigError("trainer.max_steps", plan.trainer.max_steps, remedy)
    if plan.completed:
        log.info("nothing to do: %s is at the last step, %d", plan.checkpoint, plan.step)
        return read_results(plan.run_dir)
    folder = plan.run_dir if plan.checkpoint is None else plan.run_dir / "resumed" / f"step-{plan.step}"
    if plan.trainer.is_global_zero:
        with writing(folder):
            write_record(folder, plan.config(), overrides or [])
    with signals_handled(plan.trainer):
        module = build_module(plan)
        if plan.checkpoint is not None and plan.trainer.is_global_zero:
            with writing(folder):
                set_aside(plan.run_dir, folder)
        fit(plan, module)
        results = collect_results(plan, module)
        if plan.trainer.is_global_zero:
            write_outcome(plan, results)
    for callback in stop_callbacks(plan.trainer):
        callback.exit_if_asked()
    return results


# -- checks: nothing is read, allocated or written --------------------------------------------------------------------


def make_plan(cfg: DictConfig, run_dir: Path, overrides: Sequence[str] | None) -> Plan:
    """Checks a config as far as that goes without the data, and builds what is light.

    Raises:
        ConfigError: the first fault found.
    """
    check(cfg if cfg.get("resume") is None else without_foreign_paths(cfg))
    path, checkpoint = None, None
    resume = cfg.resume
    if resume == "auto" and find_last(run_dir / "checkpoints") is not None:
        resume = "last"
    if resume not in (None, "auto"):
        path, checkpoint = find_checkpoint(resume, run_dir)
        composed = with_absolute_paths(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
        merged = merge_config(composed, checkpoint["samu_lm"]["config"], overrides)
        cfg = OmegaConf.create(merged)
        check(cfg)
    else:
        check(cfg)
        refuse_overwriting(run_dir)
    check_writable(run_dir)
    cfg = settle(cfg)
    optimizer, schedule = build(cfg.optimizer), build(cfg.schedule)
    max_steps = cfg.trainer.get("max_steps")
    schedule.check(max_steps if max_steps is not None and max_steps > 0 else None)
    tokenizer = _tokenizer(cfg, checkpoint)
    data = build(cfg.data, tokenizer=tokenizer)
    data.check()
    check_model(cfg, tokenizer, path, checkpoint)
    step, owed, completed = 0, False, False
    if checkpoint is not None:
        step, owed = checkpoint["global_step"], validation_owed(checkpoint)
        completed = not owed and is_completed(run_dir, step, cfg.trainer, checkpoint["samu_lm"]["config"]["trainer"])
        owed |= step == max_steps  # where it was validated, what came of it is not in results.json
    point = None if checkpoint is None else ResumePoint(step, owed)
    trainer = build_trainer(cfg, run_dir, point)
    if cfg.model.get("backend") == "triton" and trainer.strategy.root_device.type != "cuda" and not interpreting():
        raise ConfigError(
            "model.backend", "triton", f"cannot run on {trainer.strategy.root_device}; use auto or reference"
        )
    check_fp8(cfg, trainer.strategy.root_device)
    return Plan(cfg, run_dir, trainer, data, optimizer, schedule, path, step, completed)


def _tokenizer(cfg: DictConfig, checkpoint: Mapping[str, Any] | None) -> Tokenizer:
    if checkpoint is not None:
        return tokenizer_from_state(checkpoint["samu_lm"]["tokenizer"])
    try:
        tokenizer: Tokenizer = build(cfg.tokenizer)
    except ConfigError as error:
        if error.key == "tokenizer.path" and OmegaConf.is_interpolation(cfg.tokenizer, "path"):  # data=shards sets it
            raise ConfigError("data.path", error.value, error.remedy) from None
        raise
    tokenizer.check()
    return tokenizer


def check_model(cfg: DictConfig, tokenizer: Tokenizer, path: Path | None, checkpoint: Mapping[str, Any] | None) -> None:
    """Builds the model without memory for its weights, so that sizes which do not fit each other are found now."""
    vocab_size = tokenizer.vocab_size if tokenizer.is_trained else cfg.model.vocab_size or cfg.tokenizer.vocab_size
    with torch.device("meta"):
        model = build_model(cfg, vocab_size)
    if path is not None and checkpoint is not None:
        check_weights(path, checkpoint, model)


def build_model(cfg: DictConfig, vocab_size: int) -> nn.Module:
    """The model of a config; ``model.vocab_size: null`` is the tokenizer's.

    Raises:
        ConfigError: sizes that do not fit each other, or a vocabulary smaller than the tokenizer's.
    """
    own = cfg.model.vocab_size
    if own is not None and own < vocab_size:
        raise ConfigError("model.vocab_size", own, f"must be at least the tokenizer's {vocab_size}, or null")
    try:
        return build(cfg.model, vocab_size=own or vocab_size)
    except RuntimeError as error:  # sizes beyond what a tensor can have
        sizes = ", ".join(f"{name}={cfg.model.get(name)}" for name in ("width", "rnn_width", "depth", "vocab_size"))
        raise ConfigError("model", f"({sizes})", f"cannot be built: {str(error).splitlines()[0]}") from error
    except (ValueError, TypeError) as error:
        argument, _, rest = str(error).partition("=")
        value, _, remedy = rest.partition(": ")
        if isinstance(error, SamuLMError) or not remedy:
            raise
        raise ConfigError(f"model.{argument}", value, remedy) from error


def build_trainer(cfg: DictConfig, run_dir: Path, point: ResumePoint | None) -> pl.Trainer:
    """Lightning's trainer with the config's callbacks and loggers, the exact epoch loop and atomic checkpoints."""
    if cfg.trainer.get("accelerator") in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ConfigError("trainer.accelerator", cfg.trainer.accelerator, "there is no GPU here; use trainer=cpu")
    terminal = sys.stdout.isatty()
    given = dict(cfg.trainer)
    # A new run may follow one that ended before its first checkpoint; what that had logged is then moved aside, too.
    resumed = point or ResumePoint(0, validation_owed=False)
    own = {"run_dir": str(run_dir), "resumed": resumed, "terminal": terminal, "max_time": given.get("max_time")}
    callbacks: list[Callback] = [_instantiate_part(node, own) for node in (cfg.callbacks or {}).values()]
    loggers = [_instantiate_part(node, own) for node in (cfg.logger or {}).values()]
    if own["max_time"] is not None:
        if not any(isinstance(callback, StopOnSignal) for callback in callbacks):
            raise ConfigError("trainer.max_time", own["max_time"], "needs callbacks.stop; put it back")
        if given.get("max_steps") in (None, -1) and given.get("max_epochs") is None:
            given["max_epochs"] = -1  # no other end
    try:
        trainer: pl.Trainer = build(
            OmegaConf.create(given | {"max_time": None}),
            callbacks=callbacks,
            logger=loggers or False,
            plugins=[AtomicCheckpointIO()],
            default_root_dir=str(run_dir),
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
            enable_progress_bar=terminal if given.get("enable_progress_bar") is None else given["enable_progress_bar"],
        )
    except ImportError as error:
        value = f"(accelerator={given.get('accelerator')}, strategy={given.get('strategy')})"
        raise ConfigError("trainer", value, f"needs a package: {' '.join(str(error).split())}") from error
    except (MisconfigurationException, ValueError, TypeError) as error:
        del given["_target_"]
        text = " ".join(str(error).split())
        named = {k: v for k, v in given.items() if v is not None and (k in text or repr(v) in text)} or given
        key, value = (
            next(iter(named.items())) if len(named) == 1 else ("", ", ".join(f"{k}={v}" for k, v in named.items()))
        )
        raise ConfigError(f"trainer.{key}".rstrip("."), value, f"Lightning refuses it: {text}") from error
    if torch.are_deterministic_algorithms_enabled():  # trainer.deterministic
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # none is read here
    return make_exact(trainer, resumed.validation_owed)


def _instantiate_part(node: DictConfig, own: Mapping[str, Any]) -> Any:
    """A callback or logger, given those of the run's own values that its constructor takes."""
    parameters, _ = signature_of(get_object(node["_target_"]))
    return build(node, **{name: value for name, value in own.items() if name in parameters})


def build(node: DictConfig, **arguments: Any) -> Any:
    """Instantiates a node; what its constructor raises comes through as it is."""
    try:
        return instantiate(node, **arguments)
    except InstantiationException as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


# -- the run ----------------------------------------------------------------------------------------------------------


def build_module(plan: Plan) -> TrainingModule:
    """Reads the data, then builds the model from the seed."""
    plan.data.setup("fit")
    pl.seed_everything(plan.cfg.seed, workers=True, verbose=False)
    tokenizer = plan.data.tokenizer
    model = build_model(plan.cfg, tokenizer.vocab_size)
    if (recipe := fp8_recipe(plan.cfg)) != "none":
        convert_to_fp8(model.blocks, recipe)  # type: ignore[arg-type]
    parameters = sum(p.numel() for p in model.parameters())
    log.info("model: %s parameters, vocabulary of %d", f"{parameters:,}", tokenizer.vocab_size)
    device = plan.trainer.strategy.root_device
    log.info("device: %s, precision %s, compile %s", device, plan.cfg.trainer.get("precision"), plan.cfg.compile)
    announce(model, device)
    return TrainingModule(model, plan.optimizer, plan.schedule, tokenizer, plan.config(), compile=plan.cfg.compile)


def fit(plan: Plan, module: TrainingModule) -> None:
    """Trains; where the run goes on from a checkpoint, from there."""
    if plan.checkpoint is not None:
        log.info("resuming from %s at step %d", plan.checkpoint, plan.step)
    with signals_handled(plan.trainer):
        for logger in plan.trainer.loggers:
            logger.log_hyperparams(plan.config())
        try:
            plan.trainer.fit(module, datamodule=plan.data, ckpt_path=plan.checkpoint, weights_only=True)
        except SystemExit as end:
            # Where no callback takes the signals, Lightning itself ends a run on Ctrl-C, with status 1.
            if isinstance(end.__context__, KeyboardInterrupt):
                raise GracefulStop(signal.SIGINT) from None
            raise


def stop_callbacks(trainer: pl.Trainer) -> list[StopOnSignal]:
    """The trainer's callbacks that take signals: one, or none where the config leaves it out."""
    return [callback for callback in trainer.callbacks if isinstance(callback, StopOnSignal)]  # type: ignore[attr-defined]


@contextlib.contextmanager
def signals_handled(trainer: pl.Trainer) -> Iterator[None]:
    """While the context lasts, signals go to the trainer's callback for them."""
    with contextlib.ExitStack() as stack:
        for callback in stop_callbacks(trainer):
            stack.enter_context(callback.installed(trainer))
        yield


def write_outcome(plan: Plan, results: Mapping[str, Any]) -> None:
    """Writes ``results.json`` and the training curve.

    Raises:
        WriteError: they cannot be written; the checkpoints are complete.
    """
    with writing(plan.run_dir):
        write_json(plan.run_dir / "results.json", results)
        for logger in plan.trainer.loggers:
            if isinstance(logger, CSVLogger) and draw_curve(logger.path, plan.run_dir / "curve.png"):
                log.info("training curve: %s", plan.run_dir / "curve.png")


def collect_results(plan: Plan, module: TrainingModule) -> dict[str, Any]:
    """The run's outcome, for ``results.json`` and a sweep's table."""
    trainer = plan.trainer
    results: dict[str, Any] = {"status": "completed", "global_step": trainer.global_step}
    for name in ("train/loss", "val/loss", "val/bits_per_byte"):
        if name in trainer.callback_metrics:
            results[name] = float(trainer.callback_metrics[name])
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BestCheckpoint):
            results["best/val/loss"], results["best/step"] = callback.best, callback.best_step
    results["targets_seen"] = module.targets_seen
    results["row_tokens_seen"] = module.row_tokens_seen
    results["rows_consumed"] = plan.data.rows_consumed
    results["parameters"] = sum(p.numel() for p in module.model.parameters())
    return results
