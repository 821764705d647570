"""Rows of real data: counts of an epoch, and the balance that training logs."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention import ring_hops
from jaxsp.config.data_schema import BatchConfig
from jaxsp.core.layout import Layout
from jaxsp.data.packing import dataset
from jaxsp.data.packing.packing import PackedRow
from jaxsp.planner import data_rows
from tests.data.packing import test_loader

LENGTHS = [5, 16, 3, 9, 11, 16, 40, 64, 17, 150, 2, 16]
"""With rows of 16 and 64 tokens, documents of 17 tokens and more go to the long rows."""


def make_data(**fields):
    """Makes the data of LENGTHS in rows of 16 and 64 tokens, and its config."""
    config = test_loader.settings_of(row_tokens=[16, 64], rows_per_step=2, **fields)
    documents = test_loader.documents_of(LENGTHS, row_tokens=64)
    return dataset.pack_documents("train", documents, config, digests=["unused"]), config


def test_an_epoch_has_each_token_once_in_the_rows_of_its_length():
    rows = data_rows.read_rows(*make_data())
    assert list(rows) == [16, 64]
    short, long = (rows[row_tokens].packed for row_tokens in rows)
    assert short.num_tokens == sum(length for length in LENGTHS if length <= 16)
    assert long.num_tokens == sum(length for length in LENGTHS if length > 16)
    assert [short.num_steps, long.num_steps] == [-(-short.num_rows // 8), -(-long.num_rows // 2)]
    for packed in (short, long):
        sampled = [row for step in packed.steps for row in step]
        assert len(packed.steps) == packed.num_steps, "all steps, because they are few"
        assert len(sampled) == packed.num_rows
        lengths = np.concatenate([row.length for row in sampled])
        assert lengths.sum() == packed.num_tokens
        assert len(lengths) == packed.num_segments == packed.segments_per_row * packed.num_rows
        assert packed.padding_fraction == pytest.approx(
            1 - lengths.sum() / (packed.row_tokens * packed.num_rows)
        )


def test_one_document_per_row_is_in_the_shortest_row_that_holds_it():
    rows = data_rows.read_rows(*make_data())
    alone = {
        row_tokens: sorted(
            int(length)
            for step in rows[row_tokens].unpacked.steps
            for row in step
            for length in row.length
        )
        for row_tokens in rows
    }
    # 150 tokens are two whole rows and 22 tokens
    assert alone == {16: [2, 3, 5, 9, 11, 16, 16, 16], 64: [17, 22, 40, 64, 64, 64]}
    assert rows[16].unpacked.num_rows == rows[16].unpacked.num_segments == 8
    assert rows[16].unpacked.num_steps == 1


def test_long_data_is_sampled_at_equal_distances(monkeypatch):
    monkeypatch.setattr(data_rows, "MAX_SAMPLED_STEPS", 3)
    config = test_loader.settings_of(row_tokens=16, rows_per_step=1)
    documents = test_loader.documents_of([16] * 9)
    data = dataset.pack_documents("train", documents, config, digests=["unused"])
    packed = data_rows.read_rows(data, config)[16].packed
    assert packed.num_steps == 9
    sampled = [int(row.document[0]) for step in packed.steps for row in step]
    stream = data.streams[0]
    assert sampled == [int(stream.row(index).document[0]) for index in (0, 4, 8)]


@pytest.mark.parametrize(
    ("mesh", "rows_per_microbatch", "layout", "has_ring_steps"),
    [
        ((1, 2, 4), 2, Layout(degree=4, chunks_per_device=2), True),
        ((2, 2, 2), 1, Layout(degree=2, chunks_per_device=4), False),
        ((1, 4, 2), 1, Layout(), False),
    ],
    ids=["ring", "all-gather with replicas", "whole rows"],
)
def test_the_imbalance_is_the_one_that_training_logs(
    mesh, rows_per_microbatch, layout, has_ring_steps
):
    lengths = np.random.default_rng(0).integers(1, 60, 80).tolist()
    config = test_loader.settings_of(
        row_tokens=64, rows_per_step=8, rows_per_microbatch=rows_per_microbatch, max_segments=8
    )
    documents = test_loader.documents_of(lengths)
    data = dataset.pack_documents("train", documents, config, digests=["unused"])
    schedule = data.make_schedule(config, epochs=1)
    loader = data.make_loader(
        config, schedule, test_loader.rows_on(*mesh, layout=layout, has_ring_steps=has_ring_steps)
    )
    packed = data_rows.read_rows(data, config)[64].packed
    assert len(packed.steps) == len(schedule) > 2
    for step, rows in enumerate(packed.steps):
        balance = data_rows.compute_balance(
            rows,
            row_tokens=64,
            config=config.batch,
            num_groups=mesh[0] * mesh[1],
            layout=layout,
            has_ring_steps=has_ring_steps,
        )
        assert balance.imbalance == loader.read_step(step).counts.imbalance


def make_row(*lengths):
    """Makes a row of segments."""
    zeros = np.zeros(len(lengths), np.int32)
    return PackedRow(document=zeros, offset=zeros, length=np.array(lengths))


@pytest.mark.parametrize(
    ("lengths", "needed", "made"),
    [
        ([64] * 16, 0, 0),
        ([64] * 7 + [128] + [64] * 7, 0, 0),
        ([128] + [64] * 14, 1, 1),
        ([256] + [64] * 12, 3, 7),
        ([1024], 7, 7),
    ],
    ids=["within chunks", "where the dealing turns", "neighbors", "a far hop", "one document"],
)
def test_hops_are_those_of_the_ring(lengths, needed, made):
    layout = Layout(degree=8, chunks_per_device=2)
    row = make_row(*lengths)
    balance = data_rows.compute_balance(
        [row],
        row_tokens=1024,
        config=BatchConfig(rows_per_step=1),
        num_groups=1,
        layout=layout,
        has_ring_steps=True,
    )
    slots = (jnp.asarray(x[None], jnp.int32) for x in (row.starts, row.length))
    is_needed = ring_hops.needs_hop(layout, *slots, row_tokens=1024)
    assert balance.needed_hops * 7 == pytest.approx(float(is_needed.sum()))
    assert (balance.needed_hops * 7, balance.made_hops * 7) == pytest.approx((needed, made))
