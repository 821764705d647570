"""Options that programs are compiled with: whose they are, and what comes of them in a step compiled for absent H100s."""

import collections
import re

import jax
import pytest

from jaxsp.core import axes, errors
from jaxsp.core import mesh as meshes
from jaxsp.hf import families
from jaxsp.planner import compiled
from jaxsp.training import step, xla
from tests.planner import programs

OLD, NEW = ({"xla_gpu_enable_pipelined_all_gather": True}, {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"})


def mesh(data, seq, devices=None):
    sizes = {axes.REPLICA: 1, axes.DATA: data, axes.SEQ: seq}
    return meshes.make(sizes, devices or jax.devices()[: data * seq])


@pytest.fixture(scope="module")
def gpus():
    """A mesh of H100s that are not there."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    absent = compiled.devices("h100-80gb", 8)
    return lambda data, seq: mesh(data, seq, absent[: data * seq])


def told(gpus, *words, flags="", version="0.12.0.1", seq=4):
    return xla.options(programs.settings(*words), mesh=gpus(2, seq), environ={"XLA_FLAGS": flags}, version=version)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.10.1", OLD), ("0.11.1", NEW), ("0.11.2", NEW), ("0.12.0", NEW), ("0.12.0.1", NEW), ("0.12.0.1.dev4", NEW)],
)
def test_each_release_that_was_tried_is_told_in_its_own_words(gpus, version, expected):
    found = told(gpus, version=version)
    assert found.options == expected
    assert found.words == "the next layer's weights are gathered while one is computed"


@pytest.mark.parametrize("version", ["0.10.0", "0.10.2", "0.11.0", "0.12.1", "0.13.0", "unknown"])
def test_another_release_is_told_nothing_and_the_banner_says_so(gpus, version):
    found = told(gpus, version=version)
    assert found.options == {}
    assert found.words == f"its defaults, because options were not tried with jaxlib {version}"


@pytest.mark.parametrize(("version", "most"), [("0.10.1", 8192), ("0.11.2", 8192), ("0.12.0.1", 32768)])
def test_long_shares_are_computed_without_the_memory_of_pipelining(gpus, version, most):
    for tokens, expected in ((most, True), (2 * most, False)):
        found = told(gpus, f"data.row_tokens={4 * tokens}", version=version)
        assert (bool(found.options), bool(found.words)) == (expected, expected), tokens
    assert not told(gpus, f"data.row_tokens={4 * most}", "batch.rows_at_once=2", version=version).options


def test_cpus_and_a_gpu_by_itself_are_told_nothing(gpus):
    nothing = xla.Told(options={}, words="")
    assert xla.options(programs.settings(), mesh=gpus(1, 1), environ={}, version="0.12.0.1") == nothing
    assert xla.options(programs.settings(), mesh=mesh(2, 4), environ={}, version="0.12.0.1") == nothing


def test_with_activations_in_host_memory_xla_is_not_to_save_memory_by_itself(gpus):
    offloads = "memory.offload_activations=residual"
    alone = xla.options(programs.settings(offloads), mesh=gpus(1, 1), environ={}, version="0.12.0.1")
    assert alone.options == {"xla_disable_hlo_passes": "rematerialization"}
    assert told(gpus, offloads).options == NEW | alone.options
    assert told(gpus, offloads, flags="--xla_disable_hlo_passes=dce").options == NEW
    assert told(gpus, offloads, version="0.13.0").options == {}


@pytest.mark.parametrize("name", sorted(xla.NAMES))
def test_what_xla_flags_sets_is_left_to_it(gpus, name, tmp_path):
    flags = f"--xla_gpu_autotune_level=0 --{name}=false"
    file = tmp_path / "flags"
    file.write_text(flags)
    for given in (flags, str(file)):
        found = told(gpus, flags=given)
        assert found.options == {}
        assert found.words == f"XLA_FLAGS: xla_gpu_autotune_level, {name}"
    assert told(gpus, flags="--xla_gpu_autotune_level=0").options == NEW
    assert told(gpus, flags=str(tmp_path / "none")).options == NEW


def test_what_the_config_asks_for_wins_over_both(gpus):
    off = "COLLECTIVE_PIPELINING_MODE_OFF"
    words = f"run.xla_options={{xla_gpu_pipeline_all_gather: {off}, xla_gpu_memory_limit_slop_factor: 80}}"
    found = told(gpus, words, flags="--xla_gpu_memory_limit_slop_factor=70 --xla_gpu_autotune_level=0")
    assert found.options == {"xla_gpu_pipeline_all_gather": off, "xla_gpu_memory_limit_slop_factor": 80}
    own = f"xla_gpu_pipeline_all_gather={off}, xla_gpu_memory_limit_slop_factor=80"
    assert found.words == f"run.xla_options: {own}; XLA_FLAGS: xla_gpu_autotune_level"
    on_cpu = xla.options(programs.settings(words), mesh=mesh(1, 1), environ={}, version="0.12.0.1")
    assert (on_cpu.options, on_cpu.words) == (found.options, f"run.xla_options: {own}")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("{--xla_gpu_autotune_level: 0}", "--xla_gpu_autotune_level is no name that begins with xla_."),
        ("{xla_gpu_autotune_level: null}", "xla_gpu_autotune_level must be true or false, a number, or text."),
    ],
)
def test_what_can_be_no_option_is_refused_before_anything_is_compiled(asked, says):
    with pytest.raises(errors.UserError, match=re.escape(f"run.xla_options = {asked}: {says}")):
        programs.settings(f"run.xla_options={asked}")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (
            {"xla_gpu_nonesuch": 3},
            f"run.xla_options.xla_gpu_nonesuch = 3: XLA of jaxlib {jax.lib.__version__} has no such option.",
        ),
        ({"xla_gpu_autotune_level": True}, "run.xla_options.xla_gpu_autotune_level = true: is not a valid int32 value."),
        ({"xla_gpu_deterministic_ops": 1}, "run.xla_options.xla_gpu_deterministic_ops = 1: is not a valid bool value."),
    ],
)
def test_an_option_that_xla_does_not_take_is_named(asked, says):
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    with pytest.raises(errors.UserError, match=re.escape(says)):
        xla.compiled(lowered, xla.Told(options=asked, words=""))


FIXED = {"xla_gpu_deterministic_ops": True}


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.10.1", FIXED), ("0.12.0.1", FIXED | {"xla_gpu_enable_triton_gemm": False}), ("0.13.0", FIXED)],
)
def test_a_deterministic_run_is_told_in_every_release(gpus, version, expected):
    asked = programs.settings("run.deterministic=true")
    found = xla.options(asked, mesh=gpus(1, 1), environ={"XLA_FLAGS": "--xla_gpu_deterministic_ops=false"}, version=version)
    assert found.options == expected
    assert found.deterministic
    assert "each of these can cost speed, and the last memory" in found.words


def test_on_cpus_a_deterministic_run_is_like_any_and_the_banner_says_so():
    found = xla.options(programs.settings("run.deterministic=true"), mesh=mesh(1, 1), environ={})
    assert (found.options, found.deterministic) == ({}, False)
    assert found.words == "run.deterministic changes nothing here: on CPUs numbers are the same each time in any case"


def test_an_option_that_contradicts_a_deterministic_run_is_refused(gpus):
    words = ("run.deterministic=true", "run.xla_options={xla_gpu_deterministic_ops: false}")
    says = "run.xla_options.xla_gpu_deterministic_ops = false: run.deterministic = true sets it to true. Leave one of them out."
    with pytest.raises(errors.UserError, match=re.escape(says)):
        told(gpus, *words)
    told(gpus, words[0], "run.xla_options={xla_gpu_deterministic_ops: true}")


@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_deterministic_step_adds_in_a_fixed_order(gpus, slots):
    """cuDNN's backward passes are told; nothing adds to the same place in the order in which threads come."""
    small = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512}
    words = (f"data.max_documents_per_row={slots}", "run.deterministic=true")
    text = programs.step(programs.settings(*words, **small, vocab_size=1024), list(gpus(1, 1).devices.flat)).written.text
    backward = [line for line in text.splitlines() if "fmhaSoftmaxBackward" in line]
    assert backward
    assert all(re.search(r'"force_deterministic":\s*true', line) for line in backward)
    scatters = [line for line in text.splitlines() if re.search(r" (scatter|select-and-scatter)\(", line)]
    assert all("unique_indices=true" in line for line in scatters), scatters


PASSED_ON = ("bitcast", "get-tuple-element", "all-gather-done", "copy", "tuple", "opt-barrier", "convert")


def loops(text):
    """Lines of each computation that is a loop's body and gathers weights."""
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    computations = re.findall(r"^%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE)
    return [body.splitlines() for name, body in computations if name in bodies and "all-gather-start" in body]


def uses(body):
    """Of each gather of weights in a body: `here` where anything is computed with it, else `later`; and the kinds of
    operations that run while it is under way.
    """
    parsed = [re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = .*? ([\w\-]+)\(([^)]*)\)", line) for line in body]
    lines = [(one[1], one[2], re.findall(r"%([\w.\-]+)", one[3])) for one in parsed if one]
    found = []
    for number, (name, kind, _) in enumerate(lines):
        if kind != "all-gather-start":
            continue
        reached, where = {name}, "later"
        for other, of_kind, operands in lines[number + 1 :]:
            if reached & set(operands):
                reached.add(other)
                where = "here" if of_kind not in PASSED_ON else where
        done = next(i for i, (_, kind, operands) in enumerate(lines) if kind == "all-gather-done" and name in operands)
        found.append((where, collections.Counter(kind for _, kind, _ in lines[number:done])))
    return found


def test_the_next_layers_weights_travel_while_one_is_computed(gpus):
    asked = programs.settings("mesh.data=2", "mesh.seq=4", "batch.rows_per_step=2", num_hidden_layers=6)
    model = families.model_config(asked.model.config, field="model.config")
    program, _ = compiled.program(asked, model=model, devices=list(gpus(2, 4).devices.flat))
    lowered = step.make(program).lower(*step.shapes(program))
    text = xla.compiled(lowered, xla.options(asked, mesh=program.mesh, environ={})).as_text()
    forward, backward = map(uses, loops(text))
    for loop in (forward, backward):
        assert {where for where, _ in loop} == {"later"}, "XLA left to itself: here"
        assert all(kinds["fusion"] + kinds["custom-call"] + kinds["while"] for _, kinds in loop)
