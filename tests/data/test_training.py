"""Training from shards and mixtures through the command line's own path."""

import csv
import multiprocessing
import re

import pytest
from hydra import compose, initialize_config_dir
from lightning.pytorch.callbacks import Callback
from omegaconf import OmegaConf

from samu_lm.config import config_dir
from samu_lm.data import BPETokenizer, TextSource
from samu_lm.errors import ConfigError
from samu_lm.training.run import make_plan
from tests.data.preparing import prepare
from tests.training.entry import train_py
from tests.training.support import differences, load, tiny_config, tiny_overrides, train_tiny, write_corpus


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path)


def shards(corpus, folder, tokenizer=None):
    prepare(TextSource(str(corpus), separator="\\n\\n"), folder, tokenizer)
    return folder


def composed(corpus, *overrides):
    """The tiny run on other data."""
    own = [o for o in tiny_overrides(corpus) if not o.startswith(("data=", "data.path", "data.separator"))]
    data, rest = [o for o in overrides if o.startswith("data=")], [o for o in overrides if not o.startswith("data=")]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose("train", [*data, *own, *rest])


def on_shards(corpus, folder, *overrides):
    return composed(corpus, "data=shards", f"data.path={folder}", *overrides)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_shards_train_as_the_text_does_and_resume_to_the_same_weights(corpus, tmp_path, packing):
    options = [f"data.packing={packing}", "schedule.total_steps=6"]
    folder = shards(corpus, tmp_path / "shards")
    plain = train_tiny(tiny_config(corpus, *options), tmp_path / "plain")
    whole = train_tiny(on_shards(corpus, folder, *options), tmp_path / "whole")
    assert whole.results == plain.results
    short = [*options, "trainer.max_steps=3"]
    train_tiny(on_shards(corpus, folder, *short), tmp_path / "stopped")
    longer = ["trainer.max_steps=6", "resume=last", "data.num_workers=1"]
    train_tiny(on_shards(corpus, folder, *options, *longer), tmp_path / "stopped", overrides=longer)
    ends = [load(tmp_path / name / "checkpoints" / "last.ckpt")["state_dict"] for name in ("whole", "stopped")]
    assert differences(*ends) == []


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_what_the_packing_does_is_in_the_metrics_and_tokens_seen_are_targets(corpus, tmp_path, packing):
    """Half-padded rows: pads are counted as row tokens and never as targets."""
    one_epoch = ["trainer.max_epochs=1", "trainer.max_steps=-1"]
    cfg = tiny_config(corpus, f"data.packing={packing}", "data.seq_len=512", *one_epoch)
    finished = train_tiny(cfg, tmp_path / "run")
    data = finished.plan.data
    with open(tmp_path / "run" / "logs" / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    shares = data.packing_shares()
    assert {float(row["data/padding"]) for row in rows} == {shares["data/padding"]}
    assert {float(row["data/cut_documents"]) for row in rows} == {shares["data/cut_documents"]}
    if packing == "best_fit":
        assert 0.02 < shares["data/padding"] < 0.6
        assert shares["data/cut_documents"] == 0
    else:
        assert shares["data/cut_documents"] > 0
    assert finished.module.targets_seen == data.size("train").targets
    assert finished.module.row_tokens_seen >= data.rows_per_epoch * 512


def test_the_shards_tokenizer_is_taken_and_a_contradicting_one_refused(corpus, tmp_path):
    folder = shards(corpus, tmp_path / "shards", BPETokenizer(280))
    plan = make_plan(on_shards(corpus, folder), tmp_path / "run", None)
    assert plan.data.tokenizer.kind == "bpe"
    assert plan.data.tokenizer.vocab_size <= 280
    with pytest.raises(ConfigError, match=r"tokenizer=bytes: the tokens in .*shards are of tokenizer=bpe; leave"):
        make_plan(on_shards(corpus, folder, "tokenizer=bytes"), tmp_path / "run", None)


def test_a_relative_path_means_the_launch_folder_and_is_saved_whole(corpus, tmp_path, monkeypatch):
    """Of shards, of their tokenizer, and of each source of a mixture."""
    shards(corpus, tmp_path / "shards")
    monkeypatch.chdir(tmp_path)
    saved = make_plan(on_shards(corpus, "shards"), tmp_path / "run", None).config()
    assert saved["data"]["path"] == saved["tokenizer"]["path"] == str(tmp_path / "shards")
    cfg = mixture_config(corpus, "shards")
    saved = make_plan(cfg, tmp_path / "run", None).config()
    assert saved["data"]["sources"]["shards"]["path"] == str(tmp_path / "shards")


def mixture_config(corpus, folder, *overrides):
    sources = (
        f"{{text:{{_target_:samu_lm.data.TextSource,path:'{corpus}',separator:'\\n\\n'}},"
        f"shards:{{_target_:samu_lm.data.ShardSource,path:'{folder}'}}}}"
    )
    mixture = ("data=mixture", f"data.sources={sources}", "data.weights={text:2,shards:1}")
    return composed(corpus, *mixture, *overrides)


def test_a_mixture_trains_and_resumes(corpus, tmp_path):
    (tmp_path / "other").mkdir()
    folder = shards(write_corpus(tmp_path / "other", documents=12, seed=3), tmp_path / "shards")
    options = ["schedule.total_steps=6"]
    train_tiny(mixture_config(corpus, folder, *options), tmp_path / "whole")
    train_tiny(mixture_config(corpus, folder, *options, "trainer.max_steps=3"), tmp_path / "stopped")
    longer = ["trainer.max_steps=6", "resume=last"]
    train_tiny(mixture_config(corpus, folder, *options, *longer), tmp_path / "stopped", overrides=longer)
    ends = [load(tmp_path / name / "checkpoints" / "last.ckpt")["state_dict"] for name in ("whole", "stopped")]
    assert differences(*ends) == []


@pytest.mark.parametrize(
    ("config", "key"), [("shards", "data.path"), ("mixture", "data.sources.shards.path")], ids=["shards", "mixture"]
)
def test_data_that_moved_is_named_on_resume(corpus, tmp_path, monkeypatch, capsys, config, key):
    """Without the group: the command line composes the default data, which has no such key."""
    folder = shards(corpus, tmp_path / "shards")
    make, run = {"shards": on_shards, "mixture": mixture_config}[config], tmp_path / "run"
    train_tiny(make(corpus, folder, "schedule.total_steps=4", "trainer.max_steps=2"), run)
    folder.rename(tmp_path / "moved")
    resumed = [f"hydra.run.dir={run}", "resume=last", "trainer.max_steps=4"]
    assert train_py(monkeypatch, *resumed) == 2
    assert f"error: {key}={folder}: " in capsys.readouterr().err
    assert train_py(monkeypatch, *resumed, f"{key}={tmp_path}/moved") == 0
    content = load(run / "checkpoints" / "last.ckpt")
    assert content["global_step"] == 4
    assert OmegaConf.select(OmegaConf.create(content["samu_lm"]["config"]), key) == f"{tmp_path}/moved"
    assert train_py(monkeypatch, *resumed, "data.sources.none.path=x") == 2
    assert "data.sources" in capsys.readouterr().err
    assert train_py(monkeypatch, f"hydra.run.dir={tmp_path}/new", "resume=auto", "data.path=x") == 2
    assert capsys.readouterr().err.startswith("error: data.path=x: unknown key")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.packing=tight", r"data\.packing=tight: choose concat or best_fit"),
        ("data.weights={text:a,shards:1}", r"data\.weights\.text=a: wrong type str; must be float"),
        ("data.weights={other:1}", r"data\.weights\.other=1: there is no such source; data\.sources has text, shards"),
        ("data.sources.text.pth=x", r"data\.sources\.text\.pth=x: unknown key; did you mean path\?"),
        ("data.sources.text.path=/nowhere", r"data\.sources\.text\.path=/nowhere: no such file or folder"),
    ],
)
def test_refused_by_name(corpus, tmp_path, override, message):
    folder = shards(corpus, tmp_path / "shards")
    with pytest.raises(ConfigError, match=message):
        make_plan(mixture_config(corpus, folder, f"++{override}"), tmp_path / "run", None)


class Killer(Callback):
    """Kills the processes that prepare batches, at a step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 2:
            for child in multiprocessing.active_children():
                child.kill()


@pytest.mark.timeout(120)
def test_a_worker_killed_during_training_ends_the_run(corpus, tmp_path):
    cfg = tiny_config(corpus, "data.num_workers=1", "trainer.max_steps=500", "trainer.val_check_interval=1000000")
    with pytest.raises(Exception) as raised:
        train_tiny(cfg, tmp_path / "run", Killer())
    chain: list[BaseException] = [raised.value]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(before)
    said = " ".join(str(error) for error in chain)
    assert re.search(r"process that prepares batches died|DataLoader worker \(pid \d+\) is killed", said), said
    assert not (tmp_path / "run" / "results.json").exists()


def test_documents_of_uneven_length_give_one_gradient_however_they_are_batched(tmp_path):
    """Documents of 3 and 997 targets, in rows of their own: 2 rows at once, or accumulated one by one."""
    (tmp_path / "corpus.txt").write_text("\n\n".join(["abc" + "d" * n for n in (0, 994)] + ["held out", "held out 2"]))
    ends = []
    for batch_size, accumulated in ((2, 1), (1, 2)):
        name = f"{batch_size}-{accumulated}"
        cfg = tiny_config(
            tmp_path / "corpus.txt",
            "data.seq_len=1000",
            "data.packing=best_fit",
            f"data.batch_size={batch_size}",
            f"trainer.accumulate_grad_batches={accumulated}",
            "trainer.max_steps=1",
            "schedule.warmup_steps=0",
            "data.val_fraction=0.3",
        )
        finished = train_tiny(cfg, tmp_path / name)
        ends.append((finished.module.targets_seen, finished.results["train/loss"]))
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)
    assert ends[0][0] > 1000
