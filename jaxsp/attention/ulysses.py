"""Ulysses: an all-to-all exchanges shards of the row for shards of the heads, and another one
exchanges them back after attention."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.kernel import (
    Kernel,
    KernelSettings,
    KernelWorkload,
    RowKernel,
    ScoreConfig,
    divisors,
)
from jaxsp.attention.strategy import LayerWorkload, Strategy, mask_padding
from jaxsp.config.schema import AttentionConfig
from jaxsp.core import axes, errors
from jaxsp.core.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ulysses(Strategy):
    """Each device attends over whole rows for some of the heads. With seq = 1, nothing is sent."""

    name = "ulysses"

    seq: int

    @classmethod
    def candidates(
        cls, requested: AttentionConfig, workload: LayerWorkload, *, seq: int
    ) -> Sequence[Strategy]:
        return [] if workload.num_heads % seq else [cls(seq=seq)]

    @classmethod
    def raise_if_impossible(
        cls, requested: AttentionConfig, workload: LayerWorkload, *, seq: int
    ) -> None:
        heads = workload.num_heads
        if heads % seq == 0:
            return
        raise UserError(
            f"mesh.seq = {seq}: must divide the {heads} query heads, because attention.strategy is "
            f"ulysses. Use mesh.seq={errors.format_choices(divisors(heads))}, or "
            "attention.strategy=auto."
        )

    @property
    def description(self) -> str:
        return "" if self.seq == 1 else f"Ulysses of {self.seq}"

    @property
    def all_to_all_size(self) -> int:
        return self.seq

    def local_heads(self, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
        repeated = num_kv_heads * kv_repeats(num_kv_heads=num_kv_heads, seq=self.seq)
        return num_heads // self.seq, repeated // self.seq

    def exchange_workload(self, workload: LayerWorkload) -> LayerWorkload:
        """The workload after the first all-to-all: more tokens of fewer heads."""
        heads, kv_heads = self.local_heads(workload.num_heads, workload.num_kv_heads)
        return dataclasses.replace(
            workload,
            tokens_per_device=workload.tokens_per_device * self.seq,
            num_heads=heads,
            num_kv_heads=kv_heads,
        )

    def kernel_workload(self, workload: LayerWorkload) -> KernelWorkload:
        whole_rows = self.exchange_workload(workload).to_kernel_workload()
        return dataclasses.replace(whole_rows, ulysses_degree=self.seq)

    def sent_bytes(self, workload: LayerWorkload) -> dict[str, int]:
        if self.seq == 1:
            return {}
        kv_heads = workload.num_kv_heads
        kv_heads *= kv_repeats(num_kv_heads=kv_heads, seq=self.seq)
        tokens = workload.num_rows * workload.tokens_per_device
        elements = tokens * 2 * (workload.num_heads + kv_heads) * workload.head_dim
        local_bytes = elements * workload.itemsize
        # The third pass recomputes the layer. Saving the kernel's output does not avoid it: the
        # kernel's backward pass needs q, k and v sharded by heads, and the output projection needs
        # the output sharded by tokens
        num_passes = 3 if workload.recomputes_projections else 2
        return {"all-to-all": num_passes * (local_bytes - local_bytes // self.seq)}

    def backward_bytes(self, workload: LayerWorkload, settings: KernelSettings) -> int:
        exchanged = self.exchange_workload(workload)
        q, kv = exchanged.qkv_bytes
        inputs = 3 * q + kv  # q, the output and its gradient; k and v
        if settings.head_chunks == 1:
            return inputs + 2 * q + kv
        chunk = (3 * q + 2 * kv) // settings.head_chunks
        is_kv_shared = settings.head_chunks > exchanged.num_kv_heads
        return inputs + chunk + (2 * kv if is_kv_shared else 0)

    def build(
        self, kernel: Kernel, settings: KernelSettings, *, kinds: Sequence[ScoreConfig]
    ) -> RowKernel:
        rows = kernel.make_row_kernel(settings, kinds=kinds)
        return self.wrap_kernel(mask_padding(kernel, rows, segments.segment_mask))

    def wrap_kernel(
        self, attend_inner: RowKernel, *, axis_index_groups: list[list[int]] | None = None
    ) -> RowKernel:
        """Returns a kernel for shards of rows: all-to-all, `attend_inner`, all-to-all.

        Args: axis_index_groups: groups of devices along `seq` that exchange; None: one group.
        """
        if self.seq == 1:
            return attend_inner
        return functools.partial(
            attend, kernel=attend_inner, seq=self.seq, axis_index_groups=axis_index_groups
        )


def kv_repeats(*, num_kv_heads: int, seq: int) -> int:
    """Number of copies of each K/V head, so that the copies divide evenly among `seq` devices."""
    return math.lcm(num_kv_heads, seq) // num_kv_heads


def attend(
    q_BlHK: Float[Array, "B l H K"],
    k_BlGK: Float[Array, "B l G K"],
    v_BlGK: Float[Array, "B l G K"],
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    kernel: RowKernel,
    seq: int,
    axis_index_groups: list[list[int]] | None = None,
    sinks_H: Float[Array, "H"] | None = None,
    **options: Any,
) -> Float[Array, "B l H K"]:
    """Attention over rows of which each of `seq` devices holds a shard.

    Args:
        kernel: computes attention over whole rows.
        sinks_H: sinks of all heads. Each device uses those of its own heads; its gradient is 0 for
            the others.
        options: other arguments of the kernel: see `RowKernel`.
    Shapes: inside shard_map over `seq`; shards are contiguous and in the devices' order. K/V heads
        are repeated until their number is the least common multiple of G and seq. So each device
        gets the K/V heads of its own query heads.
    Moves: 2 all-to-alls forward (q, k and v share the first), their 2 transposes backward, and the
        forward ones again if the layer is recomputed: see `Ulysses.sent_bytes`.
    Source: Jacobs et al. 2023, arXiv:2309.14509, sec. 3. Differs: K/V heads are repeated if seq
        does not divide them.
    """
    B, l, H, K = q_BlHK.shape  # l is this device's part of L
    G = k_BlGK.shape[2]
    assert H % seq == 0, (H, seq)
    repeats = kv_repeats(num_kv_heads=G, seq=seq)
    k_BlGK = jnp.repeat(k_BlGK, repeats, axis=2)
    v_BlGK = jnp.repeat(v_BlGK, repeats, axis=2)
    h = H // seq
    g = G * repeats // seq
    # Group the heads by destination device: its heads of q, then of k, then of v
    parts = [x.reshape(B, l, seq, -1, K) for x in (q_BlHK, k_BlGK, v_BlGK)]
    mixed_BlXK = jnp.concatenate(parts, axis=3).reshape(B, l, seq * (h + 2 * g), K)
    mixed_BLxK = jax.lax.all_to_all(
        mixed_BlXK,
        axes.SEQ,
        split_axis=2,
        concat_axis=1,
        axis_index_groups=axis_index_groups,
        tiled=True,
    )
    q_BLhK, k_BLgK, v_BLgK = jnp.split(mixed_BLxK, [h, h + g], axis=2)
    if sinks_H is not None:
        options["sinks_H"] = _take_own_heads(sinks_H, seq=seq)
    out_BLhK = kernel(q_BLhK, k_BLgK, v_BLgK, starts_BM, lengths_BM, **options)
    return jax.lax.all_to_all(
        out_BLhK,
        axes.SEQ,
        split_axis=1,
        concat_axis=2,
        axis_index_groups=axis_index_groups,
        tiled=True,
    )


def _take_own_heads(x_H: Float[Array, "H"], *, seq: int) -> Float[Array, "h"]:
    """This device's part of an array with a value for each head.

    The devices of a group are neighbors along `seq`, and the all-to-all gives them the heads in
    their order.
    """
    h = len(x_H) // seq
    first = jax.lax.axis_index(axes.SEQ) % seq * h
    return jax.lax.dynamic_slice_in_dim(x_H, first, h)
