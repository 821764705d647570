"""Objectives for pairs: the loss, gradients and metrics of a step do not depend on the mesh."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention.ring import Ring
from jaxsp.attention.strategy import combine
from jaxsp.core.batch import NO_LABEL, Batch
from jaxsp.data import dataset, store
from jaxsp.data.documents import Documents
from jaxsp.objectives.pairs import Dpo, Hinge, Ipo, Kto, Orpo, PairSums, Robust, Simpo
from jaxsp.training import step_gradients
from tests import batches, tolerances
from tests.training import runs

NUM_PAIRS = 10
MAX_TOKENS = 40
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


@dataclasses.dataclass(frozen=True)
class Records:
    """Records with two documents each: tokens, labels that are not shifted, and references."""

    tokens: list[np.ndarray]
    labels: list[np.ndarray]
    counts: np.ndarray
    """Number of loss tokens of each document."""
    references: np.ndarray
    is_desirable: np.ndarray


def draw_records() -> Records:
    """Random documents, of which a part has labels; references near the log-probabilities."""
    rng = np.random.default_rng(5)
    vocab_size = runs.MODEL.vocab_size
    tokens = []
    labels = []
    for _ in range(NUM_PAIRS):
        prompt = rng.integers(0, vocab_size, rng.integers(1, MAX_TOKENS // 2))
        for _ in range(2):
            answer = rng.integers(0, vocab_size, rng.integers(1, MAX_TOKENS - len(prompt)))
            tokens.append(np.append(prompt, answer).astype(np.int32))
            mask = np.full(len(prompt), NO_LABEL)
            labels.append(np.append(mask, answer).astype(np.int32))
    counts = np.float32([(label != NO_LABEL).sum() for label in labels])
    references = -5 * counts + rng.standard_normal(len(counts))
    return Records(tokens, labels, counts, references, rng.random(NUM_PAIRS) < 0.5)


RECORDS = draw_records()


def make_spec(objective, sizes=(1, 1, 1), *, row_tokens=96, rows=8, rows_per_microbatch=1, **how):
    """A step whose rows hold all pairs of RECORDS."""
    spec = runs.make_spec({}, row_tokens=row_tokens, sizes=sizes)
    config = spec.config.change(
        objective=objective, rows_per_step=rows, rows_per_microbatch=rows_per_microbatch
    )
    choice = batches.attention_choice(seq=sizes[2], **how)
    return dataclasses.replace(spec, config=config, attention=choice)


def pack(spec):
    """Packs the records as tokenized sources are packed."""
    pairs = range(0, 2 * NUM_PAIRS, 2)
    join = lambda arrays: [np.concatenate(arrays[n : n + 2]).tolist() for n in pairs]
    columns: dict[str, Any] = {
        "tokens": join(RECORDS.tokens),
        "labels": join(RECORDS.labels),
        "first_tokens": np.array([len(RECORDS.tokens[n]) for n in pairs], np.int32),
        "place": [f"record {n}" for n in pairs],
        "is_desirable": RECORDS.is_desirable,
        "first_reference": RECORDS.references[::2],
        "second_reference": RECORDS.references[1::2],
    }
    row_tokens = spec.config.row_tokens
    documents = Documents([store.from_columns(columns)], row_tokens=row_tokens)
    return dataset.pack_documents("pairs", documents, **spec.config.packing, digests=["x"])


def log_probabilities(weights: Any) -> jax.Array:
    """Log-probability of the loss tokens of each document, in a row of its own, by reference
    attention, without a mesh."""
    shape = (2 * NUM_PAIRS, MAX_TOKENS)
    arrays = {name: np.zeros(shape, np.int32) for name in ("tokens_BL", "labels_BL")}
    for row, (tokens, labels) in enumerate(zip(RECORDS.tokens, RECORDS.labels, strict=True)):
        arrays["tokens_BL"][row, : len(tokens)] = tokens
        arrays["labels_BL"][row, : len(tokens) - 1] = labels[1:]
        arrays["labels_BL"][row, len(tokens) - 1 :] = NO_LABEL
    lengths = np.array([[len(tokens)] for tokens in RECORDS.tokens], np.int32)
    rows = Batch(
        **jax.tree.map(jnp.asarray, arrays),
        positions_BL=jnp.tile(jnp.arange(MAX_TOKENS), (shape[0], 1)),
        starts_BM=jnp.zeros_like(lengths),
        lengths_BM=jnp.asarray(lengths),
    )
    logps = jax.nn.log_softmax(runs.compute_logits(weights, rows)[0])
    labels = jnp.maximum(rows.labels_BL, 0)
    chosen = jnp.take_along_axis(logps, labels[..., None], axis=-1)[..., 0]
    return jnp.where(rows.labels_BL != NO_LABEL, chosen, 0).sum(1)


def reference_loss(objective: Any, logps: Any) -> Any:
    """Loss of a step, by the formulas of the papers."""
    beta = objective.beta
    counts = RECORDS.counts
    references = np.float32(RECORDS.references)
    chosen = logps[::2] - references[::2]
    rejected = logps[1::2] - references[1::2]
    smoothing = getattr(objective, "label_smoothing", 0.0)
    sigmoid_loss = lambda x: jnp.log1p(jnp.exp(-x))
    smooth_loss = lambda x: (1 - smoothing) * sigmoid_loss(x) + smoothing * sigmoid_loss(-x)
    mean_chosen = logps[::2] / counts[::2]
    mean_rejected = logps[1::2] / counts[1::2]
    match objective.type:
        case "dpo":
            losses = smooth_loss(beta * (chosen - rejected))
        case "hinge":
            losses = jnp.maximum(1 - beta * (chosen - rejected), 0)
        case "ipo":
            losses = (chosen / counts[::2] - rejected / counts[1::2] - 1 / (2 * beta)) ** 2
        case "robust":
            margin = beta * (chosen - rejected)
            losses = (1 - smoothing) * sigmoid_loss(margin) - smoothing * sigmoid_loss(-margin)
            losses = losses / (1 - 2 * smoothing)
        case "simpo":
            losses = smooth_loss(beta * (mean_chosen - mean_rejected) - objective.gamma)
        case "orpo":
            odds = lambda x: jnp.exp(x) / (1 - jnp.exp(x))
            losses = beta * sigmoid_loss(jnp.log(odds(mean_chosen) / odds(mean_rejected)))
        case "kto":
            point = jax.lax.stop_gradient(jnp.maximum(rejected.mean(), 0))
            value = jnp.where(RECORDS.is_desirable, chosen - point, point - chosen)
            factors = (objective.desirable_weight, objective.undesirable_weight)
            factor = np.where(RECORDS.is_desirable, *np.float32(factors))
            losses = factor * (1 - 1 / (1 + jnp.exp(-beta * value)))
    sft_weight = getattr(objective, "sft_weight", 0.0)
    return losses.mean() - sft_weight * logps[::2].sum() / counts[::2].sum()


@functools.cache
def compute_reference(objective: Any) -> tuple[Any, Any]:
    """Loss and gradients of all records as one step."""
    loss = lambda weights: reference_loss(objective, log_probabilities(weights))
    return jax.jit(jax.value_and_grad(loss))(WEIGHTS)


def check_step(objective, spec):
    """Compares the loss, gradients and counts of a step with those of the reference."""
    data = pack(spec)
    spec = dataclasses.replace(spec, has_split_pairs=data.num_split_pairs > 0)
    schedule = data.make_schedule(spec.config.rows_per_step, epochs=1)
    ((batch, _),) = data.make_loader(schedule, spec.placement).batches()
    master = runs.put_weights(spec.table, WEIGHTS, spec.mesh)
    compute = jax.jit(functools.partial(step_gradients.compute_gradients, spec))
    gradients, results = compute(master, batch)
    gradients = batches.name_leaves(jax.tree.map(runs.remove_padding, spec.table, gradients))
    loss, expected = compute_reference(objective)
    assert batches.relative_error(results["loss"], loss) < tolerances.MESH
    for name, leaf in batches.name_leaves(expected).items():
        assert batches.relative_error(gradients[name], leaf) < tolerances.MESH, name
    assert results["num_pairs"] == NUM_PAIRS
    is_unpaired = objective.type == "kto"
    assert results["num_chosen"] == (RECORDS.is_desirable.sum() if is_unpaired else NUM_PAIRS)
    return data


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_their_derivatives_equal_the_papers_formulas(name):
    config = OBJECTIVES[name]
    rng = np.random.default_rng(0)
    logps_D = jnp.float32(RECORDS.references + rng.standard_normal(2 * NUM_PAIRS))
    # two places are not real
    pad = lambda values_D: jnp.pad(jnp.float32(values_D), (0, 4)).reshape(-1, 2)
    pairs = PairSums(
        logps_P2=pad(logps_D),
        references_P2=pad(RECORDS.references),
        counts_P2=pad(RECORDS.counts),
        is_real_P=jnp.arange(NUM_PAIRS + 2) < NUM_PAIRS,
        is_desirable_P=jnp.asarray(np.append(RECORDS.is_desirable, [False, True])),
        num_pairs=jnp.float32(NUM_PAIRS),
        num_first_tokens=jnp.float32(RECORDS.counts[::2].sum()),
    )
    losses_P, derivatives_P2 = config.differentiate(pairs)
    compute = functools.partial(reference_loss, config)
    loss, expected_D = jax.value_and_grad(compute)(logps_D)
    assert batches.relative_error(losses_P.sum() / NUM_PAIRS, loss) < 1e-6
    derivatives_D = derivatives_P2.ravel() / NUM_PAIRS
    assert batches.relative_error(derivatives_D[:-4], expected_D) < 1e-5
    assert not derivatives_D[-4:].any()


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
    assert all(np.isfinite(x).all() for x in OBJECTIVES["orpo"].differentiate(pairs))


def test_rewards_that_differ_by_rounding_only_are_equal_and_means_of_long_answers_are_not():
    for name, pairs in {
        "simpo": make_pairs([[-100000, -105000]], counts=100000.0),
        "dpo": make_pairs([[-100, -100.00003], [-100, -101]]),
    }.items():
        sums = OBJECTIVES[name].sum_metrics(pairs, jnp.zeros(len(pairs.is_real_P)))
        assert sums["num_pairs_right"] == 1


MESHES = {
    "dpo, one device, 8 microbatches": {},
    "dpo, data 4, replica 2": {"sizes": (2, 4, 1)},
    "dpo, ulysses 4, 2 microbatches of 2 rows": {"sizes": (1, 2, 4), "rows_per_microbatch": 2},
    "dpo, ring 3": {
        "sizes": (1, 2, 3),
        "strategy": combine(1, Ring(degree=3, chunks_per_device=2)),
    },
    "kto, whose reference point is that of the whole step": {"sizes": (1, 2, 2)},
}
IN_DEFAULT_TIER = [*MESHES][0:3:2]


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in IN_DEFAULT_TIER else pytest.mark.e2e) for x in MESHES],
)
def test_a_step_is_the_same_on_every_mesh(name):
    objective = OBJECTIVES[name[:3]]
    check_step(objective, make_spec(objective, **MESHES[name]))


def test_pairs_in_two_rows_are_those_in_one():
    """With 1 row per microbatch the two are in different microbatches."""
    spec = make_spec(OBJECTIVES["dpo"], (1, 1, 2), row_tokens=MAX_TOKENS, rows=20)
    assert check_step(OBJECTIVES["dpo"], spec).num_split_pairs > 2
