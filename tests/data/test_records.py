import gzip
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from samu_lm.data import HubSource, JsonlSource, ParquetSource
from samu_lm.errors import ConfigError


def texts(source):
    source.check()
    return list(source.documents())


def write_lines(file, *lines):
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


GOOD = '{"text": "one"}'
FAULTS = [
    ('{"texts": "x"}', 'no "text" .*texts'),
    ('{"text": null}', '"text" is null, not a string'),
    ('{"text": 3}', '"text" is int, not a string'),
    ('["text"]', "a JSON list, not an object"),
    ("7", "a JSON int, not an object"),
    ('{"text": "x"', "not JSON"),
    ("text", "not JSON"),
    ('{"text": "\\ud800"}', "half of a surrogate pair"),
    ("[" * 100_000, "not JSON"),
]


class TestJsonl:
    def test_each_line_is_a_document_exactly_as_written(self, tmp_path):
        lines = [json.dumps({"text": t, "id": 1}) for t in ("one\r\n", "zwei é", "\ufeffthree")]
        file = tmp_path / "a.jsonl"
        file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([lines[0], "", lines[1], "  ", lines[2]]).encode())
        assert texts(JsonlSource(str(file))) == [b"one\r\n", "zwei é".encode(), "\ufeffthree".encode()]

    def test_another_key_and_a_folder_with_compressed_and_empty_shards(self, tmp_path):
        write_lines(tmp_path / "a.jsonl", '{"body": "1"}')
        (tmp_path / "b.jsonl").touch()
        (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"body": "2"}\n{"body": ""}\n{"body": "3"}'))
        (tmp_path / "notes.md").write_text("not a shard")
        source = JsonlSource(str(tmp_path), text_key="body")
        assert texts(source) == [b"1", b"2", b"3"]
        assert source.num_empty == 1

    @pytest.mark.parametrize(("line", "problem"), FAULTS)
    def test_a_fault_names_file_and_line(self, tmp_path, line, problem):
        file = write_lines(tmp_path / "a.jsonl", GOOD, "", line, GOOD)
        with pytest.raises(ConfigError, match=rf"data\.path={file}:3: .*{problem}.*data\.on_error=skip"):
            texts(JsonlSource(str(file)))

    def test_faults_are_skipped_and_counted_when_asked(self, tmp_path):
        file = write_lines(tmp_path / "a.jsonl", GOOD, *(line for line, _ in FAULTS), '{"text": "two"}')
        source = JsonlSource(str(file), on_error="skip")
        assert texts(source) == [b"one", b"two"]
        assert source.num_skipped == len(FAULTS)

    def test_an_invalid_byte_names_file_and_line(self, tmp_path):
        file = tmp_path / "a.jsonl"
        file.write_bytes(b'{"text": "one"}\n{"text": "\xe9"}\n')
        with pytest.raises(ConfigError, match=rf"{file}:2: byte 0xe9 is not UTF-8"):
            texts(JsonlSource(str(file)))

    def test_a_wrong_text_key_is_found_before_the_corpus_is_read(self, tmp_path):
        file = write_lines(tmp_path / "a.jsonl", '{"text": "one", "id": 3}', "not json")
        with pytest.raises(ConfigError, match=r"data\.text_key=txt: .*a\.jsonl:1 has no such key; its keys: text, id"):
            JsonlSource(str(file), text_key="txt").check()

    @pytest.mark.parametrize("text_key", ["", None, 3])
    def test_a_text_key_that_is_no_name_is_refused(self, text_key):
        with pytest.raises(ConfigError, match=r"data\.text_key=.*: give the name of the field"):
            JsonlSource("x", text_key=text_key).check()


def write_table(file, **columns):
    pq.write_table(pa.table(columns), file, row_group_size=2)
    return file


class TestParquet:
    @pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
    def test_each_row_is_a_document(self, tmp_path, kind):
        write_table(tmp_path / "b.parquet", text=pa.array(["4"], kind), n=[1])
        write_table(tmp_path / "a.parquet", text=pa.array(["1", "zwei é", "", "3"], kind), n=[1, 2, 3, 4])
        source = ParquetSource(str(tmp_path))
        assert texts(source) == [b"1", "zwei é".encode(), b"3", b"4"]
        assert source.num_empty == 1

    def test_nulls_and_invalid_bytes_name_file_and_row(self, tmp_path):
        file = write_table(tmp_path / "a.parquet", text=["1", None, "3"])
        with pytest.raises(ConfigError, match=rf'data\.path={file} row 2: "text" is null'):
            texts(ParquetSource(str(file)))
        source = ParquetSource(str(file), on_error="skip")
        assert texts(source) == [b"1", b"3"]
        assert source.num_skipped == 1
        file = write_table(tmp_path / "b.parquet", text=[b"1", b"2", b"\xff"])
        with pytest.raises(ConfigError, match=rf"data\.path={file} row 3: byte 0xff"):
            texts(ParquetSource(str(file)))

    def test_a_wrong_column_is_found_from_the_schema(self, tmp_path):
        file = write_table(tmp_path / "a.parquet", body=["1"], n=[1])
        with pytest.raises(ConfigError, match=r"data\.text_key=text: .* has no such column; its columns: body, n"):
            ParquetSource(str(file)).check()
        with pytest.raises(ConfigError, match=r"data\.text_key=n: .* holds int64 there; name a column of strings"):
            ParquetSource(str(file), text_key="n").check()

    def test_a_file_that_is_no_parquet_is_named(self, tmp_path):
        (tmp_path / "a.parquet").write_text("nothing of the kind")
        with pytest.raises(ConfigError, match=r"data\.path=.*a\.parquet: not a readable Parquet file"):
            ParquetSource(str(tmp_path)).check()


class TestHub:
    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        folder = tmp_path / "set"
        folder.mkdir()
        write_lines(folder / "train.jsonl", '{"body": "1", "n": 1}', '{"body": null, "n": 2}', '{"body": "3", "n": 3}')
        return folder

    def test_a_local_dataset_is_read_through_datasets(self, folder):
        source = HubSource(str(folder), text_key="body", on_error="skip")
        assert texts(source) == [b"1", b"3"]
        assert source.num_skipped == 1
        assert source.fingerprint() == HubSource(str(folder), text_key="body", on_error="skip").fingerprint()

    def test_faults_name_the_row_and_the_key(self, folder):
        with pytest.raises(ConfigError, match=r'data\.name=.* row 2: "body" is null'):
            texts(HubSource(str(folder), text_key="body"))
        with pytest.raises(ConfigError, match=r"data\.text_key=text: .*it has: body, n"):
            texts(HubSource(str(folder)))
        with pytest.raises(ConfigError, match=r"data\.name=.*datasets cannot load it"):
            texts(HubSource(str(folder), split="nosuch", text_key="body"))

    def test_settings_are_checked_without_the_network(self, monkeypatch):
        with pytest.raises(ConfigError, match=r"data\.name=None: give a dataset of the hub"):
            HubSource(None).check()
        with pytest.raises(ConfigError, match=r"data\.split=: name one split"):
            HubSource("a/b", split="").check()
        HubSource("a/b").check()
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(ConfigError, match=r"data\.name=a/b: needs the package datasets: pip install"):
            HubSource("a/b").check()
