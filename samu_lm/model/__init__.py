"""The language model: mixers, residual block, model, and the state that it carries."""

from samu_lm.model.block import RecurrentBlock
from samu_lm.model.decoder import Decoder
from samu_lm.model.gated_delta import GatedDelta
from samu_lm.model.layers import RMSNorm
from samu_lm.model.lm import RecurrentLM
from samu_lm.model.mixers import RGLRU, SAMU
from samu_lm.model.state import ModelState

__all__ = ["RGLRU", "SAMU", "Decoder", "GatedDelta", "ModelState", "RMSNorm", "RecurrentBlock", "RecurrentLM"]
