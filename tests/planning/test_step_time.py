"""Estimated time of a step: each part of the estimate is recomputed."""

import dataclasses

import pytest

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


def test_assumed_rates_replace_those_of_another_gpu():
    for name, assumed in gpus.ASSUMED.items():
        if name != "all":
            rates = {field: getattr(gpus.GPUS[name].ceilings, field) for field in assumed}
            assert rates == {field: rate for field, (rate, _) in assumed.items()}
