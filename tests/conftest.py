"""Test session set-up. The interpreter switch must be in the environment before triton is first imported."""

import os
import sys

os.environ.setdefault("HYDRA_FULL_ERROR", "0")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")

import pytest
import torch

try:  # GPU tests run without it
    from hypothesis import settings
except ImportError:
    pass
else:
    # The same examples on every run; HYPOTHESIS_PROFILE=default looks for others.
    settings.register_profile("repeatable", derandomize=True)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" in item.nodeid.replace(os.sep, "/"):
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1234)


@pytest.fixture(autouse=True)
def _no_hydra_run() -> None:
    """An entry point that an earlier test ran in this process leaves Hydra's launch folder behind."""
    if module := sys.modules.get("hydra.core.hydra_config"):  # not imported here: GPU tests run without Hydra
        module.HydraConfig.instance().cfg = None
