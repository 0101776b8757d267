"""The `samu-lm COMMAND` console script.

A command is a module with two functions, imported only when its command is the one asked for, so that help is quick:
`add_arguments(parser)` declares its arguments, with an example as `parser.epilog`, and `run(args) -> int` does the
work and returns the exit status. Errors a user can act on (`SamuLMError`) are printed as one line, exit status 2.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from samu_lm import __version__
from samu_lm.errors import SamuLMError


class Command(NamedTuple):
    """Where a command lives and what it does, in one line."""

    module: str
    help: str


COMMANDS: dict[str, Command] = {
    "bench": Command(
        "samu_lm.benchmarks.bench", "measured tables: times and memory on this GPU, as JSON, Markdown and plot"
    ),
    "calibrate": Command(
        "samu_lm.benchmarks.calibrate", "measure candidate plans and write the record that dispatch reads"
    ),
    "explain-dispatch": Command(
        "samu_lm.benchmarks.explain_dispatch", "which kernels each mixer of a shape runs on a GPU, and why"
    ),
    "prepare": Command("samu_lm.prepare", "tokenize a corpus of any size into shards to train on"),
    "export": Command("samu_lm.checkpoint.export", "a checkpoint as safetensors, config and tokenizer, or back"),
    "replay": Command("samu_lm.training.replay", "run a bad optimizer step again, find what is not finite"),
    "compare": Command("samu_lm.evaluation.compare", "one report on several runs: curves, configs, machines"),
    "presets": Command("samu_lm.evaluation.presets", "parameters, FLOPs and state bytes of each model preset"),
}


class _Parser(argparse.ArgumentParser):
    """Prints a fault in the arguments as one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of every command; only the chosen command's module is imported for its arguments."""
    parser = _Parser(
        prog="samu-lm",
        description="Tools beside train.py and eval.py.",
        epilog="example: samu-lm presets",
    )
    parser.add_argument("--version", action="version", version=f"samu-lm {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        described = command.help[0].upper() + command.help[1:] + "."
        subparser = subparsers.add_parser(name, help=command.help, description=described)
        if name == chosen:
            importlib.import_module(command.module).add_arguments(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns its exit status; 2 after an error that the user can act on."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    args = build_parser(chosen).parse_args(arguments)
    try:
        return int(importlib.import_module(COMMANDS[args.command].module).run(args))
    except SamuLMError as error:
        print(f"samu-lm {args.command}: {error}", file=sys.stderr)
        return 2
