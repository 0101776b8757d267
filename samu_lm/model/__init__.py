"""The language model: mixers, residual block, model, and the state that it carries."""

from samu_lm.model.block import RecurrentBlock, RMSNorm
from samu_lm.model.lm import RecurrentLM
from samu_lm.model.mixers import RGLRU, SAMU
from samu_lm.model.state import ModelState

__all__ = ["RGLRU", "SAMU", "ModelState", "RMSNorm", "RecurrentBlock", "RecurrentLM"]
