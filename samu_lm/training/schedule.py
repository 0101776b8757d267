"""Learning-rate schedules as factors of the peak, counted in optimizer steps.

Step 0 is the first optimizer step. Warm-up rises linearly and reaches the peak at step ``warmup_steps``; its first step
already has a rate above zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from samu_lm.errors import ConfigError


class Schedule(Protocol):
    """What the training module asks of a schedule."""

    total_steps: int | None

    def check(self, total_steps: int | None) -> None: ...

    def factor(self, step: int, total_steps: int) -> float: ...


def _check_common(warmup_steps: int, final_ratio: float, total_steps: int | None) -> None:
    if warmup_steps < 0:
        raise ConfigError("schedule.warmup_steps", warmup_steps, "must not be negative")
    if not 0 <= final_ratio <= 1:
        raise ConfigError("schedule.final_ratio", final_ratio, "must lie between 0 and 1")
    if total_steps is not None and total_steps < 1:
        raise ConfigError("schedule.total_steps", total_steps, "must be at least 1, or null for the run's own steps")


def _check_warmup(warmup_steps: int, total_steps: int | None, own: bool) -> None:
    if total_steps is not None and total_steps > 0 and warmup_steps >= total_steps:
        whole = "schedule.total_steps" if own else "trainer.max_steps"
        raise ConfigError("schedule.warmup_steps", warmup_steps, f"must be below {whole}={total_steps}")


@dataclass(frozen=True)
class Cosine:
    """Warm-up, then half a cosine down to ``final_ratio`` of the peak at the last step.

    Attributes:
        warmup_steps: optimizer steps of linear warm-up.
        final_ratio: the last rate over the peak.
        total_steps: length of the schedule; None takes the run's own number of optimizer steps. Give it where a run is
            to be stopped early and resumed, since a changed ``trainer.max_steps`` changes the schedule otherwise.

    Raises:
        ConfigError: a value is out of range.
    """

    warmup_steps: int = 0
    final_ratio: float = 0.1
    total_steps: int | None = None

    def __post_init__(self) -> None:
        _check_common(self.warmup_steps, self.final_ratio, self.total_steps)
        _check_warmup(self.warmup_steps, self.total_steps, own=True)

    def check(self, total_steps: int | None) -> None:
        """Refuses a warm-up that the run's steps (None where they are not known yet) cannot hold."""
        if self.total_steps is None:
            _check_warmup(self.warmup_steps, total_steps, own=False)

    def factor(self, step: int, total_steps: int) -> float:
        """The rate over its peak at an optimizer step, from 0; constant after the end."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        span = max(1, total_steps - 1 - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        return self.final_ratio + (1 - self.final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class WSD:
    """Warm-up, stable, decay (Hu et al. 2024): the peak held until the last ``decay_steps``, then a straight line down.

    Attributes:
        warmup_steps: optimizer steps of linear warm-up.
        decay_steps: optimizer steps of the final decay; None is a fifth of the schedule.
        final_ratio: the last rate over the peak.
        total_steps: as in :class:`Cosine`.

    Raises:
        ConfigError: a value is out of range.
    """

    warmup_steps: int = 0
    decay_steps: int | None = None
    final_ratio: float = 0.1
    total_steps: int | None = None

    def __post_init__(self) -> None:
        _check_common(self.warmup_steps, self.final_ratio, self.total_steps)
        if self.decay_steps is not None and self.decay_steps < 0:
            raise ConfigError("schedule.decay_steps", self.decay_steps, "must not be negative, or null")
        self._check_parts(self.total_steps, own=True)

    def check(self, total_steps: int | None) -> None:
        """Refuses a warm-up and decay that the run's steps (None where they are not known yet) cannot hold."""
        if self.total_steps is None:
            self._check_parts(total_steps, own=False)

    def factor(self, step: int, total_steps: int) -> float:
        """The rate over its peak at an optimizer step, from 0; constant after the end."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        decay = total_steps // 5 if self.decay_steps is None else self.decay_steps
        into = step - (total_steps - 1 - decay)
        if into <= 0:
            return 1.0
        return 1.0 - (1.0 - self.final_ratio) * min(1.0, into / max(1, decay))

    def _check_parts(self, total_steps: int | None, own: bool) -> None:
        _check_warmup(self.warmup_steps, total_steps, own)
        if total_steps and self.decay_steps is not None and self.warmup_steps + self.decay_steps > total_steps:
            whole = "schedule.total_steps" if own else "trainer.max_steps"
            remedy = f"with warmup_steps={self.warmup_steps} must fit into {whole}={total_steps}"
            raise ConfigError("schedule.decay_steps", self.decay_steps, remedy)
