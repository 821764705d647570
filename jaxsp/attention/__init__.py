"""The door of attention: which kind and which kernel a run uses. Nothing above it knows.

`attend` is called inside shard_map with this device's share of the rows,

    q_BlHK, k_BlGK, v_BlGK, starts_BM, lengths_BM -> out_BlHK

and is causal inside each piece, with nothing between pieces. Tokens of no piece get output 0 and gradient 0.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxsp.attention import ulysses
from jaxsp.attention.kernels import blockwise, pieces, reference

SCOPE = "attend"
"""Every operation of attention carries this word in the compiled program."""

RESIDUALS = (blockwise.OUT, blockwise.LSE)
"""What a kernel names for its backward pass."""

KERNELS: dict[str, Callable[..., Array]] = {"blockwise": blockwise.attention, "reference": reference.attention}

Attend = Callable[[Array, Array, Array, Array, Array], Array]
"""See the module's docstring."""


def problems(*, num_heads: int, seq: int) -> list[str]:
    """What is wrong with this many query heads on groups of `seq` devices, a line each."""
    return ulysses.problems(num_heads=num_heads, seq=seq)


def describe(kernel: str, *, num_heads: int, num_kv_heads: int, seq: int) -> str:
    """What `make_attend` makes, for people."""
    if seq == 1:
        return f"{_name(kernel)} kernel, all heads on each device"
    own = num_kv_heads * ulysses.kv_repeats(num_kv_heads=num_kv_heads, seq=seq) // seq
    return (
        f"Ulysses, {_name(kernel)} kernel; a device gets {num_heads // seq} of {num_heads} query heads "
        f"and {own} of {num_kv_heads} K/V heads"
    )


def make_attend(*, seq: int, kernel: str | Callable[..., Array]) -> Attend:
    """Attention for groups of `seq` devices, with a kernel from KERNELS by name, or one of the caller's own."""
    named = KERNELS[_name(kernel)] if isinstance(kernel, str) else kernel
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


def _name(kernel: str) -> str:
    return "blockwise" if kernel == "auto" else kernel


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
