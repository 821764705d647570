"""Arithmetic and memory traffic of compiled programs, against counts by hand and a formula."""

import re

import pytest

from jaxsp.model import flops
from jaxsp.planning import absent, hlo
from tests.planning import programs

HEAD = "HloModule small, is_scheduled=true, num_partitions=8\n"


def kernels(*lines, more=""):
    body = "\n".join(f"  {line}" for line in lines)
    return hlo.read_kernel_costs(
        f"{HEAD}{more}\nENTRY %main (a: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    )


def computation(name, *lines):
    return (
        f"%{name} (b: f32[8]) -> f32[8] {{\n" + "\n".join(f"  {line}" for line in lines) + "\n}\n"
    )


A = "%a = bf16[512,1024]{1,0} parameter(0)"
B = "%b = bf16[1024,2048]{1,0} parameter(1)"
DOT = (
    "ROOT %d = bf16[512,2048]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
)


def test_a_product_has_two_operations_per_multiplication_and_moves_each_array_once():
    (cost,) = kernels(A, B, DOT)
    assert cost.flops == 2 * 512 * 1024 * 2048
    assert cost.device_bytes == 2 * (512 * 1024 + 1024 * 2048 + 512 * 2048)


def test_a_product_in_a_fusion_and_one_of_cublas_count_too():
    config = (
        '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    )
    cublas = (
        "%c = (bf16[512,2048]{1,0}, s8[64]{0}) custom-call(%a, %b), "
        f'custom_call_target="__cublas$gemm", backend_config={config}'
    )
    fusion = "%f = bf16[512,2048]{1,0} fusion(%a, %b), kind=kCustom, calls=%inner"
    costs = kernels(A, B, cublas, fusion, more=computation("inner", A, B, DOT))
    assert [cost.flops for cost in costs] == [2 * 512 * 1024 * 2048] * 2


@pytest.mark.slow
@pytest.mark.e2e
def test_a_step_has_the_needed_products_and_those_that_the_backward_pass_repeats():
    """The forward products of layers are computed twice, except the last one of a layer, whose
    result is not used."""
    step = programs.gpu_step(data=2, seq=4, num_heads=64, microbatches=1)
    model = step.spec.model
    tokens = programs.DEVICE_TOKENS
    costs = hlo.read_kernel_costs(step.dump.hlo_text)
    executed = sum(cost.flops * cost.num_runs for cost in costs)
    attention = flops.attention_flops(model, programs.segment_lengths(step))
    needed = (flops.step_flops(model, programs.segment_lengths(step)) - 3 * attention) / 8
    D = model.hidden_size
    F = model.intermediate_size
    heads = 2 * model.num_heads + 2 * model.num_kv_heads
    layer = 2 * tokens * (D * heads * model.head_dim + 3 * D * F)
    again = model.num_layers * (layer - 2 * tokens * D * F)
    assert executed == pytest.approx(needed + again, rel=0.02)


@pytest.mark.slow
def test_linear_layers_call_cublas_for_8_bit_floats():
    """Forward, recomputed and gradients of activations; gradients of matrices are in bfloat16."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    small = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    config = programs.settings("model.linear_dtype=float8", "mesh.seq=1", **small)
    step = programs.step(config, absent.make_devices("h100-80gb", 1))
    targets = re.findall(r'custom_call_target="(__cublas\$[\w$]*)"', step.dump.hlo_text)
    num_float8 = targets.count("__cublas$lt$matmul$f8")
    assert num_float8 >= 2 * 7, "seven matrices of a layer"
    assert 7 <= len(targets) - num_float8 < num_float8
