"""What the user may say to eval.py, apart from the groups that belong to the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from samu_lm.config import check_config, signature_of, value_matches
from samu_lm.data.files import launch_path
from samu_lm.errors import ConfigError
from samu_lm.evaluation.command_line import GROUPS
from samu_lm.evaluation.generation import Sampling

PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {  # weights, autocast
    "32-true": (torch.float32, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "bf16-true": (torch.bfloat16, None),
}
_SPELLINGS = {"32": "32-true", "bf16": "bf16-mixed"}  # Lightning takes these too


@dataclass(frozen=True)
class Settings:
    """The keys of eval.yaml outside its groups, with the same names and meaning."""

    checkpoint: str
    split: str
    max_rows: int | None
    prompt: str | None
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    num_samples: int
    seed: int
    device: str
    precision: str | None
    compile: bool
    output: str | None

    @classmethod
    def from_config(cls, cfg: DictConfig) -> Settings:
        """Reads and checks the keys.

        Raises:
            ConfigError: a key is unknown, missing, of a wrong type, or its value makes no sense.
        """
        names, hints = signature_of(cls)
        check_config(cfg, dict.fromkeys(names) | {group: _keys(cfg, group) for group in GROUPS})
        values = {name: cfg[name] for name in names}
        for name, value in values.items():
            if name == "precision" and isinstance(value, int):
                values[name] = value = str(value)
            if not value_matches(value, hints[name]):
                hint = (
                    "quote it as text: 'prompt=\"...\"'" if name == "prompt" else f"wrong type {type(value).__name__}"
                )
                raise ConfigError(name, value, hint)
        settings = cls(**values)
        settings._check()
        return settings

    def _check(self) -> None:
        if self.split not in ("val", "train"):
            raise ConfigError("split", self.split, "choose val or train")
        if self.max_rows is not None and self.max_rows < 1:
            raise ConfigError("max_rows", self.max_rows, "must be 1 or more, or null for the whole split")
        if self.precision is not None:
            precision_of(self.precision)
        self.sampling.check()
        self.torch_device()

    @property
    def sampling(self) -> Sampling:
        """The keys that say how to sample."""
        return Sampling(
            self.max_new_tokens, self.temperature, self.top_k, self.top_p, seed=self.seed, num_samples=self.num_samples
        )

    def torch_device(self) -> torch.device:
        """The device to run on.

        Raises:
            ConfigError: no such device here.
        """
        available = torch.cuda.is_available()
        if self.device == "auto":
            return torch.device("cuda" if available else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise ConfigError("device", self.device, "choose auto, cpu, cuda or cuda:N") from error
        if device.type not in ("cpu", "cuda"):
            raise ConfigError("device", self.device, "choose auto, cpu, cuda or cuda:N")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                "device", self.device, f"there are {torch.cuda.device_count()} such devices; choose cpu or auto"
            )
        return device

    def output_folder(self) -> Path:
        """Where results go.

        Raises:
            ConfigError: not given, outside a run of Hydra.
        """
        if self.output is not None:
            return launch_path(self.output)
        if not HydraConfig.initialized():
            raise ConfigError("output", None, "give a folder for the results")
        return Path(HydraConfig.get().runtime.output_dir)


def _keys(cfg: DictConfig, group: str) -> list[str]:
    return [str(key) for key in cfg[group]]


def precision_of(name: str | int, key: str = "precision") -> tuple[torch.dtype, torch.dtype | None]:
    """The weights' type and the type to autocast to (None: no autocast) of a precision by Lightning's name.

    Raises:
        ConfigError: another name.
    """
    known = PRECISIONS.get(_SPELLINGS.get(str(name), str(name)))
    if known is None:
        raise ConfigError(key, name, f"choose one of {', '.join(PRECISIONS)}")
    return known


def overrides_of(cfg: DictConfig, group: str) -> Mapping[str, Any]:
    """What the user set under a group, as plain values."""
    content = OmegaConf.to_container(cfg[group], resolve=True)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}
