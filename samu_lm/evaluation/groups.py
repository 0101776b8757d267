"""The groups of eval.yaml that belong to the checkpoint. Importing this module registers them with Hydra."""

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

GROUPS = ("data", "model", "tokenizer")
NAME = "eval_groups"


def register() -> None:
    """Lets any key be set below a group: eval.yaml cannot know the checkpoint's keys.

    Which of them exist is checked against the checkpoint, once it is read.
    """
    node = OmegaConf.create({group: DictConfig({}, flags={"struct": False}) for group in GROUPS})
    ConfigStore.instance().store(NAME, node)


register()
