"""What eval.py asks of Hydra before it composes. Importing this module registers the groups that eval.yaml names."""

import re
from collections.abc import Sequence

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

GROUPS = ("data", "model", "tokenizer")
_QUOTED = re.compile(r"""(["']).*\1""", re.DOTALL)


def register_groups() -> None:
    """Lets any key be set below the groups that belong to the checkpoint: eval.yaml cannot know the checkpoint's keys.

    Which of them exist is checked against the checkpoint, once it is read.
    """
    node = OmegaConf.create({group: DictConfig({}, flags={"struct": False}) for group in GROUPS})
    ConfigStore.instance().store("eval_groups", node)


def quote_prompt(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments in which the prompt's text means itself.

    Hydra would read brackets, commas and `${` in `prompt=TEXT` as its own grammar. A text that is already quoted for
    Hydra, as in `'prompt="TEXT"'`, and `prompt=null` are left as they are.
    """
    return [_quote(argument) for argument in arguments]


def _quote(argument: str) -> str:
    key, equals, text = argument.partition("=")
    if key != "prompt" or not equals or text == "null" or (len(text) > 1 and _QUOTED.fullmatch(text)):
        return argument
    # A backslash is a backslash, except before what it escapes: there every one is doubled.
    text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)
    text = re.sub(r"(\\*)'", lambda found: found[1] * 2 + r"\'", text)
    text = re.sub(r"(\\+)$", lambda found: found[1] * 2, text)
    return f"prompt='{text}'"


register_groups()
