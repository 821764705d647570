"""Trajectories, steps that learn from them, and the loss of TRL that they are compared with."""

import collections
import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.core.batch import NO_LABEL, Batch
from jaxsp.data import dataset, store
from jaxsp.data.documents import Documents
from jaxsp.data.source import TOKEN_NUMBERS
from jaxsp.objectives.policy import Policy
from jaxsp.training.specs import StepSpec
from tests.training import runs

LENGTHS = (40, 2, 5, 33, 17, 24, 9, 38, 3, 30, 12)
MAX_TOKENS = max(LENGTHS)

Numbers = dict[str, np.ndarray]
"""Numbers of the tokens of all trajectories, [trajectories, tokens]."""


@dataclasses.dataclass(frozen=True)
class Trajectories:
    """Trajectories, each in a row: the first ones of `lengths_N` tokens are its own."""

    tokens_NL: np.ndarray
    lengths_N: np.ndarray
    has_loss_NL: np.ndarray
    """True for tokens that the model sampled; False for the first token of each trajectory."""
    numbers: Numbers

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


def pack(trajectories: Trajectories, objective: Policy, spec: StepSpec) -> Any:
    """Packs trajectories as tokenized sources are packed."""
    documents = Documents(
        [store.from_columns(trajectories.make_columns())],
        row_tokens=spec.config.row_tokens,
        numbers=objective.needs,
        equal_numbers=objective.needs_equal,
    )
    return dataset.pack_documents("trajectories", documents, **spec.config.packing, digests=["x"])


@functools.cache
def compile_logits() -> tuple[Any, Any]:
    """Logits of rows by reference attention, and weight gradients from those of the logits."""

    def logits(weights: Any, rows: Batch) -> jax.Array:
        return runs.compute_logits(weights, rows)[0]

    def pull(weights: Any, rows: Batch, dlogits: jax.Array) -> Any:
        return jax.vjp(lambda weights: logits(weights, rows), weights)[1](dlogits)[0]

    return jax.jit(logits), jax.jit(pull)


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
