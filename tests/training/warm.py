"""A process that has everything imported and forks runs of train.py: a start then costs no seconds.

As a program it reads a job (JSON) a line, runs it and answers with the exit statuses of the job's processes. A negative
status is the number of the signal that ended the process.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# The same arithmetic on every x86 processor, for figures that are compared bit by bit.
PORTABLE = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
TIMEOUT = 240
# What a run imports, also where it first needs it.
IMPORTED = (
    "train", "samu_lm.training.run", "samu_lm.training.sweep", "matplotlib.backends.backend_agg",
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor",
)  # fmt: skip


class Warm:
    """The process, as the tests see it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.training.warm"]
        environment = {**os.environ, **PORTABLE, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def train(
        self,
        arguments: Sequence[str],
        output: Path,
        kill: Mapping[str, Any] | None = None,
        ranks: int = 1,
    ) -> list[int]:
        """Runs ``python train.py ARGUMENTS`` and returns each rank's exit status.

        Args:
            arguments: the command line.
            output: file for what the processes print, appended to.
            kill: where the last rank kills itself (see `Killer`); with an ``events`` file alone it only notes events.
            ranks: processes, which find each other as under torchrun.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        job = {"arguments": list(arguments), "output": str(output), "kill": kill, "ranks": ranks, "port": port}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=TIMEOUT)


class Killer:
    """Notes the events of a run in a file, one letter each, and kills the process at one of them or soon after it.

    Letters: ``t`` in a training step, ``v`` in a validation, ``s`` in a save (before and after each write, flush and
    rename).

    Args:
        events: the file.
        letter: kind of the event to kill at; empty for the start of the process.
        number: the how-manieth of this kind, from 1; 0 never kills.
        delay: seconds to wait first, while the run goes on.
        signum: the signal that it sends itself.
    """

    def __init__(
        self, events: str, letter: str = "", number: int = 0, delay: float = 0.0, signum: int = signal.SIGKILL
    ) -> None:
        self.file = os.open(events, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.letter, self.number, self.delay, self.count = letter, number, delay, 0
        self.signum = signum
        if number and not letter:
            self._kill()

    def note(self, letter: str) -> None:
        os.write(self.file, letter.encode())
        if letter == self.letter:
            self.count += 1
            if self.count == self.number:
                self._kill()

    def _kill(self) -> None:
        def after_delay() -> None:
            time.sleep(self.delay)
            os.kill(os.getpid(), self.signum)

        if self.delay:
            threading.Thread(target=after_delay, daemon=True).start()
        else:
            os.kill(os.getpid(), self.signum)

    def watch(self) -> None:
        """Puts itself into the places where events happen."""
        import torch
        from lightning.pytorch.callbacks import Callback

        from samu_lm.training import run as run_module

        def noted(letter: str) -> Any:
            return lambda *args, **kwargs: self.note(letter)

        events = Callback()
        for hook in ("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"):
            setattr(events, hook, noted("t"))
        for hook in ("on_validation_start", "on_validation_batch_end", "on_validation_end"):
            setattr(events, hook, noted("v"))
        build = run_module.build_trainer

        def with_events(*arguments: Any) -> Any:
            trainer = build(*arguments)
            trainer.callbacks.insert(0, events)  # type: ignore[attr-defined]
            return trainer

        run_module.build_trainer = with_events
        for name in ("fsync", "replace", "link"):
            setattr(os, name, self._around(getattr(os, name)))
        torch.save = self._around_writes(torch.save)

    def _around(self, function: Any) -> Any:
        def around(*arguments: Any) -> Any:
            self.note("s")
            result = function(*arguments)
            self.note("s")
            return result

        return around

    def _around_writes(self, save: Any) -> Any:
        killer = self

        class Noted:
            def __init__(self, file: Any) -> None:
                self.file = file

            def write(self, data: Any) -> int:
                killer.note("s")
                written: int = self.file.write(data)
                self.file.flush()
                return written

            def flush(self) -> None:
                self.file.flush()

        def noted_save(content: Any, file: Any, **options: Any) -> None:
            save(content, file if options else Noted(file), **options)  # options: a shard's piece

        return noted_save


def _child(job: dict[str, Any], rank: int) -> None:
    out = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if job["ranks"] > 1:
        os.environ.update(
            LOCAL_RANK=str(rank), RANK=str(rank), NODE_RANK="0", GROUP_RANK="0", TORCHELASTIC_RUN_ID="test",
            WORLD_SIZE=str(job["ranks"]), LOCAL_WORLD_SIZE=str(job["ranks"]),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]),
        )  # fmt: skip
    if job["kill"] and rank == job["ranks"] - 1:
        Killer(**job["kill"]).watch()
    import train
    from samu_lm.config import config_dir
    from samu_lm.entry import launch

    sys.argv = ["train.py", f"--config-path={config_dir()}", *job["arguments"]]
    launch(train.main)


def _fork(job: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _child(job, rank)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _wait(pids: list[int]) -> list[int]:
    deadline = time.monotonic() + TIMEOUT
    statuses: dict[int, int] = {}
    while len(statuses) < len(pids):
        for pid in pids:
            if pid not in statuses:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return [statuses[pid] for pid in pids]


def main() -> None:
    """Reads jobs until the input ends."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections in the children then leave what they share alone
    assert threading.active_count() == 1, "forking a process with threads may leave locks held"
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        job = json.loads(line)
        answers.write(json.dumps(_wait([_fork(job, rank) for rank in range(job["ranks"])])) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
