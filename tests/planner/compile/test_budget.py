"""A step's memory at its fullest moment, by cause."""

import pytest

from jaxsp.planner.compile import budget, compiled, memory
from jaxsp.planner.cost import comms
from jaxsp.training import memory_fit
from tests import tolerances
from tests.planner import programs

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", params=[pytest.param((1, 8), marks=pytest.mark.slow), (2, 4)], ids=["1x8", "2x4"])
def wide(request):
    data, seq = request.param
    return programs.gpu_step(data=data, seq=seq, num_heads=64, turns=1)


def test_the_causes_add_up_to_all_that_jax_takes(wide):
    needs = memory_fit.measured(wide.executable, wide.choice.uncounted_bytes)
    found = budget.of_step(wide)
    assert sum(found.device.values()) == budget.needs_of(wide).total
    assert needs.device < budget.needs_of(wide).total <= needs.total, "cuDNN's workspace may take memory that is free meanwhile"
    assert sum(found.host.values()) == needs.host == 0


def test_next_to_nothing_is_of_unknown_cause(wide):
    found = budget.of_step(wide)
    assert 0 <= found.device[budget.OTHER] < tolerances.UNKNOWN * sum(found.device.values())


@pytest.mark.slow
def test_heads_that_are_as_many_as_layers_are_no_residuals():
    """As Llama-3.1-8B has 32 of both: an array with a first dim of heads is not one of all layers."""
    step = programs.gpu_step(data=1, seq=2, num_heads=8, turns=1, num_layers=8)
    found = budget.of_step(step).device
    model = step.program.model
    kept = 8 * programs.SHARE_TOKENS * 2 * (model.hidden_size + 8 * model.head_dim)
    assert found[budget.RESIDUALS] <= kept * (1 + tolerances.CAUSE)
    heads = memory.Held(
        op_name="jit(step)/attend/transpose", dtype="bf16", dims=(8, programs.SHARE_TOKENS, 128), on_host=False,
        begin=0, end=8, first=0, last=1,
    )  # fmt: skip
    assert budget._Teller(step)(heads) == budget.ATTENTION


@pytest.mark.slow
def test_compiling_quickly_changes_no_byte(monkeypatch):
    asked = programs.settings(hidden_size=1024, intermediate_size=2048, vocab_size=4096, num_attention_heads=8)
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    quick = programs.step(asked, compiled.devices("h100-80gb", 1))
    monkeypatch.setattr(compiled, "_QUICKLY", {})
    slow = programs.step(asked, compiled.devices("h100-80gb", 1))
    assert memory_fit.measured(quick.executable, 0) == memory_fit.measured(slow.executable, 0)
    assert comms.sent(quick.written.text) == comms.sent(slow.written.text)


def test_what_has_a_formula_is_what_the_formula_says(wide):
    program = wide.program
    model, shards = program.model, program.mesh.size
    found = budget.of_step(wide).device
    D, F, V, H, K, G = (
        *(model.hidden_size, model.intermediate_size, model.vocab_size),
        *(model.num_heads, model.head_dim, model.num_kv_heads),
    )
    of_layer = D * (2 * H + 2 * G) * K + 3 * D * F
    weights = 4 * (model.num_layers * of_layer + 2 * V * D) / shards
    assert found[budget.WEIGHTS] == pytest.approx(weights, rel=tolerances.CAUSE)
    assert found[budget.WORKSPACE] == wide.choice.uncounted_bytes
    kept = model.num_layers * programs.SHARE_TOKENS * 2 * (D + H * K)
    assert found[budget.RESIDUALS] <= kept * (1 + tolerances.CAUSE)
    assert found[budget.RESIDUALS] >= kept * (1 - 1 / model.num_layers), "at the fullest moment all layers but one, or all"
