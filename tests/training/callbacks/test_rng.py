from __future__ import annotations

import io
import random

import numpy as np
import torch

from samu_lm.training.callbacks.rng import rng_state, set_rng_state


def draw() -> tuple[float, float, float, float]:
    return random.gauss(0, 1), random.random(), float(np.random.standard_normal()), float(torch.rand(()))


def test_states_survive_a_weights_only_file() -> None:
    draw()  # leaves a second Gaussian waiting in Python's and NumPy's generators
    file = io.BytesIO()
    torch.save(rng_state(), file)
    expected = [draw() for _ in range(700)]
    file.seek(0)
    set_rng_state(torch.load(file, weights_only=True))
    assert [draw() for _ in range(700)] == expected
