"""Arithmetic and memory traffic of compiled programs, against counts by hand and a formula."""

import re

import pytest

from jaxsp.model import flops
from jaxsp.planner.compile import compiled
from jaxsp.planner.cost import hlo_cost
from tests.planner import programs

HEAD = "HloModule small, is_scheduled=true, num_partitions=8\n"
MEGA = 2**20


def kernels(*lines, more=""):
    body = "\n".join(f"  {line}" for line in lines)
    return hlo_cost.read_kernel_costs(
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


def test_tuple_elements_are_read_in_the_notation_of_jax_0_11():
    pair = (
        "%p = (s32[], bf16[1024,2048]{1,0}, /*index=2*/(bf16[512,1024]{1,0}, u32[])) parameter(0)"
    )
    rename = "%q = (bf16[512,1024]{1,0}, u32[]) bitcast(%p#2)"
    operands = "%q#0, %p#1, /*index=2*/%p#1"
    fusion = f"ROOT %f = bf16[512,2048]{{1,0}} fusion({operands}), kind=kCustom, calls=%inner"
    dot = DOT.replace("%a, %b", "%q#0, %p#1")
    for lines in ((pair, rename, dot), (pair, rename, fusion)):
        (cost,) = kernels(*lines, more=computation("inner", A, B, DOT))
        assert cost.flops == 2 * 512 * 1024 * 2048
        assert cost.device_bytes == 2 * (512 * 1024 + 1024 * 2048 + 512 * 2048)


def test_a_loop_counts_once_per_iteration():
    body = computation("body", A, B, DOT)
    condition = computation("condition", "ROOT %p = pred[] constant(true)")
    loop = (
        "%w = bf16[512,2048]{1,0} while(%a), condition=%condition, body=%body, "
        'backend_config={"known_trip_count":{"n":"7"}}'
    )
    (cost,) = [cost for cost in kernels(A, loop, more=body + condition) if cost.flops]
    assert cost.num_runs == 7


STACK = "%s = f32[32,1024,1024]{2,1,0} parameter(0)"
PLACE = "%i = s32[] parameter(1)"
SLICE = (
    "ROOT %x = f32[1,1024,1024]{2,1,0} dynamic-slice(%s, %i, %i, %i), "
    "dynamic_slice_sizes={1,1024,1024}"
)
UPDATE = "ROOT %u = f32[32,1024,1024]{2,1,0} dynamic-update-slice(%s, %n, %i, %i, %i)"


def test_a_slice_of_a_stack_reads_only_the_slice():
    fusion = "ROOT %f = f32[1,1024,1024]{2,1,0} fusion(%s, %i), kind=kLoop, calls=%inner"
    (cost,) = kernels(STACK, PLACE, fusion, more=computation("inner", STACK, PLACE, SLICE))
    assert cost.device_bytes == pytest.approx(2 * 4 * MEGA, abs=8)


def test_an_update_in_place_writes_only_the_update():
    new = "%n = f32[1,1024,1024]{2,1,0} parameter(2)"
    fusion = "ROOT %f = f32[32,1024,1024]{2,1,0} fusion(%s, %i, %n), kind=kLoop, calls=%inner"
    (cost,) = kernels(
        STACK, PLACE, new, fusion, more=computation("inner", STACK, PLACE, new, UPDATE)
    )
    assert cost.device_bytes == pytest.approx(2 * 4 * MEGA, abs=8)


def test_copies_to_the_host_and_from_it_are_distinguished():
    there = "%s = f32[32,1024,1024]{2,1,0:S(5)} parameter(0)"
    shapes = "((f32[32,1024,1024]{2,1,0:S(5)}, s32[]), f32[1,1024,1024]{2,1,0}, u32[])"
    begin = f"%b = {shapes} fusion-start(%s, %i), calls=%inner"
    done = "%e = f32[1,1024,1024]{2,1,0} fusion-done(%b)"
    copy = "%c = (f32[1,1024,1024]{2,1,0:S(5)}, f32[1,1024,1024]{2,1,0}, u32[]) copy-start(%e)"
    copied = "ROOT %d = f32[1,1024,1024]{2,1,0:S(5)} copy-done(%c)"
    more = computation("inner", there, PLACE, SLICE)
    back, out = kernels(there, PLACE, begin, done, copy, copied, more=more)
    assert (back.bytes_from_host, back.bytes_to_host) == (4 * MEGA, 0)
    assert (out.bytes_from_host, out.bytes_to_host) == (0, 4 * MEGA)


def test_an_asynchronous_update_counts_once():
    stack = STACK.replace("1,0}", "1,0:S(5)}")
    new = "%n = f32[1,1024,1024]{2,1,0} parameter(2)"
    update = UPDATE.replace("1,0}", "1,0:S(5)}")
    fusion = "ROOT %f = f32[32,1024,1024]{2,1,0:S(5)} fusion(%s, %i, %n), kind=kLoop, calls=%inner"
    inputs = "f32[32,1024,1024]{2,1,0:S(5)}, s32[], f32[1,1024,1024]{2,1,0}"
    shapes = f"(({inputs}), f32[32,1024,1024]{{2,1,0:S(5)}}, u32[])"
    begin = f"%b = {shapes} async-start(%s, %i, %n), calls=%wrapped"
    done = "ROOT %e = f32[32,1024,1024]{2,1,0:S(5)} async-done(%b)"
    more = computation("inner", stack, PLACE, new, update) + computation(
        "wrapped", stack, PLACE, new, fusion
    )
    (cost,) = kernels(stack, PLACE, new, begin, done, more=more)
    assert (cost.bytes_from_host, cost.bytes_to_host) == (0, 4 * MEGA)


@pytest.mark.e2e
def test_a_step_has_the_needed_products_and_those_that_the_backward_pass_repeats():
    """The forward products of layers are computed twice, except the last one of a layer, whose
    result is not used."""
    step = programs.gpu_step(data=2, seq=4, num_heads=64, microbatches=1)
    model = step.spec.model
    tokens = programs.DEVICE_TOKENS
    costs = hlo_cost.read_kernel_costs(step.dump.hlo_text)
    executed = sum(cost.flops * cost.num_runs for cost in costs)
    attention = flops.attention_flops(model, programs.segment_lengths(step))
    needed = (flops.step_flops(model, programs.segment_lengths(step)) - 3 * attention) / 8
    D = model.hidden_size
    F = model.intermediate_size
    heads = 2 * model.num_heads + 2 * model.num_kv_heads
    layer = 2 * tokens * (D * heads * model.head_dim + 3 * D * F)
    again = model.num_layers * (layer - 2 * tokens * D * F)
    assert executed == pytest.approx(needed + again, rel=0.02)


def test_products_of_8_bit_floats_have_a_higher_rate():
    config = (
        '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    )
    call = f"%c = (bf16[512,2048]{{1,0}}, s8[64]{{0}}) custom-call(%a, %b), backend_config={config}"
    targets = ("__cublas$lt$matmul", "__cublas$lt$matmul$f8")
    plain, float8 = (
        kernels(A, B, f'{call}, custom_call_target="{target}"')[0].efficiency for target in targets
    )
    assert 1 == plain < float8 < 2


@pytest.mark.e2e
def test_linear_layers_call_cublas_for_8_bit_floats():
    """Forward, recomputed and gradients of activations; gradients of matrices are in bfloat16."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    small = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    config = programs.settings("model.linear_dtype=float8", "mesh.seq=1", **small)
    step = programs.step(config, compiled.make_devices("h100-80gb", 1))
    targets = re.findall(r'custom_call_target="(__cublas\$[\w$]*)"', step.dump.hlo_text)
    num_float8 = targets.count("__cublas$lt$matmul$f8")
    assert num_float8 >= 2 * 7, "seven matrices of a layer"
    assert 7 <= len(targets) - num_float8 < num_float8
