"""Estimated time of a step: each part of the estimate is recomputed."""

import dataclasses
import functools

import jaxlib
import numpy as np
import pytest

from jaxsp.model import flops
from jaxsp.planner.compile import compiled, gpus, hlo
from jaxsp.planner.compile.gpus import Ceilings
from jaxsp.planner.cost import comms, hlo_cost, roofline
from jaxsp.planner.cost.comms import Collective
from jaxsp.training import compile_options
from tests import batches
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
    link_hop_us=0.0,
    network_hop_us=0.0,
    sources={},
)


def collective(kind, group, size=1e9, times=2):
    return Collective(
        operation=kind, op_name="", groups=(group,), bytes_by_dtype={"bf16": size}, num_runs=times
    )


@pytest.mark.parametrize(
    ("kind", "devices", "node_devices", "expected"),
    [
        ("all-to-all", 8, 8, 2 / 100),
        ("all-gather", 8, 8, 2 / 100),
        # 8 of the 15 other devices are in another node; each device has a network card
        ("all-to-all", 16, 8, 2 * 8 / 15 / 10),
        # rings leave a node through all of its cards together, 80 GB/s
        ("all-gather", 16, 8, 2 / 80),
        ("all-gather", 32, 16, 2 / 100),
        ("all-to-all", 4, 1, 2 / 10),
    ],
)
def test_a_collective_takes_as_long_as_the_slowest_links_between_its_devices(
    kind, devices, node_devices, expected
):
    sent = collective(kind, tuple(range(devices)))
    seconds = roofline.estimate_collective_s(sent, ceilings=ROUND, node_devices=node_devices)
    assert seconds == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "hops_us"),
    [
        # a ring has 14 hops inside nodes and 1 between them
        ("all-gather", 14 * 2 + 30),
        # 2 x 7 hops inside nodes, and a tree of 2 nodes
        ("all-reduce", 14 * 2 + 2 * 30),
        ("collective-permute", 2 + 30),
    ],
)
def test_each_run_of_a_collective_waits_for_the_latency_of_its_hops(kind, hops_us):
    sent = collective(kind, tuple(range(16)))
    slow = dataclasses.replace(ROUND, link_hop_us=2.0, network_hop_us=30.0)
    without, seconds = (
        roofline.estimate_collective_s(sent, ceilings=ceilings, node_devices=8)
        for ceilings in (ROUND, slow)
    )
    assert seconds - without == pytest.approx(2 * hops_us * 1e-6)


def test_a_ring_inside_nodes_is_faster_than_one_between_them():
    inside = collective("collective-permute", tuple(range(8)))
    between = collective("collective-permute", tuple(range(0, 64, 8)))
    assert [
        roofline.estimate_collective_s(sent, ceilings=ROUND, node_devices=8)
        for sent in (inside, between)
    ] == pytest.approx([2 / 100, 2 / 10])


def test_documents_fill_rows_and_the_last_of_a_row_is_cut():
    lengths = roofline.make_segment_lengths(rows=2, row_tokens=10, document_tokens=4)
    assert lengths.tolist() == [4, 4, 2] * 2
    assert roofline.make_segment_lengths(rows=1, row_tokens=8, document_tokens=8).tolist() == [8]


DEVICE_TOKENS = 32768


@pytest.fixture(scope="module")
def step():
    """A step for 2 x 4 H100s, without tiles, of a model whose matrix products take longer than its
    gathers."""
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
    """Caches the parsers, because parsing a program takes longer than estimating it."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (comms, "parse_collectives"),
            (hlo_cost, "read_kernel_costs"),
            (hlo, "parse_module"),
        ):
            patch.setattr(module, name, functools.cache(getattr(module, name)))
        yield


def estimate(step, *, segment_lengths=None, ceilings=ROUND, **changes):
    if segment_lengths is None:
        segment_lengths = programs.segment_lengths(step)
    return roofline.estimate_step(
        step,
        comms.parse_collectives(step.dump.hlo_text),
        ceilings=dataclasses.replace(ceilings, **changes),
        node_devices=8,
        segment_lengths=segment_lengths,
    )


def kernels_s(estimated):
    return estimated.seconds[roofline.MATMULS] + estimated.seconds[roofline.MEMORY_BANDWIDTH]


@pytest.mark.parametrize(
    ("op_name", "flops", "cause"),
    [
        ("jit(step)/while/body/delta_net/dot_general", 2.0, roofline.DELTA_NETS),
        (
            "jit(step)/transpose(jvp())/checkpoint/delta_net/vmap()/while/mul",
            0.0,
            roofline.DELTA_NETS,
        ),
        ("jit(step)/transpose(jvp(delta_net))/while/body/mul", 0.0, roofline.DELTA_NETS),
        ("jit(step)/while/body/dot_general", 2.0, roofline.MATMULS),
        ("jit(step)/while/body/mul", 0.0, roofline.MEMORY_BANDWIDTH),
    ],
)
def test_kernels_of_delta_nets_are_a_cause_of_their_own(op_name, flops, cause):
    kernel = hlo_cost.KernelCost(
        line_number=1,
        op_name=op_name,
        flops=flops,
        device_bytes=1.0,
        bytes_from_host=0.0,
        bytes_to_host=0.0,
        num_runs=1,
        begin_line=1,
        end_line=1,
    )
    assert roofline._find_cause(kernel) == cause


@pytest.mark.e2e
def test_attention_has_two_and_a_half_times_the_arithmetic_backward(step):
    forward = flops.attention_flops(step.spec.model, programs.segment_lengths(step)) / 8
    assert estimate(step).seconds[roofline.ATTENTION] == pytest.approx(
        forward / 400e12 + 2.5 * forward / 200e12
    )


@pytest.mark.e2e
def test_shorter_documents_change_only_attention(step):
    long = estimate(step)
    lengths = np.repeat(programs.segment_lengths(step) // 16, 16)
    short = estimate(step, segment_lengths=lengths)
    assert short.seconds[roofline.ATTENTION] == pytest.approx(
        long.seconds[roofline.ATTENTION] / 16, rel=1e-3
    )
    assert kernels_s(short) == pytest.approx(kernels_s(long))
    assert short.hardware_flops < long.hardware_flops


@pytest.mark.e2e
def test_a_kernel_takes_the_longer_of_its_products_and_its_memory_traffic(step):
    fast, wide, both = (
        kernels_s(estimate(step, **rates))
        for rates in ({"matmul_tflops": 1e9}, {"memory_gb_s": 1e9}, {})
    )
    assert max(fast, wide) < both < fast + wide


@pytest.mark.e2e
def test_the_causes_add_up_to_the_step_and_collectives_take_as_long_as_their_bytes(step):
    estimated = estimate(step)
    seconds = estimated.seconds
    collectives = comms.parse_collectives(step.dump.hlo_text)
    assert sum(seconds.get(cause, 0) for cause in roofline.CAUSES) == pytest.approx(
        estimated.step_s
    )
    assert seconds[roofline.EXPOSED_HOST_COPIES] == seconds[roofline.HIDDEN_HOST_COPIES] == 0
    together = seconds[roofline.EXPOSED_COLLECTIVES] + seconds[roofline.HIDDEN_COLLECTIVES]
    assert together == pytest.approx(comms.sum_bytes(collectives) / 100e9)
    assert list(estimated.transfer_seconds) == [sent.begin_line for sent in collectives]
    for sent, (total, exposed) in zip(
        collectives, estimated.transfer_seconds.values(), strict=True
    ):
        assert total == pytest.approx(sent.total_bytes / 100e9)
        assert 0 <= exposed <= total * 1.001


@pytest.mark.e2e
def test_slower_links_only_expose_collectives(step):
    slow = estimate(step, link_gb_s=0.5)
    assert kernels_s(slow) == pytest.approx(kernels_s(estimate(step)))
    transfers_s = sum(total for total, _ in slow.transfer_seconds.values())
    assert slow.seconds[roofline.EXPOSED_COLLECTIVES] > 0.9 * transfers_s
    assert roofline.find_bottleneck(slow.seconds) == roofline.EXPOSED_COLLECTIVES


@pytest.mark.e2e
def test_kernels_overlap_the_gathers_and_scatters_of_all_layers(step):
    """XLA schedules them with the options of training/compile_options.py."""
    # without latency, for which the layers of the small model have too little work
    ceilings = dataclasses.replace(gpus.GPUS["h100-80gb"].ceilings, link_hop_us=0.0)
    estimated = estimate(step, ceilings=ceilings)
    of_layers = [
        sent
        for sent in comms.parse_collectives(step.dump.hlo_text)
        if sent.operation in ("all-gather", "reduce-scatter") and sent.num_runs > 1
    ]
    model = step.spec.model
    # forward and backward, of all weights in bfloat16; and their gradients in float32
    weights = model.hidden_size * (2 * (8 + 8) * 128 + 3 * model.intermediate_size)
    gathered, scattered = (
        sum(sent.total_bytes / sent.num_runs for sent in of_layers if sent.operation == kind)
        for kind in ("all-gather", "reduce-scatter")
    )
    assert [gathered, scattered] == pytest.approx([7 / 8 * 2 * 2 * weights, 7 / 8 * 4 * weights])
    for sent in of_layers:
        total, exposed = estimated.transfer_seconds[sent.begin_line]
        assert exposed <= 0.1 * total, sent


def test_collectives_inside_a_node_and_between_nodes_overlap():
    kinds = (("all-gather", range(8)), ("all-reduce", (0, 8)), ("all-gather", range(16)))
    streams = [
        roofline._schedule_collective(collective(kind, tuple(group)), ROUND, 8).stream
        for kind, group in kinds
    ]
    assert streams[0] != streams[1] == streams[2]


@pytest.mark.e2e
@pytest.mark.skipif(
    compile_options.parse_version(jaxlib.__version__) < compile_options.MIN_PIPELINE_RELEASE,
    reason="older jaxlib has no options for sums over replicas",
)
def test_kernels_overlap_the_sums_over_replicas():
    """A layer's gradients are summed while the next layer computes: see OVERLAP_REPLICAS."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    words = ("mesh.replica=2", "mesh.data=8", "mesh.seq=1", "batch.rows_per_step=16")
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 2048}
    config = programs.settings(*words, num_attention_heads=8, **sizes)
    step = programs.step(config, compiled.make_devices("h100-80gb", 16))
    estimated = roofline.estimate_step(
        step,
        comms.parse_collectives(step.dump.hlo_text),
        ceilings=dataclasses.replace(gpus.GPUS["h100-80gb"].ceilings, network_hop_us=0.0),
        node_devices=8,
        segment_lengths=programs.segment_lengths(step),
    )
    (of_layers,) = (
        sent
        for sent in comms.parse_collectives(step.dump.hlo_text)
        if sent.operation == "all-reduce" and sent.num_runs > 1
    )
    model = step.spec.model
    weights = 4 * model.hidden_size**2 + 3 * model.hidden_size * model.intermediate_size
    assert of_layers.total_bytes == pytest.approx(of_layers.num_runs * 4 * weights / 8)
    total, exposed = estimated.transfer_seconds[of_layers.begin_line]
    assert exposed <= 0.1 * total


@pytest.mark.e2e
def test_without_ceilings_for_its_kernel_or_dtype_there_is_no_estimate(step):
    spec = dataclasses.replace(step.spec, attention=batches.attention_choice(seq=4))
    other = dataclasses.replace(step, spec=spec)
    assert estimate(other) is None


def test_every_ceiling_has_a_source_and_none_is_above_the_data_sheet():
    for gpu in gpus.GPUS.values():
        named = {field.name for field in dataclasses.fields(gpu.ceilings)} - {"sources"}
        assert gpu.ceilings.sources.keys() == named
        for rate in ("matmul_tflops", "attention_forward_tflops", "attention_backward_tflops"):
            assert getattr(gpu.ceilings, rate) < gpu.ceilings.peak_tflops


def test_a_gpu_is_found_by_the_name_that_jax_gives_it():
    assert gpus.find_by_device_kind("NVIDIA H200") is gpus.GPUS["h200-141gb"]
    assert gpus.find_by_device_kind("NVIDIA H100 PCIe") is None
