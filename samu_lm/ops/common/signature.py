"""What a compiled graph must know of the kernels beneath it.

How large a buffer an op keeps for its backward pass follows from tiles, plans and the calibration record. Compilers
write such sizes into their code and keep it on the disk, under a key that is made from the graph alone. So each op
takes its kernels' signature as an argument: another version or another record makes another graph.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def signature_of(*paths: Path) -> str:
    """A digest of files; of folders, their Python files. Absent files count as empty."""
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            digest.update(file.name.encode() + b"\0" + (file.read_bytes() if file.is_file() else b"") + b"\0")
    return digest.hexdigest()[:16]
