"""Memory options change memory only: loss, gradients, weights and counts stay the same."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from jaxsp.attention.kernels.kernel import KernelSettings
from jaxsp.blocks.config import MLP
from jaxsp.checkpoint import reader, run_paths
from jaxsp.checkpoint.checkpoint_config import CheckpointConfig
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.checkpoint.writer import CheckpointWriter
from jaxsp.core import host_memory, units
from jaxsp.core.errors import UserError
from jaxsp.model import decoder
from jaxsp.planning import candidates, estimate, fit
from jaxsp.planning.fit import MemoryUse
from jaxsp.sharding import host_offload, sharding
from jaxsp.system import device_memory
from jaxsp.system.device_memory import MemoryLimit
from jaxsp.training import step_gradients, train_state, train_step
from tests import batches, messages, tolerances
from tests.attention.strategies import make_strategy
from tests.training import runs
from tests.training.mixed import MIXED

TILES = {"mlp_tile_tokens": 5, "loss_tile_tokens": 7}
"""Neither divides a device's 16 tokens, or 8."""

STACK = {"remat": "full", "offload_activations": "layer_inputs"}
"""Options with which the layers may have their own backward pass (model/layer_stack.py)."""

NEEDS_HOST = pytest.mark.skipif(
    jax.__version_info__ < host_offload.MIN_RELEASE,
    reason="arrays in host memory inside shard_map need jax 0.11.1, which needs Python 3.12",
)

CASES = {
    "nothing computed again": ((1, 2, 4), {"remat": "none"}),
    "attention kept, in two layers the MLP too": (
        (1, 2, 4),
        {"remat": "save_attention_and_mlp", "kept_mlp_layers": 2},
    ),
    "attention and MLP kept, inputs offloaded": (
        (2, 2, 2),
        {"remat": "save_attention_and_mlp", "offload_activations": "layer_inputs_and_attention"},
    ),
    "all computed again": ((1, 2, 4), {"remat": "full"}),
    "tiles": ((1, 1, 8), TILES),
    "tiles, nothing else computed again": ((1, 2, 4), TILES | {"remat": "none"}),
    "layer_inputs": ((1, 2, 4), {"offload_activations": "layer_inputs"}),
    "five layers, every second input": ((1, 2, 4), STACK | {"offload_every": 2}),
    "five layers, inputs offloaded during attention": (
        (2, 2, 2),
        STACK
        | TILES
        | {
            "offload_every": 3,
            "offload_during_attention": "always",
            "offload_optimizer": "state_and_gradients",
        },
    ),
    "residual and attention": ((2, 2, 2), {"offload_activations": "layer_inputs_and_attention"}),
    "state": ((2, 2, 2), {"offload_optimizer": "state"}),
    "state and gradients": ((2, 2, 2), {"offload_optimizer": "state_and_gradients"}),
    "all": (
        (1, 2, 4),
        TILES
        | {
            "offload_activations": "layer_inputs_and_attention",
            "offload_optimizer": "state_and_gradients",
        },
    ),
    "tied, rows side by side": ((2, 4, 1), TILES | {"offload_optimizer": "state_and_gradients"}),
    "all on one device": (
        (1, 1, 1),
        TILES
        | {"offload_activations": "layer_inputs", "offload_optimizer": "state", "remat": "full"},
    ),
    "experts, tiles": ((1, 2, 4), TILES),
    "experts, products kept": ((2, 2, 2), {"remat": "none"}),
    "experts, attention and MLP kept": ((1, 1, 8), {"remat": "save_attention_and_mlp"}),
    "experts, all": (
        (1, 2, 4),
        STACK
        | TILES
        | {"offload_during_attention": "always", "offload_optimizer": "state_and_gradients"},
    ),
}


QUICK = ("all", "five layers, inputs offloaded during attention", "experts, tiles")
"""The first has the parts of the others, except for the last two."""


def model_of(name):
    if name.startswith("experts"):
        return batches.expert_model()
    num_layers = 5 if name.startswith(("five layers", "attention kept")) else runs.MODEL.num_layers
    return batches.model(tie_embeddings=name.startswith("tied"), num_layers=num_layers)


def works_here(memory):
    return not candidates.find_problems(batches.make_config(memory=memory).step, platform="cpu")


each_case = pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.e2e if name in QUICK else pytest.mark.slow]
            + ([] if works_here(memory) else [NEEDS_HOST]),
        )
        for name, (_, memory) in CASES.items()
    ],
)


pytestmark = pytest.mark.usefixtures("small_waits")


@pytest.fixture(scope="module")
def run_of(small_waits):
    @functools.cache
    def run(name):
        sizes, memory = CASES[name]
        config = batches.make_config(memory=memory, max_grad_norm=None)
        rows_per_microbatch = 1 + name.startswith("tied")
        return runs.compile_in_thread(
            sizes, config=config, model=model_of(name), rows_per_microbatch=rows_per_microbatch
        ).result()

    return run


@pytest.fixture(scope="module")
def weights():
    return runs.draw_weights(runs.MODEL)


@each_case
def test_loss_gradients_and_counts_are_those_of_a_plain_program(run_of, name, record_property):
    runs.check_gradients(
        run_of(name), runs.draw_weights(model_of(name)), runs.ROWS, record_property
    )


@each_case
def test_a_step_subtracts_the_gradient(run_of, name):
    """SGD with learning rate 1."""
    run = run_of(name)
    weights = runs.draw_weights(model_of(name))
    _, gradients = runs.compile_reference(model_of(name))(weights, runs.ROWS)
    state, metrics = run.step(run.state(weights), run.rows(runs.ROWS))
    right = batches.name_leaves(jax.tree.map(lambda w, g: w - g, weights, gradients))
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(gradients)))
    assert batches.relative_error(metrics["grad_norm"], norm) < tolerances.MESH
    actual = run.unpad(state.master)
    assert (
        max(batches.relative_error(actual[name], right[name]) for name in right) < tolerances.MESH
    )
    kinds = {
        leaf.sharding.memory_kind
        for leaf in jax.tree.leaves(state.master)
        if leaf.size > 100 * model_of(name).num_layers
    }
    assert kinds == {host_memory.MEMORY_KIND if run.spec.has_offloaded_state else "device"}


@pytest.mark.e2e
@NEEDS_HOST
@pytest.mark.parametrize("degree", [1, 4])
def test_layers_of_several_kinds_in_groups_have_the_same_gradients(degree, record_property):
    """Four layers, of which the inputs of the first and the last are kept."""
    memory = STACK | {"offload_every": 3, "offload_during_attention": "always"}
    rows = batches.make_rows([[(0, 20), (20, 44)]] * 4, num_tokens=64, vocab_size=64, seed=3)
    run = runs.compile_in_thread(
        (1, 2, 4),
        rows_per_microbatch=1,
        config=batches.make_config(memory=memory),
        model=MIXED,
        functions=("gradients",),
        arrays=rows,
        strategy=make_strategy(seq=4, ulysses_degree=degree),
    ).result()
    runs.check_gradients(run, runs.draw_weights(MIXED), rows, record_property)


ADAMW = functools.partial(
    batches.make_config, name="adamw", learning_rate=1e-2, weight_decay=0.1, eps=1e-5
)


@pytest.mark.e2e
@NEEDS_HOST
def test_a_state_in_host_memory_is_saved_and_resumes_anywhere(small_waits, weights, tmp_path):
    """Two steps with the state on the host, a checkpoint, and one without equal three without."""
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
    assert {leaf.sharding.memory_kind for leaf in averages} == {host_memory.MEMORY_KIND}
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
    [
        *(
            pytest.param({"remat": remat}, marks=pytest.mark.slow)
            for remat in ("none", "save_attention_and_mlp", "save_attention")
        ),
        {"remat": "full"},
        TILES | {"remat": "none"},
    ],
    ids=str,
)
def test_no_whole_weight_is_kept(small_waits, memory):
    shapes, again = kept(memory)
    assert whole_shapes() >= {(runs.MODEL.intermediate_size, runs.MODEL.hidden_size)}
    assert not {shape for shape, _ in shapes} & whole_shapes(), shapes
    assert "all_gather" in again, "they are gathered again"


def test_full_keeps_only_the_input_of_a_layer(small_waits):
    model = runs.MODEL
    assert kept({"remat": "full"})[0] == [((1, 16, model.hidden_size), "bfloat16")]


def test_none_makes_no_product_and_no_all_to_all_of_the_forward_pass_again(small_waits):
    """A layer's backward pass has two products per matrix and transposes two all-to-alls."""
    _, none = kept({"remat": "none"})
    _, attention_kept = kept({"remat": "save_attention"})
    assert (none.count("all_to_all"), attention_kept.count("all_to_all")) == (2, 4)
    # Except two whose results are not used: those of the last, and of gate or up
    assert attention_kept.count("dot_general") - none.count("dot_general") >= 5


@pytest.mark.slow
def test_attention_and_mlp_makes_two_products_less_again(small_waits):
    """The products of gate and up; those between are recomputed as with save_attention."""
    shapes, kept_too = kept({"remat": "save_attention_and_mlp"})
    _, attention_kept = kept({"remat": "save_attention"})
    assert shapes.count(((1, 16, runs.MODEL.intermediate_size), "bfloat16")) == 2
    # gate or up is not recomputed with attention either: the result of one of them is not used
    assert attention_kept.count("dot_general") - kept_too.count("dot_general") in (1, 2)


def test_only_layer_inputs_and_attention_are_offloaded(small_waits):
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


# Errors and descriptions


def problems(version, platform, **memory):
    return candidates.find_problems(
        batches.make_config(memory=memory).step, platform=platform, version=version
    )


@pytest.mark.parametrize("version", ["0.10.2", "0.11.0"])
def test_releases_with_wrong_gradients_are_refused_activation_offload(version):
    (message,) = problems(version, "gpu", offload_activations="layer_inputs")
    says = ("memory.offload_activations = layer_inputs", version, "memory.offload_activations=none")
    assert re.match(messages.containing(*says), message)


@pytest.mark.parametrize(
    ("level", "version", "field", "is_refused"),
    [
        ("O1", "0.11.1", "offload_activations", True),
        ("O2", "0.11.1", "offload_optimizer", True),
        ("O0", "0.11.1", "offload_activations", False),
        ("O1", "0.11.2", "offload_activations", False),
        ("O1", "0.11.1", None, False),
    ],
)
def test_double_buffered_loops_of_old_releases_copy_no_offloaded_arrays(
    level, version, field, is_refused
):
    values = {"offload_activations": "layer_inputs", "offload_optimizer": "state"}
    memory = {} if field is None else {field: values[field]}
    jax.config.update("jax_optimization_level", level)
    try:
        found = problems(version, "gpu", **memory)
    finally:
        jax.config.update("jax_optimization_level", "UNKNOWN")
    assert len(found) == is_refused
    assert all(text.startswith(f"JAX_OPTIMIZATION_LEVEL = {level}: ") for text in found)


@dataclasses.dataclass(frozen=True)
class Node:
    """Memory of a test's devices, and memory that its steps need."""

    limits: MemoryLimit
    room: float
    """Memory of the device, after margins."""
    uncounted: int = 0
    host: int = 0


TAKES = {"none": 3.0, "save_attention_and_mlp": 2.5, "save_attention": 2.0, "full": 1.0}
"""GiB of a device that a step needs, by remat."""

EMPTY = jax.jit(lambda: 0).lower().compile()


def ready(monkeypatch, node, *, memory, row_tokens=64):
    """The step chosen on such a node; nothing is compiled, and the formula is exact."""
    compiled = []

    def compile(spec):
        compiled.append(spec.remat_policy.remat)
        return EMPTY

    monkeypatch.setattr(device_memory, "find_limits", lambda spec: node.limits)
    monkeypatch.setattr(
        estimate,
        "subtract_reserves",
        lambda spec, limits: MemoryLimit(node.room * units.GIB, limits.host, limits.pool),
    )
    monkeypatch.setattr(
        estimate,
        "predict_bytes",
        lambda spec: (
            int(TAKES[spec.remat_policy.remat] * units.GIB)
            + spec.attention.settings.workspace_bytes
        ),
    )
    monkeypatch.setattr(train_step, "compile", compile)

    def measured(run, choice):
        num_bytes = int(TAKES[compiled[-1]] * units.GIB)
        return MemoryUse(num_bytes, node.host, choice.settings.workspace_bytes)

    monkeypatch.setattr(fit, "read_memory_use", measured)
    spec = runs.make_spec(memory, row_tokens=row_tokens)
    settings = KernelSettings(workspace_bytes=node.uncounted)
    choice = dataclasses.replace(spec.attention, settings=settings)
    return fit.compile_fitting_step(dataclasses.replace(spec, attention=choice))


def gpus(device_gib, **changes):
    """A node whose devices have this memory, without margins."""
    limits = MemoryLimit(changes.pop("limit", device_gib) * units.GIB, 100 * units.GIB)
    return Node(limits=limits, room=device_gib, **changes)


@pytest.mark.parametrize(
    ("size", "remat"), [(2.5, "save_attention_and_mlp"), (2, "save_attention"), (1, "full")]
)
def test_auto_keeps_as_much_of_a_layer_as_fits(monkeypatch, size, remat):
    actual = ready(monkeypatch, gpus(size), memory={})
    assert actual.spec.config.memory.remat == remat
    assert (actual.full_remat_reason == "") == (remat != "full")


def test_the_causes_of_memory_add_up_to_what_is_compiled(monkeypatch):
    """Weights and moments are exact; a formula that exceeds the rest is reduced to it."""
    actual = ready(monkeypatch, gpus(2.5, uncounted=10**6), memory={})
    monkeypatch.setattr(estimate, "saved_bytes", lambda spec: 10**6)
    resident = estimate.resident_bytes(actual.spec)
    for size in (10**9, resident.weights + resident.moments + 10**6 + 5):
        use = MemoryUse(size - 10**6, 0, uncounted_workspace=10**6, estimated_workspace=10**6)
        causes = fit.find_causes(dataclasses.replace(actual, memory_use=use))
        assert sum(causes.device.values()) == size
        assert causes.device["weights"] == resident.weights
        assert causes.device["cuDNN workspace"] == 10**6
        assert causes.host == {}
        assert causes.device_available == 2.5 * units.GIB
    assert causes.device["gradients"] == 5


@pytest.mark.parametrize(
    ("size", "uncounted", "why"),
    [
        (1.5, 0, ["2.0 GiB"]),  # by the formula; not compiled
        (1.92, 0, ["2.0 GiB", "1.9 GiB"]),
        (2.5, 0.6, ["2.6 GiB", "0.6 GiB", "2.5 GiB"]),
    ],
)
def test_auto_recomputes_attention_if_its_output_does_not_fit(monkeypatch, size, uncounted, why):
    """The reason has the memory that attention's output needs, cuDNN's part, and the room."""
    actual = ready(monkeypatch, gpus(size, uncounted=int(uncounted * units.GIB)), memory={})
    assert actual.spec.config.memory.remat == "full"
    assert re.findall(r"[\d.]+ GiB", actual.full_remat_reason) == why
    assert re.search(
        messages.containing("full", actual.full_remat_reason),
        fit.describe_compiled(actual),
    )


def test_a_step_that_cannot_fit_is_refused_with_suggestions(monkeypatch):
    offloads = works_here({"offload_optimizer": "state"})
    with pytest.raises(UserError) as found:
        ready(monkeypatch, gpus(0.5), memory={})
    assert re.findall(r"[\d.]+ GiB", str(found.value)) == ["1.0 GiB", "0.5 GiB"]
    assert re.findall(r"[\w.]+=\w+", str(found.value)) == [
        "memory.offload_activations=layer_inputs",
        *["memory.offload_optimizer=state"] * offloads,
        "batch.rows_per_step=1",
        "data.max_segments_per_row=8",
        "mesh.seq=8",
    ]
    with pytest.raises(UserError, match=messages.containing("2.0 GiB", "1.5 GiB")):
        ready(monkeypatch, gpus(1.5), memory={"remat": "save_attention"})
    limits = MemoryLimit(80 * units.GIB, 100 * units.GIB, 3 * units.GIB)  # the pool's limit
    node = Node(limits=limits, room=80, host=4 * units.GIB)
    says = messages.containing("4.0 GiB", "3.0 GiB", "memory.offload_activations=none")
    with pytest.raises(UserError, match=says):
        ready(monkeypatch, node, memory={"offload_activations": "layer_inputs"})
    # The device lacks only its margin
    with pytest.raises(UserError, match=says):
        ready(
            monkeypatch,
            dataclasses.replace(node, room=0.9),
            memory={"offload_activations": "layer_inputs"},
        )


@pytest.mark.parametrize(
    "node", [gpus(1.2, uncounted=units.GIB // 2), gpus(0.9, limit=1.2)], ids=["estimate", "margin"]
)
def test_margins_and_estimates_refuse_nothing_and_the_banner_warns(monkeypatch, node):
    actual = ready(monkeypatch, node, memory={"remat": "full"})
    assert actual.memory_use.device == units.GIB
    without_shortage = dataclasses.replace(actual, shortage="")
    assert fit.describe_compiled(actual) != fit.describe_compiled(without_shortage)
    fits = ready(monkeypatch, gpus(1.6, uncounted=units.GIB // 2), memory={"remat": "full"})
    assert fits.shortage == ""


@pytest.mark.parametrize(
    ("during_attention", "layers", "there", "fails"),
    [
        ("never", "alike", 2 * 3840 - 1, True),
        ("never", "alike", 2 * 3840, False),
        ("always", "alike", 2 * 3840 - 1, True),
        ("always", "alike", 2 * 3840, False),
        ("never", "one differs", 2 * 3840 - 1, True),
        ("never", "one differs", 2 * 3840, False),
    ],
)
def test_a_gpu_that_offloads_less_than_requested_ends_the_run(
    monkeypatch, during_attention, layers, there, fails
):
    """One array may be left out: of two layers' inputs and a gradient, and of the inputs of three
    layers of which one is not in a loop."""
    memory = {"remat": "full", "offload_during_attention": during_attention}
    model = batches.model()
    if layers == "one differs":
        model = batches.expert_model(num_layers=3)
        first = dataclasses.replace(model.layers[0], feed_forward=MLP)
        model = dataclasses.replace(model, layers=(first, *model.layers[1:]))
    actual = runs.make_spec({"offload_activations": "layer_inputs", **memory}, model=model)
    monkeypatch.setattr(fit, "is_gpu", lambda spec: True)
    needs = MemoryUse(0, there)
    if not fails:
        fit.check_offloads(actual, needs)
        return
    with pytest.raises(RuntimeError, match=messages.containing("memory.offload_activations=none")):
        fit.check_offloads(actual, needs)
