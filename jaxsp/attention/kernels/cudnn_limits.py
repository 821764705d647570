"""What cuDNN's attention can do, and on what: asked before anything is compiled."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from jaxsp.attention.kernels import cudnn_calls, cudnn_slots
from jaxsp.core import errors

MAX_ELEMENTS = 2**31 - 1
"""Places in a packed call's memory are counted in elements, in 32 bits."""

ROW_MULTIPLE = 128
"""Rows have a multiple of so many tokens: gradients of rows with a rest of 64 were NaN (pytorch issue 196678)."""

BROKEN_VERSIONS = ((9, 10, 0), (9, 10, 1))
"""cuDNN versions with known bugs in attention, which TransformerEngine avoids too."""

BROKEN_WINDOW_VERSION = (9, 14, 0)
"""cuDNN version with a known bug in sliding windows.

TransformerEngine refuses it for more than 1,024 keys and any mask except plain causal; packed rows use PADDING_CAUSAL.
Source: nvte_get_fused_attn_backend in NVIDIA/TransformerEngine transformer_engine/common/fused_attn/fused_attn.cpp.
"""


@runtime_checkable
class Device(Protocol):
    """A jax.Device, here or absent; NVIDIA's have a compute_capability such as `9.0`."""

    @property
    def device_kind(self) -> str: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelWorkload:
    """What one device attends to at a time: whole rows for its own heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    row_tokens: int
    num_rows: int
    max_segments: int
    """Slots for the pieces of a row; rows of one slot are taken as a whole."""
    window: int | None
    """How many tokens a token sees, itself among them; None: all before it."""
    dtype: str
    chunks_per_row: int = 1
    """Parts of a row, each of which is a row here;"""
    num_earlier_keys: int = 0
    """and so many keys that are taken at a time of what is before it."""
    ulysses_degree: int = 1
    """Devices that hold the same chunks."""
    whole_row_tokens: int | None = None
    """Of the row that is in chunks."""
    is_deterministic: bool = False
    """True if gradients must be the same bit for bit in every run: run.deterministic."""
    has_score_workspace: bool = False
    """True if the backward pass writes the gradients of all scores to memory; see `needs_score_workspace`."""

    @property
    def whole_row_shape(self) -> tuple[int, int]:
        """Of which these are parts: how many, and tokens of each."""
        return self.num_rows // (
            2 if self.chunks_per_row > 1 else 1
        ), self.whole_row_tokens or self.row_tokens

    @property
    def row_multiple(self) -> int:
        """What the tokens of a whole row have to be a multiple of."""
        return math.lcm(
            ROW_MULTIPLE * self.chunks_per_row,
            self.chunks_per_row * self.ulysses_degree if self.chunks_per_row > 1 else 1,
        )

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.row_tokens

    @property
    def is_packed(self) -> bool:
        return self.max_segments > 1

    @property
    def has_window(self) -> bool:
        """Whether the window keeps any token from seeing another."""
        return self.window is not None and self.window < self.row_tokens

    def call_slots(self, capacity_factor: int) -> list[tuple[int, int]]:
        """Number of slots of each call, and tokens of a slot; without packing, the rows of the only call."""
        if not self.is_packed:
            return [(self.num_rows, self.row_tokens)]
        rows = {
            "num_rows": self.num_rows,
            "row_tokens": self.row_tokens,
            "max_segments": self.max_segments,
        }
        return [
            (call.num_slots, call.slot_tokens)
            for call in cudnn_slots.plan_calls(**rows, capacity_factor=capacity_factor)
        ]

    def max_slot_tokens(self, capacity_factor: int) -> int:
        """Total tokens of the slots of the largest call, to which cuDNN's memory is
        proportional."""
        return max(num_slots * tokens for num_slots, tokens in self.call_slots(capacity_factor))

    def num_q_elements(self, head_chunks: int) -> int:
        """Of q in one part of the heads."""
        return self.num_tokens * (self.num_heads // head_chunks) * self.head_dim


class UnsupportedReason(NamedTuple):
    """Something that cuDNN cannot do: the rest of a sentence that begins with its name, and a sentence that says what to do."""

    reason: str
    suggestion: str


def legal_head_chunks(workload: KernelWorkload) -> list[int]:
    """The numbers of equal parts that the heads can be taken in: of whole K/V heads, or of query heads that share one.

    Each part's q stays below the limit of packed calls; empty if no number does that.
    """
    heads, kv_heads = workload.num_heads, workload.num_kv_heads
    even = [
        n
        for n in range(1, heads + 1)
        if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
    ]
    return [n for n in even if not workload.is_packed or workload.num_q_elements(n) <= MAX_ELEMENTS]


class CallSplit(NamedTuple):
    """How the work is divided into calls."""

    head_chunks: int
    """One of `parts`."""
    capacity_factor: int
    """One of cudnn_slots.ROOMS."""


TARGET_WORKSPACE_BYTES = 6 * 2**30
"""Target for cuDNN's workspace: more chunks of heads make it smaller, but copy more."""


def choose_split(workload: KernelWorkload, *, head_chunks: int | None = None) -> CallSplit:
    """The fewest calls with a workspace of at most WORKSPACE_BYTES, or else the smallest workspace.

    Args: head_chunks: one of `parts`; None: as few as possible.
    """
    rooms = cudnn_slots.CAPACITY_FACTORS if workload.is_packed else cudnn_slots.CAPACITY_FACTORS[:1]
    splits = [
        CallSplit(chunks, room)
        for chunks in legal_head_chunks(workload)
        for room in rooms
        if head_chunks in (None, chunks)
    ]
    fits = [split for split in splits if workspace_bytes(workload, split) <= TARGET_WORKSPACE_BYTES]
    return fits[0] if fits else min(splits, key=lambda split: workspace_bytes(workload, split))


def lse_bytes(workload: KernelWorkload, split: CallSplit) -> int:
    """Memory of the log-sum-exps of the largest call, as cuDNN has them: float32, for every token of every slot.

    They are live in the forward pass until they are compressed, and in the backward pass once they
    are expanded, for one call and one chunk of heads at a time. A compiled program's memory
    analysis counts them.
    """
    return (
        4
        * max(workload.max_slot_tokens(split.capacity_factor), workload.num_tokens)
        * (workload.num_heads // split.head_chunks)
    )


def workspace_bytes(workload: KernelWorkload, split: CallSplit) -> int:
    """Memory of cuDNN's workspace for the largest backward call. XLA's memory analysis lacks it if
    the GPU is absent.

    float32 sums of dq and of dout * out, and where query heads share K/V heads, dk and dv of each query head: for every token
    of every slot. An estimate: the first two are exact. With has_score_workspace, the gradients of the scores replace the sums
    of dq: 2 bytes for every query and key of every slot.
    Source: NVIDIA/cudnn-frontend, CompositeSDPABackwardNode in node/scaled_dot_product_flash_attention.h.
    """
    heads = workload.num_heads // split.head_chunks
    shared = (
        2 * 2 * workload.head_dim if workload.num_kv_heads // split.head_chunks < heads > 1 else 0
    )

    def workspace_bytes(*, queries: int, keys: int, scores: int) -> int:
        sums = 2 * scores if workload.has_score_workspace else 4 * workload.head_dim * queries
        return heads * (sums + 4 * queries + shared * keys)

    slots = workload.call_slots(split.capacity_factor)
    most = max(
        workspace_bytes(queries=n * tokens, keys=n * tokens, scores=n * tokens**2)
        for n, tokens in slots
    )
    if workload.chunks_per_row > 1:
        # chunks see as many rows of keys before them as there are chunks at a time, or one after another the same row
        keys = max(workload.num_tokens, workload.num_rows // 2 * workload.num_earlier_keys)
        most = max(
            most,
            workspace_bytes(
                queries=workload.num_tokens, keys=keys, scores=keys * workload.row_tokens
            ),
        )
    return most


def needs_score_workspace(*, deterministic: bool, devices: Sequence[Device]) -> bool:
    """True if cuDNN's backward pass writes the gradients of all scores to memory: quadratic in the row length.

    A deterministic backward pass does so on every GPU except Blackwell (compute capability 10.x).
    On Hopper, cuDNN 9.25 also has one with linear memory, but it must be requested by cudnn-frontend
    (PR 398, July 2026, in 1.27), which is compiled into jaxlib. No jaxlib that jaxsp supports has it:
    XLA upgraded to 1.26 in September 2026 (openxla/xla PR 48168), and the binaries of jaxlib 0.10.1,
    0.11.2 and 0.12.0.1 for CUDA 12 never compare cuDNN's version with 9.25.
    Source: use_dp_workspace in NVIDIA/cudnn-frontend, node/scaled_dot_product_flash_attention.h.
    """
    return deterministic and _lowest_capability(devices)[0] != 10


def min_device_bytes(devices: Sequence[Device]) -> int | None:
    """What JAX may take of the memory of the smallest of those devices that are this process's; None where none says."""
    known = [(device.memory_stats() or {}).get("bytes_limit") for device in _local_devices(devices)]
    return min((size for size in known if size is not None), default=None)


def _local_devices(devices: Sequence[Device]) -> list[Any]:
    """Returns the devices that this process has; none if the program is only compiled for them."""
    return [device for device in jax.local_devices() if device in devices]


def describe_shortage(
    workload: KernelWorkload, split: CallSplit, *, device_bytes: int
) -> str | None:
    """Error message for calls that cannot fit an empty device, with a suggestion; None if they may
    fit."""

    def least(max_pieces: int) -> int:
        return _min_call_bytes(dataclasses.replace(workload, max_segments=max_pieces))

    if _call_bytes(workload, split) <= device_bytes:
        return None
    num_rows, row_tokens = workload.whole_row_shape
    gradients = (
        "deterministic gradients (run.deterministic)" if workload.has_score_workspace else "sums"
    )
    problem = (
        f"cuDNN's statistics and {gradients} of {num_rows} x {row_tokens:,} tokens "
        f"in up to {workload.max_segments} segments, heads in {split.head_chunks} chunks, take "
        f"{_call_bytes(workload, split) / 2**30:.1f} GiB, and a device has {device_bytes / 2**30:.1f}."
    )
    splits = {n: choose_split(workload, head_chunks=n) for n in legal_head_chunks(workload)}
    if fitting := [
        n for n, other in splits.items() if _call_bytes(workload, other) <= device_bytes
    ]:
        return f"attention.head_chunks = {split.head_chunks}: {problem} Use attention.head_chunks={fitting[0]}."
    if most := next(
        (
            number
            for number in range(workload.max_segments - 1, 0, -1)
            if least(number) <= device_bytes
        ),
        None,
    ):
        return f"data.max_segments_per_row = {workload.max_segments}: {problem} Use data.max_segments_per_row={most}."
    longest = row_tokens * device_bytes // least(1) // workload.row_multiple * workload.row_multiple
    return f"data.row_tokens = {row_tokens}: {problem} Use data.row_tokens={longest} with data.max_segments_per_row=1."


def _call_bytes(workload: KernelWorkload, split: CallSplit) -> int:
    """Memory of the largest call in addition to its arguments and results."""
    return lse_bytes(workload, split) + workspace_bytes(workload, split)


def _min_call_bytes(workload: KernelWorkload) -> int:
    """`_call_bytes` if the work is split into as many calls as possible."""
    return _call_bytes(
        workload, choose_split(workload, head_chunks=legal_head_chunks(workload)[-1])
    )


def unsupported_reasons(
    workload: KernelWorkload, *, devices: Sequence[Device], device_bytes: int | None = None
) -> list[UnsupportedReason]:
    """Reasons that cuDNN cannot run this work on these devices; empty if it can.

    Args: device_bytes: memory of a device; None: unknown.
    """
    other = "Use attention.kernel=auto or attention.kernel=blockwise."
    kinds = errors.format_choices(sorted({device.device_kind for device in devices}))
    least = _lowest_capability(devices)
    if least == (0, 0):
        return [UnsupportedReason(f"needs NVIDIA GPUs, and there is {kinds}", other)]
    return [
        *_check_gpu(workload, least, kinds, other),
        *_check_workload(workload, least, other),
        *_check_versions(workload, least, devices),
        *_check_deterministic(workload, least, device_bytes),
    ]


def _lowest_capability(devices: Sequence[Device]) -> tuple[int, int]:
    """The lowest compute capability of the devices; (0, 0) if one of them has none."""
    found = [
        re.fullmatch(r"(\d+)\.(\d+)", getattr(device, "compute_capability", ""))
        for device in devices
    ]
    return min((int(match[1]), int(match[2])) if match else (0, 0) for match in found)


def _check_gpu(
    workload: KernelWorkload, capability: tuple[int, int], device_kinds: str, suggestion: str
) -> Iterator[UnsupportedReason]:
    have = f"and {device_kinds} has compute capability {capability[0]}.{capability[1]}"
    if capability < (8, 0):
        yield UnsupportedReason(f"needs an NVIDIA A100 or newer, {have}", suggestion)
    elif workload.is_packed and capability < (9, 0):
        way = f"{suggestion} Rows of one document each work too: data.max_segments_per_row=1."
        yield UnsupportedReason(f"takes packed rows on Hopper and newer GPUs only, {have}", way)


def _check_workload(
    workload: KernelWorkload, capability: tuple[int, int], suggestion: str
) -> Iterator[UnsupportedReason]:
    if workload.dtype not in ("bfloat16", "float16"):
        way = "Use model.compute_dtype=bfloat16 or attention.kernel=blockwise."
        yield UnsupportedReason(
            f"computes in bfloat16, and model.compute_dtype is {workload.dtype}", way
        )
    largest = 256 if capability[0] == 9 else 128
    if workload.head_dim % 8 or workload.head_dim > largest:
        yield UnsupportedReason(
            f"takes heads of a multiple of 8 up to {largest}, and the model's are of {workload.head_dim}",
            suggestion,
        )
    if workload.row_tokens % ROW_MULTIPLE:
        multiple, (_, row_tokens) = workload.row_multiple, workload.whole_row_shape
        below = row_tokens // multiple * multiple
        near = errors.format_choices(n for n in (below, below + multiple) if n)
        way = f"Use data.row_tokens={near}, or attention.kernel=blockwise."
        of = f" in {workload.chunks_per_row} chunks" * (workload.chunks_per_row > 1)
        yield UnsupportedReason(
            f"takes rows{of} of a multiple of {multiple} tokens, and data.row_tokens is {row_tokens}",
            way,
        )
    if not legal_head_chunks(workload):
        most = (
            MAX_ELEMENTS
            // workload.head_dim
            // workload.num_rows
            * workload.chunks_per_row
            // workload.row_multiple
            * workload.row_multiple
        )
        of = f" in {workload.chunks_per_row} chunks, of which it gets 2," * (
            workload.chunks_per_row > 1
        )
        num_rows, row_tokens = workload.whole_row_shape
        what = f"counts to 2**31 in packed rows, and one head of {num_rows} x {row_tokens:,} tokens{of} is more"
        yield UnsupportedReason(
            what,
            f"Use data.row_tokens={most} or less, data.max_segments_per_row=1, or attention.kernel=blockwise.",
        )


def _check_versions(
    workload: KernelWorkload, capability: tuple[int, int], devices: Sequence[Device]
) -> Iterator[UnsupportedReason]:
    if (changed := cudnn_calls.describe_unsupported_jax()) is not None:
        yield UnsupportedReason(changed, "Install one of these, or use attention.kernel=blockwise.")
        return
    # A machine that only compiles for absent GPUs may have another cuDNN than theirs
    installed = cudnn_calls.installed_version() if _local_devices(devices) else None
    if installed is None:
        return
    name, way = (
        ".".join(map(str, installed)),
        "Install a newer nvidia-cudnn-cu12 (or -cu13), or use attention.kernel=blockwise.",
    )
    is_hopper, is_blackwell = capability[0] == 9, capability[0] == 10
    # Highest first. TE: nvte_get_fused_attn_backend in TransformerEngine's fused_attn.cpp
    floors = [
        # TE; TransformerEngine PR 2584
        (
            (9, 18, 1),
            "run.deterministic on this GPU needs",
            workload.is_deterministic and is_blackwell,
        ),
        # before, gradients were NaN: an uninitialized workspace (TransformerEngine issue 2186)
        ((9, 18, 0), "packed rows on this GPU need", workload.is_packed and is_hopper),
        # jax._src.cudnn.fused_attention_stablehlo.check_is_flash_attention
        ((9, 11, 0), "this GPU needs", capability == (10, 3)),
        # TE; cudnn-frontend refuses packed rows whose query heads share K/V heads before
        ((9, 6, 0), "packed rows need", workload.is_packed),
        # TE
        ((9, 5, 0), f"gradients of heads of {workload.head_dim} need", workload.head_dim > 128),
        # TE
        ((9, 2, 0), "sliding windows need", workload.has_window),
        # TE: rows of any length
        ((9, 0, 0), "flash attention needs", True),
    ]
    needed, reason, _ = next(floor for floor in floors if floor[2])
    if installed < needed:
        yield UnsupportedReason(
            f"{name} is installed, and {reason} {'.'.join(map(str, needed))} or later", way
        )
    elif installed in BROKEN_VERSIONS:
        yield UnsupportedReason(f"{name} is installed, whose attention has known bugs", way)
    elif installed == BROKEN_WINDOW_VERSION and workload.has_window:
        yield UnsupportedReason(f"{name} is installed, whose sliding windows have a known bug", way)


def _check_deterministic(
    workload: KernelWorkload, capability: tuple[int, int], device_bytes: int | None
) -> Iterator[UnsupportedReason]:
    if not workload.is_deterministic:
        return
    if capability[0] == 12:
        # Source: as for AVOIDED_WITH_WINDOW
        way = "Use attention.kernel=blockwise or run.deterministic=false."
        yield UnsupportedReason(
            "has no deterministic backward pass on GPUs of compute capability 12.x", way
        )
        return
    legal = legal_head_chunks(workload)
    if not workload.has_score_workspace or device_bytes is None or not legal:
        return
    size = _min_call_bytes(workload)
    if size <= device_bytes:
        return
    num_rows, row_tokens = workload.whole_row_shape
    ways = ["attention.kernel=blockwise", "run.deterministic=false"]
    if shorter := _find_shorter_row(workload, device_bytes=device_bytes):
        ways.append(f"data.row_tokens={shorter}")
    yield UnsupportedReason(
        f"needs {size / 2**30:.1f} GiB for the deterministic backward pass (run.deterministic) of "
        f"{num_rows} x {row_tokens:,} tokens, with heads in {legal[-1]} chunks, and a device has "
        f"{device_bytes / 2**30:.1f}",
        f"Use {errors.format_choices(ways)}.",
    )


def _find_shorter_row(workload: KernelWorkload, *, device_bytes: int) -> int | None:
    """Halves the row length until the largest call fits a device; None if no length does."""
    _, row_tokens = workload.whole_row_shape
    multiple = math.lcm(workload.row_multiple, workload.ulysses_degree)
    while row_tokens % (2 * multiple) == 0:
        row_tokens //= 2
        workload = dataclasses.replace(
            workload,
            row_tokens=workload.row_tokens // 2,
            num_earlier_keys=workload.num_earlier_keys // 2,
            whole_row_tokens=row_tokens,
        )
        if _min_call_bytes(workload) <= device_bytes:
            return row_tokens
    return None
