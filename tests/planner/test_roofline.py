"""How long a step would take: each part of the estimate by hand."""

import dataclasses

import numpy as np
import pytest

from jaxsp.planner import comms, gpus, roofline, work
from jaxsp.training import metrics
from tests.planner import programs

ROUND = gpus.Ceilings(
    peak_tflops=1000.0,
    products_tflops=500.0,
    attention_forward_tflops=400.0,
    attention_backward_tflops=200.0,
    memory_gb_s=1000.0,
    link_gb_s=100.0,
    network_gb_s=10.0,
    host_gb_s=20.0,
    sources={},
)


def sent(kind, group, size=1e9, times=2):
    return comms.Sent(kind=kind, op_name="", group=group, bytes_of={"bf16": size}, times=times)


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
    one = sent(kind, tuple(range(devices)))
    assert roofline.travel_s(one, ceilings=ROUND, node_devices=node_devices) == pytest.approx(expected)


def test_documents_fill_rows_and_the_last_is_cut():
    assert roofline.filled(rows=2, row_tokens=10, document_tokens=4).tolist() == [4, 4, 2, 4, 4, 2]
    assert roofline.filled(rows=1, row_tokens=8, document_tokens=8).tolist() == [8]


@pytest.fixture(scope="module")
def step():
    return programs.gpu_step(data=2, seq=4, num_heads=64, turns=1)


def estimate(step, *, pieces=None, travels=(), **ceilings):
    pieces = programs.pieces(step) if pieces is None else pieces
    ceilings = dataclasses.replace(ROUND, **ceilings)
    return roofline.estimate(step, list(travels), ceilings=ceilings, node_devices=8, piece_lengths=pieces)


def test_attention_takes_its_arithmetic_forward_and_two_and_a_half_times_that_backward(step):
    found = estimate(step)
    forward = metrics.attention_flops(step.program.model, programs.pieces(step)) / 8
    assert found.seconds[roofline.ATTENTION] == pytest.approx(forward / 400e12 + 2.5 * forward / 200e12)


def test_shorter_documents_need_less_attention_and_as_many_products(step):
    whole = programs.pieces(step)
    short = np.repeat(whole // 16, 16)
    one, other = estimate(step), estimate(step, pieces=short)
    assert other.seconds[roofline.ATTENTION] == pytest.approx(one.seconds[roofline.ATTENTION] / 16, rel=1e-3)
    assert other.seconds[roofline.KERNELS] == one.seconds[roofline.KERNELS]
    assert other.flops_executed < one.flops_executed


def test_kernels_take_their_products_or_their_memory_whichever_is_more(step):
    fast = estimate(step, products_tflops=1e9).seconds[roofline.KERNELS]
    wide = estimate(step, memory_gb_s=1e9).seconds[roofline.KERNELS]
    both = estimate(step).seconds[roofline.KERNELS]
    assert max(fast, wide) < both < fast + wide


def test_a_collective_hides_behind_what_runs_between_its_begin_and_its_end(step):
    found, group = estimate(step), tuple(range(8))
    one, *_, other = [kernel for kernel in work.kernels(step.written.text) if kernel.flops and kernel.times > 1]
    beside = max(one.flops / 500e12, one.device_bytes / 1e12)

    def added(begin, end):
        travel = dataclasses.replace(sent("all-to-all", group, size=1e12), begin=begin, end=end)
        with_it = estimate(step, travels=[travel])
        assert with_it.seconds[roofline.WAITED] + with_it.seconds[roofline.BESIDE] == pytest.approx(2 * 1e12 / 100e9)
        return with_it.step_s - found.step_s

    assert added(one.number, one.number + 1) == pytest.approx(20.0)
    assert added(one.number - 1, one.number + 1) == pytest.approx(20.0 - 2 * beside)
    assert added(0, other.number) == pytest.approx(0.0), "a loop is between, or attention"


def test_without_ceilings_for_its_kernel_or_dtype_there_is_no_estimate(step):
    other = dataclasses.replace(step, choice=dataclasses.replace(step.choice, kernel="blockwise"))
    assert estimate(other) is None


def test_every_ceiling_has_a_source_and_none_is_above_the_data_sheet():
    for gpu in gpus.KINDS.values():
        named = {field.name for field in dataclasses.fields(gpu.ceilings)} - {"sources"}
        assert gpu.ceilings.sources.keys() == named
        for rate in ("products_tflops", "attention_forward_tflops", "attention_backward_tflops"):
            assert getattr(gpu.ceilings, rate) < gpu.ceilings.peak_tflops


def test_a_gpu_that_is_here_is_known_by_what_jax_calls_it():
    assert gpus.of_kind("NVIDIA H200") is gpus.KINDS["h200-141gb"]
    assert gpus.of_kind("NVIDIA H100 PCIe") is None
