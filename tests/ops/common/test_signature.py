"""The signature that tells compiled graphs apart."""

from pathlib import Path

from samu_lm.ops.common.signature import signature_of


def test_any_change_shows(tmp_path: Path) -> None:
    source, record = tmp_path / "a.py", tmp_path / "record.json"
    (tmp_path / "notes.txt").write_text("not code")
    source.write_text("x = 1")
    before = signature_of(tmp_path, record)
    assert signature_of(tmp_path, record) == before
    (tmp_path / "notes.txt").write_text("still not code")
    assert signature_of(tmp_path, record) == before
    record.write_text("{}")
    with_record = signature_of(tmp_path, record)
    source.write_text("x = 2")
    assert len({before, with_record, signature_of(tmp_path, record)}) == 3
