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
    divisors,
)
from jaxsp.attention.strategy import LayerWorkload, Strategy, mask_padding
from jaxsp.config.schema import AttentionConfig
from jaxsp.core import axes, errors
from jaxsp.core.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ulysses(Strategy):
    """Each device gets all tokens for a part of the heads. With seq = 1, nothing is exchanged."""

    name = "ulysses"
    supports_windows = True

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
        suggestion = f"Use mesh.seq={errors.format_choices(divisors(heads))}"
        if not workload.has_window:
            suggestion += ", or attention.strategy=auto"
        raise UserError(
            f"mesh.seq = {seq}: must divide the {heads} query heads, because attention.strategy is "
            f"ulysses. {suggestion}."
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

    def exchanged(self, workload: LayerWorkload) -> LayerWorkload:
        """The workload after the first all-to-all: more tokens of fewer heads."""
        heads, kv_heads = self.local_heads(workload.num_heads, workload.num_kv_heads)
        return dataclasses.replace(
            workload,
            tokens_per_device=workload.tokens_per_device * self.seq,
            num_heads=heads,
            num_kv_heads=kv_heads,
        )

    def kernel_workload(self, workload: LayerWorkload) -> KernelWorkload:
        whole_rows = self.exchanged(workload).to_kernel_workload()
        return dataclasses.replace(whole_rows, ulysses_degree=self.seq)

    def sent_bytes(self, workload: LayerWorkload) -> dict[str, int]:
        if self.seq == 1:
            return {}
        kv_heads = workload.num_kv_heads
        kv_heads *= kv_repeats(num_kv_heads=kv_heads, seq=self.seq)
        tokens = workload.num_rows * workload.tokens_per_device
        elements = tokens * 2 * (workload.num_heads + kv_heads) * workload.head_dim
        held = elements * workload.itemsize
        # Saving the kernel's output does not avoid the third pass: q, k and v are needed on this
        # side of the all-to-all, and the output on the other
        num_passes = 3 if workload.recomputes_projections else 2
        return {"all-to-all": num_passes * (held - held // self.seq)}

    def backward_bytes(self, workload: LayerWorkload, settings: KernelSettings) -> int:
        exchanged = self.exchanged(workload)
        q, kv = exchanged.qkv_bytes
        inputs = 3 * q + kv  # with the output and its gradient
        if settings.head_chunks == 1:
            return inputs + 2 * q + kv
        chunk = (3 * q + 2 * kv) // settings.head_chunks
        is_kv_shared = settings.head_chunks > exchanged.num_kv_heads
        return inputs + chunk + (2 * kv if is_kv_shared else 0)

    def build(self, kernel: Kernel, settings: KernelSettings, *, window: int | None) -> RowKernel:
        rows = kernel.make_row_kernel(settings, window=window)
        return self.exchange(mask_padding(kernel, rows, segments.segment_mask))

    def exchange(
        self, attend_inner: RowKernel, *, axis_index_groups: list[list[int]] | None = None
    ) -> RowKernel:
        """`attend_inner`, between the two all-to-alls.

        Args: axis_index_groups: devices along `seq` that exchange; None: all.
        """
        if self.seq == 1:
            return attend_inner
        return functools.partial(
            attend, kernel=attend_inner, seq=self.seq, axis_index_groups=axis_index_groups
        )


def kv_repeats(*, num_kv_heads: int, seq: int) -> int:
    """Number of copies of each K/V head, so that each of `seq` devices gets whole ones for its
    query heads."""
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
    **tables: Any,
) -> Float[Array, "B l H K"]:
    """Attention over whole rows when each of `seq` devices holds a shard of them.

    Args:
        kernel: computes attention over whole rows.
        tables: keyword arguments of the kernel.
    Shapes: inside shard_map over `seq`; shards are contiguous and in the devices' order. K/V heads
        are repeated up to the least common multiple of G and seq, so that each device gets whole
        ones, those of its own query heads.
    Moves: 2 all-to-alls forward (q, k and v travel in one), the same 2 transposed backward, and the
        first 2 again if the layer is recomputed: see `Ulysses.sent_bytes`.
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
    # For each destination its heads of q, of k and of v, side by side
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
    out_BLhK = kernel(q_BLhK, k_BLgK, v_BLgK, starts_BM, lengths_BM, **tables)
    return jax.lax.all_to_all(
        out_BLhK,
        axes.SEQ,
        split_axis=1,
        concat_axis=2,
        axis_index_groups=axis_index_groups,
        tiled=True,
    )
