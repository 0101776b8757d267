"""Evaluates a checkpoint or samples from it: ``python eval.py checkpoint=PATH``; see docs/evaluation.md."""

from typing import Any

import hydra
from omegaconf import DictConfig

import samu_lm.evaluation.groups  # noqa: F401  registers the open groups that eval.yaml names
from samu_lm.entry import launch


@hydra.main(version_base="1.3", config_path="configs", config_name="eval")
def main(cfg: DictConfig) -> dict[str, Any]:
    from samu_lm.evaluation.run import evaluate

    return evaluate(cfg)


if __name__ == "__main__":
    launch(main, "eval")
