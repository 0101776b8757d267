import gzip
import os

import pyarrow as pa
import pytest

from samu_lm.data.files import content_digest, find_files, launch_path, open_binary
from samu_lm.errors import ConfigError


@pytest.fixture
def tree(tmp_path):
    for name in ("b/2.txt", "b/10.txt", "a.txt", "c.md", "z.txt.gz", ".hidden.txt", ".git/x.txt"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(name)
    return tmp_path


def names(files, root):
    return [f.relative_to(root).as_posix() for f in files]


def test_a_folder_is_searched_in_sorted_order_without_hidden_entries(tree):
    assert names(find_files("k", str(tree), ()), tree) == ["a.txt", "b/10.txt", "b/2.txt", "c.md", "z.txt.gz"]
    assert names(find_files("k", str(tree), (".txt",)), tree) == ["a.txt", "b/10.txt", "b/2.txt", "z.txt.gz"]


def test_globs_and_lists_keep_the_entries_order_and_read_a_file_once(tree):
    got = find_files("k", [str(tree / "c.md"), str(tree / "**/*.txt"), str(tree / "a.txt")], ())
    assert names(got, tree) == ["c.md", "a.txt", "b/10.txt", "b/2.txt"]


def test_a_name_with_glob_characters_that_exists_is_that_file(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    (tmp_path / "a1.txt").write_text("y")
    assert names(find_files("k", str(tmp_path / "a[1].txt"), ()), tmp_path) == ["a[1].txt"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "k=None: give a file, a folder"),
        ([], r"k=\[\]: give a file"),
        ("nowhere.txt", "k=nowhere.txt: no such file or folder: /"),
        ("nothing/*.txt", "k=nothing/\\*.txt: no file matches /"),
    ],
)
def test_missing_paths_are_named(path, message):
    with pytest.raises(ConfigError, match=message):
        find_files("k", path, ())


def test_a_folder_without_matching_files_says_what_was_wanted(tree):
    with pytest.raises(ConfigError, match=r"holds no \*\.jsonl or \*\.ndjson"):
        find_files("k", str(tree), (".jsonl", ".ndjson"))


def test_a_broken_link_and_a_pipe_are_refused_and_not_waited_for(tmp_path):
    os.symlink(tmp_path / "gone", tmp_path / "link.txt")
    with pytest.raises(ConfigError, match=r"link\.txt: cannot be read"):
        find_files("k", str(tmp_path), ())
    (tmp_path / "link.txt").unlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe: not a regular file"):
        find_files("k", str(tmp_path), ())


def test_an_unreadable_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read everything
    with pytest.raises(ConfigError, match=r"a\.txt: cannot be read \(permission denied\)"):
        find_files("k", str(tmp_path / "a.txt"), ())


def test_compressed_files_are_read_as_their_contents(tmp_path):
    text = b"line one\nline two\n" * 1000
    (tmp_path / "a.gz").write_bytes(gzip.compress(text[:9000]) + gzip.compress(text[9000:]))
    with pa.output_stream(str(tmp_path / "b.zst"), compression="zstd") as stream:
        stream.write(text)
    (tmp_path / "c").write_bytes(text)
    for name in ("a.gz", "b.zst", "c"):
        with open_binary("k", tmp_path / name) as stream:
            assert stream.readline() == b"line one\n"
            assert stream.read() == text[9:]


@pytest.mark.parametrize("name", ["a.gz", "b.zst"])
@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_a_damaged_compressed_file_is_named(tmp_path, name, damage):
    text = os.urandom(100_000)
    if name == "a.gz":
        (tmp_path / name).write_bytes(gzip.compress(text))
    else:
        with pa.output_stream(str(tmp_path / name), compression="zstd") as stream:
            stream.write(text)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[:50_000] if damage == "cut" else b"no such format" + whole)
    with pytest.raises(ConfigError, match=f"{name}: cannot be read"), open_binary("k", tmp_path / name) as stream:
        stream.read()


def test_a_relative_path_means_the_working_folder_without_hydra(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch_path("x/y") == tmp_path / "x" / "y"
    assert launch_path("~/y").parts[:2] != (str(tmp_path), "~")


def test_a_relative_path_means_the_launch_folder_under_hydra(tmp_path, monkeypatch):
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    monkeypatch.setattr(HydraConfig, "initialized", staticmethod(lambda: True))
    node = OmegaConf.create({"runtime": {"cwd": str(tmp_path)}})
    monkeypatch.setattr(HydraConfig, "get", staticmethod(lambda: node))
    assert launch_path("data.txt") == tmp_path / "data.txt"


def test_the_digest_is_of_contents_and_order_alone(tmp_path):
    for name, text in (("a", "1"), ("b", "2"), ("c", "1")):
        (tmp_path / name).write_text(text)
    a, b, c = (tmp_path / n for n in "abc")
    os.utime(c, (1, 1))
    assert content_digest("k", [a, b]) == content_digest("k", [c, b]) != content_digest("k", [b, a])
    b.write_text("3")
    assert content_digest("k", [a, b]) != content_digest("k", [a, c])
