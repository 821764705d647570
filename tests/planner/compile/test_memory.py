"""What takes a compiled step's memory, against our formulas; and how that is read, from programs small enough for the eye."""

import jax
import pytest

from jaxsp.planner.compile import budget, compiled, gpus, memory
from jaxsp.planner.compile.compiled import CompilerDump
from jaxsp.training import memory_fit, memory_options, sharding
from tests import tolerances
from tests.messages import assert_names
from tests.planner import programs

pytestmark = pytest.mark.e2e

DEGREES = (8, 16, 32)


@pytest.fixture(
    scope="module",
    params=[(2, 4), *(pytest.param((1, degree), marks=pytest.mark.slow) for degree in DEGREES)],
    ids=lambda sizes: "x".join(map(str, sizes)),
)
def wide(request):
    """A step on so many devices that share rows, each with as many tokens: rows double with the devices."""
    data, seq = request.param
    return programs.gpu_step(data=data, seq=seq, num_heads=64, turns=1)


def test_each_cause_takes_what_its_formula_says(wide):
    for cause in memory.causes(wide):
        if cause.formula is not None:
            assert cause.device + cause.host == pytest.approx(
                cause.formula, rel=tolerances.CAUSE
            ), cause


def test_the_formula_that_chooses_what_is_compiled_is_near_what_a_step_takes(wide):
    needs = budget.measure_step(wide)
    assert (
        0.8
        < memory_fit.predict_bytes(
            wide.program, workspace_bytes=wide.choice.settings.workspace_bytes
        )
        / needs.device_total
        < 1.1
    )


def test_all_that_a_step_holds_is_read(wide):
    on_device = [array for array in memory.read_buffers(wide.dump) if not array.on_host]
    counted = wide.executable.memory_analysis().temp_size_in_bytes
    assert memory.compute_peak_bytes(on_device) == pytest.approx(counted, rel=tolerances.CAUSE)
    assert sum(memory.read_argument_bytes(wide.dump).values()) == pytest.approx(
        wide.executable.memory_analysis().argument_size_in_bytes, rel=tolerances.CAUSE
    )


@pytest.mark.slow
def test_what_grows_with_the_devices_is_repeated_keys_and_values():
    """From 8 devices to 32, with 8 K/V heads: each head is on 1, 2 and 4 devices."""
    steps = [programs.gpu_step(data=1, seq=seq, num_heads=64, turns=1) for seq in DEGREES]
    found = [
        {cause.name: cause for cause in memory.causes(step) if cause.formula is not None}
        for step in steps
    ]
    grows = {name for name in found[0] if found[-1][name].device > found[0][name].device}
    assert (
        grows
        == {name for name, cause in found[-1].items() if cause.repeats > 1}
        == {"keys and values", "all-to-all"}
    )
    assert [one["keys and values"].repeats for one in found] == [1, 2, 4]
    first, *later = (one["keys and values"] for one in found)
    assert [cause.device for cause in later] == [first.device * cause.repeats for cause in later]


SIZES = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "vocab_size": 4096,
    "num_attention_heads": 8,
}


@pytest.mark.parametrize(("asked", "microbatches"), [("state", 1), ("state_and_gradients", 2)])
def test_an_offloaded_optimizer_is_in_host_memory(asked, microbatches):
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    if jax.__version_info__ < memory_options.MIN_HOST_STATE_RELEASE:
        pytest.skip("arrays in host memory need jax 0.11.1 or later")
    words = [
        "mesh.seq=2",
        f"memory.offload_optimizer={asked}",
        "memory.offload_activations=layer_inputs",
        "optimizer.name=adamw",
    ]
    words.append(f"batch.rows_per_step={microbatches}")
    step = programs.step(programs.settings(*words, **SIZES), compiled.make_devices("h100-80gb", 2))
    found = {cause.name: cause for cause in memory.causes(step)}
    away = {
        "weights",
        "averages",
        "layer inputs",
        *(["gradients"] if asked == "state_and_gradients" else []),
    }
    for name, cause in found.items():
        if cause.formula is not None and name in away | {
            "gradients",
            "layers' weights to compute with",
        }:
            taken, other = (
                (cause.host, cause.device) if name in away else (cause.device, cause.host)
            )
            assert taken == pytest.approx(cause.formula, rel=tolerances.CAUSE), cause
            assert other < tolerances.CAUSE * cause.formula, cause
    assert ("layers' weights to compute with" in found) == (asked == "state")
    needs = memory_fit.read_memory_use(
        step.executable, kernel=step.choice.kernel, workspace_bytes=0
    )
    assert needs.host >= sum(found[name].host for name in away)
    assert needs.host == pytest.approx(
        memory_fit.program_offloaded_bytes(step.program).total, rel=tolerances.CAUSE
    )


@pytest.mark.parametrize(
    "microbatches", [*(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2)), 8]
)
def test_several_microbatches_take_no_more_of_host_and_device_than_one(microbatches):
    """With gradients that are added up after the backward pass, XLA keeps two microbatches' of both."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    words = [
        "mesh.data=2",
        "mesh.seq=4",
        f"batch.rows_per_step={2 * microbatches}",
        "memory.offload_activations=layer_inputs",
    ]
    step = programs.step(
        programs.settings(*words, **SIZES, num_hidden_layers=16),
        compiled.make_devices("h100-80gb", 8),
    )
    needs, program = budget.measure_step(step), step.program
    assert needs.host == memory_fit.program_offloaded_bytes(program).activations
    sets = sum(4 * sharding.shard_size(row, 8) for row in jax.tree.leaves(program.table))
    assert budget.break_down_peak(step).device[budget.GRADIENTS] == pytest.approx(sets, rel=0.1)
    assert (
        0.8
        < memory_fit.predict_bytes(program, workspace_bytes=step.choice.settings.workspace_bytes)
        / needs.device_total
        < 1.1
    )


BUFFERS = """BufferAssignment:
allocation 0: size 4096, page 0, parameter 3, shape |f32[4,256]| at ShapeIndex {}, maybe-live-out:
 value: <1 param.3 @0> (size=4096,offset=0): f32[4,256]{1,0}
allocation 1: size 8192, color 5, page 0, parameter 0, shape |f32[2048]| at ShapeIndex {}:
allocation 2: size 64, thread-local:
 value: <9 inner @0> (size=4,offset=0): f32[]
allocation 3: size 300, page 0, preallocated-temp:
 value: <2 fusion.1{1} @0> (size=200,offset=0): bf16[10,10]{1,0}
 value: <3 loop{0} (phi) @0> (size=200,offset=0): bf16[10,10]{1,0}
 value: <4 gather @0> (size=100,offset=200): s8[100]{0}
 value: <5 in-a-fusion @0> (size=100,offset=200): s8[100]{0}
allocation 4: size 40, color 5, preallocated-temp:
 value: <6 copy @5> (size=40,offset=0): f32[10]{0:S(5)}
"""

LIVES = """HloLiveRange (max 9):
  InstructionSequence:
    0:fusion.1
  BufferLiveRange:
    fusion.1{1}:0-3
    loop{0}:3-5
    gather{}:4-6
    copy{}:7-8
"""

TEXT = """HloModule jit_step
ENTRY %main {
  %a = f32[2048]{0} parameter(0), metadata={op_name="state.opt_state[\\'w\\'].mu"}
  %param.3 = f32[4,256]{1,0} parameter(3), metadata={op_name="state.master[\\'w\\']"}
  %gather = s8[100]{0} all-gather(%a), metadata={op_name="jit(step)/weights/all_gather"}
"""


def small():
    return CompilerDump(buffer_assignment=BUFFERS, live_ranges=LIVES, hlo_text=TEXT)


def test_arrays_are_read_with_their_places_and_lives():
    found = memory.read_buffers(small())
    assert [
        (
            one.dtype,
            one.dims,
            one.on_host,
            one.begin_byte,
            one.end_byte,
            one.first_use,
            one.last_use,
        )
        for one in found
    ] == [
        ("bf16", (10, 10), False, 0, 200, 0, 3),
        ("bf16", (10, 10), False, 0, 200, 3, 5),
        ("s8", (100,), False, 200, 300, 4, 6),
        ("f32", (10,), True, 0, 40, 7, 8),
    ]
    assert [one.op_name for one in found] == ["", "", "jit(step)/weights/all_gather", ""]


def test_the_most_counts_a_place_once_and_only_what_is_there_at_the_same_time():
    found = memory.read_buffers(small())
    assert memory.compute_peak_bytes(found[:2]) == 200  # at operation 3 both, in one place
    assert memory.compute_peak_bytes(found[:3]) == 300
    assert memory.compute_peak_bytes([found[0], found[2]]) == 200
    assert memory.compute_peak_bytes([]) == 0


def test_arguments_are_told_by_name_and_place():
    assert memory.read_argument_bytes(small()) == {
        ("state.master", False): 4096,
        ("state.opt_state", True): 8192,
    }


def test_causes_with_the_same_arrays_are_one():
    kind = memory._Kind
    found = memory._together(
        [
            kind(name="stream", sizes=(("bf16", 8),), formula=None),
            kind(name="stack", sizes=(("bf16", 8),), formula=16, layers=2),
            kind(name="queries", sizes=(("bf16", 8), ("bf16", 4)), formula=5),
            kind(name="keys", sizes=(("bf16", 4),), formula=6, repeats=2),
        ]
    )
    assert [(one.name, one.formula, one.repeats) for one in found] == [
        ("stream, queries, keys", None, 2),
        ("stack", 16, 1),
    ]


def test_an_unknown_gpu_is_an_error_that_names_those_that_are_known():
    with pytest.raises(ValueError, match=r"^--device = h100: ") as caught:
        compiled.make_cluster("h100", 8)
    assert_names(caught.value, *gpus.GPUS)
    assert str(caught.value).count("h100-80gb") == 2, "among the known ones, and as what was meant"


def test_a_missing_compiler_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(compiled, "COMPILER_PLUGINS", ("no_such_plugin",))
    with pytest.raises(ValueError, match=r"^--device = h100-80gb: .*pip install 'jaxsp\[plan\]'"):
        compiled.make_devices("h100-80gb", 8)
