"""A new strategy or kernel is one class and one entry of a registry."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention import selection
from jaxsp.attention.attend import make_attend, make_chosen_attend
from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.kernel import Kernel
from jaxsp.attention.kernels.residuals import AttentionFunctions, Saved
from jaxsp.attention.selection import choose_attention
from jaxsp.attention.strategies.attention_config import AttentionConfig
from jaxsp.attention.strategies.strategy import combine
from jaxsp.attention.strategies.token_exchange import TokenExchange
from jaxsp.core import axes
from tests import batches, tolerances
from tests.attention import oracle
from tests.training import runs

SEQ = 2


class GatherAll(TokenExchange):
    """Every device computes all queries of the row, and keeps its tokens of the results."""

    name = "gather_all"

    def kernel_workload(self, workload):
        return workload.to_kernel_workload()

    def sent_bytes(self, workload):
        return {"all-gather": (self.degree - 1) * sum(workload.qkv_bytes)}

    def make_functions(self, kernel, settings, score):
        rows = kernel.make_row_functions(settings, score)

        def gather(x, axis=1):
            return jax.lax.all_gather(x, axes.SEQ, axis=axis, tiled=True)

        def forward(q, k, v, segments):
            out, lse = rows.forward(*map(gather, (q, k, v)), segments)
            return self.keep(out), self.keep(lse, axis=2)

        def backward(saved, segments):
            gathered = Saved(*map(gather, saved, (1, 1, 1, 1, 1, 2)))
            return tuple(map(self.keep, rows.backward(gathered, segments)))

        return AttentionFunctions(forward, backward)

    def segment_mask(self, starts, lengths, num_tokens):
        return self.keep(segments.segment_mask(starts, lengths, num_tokens * self.degree))

    def keep(self, x, axis=1):
        size = x.shape[axis] // self.degree
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes.SEQ) * size, size, axis)


@dataclasses.dataclass(frozen=True)
class WholeMatrix(Kernel):
    """The oracle."""

    name = "whole_matrix"

    def make_row_functions(self, settings, score):
        return AttentionFunctions(
            functools.partial(oracle.forward, score=score),
            functools.partial(oracle.backward, score=score),
        )


@pytest.fixture
def toys(monkeypatch):
    """Registers both, each as the first candidate of `auto`."""
    exchanges = {GatherAll.name: GatherAll} | selection.TOKEN_EXCHANGES
    monkeypatch.setattr(selection, "TOKEN_EXCHANGES", exchanges)
    kernels = {WholeMatrix.name: WholeMatrix()} | selection.KERNELS
    monkeypatch.setattr(selection, "KERNELS", kernels)


def settings(**attention_fields):
    """A config of 2 devices per group. `construct` skips the config's list of names."""
    config = runs.make_spec({}, sizes=(1, 1, SEQ)).config
    return config.change(attention=AttentionConfig.model_construct(**attention_fields))


def test_a_toy_strategy_and_kernel_attend_and_train_correctly(toys):
    config = settings(strategy="gather_all", kernel="whole_matrix")
    choice = choose_attention(
        config.attention, config.rows, runs.MODEL, devices=jax.devices()[:SEQ]
    )
    assert (choice.strategy, choice.kernel) == (
        combine(1, GatherAll(degree=SEQ)),
        WholeMatrix(),
    )
    attend = make_chosen_attend(choice)
    starts = jnp.int32([[0, 9], [4, 0]])
    lengths = jnp.int32([[9, 20], [20, 0]])
    rng = np.random.default_rng(0)
    qkv = [rng.standard_normal((2, 32, heads, 8), np.float32) for heads in (4, 2, 2)]

    def gradients(attend):
        loss = lambda q, k, v: (attend(q, k, v, starts, lengths) ** 2).sum()
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*qkv)

    actual = gradients(batches.attend_on_shards(attend))
    expected = gradients(make_attend(kernel="blockwise"))
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for value, right in pairs:
        assert batches.relative_error(np.asarray(value), np.asarray(right)) < tolerances.STRATEGIES


def test_auto_considers_a_toy_strategy_and_a_toy_kernel(toys):
    config = settings()
    choice = choose_attention(
        config.attention, config.rows, runs.MODEL, devices=jax.devices()[:SEQ]
    )
    considered = [choice.strategy.description, *(name for name, _ in choice.alternatives)]
    assert "gather_all of 2" in considered
    assert choice.kernel == WholeMatrix()


def test_an_incomplete_strategy_or_kernel_cannot_be_made():
    for base in (TokenExchange, Kernel):
        with pytest.raises(TypeError, match="abstract"):
            type("Incomplete", (base,), {"name": "incomplete"})()
