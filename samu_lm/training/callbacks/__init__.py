"""Callbacks of a training run, one job each."""

from samu_lm.training.callbacks.checkpoints import BestCheckpoint, LastCheckpoint, NonFiniteError
from samu_lm.training.callbacks.gradient_norm import GradientNorm
from samu_lm.training.callbacks.guard import StepGuard
from samu_lm.training.callbacks.learning_rate import LearningRate
from samu_lm.training.callbacks.memory import Memory
from samu_lm.training.callbacks.mfu import ModelFlopsUtilisation
from samu_lm.training.callbacks.progress import PlainProgress
from samu_lm.training.callbacks.rng import RandomState
from samu_lm.training.callbacks.stop import GracefulStop, StopOnSignal, TimeIsUp
from samu_lm.training.callbacks.throughput import Throughput

__all__ = [
    "BestCheckpoint",
    "GracefulStop",
    "GradientNorm",
    "LastCheckpoint",
    "LearningRate",
    "Memory",
    "ModelFlopsUtilisation",
    "NonFiniteError",
    "PlainProgress",
    "RandomState",
    "StepGuard",
    "StopOnSignal",
    "Throughput",
    "TimeIsUp",
]
