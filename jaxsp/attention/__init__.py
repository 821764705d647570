"""The door of attention: which kind and which kernel a run uses. Nothing above it knows.

`attend` is called inside shard_map with this device's share of the rows,

    q_BlHK, k_BlGK, v_BlGK, starts_BM, lengths_BM -> out_BlHK

and is causal inside each piece, with nothing between pieces. Tokens of no piece get output 0 and gradient 0.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxsp.attention import all_gather, ring, strategies, ulysses, zigzag
from jaxsp.attention.kernels import blockwise, cudnn, cudnn_calls, cudnn_limits, names, packed, reference, segments
from jaxsp.config import schema
from jaxsp.core import errors

SCOPE = "attend"
"""Every operation of attention carries this word in the compiled program."""

RESIDUALS = names.NAMES
"""What a kernel names for its backward pass."""

KERNELS: dict[str, Callable[..., Array]] = {
    "blockwise": blockwise.attention,
    "cudnn": cudnn.attention,
    "reference": reference.attention,
}


@dataclasses.dataclass(frozen=True)
class Attend:
    """See the module's docstring."""

    function: Callable[..., Array]
    kind: strategies.Kind
    head_chunks: int = 1
    """Chunks of the heads that the kernel computes one after another."""
    make_tables: Callable[..., Any] | None = None
    """Computes the kernel's tables of the segments of whole rows, from starts, lengths and
    `row_tokens`."""

    @property
    def layout(self) -> int:
        """The degree of the layout that rows have to have: core/layout.py."""
        return self.kind.degree

    def tables(self, starts_BM: Int32[Array, "B M"], lengths_BM: Int32[Array, "B M"], *, share_tokens: int) -> Any:
        """Segment tables that all layers of a microbatch share, to be passed to every call; None if
        the kernel needs none.

        Args: share_tokens: tokens of a row that one device holds.
        """
        if self.make_tables is None:
            return None
        with jax.named_scope(SCOPE):
            return self.make_tables(starts_BM, lengths_BM, row_tokens=share_tokens * self.kind.seq)

    def __call__(
        self,
        q_BlHK: Float[Array, "B l H K"],
        k_BlGK: Float[Array, "B l G K"],
        v_BlGK: Float[Array, "B l G K"],
        starts_BM: Int32[Array, "B M"],
        lengths_BM: Int32[Array, "B M"],
        tables: Any = None,
    ) -> Float[Array, "B l H K"]:
        with jax.named_scope(SCOPE):
            # Make the segment arrays depend on q. Otherwise JAX hoists everything computed from them alone out of the layer
            # scan, and masks as wide as q, of a ring for all its steps, stay live (8 GiB at 1M tokens on 32 devices)
            of_q = starts_BM, lengths_BM, tables, jax.lax.stop_gradient(q_BlHK)
            starts_BM, lengths_BM, tables, _ = jax.lax.optimization_barrier(of_q)
            shared = {} if tables is None else {"tables": tables}
            return self.function(q_BlHK, k_BlGK, v_BlGK, starts_BM, lengths_BM, **shared)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """How a run attends on its devices."""

    kind: strategies.Kind
    others: tuple[tuple[str, int], ...]
    """Other kinds that `auto` could have taken, in words, with the bytes that each device sends for a layer in a turn where
    what attention made is kept for the backward pass: what `auto` goes by, whatever memory.remat is or becomes;"""
    bytes: int
    """and those of this one."""
    kernel: str
    """From KERNELS."""
    head_chunks: int
    """Parts that a device's heads are taken in, one after another."""
    slot_room: int
    """Capacity of the slots of a packed cuDNN call, as a multiple of the rows' tokens."""
    why: str
    """What speaks against cuDNN, where `auto` had to take another kernel; empty otherwise."""
    uncounted_bytes: int
    """An estimate of what the kernel takes on a device beyond the compiled program's memory analysis."""
    statistic_bytes: int
    """Of that analysis, what the kernel's log-sum-exps take before they are compressed and after they are expanded."""
    window: int | None
    """How many tokens a token sees, itself among them; None: all before it in its piece."""


def choose(
    settings: schema.Config,
    *,
    devices: Sequence[cudnn_limits.Device],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    device_bytes: int | None = None,
) -> Choice:
    """The kernel that a config asks for, or that `auto` means on these devices, which may be absent ones compiled for.

    Args:
        window: the model's, see Choice.
        device_bytes: memory of a device; None: what the devices say, if they are there.
    Raises: UserError with every problem: heads that cannot be shared, a kernel that cannot do what is asked, or one whose calls
        alone are larger than a device.
    """
    asked, heads = settings.attention, {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    kind, of_layer = choose_kind(settings, window=window, **heads), _layer(settings, **heads)
    work = _work(settings, kind, of_layer, window=window, devices=devices)
    size = device_bytes or cudnn_limits.smallest_memory(devices)
    possible = strategies.possible(
        seq=kind.seq, num_heads=num_heads, num_kv_heads=num_kv_heads, outer=asked.outer, kv_heads=asked.kv_heads_per_gather
    )
    sent = {one: sum(strategies.cost(one, of_layer).values()) for one in (kind, *possible)}
    of = functools.partial(
        Choice,
        kind=kind,
        bytes=sent[kind],
        others=tuple((one.words, size) for one, size in sent.items() if one != kind),
        window=window,
    )
    kernel, why = asked.kernel, ""
    if kernel in ("auto", "cudnn"):
        obstacles = cudnn_limits.obstacles(work, devices=devices, device_bytes=size)
        if kernel == "cudnn" and obstacles:
            raise errors.UserError(f"attention.kernel = cudnn: cuDNN {one.what}. {one.way_out}" for one in obstacles)
        kernel = "blockwise" if obstacles else "cudnn"
        why = f"cuDNN {obstacles[0].what}" if obstacles else ""
    if kernel == "reference" and kind.degree > 1:
        raise errors.UserError(
            f"attention.kernel = reference: computes whole rows alone, and {kind.words} needs parts of them. Use "
            "attention.kernel=auto or attention.kernel=blockwise."
        )
    chunks = asked.head_chunks
    if kernel != "cudnn":
        if chunks is not None:
            because = f", because {why}" if why else ""
            raise errors.UserError(
                f"attention.head_chunks = {chunks}: only the cudnn kernel takes heads in parts, and this is {kernel}{because}. "
                "Use attention.head_chunks=null."
            )
        return of(kernel=kernel, head_chunks=1, slot_room=packed.ROOM, why=why, uncounted_bytes=0, statistic_bytes=0)
    legal = cudnn_limits.parts(work)
    if chunks is not None and chunks not in legal:
        raise errors.UserError(
            f"attention.head_chunks = {chunks}: {work.num_heads} query and {work.num_kv_heads} K/V heads on a device, over "
            f"{work.num_tokens:,} tokens, cannot be taken in {chunks} parts. Use {errors.choices(legal)}, or null."
        )
    split = cudnn_limits.choose_split(work, head_chunks=chunks)
    if size is not None and (problem := cudnn_limits.shortage(work, split, device_bytes=size)):
        raise errors.UserError(problem)
    return of(
        kernel=kernel,
        head_chunks=split.head_chunks,
        slot_room=split.slot_room,
        why="",
        uncounted_bytes=cudnn_limits.backward_bytes(work, split),
        statistic_bytes=cudnn_limits.statistic_bytes(work, split),
    )


def choose_kind(settings: schema.Config, *, window: int | None, **heads: int) -> strategies.Kind:
    """How the devices of a group share attention. Args and Raises: as for `choose`."""
    narrow = window if window is not None and window < settings.data.longest_row else None
    return strategies.choose(settings.attention, _layer(settings, **heads), seq=settings.mesh.seq, window=narrow)


def cost(settings: schema.Config, kind: strategies.Kind, *, remat: str | None = None, **heads: int) -> dict[str, int]:
    """Bytes that one device sends to others for a layer's attention in a turn, by kind of collective.

    Args:
        remat: what has become of the config's.
        heads: num_heads, num_kv_heads and head_dim.
    """
    kept = remat or settings.memory.remat
    kept = kept if kept in ulysses.TRIPS else "attention"  # auto, and what keeps more of a layer than its attention
    return strategies.cost(kind, dataclasses.replace(_layer(settings, **heads), remat=kept))


def _layer(settings: schema.Config, *, num_heads: int, num_kv_heads: int, head_dim: int) -> strategies.Layer:
    return strategies.Layer(
        rows=settings.batch.rows_at_once,
        share_tokens=settings.data.longest_row // settings.mesh.seq,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        itemsize=jnp.dtype(settings.model.compute_dtype).itemsize,
    )


def _work(
    settings: schema.Config,
    kind: strategies.Kind,
    layer: strategies.Layer,
    *,
    window: int | None,
    devices: Sequence[cudnn_limits.Device],
) -> cudnn_limits.Work:
    """What the kernel gets at a time: whole rows; or chunks of them, and all the keys before a chunk."""
    heads, kv_heads = strategies.own_heads(kind, num_heads=layer.num_heads, num_kv_heads=layer.num_kv_heads)
    num_rows, row_tokens, num_chunks, keys = layer.rows, settings.data.longest_row, 1, 0
    if kind.degree > 1:
        window = None  # none that is shorter than a row
        num_chunks = 2 * kind.degree
        num_rows, row_tokens = 2 * num_rows, row_tokens // num_chunks
        keys = row_tokens
        if kind.outer == "gather":
            heads, kv_heads, keys = heads // kv_heads * kind.kv_heads, kind.kv_heads, settings.data.longest_row
    return cudnn_limits.Work(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=layer.head_dim,
        row_tokens=row_tokens,
        rows_at_once=num_rows,
        max_pieces=settings.data.max_documents_per_row,
        window=window,
        dtype=settings.model.compute_dtype,
        num_chunks=num_chunks,
        keys_before=keys,
        num_neighbours=kind.inner,
        whole_row_tokens=settings.data.longest_row,
        is_deterministic=settings.run.deterministic,
        has_score_workspace=cudnn_limits.needs_score_workspace(deterministic=settings.run.deterministic, devices=devices),
    )


def describe(choice: Choice, *, num_heads: int, num_kv_heads: int) -> str:
    """What `make_attend` makes, for people."""
    kernel = f"{cudnn_calls.describe_version() if choice.kernel == 'cudnn' else choice.kernel} kernel"
    if choice.head_chunks > 1:
        kernel += f", heads in {choice.head_chunks} parts"
    if choice.statistic_bytes >= 64 * 2**20:
        kernel += f", whose log-sum-exps take {choice.statistic_bytes / 2**20:,.0f} MiB"
    if choice.window is not None:
        kernel += f", a token sees the last {choice.window:,} of its document, itself among them"
    why, kind = f" ({choice.kernel} because {choice.why})" if choice.why else "", choice.kind
    if kind.seq == 1:
        return f"{kernel}, all heads on each device{why}"
    heads, kv_heads = strategies.own_heads(kind, num_heads=num_heads, num_kv_heads=num_kv_heads)
    gets = f"a device gets {heads} of {num_heads} query heads and {kv_heads} of {num_kv_heads} K/V heads"
    if kind.degree > 1:
        gets += f", and of each row 2 of {2 * kind.degree} chunks"
    sends = f"it sends {_size(choice.bytes)} for a layer in a turn where attention is kept"
    if choice.others:
        sends += f" (others: {', '.join(f'{words}: {_size(size)}' for words, size in choice.others)})"
    return f"{kind.words}, {kernel}; {gets}; {sends}{why}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def make_attend(
    *,
    kernel: str | Callable[..., Array],
    window: int | None,
    seq: int = 1,
    kind: strategies.Kind | None = None,
    head_chunks: int = 1,
    slot_room: int = packed.ROOM,
) -> Attend:
    """Attention for groups of devices, with a kernel from KERNELS by name, or one of the caller's own, used as it is.

    Args:
        window: of the model, as in Choice.
        head_chunks, slot_room: of the cuDNN kernel, as in Choice.
        seq, kind: so many devices of a group, by Ulysses; or what the kind says, which asks for rows in its layout.
    Raises: UserError for a kernel that cannot compute parts of rows where the kind asks for them.
    """
    kind = kind or strategies.Kind(seq=seq, inner=seq)
    make_tables = None
    if kind.degree == 1:
        inner = functools.partial(KERNELS[kernel], window=window) if isinstance(kernel, str) else kernel
        inside = segments.in_a_piece
        if kernel == "cudnn":
            inner = functools.partial(inner, head_chunks=head_chunks, slot_room=slot_room)
            make_tables = functools.partial(cudnn.make_tables, slot_room=slot_room)
    else:
        among = zigzag.Ring(degree=kind.degree, inner=kind.inner)
        parts = _parts(kernel, head_chunks, slot_room, kind)
        inside = functools.partial(zigzag.in_a_piece, ring=among)
        if kind.outer == "ring":
            inner = functools.partial(ring.attend, kernel=parts, ring=among)
        else:
            inner = functools.partial(all_gather.attend, kernel=parts, ring=among, kv_heads=kind.kv_heads)
    if kernel != "cudnn":  # it keeps padding out itself, with fewer passes over its inputs
        inner = functools.partial(_isolated, kernel=inner, inside=inside)
    if kind.inner > 1:
        neighbours = [list(range(first, first + kind.inner)) for first in range(0, kind.seq, kind.inner)]
        groups = neighbours if kind.degree > 1 else None
        inner = functools.partial(ulysses.attend, kernel=inner, seq=kind.inner, groups=groups)
    return Attend(inner, kind, head_chunks, make_tables)


def in_halves(kernel: str, *, head_chunks: int = 1, outer: str = "ring") -> Attend:
    """Attention over whole rows on one device as ring and gather compute it: two chunks, and what the second sees of the first.

    To try a kernel's parts with, without other devices. Args: outer: ring or gather.
    """
    kind, alone = strategies.Kind(seq=1, inner=1), zigzag.Ring(degree=1)
    parts = _parts(kernel, head_chunks, packed.ROOM, kind)
    if outer == "ring":
        inner = functools.partial(ring.attend, kernel=parts, ring=alone)
    else:
        inner = functools.partial(all_gather.attend, kernel=parts, ring=alone, kv_heads=1)
    if kernel != "cudnn":
        inner = functools.partial(_isolated, kernel=inner, inside=functools.partial(zigzag.in_a_piece, ring=alone))
    return Attend(inner, kind, head_chunks)


def attend_of(choice: Choice) -> Attend:
    """What was chosen."""
    return make_attend(
        kernel=choice.kernel,
        window=choice.window,
        kind=choice.kind,
        head_chunks=choice.head_chunks,
        slot_room=choice.slot_room,
    )


def _parts(kernel: str | Callable[..., Array], head_chunks: int, slot_room: int, kind: strategies.Kind) -> zigzag.Kernel:
    """A kernel's functions for parts of rows."""
    modules: dict[str, Any] = {"blockwise": blockwise, "cudnn": cudnn}
    if not isinstance(kernel, str) or kernel not in modules:
        raise errors.UserError(
            f"attention.kernel = {kernel}: computes whole rows alone, and {kind.name} attention needs parts of them. Use "
            f"{errors.choices(modules)}, or attention.kind=ulysses."
        )
    functions = {field.name: getattr(modules[kernel], field.name) for field in dataclasses.fields(zigzag.Kernel)}
    if kernel == "cudnn":
        functions = {name: functools.partial(function, head_chunks=head_chunks) for name, function in functions.items()}
        for name in ("forward", "backward"):
            functions[name] = functools.partial(functions[name], slot_room=slot_room)
    return zigzag.Kernel(**functions)


def collectives(program: str) -> list[str]:
    """The collective operations of attention in a compiled program's text, a line each."""
    words = ("all-to-all", "all-gather", "collective-permute", "reduce-scatter")
    lines = (line.strip() for line in program.splitlines())
    return [line for line in lines if f"/{SCOPE}/" in line and any(f" {word}" in line for word in words)]


def _isolated(
    q_BLhK: Array,
    k_BLgK: Array,
    v_BLgK: Array,
    starts_BM: Array,
    lengths_BM: Array,
    *,
    kernel: Callable[..., Array],
    inside: Callable[..., Array],
) -> Array:
    """The kernel with padding kept out by value, forward and backward: whatever it computes there, even NaN, is dropped."""
    inside_BL11 = inside(starts_BM, lengths_BM, q_BLhK.shape[1])[..., None, None]
    q_BLhK, k_BLgK, v_BLgK = (jnp.where(inside_BL11, x, jnp.zeros((), x.dtype)) for x in (q_BLhK, k_BLgK, v_BLgK))
    out_BLhK = kernel(q_BLhK, k_BLgK, v_BLgK, starts_BM, lengths_BM)
    return jnp.where(inside_BL11, out_BLhK, jnp.zeros((), out_BLhK.dtype))
