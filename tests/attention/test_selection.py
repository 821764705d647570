"""Choice of the kernel, its settings, and the errors for kernels that cannot run."""

import re
import types

import jax
import pytest

from jaxsp import attention
from jaxsp.attention import LayerWorkload, ScoreConfig
from jaxsp.attention.kernels.cudnn import cudnn_calls, cudnn_memory
from jaxsp.attention.kernels.cudnn.cudnn_memory import CallSplit
from jaxsp.attention.kernels.kernel import KernelWorkload
from jaxsp.attention.strategies.ulysses import Ulysses
from jaxsp.config import config_file
from jaxsp.core import units
from jaxsp.core.errors import UserError
from tests import batches
from tests.messages import assert_names, numbers


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
    remat="auto",
    deterministic=False,
    **attention_fields,
):
    config = config_file.parse(
        {
            "run": {"directory": "unused", "steps": 1, "deterministic": deterministic},
            "model": {"config": {}, "compute_dtype": dtype},
            "mesh": {"seq": seq},
            "attention": attention_fields,
            "data": {
                "train": [{"source": "unused", "format": "tokens"}],
                "row_tokens": row_tokens,
                "max_segments_per_row": max_segments,
            },
            "batch": {"rows_per_step": 1, "rows_per_microbatch": rows_per_microbatch},
            "memory": {"remat": remat},
            "optimizer": {"learning_rate": 1.0},
        }
    )
    return attention.choose(
        config,
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
def test_cudnn_is_refused_where_it_cannot_run_and_auto_gives_the_reason(
    device,
    fields,
    parts,
):
    (problem,) = refused(device, **fields, kernel="cudnn")
    assert_names(problem, "cuDNN", *parts, start="attention.kernel = cudnn: ")
    choice = choose(device, **fields, seq=4)
    assert choice.kernel.name == "blockwise"
    assert choice.fallback_reason
    assert choice.fallback_reason in problem
    line = attention.describe(choice, make_model((32, 8, 128)))
    assert_names(line, "8 of 32", "2 of 8", "blockwise")
    assert choice.fallback_reason in line


def test_all_reasons_are_reported_at_once():
    problems = refused(A100, kernel="cudnn", dtype="float32", row_tokens=1000, heads=(8, 8, 100))
    assert len(problems) == 3


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
        refused(kernel="cudnn")[0],
        "is called through parts of JAX that changed",
        "install",
    )
    assert choose().kernel.name == "blockwise"


def test_blockwise_runs_anywhere():
    choice = choose(V100, kernel="blockwise", dtype="float32", row_tokens=1000)
    assert choice.kernel.name == "blockwise"


def test_heads_that_cannot_be_shared_are_refused():
    assert_names(refused(seq=6, strategy="ulysses")[0], "32", start="mesh.seq = 6: ")


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


@pytest.mark.parametrize(("fields", "legal"), [
    ({}, "1, 2, 4, 8, 16 or 32"),
    ({"row_tokens": 2**20}, "4, 8, 16 or 32"),
    ({"heads": (28, 4, 128), "seq": 4}, "1 or 7"),
    ({"heads": (12, 6, 128)}, "1, 2, 3, 6 or 12"),
])  # fmt: skip
def test_head_chunks_that_do_not_divide_the_heads_are_refused_with_the_legal_ones(fields, legal):
    assert_names(
        refused(**fields, head_chunks=5)[0],
        f"Use {legal}",
        "null",
        start="attention.head_chunks = 5: ",
    )
    for number in legal.replace(" or ", ", ").split(", "):
        assert choose(**fields, head_chunks=int(number)).settings.head_chunks == int(number)


def test_head_chunks_are_refused_for_a_kernel_that_does_not_support_them():
    for device, fields, parts in (
        (V100, {}, ["blockwise", "A100"]),
        (H100, {"kernel": "blockwise"}, ["blockwise", "attention.head_chunks=null"]),
    ):
        problem = refused(device, **fields, head_chunks=2)[0]
        assert_names(problem, "cudnn", *parts, start="attention.head_chunks = 2: ")


def test_copies_of_segments_before_hopper_count_where_heads_are_divided():
    """Queries, outputs and their gradients of 4 heads, and keys and values of one K/V head."""
    on_a100 = choose(A100, seq=8).settings
    assert (on_a100.copies_segments, choose(seq=8).settings.copies_segments) == (True, False)
    tokens = 131072
    split = CallSplit(head_chunks=1, capacity_factor=4)
    workload = attention.combine(8).kernel_workload(
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
    line = attention.describe(choose(A100, seq=8), make_model((32, 8, 128)))
    assert_names(line, "segments copied", "4 times")


def test_the_workspace_of_cudnn_is_estimated():
    assert choose(kernel="blockwise").settings.workspace_bytes == 0
    tokens = 131072
    heads = 4
    sums = 4 * 128 + 4  # float32: dq, and dout * out
    shared = 2 * 2 * 128  # bfloat16: dk and dv of each query head
    assert choose(seq=8).settings.workspace_bytes == 4 * tokens * heads * (sums + shared)
    assert choose(seq=8, head_chunks=4).settings.workspace_bytes == 4 * tokens * 1 * sums
    assert choose(seq=8, max_segments=1).settings.workspace_bytes == tokens * heads * (
        sums + shared
    )


def test_the_statistics_of_the_largest_call_are_counted():
    assert choose(kernel="blockwise").settings.lse_bytes == 0
    a_head = 4 * 131072  # float32
    # as of 4 whole rows of 4 heads, for any number of segments
    assert choose(seq=8).settings.lse_bytes == 4 * a_head * 4
    assert choose(seq=8, max_segments=1000).settings.lse_bytes == 4 * a_head * 4
    assert choose(seq=8, head_chunks=2).settings.lse_bytes == 4 * a_head * 2
    assert choose(seq=8, max_segments=2).settings.lse_bytes == 2 * a_head * 4
    assert choose(seq=8, max_segments=1).settings.lse_bytes == a_head * 4
    # no call has shorter slots where 512 does not divide the rows
    assert choose(seq=8, row_tokens=131200, head_chunks=1).settings.lse_bytes == 64 * 4 * 131200 * 4


GIB = 2**30


def test_more_segments_than_fit_any_device_are_refused_with_a_number_that_fits():
    fields = {"row_tokens": 2**20 + 128, "seq": 8, "device_bytes": 80 * GIB}
    segment_bytes = (2**20 + 128) * (4 * 128 + 4 + 4)  # of one head
    most = 80 * GIB // segment_bytes
    suggestion = f"data.max_segments_per_row={most}"
    problem = refused(**fields, max_segments=300)[0]
    needed = f"{300 * segment_bytes / GIB:.1f} GiB"
    assert_names(
        problem,
        "1,048,704",
        "4",
        needed,
        "80.0",
        suggestion,
        start="data.max_segments_per_row = 300: ",
    )
    assert choose(**fields, max_segments=most).settings.head_chunks == 4
    assert_names(refused(**fields, max_segments=most + 1)[0], suggestion)
    # if the rows divide evenly, short segments have short slots
    assert choose(**fields | {"row_tokens": 2**20}, max_segments=300).kernel.name == "cudnn"


def test_too_few_head_chunks_for_a_device_are_refused_with_enough():
    fields = {"row_tokens": 2**19, "seq": 8, "device_bytes": 3 * GIB}
    problem = refused(**fields, head_chunks=1)[0]
    parts = ["524,288", "64", "4.0 GiB", "3.0", "attention.head_chunks=4"]
    assert_names(problem, *parts, start="attention.head_chunks = 1: ")
    assert choose(**fields, head_chunks=4).settings.head_chunks == 4


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


def test_the_memory_of_a_local_device_is_read(monkeypatch):
    here = gpu()
    here.memory_stats = lambda: {"bytes_limit": GIB}
    monkeypatch.setattr(jax, "local_devices", lambda: [here])
    assert refused(here, row_tokens=2**22, seq=8)[0].startswith("data.row_tokens = 4194304: ")
    assert choose(row_tokens=2**22, seq=8).kernel.name == "cudnn"
    here.memory_stats = lambda: None
    assert choose(here, row_tokens=2**22, seq=8).kernel.name == "cudnn"


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


def test_only_a_deterministic_backward_pass_outside_blackwell_keeps_scores():
    usual = choose(**PACKED_32K | {"deterministic": False})
    assert usual.settings.head_chunks == 1
    assert usual.settings.workspace_bytes < 8 * GIB
    assert choose(B200, **PACKED_32K) == usual
    assert choose(A100, **PACKED_32K, max_segments=1) == choose(**PACKED_32K, max_segments=1)


@pytest.mark.parametrize(
    ("strategy", "rows", "keys", "heads"),
    [
        ("ring", 2, 8192, 32),  # both chunks at once, each over a chunk of keys
        (
            "all_gather",
            1,
            131072,
            4,
        ),  # one chunk after another over the whole row; the query heads of one K/V head
    ],
)
def test_the_scores_of_chunks_are_those_of_the_keys_before_them(strategy, rows, keys, heads):
    choice = choose(
        seq=8,
        strategy=strategy,
        ulysses_degree=1,
        chunks_per_device=2,
        max_segments=1,
        deterministic=True,
        head_chunks=1,
    )
    chunk = 131072 // 16
    scores = 2 * rows * chunk * keys * heads  # bfloat16
    sums = (
        4 * 2 * chunk * heads + 2 * 2 * 128 * rows * keys * heads
    )  # float32 of each query; dk and dv
    assert choice.settings.workspace_bytes == scores + sums


def test_deterministic_rows_too_long_for_any_device_are_refused_with_what_works():
    fields = PACKED_32K | {"row_tokens": 262144}
    size = 2 * 262144 * (2 * 262144 + 4 + 4)  # of one head, with its statistics
    problem = refused(**fields, kernel="cudnn")[0]
    sizes = [f"{size / GIB:.1f} GiB", "262,144", "32", "72.8"]
    suggestions = [
        "attention.kernel=blockwise",
        "run.deterministic=false",
        "data.row_tokens=131072",
    ]
    assert_names(problem, *sizes, *suggestions, start="attention.kernel = cudnn: ")
    assert choose(**fields, kernel="blockwise").kernel.name == "blockwise"
    assert (
        choose(**fields | {"row_tokens": 131072}, kernel="cudnn").settings.workspace_bytes
        < 72.8 * GIB
    )
    assert choose(**fields | {"deterministic": False}, kernel="cudnn").kernel.name == "cudnn"
    automatic = choose(**fields)
    assert (automatic.kernel.name, automatic.settings.workspace_bytes) == ("blockwise", 0)
    line = attention.describe(automatic, make_model((32, 8, 128)))
    assert_names(line, "blockwise", "256.0 GiB")
    assert choose(B200, **fields).kernel.name == "cudnn"


def test_deterministic_chunks_too_long_for_any_device_are_refused_with_rows_that_fit():
    fields = {
        "seq": 8,
        "strategy": "ring",
        "ulysses_degree": 1,
        "max_segments": 1,
        "deterministic": True,
        "device_bytes": 2 * GIB,
        "kernel": "cudnn",
    }
    problem = refused(**fields, row_tokens=2**20)[0]
    parts = ["run.deterministic", "1,048,576", "32", "2.0", f"data.row_tokens={2**18}"]
    assert_names(problem, *parts, start="attention.kernel = cudnn: ")
    assert refused(**fields, row_tokens=2**19)
    assert choose(**fields, row_tokens=2**18, head_chunks=32).kernel.name == "cudnn"


def test_too_few_head_chunks_for_a_deterministic_backward_pass_are_refused_with_enough_of_them():
    problem = refused(**PACKED_32K, head_chunks=1)[0]
    parts = ["run.deterministic", "72.8", "attention.head_chunks=2"]
    assert_names(problem, *parts, start="attention.head_chunks = 1: ")
    assert choose(**PACKED_32K, head_chunks=2).settings.head_chunks == 2


def test_deterministic_attention_of_cudnn_is_refused_on_consumer_blackwell():
    fields = {"row_tokens": 8192, "deterministic": True}
    problem = refused(RTX6000, **fields, kernel="cudnn")[0]
    assert_names(problem, "run.deterministic=false", "12.x", start="attention.kernel = cudnn: ")
    assert choose(RTX6000, **fields).kernel.name == "blockwise"
    assert choose(RTX6000, row_tokens=8192).kernel.name == "cudnn"


def test_the_banner_shows_how_cudnn_computes_the_heads(monkeypatch):
    line = attention.describe(choose(seq=8, head_chunks=2), make_model((32, 8, 128)))
    assert_names(line, "Ulysses of 8", "cuDNN 9.28.0", "2", "4 of 32", "1 of 8")
    short = choose(row_tokens=8192)
    line = attention.describe(short, make_model((32, 8, 128)))
    assert_names(line, "cuDNN 9.28.0")
    monkeypatch.setattr(cudnn_calls, "installed_version", lambda: None)
    unknown = attention.describe(short, make_model((32, 8, 128)))
    assert_names(unknown, "cuDNN")
    assert numbers(unknown) == [], "all heads and rows are on each device"
    assert unknown == line.replace(" 9.28.0", "")


def test_the_banner_shows_the_memory_of_large_log_sum_exps():
    """2 slots of 2,097,152 tokens, 4 heads, float32."""
    line = attention.describe(
        choose(seq=8, row_tokens=2**21, head_chunks=1), make_model((32, 8, 128))
    )
    assert_names(line, "64 MiB")


@pytest.mark.parametrize("kernel", ["cudnn", "blockwise"])
def test_the_banner_shows_the_window(kernel):
    choice = choose(kernel=kernel, window=4096)
    assert choice.layer_scores == (ScoreConfig(window=4096),)
    line = attention.describe(choice, make_model((32, 8, 128)))
    assert_names(line, "each token sees the last 4,096 of its document")
    assert "layers" not in line, "all have the window"


GEMMA = [*[ScoreConfig(window=1024)] * 5, ScoreConfig()]
"""A period of layers, as in Gemma 3."""


def test_the_banner_shows_the_number_of_layers_with_a_window():
    choice = choose(layer_scores=[*GEMMA * 10, *GEMMA[:2]])
    line = attention.describe(choice, make_model((32, 8, 128)))
    assert_names(line, "52 of 62 layers: each token sees the last 1,024 of its document")
    choice = choose(layer_scores=GEMMA, seq=8)
    line = attention.describe(choice, make_model((32, 8, 128)))
    assert_names(line, "5 of 6 layers", "per layer and microbatch on average")


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
    line = attention.describe(choice, make_model((32, 8, 128)))
    assert_names(line, "softcap", "1 of 2 layers: each token sees the last 4,096")
    assert "scores are capped at 50" in line
    assert choose(layer_scores=layer_scores, kernel="blockwise").fallback_reason == ""


def test_layers_are_counted_by_workload():
    """Kinds that differ only in what their rows hide or in the scale have the same workload."""
    model = make_model((32, 8, 128), layer_scores=[*GEMMA, ScoreConfig(scale=1.0)])

    def count(row_tokens: int) -> dict[int | None, int]:
        config = batches.make_config()
        data = config.data.model_copy(update={"row_tokens": row_tokens})
        config = config.model_copy(update={"data": data})
        counts = attention.count_workloads(config, model)
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
    line = attention.describe(choice, make_model((28, 4, 128)))
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


def test_all_gather_is_between_nodes():
    """Ulysses of 32 x all-gather of 2 sends less, but most of it between nodes."""
    fields = {"seq": 64, "row_tokens": 2**20, "strategy": "all_gather"}
    choice = choose(**fields)
    assert choice.strategy.description == "Ulysses of 8 x all_gather of 8 by 1 (16 chunks each)"
    assert choice.sent_bytes > choose(**fields, ulysses_degree=32).sent_bytes


def test_rows_are_cut_into_chunks_that_cudnn_supports():
    choice = choose(seq=8, heads=(7, 7, 128), row_tokens=2**17 - 1024)
    assert_names(choice.fallback_reason, "16", "2048", "data.row_tokens", "130048")
    assert choose(seq=8, heads=(7, 7, 128)).kernel.name == "cudnn"
    # 24 heads on 18 devices, 6 of them neighbors: chunks of 6, and of 128 for cuDNN
    near = refused(seq=18, heads=(24, 24, 128), row_tokens=2**17, kernel="cudnn")[0]
    assert_names(near, "2304", "131072", "data.row_tokens=129024 or 131328")
    assert (
        choose(seq=18, heads=(24, 24, 128), row_tokens=129024, kernel="cudnn").kernel.name
        == "cudnn"
    )
    assert choose(A100, seq=8, heads=(7, 7, 128), max_segments=1).kernel.name == "cudnn"


def test_errors_for_chunks_give_the_length_of_whole_rows():
    """The suggested rows fit."""
    fields = {"seq": 8, "ulysses_degree": 1, "strategy": "ring", "max_segments": 1}
    problem = refused(**fields, row_tokens=2**26, device_bytes=2 * GIB)[0]
    assert_names(problem, "67,108,864", start="data.row_tokens = 67108864: ")
    longest = int(re.search(r"Use data.row_tokens=(\d+)", problem)[1])
    assert (
        choose(**fields, row_tokens=longest, device_bytes=2 * GIB, head_chunks=32).kernel.name
        == "cudnn"
    )
    problem = refused(**fields | {"max_segments": 2}, row_tokens=2**28, kernel="cudnn")[0]
    assert_names(problem, "268,435,456", "16", "2")
    longest = int(re.search(r"Use data.row_tokens=(\d+)", problem)[1])
    assert 2**26 < longest < 2**28
    assert (
        choose(**fields | {"max_segments": 2}, row_tokens=longest, kernel="cudnn").kernel.name
        == "cudnn"
    )


@pytest.mark.parametrize("remat", ["none", "save_attention", "full", "auto"])
def test_recomputation_does_not_change_the_strategy(remat):
    """A run that recomputes more keeps the planned strategy. With `full` it would be 8 x 2."""
    fields = {"seq": 16, "heads": (40, 10, 128)}
    assert choose(**fields, remat=remat).strategy == choose(**fields).strategy


def test_a_suggested_row_length_is_a_multiple_of_the_devices():
    problem = refused(seq=12, heads=(24, 24, 128), row_tokens=100000, kernel="cudnn")[0]
    assert_names(problem, "384", "data.row_tokens=99840 or 100224")
    assert 99840 % 12 == 100224 % 12 == 0


NEAR = ScoreConfig(window=4096)
FAR = ScoreConfig()


def test_settings_fit_layers_with_and_without_windows():
    """Rows of halo and chunk are five times as long as chunks."""
    fields = {"seq": 8, "ulysses_degree": 1, "strategy": "ring", "row_tokens": 2**22}
    wide = ScoreConfig(window=2**20)
    both = choose(**fields, layer_scores=[FAR, wide]).settings
    assert both == choose(**fields, layer_scores=[wide, FAR]).settings
    kinds = [choose(**fields, layer_scores=[score]).settings for score in (FAR, wide)]
    assert kinds[0].head_chunks < kinds[1].head_chunks == both.head_chunks
    assert both.workspace_bytes >= kinds[1].workspace_bytes
    assert both.lse_bytes >= kinds[1].lse_bytes


def test_head_chunks_that_fit_only_one_kind_of_layer_are_refused_with_equal_heads():
    fields = {
        "seq": 8,
        "heads": (28, 4, 128),
        "strategy": "all_gather",
        "row_tokens": 2**23,
        "layer_scores": [NEAR, FAR],
    }
    (problem,) = refused(**fields)
    suggestion = "attention.kv_heads_per_gather=4"
    assert_names(problem, "windows", suggestion, start="attention.head_chunks = null: ")
    assert choose(**fields, kv_heads_per_gather=4).kernel.name == "cudnn"
