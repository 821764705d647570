"""Policy losses: formulas are those of TRL, and a step is the same on every mesh."""

import collections
import dataclasses
import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention.ring import Ring
from jaxsp.attention.strategy import combine
from jaxsp.core.batch import NO_LABEL, Batch
from jaxsp.core.errors import UserError
from jaxsp.data import dataset, store
from jaxsp.data.documents import Documents
from jaxsp.data.source import TOKEN_NUMBERS
from jaxsp.objectives.objective import LENGTH, TileTokens
from jaxsp.objectives.policy import Policy
from jaxsp.run import config_file
from jaxsp.training import step_gradients
from tests import batches, messages, tolerances
from tests.training import runs

VOCABULARY = 23
LENGTHS = (40, 2, 5, 33, 17, 24, 9, 38, 3, 30, 12)
MAX_TOKENS = max(LENGTHS)
SEQUENCE = {"importance_sampling_level": "sequence"}
LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {"beta": 0.1, "epsilon_high": 0.28},
    "dapo, a KL term without ratios": {"beta": 0.1, "use_bias_correction_kl": False},
    "dapo, sequence": {**SEQUENCE, "beta": 0.1, "temperature": 0.8},
    "grpo": {"delta": 1.3},
    "grpo, sequence": {**SEQUENCE, "beta": 0.2, "delta": 1.1},
    "dr_grpo": {"max_completion_length": 40, "temperature": 1.3},
    "dr_grpo, sequence": {**SEQUENCE, "max_completion_length": 40},
    "bnpo": {"epsilon": 0.1},
    "bnpo, sequence": SEQUENCE | {"beta": 0.2, "use_bias_correction_kl": False},
    "luspo": SEQUENCE | {"beta": 0.1},
    "cispo": {"epsilon_high": 1.2, "beta": 0.1},
    "cispo, sequence": SEQUENCE | {"epsilon_high": 1.01},
    "sapo": {"temperature": 0.7, "sapo_temperature_pos": 1.4},
    "sapo, sequence": SEQUENCE | {"beta": 0.1},
    "vespo": {"beta": 0.1, "vespo_k_neg": 2.0},
}


def make_objective(name: str, fields: dict[str, Any]) -> Policy:
    return Policy(loss_type=name.split(",")[0], **fields)


@dataclasses.dataclass(frozen=True)
class Trajectories:
    """Trajectories, each in a row: the first ones of `lengths_N` tokens are its own."""

    tokens_NL: np.ndarray
    lengths_N: np.ndarray
    has_loss_NL: np.ndarray
    """True for tokens that the model sampled; False for the first token of each trajectory."""
    numbers: dict[str, np.ndarray]
    """Numbers of the tokens of all trajectories, [trajectories, tokens]."""

    @property
    def has_label_NL(self) -> np.ndarray:
        """True for tokens whose next token has a loss."""
        return np.pad(self.has_loss_NL[:, 1:], ((0, 0), (0, 1)))

    def make_columns(self) -> dict[str, Any]:
        """Columns of a tokenized source."""
        cut = lambda array_NL: [
            row[:length].tolist() for row, length in zip(array_NL, self.lengths_N, strict=True)
        ]
        columns = {
            "tokens": cut(self.tokens_NL),
            "labels": cut(np.where(self.has_loss_NL, self.tokens_NL, NO_LABEL)),
            "place": [f"record {number}" for number in range(len(self.tokens_NL))],
        }
        return columns | {name: cut(self.numbers[name]) for name in TOKEN_NUMBERS}

    def make_rows(self) -> Batch:
        """A row for each trajectory."""
        shape = self.tokens_NL.shape
        arrays = {
            "tokens_BL": self.tokens_NL,
            "labels_BL": np.full(shape, NO_LABEL),  # losses are computed in torch
            "positions_BL": np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)),
            "starts_BM": np.zeros((shape[0], 1), np.int32),
            "lengths_BM": self.lengths_N[:, None].astype(np.int32),
        }
        return Batch(**jax.tree.map(jnp.asarray, arrays))


def draw(*, vocab_size: int, logits_NLV: Any = None) -> Trajectories:
    """Random trajectories, of which half of the tokens have a loss, the last one always.

    Args: logits_NLV: function of the trajectories. Their old_logps are near the model's: some
        ratios are clipped.
    """
    rng = np.random.default_rng(7)
    shape = (len(LENGTHS), MAX_TOKENS)
    lengths_N = np.array(LENGTHS)
    is_inside_NL = np.arange(MAX_TOKENS) < lengths_N[:, None]
    tokens_NL = np.where(is_inside_NL, rng.integers(0, vocab_size, shape), 0).astype(np.int32)
    has_loss_NL = is_inside_NL & (rng.random(shape) < 0.5)
    has_loss_NL[:, 0] = False
    has_loss_NL[np.arange(len(LENGTHS)), lengths_N - 1] = True
    drawn = Trajectories(tokens_NL, lengths_N, has_loss_NL, {})
    logits_NLV = np.asarray(logits_NLV(drawn), np.float64)
    logits_NLV -= np.log(np.exp(logits_NLV).sum(-1, keepdims=True))
    logps_NL = np.zeros(shape)
    rows = np.arange(len(LENGTHS))[:, None]
    logps_NL[:, 1:] = logits_NLV[rows, np.arange(MAX_TOKENS - 1), tokens_NL[:, 1:]]
    near = lambda: np.where(has_loss_NL, logps_NL + rng.normal(0.1, 0.3, shape), 0)
    advantages_N1 = rng.normal(0.8, 1, (len(LENGTHS), 1))
    numbers = {
        "advantages": advantages_N1 * np.ones(shape),
        "old_logps": near(),
        "ref_logps": near(),
    }
    numbers = {name: array.astype(np.float32) for name, array in numbers.items()}
    return dataclasses.replace(drawn, numbers=numbers)


def with_token_advantages(trajectories: Trajectories) -> Trajectories:
    """The same with an advantage of its own for each token."""
    advantages_NL = np.random.default_rng(8).normal(0.8, 1, trajectories.tokens_NL.shape)
    numbers = trajectories.numbers | {"advantages": advantages_NL.astype(np.float32)}
    return dataclasses.replace(trajectories, numbers=numbers)


def compute_in_trl(
    objective: Policy, trajectories: Trajectories, logits_NLV: Any
) -> tuple[float, np.ndarray, dict[str, float]]:
    """Loss, gradient of the logits and metrics of TRL, in float64, with all trajectories as one
    batch of one device."""
    trl = pytest.importorskip("trl.trainer.grpo_trainer")
    torch = trl.torch
    mask = torch.tensor(trajectories.has_loss_NL[:, 1:]).double()
    tokens = torch.tensor(trajectories.tokens_NL[:, 1:]).long()
    logits = torch.tensor(np.asarray(logits_NLV), dtype=torch.float64, requires_grad=True)
    logps_NLV = (logits[:, :-1] / objective.temperature).log_softmax(-1)
    logps = logps_NLV.gather(-1, tokens[..., None])[..., 0]
    entropies = -(logps_NLV.exp() * logps_NLV).sum(-1)
    number = lambda name: torch.tensor(trajectories.numbers[name][:, 1:]).double()
    names = ("loss_type", "importance_sampling_level", "beta", "max_completion_length")
    trainer = types.SimpleNamespace(
        args=types.SimpleNamespace(**dict(objective), steps_per_generation=1),
        **{name: getattr(objective, name) for name in names},
        epsilon_low=objective.epsilon,
        epsilon_high=objective.epsilon
        if objective.epsilon_high is None
        else objective.epsilon_high,
        model=types.SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=types.SimpleNamespace(
            num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x
        ),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        get_gamma_weights=trl.GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *args, **fields: (logps, entropies, None),
        _metrics={"train": collections.defaultdict(list)},
    )
    inputs = {
        "prompt_ids": tokens[:, :0],
        "prompt_mask": mask[:, :0],
        "completion_ids": tokens,
        "completion_mask": mask,
        "advantages": number("advantages"),
        "old_per_token_logps": number("old_logps"),
        "ref_per_token_logps": number("ref_logps"),
        "num_items_in_batch": mask.sum(),
    }
    loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    return loss.item(), logits.grad.numpy(), metrics


def compute_in_tiles(objective, drawn, logits_NLV):
    """Loss, gradient of the logits, and sums, from one tile of all tokens."""
    has_label_NL = drawn.has_label_NL
    flat = lambda array_NL: jnp.asarray(np.roll(array_NL, -1, axis=1).ravel())
    numbers = {name: flat(drawn.numbers[name]) for name in objective.needs}
    lengths_NL = np.broadcast_to(has_label_NL.sum(1, keepdims=True), has_label_NL.shape)
    numbers[LENGTH] = jnp.asarray(lengths_NL.ravel(), jnp.float32)
    logits_XV = jnp.asarray(logits_NLV, jnp.float32).reshape(-1, logits_NLV.shape[-1])
    tokens = TileTokens(logits_XV=logits_XV, labels_X=flat(drawn.tokens_NL), numbers=numbers)
    if objective.has_document_sums:
        for name, values_X in objective.sum_over_documents(tokens).items():
            sums_N1 = jnp.where(has_label_NL, values_X.reshape(has_label_NL.shape), 0).sum(1)
            numbers[name] = jnp.repeat(sums_N1, has_label_NL.shape[1])
    counts = {
        "num_loss_tokens": float(has_label_NL.sum()),
        "num_trajectories": float(len(has_label_NL)),
    }

    def compute(logits_XV):
        losses_X, measured = objective.losses(dataclasses.replace(tokens, logits_XV=logits_XV))
        keep = lambda x_X: jnp.where(has_label_NL.ravel(), x_X, 0).sum()
        return keep(losses_X) / objective.find_divisor(counts), jax.tree.map(keep, measured)

    (loss, sums), gradient = jax.value_and_grad(compute, has_aux=True)(logits_XV)
    return loss, gradient.reshape(logits_NLV.shape), sums


@functools.cache
def draw_logits():
    shape = (len(LENGTHS), MAX_TOKENS, VOCABULARY)
    return np.random.default_rng(3).normal(0, 1.5, shape).astype(np.float32)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_gradients_and_metrics_are_those_of_trl(name):
    objective = make_objective(name, LOSSES[name])
    logits_NLV = draw_logits()
    drawn = draw(vocab_size=VOCABULARY, logits_NLV=lambda drawn: logits_NLV)
    if not objective.needs_equal:
        drawn = with_token_advantages(drawn)
    loss, gradient, sums = compute_in_tiles(objective, drawn, logits_NLV)
    expected, expected_gradient, metrics = compute_in_trl(objective, drawn, logits_NLV)
    assert batches.relative_error(loss, expected) < 1e-6
    assert batches.relative_error(gradient, expected_gradient) < 1e-5
    num_tokens = float(drawn.has_loss_NL.sum())
    assert batches.relative_error(sums["entropy"] / num_tokens, metrics["entropy"]) < 1e-6
    if objective.beta:
        assert batches.relative_error(sums["reference_kl"] / num_tokens, metrics["kl"]) < 1e-6
    if objective.needs_equal:
        return  # TRL's means are over trajectories
    if objective.loss_type == "cispo":
        high = metrics["cispo_clip_ratio"]
    elif "clip_low" in sums:
        high = metrics["clip_ratio/high_mean"]
        assert 0 < metrics["clip_ratio/low_mean"] == pytest.approx(sums["clip_low"] / num_tokens)
    else:
        return
    assert 0 < high == pytest.approx(sums["clip_high"] / num_tokens)


WEIGHTS = runs.draw_weights(runs.MODEL)


@jax.jit
def _compute_logits(weights: Any, rows: Batch) -> jax.Array:
    return runs.compute_logits(weights, rows)[0]


@jax.jit
def pull(weights: Any, rows: Batch, dlogits: jax.Array) -> Any:
    """Weight gradients from those of the logits of reference attention."""
    return jax.vjp(lambda weights: _compute_logits(weights, rows), weights)[1](dlogits)[0]


def compute_logits(drawn):
    return _compute_logits(WEIGHTS, drawn.make_rows())


@functools.cache
def draw_for_model():
    return draw(vocab_size=runs.MODEL.vocab_size, logits_NLV=compute_logits)


class Case(NamedTuple):
    sizes: tuple[int, int, int]
    loss: str
    fields: dict[str, Any]
    rows_per_microbatch: int = 1
    strategy: Any = None


RING_3 = combine(1, Ring(degree=3, chunks_per_device=2))

MESHES = {
    "one device": Case((1, 1, 1), "dr_grpo", {"max_completion_length": 40}),
    "1x8": Case((1, 1, 8), "dapo", {"beta": 0.1, "temperature": 0.7}, 4),
    "2x4": Case((1, 2, 4), "grpo", SEQUENCE | {"beta": 0.2, "temperature": 0.8}, 2),
    "8x1": Case((1, 8, 1), "sapo", {"beta": 0.1}),
    "ring of 3": Case((1, 1, 3), "vespo", {"temperature": 1.2}, 2, RING_3),
    "replica 2": Case((2, 2, 2), "cispo", {"epsilon_high": 1.2}),
}


def make_spec(case):
    """A step of 8 rows, of which not all have trajectories."""
    spec = runs.make_spec({}, row_tokens=48, sizes=case.sizes)
    config = spec.config.change(
        objective=make_objective(case.loss, case.fields),
        rows_per_step=8,
        rows_per_microbatch=case.rows_per_microbatch,
        max_segments=5,
    )
    choice = batches.attention_choice(seq=case.sizes[2], strategy=case.strategy)
    return dataclasses.replace(spec, config=config, attention=choice)


def only_batch(spec, drawn):
    """All trajectories as one step, packed as tokenized sources are packed."""
    documents = Documents(
        [store.from_columns(drawn.make_columns())],
        row_tokens=spec.config.row_tokens,
        numbers=spec.objective.needs,
        equal_numbers=spec.objective.needs_equal,
    )
    packing = spec.config.packing
    data = dataset.pack_documents("trajectories", documents, **packing, digests=["x"])
    schedule = data.make_schedule(spec.config.rows_per_step, epochs=1)
    ((batch, counts),) = data.make_loader(schedule, spec.placement).batches()
    assert 1 < counts.num_rows < len(LENGTHS)
    return batch


IN_DEFAULT_TIER = ("1x8", "2x4")


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in IN_DEFAULT_TIER else pytest.mark.e2e) for x in MESHES],
)
def test_a_step_is_that_of_trl_on_every_mesh(name, small_shards):
    spec = make_spec(MESHES[name])
    objective = spec.objective
    drawn = draw_for_model()
    if not objective.needs_equal:
        drawn = with_token_advantages(drawn)
    batch = only_batch(spec, drawn)
    master = runs.put_weights(spec.table, WEIGHTS, spec.mesh)
    compute = jax.jit(functools.partial(step_gradients.compute_gradients, spec))
    gradients, results = compute(master, batch)
    loss, dlogits, metrics = compute_in_trl(objective, drawn, compute_logits(drawn))
    expected = batches.name_leaves(pull(WEIGHTS, drawn.make_rows(), jnp.float32(dlogits)))
    leaves = batches.name_leaves(jax.tree.map(runs.remove_padding, spec.table, gradients))
    assert batches.relative_error(results["loss"], loss) < tolerances.MESH
    for leaf, right in expected.items():
        assert batches.relative_error(leaves[leaf], right) < tolerances.MESH, leaf
    assert batches.relative_error(results["entropy"], metrics["entropy"]) < tolerances.MESH
    counts = {x: int(results[x]) for x in ("num_loss_tokens", "num_trajectories", "num_tokens")}
    assert counts == {
        "num_loss_tokens": drawn.has_loss_NL.sum(),
        "num_trajectories": len(LENGTHS),
        "num_tokens": sum(LENGTHS),
    }
    assert results["ratio"] > 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"loss_type": "cispo"}, ["epsilon_high", "epsilon_high=5.0"]),
        ({"loss_type": "luspo"}, ["importance_sampling_level", "=sequence"]),
        ({"loss_type": "vespo", **SEQUENCE}, ["importance_sampling_level", "=token"]),
        ({"max_completion_length": 9}, ["max_completion_length = 9", "dapo"]),
        ({"use_bias_correction_kl": False}, ["use_bias_correction_kl", "beta"]),
    ],
)
def test_fields_without_effect_and_impossible_levels_are_refused(fields, says):
    with pytest.raises(UserError, match=messages.containing(*says)):
        config_file.parse(CONFIG | {"objective": {"type": "policy"} | fields})


CONFIG = {
    "run": {"directory": "x", "steps": 3},
    "model": {"config": {}},
    "data": {"train": [{"source": "x", "format": "trajectories"}], "row_tokens": 8},
    "batch": {"rows_per_step": 8},
    "optimizer": {"learning_rate": 1e-6},
}


def test_the_format_and_the_objective_need_each_other():
    with pytest.raises(UserError, match=messages.containing("format = trajectories", "=policy")):
        config_file.parse(CONFIG)
    others = {"data": {"train": [{"source": "x", "format": "tokens"}], "row_tokens": 8}}
    with pytest.raises(UserError, match="format: trajectories"):
        config_file.parse(CONFIG | others | {"objective": {"type": "policy"}})
    assert config_file.parse(CONFIG | {"objective": {"type": "policy"}}).objective == Policy()
