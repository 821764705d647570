"""Estimated time of a step: each part of the estimate is recomputed."""

import dataclasses
import pathlib

import pytest

from jaxsp.attention.kernels import blockwise
from jaxsp.config import yaml_io
from jaxsp.model import flops
from jaxsp.planning import absent, gpus, hlo, step_time
from jaxsp.planning.gpus import Ceilings
from tests.planning import programs, sent_bytes

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
)


def test_documents_fill_rows_and_the_last_of_a_row_is_cut():
    lengths = step_time.make_segment_lengths(rows=2, row_tokens=10, document_tokens=4)
    assert lengths.tolist() == [4, 4, 2] * 2
    assert step_time.make_segment_lengths(rows=1, row_tokens=8, document_tokens=8).tolist() == [8]


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
    return programs.step(programs.settings(*words, **sizes), absent.make_devices("h100-80gb", 8))


def estimate(step, *, segment_lengths=None, ceilings=ROUND, **changes):
    if segment_lengths is None:
        segment_lengths = programs.segment_lengths(step)
    return step_time.estimate_step(
        step.spec,
        step.dump.hlo_text,
        ceilings=dataclasses.replace(ceilings, **changes),
        node_devices=8,
        segment_lengths=segment_lengths,
    )


@pytest.mark.e2e
def test_attention_has_two_and_a_half_times_the_arithmetic_backward(step):
    forward = flops.attention_flops(step.spec.model, programs.segment_lengths(step)) / 8
    assert estimate(step).seconds[step_time.ATTENTION] == pytest.approx(
        forward / 400e12 + 2.5 * forward / 200e12
    )


@pytest.mark.e2e
def test_blockwise_attention_takes_the_time_of_the_kernels_of_all_visited_blocks():
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    words = ["attention.kernel=blockwise", f"data.row_tokens={DEVICE_TOKENS}"]
    config = programs.settings(*words, num_attention_heads=8, hidden_size=1024, vocab_size=512)
    step = programs.step(config, absent.make_devices("h100-80gb", 1))
    program = hlo.parse(step.dump.hlo_text)
    lines = (line for each in program.computations.values() for line in each.values())
    loops = [line for line in lines if line.is_key_loop]
    num_blocks = DEVICE_TOKENS // blockwise.BLOCK_TOKENS
    num_visits = 4 * num_blocks * (num_blocks + 1) / 2  # in four layers
    for launch_us in (0.0, 500.0):
        seconds = 0.0
        for loop in loops:  # one forward and one backward
            for kernel in hlo.read_iteration(program, loop):
                busy_s = max(kernel.flops / 500e12, kernel.device_bytes / 1000e9)
                seconds += num_visits * max(busy_s, launch_us / 1e6)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(gpus.ASSUMED["all"], "key_loop_launch_us", (launch_us, "for this test"))
            estimated = estimate(step)
        assert estimated.seconds[step_time.ATTENTION] == pytest.approx(seconds, rel=2 / num_blocks)
    causes = sum(estimated.seconds.get(cause, 0) for cause in step_time.CAUSES)
    assert causes == pytest.approx(estimated.step_s)


@pytest.mark.e2e
def test_the_causes_add_up_to_the_step_and_collectives_take_as_long_as_their_bytes(step):
    estimated = estimate(step)
    seconds = estimated.seconds
    collectives = hlo.parse_collectives(step.dump.hlo_text)
    assert sum(seconds.get(cause, 0) for cause in step_time.CAUSES) == pytest.approx(
        estimated.step_s
    )
    assert seconds[step_time.EXPOSED_HOST_COPIES] == seconds[step_time.HIDDEN_HOST_COPIES] == 0
    together = seconds[step_time.EXPOSED_COLLECTIVES] + seconds[step_time.HIDDEN_COLLECTIVES]
    assert together == pytest.approx(sent_bytes.sum_bytes(collectives) / 100e9)
    assert list(estimated.transfer_seconds) == [sent.begin_line for sent in collectives]
    for sent, (total, exposed) in zip(
        collectives, estimated.transfer_seconds.values(), strict=True
    ):
        assert total == pytest.approx(sent.total_bytes / 100e9)
        assert 0 <= exposed <= total * 1.001


@pytest.mark.e2e
def test_kernels_overlap_the_gathers_and_scatters_of_all_layers(step):
    """XLA schedules them with the options of training/compile_options.py."""
    # without latency, for which the layers of the small model have too little work
    ceilings = dataclasses.replace(gpus.GPUS["h100-80gb"].ceilings, link_hop_us=0.0)
    estimated = estimate(step, ceilings=ceilings)
    of_layers = [
        sent
        for sent in hlo.parse_collectives(step.dump.hlo_text)
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


def test_every_ceiling_has_a_source_and_none_is_above_the_data_sheet():
    table = yaml_io.load(pathlib.Path(gpus.__file__).with_suffix(".yaml").read_text("utf-8"))
    for rates in (*table["rates"].values(), *table["assumed"].values()):
        sourced = {field: rate for field, rate in rates.items() if field != "base"}
        assert all(source for _, source in sourced.values())
    for gpu in gpus.GPUS.values():
        for rate in ("matmul_tflops", "attention_forward_tflops", "attention_backward_tflops"):
            assert getattr(gpu.ceilings, rate) < gpu.ceilings.peak_tflops


def test_assumed_rates_replace_those_of_another_gpu():
    for name, assumed in gpus.ASSUMED.items():
        if name != "all":
            rates = {field: getattr(gpus.GPUS[name].ceilings, field) for field in assumed}
            assert rates == {field: rate for field, (rate, _) in assumed.items()}


def test_a_gpu_is_found_by_the_name_that_jax_gives_it():
    assert gpus.find_by_device_kind("NVIDIA H200") is gpus.GPUS["h200-141gb"]
    assert gpus.find_by_device_kind("NVIDIA H100 PCIe") is None
