"""Corpora in which every token says which document it is of, and the ledgers of rows read from them."""

from types import SimpleNamespace

import numpy as np
import torch

from samu_lm.data import ByteTokenizer, LMDataModule, Source
from samu_lm.data.mixture import MixtureSource
from samu_lm.data.shards import ShardTokens, shard_name
from samu_lm.data.split import content_hash
from samu_lm.data.store import TokenStore

PAD = ByteTokenizer().pad_id


class NumberedSource(Source):
    """Documents of the given lengths; all tokens of document i are ``first + i``.

    Args:
        lengths: tokens of each document.
        first: number of the first document, above the tokenizer's ids.
        folder: where the tokens lie as shards, ``cuts`` documents each; None keeps them in memory.
        cuts: documents at which a new shard begins.
    """

    def __init__(self, lengths, first=1000, folder=None, cuts=()):
        super().__init__()
        self.lengths, self.first, self.folder, self.cuts = np.asarray(lengths), first, folder, cuts

    def _read(self, unit, skip):
        raise AssertionError("it is tokenized")

    def name(self):
        return "data.path", "numbered"

    def tokenized(self):
        numbers = np.arange(self.first, self.first + len(self.lengths))
        tokens = numbers.repeat(self.lengths).astype("<u2")
        offsets = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        hashes = np.array([content_hash(str(n).encode()) for n in numbers], dtype=np.uint64)
        if self.folder is not None:
            pieces = np.split(tokens, offsets[list(self.cuts)])
            files = [str(self.folder / shard_name(i)) for i in range(len(pieces))]
            for file, piece in zip(files, pieces, strict=True):
                piece.tofile(file)
            tokens = ShardTokens(files, [len(piece) for piece in pieces], "<u2")
        return TokenStore(tokens, offsets, self.lengths.astype(np.int64), hashes, 0, 0)


def lengths(count, seed=0, longest=40):
    """Lengths of documents, short ones and some longer than a row of 16."""
    return np.random.default_rng(seed).integers(1, longest, count)


def corpora(folder):
    """The same kinds of corpora for all tests of order: in memory, in uneven shards, and a mixture of both."""
    many, few = lengths(70), lengths(11, seed=1)
    return {
        "memory": NumberedSource(many),
        "shards": NumberedSource(many, folder=folder, cuts=(1, 60)),
        "mixture": MixtureSource(
            {"many": NumberedSource(many, folder=folder, cuts=(50,)), "few": NumberedSource(few, first=2000)},
            {"many": 0.7, "few": 0.3},
        ),
    }


def module(source, batch_size=4, rank=0, world_size=1, **options):
    """A data module of rows of 16, set up."""
    data = LMDataModule(source, ByteTokenizer(), 16, batch_size, **{"val_fraction": 0.1, **options})
    data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size)
    data.setup()
    return data


def documents_of(row):
    """Numbers of a row's documents in order, each with its tokens there; none in a row that fills up a batch."""
    values, counts = torch.unique_consecutive(row[row != PAD], return_counts=True)
    return tuple(zip(values.tolist(), counts.tolist(), strict=True))


def ledger(modules, rows):
    """What the next rows hold, in the global order, as a run with one module for each rank reads them.

    Ends with the first step that completes ``rows`` rows, pad rows not counted, or the epoch they end in.
    """
    entries = []
    while len(entries) < rows:
        for batches in zip(*(data.train_dataloader() for data in modules), strict=True):
            read = [documents_of(row) for batch in batches for row in batch.tokens]
            entries += [entry for entry in read if entry]
            for data in modules:
                data.advance(data.batch_size * len(modules))
            if len(entries) >= rows:
                break
    return entries
