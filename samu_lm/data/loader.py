"""Batches of a row plan, from any row on, split over ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from samu_lm.data.batch import Batch
from samu_lm.data.packing import Plan
from samu_lm.errors import ConfigError, SamuLMError


class PackedBatch:
    """A batch on its way from a worker process: arrays that are copied through a pipe.

    PyTorch would open a piece of shared memory for each tensor, which for batches of a few megabytes takes longer.
    """

    def __init__(self, batch: Batch) -> None:
        self.ids = torch.stack([batch.tokens, batch.targets]).int().numpy()  # every vocabulary fits
        self.marks = torch.stack([batch.reset, batch.loss_mask]).numpy()

    def unpack(self) -> Batch:
        """The batch."""
        ids, marks = torch.from_numpy(self.ids).long(), torch.from_numpy(self.marks)
        return Batch(ids[0], ids[1], marks[0], marks[1])

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory; called by the loader's own thread."""
        return self.unpack().pin_memory()


class RowDataset(Dataset[Batch | PackedBatch | SamuLMError]):
    """Map-style dataset of batches: item ``i`` is the ``batch_size`` rows of the plan from row ``i`` on.

    An error that the user can act on is the item, so that it leaves a worker process as it is: PyTorch would hand on
    the text of its traceback.
    """

    def __init__(self, plan: Plan, tokens: Any, batch_size: int, pad_id: int) -> None:
        self.plan, self.tokens, self.batch_size, self.pad_id = plan, tokens, batch_size, pad_id

    def __getitem__(self, first_row: int) -> Batch | PackedBatch | SamuLMError:
        try:
            batch = self.plan.rows(self.tokens, first_row, self.batch_size, self.pad_id)
        except SamuLMError as error:
            return error
        return batch if get_worker_info() is None else PackedBatch(batch)


class PackedLoader:
    """Iterates over one epoch's batches from a position on.

    Each step's global batch is the next ``world_size * batch_size`` rows; rank r takes the r-th share of ``batch_size``
    rows. Rows past the epoch's end are all pad, so that every rank sees the same number of batches. ``len`` is the
    number of batches of the whole epoch, also where an iteration starts inside it: Lightning adds the batches it has
    counted before a restart to those it fetches.

    It is no ``torch.utils.data.DataLoader`` (it makes one for each iteration), so that nobody exchanges its sampler:
    the position decides, and the position is known only when an iteration begins.

    Args:
        plan: epoch number, and the row in it from which on it is read, to the epoch's plan.
        num_rows: rows of an epoch, the same in every epoch.
        tokens: what the plan's ``rows`` takes.
        position: called when an iteration begins; rows consumed since the first epoch began, over all ranks.
        rank: this process, from 0.
        world_size: number of processes.
        batch_size: rows a rank and batch.
        pad_id: fills rows.
        num_workers: processes that prepare batches; 0 prepares them in this one. The batches are the same.
    """

    def __init__(
        self,
        plan: Callable[[int, int], Plan],
        num_rows: int,
        tokens: Any,
        position: Callable[[], int],
        *,
        rank: int,
        world_size: int,
        batch_size: int,
        pad_id: int,
        num_workers: int,
    ) -> None:
        self._plan, self._num_rows, self._tokens, self._position = plan, num_rows, tokens, position
        self._rank, self._world_size, self._batch_size = rank, world_size, batch_size
        self._pad_id, self._num_workers = pad_id, num_workers

    def __len__(self) -> int:
        return -(-self._num_rows // (self._world_size * self._batch_size))

    def __iter__(self) -> Iterator[Batch]:
        # The position is taken now, workers start with the first batch: Lightning calls iter() once only to see that
        # it can.
        return self._batches(self._position())

    def _batches(self, rows_consumed: int) -> Iterator[Batch]:
        epoch, row = divmod(rows_consumed, self._num_rows)
        first = row + self._rank * self._batch_size
        step = self._world_size * self._batch_size
        loader = DataLoader(
            RowDataset(self._plan(epoch, row), self._tokens, self._batch_size, self._pad_id),
            batch_size=None,  # an item is a batch
            sampler=range(first, first + self._num_rows - row, step),
            num_workers=self._num_workers,
            collate_fn=_same,
            pin_memory=torch.cuda.is_available(),
            # its own generator: the loader draws a seed for its workers, and that draw must not move the model's
            generator=torch.Generator(),
        )
        with _tokenizer_threads_off():
            iterator = iter(loader)  # workers are forked here
        while True:
            try:
                batch = next(iterator, None)
            except (RuntimeError, OSError, EOFError) as error:
                if not self._num_workers or str(error).startswith("Caught"):  # what a worker raised
                    raise
                remedy = (
                    f"a process that prepares batches died ({' '.join(str(error).split()) or type(error).__name__}); "
                    "the system kills them where memory is short; resume=last goes on from the last checkpoint"
                )
                raise ConfigError("data.num_workers", self._num_workers, remedy) from error
            if batch is None:
                return
            if isinstance(batch, SamuLMError):
                raise batch
            yield batch.unpack() if isinstance(batch, PackedBatch) else batch


class TrainLoader(PackedLoader):
    """The training loader. Its state is the data module's position, which is how Lightning knows it resumes exactly."""

    def __init__(self, state: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None], **options: Any):
        super().__init__(**options)
        self._state, self._load = state, load

    def state_dict(self) -> dict[str, Any]:
        """The data module's state."""
        return self._state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hands a saved state to the data module."""
        self._load(state)


@contextlib.contextmanager
def _tokenizer_threads_off() -> Iterator[None]:
    """For processes forked inside: ``tokenizers`` would warn in each that its threads did not come along."""
    name = "TOKENIZERS_PARALLELISM"
    if name in os.environ:
        yield
        return
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]


def _same(batch: Any) -> Any:
    return batch
