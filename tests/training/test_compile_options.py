"""Compile options: their sources, and their effects in a step compiled for absent H100s."""

import re

import jax
import pytest

from jaxsp.core import axes
from jaxsp.core.errors import UserError
from jaxsp.planning import absent
from jaxsp.system import device_mesh
from jaxsp.training import compile_options
from jaxsp.training.compile_options import CompileOptions
from tests import messages
from tests.planning import programs

FULL = {  # since 0.11.1
    "xla_disable_hlo_passes": "rematerialization",
    "xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_OFF",
}
BASE = FULL | {"xla_gpu_memory_limit_slop_factor": 110}
REPLICAS = {
    "xla_gpu_pipeline_all_reduce": "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_all_reduce_combine_threshold_bytes": 1 << 30,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
}
OVERLAP = {"xla_gpu_experimental_parallel_collective_overlap_limit": 8}
PREFETCH = {"xla_gpu_enable_pipelined_host_offloading": True}
STEP = {"is_tiled": False, "sums_replicas_early": False}
OFFLOAD = "memory.offload_activations=layer_inputs"


@pytest.fixture(scope="module")
def gpus():
    """Absent H100s."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    return absent.make_devices("h100-80gb", 8)


def choose(devices, *words, flags="", version="0.12.0.1", num_devices=8, **step):
    sizes = {axes.REPLICA: 1, axes.DATA: 1, axes.SEQ: num_devices}
    return compile_options.choose_options(
        programs.settings(*words).step,
        mesh=device_mesh.make_mesh(sizes, devices[:num_devices]),
        environ={"XLA_FLAGS": flags},
        **STEP | step,
        version=version,
    )


def of_0_10(options):
    """The options that jaxlib 0.10.1 gets in place of these."""
    kept = {
        name: value
        for name, value in options.items()
        if "pipeline" not in name and (name, value) not in REPLICAS.items()
    }
    return kept | {"xla_gpu_enable_pipelined_reduce_scatter": False}


@pytest.mark.parametrize("version", ["0.10.1", "0.11.1", "0.12.0.1.dev4"])
@pytest.mark.parametrize(
    ("words", "step", "expected"),
    [
        ((), {}, BASE),
        ((), {"is_tiled": True}, BASE | OVERLAP),
        ((), {"is_tiled": True, "num_devices": 1}, BASE),  # one device has no collectives
        ((), {"is_tiled": True, "sums_replicas_early": True}, BASE | REPLICAS | OVERLAP),
        ((OFFLOAD,), {}, BASE | PREFETCH),
        (("memory.offload_optimizer=state",), {}, BASE),
        (("memory.remat=full",), {}, FULL),
        (("model.linear_dtype=float8",), {}, BASE | {"xla_gpu_enable_triton_gemm": False}),
    ],
)
def test_programs_get_the_options_that_help_them(gpus, version, words, step, expected):
    actual = choose(gpus, *words, version=version, **step)
    assert actual.options == (of_0_10(expected) if version == "0.10.1" else expected)
    is_slow = OFFLOAD in words and version == "0.10.1"  # wrong offsets in pipelined loops
    assert ("not prefetched" in actual.description) == is_slow


def test_cpus_get_no_options():
    assert choose(jax.devices(), OFFLOAD) == CompileOptions(options={}, description="")


def test_options_in_xla_flags_override_own_options(gpus, tmp_path):
    ours = BASE | OVERLAP | PREFETCH
    file = tmp_path / "flags"
    for name in ours:
        flags = f"--xla_gpu_autotune_level=0 --{name}=false"
        file.write_text(flags)
        for xla_flags in (flags, str(file)):
            actual = choose(gpus, OFFLOAD, flags=xla_flags, is_tiled=True)
            assert actual.options == {other: ours[other] for other in ours if other != name}
            assert actual.description.endswith(f"XLA_FLAGS: xla_gpu_autotune_level, {name}")
    assert choose(gpus, OFFLOAD, flags=str(tmp_path / "none"), is_tiled=True).options == ours


def test_options_in_the_config_override_xla_flags_and_own_options(gpus):
    own = {"xla_gpu_enable_pipelined_host_offloading": False}
    own |= {"xla_gpu_memory_limit_slop_factor": 80}
    lines = ", ".join(f"{name}={str(value).lower()}" for name, value in own.items())
    word = f"run.xla_options={{{lines.replace('=', ': ')}}}"
    flags = "--xla_gpu_memory_limit_slop_factor=70 --xla_gpu_autotune_level=0"
    actual = choose(gpus, OFFLOAD, word, flags=flags)
    assert actual.options == BASE | own
    own_lines = f"run.xla_options: {lines}"
    assert actual.description.endswith(f"{own_lines}; XLA_FLAGS: xla_gpu_autotune_level")
    on_cpu = choose(jax.devices(), word)
    assert (on_cpu.options, on_cpu.description) == (own, own_lines)


FIXED = {"xla_gpu_deterministic_ops": True}


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.10.1", of_0_10(BASE) | FIXED),
        ("0.12.0.1", BASE | FIXED | {"xla_gpu_enable_triton_gemm": False}),
        ("0.13.0", FIXED),
    ],
)
def test_a_deterministic_run_gets_its_options_in_every_release(gpus, version, expected):
    flags = "--xla_gpu_deterministic_ops=false"
    actual = choose(gpus, "run.deterministic=true", num_devices=1, flags=flags, version=version)
    assert actual.options == expected
    assert actual.is_deterministic
    assert "deterministic" in actual.description


def test_an_option_that_contradicts_a_deterministic_run_is_refused(gpus):
    words = ("run.deterministic=true", "run.xla_options={xla_gpu_deterministic_ops: false}")
    field = "run.xla_options.xla_gpu_deterministic_ops = false"
    says = messages.containing(field, "run.deterministic = true")
    with pytest.raises(UserError, match=says):
        choose(gpus, *words)
    choose(gpus, words[0], "run.xla_options={xla_gpu_deterministic_ops: true}")


@pytest.mark.e2e
@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_deterministic_step_adds_in_a_fixed_order(gpus, slots):
    """cuDNN's backward passes are deterministic, and no two threads add to the same element."""
    small = {
        "hidden_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
    }
    words = (f"data.max_segments_per_row={slots}", "run.deterministic=true")
    text = programs.step(
        programs.settings(*words, **small, vocab_size=1024), gpus[:1]
    ).dump.hlo_text
    backward = [line for line in text.splitlines() if "fmhaSoftmaxBackward" in line]
    assert backward
    assert all(re.search(r'"force_deterministic":\s*true', line) for line in backward)
    scatters = [
        line for line in text.splitlines() if re.search(r" (scatter|select-and-scatter)\(", line)
    ]
    assert all("unique_indices=true" in line for line in scatters), scatters
