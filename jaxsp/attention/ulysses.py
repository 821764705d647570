"""Ulysses: an all-to-all exchanges shards of the row for shards of the heads, and another one
exchanges them back after attention.

Moves: 2 all-to-alls forward (q, k and v share the first), their 2 transposes backward, and the
forward ones again if the layer is recomputed: see `Ulysses.sent_bytes`.
Source: Jacobs et al. 2023, arXiv:2309.14509, sec. 3. Differs: K/V heads are repeated if the number
of devices does not divide them.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsp.attention.kernels.kernel import AttentionWorkload
from jaxsp.core import axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ulysses:
    """Sets of neighbors that exchange heads. Each set holds a shard of the row.

    The methods that take arrays are called inside shard_map.
    """

    name: ClassVar[str] = "ulysses"
    """Value of attention.strategy."""

    degree: int
    """Number of neighbors in a set; with 1, nothing is exchanged."""
    num_sets: int = 1

    @property
    def description(self) -> str:
        """Name in sentences; empty if nothing is exchanged."""
        return "" if self.degree == 1 else f"Ulysses of {self.degree}"

    @property
    def groups(self) -> list[list[int]]:
        """All sets, as positions along the mesh's `seq`."""
        firsts = range(0, self.degree * self.num_sets, self.degree)
        return [list(range(first, first + self.degree)) for first in firsts]

    def local_heads(self, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
        """Returns the query heads and K/V heads that a device attends with."""
        repeated = num_kv_heads * self._kv_repeats(num_kv_heads)
        return num_heads // self.degree, repeated // self.degree

    def _kv_repeats(self, num_kv_heads: int) -> int:
        """Number of copies of each K/V head, so that the copies divide evenly among devices."""
        return math.lcm(num_kv_heads, self.degree) // num_kv_heads

    def exchange_workload(self, workload: AttentionWorkload) -> AttentionWorkload:
        """The workload after the first all-to-all: more tokens of fewer heads."""
        heads, kv_heads = self.local_heads(workload.num_heads, workload.num_kv_heads)
        return dataclasses.replace(
            workload,
            seq=workload.seq // self.degree,
            ulysses_degree=self.degree,
            num_heads=heads,
            num_kv_heads=kv_heads,
        )

    def sent_bytes(self, workload: AttentionWorkload) -> dict[str, int]:
        """Returns the bytes that one device sends to others per layer and microbatch, forward and
        backward, by collective operation."""
        if self.degree == 1:
            return {}
        kv_heads = workload.num_kv_heads * self._kv_repeats(workload.num_kv_heads)
        tokens = workload.num_rows * workload.tokens_per_device
        elements = tokens * 2 * (workload.num_heads + kv_heads) * workload.head_dim
        local_bytes = elements * workload.itemsize
        # The third pass recomputes the layer. Saving the kernel's output does not avoid it: the
        # kernel's backward pass needs q, k and v sharded by heads, and the output projection needs
        # the output sharded by tokens
        num_passes = 2 if workload.remat == "none" else 3
        return {"all-to-all": num_passes * (local_bytes - local_bytes // self.degree)}

    def to_heads(
        self,
        q_BlHK: Float[Array, "B l H K"],
        k_BlGK: Float[Array, "B l G K"],
        v_BlGK: Float[Array, "B l G K"],
    ) -> tuple[Float[Array, "B L h K"], Float[Array, "B L g K"], Float[Array, "B L g K"]]:
        """Exchanges the set's tokens for a part of its heads, in one all-to-all.

        K/V heads are repeated until their number is the least common multiple of G and the degree.
        So each device gets the K/V heads of its own query heads.
        """
        if self.degree == 1:
            return q_BlHK, k_BlGK, v_BlGK
        B, l, H, K = q_BlHK.shape  # l is this device's part of L
        assert H % self.degree == 0, (H, self.degree)
        repeats = self._kv_repeats(k_BlGK.shape[2])
        k_BlGK = jnp.repeat(k_BlGK, repeats, axis=2)
        v_BlGK = jnp.repeat(v_BlGK, repeats, axis=2)
        h, g = (x.shape[2] // self.degree for x in (q_BlHK, k_BlGK))
        # Group the heads by destination device: its heads of q, then of k, then of v
        parts = [x.reshape(B, l, self.degree, -1, K) for x in (q_BlHK, k_BlGK, v_BlGK)]
        mixed_BlXK = jnp.concatenate(parts, axis=3).reshape(B, l, self.degree * (h + 2 * g), K)
        mixed_BLxK = self._all_to_all(mixed_BlXK, split_axis=2, concat_axis=1)
        q_BLhK, k_BLgK, v_BLgK = jnp.split(mixed_BLxK, [h, h + g], axis=2)
        return q_BLhK, k_BLgK, v_BLgK

    def to_tokens(self, out_BLhK: Float[Array, "B L h K"]) -> Float[Array, "B l H K"]:
        """Exchanges a part of the heads for this device's tokens, in one all-to-all."""
        if self.degree == 1:
            return out_BLhK
        return self._all_to_all(out_BLhK, split_axis=1, concat_axis=2)

    def own_heads(self, x_H: Float[Array, "H"]) -> Float[Array, "h"]:
        """This device's part of an array with a value for each head; its gradient is 0 for the
        others. The all-to-all gives neighbors the heads in their order."""
        if self.degree == 1:
            return x_H
        h = len(x_H) // self.degree
        first = jax.lax.axis_index(axes.SEQ) % self.degree * h
        return jax.lax.dynamic_slice_in_dim(x_H, first, h)

    def _all_to_all(self, x: Array, *, split_axis: int, concat_axis: int) -> Array:
        return jax.lax.all_to_all(
            x,
            axes.SEQ,
            split_axis=split_axis,
            concat_axis=concat_axis,
            axis_index_groups=self.groups if self.num_sets > 1 else None,
            tiled=True,
        )
