"""Memory fit: the order of candidates, the choice, available memory, and the formula's accuracy."""

import dataclasses
import itertools
import math
import re

import jax
import pytest

from jaxsp.core import units
from jaxsp.planning import absent, estimate, fit
from jaxsp.planning.candidates import MAX_PREDICTED_RATIO, list_candidates
from jaxsp.planning.estimate import OffloadedBytes
from jaxsp.planning.fit import MemoryUse
from jaxsp.sharding import host_offload, sharding
from jaxsp.system import device_memory, hardware
from jaxsp.system.device_memory import MemoryLimit
from tests import batches
from tests.attention.strategies import make_strategy
from tests.planning import programs
from tests.training import runs

GIB = units.GIB


@pytest.fixture(autouse=True)
def simple_predictions(request, monkeypatch):
    if request.node.get_closest_marker("e2e") is None:
        programs.simplify_predictions(monkeypatch)


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
    return [decided(candidate) for candidate in list_candidates(spec, is_memory_known=is_known)]


# Candidates


def test_candidates_are_tried_from_the_fastest_on():
    """Recomputing costs more than tiles, and tiles of the MLP cost more than tiles of the loss."""
    with_tiles = itertools.product(("save_attention", "full"), MLP_TILES, LOSS_TILES[1:])
    kept = [("save_attention_and_mlp", TOKENS, tile) for tile in LOSS_TILES]
    assert candidates(large()) == [*kept, *with_tiles]


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
    actual = list(list_candidates(spec, is_memory_known=is_known))
    assert actual
    for candidate in actual:
        memory = candidate.config.memory.model_dump()
        assert {name: memory[name] for name in fixed} == fixed
        assert "auto" not in memory.values()
        others = candidate.config.change(memory=spec.config.memory)
        assert others == spec.config
        assert dataclasses.replace(candidate, config=spec.config) == spec


def test_inputs_leave_the_device_during_attention_only_if_nothing_else_fits():
    stack = {"offload_activations": "layer_inputs", "remat": "full"}
    tried = [
        candidate.config.memory.offload_during_attention
        for candidate in list_candidates(large(**stack), is_memory_known=True)
    ]
    num_tiles = len(MLP_TILES), len(LOSS_TILES)
    expected = ["never"] * math.prod(num_tiles)
    if jax.__version_info__ >= host_offload.MIN_RELEASE:
        expected += ["always"] * (num_tiles[0] - 1) * num_tiles[1]
    assert tried == expected


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
        return MemoryUse(int(self.factor * estimate.predict_bytes(run)), self.host)

    def fit(self, spec, device, *, host=math.inf):
        room = MemoryLimit(device, host)
        return fit.fit(spec, limit=room, compile_step=self.compile, measure=self.measure)


def gib_in(words):
    """Sizes that a text has, in this order."""
    return re.findall(r"[\d.]+ GiB", words)


def formulas(spec):
    return [
        estimate.predict_bytes(candidate)
        for candidate in list_candidates(spec, is_memory_known=True)
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
        number for number, bytes_of in enumerate(takes) if bytes_of <= MAX_PREDICTED_RATIO * room
    )
    actual = trial.fit(spec, room)
    assert first > 0
    assert decided(trial.compiled[0]) == candidates(spec)[first]
    assert estimate.predict_bytes(actual.spec) <= room
    assert not actual.shortage


@pytest.mark.parametrize("num_kept", [0, 8, 24])
def test_as_many_layers_keep_the_mlps_products_as_fit(num_kept):
    """Formula and program agree, and there is room for half a layer more."""
    spec = large()
    *_, base = (
        candidate
        for candidate in list_candidates(spec, is_memory_known=True)
        if decided(candidate) == ("save_attention", TOKENS, 8192)
    )

    def needs(number):
        kept = {"remat": "save_attention_and_mlp", "kept_mlp_layers": number}
        return estimate.predict_bytes(base.respec(memory=kept))

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


def of_kind(sizes, **kind):
    """A step on a mesh whose attention has this kind."""
    seq = sizes[-1]
    choice = batches.attention_choice(
        strategy=make_strategy(seq=seq, **({"ulysses_degree": seq} | kind))
    )
    return dataclasses.replace(runs.make_spec({}, sizes=sizes), attention=choice)


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
    actual = estimate.outside_bytes(of_kind(sizes, ulysses_degree=inner))
    assert actual == pytest.approx((1 + expected) * GIB), "1 GiB for CUDA"


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
    actual = device_memory._find_local_limits((Device(80 * GIB), Device(70 * GIB)))
    assert actual == MemoryLimit(70 * GIB, 43 * GIB, 5 * GIB)
    assert actual.pinned == 5 * GIB
    assert device_memory._find_local_limits((Device(None),)) == MemoryLimit(math.inf, math.inf)


# Host memory


def test_the_bytes_that_are_offloaded_are_those_of_the_arrays(small_shards, monkeypatch):
    """2 layers of 16 tokens of a device, 60 float32 each; attention's 8 x 8 and 8 log-sum-exps."""
    monkeypatch.setattr(host_offload, "MIN_OFFLOAD_SIZE", 100)
    actual = {
        value: estimate.step_offloaded_bytes(runs.make_spec({"offload_activations": value}))
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
    actual = estimate.step_offloaded_bytes(spec)
    assert actual.moments == 2 * actual.weights > 0
    assert spec.num_microbatches > 1
    assert actual.gradients == 2 * 4 * sum(shards), "a microbatch's, and their sums"
    assert 4 * sum(shards) < actual.weights, (
        "gradients of the embedding and the head stay on the device"
    )


# The formula


def check_formula(made):
    """Checks that the prediction is as accurate as the search needs.

    It skips no candidate that fits, and few that do not fit are compiled.
    """
    formula = estimate.predict_bytes(made.spec)
    assert 0.84 < formula / absent.measure_step(made).device_total < MAX_PREDICTED_RATIO


@pytest.mark.e2e
def test_the_formula_is_close_to_what_is_compiled():
    check_formula(programs.gpu_step(data=1, seq=8, num_heads=64, microbatches=1))
