"""Trains a recurrent language model: ``python train.py model=samu_tiny data=stdlib``; see docs/training.md."""

import hydra
from omegaconf import DictConfig

from samu_lm.entry import launch


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg: DictConfig) -> float | None:
    from samu_lm.training.run import train

    return train(cfg)


if __name__ == "__main__":
    launch(main)
