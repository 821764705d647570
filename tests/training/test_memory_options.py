"""Activations that memory options keep and offload, and the choice of what fits.

`test_exactness.py` shows that the options change no numbers.
"""

import dataclasses
import functools
import re

import jax
import pytest

from jaxsp.attention.kernels.kernel import KernelSettings
from jaxsp.attention.strategy import combine
from jaxsp.blocks.config import MLP
from jaxsp.checkpoint import reader, run_paths
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.checkpoint.retention import CheckpointConfig
from jaxsp.checkpoint.writer import CheckpointWriter
from jaxsp.core import units
from jaxsp.core.errors import UserError
from jaxsp.model import decoder
from jaxsp.planning import candidates, estimate, fit
from jaxsp.planning.fit import MemoryUse
from jaxsp.sharding import sharding
from jaxsp.system import device_memory
from jaxsp.system.device_memory import MemoryLimit
from jaxsp.training import step_gradients, train_state, train_step
from jaxsp.training.specs import make_spec
from tests import batches, messages, tolerances
from tests.training import runs

pytestmark = pytest.mark.usefixtures("small_waits")


ADAMW = functools.partial(
    batches.make_config, name="adamw", learning_rate=1e-2, weight_decay=0.1, eps=1e-5
)


@pytest.mark.e2e
@runs.NEEDS_HOST
def test_a_state_in_host_memory_is_saved_and_resumes_anywhere(tmp_path):
    """Two steps with the state on the host, a checkpoint, and one without equal three without."""
    weights = runs.draw_weights(runs.MODEL)
    plain = runs.compile_in_thread((1, 2, 4), config=ADAMW(), functions=("step",))
    offloaded = runs.compile_in_thread(
        (1, 4, 2), config=ADAMW(memory={"offload_optimizer": "state"}), functions=("step",)
    ).result()
    state = offloaded.state(weights)
    rows = offloaded.rows(runs.ROWS)
    for _ in range(2):
        state, _ = offloaded.step(state, rows)
    averages = [
        leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.size > 100 * runs.MODEL.num_layers
    ]
    assert {leaf.sharding.memory_kind for leaf in averages} == {device_memory.MEMORY_KIND}
    meta = CheckpointMeta(config={}, model={}, data={}, step=2, rows_consumed=0, num_tokens_total=0)
    with CheckpointWriter(tmp_path, table=offloaded.spec.table, config=CheckpointConfig()) as store:
        store.save(state, meta)
        assert (tmp_path / "2" / run_paths.MASTER).is_dir(), (
            "written before the next step takes its memory"
        )
        offloaded.step(state, rows)
    plain = plain.result()
    went_on = []
    for run in (plain, offloaded):
        restored = reader.restore(
            tmp_path / "2",
            train_state.abstract_inputs(run.spec)[0],
            table=run.spec.table,
            num_steps=2,
        )
        went_on.append((run, run.step(restored, run.rows(runs.ROWS))[0]))
    straight = plain.state(weights)
    rows = plain.rows(runs.ROWS)
    for _ in range(3):
        straight, _ = plain.step(straight, rows)
    right = plain.unpad(straight.master)
    for run, state in went_on:
        actual = run.unpad(state.master)
        assert (
            max(batches.relative_error(actual[name], right[name]) for name in right)
            < tolerances.OPTIMIZER
        )


# Residuals


@functools.cache
def residuals(**memory):
    """Types of the stacked residuals of all layers; primitives of a layer's backward pass."""
    spec = runs.make_spec(memory, sizes=(1, 2, 4), compute_dtype="bfloat16")
    run = runs.Run(spec, rows_per_microbatch=1, gradients=None, step=None)
    state = run.state(runs.draw_weights(runs.MODEL))
    jaxpr = jax.make_jaxpr(functools.partial(step_gradients.compute_gradients, spec))(
        state.master, run.rows(runs.ROWS)
    )
    number = runs.MODEL.num_layers
    scans = [
        e
        for e in batches.equations(jaxpr)
        if e.primitive.name == "scan" and e.params["length"] == number
    ]
    forward, backward = scans
    stacked = [
        variable.aval for variable in forward.outvars if variable.aval.shape[:1] == (number,)
    ]
    return stacked, [e.primitive.name for e in batches.equations(backward.params["jaxpr"])]


def kept(memory):
    """Shapes and dtypes of a layer's residuals, and the primitives of its backward pass."""
    stacked, again = residuals(**memory)
    return sorted((aval.shape[1:], str(aval.dtype)) for aval in stacked), again


def whole_shapes():
    """Shapes of gathered weights and of their transposes."""
    rows = jax.tree.leaves(decoder.param_table(runs.MODEL)["layers"])
    shapes = [row.shape for row in rows if sharding.choose_placement(row, 8).dim is not None]
    return {*shapes, *(shape[::-1] for shape in shapes)}


@pytest.mark.parametrize(
    "memory",
    [{"remat": "full"}, {"remat": "none", "mlp_tile_tokens": 5, "loss_tile_tokens": 7}],
    ids=str,
)
def test_no_whole_weight_is_kept(memory):
    shapes, again = kept(memory)
    assert whole_shapes() >= {(runs.MODEL.intermediate_size, runs.MODEL.hidden_size)}
    assert not {shape for shape, _ in shapes} & whole_shapes(), shapes
    assert "all_gather" in again, "they are gathered again"


def test_attention_is_kept_with_the_input_of_a_layer_unless_all_is_computed_again():
    model = runs.MODEL
    layer_input = ((1, 16, model.hidden_size), "bfloat16")
    assert kept({"remat": "full"})[0] == [layer_input]
    heads = model.num_heads // 4
    log_sum_exp = ((1, heads, 64), "float32")
    attention = ((1, 64, heads, model.head_dim), "bfloat16")
    assert kept({"remat": "save_attention"})[0] == [log_sum_exp, layer_input, attention]


def test_none_makes_no_product_and_no_all_to_all_of_the_forward_pass_again():
    """A layer's backward pass has two products per matrix and transposes two all-to-alls."""
    _, none = kept({"remat": "none"})
    _, attention_kept = kept({"remat": "save_attention"})
    assert (none.count("all_to_all"), attention_kept.count("all_to_all")) == (2, 4)
    # Except two whose results are not used: those of the last, and of gate or up
    assert attention_kept.count("dot_general") - none.count("dot_general") >= 5


def test_only_layer_inputs_and_attention_are_offloaded():
    stacked, _ = residuals(
        remat="save_attention_and_mlp", offload_activations="layer_inputs_and_attention"
    )
    model = runs.MODEL
    space = jax.memory.Space
    where = {aval.shape[3:]: aval.memory_space for aval in stacked}
    heads = (model.num_heads // 4, model.head_dim)
    assert where.pop((model.intermediate_size,)) == space.Device
    assert where[(model.hidden_size,)] == space.Host
    assert set(where.values()) == {space.Host}, where
    assert any(shape[-2:] == heads or shape == (model.num_heads // 4,) for shape in where), where


# Choices


def test_a_step_with_other_values_is_the_step_of_that_config():
    config = batches.make_config().step
    devices = list(batches.mesh(1, 1, 4).devices.flat)
    spec = make_spec(config.change(mesh={"seq": 2}), batches.model(), devices=devices)
    changed = spec.respec(mesh={"seq": 4}, row_tokens=512)
    assert changed == make_spec(changed.config, batches.model(), devices=devices)
    assert changed.mesh.shape["seq"] == 4
    assert changed.attention.strategy == combine(4)
    remat = spec.respec(memory={"remat": "full"}, rows_per_step=16)
    assert (remat.attention, remat.mesh) == (spec.attention, spec.mesh)
    assert remat.config == spec.config.change(memory={"remat": "full"}, rows_per_step=16)


@pytest.mark.parametrize(
    ("level", "version", "field", "problem"),
    [
        ("UNKNOWN", "0.11.0", "offload_activations", "memory.offload_activations = layer_inputs: "),
        ("O1", "0.11.1", "offload_activations", "JAX_OPTIMIZATION_LEVEL = O1: "),
        ("O2", "0.11.1", "offload_optimizer", "JAX_OPTIMIZATION_LEVEL = O2: "),
        ("O0", "0.11.1", "offload_activations", None),
        ("O1", "0.11.2", "offload_activations", None),
        ("O1", "0.11.1", None, None),
    ],
)
def test_releases_with_wrong_gradients_are_refused_offload(level, version, field, problem):
    values = {"offload_activations": "layer_inputs", "offload_optimizer": "state"}
    memory = {} if field is None else {field: values[field]}
    step = batches.make_config(memory=memory).step
    jax.config.update("jax_optimization_level", level)
    try:
        found = candidates.find_problems(step, platform="gpu", version=version)
    finally:
        jax.config.update("jax_optimization_level", "UNKNOWN")
    assert [text.startswith(str(problem)) for text in found] == ([] if problem is None else [True])


TAKES = {"none": 3.0, "save_attention_and_mlp": 2.5, "save_attention": 2.0, "full": 1.0}
"""GiB of a device that a step needs, by remat."""


@pytest.fixture
def fit_step(monkeypatch):
    """Function that chooses the step of a device with these GiB; nothing is compiled, and the
    formula is exact.

    Args: limit: GiB before margins. uncounted: GiB of cuDNN's workspace. host: GiB of host memory
        that the step needs, of 3.
    """
    compiled = []
    empty = jax.jit(lambda: 0).lower().compile()

    def take(spec):
        return int(TAKES[spec.remat_policy.remat] * units.GIB)

    def fit_step(size, *, limit=None, uncounted=0.0, host=0, **memory):
        workspace = int(uncounted * units.GIB)
        limits_ = MemoryLimit((limit or size) * units.GIB, 100 * units.GIB, 3 * units.GIB)
        room = limits_._replace(device=size * units.GIB)
        monkeypatch.setattr(device_memory, "find_limits", lambda spec: limits_)
        monkeypatch.setattr(estimate, "subtract_reserves", lambda spec, _: room)
        monkeypatch.setattr(estimate, "predict_bytes", lambda spec: take(spec) + workspace)
        monkeypatch.setattr(train_step, "compile", lambda spec: compiled.append(spec) or empty)
        monkeypatch.setattr(
            fit,
            "read_memory_use",
            lambda *_: MemoryUse(take(compiled[-1]), host * units.GIB, workspace),
        )
        spec = runs.make_spec(memory)
        (kernel,) = spec.attention.kernels
        settings = KernelSettings(workspace_bytes=workspace)
        kernels = (dataclasses.replace(kernel, settings=settings),)
        choice = dataclasses.replace(spec.attention, kernels=kernels)
        return fit.compile_fitting_step(dataclasses.replace(spec, attention=choice))

    return fit_step


@pytest.mark.parametrize(
    ("size", "uncounted", "why"),
    [
        (1.5, 0, ["2.0 GiB"]),  # by the formula; not compiled
        (1.92, 0, ["2.0 GiB", "1.9 GiB"]),
        (2.5, 0.6, ["2.6 GiB", "0.6 GiB", "2.5 GiB"]),
    ],
)
def test_auto_recomputes_attention_if_its_output_does_not_fit(fit_step, size, uncounted, why):
    """The reason has the memory that attention's output needs, cuDNN's part, and the room."""
    actual = fit_step(size, uncounted=uncounted)
    assert actual.spec.config.memory.remat == "full"
    assert re.findall(r"[\d.]+ GiB", actual.full_remat_reason) == why
    assert actual.full_remat_reason in fit.describe_compiled(actual)


def test_a_step_that_cannot_fit_is_refused_with_suggestions(fit_step):
    offloads = runs.works_here({"offload_optimizer": "state"})
    with pytest.raises(UserError) as found:
        fit_step(0.5)
    assert re.findall(r"[\d.]+ GiB", str(found.value)) == ["1.0 GiB", "0.5 GiB"]
    assert re.findall(r"[\w.]+=\w+", str(found.value)) == [
        "memory.offload_activations=layer_inputs",
        *["memory.offload_optimizer=state"] * offloads,
        "batch.rows_per_step=1",
        "data.max_segments_per_row=8",
        "mesh.seq=8",
    ]
    with pytest.raises(UserError, match=messages.containing("2.0 GiB", "1.5 GiB")):
        fit_step(1.5, remat="save_attention")
    says = messages.containing("4.0 GiB", "3.0 GiB", "memory.offload_activations=none")
    for size in (80, 0.9):  # the second device lacks only its margin
        with pytest.raises(UserError, match=says):
            fit_step(size, limit=80, host=4, offload_activations="layer_inputs")


@pytest.mark.parametrize("node", [(1.2, {"uncounted": 0.5}), (0.9, {"limit": 1.2})])
def test_margins_and_estimates_refuse_nothing_and_the_banner_warns(fit_step, node):
    size, options = node
    actual = fit_step(size, remat="full", **options)
    assert actual.memory_use.device == units.GIB
    silent = dataclasses.replace(actual, shortage="")
    assert fit.describe_compiled(actual) != fit.describe_compiled(silent)
    assert fit_step(1.6, remat="full", uncounted=0.5).shortage == ""


@pytest.mark.parametrize(
    ("during_attention", "has_other_layer"), [("never", False), ("always", False), ("never", True)]
)
def test_a_gpu_that_offloads_less_than_requested_ends_the_run(
    monkeypatch, during_attention, has_other_layer
):
    """One array may be left out: of two layers' inputs and a gradient, and of the inputs of three
    layers of which one is not in a loop."""
    model = batches.model()
    if has_other_layer:
        model = batches.expert_model(num_layers=3)
        first = dataclasses.replace(model.layers[0], feed_forward=MLP)
        model = dataclasses.replace(model, layers=(first, *model.layers[1:]))
    memory = {"remat": "full", "offload_activations": "layer_inputs"}
    memory["offload_during_attention"] = during_attention
    spec = runs.make_spec(memory, model=model)
    monkeypatch.setattr(fit, "is_gpu", lambda spec: True)
    fit.check_offloads(spec, MemoryUse(0, 2 * 3840))
    with pytest.raises(RuntimeError, match=messages.containing("memory.offload_activations=none")):
        fit.check_offloads(spec, MemoryUse(0, 2 * 3840 - 1))
