"""Choice of the kernel, its settings, and the errors for kernels that cannot run."""

import dataclasses
import types

import jax
import pytest

from jaxsp.attention.kernels.cudnn import cudnn_calls, cudnn_memory
from jaxsp.attention.kernels.cudnn.cudnn_memory import CallSplit
from jaxsp.attention.kernels.kernel import KernelWorkload, ScoreConfig
from jaxsp.attention.selection import choose_attention, describe_choice
from jaxsp.attention.strategies.attention_config import AttentionConfig
from jaxsp.attention.strategies.strategy import combine
from jaxsp.attention.strategies.ulysses import Ulysses
from jaxsp.attention.strategies.workload import GroupRows, LayerWorkload, count_workloads
from jaxsp.core import units
from jaxsp.core.errors import UserError
from tests import batches
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
B300 = gpu("NVIDIA B300", "10.3")
MI300 = gpu("AMD Instinct MI300X", "gfx942")
RTX6000 = gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0")


def choose(
    device=H100,
    *,
    heads=(32, 8, 128),
    window=None,
    layer_scores=None,
    device_bytes=None,
    seq=1,
    row_tokens=131072,
    max_segments=64,
    rows_per_microbatch=1,
    dtype="bfloat16",
    deterministic=False,
    **attention_fields,
):
    rows = GroupRows(
        num_rows=rows_per_microbatch,
        row_tokens=row_tokens,
        max_segments=max_segments,
        seq=seq,
        dtype=dtype,
        is_deterministic=deterministic,
    )
    return choose_attention(
        AttentionConfig(**attention_fields),
        rows,
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
        (A100, {"max_segments": 1}),
        (A100, {}),
        (H100, {"heads": (28, 4, 128), "seq": 4}),
    ],
)
def test_auto_chooses_cudnn_where_it_runs(device, fields):
    choice = choose(device, **fields)
    assert (choice.kernel.name, choice.fallback_reason) == ("cudnn", "")
    assert choose(device, **fields, kernel="cudnn") == choice


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


@pytest.mark.parametrize(
    ("installed", "device", "fields", "parts"),
    [
        ((9, 10, 0), B200, {}, ["9.10.0", "bugs"]),
        ((9, 10, 1), A100, {"max_segments": 1}, ["9.10.1", "bugs"]),
        ((9, 17, 1), H100, {}, ["9.17.1", "packed rows", "9.18.0"]),
        ((9, 18, 0), H100, {}, None),
        ((9, 17, 1), H100, {"max_segments": 1}, None),
        ((9, 17, 1), B200, {}, None),
        ((9, 5, 1), B200, {}, ["9.5.1", "packed rows", "9.6.0"]),
        ((9, 14, 0), B200, {"window": 4096}, ["9.14.0", "windows", "bug"]),
        ((9, 14, 0), A100, {"max_segments": 1, "window": 4096}, ["9.14.0", "windows", "bug"]),
        ((9, 14, 0), B200, {"window": 131072}, None),
        ((9, 14, 1), B200, {"window": 4096}, None),
        ((9, 18, 0), B200, {"deterministic": True}, ["9.18.0", "run.deterministic", "9.18.1"]),
        ((9, 18, 1), B200, {"deterministic": True}, None),
        ((8, 9, 7), H100, {"max_segments": 1}, ["8.9.7", "9.0.0"]),
        ((9, 10, 2), B300, {}, ["9.10.2", "9.11.0"]),
        (
            (9, 4, 0),
            H100,
            {"max_segments": 1, "heads": (8, 8, 192)},
            ["9.4.0", "heads of 192", "9.5.0"],
        ),
        ((9, 17, 1), RTX6000, {"max_segments": 1}, ["9.17.1", "this GPU", "9.18.1"]),
        ((9, 18, 1), RTX6000, {}, None),
        ((9, 5, 1), A100, {"window": 4096}, ["9.5.1", "packed rows", "9.6.0"]),
        ((9, 0, 0), A100, {}, None),
        ((9, 1, 1), A100, {"max_segments": 1, "window": 4096}, ["9.1.1", "windows", "9.2.0"]),
        ((9, 1, 1), A100, {"max_segments": 1, "window": 131072}, None),  # as long as the rows
        ((9, 5, 1), H100, {"max_segments": 1, "heads": (8, 8, 256), "window": 4096}, None),
        ((9, 28, 0), B300, {}, None),
        (None, H100, {}, None),
    ],
)
def test_cudnn_versions(installed, device, fields, parts, monkeypatch):
    monkeypatch.setattr(cudnn_calls, "installed_version", lambda: installed)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    if parts is None:
        assert choose(device, **fields, kernel="cudnn").kernel.name == "cudnn"
    else:
        assert_names(
            refused(device, **fields, kernel="cudnn")[0],
            "cuDNN",
            *parts,
            start="attention.kernel = cudnn: ",
        )


def test_the_cudnn_of_a_machine_that_only_compiles_does_not_count(monkeypatch):
    monkeypatch.setattr(cudnn_calls, "installed_version", lambda: (9, 10, 2))
    assert choose(H100, kernel="cudnn").kernel.name == "cudnn"
    monkeypatch.setattr(jax, "local_devices", lambda: [H100])
    assert choose(H100).kernel.name == "blockwise"


def test_an_unknown_jax_is_an_obstacle(monkeypatch):
    monkeypatch.setattr(
        cudnn_calls,
        "describe_unsupported_jax",
        lambda: "is called through parts of JAX that changed",
    )
    assert_names(
        refused(kernel="cudnn")[0], "is called through parts of JAX that changed", "install"
    )
    assert choose().kernel.name == "blockwise"


# 32 query and 8 K/V heads. As few chunks as keep cuDNN's workspace at 6 GiB, and tokens * heads *
# 128 of a chunk below 2**31
@pytest.mark.parametrize(
    ("fields", "head_chunks"),
    [
        ({"seq": 8}, 1),
        (
            {"row_tokens": 2**18 - 128},
            32,
        ),  # no call has shorter slots where 512 does not divide the rows
        ({"row_tokens": 2**20, "seq": 8}, 2),  # 4 query heads share 1 K/V head: 2 chunks of 2
        ({"row_tokens": 2**18, "max_segments": 2}, 4),  # 8 heads, 2 slots: 4 GiB
        ({"row_tokens": 2**18}, 4),
        ({"row_tokens": 5 * 2**20, "seq": 8}, 4),
        (
            {"row_tokens": 5 * 2**20, "seq": 8, "max_segments": 1},
            4,
        ),  # no more memory than 64 segments
        ({"row_tokens": 2**17, "rows_per_microbatch": 2, "seq": 1}, 4),
    ],
)
def test_heads_are_divided_into_few_chunks_within_the_limits(fields, head_chunks):
    assert choose(**fields).settings.head_chunks == head_chunks
    work = KernelWorkload(
        num_heads=32 // fields.get("seq", 1),
        num_kv_heads=8 // fields.get("seq", 1),
        head_dim=128,
        row_tokens=fields.get("row_tokens", 131072),
        num_rows=fields.get("rows_per_microbatch", 1),
        max_segments=fields.get("max_segments", 64),
        window=None,
        dtype="bfloat16",
    )
    assert work.num_q_elements(head_chunks) < 2**31


def test_copies_of_segments_before_hopper_count_where_heads_are_divided():
    """Queries, outputs and their gradients of 4 heads, and keys and values of one K/V head."""
    on_a100 = choose(A100, seq=8).settings
    assert (on_a100.copies_segments, choose(seq=8).settings.copies_segments) == (True, False)
    tokens = 131072
    split = CallSplit(head_chunks=1, capacity_factor=4)
    workload = combine(8).kernel_workload(
        LayerWorkload(
            num_rows=1,
            tokens_per_device=tokens // 8,
            row_tokens=tokens,
            max_segments=64,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            dtype="bfloat16",
            window=None,
        )
    )
    copied = cudnn_memory.copied_bytes(cudnn_memory.adapt_to_devices(workload, [A100]), split)
    assert copied == 4 * (4 + 1) * 4 * tokens * 128 * 2
    assert cudnn_memory.copied_bytes(cudnn_memory.adapt_to_devices(workload, [H100]), split) == 0
    longest = choose(A100, seq=8, row_tokens=8 * tokens).settings
    assert longest.head_chunks > choose(seq=8, row_tokens=8 * tokens).settings.head_chunks
    line = describe_choice(choose(A100, seq=8), make_model((32, 8, 128)))
    assert_names(line, "segments copied", "4 times")


GIB = 2**30


def test_a_row_that_fits_no_device_is_refused_with_a_length_that_fits():
    fields = {"seq": 8, "device_bytes": GIB, "row_tokens": 2**22}
    problem = refused(**fields)[0]
    length = GIB // (4 * 128 + 4 + 4) // 128 * 128
    parts = ["4,194,304", "64", "1.0", f"data.row_tokens={length}", "data.max_segments_per_row=1"]
    assert_names(problem, *parts, start="data.row_tokens = 4194304: ")
    assert (
        choose(**fields | {"row_tokens": length, "max_segments": 1, "head_chunks": 4}).kernel.name
        == "cudnn"
    )


PACKED_32K = {"row_tokens": 32768, "deterministic": True, "device_bytes": int(72.8 * GIB)}
A_HEAD = 2 * 32768 * (2 * 32768 + 4)
"""Bytes for one head of PACKED_32K: 2 slots; each query has a bfloat16 per key, and a float32."""


def test_a_deterministic_backward_pass_takes_few_heads_at_a_time_and_counts_its_scores():
    choice = choose(**PACKED_32K)
    assert (choice.kernel.name, choice.settings.head_chunks, choice.settings.workspace_bytes) == (
        "cudnn",
        32,
        A_HEAD,
    )
    shared = 2 * 2 * 128  # bfloat16: dk and dv of each query head
    assert choose(**PACKED_32K, head_chunks=4).settings.workspace_bytes == 8 * (
        A_HEAD + 2 * 32768 * shared
    )
    assert choose(**PACKED_32K | {"device_bytes": None}) == choice
    one_document = choose(**PACKED_32K, max_segments=1)
    assert (one_document.settings.head_chunks, one_document.settings.workspace_bytes) == (
        16,
        2 * (A_HEAD // 2 + 32768 * shared),
    )


def test_deterministic_attention_of_cudnn_is_refused_on_consumer_blackwell():
    fields = {"row_tokens": 8192, "deterministic": True}
    problem = refused(RTX6000, **fields, kernel="cudnn")[0]
    assert_names(problem, "run.deterministic=false", "12.x", start="attention.kernel = cudnn: ")
    assert choose(RTX6000, **fields).kernel.name == "blockwise"
    assert choose(RTX6000, row_tokens=8192).kernel.name == "cudnn"


GEMMA = [*[ScoreConfig(window=1024)] * 5, ScoreConfig()]
"""A period of layers, as in Gemma 3."""


def test_a_window_as_long_as_a_row_is_none():
    choice = choose(row_tokens=1024, layer_scores=GEMMA)
    assert choice.layer_scores == (ScoreConfig(),) * 6
    choice = choose(row_tokens=2048, layer_scores=GEMMA)
    assert choice.layer_scores == tuple(GEMMA)


def test_a_kernel_must_support_every_kind_of_layer(monkeypatch):
    monkeypatch.setattr(cudnn_calls, "installed_version", lambda: (9, 14, 0))
    monkeypatch.setattr(jax, "local_devices", lambda: [B200])
    assert choose(B200, layer_scores=[ScoreConfig()]).kernel.name == "cudnn"
    assert choose(B200, layer_scores=GEMMA).kernel.name == "blockwise"


def test_cudnn_is_refused_for_softcaps_and_auto_takes_blockwise():
    layer_scores = [ScoreConfig(softcap=50.0), ScoreConfig(softcap=50.0, window=4096)]
    (problem,) = refused(layer_scores=layer_scores, kernel="cudnn")
    parts = ["softcap", "50", "attention.kernel=auto", "attention.kernel=blockwise"]
    assert_names(problem, *parts, start="attention.kernel = cudnn: ")
    choice = choose(layer_scores=layer_scores)
    assert choice.kernel.name == "blockwise"
    line = describe_choice(choice, make_model((32, 8, 128)))
    assert_names(line, "softcap", "1 of 2 layers: each token sees the last 4,096")
    assert "scores are capped at 50" in line
    assert choose(layer_scores=layer_scores, kernel="blockwise").fallback_reason == ""


def test_layers_are_counted_by_workload():
    """Kinds that differ only in what their rows hide or in the scale have the same workload."""
    model = make_model((32, 8, 128), layer_scores=[*GEMMA, ScoreConfig(scale=1.0)])

    def count(row_tokens: int) -> dict[int | None, int]:
        rows = dataclasses.replace(batches.make_config().step.rows, row_tokens=row_tokens)
        counts = count_workloads(rows, model)
        return {layer.window: number for layer, number in counts.items()}

    assert count(2048) == {1024: 5, None: 2}
    assert count(1024) == {None: 7}


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
    line = describe_choice(choice, make_model((28, 4, 128)))
    assert_names(
        line,
        "cuDNN 9.28.0",
        "7 of 28",
        "1 of 4",
        "16 of 32",
        start="Ulysses of 4 x ring of 2 (16 chunks each)",
    )
    others = dict(choice.alternatives)
    assert others.keys() == {
        "Ulysses of 2 x ring of 4 (16 chunks each)",
        "ring of 8 (16 chunks each)",
    }
    assert_names(
        line,
        units.format_bytes(choice.sent_bytes),
        *(f"{description}: {units.format_bytes(size)}" for description, size in others.items()),
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
