"""``samu-lm bench WHAT``: the measured tables; each kind is a module with the two functions of a command."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

BENCHES = {
    "mixer": ("samu_lm.benchmarks.mixer", "both mixers at the recorded shapes, beside the copy ceiling"),
    "block": ("samu_lm.benchmarks.block", "one residual block: forward, backward and optimizer step, both mixers"),
    "step": ("samu_lm.benchmarks.step", "a whole training step of a model: tokens/s, utilisation, memory, parts"),
    "decode": ("samu_lm.benchmarks.decode", "tokens a second, one after another, as a CUDA graph"),
    "delta": ("samu_lm.benchmarks.delta", "the gated delta rule's implementations: times, memory, errors"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``samu-lm bench``: one sub-command per kind, whose module is imported only when it is asked for."""

    class OnDemand(type(parser)):  # type: ignore[misc]
        """A parser that learns its arguments when it first parses."""

        module = ""

        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            if self.module:
                importlib.import_module(self.module).add_arguments(self)
                self.module = ""
            return super().parse_known_args(args, namespace)

    parser.epilog = "example: samu-lm bench mixer --shapes 1,131072,1024 --output mixer.json"
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True, parser_class=OnDemand)
    for name, (module, text) in BENCHES.items():
        kinds.add_parser(name, help=text, description=text).module = module


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark that was asked for."""
    return int(importlib.import_module(BENCHES[args.what][0]).run(args))
