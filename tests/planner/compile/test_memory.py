"""Memory of compiled steps for absent GPUs, against formulas."""

import jax
import pytest

from jaxsp.planner.compile import buffers, compiled, memory
from jaxsp.planner.compile.buffers import Buffer
from jaxsp.planner.cost import comms
from jaxsp.training import memory_fit, memory_formula, memory_options, sharding
from tests import tolerances
from tests.planner import programs

pytestmark = pytest.mark.e2e


@pytest.fixture(
    scope="module",
    params=[
        (2, 4),
        *(pytest.param((1, seq), marks=pytest.mark.slow) for seq in (8, 16, 32)),
    ],
    ids=lambda sizes: "x".join(map(str, sizes)),
)
def wide(request):
    """A step with as many tokens per device on every mesh, so that rows double with `seq`."""
    data, seq = request.param
    return programs.gpu_step(data=data, seq=seq, num_heads=64, microbatches=1)


def check_prediction(step):
    """The formula that chooses what is compiled is near the memory of the step."""
    workspace_bytes = step.choice.settings.workspace_bytes
    predicted = memory_formula.predict_bytes(step.program, workspace_bytes=workspace_bytes)
    assert 0.8 < predicted / memory.measure_step(step).device_total < 1.1


def test_the_formula_that_chooses_what_is_compiled_is_near_the_memory_of_a_step(wide):
    check_prediction(wide)


def test_all_arrays_of_a_step_are_read(wide):
    on_device = [buffer for buffer in buffers.read_buffers(wide.dump) if not buffer.on_host]
    analysis = wide.executable.memory_analysis()
    assert buffers.compute_peak_bytes(on_device) == pytest.approx(
        analysis.temp_size_in_bytes, rel=tolerances.MEMORY
    )
    assert sum(buffers.read_argument_bytes(wide.dump).values()) == pytest.approx(
        analysis.argument_size_in_bytes, rel=tolerances.MEMORY
    )


def test_the_categories_add_up_to_all_that_jax_takes(wide):
    counted = memory_fit.read_memory_use(
        wide.executable,
        kernel=wide.choice.kernel,
        workspace_bytes=wide.choice.settings.workspace_bytes,
    )
    breakdown = memory.break_down_peak(wide)
    device_total = memory.measure_step(wide).device_total
    assert sum(breakdown.device.values()) == device_total
    assert counted.device < device_total <= counted.device_total, (
        "cuDNN's workspace may take memory that is free during its calls"
    )
    assert sum(breakdown.host.values()) == counted.host == 0


def test_almost_nothing_is_in_the_category_other(wide):
    device = memory.break_down_peak(wide).device
    assert 0 <= device[memory.OTHER] < tolerances.UNKNOWN_MEMORY * sum(device.values())


def test_categories_with_a_formula_match_it(wide):
    program = wide.program
    model = program.model
    device = memory.break_down_peak(wide).device
    D = model.hidden_size
    H = model.num_heads
    K = model.head_dim
    layer_size = D * (2 * H + 2 * model.num_kv_heads) * K + 3 * D * model.intermediate_size
    num_weights = model.num_layers * layer_size + 2 * model.vocab_size * D
    weights = 4 * num_weights / program.mesh.size
    assert device[memory.WEIGHTS] == pytest.approx(weights, rel=tolerances.MEMORY)
    assert device[memory.CUDNN_WORKSPACE] == wide.choice.settings.workspace_bytes
    saved = model.num_layers * programs.DEVICE_TOKENS * 2 * (D + H * K)
    assert device[memory.SAVED_ACTIVATIONS] <= saved * (1 + tolerances.MEMORY)
    assert device[memory.SAVED_ACTIVATIONS] >= saved * (1 - 1 / model.num_layers), (
        "at the peak, all layers or all except one"
    )


SIZES = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "vocab_size": 4096,
    "num_attention_heads": 8,
}


@pytest.mark.parametrize(("offloaded", "microbatches"), [("state", 1), ("state_and_gradients", 2)])
def test_an_offloaded_optimizer_is_in_host_memory(offloaded, microbatches):
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    if jax.__version_info__ < memory_options.MIN_HOST_STATE_RELEASE:
        pytest.skip("arrays in host memory need jax 0.11.1 or later")
    config = programs.settings(
        "mesh.seq=2",
        f"memory.offload_optimizer={offloaded}",
        "memory.offload_activations=layer_inputs",
        "optimizer.name=adamw",
        f"batch.rows_per_step={microbatches}",
        **SIZES,
    )
    step = programs.step(config, compiled.make_devices("h100-80gb", 2))
    formula = memory_formula.program_offloaded_bytes(step.program)
    breakdown = memory.break_down_peak(step)
    assert breakdown.host[memory.WEIGHTS] == pytest.approx(formula.weights, rel=tolerances.MEMORY)
    assert breakdown.host[memory.OPTIMIZER] == pytest.approx(formula.moments, rel=tolerances.MEMORY)
    copies = 0
    gradients = sum(
        4 * sharding.shard_size(param, 2) for param in jax.tree.leaves(step.program.table)
    )
    if offloaded == "state":
        # the layers' weights in bfloat16; embedding and head are copied as they are needed
        embeddings = 2 * SIZES["vocab_size"] * SIZES["hidden_size"]
        copies = (formula.weights - 4 * embeddings / 2) / 2
        assert gradients * (1 - tolerances.MEMORY) <= breakdown.device[memory.GRADIENTS]
        assert breakdown.device[memory.GRADIENTS] < 2 * gradients
    else:
        assert breakdown.device[memory.GRADIENTS] < 0.5 * gradients
    slack = tolerances.MEMORY * formula.weights
    assert breakdown.device[memory.WEIGHTS] == pytest.approx(copies, abs=slack)
    assert breakdown.device[memory.OPTIMIZER] < tolerances.MEMORY * formula.moments
    # attention outputs and log-sum-exps stay on the device, and no layer input does
    tokens = step.program.tokens_per_device
    attention_bytes = 4 * tokens * SIZES["num_attention_heads"] * (2 * 128 + 4)
    assert breakdown.device[memory.SAVED_ACTIVATIONS] == pytest.approx(
        attention_bytes, rel=tolerances.MEMORY
    )
    assert breakdown.host[memory.SAVED_ACTIVATIONS] <= formula.activations * (1 + tolerances.MEMORY)
    assert breakdown.host[memory.GRADIENTS] <= formula.gradients * (1 + tolerances.MEMORY)
    assert (breakdown.host[memory.GRADIENTS] > 0) == (offloaded == "state_and_gradients")
    assert sum(breakdown.host.values()) == pytest.approx(formula.total, rel=tolerances.MEMORY)


GROUPS = ["memory.remat=full", "memory.offload_every=2"]


@pytest.mark.parametrize(
    ("microbatches", "options"),
    [
        pytest.param(1, [], marks=pytest.mark.slow),
        pytest.param(2, [], marks=pytest.mark.slow),
        (8, []),
        (2, GROUPS),
    ],
)
def test_several_microbatches_take_no_more_host_or_device_memory_than_one(microbatches, options):
    """Gradients added up after the backward pass would need two microbatches' of both."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    config = programs.settings(
        "mesh.data=2",
        "mesh.seq=4",
        f"batch.rows_per_step={2 * microbatches}",
        "memory.offload_activations=layer_inputs",
        *options,
        **SIZES,
        num_hidden_layers=16,
    )
    if found := memory_options.find_problems(config, platform="gpu"):
        pytest.skip(found[0])
    step = programs.step(config, compiled.make_devices("h100-80gb", 8))
    program = step.program
    host = memory.measure_step(step).host
    assert host == memory_formula.program_offloaded_bytes(program).activations
    one_set = sum(4 * sharding.shard_size(param, 8) for param in jax.tree.leaves(program.table))
    gradients = memory.break_down_peak(step).device[memory.GRADIENTS]
    assert gradients == pytest.approx(one_set, rel=0.1)
    check_prediction(step)


@pytest.mark.slow
def test_arrays_with_as_many_heads_as_layers_are_not_saved_activations():
    """Llama-3.1-8B has 32 of both."""
    step = programs.gpu_step(data=1, seq=2, num_heads=8, microbatches=1, num_layers=8)
    device = memory.break_down_peak(step).device
    model = step.program.model
    saved = 8 * programs.DEVICE_TOKENS * 2 * (model.hidden_size + 8 * model.head_dim)
    assert device[memory.SAVED_ACTIVATIONS] <= saved * (1 + tolerances.MEMORY)
    heads = Buffer(
        op_name="jit(step)/attend/transpose", dtype="bf16", dims=(8, programs.DEVICE_TOKENS, 128),
        on_host=False, begin_byte=0, end_byte=8, first_use=0, last_use=1,
    )  # fmt: skip
    assert memory._Classifier(step)(heads) == memory.ATTENTION


@pytest.mark.slow
def test_fast_compile_options_change_no_byte(monkeypatch):
    config = programs.settings(
        hidden_size=1024, intermediate_size=2048, vocab_size=4096, num_attention_heads=8
    )
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    fast = programs.step(config, compiled.make_devices("h100-80gb", 1))
    monkeypatch.setattr(compiled, "_FAST_COMPILE_OPTIONS", {})
    slow = programs.step(config, compiled.make_devices("h100-80gb", 1))
    uses = [
        memory_fit.read_memory_use(step.executable, kernel=step.choice.kernel, workspace_bytes=0)
        for step in (fast, slow)
    ]
    assert uses[0] == uses[1]
    sent = [comms.parse_collectives(step.dump.hlo_text) for step in (fast, slow)]
    assert sent[0] == sent[1]


@pytest.mark.parametrize(
    "remat", ["save_attention_and_mlp", pytest.param("none", marks=pytest.mark.slow)]
)
def test_the_products_that_remat_keeps_are_saved_activations(remat):
    """They were counted as temporaries of a layer: 32.6 of 38.8 GiB for 7B at 16,384 tokens."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    config = programs.settings(f"memory.remat={remat}", "mesh.seq=2", **SIZES)
    step = programs.step(config, compiled.make_devices("h100-80gb", 2))
    device = memory.break_down_peak(step).device
    formula = memory_formula.resident_bytes(step.program).activations
    num_layers = step.program.model.num_layers
    # Of the last layer, some arrays are not saved before its own backward pass
    assert device[memory.SAVED_ACTIVATIONS] <= formula * (1 + tolerances.MEMORY)
    assert device[memory.SAVED_ACTIVATIONS] >= formula * (1 - 1 / num_layers)
    assert device[memory.LAYER_TEMPORARIES] < formula / 2
