"""The prompt on the command line is text, whatever it holds."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from samu_lm.evaluation.command_line import quote_prompt
from tests.evaluation.making import composed


@settings(max_examples=25, deadline=None)
@given(st.text(st.sampled_from("ab '\"\\${}[](),=:\n\té#"), max_size=12))
@example("def main(")
@example("Hello, world")
@example("${seed}")
@example("\\${seed} costs $5")
@example("it's")
@example("ends with \\")
@example("12")
def test_prompt_means_itself(text: str) -> None:
    (argument,) = quote_prompt([f"prompt={text}"])
    if argument == f"prompt={text}":  # already quoted for Hydra
        assert text[0] == text[-1]
        assert text[0] in "'\""
    else:
        assert composed("checkpoint=x", argument).prompt == text


@pytest.mark.parametrize(
    "argument", ["prompt=null", "prompt='a, b'", 'prompt="it\'s"', "split=val", "-m", "+prompt=a b"]
)
def test_other_arguments_are_left_alone(argument: str) -> None:
    assert quote_prompt([argument]) == [argument]
