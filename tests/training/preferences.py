"""Steps with objectives for pairs on any mesh, and the reference that they are compared with."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsp.core.batch import NO_LABEL, Batch
from jaxsp.data import dataset, store
from jaxsp.data.dataset import PackedDataset
from jaxsp.data.documents import Documents
from jaxsp.training.specs import StepSpec
from tests.training import runs

VOCAB_SIZE = runs.MODEL.vocab_size
NUM_PAIRS = 10
MAX_TOKENS = 40


@dataclasses.dataclass(frozen=True)
class Records:
    """Records with two documents each: tokens, labels that are not shifted, and references."""

    tokens: list[np.ndarray]
    labels: list[np.ndarray]
    references: np.ndarray
    is_desirable: np.ndarray


def draw_records(*, num_pairs: int = NUM_PAIRS, max_tokens: int = MAX_TOKENS) -> Records:
    """Random documents, of which a part has labels; references near the log-probabilities."""
    rng = np.random.default_rng(5)
    tokens = []
    labels = []
    for _ in range(num_pairs):
        prompt = rng.integers(0, VOCAB_SIZE, rng.integers(1, max_tokens // 2))
        for _ in range(2):
            answer = rng.integers(0, VOCAB_SIZE, rng.integers(1, max_tokens - len(prompt)))
            tokens.append(np.append(prompt, answer).astype(np.int32))
            mask = np.full(len(prompt), NO_LABEL)
            labels.append(np.append(mask, answer).astype(np.int32))
    counts = np.array([(label != NO_LABEL).sum() for label in labels])
    return Records(
        tokens,
        labels,
        references=-5 * counts + rng.standard_normal(len(counts)),
        is_desirable=rng.random(num_pairs) < 0.5,
    )


def pack(records: Records, spec: StepSpec, *, has_references: bool = True) -> PackedDataset:
    """Packs the records as tokenized sources are packed."""
    pairs = range(0, len(records.tokens), 2)
    join = lambda arrays: [np.concatenate(arrays[n : n + 2]).tolist() for n in pairs]
    columns: dict[str, Any] = {
        "tokens": join(records.tokens),
        "labels": join(records.labels),
        "first_tokens": np.array([len(records.tokens[n]) for n in pairs], np.int32),
        "place": [f"record {n}" for n in pairs],
        "is_desirable": records.is_desirable,
    }
    if has_references:
        columns["first_reference"] = records.references[::2]
        columns["second_reference"] = records.references[1::2]
    row_tokens = spec.config.row_tokens
    documents = Documents([store.from_columns(columns)], row_tokens=row_tokens)
    return dataset.pack_documents("pairs", documents, **spec.config.packing, digests=["x"])


def only_batch(data: PackedDataset, spec: StepSpec) -> Batch:
    """All pairs as one step."""
    schedule = data.make_schedule(spec.config.rows_per_step, epochs=1)
    assert len(schedule) == 1, schedule
    return next(data.make_loader(schedule, spec.placement).batches())[0]


def pad(records: Records) -> Batch:
    """A row for each document."""
    num_rows = len(records.tokens)
    arrays = {
        "tokens_BL": np.zeros((num_rows, MAX_TOKENS), np.int32),
        "labels_BL": np.full((num_rows, MAX_TOKENS), NO_LABEL, np.int32),
        "positions_BL": np.tile(np.arange(MAX_TOKENS, dtype=np.int32), (num_rows, 1)),
        "starts_BM": np.zeros((num_rows, 1), np.int32),
        "lengths_BM": np.zeros((num_rows, 1), np.int32),
    }
    for row, (tokens, labels) in enumerate(zip(records.tokens, records.labels, strict=True)):
        arrays["tokens_BL"][row, : len(tokens)] = tokens
        arrays["labels_BL"][row, : len(tokens) - 1] = labels[1:]
        arrays["lengths_BM"][row] = len(tokens)
    return Batch(**jax.tree.map(jnp.asarray, arrays))


def log_probabilities(weights: Any, rows: Batch) -> jax.Array:
    """Log-probability of the loss tokens of each row, by reference attention, without a mesh."""
    logps = jax.nn.log_softmax(runs.compute_logits(weights, rows)[0])
    has_label = rows.labels_BL != NO_LABEL
    labels = jnp.where(has_label, rows.labels_BL, 0)
    chosen = jnp.take_along_axis(logps, labels[..., None], axis=-1)[..., 0]
    return jnp.where(has_label, chosen, 0).sum(1)


def reference_loss(objective: Any, logps: Any, records: Records) -> Any:
    """Loss of a step, by the formulas of the papers."""
    beta = objective.beta
    counts = np.array([(x != NO_LABEL).sum() for x in records.labels], np.float32)
    references = np.float32(records.references)
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
            value = jnp.where(records.is_desirable, chosen - point, point - chosen)
            factors = (objective.desirable_weight, objective.undesirable_weight)
            factor = np.where(records.is_desirable, *np.float32(factors))
            losses = factor * (1 - 1 / (1 + jnp.exp(-beta * value)))
    sft_weight = getattr(objective, "sft_weight", 0.0)
    return losses.mean() - sft_weight * logps[::2].sum() / counts[::2].sum()


@functools.cache
def _reference_gradients():
    def compute(objective: Any, records: Records, weights: Any, rows: Batch) -> Any:
        loss = lambda weights: reference_loss(objective, log_probabilities(weights, rows), records)
        return jax.value_and_grad(loss)(weights)

    return compute


def reference(objective: Any, weights: Any, records: Records) -> tuple[Any, Any]:
    """Loss and gradients of all records as one step."""
    rows = pad(records)
    compute = functools.partial(_reference_gradients(), objective, records)
    return jax.jit(compute)(weights, rows)
