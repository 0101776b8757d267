"""Evaluates a checkpoint or samples from it: ``python eval.py checkpoint=PATH``; see docs/evaluation.md."""

import sys
from typing import Any

import hydra
from omegaconf import DictConfig

from samu_lm.entry import job_errors, launch
from samu_lm.evaluation.command_line import quote_prompt


@hydra.main(version_base="1.3", config_path="configs", config_name="eval")
def main(cfg: DictConfig) -> dict[str, Any]:
    with job_errors():
        from samu_lm.evaluation.run import evaluate

        return evaluate(cfg)


if __name__ == "__main__":
    sys.argv[1:] = quote_prompt(sys.argv[1:])
    launch(main, "eval")
