"""Recurrences as pure functions: no modules, no config, resets and states throughout."""

from samu_lm.ops.causal_conv1d import causal_conv1d
from samu_lm.ops.gated_delta import gated_delta_rule
from samu_lm.ops.resets import reset_from_cu_seqlens, reset_from_position_ids
from samu_lm.ops.rglru import rglru, rglru_mixer
from samu_lm.ops.samu import samu, samu_controls, samu_mixer

__all__ = [
    "causal_conv1d",
    "gated_delta_rule",
    "reset_from_cu_seqlens",
    "reset_from_position_ids",
    "rglru",
    "rglru_mixer",
    "samu",
    "samu_controls",
    "samu_mixer",
]
