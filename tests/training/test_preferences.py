"""Objectives for pairs: the loss, gradients and metrics of a step do not depend on the mesh."""

import functools

import jax
import pytest

from jaxsp.config.objective_schema import ObjectiveConfig
from jaxsp.config.schema import MeshConfig
from jaxsp.training import step_gradients
from jaxsp.training.specs import StepSpec
from tests import batches, tolerances
from tests.training import preferences, runs

OBJECTIVES = {
    "dpo": ObjectiveConfig(type="dpo", label_smoothing=0.1, sft_weight=0.3),
    "hinge": ObjectiveConfig(type="hinge", beta=0.3),
    "ipo": ObjectiveConfig(type="ipo"),
    "robust": ObjectiveConfig(type="robust", label_smoothing=0.2),
    "simpo": ObjectiveConfig(type="simpo", beta=2.0),
    "orpo": ObjectiveConfig(type="orpo"),
    "kto": ObjectiveConfig(type="kto", undesirable_weight=1.3),
}

WEIGHTS = runs.draw_weights(runs.MODEL)
RECORDS = preferences.draw_records()


def make_spec(objective, sizes=(1, 1, 1), *, row_tokens=96, rows=8, rows_per_microbatch=1, **how):
    """A step whose rows hold all pairs of RECORDS."""
    base = batches.make_config()
    changes = {
        "objective": objective,
        "data": base.data.model_copy(update={"row_tokens": row_tokens}),
        "batch": base.batch.model_copy(
            update={"rows_per_step": rows, "rows_per_microbatch": rows_per_microbatch}
        ),
        "mesh": MeshConfig(replica=sizes[0], data=sizes[1], seq=sizes[2]),
    }
    return StepSpec(
        config=base.model_copy(update=changes),
        model=runs.MODEL,
        mesh=batches.mesh(*sizes),
        attention=batches.attention_choice(seq=sizes[2], **how),
        num_steps=1,
    )


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


def check_equal(actual, expected):
    for name, leaf in expected.items():
        assert batches.relative_error(actual[name], leaf) < tolerances.MESH, name


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradients_equal_the_papers_formulas(name):
    gradients, results = compute(make_spec(OBJECTIVES[name], (1, 2, 2)))
    loss, expected = preferences.reference(OBJECTIVES[name], WEIGHTS, RECORDS)
    assert batches.relative_error(results["loss"], loss) < tolerances.MESH
    check_equal(gradients, batches.name_leaves(expected))
    assert results["num_pairs"] == preferences.NUM_PAIRS
