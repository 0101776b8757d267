"""``samu-lm bench WHAT``: the measured tables; each kind is a module with the two functions of a command."""

from __future__ import annotations

import argparse
import importlib

BENCHES = {
    "mixer": ("samu_lm.benchmarks.mixer", "both mixers at the recorded shapes, beside the copy ceiling"),
    "block": ("samu_lm.benchmarks.block", "one residual block: forward, backward and optimizer step, both mixers"),
    "step": ("samu_lm.benchmarks.step", "a whole training step of a model: tokens/s, utilisation, memory, parts"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``samu-lm bench``: one sub-command per kind."""
    parser.epilog = "example: samu-lm bench mixer --shapes 1,131072,1024 --output mixer.json"
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, (module, text) in BENCHES.items():
        importlib.import_module(module).add_arguments(kinds.add_parser(name, help=text, description=text))


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark that was asked for."""
    return int(importlib.import_module(BENCHES[args.what][0]).run(args))
