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
from jaxsp.attention.kernels import (
    blockwise,
    checkpoint_names,
    cudnn,
    cudnn_calls,
    cudnn_limits,
    cudnn_slots,
    reference,
    segments,
)
from jaxsp.attention.kernels.cudnn_limits import Device, KernelWorkload
from jaxsp.attention.strategies import LayerWorkload, Strategy
from jaxsp.attention.zigzag import ChunkKernel, ZigzagGroup
from jaxsp.config import schema
from jaxsp.config.schema import Config
from jaxsp.core import errors
from jaxsp.core.errors import UserError

SCOPE = "attend"
"""Every operation of attention carries this word in the compiled program."""

CHECKPOINT_NAMES = checkpoint_names.CHECKPOINT_NAMES
"""What a kernel names for its backward pass."""

KERNELS: dict[str, Callable[..., Array]] = {
    "blockwise": blockwise.attention,
    "cudnn": cudnn.attention,
    "reference": reference.attention,
}


@dataclasses.dataclass(frozen=True)
class Attend:
    """See the module's docstring."""

    attend_fn: Callable[..., Array]
    strategy: Strategy
    head_chunks: int = 1
    """Chunks of the heads that the kernel computes one after another."""
    make_tables_fn: Callable[..., Any] | None = None
    """Computes the kernel's tables of the segments of whole rows, from starts, lengths and
    `row_tokens`."""

    @property
    def layout_degree(self) -> int:
        """The degree of the layout that rows have to have: core/layout.py."""
        return self.strategy.outer_degree

    def make_segment_tables(
        self,
        starts_BM: Int32[Array, "B M"],
        lengths_BM: Int32[Array, "B M"],
        *,
        tokens_per_device: int,
    ) -> Any:
        """Segment tables that all layers of a microbatch share, to be passed to every call; None if
        the kernel needs none.

        Args: share_tokens: tokens of a row that one device holds.
        """
        if self.make_tables_fn is None:
            return None
        with jax.named_scope(SCOPE):
            return self.make_tables_fn(
                starts_BM, lengths_BM, row_tokens=tokens_per_device * self.strategy.seq
            )

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
            return self.attend_fn(q_BlHK, k_BlGK, v_BlGK, starts_BM, lengths_BM, **shared)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """How a run attends on its devices."""

    strategy: Strategy
    alternatives: tuple[tuple[str, int], ...]
    """Other kinds that `auto` could have taken, in words, with the bytes that each device sends for a layer in a turn where
    what attention made is kept for the backward pass: what `auto` goes by, whatever memory.remat is or becomes;"""
    sent_bytes: int
    """and those of this one."""
    kernel: str
    """From KERNELS."""
    head_chunks: int
    """Parts that a device's heads are taken in, one after another."""
    capacity_factor: int
    """Capacity of the slots of a packed cuDNN call, as a multiple of the rows' tokens."""
    fallback_reason: str
    """What speaks against cuDNN, where `auto` had to take another kernel; empty otherwise."""
    workspace_bytes: int
    """An estimate of what the kernel takes on a device beyond the compiled program's memory analysis."""
    lse_bytes: int
    """Of that analysis, what the kernel's log-sum-exps take before they are compressed and after they are expanded."""
    window: int | None
    """How many tokens a token sees, itself among them; None: all before it in its piece."""


def choose(
    config: Config,
    *,
    devices: Sequence[Device],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    device_bytes: int | None = None,
) -> AttentionChoice:
    """The kernel that a config asks for, or that `auto` means on these devices, which may be absent ones compiled for.

    Args:
        window: the model's, see Choice.
        device_bytes: memory of a device; None: what the devices say, if they are there.
    Raises: UserError with every problem: heads that cannot be shared, a kernel that cannot do what is asked, or one whose calls
        alone are larger than a device.
    """
    asked, heads = (
        config.attention,
        {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim},
    )
    kind, of_layer = (
        choose_strategy(config, window=window, **heads),
        _layer_workload(config, **heads),
    )
    work = _kernel_workload(config, kind, of_layer, window=window, devices=devices)
    size = device_bytes or cudnn_limits.min_device_bytes(devices)
    possible = strategies.list_strategies(
        seq=kind.seq,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        outer_strategy=asked.outer_strategy,
        kv_heads_per_gather=asked.kv_heads_per_gather,
    )
    sent = {one: sum(strategies.sent_bytes(one, of_layer).values()) for one in (kind, *possible)}
    of = functools.partial(
        AttentionChoice,
        strategy=kind,
        sent_bytes=sent[kind],
        alternatives=tuple((one.description, size) for one, size in sent.items() if one != kind),
        window=window,
    )
    kernel, why = asked.kernel, ""
    if kernel in ("auto", "cudnn"):
        obstacles = cudnn_limits.unsupported_reasons(work, devices=devices, device_bytes=size)
        if kernel == "cudnn" and obstacles:
            raise UserError(
                f"attention.kernel = cudnn: cuDNN {one.reason}. {one.suggestion}"
                for one in obstacles
            )
        kernel = "blockwise" if obstacles else "cudnn"
        why = f"cuDNN {obstacles[0].reason}" if obstacles else ""
    if kernel == "reference" and kind.outer_degree > 1:
        raise UserError(
            f"attention.kernel = reference: computes whole rows alone, and {kind.description} needs parts of them. Use "
            "attention.kernel=auto or attention.kernel=blockwise."
        )
    chunks = asked.head_chunks
    if kernel != "cudnn":
        if chunks is not None:
            because = f", because {why}" if why else ""
            raise UserError(
                f"attention.head_chunks = {chunks}: only the cudnn kernel takes heads in parts, and this is {kernel}{because}. "
                "Use attention.head_chunks=null."
            )
        return of(
            kernel=kernel,
            head_chunks=1,
            capacity_factor=cudnn_slots.CAPACITY_FACTOR,
            fallback_reason=why,
            workspace_bytes=0,
            lse_bytes=0,
        )
    legal = cudnn_limits.legal_head_chunks(work)
    if chunks is not None and chunks not in legal:
        raise UserError(
            f"attention.head_chunks = {chunks}: {work.num_heads} query and {work.num_kv_heads} K/V heads on a device, over "
            f"{work.num_tokens:,} tokens, cannot be taken in {chunks} parts. Use {errors.format_choices(legal)}, or null."
        )
    split = cudnn_limits.choose_split(work, head_chunks=chunks)
    if size is not None and (
        problem := cudnn_limits.describe_shortage(work, split, device_bytes=size)
    ):
        raise UserError(problem)
    return of(
        kernel=kernel,
        head_chunks=split.head_chunks,
        capacity_factor=split.capacity_factor,
        fallback_reason="",
        workspace_bytes=cudnn_limits.workspace_bytes(work, split),
        lse_bytes=cudnn_limits.lse_bytes(work, split),
    )


def choose_strategy(config: Config, *, window: int | None, **heads: int) -> Strategy:
    """How the devices of a group share attention. Args and Raises: as for `choose`."""
    narrow = window if window is not None and window < config.data.max_row_tokens else None
    return strategies.choose(
        config.attention, _layer_workload(config, **heads), seq=config.mesh.seq, window=narrow
    )


def sent_bytes(
    config: Config, strategy: Strategy, *, remat: str | None = None, **heads: int
) -> dict[str, int]:
    """Bytes that one device sends to others for a layer's attention in a turn, by kind of collective.

    Args:
        remat: what has become of the config's.
        heads: num_heads, num_kv_heads and head_dim.
    """
    kept = remat or config.memory.remat
    kept = (
        kept if kept in ulysses.PASSES_BY_REMAT else "save_attention"
    )  # auto, and what keeps more of a layer than its attention
    return strategies.sent_bytes(
        strategy, dataclasses.replace(_layer_workload(config, **heads), remat=kept)
    )


def _layer_workload(
    config: Config, *, num_heads: int, num_kv_heads: int, head_dim: int
) -> LayerWorkload:
    return LayerWorkload(
        num_rows=config.batch.rows_per_microbatch,
        tokens_per_device=config.data.max_row_tokens // config.mesh.seq,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        itemsize=jnp.dtype(config.model.compute_dtype).itemsize,
    )


def _kernel_workload(
    config: Config,
    strategy: Strategy,
    workload: LayerWorkload,
    *,
    window: int | None,
    devices: Sequence[Device],
) -> KernelWorkload:
    """What the kernel gets at a time: whole rows; or chunks of them, and all the keys before a chunk."""
    heads, kv_heads = strategies.local_heads(
        strategy, num_heads=workload.num_heads, num_kv_heads=workload.num_kv_heads
    )
    num_rows, row_tokens, num_chunks, keys = workload.num_rows, config.data.max_row_tokens, 1, 0
    if strategy.outer_degree > 1:
        window = None  # none that is shorter than a row
        num_chunks = 2 * strategy.outer_degree
        num_rows, row_tokens = 2 * num_rows, row_tokens // num_chunks
        keys = row_tokens
        if strategy.outer_strategy == "all_gather":
            heads, kv_heads, keys = (
                heads // kv_heads * strategy.kv_heads_per_gather,
                strategy.kv_heads_per_gather,
                config.data.max_row_tokens,
            )
    return KernelWorkload(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=workload.head_dim,
        row_tokens=row_tokens,
        num_rows=num_rows,
        max_segments=config.data.max_segments_per_row,
        window=window,
        dtype=config.model.compute_dtype,
        chunks_per_row=num_chunks,
        num_earlier_keys=keys,
        ulysses_degree=strategy.ulysses_degree,
        whole_row_tokens=config.data.max_row_tokens,
        is_deterministic=config.run.deterministic,
        has_score_workspace=cudnn_limits.needs_score_workspace(
            deterministic=config.run.deterministic, devices=devices
        ),
    )


def describe(choice: AttentionChoice, *, num_heads: int, num_kv_heads: int) -> str:
    """What `make_attend` makes, for people."""
    kernel = (
        f"{cudnn_calls.describe_version() if choice.kernel == 'cudnn' else choice.kernel} kernel"
    )
    if choice.head_chunks > 1:
        kernel += f", heads in {choice.head_chunks} parts"
    if choice.lse_bytes >= 64 * 2**20:
        kernel += f", whose log-sum-exps take {choice.lse_bytes / 2**20:,.0f} MiB"
    if choice.window is not None:
        kernel += f", a token sees the last {choice.window:,} of its document, itself among them"
    why, kind = (
        f" ({choice.kernel} because {choice.fallback_reason})" if choice.fallback_reason else "",
        choice.strategy,
    )
    if kind.seq == 1:
        return f"{kernel}, all heads on each device{why}"
    heads, kv_heads = strategies.local_heads(kind, num_heads=num_heads, num_kv_heads=num_kv_heads)
    gets = f"a device gets {heads} of {num_heads} query heads and {kv_heads} of {num_kv_heads} K/V heads"
    if kind.outer_degree > 1:
        gets += f", and of each row 2 of {2 * kind.outer_degree} chunks"
    sends = (
        f"it sends {_format_bytes(choice.sent_bytes)} for a layer in a turn where attention is kept"
    )
    if choice.alternatives:
        sends += f" (others: {', '.join(f'{words}: {_format_bytes(size)}' for words, size in choice.alternatives)})"
    return f"{kind.description}, {kernel}; {gets}; {sends}{why}"


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def make_attend(
    *,
    kernel: str | Callable[..., Array],
    window: int | None,
    seq: int = 1,
    strategy: Strategy | None = None,
    head_chunks: int = 1,
    capacity_factor: int = cudnn_slots.CAPACITY_FACTOR,
) -> Attend:
    """Attention for groups of devices, with a kernel from KERNELS by name, or one of the caller's own, used as it is.

    Args:
        window: of the model, as in Choice.
        head_chunks, slot_room: of the cuDNN kernel, as in Choice.
        seq, kind: so many devices of a group, by Ulysses; or what the kind says, which asks for rows in its layout.
    Raises: UserError for a kernel that cannot compute parts of rows where the kind asks for them.
    """
    strategy = strategy or Strategy(seq=seq, ulysses_degree=seq)
    make_tables = None
    if strategy.outer_degree == 1:
        inner = (
            functools.partial(KERNELS[kernel], window=window) if isinstance(kernel, str) else kernel
        )
        inside = segments.segment_mask
        if kernel == "cudnn":
            inner = functools.partial(
                inner, head_chunks=head_chunks, capacity_factor=capacity_factor
            )
            make_tables = functools.partial(cudnn.make_tables, capacity_factor=capacity_factor)
    else:
        among = ZigzagGroup(degree=strategy.outer_degree, ulysses_degree=strategy.ulysses_degree)
        parts = _chunk_kernel(kernel, head_chunks, capacity_factor, strategy)
        inside = functools.partial(zigzag.segment_mask, group=among)
        if strategy.outer_strategy == "ring":
            inner = functools.partial(ring.attend, kernel=parts, group=among)
        else:
            inner = functools.partial(
                all_gather.attend,
                kernel=parts,
                group=among,
                kv_heads_per_gather=strategy.kv_heads_per_gather,
            )
    if kernel != "cudnn":  # it keeps padding out itself, with fewer passes over its inputs
        inner = functools.partial(_mask_padding, kernel=inner, segment_mask_fn=inside)
    if strategy.ulysses_degree > 1:
        neighbours = [
            list(range(first, first + strategy.ulysses_degree))
            for first in range(0, strategy.seq, strategy.ulysses_degree)
        ]
        groups = neighbours if strategy.outer_degree > 1 else None
        inner = functools.partial(
            ulysses.attend, kernel=inner, seq=strategy.ulysses_degree, axis_index_groups=groups
        )
    return Attend(inner, strategy, head_chunks, make_tables)


def make_two_chunk_attend(
    kernel: str, *, head_chunks: int = 1, outer_strategy: str = "ring"
) -> Attend:
    """Attention over whole rows on one device as ring and gather compute it: two chunks, and what the second sees of the first.

    To try a kernel's parts with, without other devices. Args: outer: ring or gather.
    """
    kind, alone = Strategy(seq=1, ulysses_degree=1), ZigzagGroup(degree=1)
    parts = _chunk_kernel(kernel, head_chunks, cudnn_slots.CAPACITY_FACTOR, kind)
    if outer_strategy == "ring":
        inner = functools.partial(ring.attend, kernel=parts, group=alone)
    else:
        inner = functools.partial(
            all_gather.attend, kernel=parts, group=alone, kv_heads_per_gather=1
        )
    if kernel != "cudnn":
        inner = functools.partial(
            _mask_padding,
            kernel=inner,
            segment_mask_fn=functools.partial(zigzag.segment_mask, group=alone),
        )
    return Attend(inner, kind, head_chunks)


def make_chosen_attend(choice: AttentionChoice) -> Attend:
    """What was chosen."""
    return make_attend(
        kernel=choice.kernel,
        window=choice.window,
        strategy=choice.strategy,
        head_chunks=choice.head_chunks,
        capacity_factor=choice.capacity_factor,
    )


def _chunk_kernel(
    kernel: str | Callable[..., Array], head_chunks: int, capacity_factor: int, strategy: Strategy
) -> ChunkKernel:
    """A kernel's functions for parts of rows."""
    modules: dict[str, Any] = {"blockwise": blockwise, "cudnn": cudnn}
    if not isinstance(kernel, str) or kernel not in modules:
        raise UserError(
            f"attention.kernel = {kernel}: computes whole rows alone, and {strategy.name} attention needs parts of them. Use "
            f"{errors.format_choices(modules)}, or attention.strategy=ulysses."
        )
    functions = {
        field.name: getattr(modules[kernel], field.name)
        for field in dataclasses.fields(ChunkKernel)
    }
    if kernel == "cudnn":
        functions = {
            name: functools.partial(function, head_chunks=head_chunks)
            for name, function in functions.items()
        }
        for name in ("forward", "backward"):
            functions[name] = functools.partial(functions[name], capacity_factor=capacity_factor)
    return ChunkKernel(**functions)


def find_collectives(program: str) -> list[str]:
    """The collective operations of attention in a compiled program's text, a line each."""
    words = ("all-to-all", "all-gather", "collective-permute", "reduce-scatter")
    lines = (line.strip() for line in program.splitlines())
    return [
        line for line in lines if f"/{SCOPE}/" in line and any(f" {word}" in line for word in words)
    ]


def _mask_padding(
    q_BLhK: Array,
    k_BLgK: Array,
    v_BLgK: Array,
    starts_BM: Array,
    lengths_BM: Array,
    *,
    kernel: Callable[..., Array],
    segment_mask_fn: Callable[..., Array],
) -> Array:
    """The kernel with padding kept out by value, forward and backward: whatever it computes there, even NaN, is dropped."""
    inside_BL11 = segment_mask_fn(starts_BM, lengths_BM, q_BLhK.shape[1])[..., None, None]
    q_BLhK, k_BLgK, v_BLgK = (
        jnp.where(inside_BL11, x, jnp.zeros((), x.dtype)) for x in (q_BLhK, k_BLgK, v_BLgK)
    )
    out_BLhK = kernel(q_BLhK, k_BLgK, v_BLgK, starts_BM, lengths_BM)
    return jnp.where(inside_BL11, out_BLhK, jnp.zeros((), out_BLhK.dtype))
