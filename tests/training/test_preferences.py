"""Objectives for pairs: the loss, gradients and metrics of a step do not depend on the mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention.ring import Ring
from jaxsp.attention.strategy import combine
from jaxsp.core.batch import NO_LABEL
from jaxsp.evaluation.evaluator import Evaluator
from jaxsp.objectives import derivatives
from jaxsp.objectives.pair_sums import PairSums
from jaxsp.objectives.pairs import Dpo, Hinge, Ipo, Kto, Orpo, Robust, Simpo
from jaxsp.training import step_gradients
from tests import batches, tolerances
from tests.training import preferences, runs

OBJECTIVES = {
    "dpo": Dpo(label_smoothing=0.1, sft_weight=0.3),
    "hinge": Hinge(beta=0.3),
    "ipo": Ipo(),
    "robust": Robust(label_smoothing=0.2),
    "simpo": Simpo(beta=2.0),
    "orpo": Orpo(),
    "kto": Kto(undesirable_weight=1.3),
}

WEIGHTS = runs.draw_weights(runs.MODEL)
RECORDS = preferences.draw_records()


def make_spec(objective, sizes=(1, 1, 1), *, row_tokens=96, rows=8, rows_per_microbatch=1, **how):
    """A step whose rows hold all pairs of RECORDS."""
    spec = runs.make_spec({}, row_tokens=row_tokens, sizes=sizes)
    config = spec.config.change(
        objective=objective, rows_per_step=rows, rows_per_microbatch=rows_per_microbatch
    )
    choice = batches.attention_choice(seq=sizes[2], **how)
    return dataclasses.replace(spec, config=config, attention=choice)


def compute(spec, records=RECORDS):
    """Gradients by name, and results, of the step of all records."""
    data = preferences.pack(records, spec)
    spec = spec.__class__(**vars(spec) | {"has_split_pairs": data.num_split_pairs > 0})
    batch = preferences.only_batch(data, spec)
    master = runs.put_weights(spec.table, WEIGHTS, spec.mesh)
    function = jax.jit(functools.partial(step_gradients.compute_gradients, spec))
    gradients, results = function(master, batch)
    leaves = jax.tree.map(functools.partial(runs.remove_padding), spec.table, gradients)
    return batches.name_leaves(leaves), jax.device_get(results)


def check_step(objective, spec, records=RECORDS):
    """Compares the loss, gradients and counts of a step with those of the reference."""
    gradients, results = compute(spec, records)
    loss, expected = reference(objective, records)
    assert batches.relative_error(results["loss"], loss) < tolerances.MESH
    for name, leaf in expected.items():
        assert batches.relative_error(gradients[name], leaf) < tolerances.MESH, name
    assert results["num_pairs"] == results["num_chosen"] + results["num_rejected"] * (
        objective.type == "kto"
    )
    return results


@functools.cache
def _reference(objective):
    loss, gradients = preferences.reference(objective, WEIGHTS, RECORDS)
    return loss, batches.name_leaves(gradients)


def reference(objective, records):
    if records is RECORDS:
        return _reference(objective)
    loss, gradients = preferences.reference(objective, WEIGHTS, records)
    return loss, batches.name_leaves(gradients)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_their_derivatives_equal_the_papers_formulas(name):
    config = OBJECTIVES[name]
    rng = np.random.default_rng(0)
    logps_D = jnp.float32(RECORDS.references + rng.standard_normal(len(RECORDS.references)))
    counts_D = np.float32([(labels != NO_LABEL).sum() for labels in RECORDS.labels])
    # two places are not real
    pad = lambda values_D, fill: jnp.float32(
        np.append(values_D, np.full(4, fill, np.float32)).reshape(-1, 2)
    )
    pairs = PairSums(
        logps_P2=pad(logps_D, 0),
        references_P2=pad(RECORDS.references, 0),
        counts_P2=pad(counts_D, 0),
        is_real_P=jnp.arange(preferences.NUM_PAIRS + 2) < preferences.NUM_PAIRS,
        is_desirable_P=jnp.asarray(np.append(RECORDS.is_desirable, [False, True])),
        num_pairs=jnp.float32(preferences.NUM_PAIRS),
        num_first_tokens=jnp.float32(counts_D[::2].sum()),
    )
    losses_P, derivatives_P2 = derivatives.differentiate(config, pairs)
    loss, expected_D = jax.value_and_grad(
        lambda logps_D: preferences.reference_loss(config, logps_D, RECORDS)
    )(logps_D)
    assert batches.relative_error(losses_P.sum() / preferences.NUM_PAIRS, loss) < 1e-6
    derivatives_D = derivatives_P2.ravel() / preferences.NUM_PAIRS
    assert batches.relative_error(derivatives_D[:-4], expected_D) < 1e-5
    assert not derivatives_D[-4:].any()


def strategy(exchange, degree):
    return combine(1, exchange(degree=degree, chunks_per_device=2))


def make_pairs(logps, counts=1.0):
    """Real pairs without references."""
    logps_P2 = jnp.float32(logps)
    return PairSums(
        logps_P2=logps_P2,
        references_P2=jnp.zeros_like(logps_P2),
        counts_P2=jnp.full_like(logps_P2, counts),
        is_real_P=jnp.ones(len(logps), bool),
        is_desirable_P=jnp.ones(len(logps), bool),
        num_pairs=jnp.float32(len(logps)),
        num_first_tokens=jnp.float32(len(logps)),
    )


def test_orpo_is_finite_for_answers_of_probability_1():
    pairs = make_pairs([[0, -5], [-5, 0], [0, 0]])
    losses_P, derivatives_P2 = derivatives.differentiate(OBJECTIVES["orpo"], pairs)
    assert np.isfinite(losses_P).all()
    assert np.isfinite(derivatives_P2).all()


def test_rewards_that_differ_by_rounding_only_are_equal_and_means_of_long_answers_are_not():
    config = OBJECTIVES["simpo"]
    pairs = make_pairs([[-100000, -105000]], counts=100000.0)
    sums = derivatives.measure(config, pairs, jnp.zeros(1))
    assert sums["num_pairs_right"] == 1
    config = OBJECTIVES["dpo"]
    pairs = make_pairs([[-100, -100.00003], [-100, -101]])
    sums = derivatives.measure(config, pairs, jnp.zeros(2))
    assert sums["num_pairs_right"] == 1


MESHES = {
    "one device, 8 microbatches": {"sizes": (1, 1, 1)},
    "data 4, replica 2": {"sizes": (2, 4, 1)},
    "ulysses 4, 2 microbatches of 2 rows": {"sizes": (1, 2, 4), "rows_per_microbatch": 2},
    "ring 3": {"sizes": (1, 2, 3), "strategy": strategy(Ring, 3)},
}


IN_DEFAULT_TIER = ("one device, 8 microbatches", "ulysses 4, 2 microbatches of 2 rows")


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in IN_DEFAULT_TIER else pytest.mark.e2e) for x in MESHES],
)
def test_a_step_is_the_same_on_every_mesh(name):
    check_step(OBJECTIVES["dpo"], make_spec(OBJECTIVES["dpo"], **MESHES[name]))


@pytest.mark.parametrize("rows_per_microbatch", [1])
def test_pairs_in_two_rows_are_those_in_one(rows_per_microbatch):
    """With 1 row per microbatch the two are in different microbatches."""
    spec = make_spec(
        OBJECTIVES["dpo"],
        (1, 1, 2),
        row_tokens=preferences.MAX_TOKENS,
        rows=20,
        rows_per_microbatch=rows_per_microbatch,
    )
    assert preferences.pack(RECORDS, spec).num_split_pairs > 2
    check_step(OBJECTIVES["dpo"], spec)


@pytest.mark.slow
def test_the_reference_point_of_kto_is_that_of_the_whole_step():
    objective = OBJECTIVES["kto"]
    results = check_step(objective, make_spec(objective, (1, 2, 2)))
    assert results["num_chosen"] == RECORDS.is_desirable.sum()


@pytest.mark.slow
def test_other_pairs_do_not_change_the_sums_of_a_document():
    spec = make_spec(OBJECTIVES["dpo"], (1, 2, 2), rows_per_microbatch=4)
    master = runs.put_weights(spec.table, WEIGHTS, spec.mesh)

    def score(records):
        sums = Evaluator(spec, []).score(preferences.pack(records, spec), master)
        return sums.losses_D.reshape(-1, 2)

    before = score(RECORDS)
    after = score(RECORDS.replace_document(7))
    changed = (before != after).any(1)
    assert changed.sum() == 1, "the pair of the changed document"
    other = (before != after)[changed]
    assert other.sum() == 1, "only the changed document"
