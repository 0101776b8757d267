import gzip
import io
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samu_lm.data import StdlibSource, TextSource
from samu_lm.data.sources import split_documents
from samu_lm.errors import ConfigError


def texts(source):
    source.check()
    return list(source.documents())


def test_a_file_is_a_document_in_path_order(tmp_path):
    for name in ("2", "1", "10"):
        (tmp_path / name).write_text(f"text {name}")
    source = TextSource(str(tmp_path))
    assert texts(source) == [b"text 1", b"text 10", b"text 2"]
    assert list(source.documents()) == texts(source)


def test_empty_documents_are_dropped_and_counted(tmp_path):
    (tmp_path / "a").write_text("")
    (tmp_path / "b").write_text("b")
    (tmp_path / "c").write_bytes(b"\xef\xbb\xbf")  # nothing but a byte order mark
    source = TextSource(str(tmp_path))
    assert texts(source) == [b"b"]
    assert source.num_empty == 2
    list(source.documents())
    assert source.num_empty == 2  # of one reading, not of all


def test_crlf_and_byte_order_mark(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\r\n")
    assert texts(TextSource(str(tmp_path))) == [b"one\ntwo\rthree\n"]
    assert texts(TextSource(str(tmp_path), newline="keep")) == [b"one\r\ntwo\rthree\r\n"]


def test_a_separator_finds_the_same_documents_in_crlf_files(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\r\nlines\r\n\r\n\r\n\r\nthree")
    for separator in ("\n\n", "\\n\\n"):  # as a YAML file gives it, as a shell gives it
        source = TextSource(str(tmp_path), separator=separator)
        assert texts(source) == [b"one", b"two\nlines", b"three"]
        assert source.num_empty == 1


def test_a_separator_at_the_end_begins_no_document(tmp_path):
    (tmp_path / "a").write_text("one<|end|>two<|end|>")
    source = TextSource(str(tmp_path), separator="<|end|>")
    assert texts(source) == [b"one", b"two"]
    assert source.num_empty == 0


@settings(max_examples=25, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="ab\n\r", max_size=6), min_size=1, max_size=8),
    block=st.integers(1, 7),
    to_lf=st.booleans(),
    bom=st.booleans(),
)
def test_block_edges_do_not_matter(pieces, block, to_lf, bom):
    raw = ";;".join(pieces).encode()
    text = raw.replace(b"\r\n", b"\n") if to_lf else raw
    expected = text.split(b";;")
    if len(expected) > 1 and not expected[-1]:
        expected.pop()
    lines = [1 + b";;".join(expected[:i]).count(b"\n") for i in range(len(expected))]
    stream = io.BytesIO(b"\xef\xbb\xbf" * bom + raw)
    assert list(split_documents(stream, b";;", to_lf, block)) == list(zip(expected, lines))


def test_an_invalid_byte_is_reported_with_file_and_line(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"good\r\n\r\nbad \xff byte\r\n\r\ngood")
    with pytest.raises(ConfigError, match=rf"data\.path={file}:3: byte 0xff is not UTF-8; .*data\.on_error=skip"):
        texts(TextSource(str(file)))
    with pytest.raises(ConfigError, match=rf"data\.path={file}:3: byte 0xff"):
        texts(TextSource(str(file), separator="\n\n"))
    source = TextSource(str(file), separator="\n\n", on_error="skip")
    assert texts(source) == [b"good", b"good"]
    assert source.num_skipped == 1


def test_a_gzipped_file_is_a_document(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("zipped é".encode()))
    assert texts(TextSource(str(tmp_path))) == ["zipped é".encode()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "ignore"}, "data.on_error=ignore: choose raise"),
        ({"newline": "crlf"}, "data.newline=crlf: choose lf"),
        ({"separator": ""}, "data.separator='': give at least one character"),
    ],
)
def test_bad_options_are_refused_before_reading(tmp_path, options, message):
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=message):
        TextSource(str(tmp_path), **options).check()


def test_a_corpus_of_empty_files_is_refused(tmp_path):
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    with pytest.raises(ConfigError, match=r"data\.path=.*: the corpus is empty: every file there has 0 bytes"):
        TextSource(str(tmp_path)).check()


def test_the_fingerprint_knows_contents_and_options_but_no_names(tmp_path):
    (tmp_path / "a").write_text("one")
    (tmp_path / "b").write_text("one")
    base = TextSource(str(tmp_path / "a"))
    same = TextSource(str(tmp_path / "b"))
    list(same.documents())
    assert base.fingerprint() == same.fingerprint()
    assert base.fingerprint() != TextSource(str(tmp_path / "a"), separator=";").fingerprint()
    before = base.fingerprint()
    (tmp_path / "a").write_text("two")
    os.utime(tmp_path / "a", (1, 1))
    assert base.fingerprint() != before


class TestStdlib:
    def test_documents_are_the_modules_sources_in_path_order(self):
        source = StdlibSource()
        source.check()
        files = [f.relative_to(source._root()).as_posix() for f in source.files()]
        assert files == sorted(files)
        assert {"argparse.py", "json/decoder.py"} <= set(files)
        assert not any(set(f.split("/")) & {"site-packages", "test", "tests", "__pycache__"} for f in files)
        documents = list(source.documents())
        assert sum(map(len, documents)) > 5_000_000
        assert (source._root() / "argparse.py").read_bytes() in documents
        assert len(documents) + source.num_empty + source.num_skipped == len(files)

    def test_tests_can_be_included(self):
        files = StdlibSource(include_tests=True).files()
        assert len(files) >= len(StdlibSource().files())

    def test_a_cap_takes_a_fixed_part_from_all_over_the_library(self):
        source = StdlibSource(max_bytes=500_000)
        files = source.files()
        assert sum(f.stat().st_size for f in files) <= 500_000
        assert files == StdlibSource(max_bytes=500_000).files()
        assert len({f.name[0] for f in files}) > 8
        assert set(files) < set(StdlibSource(max_bytes=1_000_000).files())

    def test_a_cap_below_one_is_refused(self):
        with pytest.raises(ConfigError, match=r"data\.max_bytes=0: give a positive number"):
            StdlibSource(max_bytes=0).check()

    def test_a_python_without_sources_is_an_error(self, monkeypatch, tmp_path):
        monkeypatch.setattr(StdlibSource, "_root", lambda self: tmp_path)
        with pytest.raises(ConfigError, match=r"data=stdlib: no \.py file under"):
            StdlibSource().check()
