"""Compiled steps that tests share, and the reference that they are compared with."""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention.attend import Attend, make_attend
from jaxsp.attention.strategy import Strategy
from jaxsp.blocks.config import ExpertsConfig, ModelConfig
from jaxsp.blocks.layers import Parameter, Weights
from jaxsp.core.batch import NO_LABEL, Batch
from jaxsp.model import decoder
from jaxsp.model.remat import RematPolicy
from jaxsp.planning import candidates
from jaxsp.run.config_file import Config
from jaxsp.sharding import host_offload, quantization, sharding
from jaxsp.system import device_mesh
from jaxsp.training import step_gradients, train_state, train_step
from jaxsp.training.specs import StepSpec
from jaxsp.training.train_state import TrainState
from tests import batches, tolerances, unsharded
from tests.attention import oracle

MODEL = batches.model()
ROWS = batches.make_ragged_rows(num_rows=16, num_tokens=64, vocab_size=MODEL.vocab_size, seed=1)
SGD = batches.make_config()
NUM_STEPS = 5

NEEDS_HOST = pytest.mark.skipif(
    jax.__version_info__ < host_offload.MIN_RELEASE,
    reason="arrays in host memory inside shard_map need jax 0.11.1, which needs Python 3.12",
)


def works_here(memory: dict[str, Any]) -> bool:
    """True if CPUs can run these memory options with the installed JAX."""
    step = batches.make_config(memory=memory).step
    return not candidates.find_problems(step, platform="cpu")


def make_spec(
    memory: dict[str, Any],
    *,
    model: ModelConfig = MODEL,
    row_tokens: int = 64,
    sizes: tuple[int, int, int] = (1, 1, 4),
    **config: Any,
) -> StepSpec:
    """Describes a step with these memory options, without compiling it."""
    base = batches.make_config(memory=memory, **config).step
    mesh = {"replica": sizes[0], "data": sizes[1], "seq": sizes[2]}
    return StepSpec(
        config=base.change(row_tokens=row_tokens, mesh=mesh),
        model=model,
        mesh=batches.mesh(*sizes),
        attention=batches.attention_choice(seq=sizes[-1]),
        num_steps=1,
    )


def draw_weights(model: ModelConfig) -> dict[str, Any]:
    """Draws unsharded weights with numpy.

    Biases and norms are random too, so that each affects the loss.
    """
    rng = np.random.default_rng(2)

    def draw(param: Parameter) -> jax.Array:
        values = rng.standard_normal(param.stacked_shape)
        return jnp.float32(param.mean + (param.std or 0.1) * values)

    return jax.tree.map(draw, decoder.param_table(model))


def put_weights(
    table: Weights,
    weights: Weights,
    mesh: jax.sharding.Mesh,
    *,
    is_on_host: Callable[[Parameter], bool] = lambda param: False,
) -> Weights:
    """Puts unsharded weights on a mesh, padded and sharded as in a training state."""
    num_shards = device_mesh.num_shards(mesh)

    def put(param: Parameter, weight: Any) -> Any:
        widths = sharding.padding(param, weight.ndim, num_shards)
        stored = quantization.encode(param, np.pad(np.asarray(weight, np.float32), widths))
        return jax.device_put(
            stored, sharding.named_sharding(param, mesh, is_on_host=is_on_host(param))
        )

    return jax.tree.map(put, table, weights)


class OracleAttend(Attend):
    """Attention on one device by the slow oracle, differentiated by JAX."""

    def __call__(self, *inputs, kind=0, sinks_H=None):
        """Attends. Inputs: q, k, v, starts, lengths, no tables."""
        branches = [
            functools.partial(oracle.attention, score=score, sinks_H=sinks_H)
            for score in self.kinds
        ]
        return jax.lax.switch(kind, branches, *inputs[:5])


def make_oracle_attend(model: ModelConfig) -> Attend:
    """Attention of a model's layers on one device, by the slow oracle."""
    attend = make_attend(seq=1, kernel="blockwise", layer_scores=model.layer_scores)
    return OracleAttend(**vars(attend))


def compute_logits(weights: Weights, rows: Batch, model: ModelConfig = MODEL) -> tuple[Any, Any]:
    """Logits of rows on one device, by reference attention, and statistics of routers."""
    hidden, statistics = decoder.hidden_states(
        weights,
        rows,
        config=model,
        attend=make_oracle_attend(model),
        gather=unsharded.UnshardedGather(),
        dtype=jnp.dtype("float32"),
        policy=RematPolicy(),
        tile_tokens=4096,
    )
    products = jnp.einsum("BLD,VD->BLV", hidden, decoder.lm_head(weights))
    return decoder.transform_logits(model, products), statistics


@functools.cache
def compile_reference(model: ModelConfig = MODEL):
    """Returns a function for the mean loss, number of correct labels, and gradients of all rows;
    with the mean loss are the gradients of the routers' losses, if the model has some.

    It has no mesh, microbatches or tiles, and uses reference attention.
    """

    def mean_loss(weights, rows):
        logits, statistics = compute_logits(weights, rows, model)
        has_label = rows.labels_BL != NO_LABEL
        labels = jnp.where(has_label, rows.labels_BL, 0)
        log_probabilities = jnp.take_along_axis(
            jax.nn.log_softmax(logits), labels[..., None], axis=-1
        )[..., 0]
        num_correct = (has_label & (logits.argmax(-1) == labels)).sum()
        num_labels = has_label.sum().astype(jnp.float32)
        loss = -jnp.where(has_label, log_probabilities, 0).sum() / num_labels
        router_loss = sum_router_losses(model.experts, statistics, rows.lengths_BM)
        return loss + router_loss, (loss, num_correct)

    differentiate = jax.jit(jax.grad(mean_loss, has_aux=True))

    def compute(weights, arrays):
        batch = Batch(**{name: jnp.asarray(x) for name, x in arrays.items()})
        gradients, results = differentiate(weights, batch)
        return results, gradients

    return compute


def sum_router_losses(
    experts: ExpertsConfig | None, statistics: dict[str, jax.Array], lengths_BM: jax.Array
) -> jax.Array | float:
    """Means over rows of the routers' losses, times their factors. Statistics: [layers, B, ...]."""
    if experts is None:
        return 0.0
    num_tokens_B = lengths_BM.sum(1).astype(jnp.float32)
    has_tokens_B = (num_tokens_B > 0).astype(jnp.float32)
    factor_B = has_tokens_B / (len(statistics["entropy"]) * jnp.maximum(num_tokens_B, 1))
    means = {name: jnp.einsum("NB...,B->B...", x, factor_B) for name, x in statistics.items()}
    chosen_BE = jax.lax.stop_gradient(means["chosen"])
    evenness_B = jnp.einsum("BE,BE->B", chosen_BE, means["probabilities"])
    aux_loss_B = experts.aux_loss_coef * experts.num_experts * evenness_B
    return jnp.sum(aux_loss_B + experts.z_loss_coef * means["squared_lse"]) / has_tokens_B.sum()


def label_smoothing_loss(logits_TV: jax.Array, labels_T: jax.Array) -> jax.Array:
    """Cross entropy with label smoothing, and a loss on the log of the partition function."""
    log_probs_TV = jax.nn.log_softmax(logits_TV)
    label_T = jnp.take_along_axis(log_probs_TV, labels_T[:, None], axis=-1)[:, 0]
    return (
        -0.9 * label_T - 0.1 * log_probs_TV.mean(-1) + 0.01 * jax.nn.logsumexp(logits_TV, -1) ** 2
    )


def remove_padding(param: Parameter, stored: jax.Array | None) -> np.ndarray | None:
    """Returns a weight without its padding; None for the gradient of a frozen weight."""
    if stored is None:
        return None
    stored = quantization.decode(param, stored, jnp.dtype("float32"))
    return np.asarray(stored)[(..., *(slice(size) for size in param.shape))]


@dataclasses.dataclass(frozen=True)
class Run:
    """A step on a mesh, with its compiled functions for rows of one shape."""

    spec: StepSpec
    rows_per_microbatch: int
    gradients: Any
    step: Any

    def rows(self, arrays: batches.Arrays) -> Batch:
        return batches.put_on_mesh(
            arrays,
            self.spec.mesh,
            rows_per_microbatch=self.rows_per_microbatch,
            layout=self.spec.attend.layout,
        )

    def state(self, weights: dict[str, Any]) -> TrainState:
        """State with these unsharded weights and an initial optimizer state."""
        stored = put_weights(
            self.spec.table,
            weights,
            self.spec.mesh,
            is_on_host=self.spec.is_on_host,
        )
        return train_state.init_state(self.spec, stored)

    def unpad(self, tree: Any) -> dict[str, np.ndarray]:
        """Returns weights or gradients by name, without padding."""
        return batches.name_leaves(jax.tree.map(remove_padding, self.spec.table, tree))


def check_gradients(
    run: Run, weights: dict[str, Any], arrays: batches.Arrays, record_property: Any
) -> None:
    """Compares the loss, gradients and counts of a run with those of the reference."""
    gradients, actual = run.gradients(run.state(weights).master, run.rows(arrays))
    (loss, num_correct), expected = compile_reference(run.spec.model)(weights, arrays)
    actual_leaves = run.unpad(gradients)
    expected_leaves = batches.name_leaves(train_state.select_trained(run.spec.table, expected))
    assert actual_leaves.keys() == expected_leaves.keys()
    differences = {
        name: batches.relative_error(actual_leaves[name], expected_leaves[name])
        for name in expected_leaves
    }
    record_property("largest relative difference of a gradient", max(differences.values()))
    assert batches.relative_error(actual["loss"], loss) < tolerances.MESH
    assert max(differences.values()) < tolerances.MESH, differences
    counts = (
        actual["num_rows"],
        actual["num_tokens"],
        actual["num_loss_tokens"],
        actual["num_correct"],
    )
    lengths = arrays["lengths_BM"]
    labels = arrays["labels_BL"]
    assert [int(x) for x in counts] == [
        (lengths.sum(1) > 0).sum(),
        lengths.sum(),
        (labels != NO_LABEL).sum(),
        num_correct,
    ]


_POOL = concurrent.futures.ThreadPoolExecutor(2)


def compile_in_thread(
    sizes: tuple[int, int, int],
    *,
    rows_per_microbatch: int = 1,
    config: Config = SGD,
    model: ModelConfig = MODEL,
    functions: tuple[str, ...] = ("gradients", "step"),
    arrays: batches.Arrays = ROWS,
    strategy: Strategy | None = None,
) -> concurrent.futures.Future[Run]:
    """Compiles functions of a Run in a thread; `.result()` waits for them.

    At most two runs are compiled at a time. Args: functions: `gradients`, `step` or both.
    """

    step = config.step.change(
        rows_per_step=len(arrays["labels_BL"]),
        rows_per_microbatch=rows_per_microbatch,
        mesh=dict(zip(("replica", "data", "seq"), sizes, strict=True)),
    )

    def make() -> Run:
        spec = StepSpec(
            config=step,
            model=model,
            mesh=batches.mesh(*sizes),
            attention=batches.attention_choice(
                seq=sizes[-1], strategy=strategy, layer_scores=model.layer_scores
            ),
            num_steps=NUM_STEPS,
        )
        uncompiled = Run(spec, rows_per_microbatch, None, None)
        rows = uncompiled.rows(arrays)
        state = uncompiled.state(draw_weights(model))
        gradients = jax.jit(functools.partial(step_gradients.compute_gradients, spec))
        return dataclasses.replace(
            uncompiled,
            gradients=gradients.lower(state.master, rows).compile()
            if "gradients" in functions
            else None,
            step=train_step.build_step(spec).lower(state, rows).compile()
            if "step" in functions
            else None,
        )

    return _POOL.submit(make)
