"""Choice of the strategy, the kernel and its settings, and the errors for what cannot run."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.attention import selection
from jaxsp.attention.attend import make_chosen_attend
from jaxsp.attention.attention_config import AttentionConfig
from jaxsp.attention.kernels import cudnn_calls, cudnn_limits, segments
from jaxsp.attention.kernels.cudnn_limits import CallSplit
from jaxsp.attention.kernels.kernel import (
    AttentionFunctions,
    AttentionWorkload,
    Kernel,
    Saved,
    ScoreConfig,
)
from jaxsp.attention.selection import choose_attention, describe_choice
from jaxsp.attention.strategy import TokenExchange, combine
from jaxsp.attention.ulysses import Ulysses
from jaxsp.attention.workload import GroupRows, count_workloads
from jaxsp.core import axes, units
from jaxsp.core.errors import UserError
from tests import batches, tolerances
from tests.attention import oracle
from tests.messages import assert_names


@pytest.fixture(autouse=True)
def cudnn_9_28_0(monkeypatch):
    monkeypatch.setattr(cudnn_calls, "installed_version", lambda: (9, 28, 0))


def gpu(kind="NVIDIA H100 80GB HBM3", capability="9.0"):
    """An absent GPU, unless a test adds it to jax.local_devices()."""
    return types.SimpleNamespace(
        platform="gpu", device_kind=kind, compute_capability=capability, memory_stats=lambda: None
    )


H100 = gpu()
A100 = gpu("NVIDIA A100-SXM4-80GB", "8.0")
V100 = gpu("Tesla V100-SXM2-16GB", "7.0")
B200 = gpu("NVIDIA B200", "10.0")
MI300 = gpu("AMD Instinct MI300X", "gfx942")
RTX6000 = gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0")

ROWS = {
    "num_rows": 1,
    "row_tokens": 131072,
    "max_segments": 64,
    "seq": 1,
    "dtype": "bfloat16",
    "is_deterministic": False,
}


def choose(
    device=H100, *, heads=(32, 8, 128), window=None, layer_scores=None, device_bytes=None, **fields
):
    """Args: fields: of `GroupRows` and of the config's attention."""
    rows = {name: fields.pop(name, default) for name, default in ROWS.items()}
    return choose_attention(
        AttentionConfig(**fields),
        GroupRows(**rows),
        make_model(heads, window=window, layer_scores=layer_scores),
        devices=[device],
        device_bytes=device_bytes,
    )


def make_model(heads, *, window=None, layer_scores=None):
    sizes = dict(zip(("num_heads", "num_kv_heads", "head_dim"), heads, strict=True))
    return types.SimpleNamespace(**sizes, layer_scores=layer_scores or [ScoreConfig(window=window)])


def refused(*arguments, **fields):
    with pytest.raises(UserError) as caught:
        choose(*arguments, **fields)
    return caught.value.problems


@pytest.mark.parametrize(
    ("device", "fields"),
    [
        (H100, {}),
        (B200, {}),
        *((H100, {"heads": (8, 8, size)}) for size in (64, 96, 128, 192, 256)),
        (H100, {"window": 4096}),
        (A100, {"window": 4096, "max_segments": 1}),
        (A100, {}),
        (H100, {"heads": (28, 4, 128), "seq": 4}),
        (RTX6000, {"row_tokens": 8192}),
    ],
)
def test_auto_chooses_cudnn_where_it_runs(device, fields):
    choice = choose(device, **fields)
    assert (choice.kernel.name, choice.fallback_reason) == ("cudnn", "")
    assert choose(device, **fields, kernel="cudnn") == choice


DETERMINISTIC = {"row_tokens": 8192, "is_deterministic": True}

UNSUPPORTED = [
    (jax.devices("cpu")[0], {}, ["NVIDIA", "cpu", "attention.kernel=auto"]),
    (MI300, {}, ["NVIDIA", "AMD Instinct MI300X"]),
    (V100, {}, ["A100", "Tesla V100-SXM2-16GB", "7.0"]),
    (A100, {"heads": (8, 8, 256)}, ["heads", "8", "128", "256"]),
    (H100, {"dtype": "float32"}, ["bfloat16", "float32", "model.compute_dtype=bfloat16"]),
    (H100, {"heads": (8, 8, 100)}, ["heads", "8", "256", "100"]),
    (B200, {"heads": (8, 8, 256)}, ["heads", "8", "128", "256"]),
    (H100, {"row_tokens": 1000}, ["128", "1000", "data.row_tokens=896 or 1024"]),
    (H100, {"row_tokens": 64}, ["64", "data.row_tokens=128"]),
    (H100, {"row_tokens": 2**24}, ["2**31", "16,777,216", "data.row_tokens=16777088"]),
    (RTX6000, DETERMINISTIC, ["run.deterministic=false", "12.x"]),
    (
        H100,
        {"layer_scores": [ScoreConfig(softcap=50.0), ScoreConfig(softcap=50.0, window=4096)]},
        ["softcap", "50", "attention.kernel=auto", "attention.kernel=blockwise"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("device", "fields", "parts"), UNSUPPORTED)
def test_cudnn_is_refused_where_it_cannot_run_and_auto_gives_the_reason(device, fields, parts):
    (problem,) = refused(device, **fields, kernel="cudnn")
    assert_names(problem, "cuDNN", *parts, start="attention.kernel = cudnn: ")
    choice = choose(device, **fields, seq=4)
    assert choice.kernel.name == "blockwise"
    assert choice.fallback_reason
    assert choice.fallback_reason in problem
    line = describe_choice(choice, make_model((32, 8, 128)))
    assert_names(line, "8 of 32", "2 of 8", "blockwise")
    assert choice.fallback_reason in line
    if "layer_scores" in fields:
        assert_names(line, "1 of 2 layers: each token sees the last 4,096", "scores are capped")
    assert choose(device, **fields, kernel="blockwise").fallback_reason == ""


def test_old_versions_of_cudnn_on_this_machine_are_refused(monkeypatch):
    monkeypatch.setattr(cudnn_calls, "installed_version", lambda: (9, 18, 0))
    assert choose(kernel="cudnn").kernel.name == "cudnn", "the GPU is absent"
    monkeypatch.setattr(jax, "local_devices", lambda: [H100])
    parts = ("cuDNN", "9.18.0", "9.18.1", "nvidia-cudnn-cu12")
    assert_names(refused(kernel="cudnn")[0], *parts, start="attention.kernel = cudnn: ")
    assert choose().kernel.name == "blockwise"
    for installed in ((9, 18, 1), None):
        monkeypatch.setattr(cudnn_calls, "installed_version", lambda installed=installed: installed)
        assert choose(kernel="cudnn").kernel.name == "cudnn"


# 32 query and 8 K/V heads. As few chunks as keep cuDNN's workspace at 6 GiB, and tokens * heads *
# 128 of a chunk below 2**31
@pytest.mark.parametrize(
    ("fields", "head_chunks"),
    [
        ({"seq": 8}, 1),
        # no call has shorter slots where 512 does not divide the rows
        ({"row_tokens": 2**18 - 128}, 32),
        ({"row_tokens": 2**20, "seq": 8}, 2),  # 4 query heads share 1 K/V head: 2 chunks of 2
        ({"row_tokens": 2**18, "max_segments": 2}, 4),  # 8 heads, 2 slots: 4 GiB
        ({"row_tokens": 2**18}, 4),
        ({"row_tokens": 5 * 2**20, "seq": 8}, 4),
        # no more memory than 64 segments
        ({"row_tokens": 5 * 2**20, "seq": 8, "max_segments": 1}, 4),
        ({"row_tokens": 2**17, "num_rows": 2, "seq": 1}, 4),
    ],
)
def test_heads_are_divided_into_few_chunks_within_the_limits(fields, head_chunks):
    assert choose(**fields).settings.head_chunks == head_chunks
    rows = ROWS | fields
    heads = 32 // rows["seq"] // head_chunks
    assert rows["num_rows"] * rows["row_tokens"] * heads * 128 < 2**31


def test_copies_of_segments_before_hopper_count_where_heads_are_divided():
    """Queries, outputs and their gradients of 4 heads, and keys and values of one K/V head."""
    on_a100 = choose(A100, seq=8).settings
    assert (on_a100.copies_segments, choose(seq=8).settings.copies_segments) == (True, False)
    sizes = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 128}
    workload = AttentionWorkload(**ROWS, **sizes)
    for device, num_bytes in ((A100, 4 * (4 + 1) * 4 * 131072 * 128 * 2), (H100, 0)):
        adapted = cudnn_limits.adapt_to_devices(workload, [device])
        assert cudnn_limits.copied_bytes(adapted, CallSplit(1, 4)) == num_bytes
    longest = choose(A100, seq=8, row_tokens=2**20).settings
    assert longest.head_chunks > choose(seq=8, row_tokens=2**20).settings.head_chunks
    line = describe_choice(choose(A100, seq=8), make_model((32, 8, 128)))
    assert_names(line, "segments copied", "4 times")


GIB = 2**30


def test_a_row_that_fits_no_device_is_refused_with_what_fits():
    fields = {"seq": 8, "device_bytes": GIB, "row_tokens": 2**22}
    length = GIB // (4 * 128 + 4 + 4) // 128 * 128
    parts = ["4,194,304", "64", "1.0", f"data.row_tokens={length}", "data.max_segments_per_row=1"]
    assert_names(refused(**fields)[0], *parts, start="data.row_tokens = 4194304: ")
    shorter = fields | {"row_tokens": length, "max_segments": 1}
    assert choose(**shorter, head_chunks=4).kernel.name == "cudnn"
    problem = refused(**shorter, head_chunks=1)[0]
    assert_names(problem, "attention.head_chunks=4", start="attention.head_chunks = 1: ")


PACKED_32K = {"row_tokens": 32768, "is_deterministic": True, "device_bytes": int(72.8 * GIB)}
A_HEAD = 2 * 32768 * (2 * 32768 + 4)
"""Bytes for one head of PACKED_32K: 2 slots; each query has a bfloat16 per key, and a float32."""


def test_a_deterministic_backward_pass_takes_few_heads_at_a_time_and_counts_its_scores():
    choice = choose(**PACKED_32K)
    settings = choice.settings
    assert (choice.kernel.name, settings.head_chunks, settings.workspace_bytes) == (
        "cudnn",
        32,
        A_HEAD,
    )
    shared = 2 * 2 * 128  # bfloat16: dk and dv of each query head
    assert choose(**PACKED_32K, head_chunks=4).settings.workspace_bytes == 8 * (
        A_HEAD + 2 * 32768 * shared
    )
    assert choose(**PACKED_32K | {"device_bytes": None}) == choice
    settings = choose(**PACKED_32K, max_segments=1).settings
    assert (settings.head_chunks, settings.workspace_bytes) == (
        16,
        2 * (A_HEAD // 2 + 32768 * shared),
    )
    small = choose(**PACKED_32K | {"device_bytes": GIB})
    assert small.kernel.name == "blockwise"
    assert_names(small.fallback_reason, "run.deterministic", "32 chunks", "1.0")


GEMMA = [*[ScoreConfig(window=1024)] * 5, ScoreConfig()]
"""A period of layers, as in Gemma 3."""


def test_layers_are_counted_by_workload_without_windows_as_long_as_a_row():
    """Kinds that differ only in what their rows hide or in the scale have the same workload."""
    model = make_model((32, 8, 128), layer_scores=[*GEMMA, ScoreConfig(scale=1.0)])
    for row_tokens, counts in ((2048, {1024: 5, None: 2}), (1024, {None: 7})):
        rows = dataclasses.replace(batches.make_config().step.rows, row_tokens=row_tokens)
        workloads = count_workloads(rows, model)
        assert {layer.window: number for layer, number in workloads.items()} == counts
    assert choose(row_tokens=1024, layer_scores=GEMMA).layer_scores == (ScoreConfig(),) * 6
    assert choose(row_tokens=2048, layer_scores=GEMMA).layer_scores == tuple(GEMMA)


def test_sent_bytes_are_the_mean_of_all_layers(monkeypatch):
    def sent_bytes(self, workload):
        return {"all-to-all": 100 if workload.has_window else 1000}

    monkeypatch.setattr(Ulysses, "sent_bytes", sent_bytes)
    assert choose(seq=8, layer_scores=GEMMA).sent_bytes == (5 * 100 + 1000) // 6


def test_the_banner_shows_what_each_strategy_sends():
    """131,072 tokens, 16,384 on each of 8 devices; 28 query and 4 K/V heads of size 128."""
    choice = choose(seq=8, heads=(28, 4, 128))
    assert (choice.strategy.heads.degree, choice.strategy.layout.degree) == (4, 2)
    held = 16384 * 128 * 2  # bytes of a head
    exchanged = 3 * 2 * (28 + 4) * held * 3 // 4
    # k and v forward and backward, their gradients in float32, and the last hop in bfloat16
    around = 2 * 4 * held * (1 + 1 + 2 + 1)
    assert choice.sent_bytes == exchanged + around
    others = dict(choice.alternatives)
    assert others.keys() == {
        "Ulysses of 2 x ring of 4 (16 chunks each)",
        "ring of 8 (16 chunks each)",
    }
    assert_names(
        describe_choice(choice, make_model((28, 4, 128))),
        "cuDNN 9.28.0",
        "7 of 28",
        "1 of 4",
        "16 of 32",
        units.format_bytes(choice.sent_bytes),
        *(f"{description}: {units.format_bytes(size)}" for description, size in others.items()),
        start="Ulysses of 4 x ring of 2 (16 chunks each)",
    )


@pytest.mark.parametrize(
    ("seq", "heads", "expected"),
    [
        # Ulysses of 2 x ring of 8 sends less, but more of it between nodes
        (16, (40, 10, 128), "Ulysses of 8 x ring of 2 (16 chunks each)"),
        (64, (32, 8, 128), "Ulysses of 8 x ring of 8 (16 chunks each)"),
        (1024, (32, 8, 128), "Ulysses of 8 x ring of 128 (16 chunks each)"),
        # whole rows come first: documents of all lengths give all devices equal work
        (32, (32, 8, 128), "Ulysses of 32"),
    ],
)
def test_auto_exchanges_heads_inside_nodes_of_8(seq, heads, expected):
    choice = choose(seq=seq, heads=heads, row_tokens=16384 * seq)
    assert choice.strategy.description == expected


class GatherAll(TokenExchange):
    """Every device computes all queries of the row, and keeps its tokens of the results."""

    name = "gather_all"

    def kernel_workload(self, workload):
        return workload

    def sent_bytes(self, workload):
        return {"all-gather": self.degree - 1}

    def make_functions(self, kernel, settings, score):
        rows = kernel.make_row_functions(settings, score)

        def gather(x, axis=1):
            return jax.lax.all_gather(x, axes.SEQ, axis=axis, tiled=True)

        def forward(q, k, v, segments):
            out, lse = rows.forward(*map(gather, (q, k, v)), segments)
            return self.keep(out), self.keep(lse, axis=2)

        def backward(saved, segments):
            gathered = Saved(*map(gather, saved, (1, 1, 1, 1, 1, 2)))
            return tuple(map(self.keep, rows.backward(gathered, segments)))

        return AttentionFunctions(forward, backward)

    def segment_mask(self, starts, lengths, num_tokens):
        return self.keep(segments.segment_mask(starts, lengths, num_tokens * self.degree))

    def keep(self, x, axis=1):
        size = x.shape[axis] // self.degree
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes.SEQ) * size, size, axis)


def test_a_new_strategy_and_kernel_are_one_class_and_one_entry_each(monkeypatch):
    exchanges = {GatherAll.name: GatherAll} | selection.TOKEN_EXCHANGES
    monkeypatch.setattr(selection, "TOKEN_EXCHANGES", exchanges)
    kernel = oracle.OracleKernel()
    monkeypatch.setattr(selection, "KERNELS", {kernel.name: kernel} | selection.KERNELS)
    automatic = choose(seq=2, row_tokens=32)
    assert automatic.strategy == combine(1, GatherAll(degree=2))  # sends least
    assert automatic.kernel == kernel
    # `construct` skips the config's list of names
    requested = AttentionConfig.model_construct(strategy="gather_all", kernel=kernel.name)
    rows = GroupRows(**ROWS | {"seq": 2, "row_tokens": 32, "dtype": "float32"})
    choice = choose_attention(requested, rows, make_model((4, 2, 8)), devices=[H100])
    assert choice.strategy == automatic.strategy
    attend = batches.attend_on_shards(make_chosen_attend(choice))
    slots = oracle.make_slots([[(0, 9), (9, 20)], [(4, 20)]], 2)
    inputs = [*oracle.draw(2, 32, 4, 2, 8), *map(jnp.asarray, slots)]
    actual = oracle.differentiate(attend)(*inputs)
    expected = oracle.differentiate(oracle.make_attend())(*inputs)
    for name, right in expected.items():
        assert batches.relative_error(actual[name], np.asarray(right)) < tolerances.STRATEGIES


def test_an_incomplete_strategy_or_kernel_cannot_be_made():
    for base in (TokenExchange, Kernel):
        with pytest.raises(TypeError, match="abstract"):
            type("Incomplete", (base,), {"name": "incomplete"})()
