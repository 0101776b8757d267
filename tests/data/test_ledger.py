"""Which documents come when: a pure function of (seed, epoch, position), whoever reads them."""

import collections

import pytest

from samu_lm.data.mixture import MixturePlan
from tests.data.numbered import corpora, documents_of, ledger, module

KINDS = ["memory", "shards", "mixture"]
PACKINGS = ["concat", "best_fit"]


@pytest.fixture
def make(tmp_path):
    """Modules of one kind of corpus, one for each rank."""

    def modules(kind, batch_size=4, world_size=1, **options):
        return [module(corpora(tmp_path)[kind], batch_size, rank, world_size, **options) for rank in range(world_size)]

    return modules


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_workers_and_batch_sizes_do_not_change_the_sequence(make, kind, packing):
    """Accumulated batches are batches: (2 rows, 2 accumulated) reads what (4 rows, 1) and (1 row, 2 ranks, 2) read."""
    rows = 2 * make(kind, packing=packing)[0].rows_per_epoch + 5
    straight = ledger(make(kind, packing=packing), rows)
    for batch_size, world_size, workers in ((4, 1, 2), (2, 1, 0), (1, 2, 0), (3, 4, 0), (2, 2, 1)):
        other = ledger(make(kind, batch_size, world_size, num_workers=workers, packing=packing), rows)
        n = min(len(straight), len(other))
        assert n >= rows
        assert other[:n] == straight[:n]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumed_on_other_ranks_and_workers_continues_the_sequence(make, kind, packing):
    """Stopped and resumed twice, in the first epoch and in the second, each time on another layout."""
    per_epoch = make(kind, packing=packing)[0].rows_per_epoch
    rows = 2 * per_epoch + 5
    straight = ledger(make(kind, packing=packing), rows)
    read, state = [], None
    layouts = [(4, 1, 0, 8), (3, 2, 1, per_epoch), (1, 3, 0, rows - per_epoch - 8)]
    for batch_size, world_size, workers, share in layouts:
        modules = make(kind, batch_size, world_size, num_workers=workers, packing=packing)
        for data in modules:
            if state is not None:
                data.load_state_dict(state)
        read += ledger(modules, share)
        assert len({data.rows_consumed for data in modules}) == 1
        state = modules[0].state_dict()
        assert state["rows_consumed"] == len(read)
    n = min(len(straight), len(read))
    assert n >= rows
    assert read[:n] == straight[:n]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", ["memory", "shards"])
def test_every_document_once_an_epoch_with_more_workers_than_shards(make, kind, packing):
    """Fewer shards than workers, shards of 1, 59 and 10 documents, two ranks: every token once, a clean end, and the
    same order on a rerun."""
    runs = []
    for _ in range(2):
        modules = make(kind, 3, 2, num_workers=4, packing=packing)
        runs.append(ledger(modules, modules[0].rows_per_epoch))
    assert runs[0] == runs[1]
    data = make(kind, packing=packing)[0]
    total = collections.Counter()
    for row in runs[0]:
        total.update(dict(row))
    lengths = data.corpus.stores[0].num_bytes
    assert total == {1000 + d: lengths[d] for d in data.corpus.documents["train"][0].tolist()}


@pytest.mark.parametrize("packing", PACKINGS)
def test_shards_and_memory_give_one_sequence(make, packing):
    rows = make("memory", packing=packing)[0].rows_per_epoch
    assert ledger(make("memory", packing=packing), rows) == ledger(make("shards", packing=packing), rows)


def test_best_fit_cuts_only_documents_longer_than_a_row(make):
    data = make("memory", packing="best_fit")[0]
    rows_of = collections.Counter()
    for row in ledger([data], data.rows_per_epoch):
        rows_of.update(dict.fromkeys(dict(row), 1))
    lengths = data.corpus.stores[0].num_bytes
    assert {d: -(-lengths[d - 1000] // 16) for d in rows_of} == rows_of
    shares = data.packing_shares()
    assert shares["data/cut_documents"] == sum(n > 1 for n in rows_of.values()) / len(rows_of)
    places = 16 * data.rows_per_epoch
    assert shares["data/padding"] == (places - sum(lengths[d - 1000] for d in rows_of)) / places


def test_concat_shares_are_those_of_the_rows(make):
    data = make("memory")[0]
    rows_of = collections.Counter()
    for row in ledger([data], data.rows_per_epoch):
        rows_of.update(dict.fromkeys(dict(row), 1))
    assert data.packing_shares()["data/cut_documents"] == sum(n > 1 for n in rows_of.values()) / len(rows_of)
    places = 16 * data.rows_per_epoch
    assert data.packing_shares()["data/padding"] == (places - data.num_train_tokens) / places


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_mixtures_weights_are_exact_over_an_epoch_and_over_every_round(make, packing):
    data = make("mixture", packing=packing)[0]
    entries = ledger([data], 3 * data.rows_per_epoch)
    part = ["few" if row[0][0] >= 2000 else "many" for row in entries]
    assert len({number >= 2000 for row in entries for number, _ in row}) == 2
    for row in entries:
        assert len({number >= 2000 for number, _ in row}) == 1, "a row is of one source"
    for first in range(0, len(part), 10):
        assert collections.Counter(part[first : first + 10]) == {"many": 7, "few": 3}
    orders = {tuple(part[first : first + 10]) for first in range(0, len(part), 10)}
    assert len(orders) > len(part) / 20, "rounds have orders of their own"
    plan = data.corpus.plan(0)
    assert isinstance(plan, MixturePlan)
    assert data.rows_per_epoch == 10 * max(-(-r // w) for r, w in zip(plan.part_rows.tolist(), (7, 3), strict=True))


@pytest.mark.parametrize("packing", PACKINGS)
def test_each_source_of_a_mixture_is_read_through_before_it_comes_again(make, packing):
    data = make("mixture", packing=packing)[0]
    entries = ledger([data], 3 * data.rows_per_epoch)
    for k, (is_mine, first) in enumerate(((lambda n: n < 2000, 1000), (lambda n: n >= 2000, 2000))):
        mine = [row for row in entries if is_mine(row[0][0])]
        rows = int(data.corpus.plan(0).part_rows[k])
        lengths = data.corpus.stores[k].num_bytes
        expected = {first + d: lengths[d] for d in data.corpus.documents["train"][k].tolist()}
        passes = [mine[start : start + rows] for start in range(0, len(mine) - rows + 1, rows)]
        assert len(passes) >= 2
        for one in passes:
            total = collections.Counter()
            for row in one:
                total.update(dict(row))
            assert total == expected
        assert passes[0] != passes[1], "each time in another order"


def test_another_seed_is_another_sequence(make):
    for kind in KINDS:
        one, other = (ledger(make(kind, seed=seed), 30) for seed in (0, 1))
        assert one != other


def test_validation_reads_all_sources_of_a_mixture_in_their_order(make):
    data = make("mixture", val_fraction=0.3)[0]
    read = [documents_of(row) for batch in data.val_dataloader() for row in batch.tokens]
    numbers = [number for row in read for number, _ in row]
    in_order = list(dict.fromkeys(numbers))
    held = data.corpus.documents["val"]
    assert in_order == [1000 + d for d in held[0].tolist()] + [2000 + d for d in held[1].tolist()]
    assert data.size("val").documents == len(in_order)
