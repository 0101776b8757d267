from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from samu_lm.errors import ConfigError
from samu_lm.training.checkpoint_io import AtomicCheckpointIO, CheckpointWriteError, remove_partial_files
from samu_lm.training.checks import check_writable


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A checkpoint that is there already."""
    path = tmp_path / "checkpoints" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": torch.tensor(1)}, path)
    return path


def test_writes_reads_and_leaves_nothing_else(target: Path) -> None:
    AtomicCheckpointIO().save_checkpoint({"step": torch.tensor(2)}, target)
    assert int(AtomicCheckpointIO().load_checkpoint(target)["step"]) == 2
    assert [p.name for p in target.parent.iterdir()] == ["last.ckpt"]


def test_the_file_is_on_the_disk_before_it_gets_its_name(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    AtomicCheckpointIO().save_checkpoint({}, target)
    assert calls == ["fsync", "replace", "fsync"]  # the file, its name, the folder


@pytest.fixture
def _small_files_only() -> Iterator[None]:
    """The system refuses to let a file grow beyond 64 KiB, as a full disk would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("_small_files_only")
def test_a_full_disk_is_one_clear_line_and_keeps_the_previous_file(target: Path) -> None:
    with pytest.raises(CheckpointWriteError, match=r"last\.ckpt: cannot be written \(.*the previous file is unch") as e:
        AtomicCheckpointIO().save_checkpoint({"weights": torch.zeros(2**18)}, target)
    assert "\n" not in str(e.value)
    assert int(AtomicCheckpointIO().load_checkpoint(target)["step"]) == 1
    assert [p.name for p in target.parent.iterdir()] == ["last.ckpt"]


def test_no_space_at_the_last_moment(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointWriteError, match="No space left on device"):
        AtomicCheckpointIO().save_checkpoint({}, target)
    monkeypatch.undo()
    assert int(AtomicCheckpointIO().load_checkpoint(target)["step"]) == 1


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """As somebody whom the folders' permissions bind, which they do not the superuser."""
    if os.getuid() == 0:
        os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        if os.getresuid()[2] == 0:
            os.setresuid(0, 0, 0)


def test_a_folder_that_may_only_be_read() -> None:
    with tempfile.TemporaryDirectory() as made:
        run = Path(made)
        AtomicCheckpointIO().save_checkpoint({"step": torch.tensor(1)}, run / "checkpoints" / "last.ckpt")
        for folder in (run / "checkpoints", run):
            folder.chmod(0o555)
        with unprivileged():
            with pytest.raises(ConfigError, match=r"^hydra\.run\.dir=.*: cannot be written"):
                check_writable(run)
            with pytest.raises(
                CheckpointWriteError, match=r"last\.ckpt: cannot be written \(Permission denied\); the prev"
            ):
                AtomicCheckpointIO().save_checkpoint({"step": torch.tensor(2)}, run / "checkpoints" / "last.ckpt")
        for folder in (run, run / "checkpoints"):
            folder.chmod(0o755)
        assert int(AtomicCheckpointIO().load_checkpoint(run / "checkpoints" / "last.ckpt")["step"]) == 1


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointWriteError, match=r"file/last\.ckpt: cannot be written"):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "file" / "last.ckpt")


def test_leftovers_of_a_crash_are_removed(target: Path) -> None:
    leftover = target.with_name(".last.ckpt.partial")
    leftover.write_bytes(b"PK")
    assert remove_partial_files(target.parent) == [leftover]
    assert [p.name for p in target.parent.iterdir()] == ["last.ckpt"]


@pytest.mark.slow
def test_killed_inside_a_save_the_previous_checkpoint_loads(target: Path) -> None:
    """The child is killed while it writes: the temporary file is growing, the name still holds the old content."""
    script = f"""
        import sys, types
        import torch
        from samu_lm.training.checkpoint_io import AtomicCheckpointIO
        big = {{"step": torch.tensor(2), "weights": [torch.ones(2**20) for _ in range(64)]}}
        while True:
            AtomicCheckpointIO().save_checkpoint(big, {str(target)!r})
            big["step"] += 1
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    partial = target.with_name(".last.ckpt.partial")
    deadline = time.monotonic() + 120
    try:
        for _ in range(3):
            while not partial.exists() or partial.stat().st_size < 2**20:
                assert time.monotonic() < deadline
                assert child.poll() is None
                time.sleep(0.001)
            child.send_signal(signal.SIGSTOP)
            if partial.exists() and partial.stat().st_size < 2**28:
                break
            child.send_signal(signal.SIGCONT)
    finally:
        child.kill()
        child.wait()
    assert partial.exists()
    content = AtomicCheckpointIO().load_checkpoint(target)
    assert int(content["step"]) >= 1
    if int(content["step"]) > 1:
        assert all(torch.equal(w, torch.ones(2**20)) for w in content["weights"])
    assert remove_partial_files(target.parent) == [partial]
