"""Memory options on a GPU change memory and not results; and the check before the first step."""

import dataclasses
import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention.attend import make_attend
from jaxsp.attention.kernels.kernel import KernelSettings, ScoreConfig
from jaxsp.attention.strategy import combine
from jaxsp.checkpoint import reader
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.checkpoint.retention import CheckpointConfig
from jaxsp.checkpoint.writer import CheckpointWriter
from jaxsp.model import decoder
from jaxsp.planning import candidates, fit
from jaxsp.planning.fit import MemoryUse
from jaxsp.run import config_file, selfcheck
from jaxsp.sharding import host_offload
from jaxsp.training import compile_options, train_state, train_step
from jaxsp.training.specs import make_spec
from tests import batches, tolerances
from tests.attention import oracle

pytestmark = pytest.mark.gpu

TOKENS = 4096
MODEL = batches.model(
    vocab_size=2048,
    hidden_size=512,
    num_layers=6,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=1408,
)
ROWS = batches.make_rows(
    [[(0, 1500), (1500, 1), (1501, 128), (1700, 2000)], [(5, 4000)]],
    num_tokens=TOKENS,
    vocab_size=MODEL.vocab_size,
    seed=0,
)

INPUTS_AND_ATTENTION = {
    "remat": "save_attention",
    "offload_activations": "layer_inputs_and_attention",
}

OPTIONS = {
    "none": {"remat": "none"},
    "attention and MLP": {"remat": "save_attention_and_mlp"},
    "attention, in two layers the MLP": {"remat": "save_attention_and_mlp", "kept_mlp_layers": 2},
    "full": {"remat": "full"},
    "tiles": {"remat": "save_attention", "mlp_tile_tokens": 512, "loss_tile_tokens": 256},
    "inputs": {"remat": "full", "offload_activations": "layer_inputs"},
    "inputs, attention kept": {"remat": "save_attention", "offload_activations": "layer_inputs"},
    "inputs and attention": INPUTS_AND_ATTENTION,
    "inputs and attention, not prefetched": INPUTS_AND_ATTENTION,
    "state": {"remat": "save_attention", "offload_optimizer": "state"},
    "state and gradients": {"remat": "save_attention", "offload_optimizer": "state_and_gradients"},
    "all": {
        **INPUTS_AND_ATTENTION,
        "offload_optimizer": "state_and_gradients",
        "mlp_tile_tokens": 512,
    },
}

XLA_OPTIONS = {
    "inputs and attention, not prefetched": dict.fromkeys(compile_options.PREFETCH_FROM_HOST, False)
}
"""XLA options by entry of OPTIONS. Prefetching a wrong layer would give wrong gradients."""


def make_program(gpu, memory, dtype="bfloat16", xla_options=None):
    """Describes a step with two microbatches of one row, and chooses its attention.

    Skips the test if this JAX does not support the memory options.
    """
    config = config_file.parse(
        {
            "run": {"directory": "unused", "steps": 3, "xla_options": xla_options or {}},
            "model": {"config": {}, "compute_dtype": dtype},
            "data": {
                "train": [{"source": "unused", "format": "tokens"}],
                "row_tokens": TOKENS,
                "max_segments_per_row": ROWS["starts_BM"].shape[1],
            },
            "batch": {"rows_per_step": 2},
            # With eps of 1 a weight moves in proportion to its gradient, even if that is rounding
            "optimizer": {
                "learning_rate": 1.0,
                "schedule": "constant",
                "eps": 1.0,
                "max_grad_norm": None,
            },
            "memory": memory,
        }
    )
    if problems := candidates.find_problems(config.step, platform=gpu.platform):
        pytest.skip(problems[0])
    return dataclasses.replace(make_spec(config.step, MODEL, devices=[gpu]), num_steps=3)


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """Results of three steps."""

    losses: list
    weight_changes: dict
    """Change of each weight in the first step."""
    memory_use: MemoryUse


def draw_weights(spec):
    return train_state.random_weights(
        spec.table, seed=0, mesh=spec.mesh, is_on_host=spec.is_on_host
    )


@functools.cache
def train_three_steps(gpu, option, dtype="float32"):
    memory = OPTIONS[option] if option else {"remat": "save_attention"}
    spec = make_program(gpu, memory, dtype, XLA_OPTIONS.get(option))
    step = fit.compile_fitting_step(spec)
    start = draw_weights(spec)
    # Copies: the step reuses the memory of its inputs
    before = {name: np.array(weight) for name, weight in batches.name_leaves(start).items()}
    state = train_state.init_state(spec, start)
    rows = batches.put_on_mesh(ROWS, spec.mesh)
    losses = []
    weight_changes = {}
    for _ in range(3):
        state, numbers = step.executable(state, rows)
        losses.append(float(numbers["loss"]))
        weight_changes = weight_changes or {
            name: after - before[name] for name, after in batches.name_leaves(state.master).items()
        }
    return TrainingResult(losses, weight_changes, step.memory_use)


def check_results(actual, expected, tolerance):
    assert expected.losses[0] > expected.losses[-1] > 0
    assert actual.losses == pytest.approx(expected.losses, rel=tolerance)
    for name in expected.weight_changes:
        assert (
            batches.relative_error(actual.weight_changes[name], expected.weight_changes[name])
            < tolerance
        ), name


@pytest.mark.parametrize("option", OPTIONS)
def test_a_memory_option_changes_no_loss_and_no_weight(gpu, option):
    check_results(train_three_steps(gpu, option), train_three_steps(gpu, None), tolerances.MESH)


@pytest.mark.parametrize(
    "option", ["full", "inputs and attention", "inputs and attention, not prefetched"]
)
def test_saved_and_recomputed_cudnn_attention_give_the_same_results(gpu, option):
    check_results(
        train_three_steps(gpu, option, "bfloat16"),
        train_three_steps(gpu, None, "bfloat16"),
        tolerances.BF16,
    )


INPUTS = MODEL.num_layers * TOKENS * MODEL.hidden_size * 4
OUTPUTS = MODEL.num_layers * TOKENS * MODEL.num_heads * (MODEL.head_dim + 1) * 4
OFFLOADED = filter(host_offload.should_offload, jax.tree.leaves(decoder.param_table(MODEL)))
STATE = 3 * 4 * sum(math.prod(param.stacked_shape) for param in OFFLOADED)

ON_HOST = {
    "inputs": INPUTS,
    "inputs and attention": INPUTS + OUTPUTS,
    "state": STATE,
    "all": INPUTS + OUTPUTS + STATE,
}
"""Bytes of layers' inputs, attention's outputs and log-sum-exps, float32 weights and moments."""


@pytest.mark.parametrize("option", ON_HOST)
def test_offloaded_arrays_are_on_the_host(gpu, option):
    assert train_three_steps(gpu, None).memory_use.host == 0
    assert train_three_steps(gpu, option).memory_use.host >= ON_HOST[option]


def test_memory_options_need_less_and_less_device_memory(gpu):
    options = ("none", "attention and MLP", "full", "inputs", "inputs and attention")
    device_bytes = {option: train_three_steps(gpu, option).memory_use.device for option in options}
    saved_attention = train_three_steps(gpu, None).memory_use.device
    assert device_bytes["none"] > device_bytes["attention and MLP"] > saved_attention
    assert saved_attention > device_bytes["full"] > device_bytes["inputs"]
    assert saved_attention > device_bytes["inputs and attention"]


@pytest.mark.parametrize("option", ["none", "state"])
def test_a_run_continues_during_a_save_and_resumes_from_it(gpu, option, tmp_path):
    """Offloaded state is written from host memory that the next step reuses."""
    spec = make_program(gpu, OPTIONS[option], "float32")
    run = train_step.compile(spec)
    state = train_state.init_state(spec, draw_weights(spec))
    rows = batches.put_on_mesh(ROWS, spec.mesh)
    state, _ = run(state, rows)
    meta = CheckpointMeta(config={}, model={}, data={}, step=1, rows_consumed=0, num_tokens_total=0)
    with CheckpointWriter(tmp_path, table=spec.table, config=CheckpointConfig()) as store:
        store.save(state, meta)
        state, expected = run(state, rows)
    restored = reader.restore(
        tmp_path / "1", train_state.abstract_inputs(spec)[0], table=spec.table, num_steps=1
    )
    assert float(run(restored, rows)[1]["loss"]) == pytest.approx(
        float(expected["loss"]), rel=tolerances.MESH
    )


def test_the_check_before_the_first_step_passes_within_five_seconds(gpu, record_property):
    """Asserts the second check; the first also loads cuDNN and cuBLAS, which a step needs too."""
    spec = make_program(gpu, {"remat": "save_attention"})
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        lines, _ = selfcheck.check_device(spec)
        seconds.append(time.perf_counter() - began)
    record_property("seconds", seconds)
    assert seconds[1] < 5
    assert len(lines) == spec.attention.kernel.needs_selfcheck


def test_the_check_detects_attention_that_ignores_segments(gpu):
    attend = make_attend(kernel="blockwise")

    def ignore_segments(q, k, v, starts, lengths):
        one = jnp.zeros((len(starts), 1), jnp.int32)
        return attend(q, k, v, one, jnp.full_like(one, q.shape[1]))

    check = selfcheck.check_attention(
        oracle.FunctionKernel(ignore_segments),
        heads=(8, 2),
        head_dim=64,
        max_segments=64,
        dtype="bfloat16",
        score=ScoreConfig(),
        settings=KernelSettings(),
        strategy=combine(1),
    )
    assert min(check.measure_errors(gpu).values()) > check.tolerance
