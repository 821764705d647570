"""Memory fit: the order of candidates, the choice, available memory, and the formula's accuracy."""

import dataclasses
import itertools
import math
import re

import jax
import pytest

from jaxsp.blocks.config import DELTA_NET, MLP
from jaxsp.core import axes, host_memory, units
from jaxsp.memory import available_memory, memory_fit, memory_formula, memory_problems
from jaxsp.memory.available_memory import MemoryLimit
from jaxsp.memory.memory_fit import MemoryUse
from jaxsp.memory.memory_formula import OffloadedBytes
from jaxsp.planner import planning
from jaxsp.planner.compile import compiled, memory
from jaxsp.processes import hardware
from jaxsp.processes.cluster import Process
from jaxsp.runtime import memory_limits
from jaxsp.sharding import host_offload, sharding
from jaxsp.training import train_state, train_step
from tests import batches, messages
from tests.attention.strategies import make_strategy
from tests.planner import programs
from tests.training import runs

GIB = units.GIB

LARGE = batches.model(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)
"""Llama-3.1-8B, about."""

AUTO = {"loss_tile_tokens": "auto"}
TOKENS = 65_536
"""Memory of a device."""
MLP_TILES = (TOKENS, 8192, 2048)
LOSS_TILES = (TOKENS, 8192, 2048, 512)


def large(**memory):
    """A step of 4 devices, each with TOKENS tokens."""
    return runs.make_spec(
        AUTO | memory, model=LARGE, row_tokens=4 * TOKENS, compute_dtype="bfloat16", name="adamw"
    )


def decided(spec):
    memory = spec.config.memory
    return memory.remat, memory.mlp_tile_tokens, memory.loss_tile_tokens


def candidates(spec, *, is_known=True):
    return [
        decided(candidate)
        for candidate in memory_fit.list_candidates(spec, is_memory_known=is_known)
    ]


# Candidates


def test_candidates_are_tried_from_the_fastest_on():
    """Recomputing costs more than tiles, and tiles of the MLP cost more than tiles of the loss."""
    with_tiles = itertools.product(("save_attention", "full"), MLP_TILES, LOSS_TILES[1:])
    kept = [("save_attention_and_mlp", TOKENS, tile) for tile in LOSS_TILES]
    assert candidates(large()) == [*kept, *with_tiles]


def test_few_tokens_are_tried_without_tiles_and_each_candidate_once():
    actual = candidates(runs.make_spec(AUTO))
    assert actual == [
        (remat, 16, 16) for remat in ("save_attention_and_mlp", "save_attention", "full")
    ]


@pytest.mark.parametrize(
    ("memory", "remats"),
    [
        ({"offload_activations": "layer_inputs"}, ["save_attention", "full"]),
        ({"offload_optimizer": "state"}, ["save_attention", "full"]),
        ({"offload_activations": "layer_inputs_and_attention"}, ["save_attention"]),
    ],
    ids=str,
)
def test_options_that_free_memory_leave_out_candidates(memory, remats):
    """Memory is short if the user offloads, and offloaded results are not recomputed."""
    assert list(dict.fromkeys(remat for remat, *_ in candidates(large(**memory)))) == remats


@pytest.mark.parametrize(
    "fixed",
    [
        {"remat": "none"},
        {"remat": "save_attention_and_mlp"},
        {"remat": "save_attention", "loss_tile_tokens": 700},
        {"remat": "full"},
        {"mlp_tile_tokens": 5000},
        {"loss_tile_tokens": 700},
        {"mlp_tile_tokens": 5000, "loss_tile_tokens": 700, "remat": "full"},
        {
            "offload_activations": "layer_inputs",
            "offload_optimizer": "state_and_gradients",
            "grad_reduce_dtype": "bfloat16",
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("is_known", [True, False])
def test_options_that_the_user_fixed_are_never_changed(fixed, is_known):
    spec = large(**fixed)
    actual = list(memory_fit.list_candidates(spec, is_memory_known=is_known))
    assert actual
    for candidate in actual:
        memory = candidate.config.memory.model_dump()
        assert {name: memory[name] for name in fixed} == fixed
        assert "auto" not in memory.values()
        others = candidate.config.model_copy(update={"memory": spec.config.memory})
        assert others == spec.config
        assert dataclasses.replace(candidate, config=spec.config) == spec


def test_inputs_leave_the_device_during_attention_only_if_nothing_else_fits():
    stack = {"offload_activations": "layer_inputs", "remat": "full"}
    tried = [
        candidate.config.memory.offload_during_attention
        for candidate in memory_fit.list_candidates(large(**stack), is_memory_known=True)
    ]
    num_tiles = len(MLP_TILES), len(LOSS_TILES)
    expected = ["never"] * math.prod(num_tiles)
    if jax.__version_info__ >= host_offload.MIN_RELEASE:
        expected += ["always"] * (num_tiles[0] - 1) * num_tiles[1]
    assert tried == expected


def test_every_kth_input_in_host_memory_and_those_of_one_group():
    """5 layers: 3 groups of 2, the 2 inputs of one group, and a gradient during attention."""
    model = batches.model(num_layers=5)
    stack = {"offload_activations": "layer_inputs", "remat": "full"}

    def count(**memory):
        spec = runs.make_spec(stack | memory, model=model)
        return memory_formula.step_offloaded_bytes(spec).activations / (16 * 60 * 4)

    assert count() == 5
    assert count(offload_every=2) == 3 + 2
    assert count(offload_every=2, offload_during_attention="always") == 3 + 2 + 1


def test_mlp_products_are_kept_only_without_tiles():
    """Nothing is kept of a tile."""
    assert {tile for _, tile, _ in candidates(large(remat="save_attention_and_mlp"))} == {TOKENS}
    assert {remat for remat, *_ in candidates(large(mlp_tile_tokens=5000))} == {
        "save_attention",
        "full",
    }
    assert candidates(large(remat="save_attention_and_mlp"), is_known=False) == [
        ("save_attention_and_mlp", TOKENS, 512)
    ]


def test_tiles_have_a_safe_size_if_the_memory_of_the_devices_is_unknown():
    assert candidates(large(), is_known=False) == [
        ("save_attention", 8192, 512),
        ("full", 8192, 512),
    ]


# Choice of a candidate


class Trial:
    """Compiles nothing; a step needs `factor` times the formula's memory."""

    def __init__(self, factor=1.0, host=0):
        self.factor = factor
        self.host = host
        self.compiled = []

    def compile(self, spec):
        self.compiled.append(spec)
        return spec

    def measure(self, run):
        return MemoryUse(int(self.factor * memory_formula.predict_bytes(run)), self.host)

    def fit(self, spec, device, *, host=math.inf):
        room = MemoryLimit(device, host)
        return memory_fit.fit(spec, limit=room, compile_step=self.compile, measure=self.measure)


def gib_in(words):
    """Sizes that a text has, in this order."""
    return re.findall(r"[\d.]+ GiB", words)


def formulas(spec):
    return [
        memory_formula.predict_bytes(candidate)
        for candidate in memory_fit.list_candidates(spec, is_memory_known=True)
    ]


def test_the_first_candidate_is_taken_if_it_fits():
    trial = Trial()
    actual = trial.fit(large(), max(formulas(large())))
    assert (
        [decided(actual.spec)]
        == [decided(spec) for spec in trial.compiled]
        == candidates(large())[:1]
    )
    assert (actual.shortage, actual.full_remat_reason) == ("", "")


def test_candidates_that_cannot_fit_by_formula_are_not_compiled():
    spec = large()
    trial = Trial()
    takes = formulas(spec)
    least = min(takes)
    room = (least + takes[0]) / 2
    first = next(
        number
        for number, bytes_of in enumerate(takes)
        if bytes_of <= memory_fit.MAX_PREDICTED_RATIO * room
    )
    actual = trial.fit(spec, room)
    assert first > 0
    assert decided(trial.compiled[0]) == candidates(spec)[first]
    assert memory_formula.predict_bytes(actual.spec) <= room
    assert not actual.shortage


@pytest.mark.parametrize("num_kept", [0, 8, 24])
def test_as_many_layers_keep_the_mlps_products_as_fit(num_kept):
    """Formula and program agree, and there is room for half a layer more."""
    spec = large()
    *_, base = (
        candidate
        for candidate in memory_fit.list_candidates(spec, is_memory_known=True)
        if decided(candidate) == ("save_attention", TOKENS, 8192)
    )

    def needs(number):
        kept = {"remat": "save_attention_and_mlp", "kept_mlp_layers": number}
        return memory_formula.predict_bytes(memory_fit.replace_memory(base, **kept))

    room = (needs(num_kept) + needs(num_kept + 1)) // 2
    trial = Trial()
    actual = trial.fit(spec, room).spec.config.memory
    assert (actual.remat, actual.kept_mlp_layers, actual.loss_tile_tokens) == (
        ("save_attention_and_mlp", num_kept, 8192) if num_kept else ("save_attention", 0, 8192)
    )
    # A program that needs more than the formula says
    actual = Trial(factor=1.02).fit(spec, room).spec.config.memory
    if num_kept:
        assert actual.kept_mlp_layers in (num_kept - 1, num_kept)


@pytest.mark.parametrize(
    ("changes", "device_gib", "expected"),
    [
        ({}, 120, True),
        ({}, 70, False),
        ({"rows_per_step": 3}, 120, False),
        ({"remat": "save_attention"}, 120, False),
    ],
    ids=str,
)
def test_larger_microbatches_are_suggested_if_they_fit(changes, device_gib, expected):
    """By the formula; the step itself takes 55 GiB."""
    memory = AUTO | {"remat": changes.get("remat", "save_attention_and_mlp")}
    spec = runs.make_spec(
        memory,
        model=LARGE,
        row_tokens=4 * 8192,
        compute_dtype="bfloat16",
        name="adamw",
    )
    batch = spec.config.batch.model_copy(update={"rows_per_step": changes.get("rows_per_step", 8)})
    spec = dataclasses.replace(spec, config=spec.config.model_copy(update={"batch": batch}))
    fitted = Trial().fit(spec, device_gib * GIB)
    assert planning.fits_larger_microbatch(fitted) == expected


def test_smaller_tiles_of_the_loss_are_not_compiled_if_memory_is_fullest_elsewhere():
    spec = large(remat="save_attention")
    of_loss_tiles = formulas(spec)[: len(LOSS_TILES)]
    assert of_loss_tiles[0] > of_loss_tiles[1] == of_loss_tiles[2] == of_loss_tiles[3]
    trial = Trial()
    trial.fit(spec, of_loss_tiles[1] - GIB)
    tiles = [decided(candidate)[1:] for candidate in trial.compiled]
    assert [loss for mlp, loss in tiles if mlp == TOKENS] == [LOSS_TILES[1]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"remat": "full", "kept_mlp_layers": 2}, ["memory.remat=save_attention_and_mlp"]),
        ({"remat": "auto", "kept_mlp_layers": 2}, ["memory.remat=save_attention_and_mlp"]),
        ({"offload_optimizer": "state_and_gradients"}, ["memory.offload_optimizer=state"]),
        ({"kept_mlp_layers": 9}, ["8 layers", "auto"]),
        ({"kept_mlp_layers": 7}, ["periods", "Use 4."]),
    ],
    ids=str,
)
def test_numbers_of_layers_that_cannot_keep_the_mlp_are_refused(changes, words):
    """The model has eight layers in two periods."""
    windows = [batches.model(window=window).layers[0] for window in (4, None)]
    attention, other = (dataclasses.replace(layer, feed_forward=MLP) for layer in windows)
    other = dataclasses.replace(other, mixer=DELTA_NET, rope=None, window=None)
    model = batches.model(layers=(other, other, other, attention) * 2)
    memory = {"remat": "save_attention_and_mlp", "kept_mlp_layers": 4}
    find = lambda memory: [
        problem
        for problem in memory_problems.find_problems(
            batches.make_config(memory=memory), platform="gpu", version="0.12.0.1", model=model
        )
        if "kept_mlp_layers" in problem
    ]
    assert find(memory) == []
    (message,) = find(memory | changes)
    assert re.match(messages.containing("memory.kept_mlp_layers", *words), message)
    assert memory_formula.kept_mlp_widths(model) == [0] * 4 + [4 * 202] * 4 + [8 * 202]


def test_the_last_candidate_is_compiled_even_if_it_cannot_fit():
    trial = Trial()
    actual = trial.fit(large(), 20 * GIB)
    assert (
        [decided(spec) for spec in trial.compiled]
        == candidates(large())[-1:]
        == [decided(actual.spec)]
    )
    sizes = [
        units.format_bytes(actual.memory_use.device_total),
        units.format_bytes(20 * GIB),
    ]
    assert gib_in(actual.shortage) == sizes


def test_a_formula_that_is_too_low_skips_more_once_that_is_known():
    """The first compiled program needs 1.5 times as much as predicted, and so will later ones."""
    spec = large(kept_mlp_layers=32)
    trial = Trial(factor=1.5)
    takes = formulas(spec)
    room = takes[0]
    expected = [0]
    for number, bytes_of in enumerate(takes[1:], 1):
        if 1.5 * bytes_of <= memory_fit.MAX_PREDICTED_RATIO * room:
            expected.append(number)
            if 1.5 * bytes_of <= room:
                break
    actual = trial.fit(spec, room)
    assert [decided(candidate) for candidate in trial.compiled] == [
        candidates(spec)[number] for number in expected
    ]
    assert len(expected) < next(
        number for number, bytes_of in enumerate(takes) if 1.5 * bytes_of <= room
    )
    assert 1.5 * memory_formula.predict_bytes(actual.spec) <= room


def test_a_shortage_of_host_memory_does_not_stop_the_search_for_what_fits_the_device():
    """All candidates offload the same arrays, and the margin for checkpoints refuses no run."""
    spec = large()
    takes = formulas(spec)
    right = Trial(factor=1.5).fit(spec, takes[0])
    actual = Trial(factor=1.5).fit(spec, takes[0], host=-GIB)
    assert decided(actual.spec) == decided(right.spec)
    assert actual.memory_use.device_total <= actual.memory_limit.device
    assert gib_in(actual.shortage) == ["1.0 GiB"]
    assert "host" in actual.shortage
    offloads = Trial(host=3 * GIB)
    actual = offloads.fit(large(offload_activations="layer_inputs"), math.inf, host=2 * GIB)
    assert len(offloads.compiled) == 1
    assert gib_in(actual.shortage) == ["3.0 GiB", "2.0 GiB"]


# Available memory


H100 = memory_limits.GPU_MEMORY_FRACTION * 79.1 * GIB


def of_kind(sizes, **kind):
    """A step on a mesh whose attention has this kind."""
    seq = sizes[-1]
    choice = batches.attention_choice(
        strategy=make_strategy(seq=seq, **({"ulysses_degree": seq} | kind))
    )
    return dataclasses.replace(runs.make_spec({}, sizes=sizes), attention=choice)


@pytest.mark.parametrize(
    ("sizes", "inner", "groups"),
    [
        ((1, 1, 1), 1, []),
        ((1, 8, 1), 1, [range(8)]),
        ((1, 1, 8), 8, [range(8)]),
        ((1, 1, 8), 1, [range(8)]),  # a ring of all
        ((1, 1, 8), 4, [range(8), range(4), (0, 4)]),
        ((1, 2, 4), 4, [range(8), (0, 4), range(4)]),
        ((2, 2, 2), 2, [range(8), range(4), (0, 2, 4, 6), (0, 4), (0, 1)]),
    ],
)
def test_each_group_of_devices_that_communicates_has_a_communicator(sizes, inner, groups):
    actual = available_memory.list_communicators(
        dict(zip(axes.ALL, sizes, strict=True)), make_strategy(seq=sizes[-1], ulysses_degree=inner)
    )
    assert actual == set(map(frozenset, groups))


@pytest.mark.parametrize(
    ("sizes", "inner", "expected"),
    [
        ((1, 1, 1), 1, 0),
        ((1, 8, 1), 1, 1.2),
        ((1, 1, 8), 8, 1.2 + 3.3),
        ((1, 1, 8), 1, 2 * 1.2),  # a ring has no all-to-all, and a communicator for its hops
        ((1, 2, 4), 4, 3 * 1.2 + 3.3 * 3 / 7),
    ],
)
def test_nccl_takes_memory_for_each_communicator_and_each_peer_of_an_all_to_all(
    sizes, inner, expected
):
    actual = available_memory.outside_bytes(of_kind(sizes, ulysses_degree=inner))
    assert actual == pytest.approx((1 + expected) * GIB), "1 GiB for CUDA"


def test_peers_on_other_nodes_take_memory_too(monkeypatch):
    monkeypatch.setattr(memory_limits, "DEVICES_PER_NODE", 4)
    actual = available_memory.outside_bytes(of_kind((1, 1, 8)))
    assert actual == pytest.approx((1 + 1.2 + 3.3 + 4 * 0.07) * GIB)


def test_a_part_of_the_device_is_left_for_fragmentation():
    """CUDA's 1 GiB fits in the 6.3 GiB outside of JAX's part."""
    room = available_memory.subtract_reserves(of_kind((1, 1, 1)), MemoryLimit(H100, 200 * GIB))
    assert room.device == pytest.approx(H100 - 0.022 * H100)


def test_jaxs_part_is_what_nccl_leaves():
    spec = of_kind((2, 2, 2))
    outside = available_memory.outside_bytes(spec)
    assert outside > GIB + 79.1 * GIB - H100
    room = available_memory.subtract_reserves(spec, MemoryLimit(H100, 200 * GIB))
    assert room.device == pytest.approx(0.978 * (79.1 * GIB - outside))


def test_nothing_is_taken_of_memory_that_is_unknown():
    unknown = MemoryLimit(math.inf, math.inf)
    assert available_memory.subtract_reserves(of_kind((2, 2, 2)), unknown) == unknown


def on_kind(spec):
    """Bytes of a device's weights and optimizer state by memory kind."""
    state = train_state.abstract_inputs(spec)[0]
    actual = {"device": 0, host_memory.MEMORY_KIND: 0}
    for leaf in jax.tree.leaves((state.master, state.opt_state)):
        kind = leaf.sharding.memory_kind or "device"
        actual[kind] += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return actual


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor", "adamw8bit"])
@pytest.mark.parametrize("offload", ["none", "state"])
def test_a_checkpoint_copies_what_is_on_the_device_to_the_host(
    small_shards, monkeypatch, optimizer, offload
):
    monkeypatch.setattr(host_offload, "MIN_OFFLOAD_SIZE", 100)
    spec = runs.make_spec({"offload_optimizer": offload}, sizes=(2, 2, 2), name=optimizer)
    actual = on_kind(spec)
    assert memory_formula.checkpoint_bytes(spec) == 2 * actual["device"], "a copy and its buffer"
    offloaded = memory_formula.step_offloaded_bytes(spec)
    assert offloaded.weights + offloaded.moments == actual[host_memory.MEMORY_KIND]
    assert actual["device"] > 0
    assert (actual[host_memory.MEMORY_KIND] > 0) == (offload == "state")
    room = available_memory.subtract_reserves(spec, MemoryLimit(H100, 200 * GIB, 100 * GIB))
    assert room.host == 200 * GIB - 2 * actual["device"]
    assert room.pinned == 100 * GIB, "the pool holds no checkpoint"


def test_buffers_for_copies_of_a_checkpoint_have_the_limit_of_the_pool(monkeypatch):
    """With XLA's limit of 64 GiB, nothing is offloaded, and the state could be larger."""
    spec = runs.make_spec({"offload_activations": "layer_inputs"}, sizes=(2, 2, 2))
    monkeypatch.setattr(memory_formula, "pool_bytes", lambda _: 1000)
    assert memory_formula.checkpoint_bytes(spec) == on_kind(spec)["device"] + 1000


def test_large_arrays_of_a_checkpoint_have_no_buffers(monkeypatch):
    spec = runs.make_spec({}, sizes=(2, 2, 2))
    assert memory_formula.checkpoint_bytes(spec) == 2 * on_kind(spec)["device"]
    monkeypatch.setattr(memory_formula, "GIB", 0)
    assert memory_formula.checkpoint_bytes(spec) == on_kind(spec)["device"]


class Device:
    process_index = 0

    def __init__(self, limit, used=0, platform="gpu"):
        self.limit = limit
        self.used = used
        self.platform = platform

    def memory_stats(self):
        return {"bytes_limit": self.limit, "bytes_in_use": self.used} if self.limit else None


def test_the_room_is_that_of_the_smallest_device_and_a_part_of_the_host(monkeypatch):
    """100 GiB of host memory: 8 for the system, 6 for the process, the rest for two devices.

    The pool has its own limit.
    """
    monkeypatch.setattr(hardware, "host_memory_bytes", lambda: 100 * GIB)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "5")
    actual = available_memory._find_local_limits((Device(80 * GIB), Device(70 * GIB)))
    assert actual == MemoryLimit(70 * GIB, 43 * GIB, 5 * GIB)
    assert actual.pinned == 5 * GIB
    assert available_memory._find_local_limits((Device(None),)) == MemoryLimit(math.inf, math.inf)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([Device(80 * GIB, 30 * GIB), Device(80 * GIB, 50 * GIB)], 30 * GIB),
        # an allocator without statistics
        ([Device(None), Device(None)], 0),
        ([Device(None, platform="cpu")] * 2, 43 * GIB),
    ],
)
def test_free_memory_is_that_of_the_fullest_device(monkeypatch, devices, expected):
    monkeypatch.setattr(hardware, "host_memory_bytes", lambda: 100 * GIB)
    assert available_memory.find_free_bytes(devices) == expected


def test_a_process_with_all_gpus_of_its_node_has_all_of_its_host_memory(monkeypatch):
    """A job of 4 nodes that does not state its processes per node.

    100 GiB: 8 for the system, 6 for one process.
    """
    monkeypatch.setattr(hardware, "host_memory_bytes", lambda: 100 * GIB)
    monkeypatch.setattr(hardware, "count_gpus", lambda environ: 2)
    process = Process(index=0, num_processes=4, coordinator="a:1")
    monkeypatch.setattr(available_memory.distributed, "this_process", lambda: process)
    assert (
        available_memory._find_local_limits((Device(70 * GIB), Device(70 * GIB))).host == 43 * GIB
    )
    assert available_memory._find_local_limits((Device(70 * GIB),)).host == 40 * GIB, (
        "two processes with a GPU each"
    )


# Host memory


def test_the_bytes_that_are_offloaded_are_those_of_the_arrays(small_shards, monkeypatch):
    """2 layers of 16 tokens of a device, 60 float32 each; attention's 8 x 8 and 8 log-sum-exps."""
    monkeypatch.setattr(host_offload, "MIN_OFFLOAD_SIZE", 100)
    actual = {
        value: memory_formula.step_offloaded_bytes(runs.make_spec({"offload_activations": value}))
        for value in ("none", "layer_inputs", "layer_inputs_and_attention")
    }
    assert actual["none"].total == 0
    layer_inputs = OffloadedBytes(activations=2 * 16 * 60 * 4, weights=0, moments=0, gradients=0)
    assert actual["layer_inputs"] == layer_inputs
    assert actual["layer_inputs_and_attention"].total - actual["layer_inputs"].total == 2 * 16 * (
        64 * 4 + 8 * 4
    )
    spec = runs.make_spec({"offload_optimizer": "state_and_gradients"}, name="adamw")
    layers = [row for row in jax.tree.leaves(spec.table) if row.num_layers and row.size >= 100]
    placed = [(row, sharding.choose_placement(row, 4)) for row in layers]
    shards = [
        row.num_layers * math.prod(place.stored_shape) // (1 if place.dim is None else 4)
        for row, place in placed
    ]
    actual = memory_formula.step_offloaded_bytes(spec)
    assert actual.moments == 2 * actual.weights > 0
    assert spec.num_microbatches > 1
    assert actual.gradients == 2 * 4 * sum(shards), "a microbatch's, and their sums"
    assert 4 * sum(shards) < actual.weights, (
        "gradients of the embedding and the head stay on the device"
    )


# The formula


def check_formula(made):
    """Checks that the formula is as accurate as the search needs.

    It skips no candidate that fits, and few that do not fit are compiled.
    """
    formula = memory_formula.predict_bytes(made.spec)
    assert 0.9 < formula / memory.measure_step(made).device_total < memory_fit.MAX_PREDICTED_RATIO


@pytest.mark.e2e
def test_the_formula_is_close_to_what_is_compiled():
    check_formula(programs.gpu_step(data=1, seq=8, num_heads=64, microbatches=1))


@pytest.mark.e2e
def test_embeddings_before_their_norm_are_kept_during_the_step():
    """XLA's buffers for the step grow by the same bytes."""
    predicted = []
    compiled_bytes = []
    for has_embedding_norm in (False, True):
        model = dataclasses.replace(batches.model(), has_embedding_norm=has_embedding_norm)
        memory = {"remat": "full", "loss_tile_tokens": 256, "mlp_tile_tokens": 256}
        spec = runs.make_spec(
            memory, model=model, row_tokens=2048, sizes=(1, 1, 1), compute_dtype="float32"
        )
        predicted.append(memory_formula.predict_bytes(spec))
        lowered = train_step.build_step(spec).lower(*train_state.abstract_inputs(spec))
        compiled_bytes.append(lowered.compile().memory_analysis().temp_size_in_bytes)
    expected = 4 * 2048 * batches.model().hidden_size
    assert predicted[1] - predicted[0] == expected
    assert compiled_bytes[1] - compiled_bytes[0] == pytest.approx(expected, rel=0.1)


ALL_AT_ONCE = 10**9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row_tokens", "memory"),
    [
        (131_072, {"remat": "save_attention_and_mlp", "mlp_tile_tokens": ALL_AT_ONCE}),
        (
            131_072,
            {"remat": "save_attention", "mlp_tile_tokens": ALL_AT_ONCE, "loss_tile_tokens": 512},
        ),
        (262_144, {"remat": "full", "mlp_tile_tokens": 4096}),
        (131_072, {"remat": "none", "mlp_tile_tokens": 4096}),
        (
            65_536,
            {"remat": "none", "mlp_tile_tokens": ALL_AT_ONCE, "loss_tile_tokens": ALL_AT_ONCE},
        ),
        (
            262_144,
            {"offload_activations": "layer_inputs_and_attention", "offload_optimizer": "state"},
        ),
        (
            524_288,
            {
                "remat": "full",
                "offload_activations": "layer_inputs",
                "offload_every": 2,
                "offload_during_attention": "always",
                "offload_optimizer": "state",
            },
        ),
    ],
    ids=str,
)
def test_the_formula_is_close_for_all_options(row_tokens, memory):
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    messages = programs.settings(
        "mesh.seq=4",
        f"data.row_tokens={row_tokens}",
        *(f"memory.{k}={v}" for k, v in memory.items()),
    )
    if found := memory_problems.find_problems(messages, platform="gpu"):
        pytest.skip(found[0])
    check_formula(programs.step(messages, compiled.make_devices("h100-80gb", 4)))
