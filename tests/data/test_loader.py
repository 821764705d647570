"""The same rows on every mesh, each token read once, by the process that needs it."""

import dataclasses
import threading

import jax
import numpy as np
import pytest

from jaxsp.core.batch import NO_LABEL, PER_TOKEN, SPECS, step_row_index
from jaxsp.core.layout import KEPT_ORDER, Layout
from jaxsp.data import dataset, loader, store
from jaxsp.data.documents import Documents, make_slots
from jaxsp.data.loader import RowPlacement
from jaxsp.data.packing import PackedEpochs
from jaxsp.run import config_file
from jaxsp.system import device_mesh

MESHES = [(1, 1, 8), (1, 2, 4), (2, 2, 2), (1, 8, 1)]


def mesh_of(replica, data, seq):
    sizes = {"replica": replica, "data": data, "seq": seq}
    return device_mesh.make_mesh(sizes, devices=jax.devices()[: replica * data * seq])


def rows_on(config, *mesh, layout=KEPT_ORDER, has_ring_steps=False):
    return RowPlacement(
        mesh=mesh_of(*mesh),
        layout=layout,
        rows_per_step=config.batch.rows_per_step,
        rows_per_microbatch=config.step.microbatch_rows,
        has_ring_steps=has_ring_steps,
    )


def documents_of(lengths, labels=False, row_tokens=32):
    random = np.random.default_rng(0)
    tokens = [random.integers(1, 1000, n, dtype=np.int32) for n in lengths]
    columns = {"tokens": tokens}
    if labels:
        columns["labels"] = [np.where(random.random(len(ids)) < 0.5, ids, -100) for ids in tokens]
    return Documents([store.from_columns(columns)], row_tokens=row_tokens)


def settings_of(*, rows_per_step=16, rows_per_microbatch=1, row_tokens=32, max_segments=5, **data):
    return config_file.parse(
        {
            "run": {"directory": "unused", "steps": 1},
            "model": {"config": {"model_type": "llama"}},
            "data": {
                "train": [{"source": "unused", "format": "tokens"}],
                "row_tokens": row_tokens,
                "max_segments_per_row": max_segments,
                **data,
            },
            "batch": {"rows_per_step": rows_per_step, "rows_per_microbatch": rows_per_microbatch},
            "optimizer": {"learning_rate": 0.1},
        }
    )


def pack(documents, config, *, digests=("x",), **fields):
    return dataset.pack_documents(
        "train", documents, **config.step.packing, digests=digests, **fields
    )


def load(data, config, mesh=(1, 1, 1), **steps):
    schedule = data.make_schedule(config.batch.rows_per_step, **steps)
    return data.make_loader(schedule, rows_on(config, *mesh))


def pipeline_of(documents, *, mesh=(1, 2, 4), epochs=2, first_row=0, layout=KEPT_ORDER, **fields):
    config = settings_of(**fields)
    data = pack(documents, config)
    schedule = data.make_schedule(config.batch.rows_per_step, consumed=first_row, epochs=epochs)
    return data.make_loader(schedule, rows_on(config, *mesh, layout=layout))


def ragged(count=60, seed=1):
    return documents_of(
        [*np.random.default_rng(seed).integers(1, 50, count).tolist(), 100], labels=True
    )


def undealt(given, *, groups, rows_per_microbatch=1):
    """A step's rows in their own order, whatever the mesh."""
    actual = {}
    for name in (field.name for field in dataclasses.fields(given)):
        if getattr(given, name) is None:
            continue
        array = np.asarray(getattr(given, name))
        turns, slots, _ = array.shape
        order = {
            step_row_index(
                turn, slot, num_groups=groups, rows_per_microbatch=rows_per_microbatch
            ): array[turn, slot]
            for turn in range(turns)
            for slot in range(slots)
        }
        actual[name] = np.stack([order[row] for row in range(turns * slots)])
    return actual


def local(array, device):
    (shard,) = [shard for shard in array.addressable_shards if shard.device == device]
    return np.asarray(shard.data)


def test_devices_share_each_row_along_its_length():
    """The first row of issue 2, and the row after it."""
    documents = Documents(
        [store.from_columns({"tokens": [[1, 10, 10, 10, 2, 2], [3, 4, 5, 6, 7, 8]]})]
    )
    feed = pipeline_of(documents, mesh=(1, 1, 2), rows_per_step=2, row_tokens=6, epochs=1)
    ((given, _),) = feed.batches()
    assert given.tokens_BL.shape == (2, 1, 6), "one row at a time, two microbatches"
    turns = {int(local(given.tokens_BL, jax.devices()[0])[turn, 0, 0]): turn for turn in range(2)}
    expected = {
        (1, 0): ([1, 10, 10], [0, 1, 2], [10, 10, 10]),
        (1, 1): ([10, 2, 2], [3, 4, 5], [2, 2, -100]),
        (3, 0): ([3, 4, 5], [0, 1, 2], [4, 5, 6]),
        (3, 1): ([6, 7, 8], [3, 4, 5], [7, 8, -100]),
    }
    for (first, device), (tokens, positions, labels) in expected.items():
        there = [
            local(array, jax.devices()[device])
            for array in (given.tokens_BL, given.positions_BL, given.labels_BL)
        ]
        assert [array[turns[first], 0].tolist() for array in there] == [tokens, positions, labels]


@pytest.mark.parametrize(("degree", "chunks"), [(2, 2), (4, 2), (4, 4)])
def test_devices_get_the_chunks_of_the_layout(degree, chunks):
    """Shards of 8 tokens have chunks from the front, and their mirror images."""
    documents = ragged()
    layout = Layout(degree=degree, chunks_per_device=chunks)
    plain, laid_out = (
        list(pipeline_of(documents, mesh=(1, 2, 4), layout=layout).batches())
        for layout in (KEPT_ORDER, layout)
    )
    order = layout.token_order(32)
    assert order.tolist() != list(range(32))
    for (batch, counts), (other, other_counts) in zip(plain, laid_out, strict=True):
        for name, spec in SPECS.items():
            right = np.asarray(getattr(batch, name))
            right = right[..., order] if spec == PER_TOKEN else right
            assert np.array_equal(np.asarray(getattr(other, name)), right)
        assert np.array_equal(counts.segment_lengths, other_counts.segment_lengths)


def test_rows_are_dealt_to_the_groups_in_turn():
    feed = pipeline_of(
        documents_of([8] * 16),
        mesh=(1, 2, 2),
        rows_per_step=8,
        rows_per_microbatch=2,
        row_tokens=8,
        epochs=1,
    )
    ((given, _), *_) = feed.batches()
    # equally long: they are dealt in their order
    first = [
        int(feed._documents.read_slice(feed._stream.row(row), 0, 1)["tokens"][0])
        for row in range(8)
    ]
    # group 0 gets rows 0, 2, 4, 6 and group 1 the others, two at once
    assert np.asarray(given.tokens_BL)[:, :, 0].tolist() == [
        [first[i] for i in (0, 2, 1, 3)],
        [first[i] for i in (4, 6, 5, 7)],
    ]


def test_a_step_is_the_same_on_every_mesh():
    documents = ragged()
    for rows_per_microbatch in (1, 2):
        runs = []
        for mesh in MESHES:
            feed = pipeline_of(documents, mesh=mesh, rows_per_microbatch=rows_per_microbatch)
            groups = mesh[0] * mesh[1]
            runs.append(
                [
                    (undealt(given, groups=groups, rows_per_microbatch=rows_per_microbatch), counts)
                    for given, counts in feed.batches()
                ]
            )
        for run in runs[1:]:
            for (batch, counts), (other, other_counts) in zip(runs[0], run, strict=True):
                assert all(np.array_equal(batch[name], other[name]) for name in SPECS)
                assert np.array_equal(counts.segment_lengths, other_counts.segment_lengths)
                assert (counts.num_rows, counts.epoch) == (
                    other_counts.num_rows,
                    other_counts.epoch,
                )


def test_arrays_are_split_as_the_step_expects():
    (given, _), *_ = pipeline_of(ragged(), mesh=(2, 2, 2)).batches()
    for name, spec in SPECS.items():
        assert getattr(given, name).sharding.spec == spec
        assert getattr(given, name).dtype == np.int32


def by_work(plans, indices):
    """The slow and obvious order: the most attention work first, then the order of the plan."""
    return sorted(
        indices, key=lambda index: (-sum(int(n) ** 2 for n in plans.row(index).length), index)
    )


def test_the_run_is_every_row_of_every_epoch_and_then_empty_rows():
    """Steps straddle epochs; only the run's last one is filled up."""
    documents = ragged()
    feed = pipeline_of(documents, epochs=3)
    plans = PackedEpochs(documents.segments, row_tokens=32, max_segments=5, seed=0)
    total = plans.count_rows(3)
    assert all(plans.count_rows(epochs) % 16 for epochs in (1, 2, 3)), (
        "epochs must not end with a step here"
    )
    steps = [(undealt(given, groups=2), counts) for given, counts in feed.batches()]
    assert len(steps) == feed.num_steps == -(-total // 16)
    for name in SPECS:
        actual = np.concatenate([step[name] for step, _ in steps])
        order = [
            index
            for first in range(0, total, 16)
            for index in by_work(plans, range(first, min(first + 16, total)))
        ]
        for index, row in enumerate(map(plans.row, order)):
            tokens = documents.read_slice(row, 0, 32)
            slots = make_slots(row, 5)
            whole = tokens | slots
            assert np.array_equal(actual[index], whole[name.split("_")[0]]), (name, index)
        assert np.all(actual[total:] == (-100 if name == "labels_BL" else 0))
    assert (
        sum(int(counts.segment_lengths.sum()) for _, counts in steps)
        == 3 * documents.segments.length.sum()
    )
    assert [counts.num_rows for _, counts in steps] == [16] * (len(steps) - 1) + [
        total - 16 * (len(steps) - 1)
    ]
    assert [counts.epoch for _, counts in steps] == [
        plans.find_epoch(min(16 * k + 15, total - 1)) for k in range(len(steps))
    ]


def test_a_run_continues_at_any_step():
    documents = ragged()
    straight = [undealt(given, groups=2) for given, _ in pipeline_of(documents).batches()]
    for step in range(len(straight) + 1):
        continued = [
            undealt(given, groups=2)
            for given, _ in pipeline_of(documents, first_row=16 * step).batches()
        ]
        assert len(continued) == len(straight) - step
        for batch, other in zip(straight[step:], continued, strict=True):
            assert all(np.array_equal(batch[name], other[name]) for name in SPECS)


class Recorded(Documents):
    """Records every range that is read, by (document, token)."""

    def __init__(self, documents):
        self.__dict__.update(documents.__dict__)
        self.read = []

    def read_slice(self, row, begin, end):
        first = (*row.document[:1].tolist(), *row.offset[:1].tolist())
        self.read.append((first, begin, end))
        return super().read_slice(row, begin, end)


@pytest.mark.parametrize("mesh", MESHES)
def test_each_token_is_read_once(mesh, monkeypatch):
    slots_made = []
    monkeypatch.setattr(
        "jaxsp.data.loader.make_slots",
        lambda row, *others: slots_made.append(row) or make_slots(row, *others),
    )
    documents = Recorded(ragged())
    feed = pipeline_of(documents, mesh=mesh)
    feed.read_step(0)
    assert len(slots_made) == 16, "devices that share a row get its segments from one read"
    assert len(documents.read) == len(set(documents.read)) == 16 * mesh[2]
    assert sum(end - begin for _, begin, end in documents.read) == 16 * 32


def test_a_process_reads_only_its_own_shards(monkeypatch):
    """With devices 1 and 5 of 2 groups x 4 devices, a process has shard 1 of every row."""
    own = [jax.devices()[1], jax.devices()[5]]
    everywhere = jax.sharding.NamedSharding.addressable_devices_indices_map

    def restricted(self, shape):
        return {device: index for device, index in everywhere(self, shape).items() if device in own}

    documents = Recorded(ragged())
    feed = pipeline_of(documents)
    whole = feed.read_step(0)
    documents.read.clear()
    monkeypatch.setattr(jax.sharding.NamedSharding, "addressable_devices_indices_map", restricted)
    step = feed.read_step(0)
    assert {(begin, end) for _, begin, end in documents.read} == {(8, 16)}
    assert len(documents.read) == 16
    assert sorted(step.blocks["tokens_BL"]) == [
        ((0, 8), (0, 1), (8, 16)),
        ((0, 8), (1, 2), (8, 16)),
    ]
    for name, blocks in step.blocks.items():
        assert all(
            np.array_equal(block, whole.blocks[name][span]) for span, block in blocks.items()
        )
    assert np.array_equal(step.counts.segment_lengths, whole.counts.segment_lengths), (
        "counts are the whole step's"
    )


class Failing(Recorded):
    reads_left = 40

    def read_slice(self, row, begin, end):
        self.reads_left -= 1
        if self.reads_left < 0:
            raise OSError("the disk is gone")
        return super().read_slice(row, begin, end)


def test_an_exception_while_reading_reaches_the_caller():
    feed = pipeline_of(Failing(ragged()), mesh=(1, 2, 1), rows_per_step=16)
    given = feed.batches()
    assert len([next(given), next(given)]) == 2
    with pytest.raises(OSError, match="the disk is gone"):
        next(given)


def test_reading_ahead_ends_with_the_iterator():
    before = set(threading.enumerate())
    given = pipeline_of(ragged()).batches()
    next(given)
    (reader,) = set(threading.enumerate()) - before
    given.close()
    reader.join(10)
    assert not reader.is_alive()


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [((1, 1, 2), KEPT_ORDER), ((1, 2, 4), Layout(degree=4, chunks_per_device=2))],
)
def test_weights_go_with_their_labels(mesh, layout):
    """A token's weight is its number plus one half, so that every label's weight is known."""
    tokens = [list(range(100 * i, 100 * i + n)) for i, n in enumerate([40, 7, 33, 1, 20, 64])]
    weights = [[token + 0.5 for token in document] for document in tokens]
    table = store.from_columns({"tokens": tokens, "weights": weights})
    feed = pipeline_of(Documents([table], row_tokens=32), mesh=mesh, layout=layout, epochs=1)
    num_labels = 0
    for given, _ in feed.batches():
        labels = np.asarray(given.labels_BL)
        actual = np.asarray(given.weights_BL)
        assert actual.dtype == np.float32
        assert given.weights_BL.sharding == given.labels_BL.sharding
        assert np.array_equal(actual, np.where(labels == NO_LABEL, 0, labels + 0.5))
        num_labels += int(np.sum(labels != NO_LABEL))
    assert num_labels == sum(len(document) - 1 for document in tokens)


ROWS = {
    "one document": [(0, 96)],
    "over chunks and in one, with gaps": [(1, 9), (12, 3), (16, 50), (70, 26)],
    "one token each": [(token, 1) for token in range(96)],
    "documents of a chunk": [(6 * chunk, 6) for chunk in range(16)],
    "none": [],
}
LAYOUTS = [
    Layout(degree=degree, chunks_per_device=chunks)
    for degree, chunks in ((2, 2), (4, 2), (4, 4), (3, 8), (1, 4))
]


def count(rows, layout):
    places = np.array([place for row in rows for place in row], np.int32).reshape(-1, 2)
    row_starts = np.cumsum([0, *map(len, rows)])
    return loader.count_row_work(
        places[:, 0],
        places[:, 1],
        row_starts,
        row_tokens=96,
        layout=layout,
    )


def count_pairs(row, layout):
    """Twice the pairs before each token, and one more for itself, token by token."""
    device = layout.place_of_token(96) // (96 // layout.degree)
    work = np.zeros((layout.degree, layout.degree), int)
    for start, length in row:
        for query in range(start, start + length):
            for key in range(start, query + 1):
                step = (device[query] - device[key]) % layout.degree
                work[step, device[query]] += 1 if key == query else 2
    return work


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_work_is_the_number_of_pairs_of_tokens(layout):
    work = count(ROWS.values(), layout)
    for (name, row), row_work in zip(ROWS.items(), work, strict=True):
        expected = count_pairs(row, layout)
        if layout.keeps_order:
            expected = expected.sum(keepdims=True)
        np.testing.assert_array_equal(row_work, expected, err_msg=name)
        assert row_work.sum() == sum(length**2 for _, length in row)


def test_one_document_is_balanced_and_groups_wait_for_the_slowest():
    for layout in LAYOUTS:
        work = count([[(0, 96)]], layout)
        assert loader.compute_imbalance(work[None], has_ring_steps=True) == pytest.approx(
            1, abs=0.1
        )
    work = np.array([[[[4, 2], [1, 3]], [[1, 1], [1, 1]]]])
    for has_ring_steps, slowest in ((True, 4 + 3), (False, 5)):
        imbalance = loader.compute_imbalance(work, has_ring_steps=has_ring_steps)
        assert imbalance == pytest.approx(slowest / ((5 + 2) / 2))
    assert loader.compute_imbalance(np.zeros((1, 1, 1, 1)), has_ring_steps=True) == 1
    assert count([[(0, 3), (5, 4)]], KEPT_ORDER).tolist() == [[[25]]]
