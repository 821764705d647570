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

from jaxsp.attention import ulysses
from jaxsp.attention.kernels import blockwise, cudnn, limits, pieces, reference, residuals
from jaxsp.core import config, errors

SCOPE = "attend"
"""Every operation of attention carries this word in the compiled program."""

RESIDUALS = residuals.NAMES
"""What a kernel names for its backward pass."""

KERNELS: dict[str, Callable[..., Array]] = {
    "blockwise": blockwise.attention,
    "cudnn": cudnn.attention,
    "reference": reference.attention,
}

Attend = Callable[[Array, Array, Array, Array, Array], Array]
"""See the module's docstring."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """How a run attends on its devices."""

    kernel: str
    """From KERNELS."""
    head_chunks: int
    """Parts that a device's heads are taken in, one after another."""
    why: str
    """What speaks against cuDNN, where `auto` had to take another kernel; empty otherwise."""
    uncounted_bytes: int
    """An estimate of what the kernel takes on a device beyond the compiled program's memory analysis."""
    statistic_bytes: int
    """Of that analysis, what the kernel's log-sum-exps take before they are compressed and after they are expanded."""
    window: int | None
    """How many tokens a token sees, itself among them; None: all before it in its piece."""


def choose(
    settings: config.Config,
    *,
    devices: Sequence[limits.Device],
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
    seq, asked = settings.mesh.seq, settings.attention
    if found := ulysses.problems(num_heads=num_heads, seq=seq):
        raise errors.UserError(found)
    work = limits.Work(
        num_heads=num_heads // seq,
        num_kv_heads=num_kv_heads * ulysses.kv_repeats(num_kv_heads=num_kv_heads, seq=seq) // seq,
        head_dim=head_dim,
        row_tokens=settings.data.longest_row,
        rows_at_once=settings.batch.rows_at_once,
        max_pieces=settings.data.max_documents_per_row,
        window=window,
        dtype=settings.model.compute_dtype,
    )
    kernel, why = asked.kernel, ""
    if kernel in ("auto", "cudnn"):
        obstacles = limits.obstacles(work, devices=devices)
        if kernel == "cudnn" and obstacles:
            raise errors.UserError(f"attention.kernel = cudnn: cuDNN {one.what}. {one.way_out}" for one in obstacles)
        kernel = "blockwise" if obstacles else "cudnn"
        why = f"cuDNN {obstacles[0].what}" if obstacles else ""
    chunks = asked.head_chunks
    if kernel != "cudnn":
        if chunks is not None:
            because = f", because {why}" if why else ""
            raise errors.UserError(
                f"attention.head_chunks = {chunks}: only the cudnn kernel takes heads in parts, and this is {kernel}{because}. "
                "Use attention.head_chunks=null."
            )
        return Choice(kernel=kernel, head_chunks=1, why=why, uncounted_bytes=0, statistic_bytes=0, window=window)
    legal = limits.parts(work)
    if chunks is not None and chunks not in legal:
        raise errors.UserError(
            f"attention.head_chunks = {chunks}: {work.num_heads} query and {work.num_kv_heads} K/V heads on a device, over "
            f"{work.num_tokens:,} tokens, cannot be taken in {chunks} parts. Use {errors.choices(legal)}, or null."
        )
    chunks = chunks or limits.fewest_parts(work)
    size = device_bytes or limits.smallest_memory(devices)
    if size is not None and (problem := limits.shortage(work, chunks, device_bytes=size)):
        raise errors.UserError(problem)
    return Choice(
        kernel=kernel,
        head_chunks=chunks,
        why="",
        uncounted_bytes=limits.backward_bytes(work, chunks),
        statistic_bytes=limits.statistic_bytes(work, chunks),
        window=window,
    )


def cost(*, seq: int, **of_attention: Any) -> int:
    """Bytes that one device sends to others for a layer's attention in a turn, forward and backward.

    Args: those of `ulysses.cost`; `remat` is `none`, `attention` or `full`.
    """
    return ulysses.cost(seq=seq, **of_attention)


def describe(choice: Choice, *, num_heads: int, num_kv_heads: int, seq: int) -> str:
    """What `make_attend` makes, for people."""
    kernel = f"{'cuDNN' if choice.kernel == 'cudnn' else choice.kernel} kernel"
    if choice.head_chunks > 1:
        kernel += f", heads in {choice.head_chunks} parts"
    if choice.statistic_bytes >= 64 * 2**20:
        kernel += f", whose log-sum-exps take {choice.statistic_bytes / 2**20:,.0f} MiB"
    if choice.window is not None:
        kernel += f", a token sees the last {choice.window:,} of its document, itself among them"
    why = f" ({choice.kernel} because {choice.why})" if choice.why else ""
    if seq == 1:
        return f"{kernel}, all heads on each device{why}"
    own = num_kv_heads * ulysses.kv_repeats(num_kv_heads=num_kv_heads, seq=seq) // seq
    return (
        f"Ulysses, {kernel}; a device gets {num_heads // seq} of {num_heads} query heads and {own} of {num_kv_heads} "
        f"K/V heads{why}"
    )


def make_attend(*, seq: int, kernel: str | Callable[..., Array], window: int | None, head_chunks: int = 1) -> Attend:
    """Attention for groups of `seq` devices, with a kernel from KERNELS by name, or one of the caller's own, used as it is.

    Args:
        window: of the model, as in Choice.
    """
    named = functools.partial(KERNELS[kernel], window=window) if isinstance(kernel, str) else kernel
    if kernel == "cudnn":
        named = functools.partial(named, head_chunks=head_chunks)
    isolated = functools.partial(_isolated, kernel=named)
    inner = functools.partial(ulysses.attend, kernel=isolated, seq=seq) if seq > 1 else isolated

    def attend(
        q_BlHK: Float[Array, "B l H K"],
        k_BlGK: Float[Array, "B l G K"],
        v_BlGK: Float[Array, "B l G K"],
        starts_BM: Int32[Array, "B M"],
        lengths_BM: Int32[Array, "B M"],
    ) -> Float[Array, "B l H K"]:
        with jax.named_scope(SCOPE):
            return inner(q_BlHK, k_BlGK, v_BlGK, starts_BM, lengths_BM)

    return attend


def collectives(program: str) -> list[str]:
    """The collective operations of attention in a compiled program's text, a line each."""
    words = ("all-to-all", "all-gather", "collective-permute", "reduce-scatter")
    lines = (line.strip() for line in program.splitlines())
    return [line for line in lines if f"/{SCOPE}/" in line and any(f" {word}" in line for word in words)]


def _isolated(
    q_BLhK: Array, k_BLgK: Array, v_BLgK: Array, starts_BM: Array, lengths_BM: Array, *, kernel: Callable[..., Array]
) -> Array:
    """The kernel with padding kept out by value, forward and backward: whatever it computes there, even NaN, is dropped."""
    inside_BL11 = pieces.in_a_piece(starts_BM, lengths_BM, q_BLhK.shape[1])[..., None, None]
    q_BLhK, k_BLgK, v_BLgK = (jnp.where(inside_BL11, x, jnp.zeros((), x.dtype)) for x in (q_BLhK, k_BLgK, v_BLgK))
    out_BLhK = kernel(q_BLhK, k_BLgK, v_BLgK, starts_BM, lengths_BM)
    return jnp.where(inside_BL11, out_BLhK, jnp.zeros((), out_BLhK.dtype))
