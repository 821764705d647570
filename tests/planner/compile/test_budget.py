"""A step's memory at its fullest moment, by cause."""

import pytest

from jaxsp.planner.compile import budget, compiled
from jaxsp.planner.compile.memory import Buffer
from jaxsp.planner.cost import comms
from jaxsp.training import memory_fit
from tests import tolerances
from tests.planner import programs

pytestmark = pytest.mark.e2e


@pytest.fixture(
    scope="module",
    params=[pytest.param((1, 8), marks=pytest.mark.slow), (2, 4)],
    ids=["1x8", "2x4"],
)
def wide(request):
    data, seq = request.param
    return programs.gpu_step(data=data, seq=seq, num_heads=64, turns=1)


def test_the_causes_add_up_to_all_that_jax_takes(wide):
    needs = memory_fit.read_memory_use(
        wide.executable,
        kernel=wide.choice.kernel,
        workspace_bytes=wide.choice.settings.workspace_bytes,
    )
    found = budget.break_down_peak(wide)
    assert sum(found.device.values()) == budget.measure_step(wide).device_total
    assert needs.device < budget.measure_step(wide).device_total <= needs.device_total, (
        "cuDNN's workspace may take memory that is free meanwhile"
    )
    assert sum(found.host.values()) == needs.host == 0


def test_next_to_nothing_is_of_unknown_cause(wide):
    found = budget.break_down_peak(wide)
    assert 0 <= found.device[budget.OTHER] < tolerances.UNKNOWN * sum(found.device.values())


@pytest.mark.slow
def test_heads_that_are_as_many_as_layers_are_no_residuals():
    """As Llama-3.1-8B has 32 of both: an array with a first dim of heads is not one of all layers."""
    step = programs.gpu_step(data=1, seq=2, num_heads=8, turns=1, num_layers=8)
    found = budget.break_down_peak(step).device
    model = step.program.model
    kept = 8 * programs.SHARE_TOKENS * 2 * (model.hidden_size + 8 * model.head_dim)
    assert found[budget.SAVED_ACTIVATIONS] <= kept * (1 + tolerances.CAUSE)
    heads = Buffer(
        op_name="jit(step)/attend/transpose", dtype="bf16", dims=(8, programs.SHARE_TOKENS, 128), on_host=False,
        begin_byte=0, end_byte=8, first_use=0, last_use=1,
    )  # fmt: skip
    assert budget._Classifier(step)(heads) == budget.ATTENTION


@pytest.mark.slow
def test_compiling_quickly_changes_no_byte(monkeypatch):
    asked = programs.settings(
        hidden_size=1024, intermediate_size=2048, vocab_size=4096, num_attention_heads=8
    )
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    quick = programs.step(asked, compiled.make_devices("h100-80gb", 1))
    monkeypatch.setattr(compiled, "_FAST_COMPILE_OPTIONS", {})
    slow = programs.step(asked, compiled.make_devices("h100-80gb", 1))
    kernel = quick.choice.kernel
    quick_use, slow_use = (
        memory_fit.read_memory_use(step.executable, kernel=kernel, workspace_bytes=0)
        for step in (quick, slow)
    )
    assert quick_use == slow_use
    assert comms.parse_collectives(quick.dump.hlo_text) == comms.parse_collectives(
        slow.dump.hlo_text
    )


def test_what_has_a_formula_is_what_the_formula_says(wide):
    program = wide.program
    model, shards = program.model, program.mesh.size
    found = budget.break_down_peak(wide).device
    D, F, V, H, K, G = (
        *(model.hidden_size, model.intermediate_size, model.vocab_size),
        *(model.num_heads, model.head_dim, model.num_kv_heads),
    )
    of_layer = D * (2 * H + 2 * G) * K + 3 * D * F
    weights = 4 * (model.num_layers * of_layer + 2 * V * D) / shards
    assert found[budget.WEIGHTS] == pytest.approx(weights, rel=tolerances.CAUSE)
    assert found[budget.CUDNN_WORKSPACE] == wide.choice.settings.workspace_bytes
    kept = model.num_layers * programs.SHARE_TOKENS * 2 * (D + H * K)
    assert found[budget.SAVED_ACTIVATIONS] <= kept * (1 + tolerances.CAUSE)
    assert found[budget.SAVED_ACTIVATIONS] >= kept * (1 - 1 / model.num_layers), (
        "at the fullest moment all layers but one, or all"
    )
