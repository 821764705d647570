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
TRIED = ["0.10.1", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1", "0.12.0.1.dev4"]


def mesh(data, seq, devices=None):
    sizes = {axes.REPLICA: 1, axes.DATA: data, axes.SEQ: seq}
    return device_mesh.make_mesh(sizes, devices or jax.devices()[: data * seq])


@pytest.fixture(scope="module")
def gpus():
    """A mesh of absent H100s."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    devices = absent.make_devices("h100-80gb", 8)
    return lambda data, seq: mesh(data, seq, devices[: data * seq])


def choose(gpus, *words, flags="", version="0.12.0.1", data=2, seq=4, **step):
    environ = {"XLA_FLAGS": flags}
    return compile_options.choose_options(
        programs.settings(*words).step,
        mesh=gpus(data, seq),
        environ=environ,
        **STEP | step,
        version=version,
    )


STEP = {"is_tiled": False, "sums_replicas_early": False}


def of_0_10(options):
    """The options that jaxlib 0.10.1 gets in place of these."""
    kept = {
        name: value
        for name, value in options.items()
        if "pipeline" not in name and (name, value) not in REPLICAS.items()
    }
    return kept | {"xla_gpu_enable_pipelined_reduce_scatter": False}


OFFLOAD = "memory.offload_activations=layer_inputs"


@pytest.mark.parametrize("version", TRIED)
@pytest.mark.parametrize(
    ("words", "step", "sizes", "expected"),
    [
        ((), {}, (2, 4), BASE),
        ((), {"is_tiled": True}, (2, 4), BASE | OVERLAP),
        ((), {"is_tiled": True}, (1, 1), BASE),  # one device has no collectives
        ((), {"sums_replicas_early": True}, (2, 4), BASE | REPLICAS),
        ((), {"is_tiled": True, "sums_replicas_early": True}, (2, 4), BASE | REPLICAS | OVERLAP),
        ((OFFLOAD,), {}, (1, 1), BASE | PREFETCH),
        (
            ("memory.offload_activations=layer_inputs_and_attention",),
            {"is_tiled": True},
            (2, 4),
            BASE | OVERLAP | PREFETCH,
        ),
        (("memory.offload_optimizer=state",), {}, (2, 4), BASE),
        (("memory.remat=full",), {}, (2, 4), FULL),
        (("model.linear_dtype=float8",), {}, (2, 4), BASE | {"xla_gpu_enable_triton_gemm": False}),
    ],
)
def test_programs_get_the_options_that_help_them(gpus, version, words, step, sizes, expected):
    data, seq = sizes
    actual = choose(gpus, *words, version=version, data=data, seq=seq, **step)
    has_prefetch = PREFETCH.items() <= expected.items()
    if version == "0.10.1":
        if has_prefetch:  # wrong offsets of copies in pipelined loops
            assert "0.11.1" in actual.description
        expected = of_0_10(expected)
    assert actual.options == expected
    assert ("are prefetched" in actual.description) == (PREFETCH.items() <= expected.items())


def test_cpus_get_no_options():
    actual = compile_options.choose_options(
        programs.settings(OFFLOAD).step, mesh=mesh(2, 4), environ={}, version="0.12.0.1", **STEP
    )
    assert actual == CompileOptions(options={}, description="")


@pytest.mark.parametrize("name", sorted(BASE | OVERLAP | PREFETCH))
def test_options_in_xla_flags_override_own_options(gpus, name, tmp_path):
    ours = BASE | OVERLAP | PREFETCH
    rest = {other: value for other, value in ours.items() if other != name}
    flags = f"--xla_gpu_autotune_level=0 --{name}=false"
    file = tmp_path / "flags"
    file.write_text(flags)
    for xla_flags in (flags, str(file)):
        actual = choose(gpus, OFFLOAD, flags=xla_flags, is_tiled=True)
        assert actual.options == rest
        assert actual.description.endswith(f"XLA_FLAGS: xla_gpu_autotune_level, {name}")
    assert choose(gpus, OFFLOAD, flags="--xla_gpu_autotune_level=0", is_tiled=True).options == ours
    assert choose(gpus, OFFLOAD, flags=str(tmp_path / "none"), is_tiled=True).options == ours


@pytest.mark.parametrize("name", sorted(OVERLAP | PREFETCH))
def test_options_in_the_config_override_xla_flags_and_own_options(gpus, name):
    word = f"run.xla_options={{{name}: false, xla_gpu_memory_limit_slop_factor: 80}}"
    flags = f"--xla_gpu_memory_limit_slop_factor=70 --{name}=true --xla_gpu_autotune_level=0"
    own = {name: False, "xla_gpu_memory_limit_slop_factor": 80}
    actual = choose(gpus, OFFLOAD, word, flags=flags, is_tiled=True)
    assert actual.options == BASE | OVERLAP | PREFETCH | own
    lines = f"run.xla_options: {name}=false, xla_gpu_memory_limit_slop_factor=80"
    assert actual.description.endswith(f"{lines}; XLA_FLAGS: xla_gpu_autotune_level")
    on_cpu = compile_options.choose_options(
        programs.settings(word).step, mesh=mesh(1, 1), environ={}, version="0.12.0.1", **STEP
    )
    assert (on_cpu.options, on_cpu.description) == (own, lines)


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
    actual = choose(gpus, "run.deterministic=true", data=1, seq=1, flags=flags, version=version)
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
        programs.settings(*words, **small, vocab_size=1024), list(gpus(1, 1).devices.flat)
    ).dump.hlo_text
    backward = [line for line in text.splitlines() if "fmhaSoftmaxBackward" in line]
    assert backward
    assert all(re.search(r'"force_deterministic":\s*true', line) for line in backward)
    scatters = [
        line for line in text.splitlines() if re.search(r" (scatter|select-and-scatter)\(", line)
    ]
    assert all("unique_indices=true" in line for line in scatters), scatters
