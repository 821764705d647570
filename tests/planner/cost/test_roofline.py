"""How long a step would take: each part of the estimate by hand."""

import dataclasses
import functools

import numpy as np
import pytest

from jaxsp.attention import registry
from jaxsp.model import flops
from jaxsp.planner.compile import compiled, gpus, hlo
from jaxsp.planner.compile.gpus import Ceilings
from jaxsp.planner.cost import comms, hlo_cost, roofline
from jaxsp.planner.cost.comms import Collective
from tests.planner import programs

ROUND = Ceilings(
    peak_tflops=1000.0,
    matmul_tflops=500.0,
    attention_forward_tflops=400.0,
    attention_backward_tflops=200.0,
    memory_gb_s=1000.0,
    link_gb_s=100.0,
    network_gb_s=10.0,
    host_gb_s=20.0,
    sources={},
)


def collective(kind, group, size=1e9, times=2):
    return Collective(
        operation=kind, op_name="", device_ids=group, bytes_by_dtype={"bf16": size}, num_runs=times
    )


@pytest.mark.parametrize(
    ("kind", "devices", "node_devices", "expected"),
    [
        ("all-to-all", 8, 8, 2 / 100),
        ("all-gather", 8, 8, 2 / 100),
        # 8 of the 15 others are elsewhere, behind a card of the device's own
        ("all-to-all", 16, 8, 2 * 8 / 15 / 10),
        # rings go out of a node over all its cards together, 80 GB/s
        ("all-gather", 16, 8, 2 / 80),
        ("all-gather", 32, 16, 2 / 100),
        ("all-to-all", 4, 1, 2 / 10),
    ],
)
def test_bytes_travel_at_the_rate_of_what_lies_between(kind, devices, node_devices, expected):
    one = collective(kind, tuple(range(devices)))
    assert roofline.estimate_collective_s(
        one, ceilings=ROUND, node_devices=node_devices
    ) == pytest.approx(expected)


def test_documents_fill_rows_and_the_last_is_cut():
    assert roofline.make_segment_lengths(rows=2, row_tokens=10, document_tokens=4).tolist() == [
        4,
        4,
        2,
        4,
        4,
        2,
    ]
    assert roofline.make_segment_lengths(rows=1, row_tokens=8, document_tokens=8).tolist() == [8]


DEVICE_TOKENS = 32768


@pytest.fixture(scope="module")
def step():
    """On 2 x 4 H100s, a device's tokens all at once, of a model whose products take longer than its gathers."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    words = [
        "mesh.data=2",
        "mesh.seq=4",
        "batch.rows_per_step=2",
        f"data.row_tokens={4 * DEVICE_TOKENS}",
    ]
    words.append(f"memory.mlp_tile_tokens={DEVICE_TOKENS}")
    sizes = {
        "hidden_size": 1536,
        "intermediate_size": 5120,
        "vocab_size": 4096,
        "num_attention_heads": 8,
    }
    return programs.step(programs.settings(*words, **sizes), compiled.make_devices("h100-80gb", 8))


@pytest.fixture(scope="module", autouse=True)
def read_once():
    """Reading a program's text takes longer than an estimate."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (comms, "parse_collectives"),
            (hlo_cost, "read_kernel_costs"),
            (hlo, "parse_module"),
        ):
            patch.setattr(module, name, functools.cache(getattr(module, name)))
        yield


def estimate(step, *, pieces=None, ceilings=ROUND, **changes):
    pieces = programs.pieces(step) if pieces is None else pieces
    ceilings = dataclasses.replace(ceilings, **changes)
    travels = comms.parse_collectives(step.dump.hlo_text)
    return roofline.estimate_step(
        step, travels, ceilings=ceilings, node_devices=8, segment_lengths=pieces
    )


def kernels_s(found):
    return found.seconds[roofline.MATMULS] + found.seconds[roofline.MEMORY_BANDWIDTH]


@pytest.mark.e2e
def test_attention_takes_its_arithmetic_forward_and_two_and_a_half_times_that_backward(step):
    found = estimate(step)
    forward = flops.attention_flops(step.program.model, programs.pieces(step)) / 8
    assert found.seconds[roofline.ATTENTION] == pytest.approx(
        forward / 400e12 + 2.5 * forward / 200e12
    )


@pytest.mark.e2e
def test_shorter_documents_need_less_attention_and_as_many_products(step):
    whole = programs.pieces(step)
    short = np.repeat(whole // 16, 16)
    one, other = estimate(step), estimate(step, pieces=short)
    assert other.seconds[roofline.ATTENTION] == pytest.approx(
        one.seconds[roofline.ATTENTION] / 16, rel=1e-3
    )
    assert kernels_s(other) == pytest.approx(kernels_s(one))
    assert other.hardware_flops < one.hardware_flops


@pytest.mark.e2e
def test_kernels_take_their_products_or_their_memory_whichever_is_more(step):
    fast, wide, both = (
        kernels_s(estimate(step, **rates))
        for rates in ({"matmul_tflops": 1e9}, {"memory_gb_s": 1e9}, {})
    )
    assert max(fast, wide) < both < fast + wide


@pytest.mark.e2e
def test_the_causes_add_up_to_the_step_and_its_collectives_take_what_their_bytes_do(step):
    found, sent = estimate(step), comms.parse_collectives(step.dump.hlo_text)
    causes = (
        roofline.MATMULS,
        roofline.MEMORY_BANDWIDTH,
        roofline.ATTENTION,
        roofline.EXPOSED_COLLECTIVES,
        roofline.EXPOSED_HOST_COPIES,
    )
    assert sum(found.seconds[cause] for cause in causes) == pytest.approx(found.step_s)
    assert (
        found.seconds[roofline.EXPOSED_HOST_COPIES]
        == found.seconds[roofline.HIDDEN_HOST_COPIES]
        == 0
    )
    together = (
        found.seconds[roofline.EXPOSED_COLLECTIVES] + found.seconds[roofline.HIDDEN_COLLECTIVES]
    )
    assert together == pytest.approx(sum(one.total_bytes for one in sent) / 100e9)
    assert [(one.operation, one.total_bytes, one.num_runs) for one in found.transfers] == [
        (one.operation, one.total_bytes, one.num_runs) for one in sent
    ]
    assert all(0 <= one.exposed_s <= one.seconds * 1.001 for one in found.transfers)


@pytest.mark.e2e
def test_slower_links_are_waited_for_and_change_nothing_else(step):
    one, other = estimate(step), estimate(step, link_gb_s=1.0)
    assert kernels_s(other) == pytest.approx(kernels_s(one))
    assert other.seconds[roofline.EXPOSED_COLLECTIVES] > 0.9 * sum(
        transfer.seconds for transfer in other.transfers
    )
    assert roofline.find_bottleneck(other.seconds) == roofline.EXPOSED_COLLECTIVES


@pytest.mark.e2e
def test_kernels_hide_the_gathers_and_the_scatters_of_all_layers(step):
    """As XLA has scheduled them, with the options of training/compile_options.py."""
    found = estimate(step, ceilings=gpus.GPUS["h100-80gb"].ceilings)
    of_layers = [
        (one, timed)
        for one, timed in zip(
            comms.parse_collectives(step.dump.hlo_text), found.transfers, strict=True
        )
        if one.operation in ("all-gather", "reduce-scatter") and one.num_runs > 1
    ]
    model = step.program.model
    # forward and backward, of all weights in bfloat16; and their gradients in float32
    weights = model.hidden_size * (2 * (8 + 8) * 128 + 3 * model.intermediate_size)
    gathered, scattered = (
        sum(one.total_bytes / one.num_runs for one, _ in of_layers if one.operation == kind)
        for kind in ("all-gather", "reduce-scatter")
    )
    assert [gathered, scattered] == pytest.approx([7 / 8 * 2 * 2 * weights, 7 / 8 * 4 * weights])
    for _, timed in of_layers:
        assert timed.exposed_s <= 0.1 * timed.seconds, timed


@pytest.mark.e2e
def test_without_ceilings_for_its_kernel_or_dtype_there_is_no_estimate(step):
    other = dataclasses.replace(
        step, choice=dataclasses.replace(step.choice, kernel=registry.KERNELS["blockwise"])
    )
    assert estimate(other) is None


def test_every_ceiling_has_a_source_and_none_is_above_the_data_sheet():
    for gpu in gpus.GPUS.values():
        named = {field.name for field in dataclasses.fields(gpu.ceilings)} - {"sources"}
        assert gpu.ceilings.sources.keys() == named
        for rate in ("matmul_tflops", "attention_forward_tflops", "attention_backward_tflops"):
            assert getattr(gpu.ceilings, rate) < gpu.ceilings.peak_tflops


def test_a_gpu_that_is_here_is_known_by_what_jax_calls_it():
    assert gpus.find_by_device_kind("NVIDIA H200") is gpus.GPUS["h200-141gb"]
    assert gpus.find_by_device_kind("NVIDIA H100 PCIe") is None
