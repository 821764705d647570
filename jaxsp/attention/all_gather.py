"""All-gather: devices keep their queries; keys and values of whole rows are gathered.

The gathers take a few heads at a time.

Chunks are dealt back and forth (core/layout.py), so that those of every device together have about
equally many tokens before them; chunk_calls.py divides the attention to these into calls. While the
gathered heads are attended to, the next ones travel, so memory grows with the heads of one gather,
not with all heads.

Source: Meta's Llama 3, arXiv:2407.21783, sec. 3.3.2; `heads_k_stride` of
zhuzilin/ring-flash-attention. Differs: packed segments, chunks dealt back and forth, gradients
summed in float32.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsp.attention import chunk_calls, partial_attention
from jaxsp.attention.attention_config import AttentionConfig
from jaxsp.attention.chunk_calls import Call, ChunkTokens
from jaxsp.attention.kernels.kernel import (
    AttentionWorkload,
    ChunkKernel,
    Gradients,
    Saved,
    divisors,
)
from jaxsp.attention.kernels.segments import Segments
from jaxsp.attention.partial_attention import LocalSegments
from jaxsp.attention.strategy import TokenExchange
from jaxsp.attention.zigzag import Zigzag
from jaxsp.core import axes, errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllGather(Zigzag):
    """Each device keeps its queries and gathers keys and values of whole rows."""

    name = "all_gather"
    options = frozenset({"chunks_per_device", "kv_heads_per_gather"})
    is_automatic = False

    kv_heads_per_gather: int = 1
    """K/V heads that are gathered at a time, in layers without a sliding window."""

    @classmethod
    def from_config(
        cls, requested: AttentionConfig, workload: AttentionWorkload, *, degree: int, **options: Any
    ) -> TokenExchange:
        number = requested.kv_heads_per_gather or 1
        return super().from_config(
            requested, workload, degree=degree, kv_heads_per_gather=number, **options
        )

    def find_problem(self, workload: AttentionWorkload) -> str | None:
        kv_heads = workload.num_kv_heads
        if kv_heads % self.kv_heads_per_gather == 0:
            return None
        return (
            f"attention.kv_heads_per_gather = {self.kv_heads_per_gather}: must divide the "
            f"{kv_heads} K/V heads of a device. Use {errors.format_choices(divisors(kv_heads))}."
        )

    @property
    def description(self) -> str:
        name, of_degree, chunks = super().description.partition(f" of {self.degree}")
        return f"{name}{of_degree} by {self.kv_heads_per_gather}{chunks}"

    @property
    def config_fields(self) -> dict[str, Any]:
        return {"kv_heads_per_gather": self.kv_heads_per_gather}

    def kernel_workload(self, workload: AttentionWorkload) -> AttentionWorkload:
        """Without a window: a chunk's queries with the keys of the whole row, for the heads of one
        gather."""
        chunks = super().kernel_workload(workload)
        if workload.has_window:
            return chunks
        heads_per_kv_head = workload.num_heads // workload.num_kv_heads
        return dataclasses.replace(
            chunks,
            num_heads=heads_per_kv_head * self.kv_heads_per_gather,
            num_kv_heads=self.kv_heads_per_gather,
            num_earlier_keys=workload.row_tokens,
        )

    def chunk_sent_bytes(self, workload: AttentionWorkload) -> dict[str, int]:
        tokens = workload.num_rows * workload.tokens_per_device
        head_elements = (self.degree - 1) * tokens * 2 * workload.head_dim
        kv_heads = workload.num_kv_heads
        num_gathered = 2 * kv_heads
        if workload.remat == "full" and workload.has_other_kinds:
            num_gathered += kv_heads
        elif workload.remat == "full" and kv_heads > 2 * self.kv_heads_per_gather:
            # Forward again, except the first gather, which the backward pass has too. With two
            # gathers, XLA unrolls the loop of one step, and the backward pass has both
            num_gathered += kv_heads - self.kv_heads_per_gather
        return {
            "all-gather": num_gathered * head_elements * workload.itemsize,
            "reduce-scatter": kv_heads * head_elements * 4,  # gradients are float32
        }

    def forward(
        self, kernel: ChunkKernel, q: Array, k: Array, v: Array, segments: Segments
    ) -> tuple[Array, Array]:
        """Moves: all-gathers of k and v."""
        B, l, H, _ = q.shape
        num_gathers = k.shape[2] // self.kv_heads_per_gather
        calls, local_segments = self._find_work(segments, l)
        q_SBlhK, k_SBlgK, v_SBlgK = (_split_heads(x, num_gathers) for x in (q, k, v))

        def attend_heads(
            q: Array, kv: list[Array], gathered_kv: list[Array]
        ) -> tuple[Array, Array]:
            """Output and log-sum-exp of the heads of one gather."""
            diagonal = partial_attention.diagonal_forward(kernel, local_segments, q, *kv)
            out, lse = partial_attention.add_calls_forward(
                kernel, calls, q, gathered_kv, diagonal, in_order=False
            )
            return out.astype(q.dtype), lse

        out_SBlhK, lse_SBlh = _scan_gathers(self, attend_heads, [q_SBlhK], [k_SBlgK, v_SBlgK])
        return _join_heads(out_SBlhK), lse_SBlh.transpose(1, 0, 3, 2).reshape(B, H, l)

    def backward(self, kernel: ChunkKernel, saved: Saved, segments: Segments) -> Gradients:
        """Moves: all-gathers of k and v, and reduce-scatters of their gradients."""
        q, k, v, out, dout, lse = saved
        B, l, _, _ = q.shape
        num_gathers = k.shape[2] // self.kv_heads_per_gather
        calls, local_segments = self._find_work(segments, l)
        q_S, k_S, v_S, out_S, dout_S = (_split_heads(x, num_gathers) for x in (q, k, v, out, dout))
        lse_SBlh = lse.reshape(B, num_gathers, -1, l).transpose(1, 0, 3, 2)

        def heads_backward(
            q: Array, out: Array, lse: Array, dout: Array, kv: list[Array], gathered_kv: list[Array]
        ) -> tuple[Array, ...]:
            """dq, dk and dv of the heads of one gather."""
            results = (out, lse, dout)
            zeros = [jnp.zeros(x.shape, jnp.float32) for x in (q, *gathered_kv)]
            dq, gathered_dkv = partial_attention.add_calls_backward(
                kernel, calls, q, gathered_kv, results, (zeros[0], zeros[1:]), in_order=False
            )
            scattered = _reduce_scatter_dkv(self, gathered_dkv)
            # While the gradients travel
            own_dq, own_dkv = partial_attention.diagonal_backward(
                kernel, local_segments, q, kv, results
            )
            dk, dv = (x + y.reshape(x.shape) for x, y in zip(own_dkv, scattered, strict=True))
            return (dq + own_dq).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

        inputs = [q_S, out_S, lse_SBlh, dout_S]
        dq, dk, dv = _scan_gathers(self, heads_backward, inputs, [k_S, v_S])
        return _join_heads(dq), _join_heads(dk), _join_heads(dv)

    def _find_work(self, segments: Segments, num_tokens: int) -> tuple[list[Call], LocalSegments]:
        """Calls of the keys of all devices, and the segments of this device's chunks."""
        starts_BM, lengths_BM, _ = segments
        chunk_tokens = num_tokens // self.chunks_per_device
        calls = chunk_calls.find_gathered_calls(
            ChunkTokens(starts_BM, lengths_BM, chunk_tokens),
            self.chunk_numbers(self.index),
            num_devices=self.degree,
        )
        return calls, self.find_local_segments(starts_BM, lengths_BM, chunk_tokens)


def _scan_gathers(
    group: AllGather, compute: Callable[..., Any], inputs: list[Array], kv: list[Array]
) -> Any:
    """Results of `compute` for the heads of each gather, while the next gather travels."""

    def next_gather(gathered_kv: list[Array], arrays: tuple) -> tuple[list[Array], Any]:
        inputs, kv, next_kv = arrays
        next_gathered_kv = _all_gather_kv(group, next_kv)
        return next_gathered_kv, compute(*inputs, kv, gathered_kv)

    gathered_kv = _all_gather_kv(group, [x[0] for x in kv])
    arrays = [x[:-1] for x in inputs], [x[:-1] for x in kv], [x[1:] for x in kv]
    gathered_kv, results = jax.lax.scan(next_gather, gathered_kv, arrays)
    last_result = compute(*(x[-1] for x in inputs), [x[-1] for x in kv], gathered_kv)
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), results, last_result)


def _split_heads(x_BlXK: Array, num_gathers: int) -> Array:
    """Splits X heads among S gathers: [S, B, l, X / S, K]."""
    B, l, X, K = x_BlXK.shape
    return x_BlXK.reshape(B, l, num_gathers, X // num_gathers, K).transpose(2, 0, 1, 3, 4)


def _join_heads(x_SBlxK: Array) -> Array:
    """Undoes `_split_heads`."""
    S, B, l, x, K = x_SBlxK.shape
    return x_SBlxK.transpose(1, 2, 0, 3, 4).reshape(B, l, S * x, K)


def _all_gather_kv(group: AllGather, kv_BlgK: list[Array]) -> list[Float[Array, "B L g K"]]:
    """Keys and values of whole rows, in token order, from all devices' chunks.

    They travel in one message, as in `Ring.shift`. Dims: P devices of a group, k chunks of a
    device, C tokens of a chunk, g K/V heads of one gather.
    """
    kv_2BlgK = jnp.stack(kv_BlgK)
    B, l, g, K = kv_2BlgK.shape[1:]
    kv_2BkCgK = kv_2BlgK.reshape(2, B, group.chunks_per_device, -1, g, K)
    if group.degree > 1:
        kv_P2BkCgK = jax.lax.all_gather(
            kv_2BkCgK, axis_name=axes.SEQ, axis_index_groups=group.groups
        )
    else:
        kv_P2BkCgK = kv_2BkCgK[None]
    rows = []
    for x_PBkCgK in (kv_P2BkCgK[:, 0], kv_P2BkCgK[:, 1]):
        x_BkPCgK = _reverse_odd_rounds(x_PBkCgK.transpose(1, 2, 0, 3, 4, 5))
        rows.append(x_BkPCgK.reshape(B, group.degree * l, g, K))
    return rows


def _reduce_scatter_dkv(group: AllGather, dkv_BLgK: list[Array]) -> Float[Array, "2 B k C g K"]:
    """This device's chunks of the sums of whole rows over all devices."""
    parts = []
    for x_BLgK in dkv_BLgK:
        B, _, g, K = x_BLgK.shape
        x_BkPCgK = x_BLgK.reshape(B, group.chunks_per_device, group.degree, -1, g, K)
        parts.append(_reverse_odd_rounds(x_BkPCgK).transpose(2, 0, 1, 3, 4, 5))
    dkv_P2BkCgK = jnp.stack(parts, axis=1)
    if group.degree == 1:
        return dkv_P2BkCgK[0]
    return jax.lax.psum_scatter(dkv_P2BkCgK, axes.SEQ, axis_index_groups=group.groups)


def _reverse_odd_rounds(x_BkP: Array) -> Array:
    """Swaps the order of devices and the order of chunks, in the rounds that deal backward."""
    B, k = x_BkP.shape[:2]
    x_Bn2P = x_BkP.reshape(B, k // 2, 2, *x_BkP.shape[2:])
    reversed_BnP = x_Bn2P[:, :, 1, ::-1]
    return jnp.stack([x_Bn2P[:, :, 0], reversed_BnP], axis=2).reshape(x_BkP.shape)
