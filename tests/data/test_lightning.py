"""The data module under Lightning's loops: epochs, stops, restarts, precision."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from samu_lm.data import Batch, ByteTokenizer, text_data


class Recorder(L.LightningModule):
    """Trains nothing and writes down what it is given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.rows, self.validated = [], []

    def training_step(self, batch, batch_idx):
        assert isinstance(batch, Batch)
        self.rows.append(batch.tokens.clone())
        self.trainer.datamodule.advance(batch.tokens.shape[0] * self.trainer.world_size)
        return self.weight * 1.0

    def validation_step(self, batch, batch_idx):
        self.validated.append((self.global_step, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i:02}.txt").write_text(f"document {i} " * (i + 1))
    return folder


def fit(corpus, folder, steps, resume=None, batch_size=4, num_workers=0, **options):
    data = text_data(ByteTokenizer(), str(corpus), 32, batch_size, val_fraction=0.2, num_workers=num_workers)
    recorder = Recorder()
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = L.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        callbacks=[saver],
        **{"precision": "32-true", **quiet, **options},
    )
    trainer.fit(recorder, datamodule=data, ckpt_path=resume, weights_only=True)
    return recorder, data, trainer


def test_every_stop_and_restart_equals_the_straight_run(corpus, tmp_path, recwarn):
    straight, data, trainer = fit(corpus, tmp_path / "a", 0)
    steps = len(data.train_dataloader())
    total = 3 * steps
    straight, data, trainer = fit(corpus, tmp_path / "a", total)
    assert len(straight.rows) == total
    assert {s for s, _ in straight.validated} == {steps, 2 * steps, total}
    for stop in (1, steps - 1, steps, steps + 1, 2 * steps):
        workers = 2 if stop == steps + 1 else 0
        resumed, again, restarted = fit(
            corpus, tmp_path / "b", total, tmp_path / "a" / f"step={stop}.ckpt", num_workers=workers
        )
        assert torch.equal(torch.cat(resumed.rows), torch.cat(straight.rows[stop:]))
        assert again.state_dict() == data.state_dict()
        assert restarted.current_epoch == trainer.current_epoch
        later = {s for s in (steps, 2 * steps, total) if s > stop}
        assert {s for s, _ in resumed.validated} == later
    assert not [w for w in recwarn if "not resumable" in str(w.message)]


@pytest.mark.parametrize("batch_size", [2, 8])
def test_a_restart_with_another_batch_size_reads_on(corpus, tmp_path, batch_size):
    straight, data, _ = fit(corpus, tmp_path / "a", 12)
    stop = len(data.train_dataloader()) // 2
    resumed, _, _ = fit(corpus, tmp_path / "b", stop + 8, tmp_path / "a" / f"step={stop}.ckpt", batch_size)
    expected = torch.cat(straight.rows[stop:])
    expected, got = (rows[rows.ne(257).any(dim=1)] for rows in (expected, torch.cat(resumed.rows)))
    n = min(len(got), len(expected))
    assert n >= 10
    assert torch.equal(got[:n], expected[:n])


def test_bf16_and_a_stray_distributed_sampler_flag_change_no_batch(corpus, tmp_path):
    plain, _, _ = fit(corpus, tmp_path / "a", 5)
    bf16, _, _ = fit(corpus, tmp_path / "b", 5, precision="bf16-mixed", use_distributed_sampler=True)
    assert torch.equal(torch.cat(plain.rows), torch.cat(bf16.rows))


def test_lightning_leaves_our_loaders_alone_on_two_ranks(corpus, monkeypatch):
    data = text_data(ByteTokenizer(), str(corpus), 32, 4)
    data.setup()
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp_fork", logger=False)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        assert trainer._data_connector._prepare_dataloader(loader, shuffle=True, mode=None) is loader
