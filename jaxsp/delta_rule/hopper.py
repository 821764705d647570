"""The gated delta rule with the kernels of jax-linear-attention for Hopper GPUs.

The passes are those of `delta_rule`, and `stitch` joins sections. A section is a whole span, up
to the kernels' maximum, and one row of the kernels' batch. A row that is one section has no map
pass.

Decays are differences of prefix sums over a chunk, in float32. In bfloat16, that loses nothing: the
outputs are as near to the recurrence as those of plain XLA.

Source: KarLex AI, jax-linear-attention 0.1.0 (Apache-2.0), after FlashQLA.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32
from jla.ops.mosaic_gpu import _common as jla
from jla.ops.mosaic_gpu import gated_delta_rule_bwd as state_passes
from jla.ops.mosaic_gpu import gated_delta_rule_kernels as chunk_passes
from jla.ops.mosaic_gpu.scalar_gate_fused import fused_fwd_wy

from jaxsp.delta_rule import delta_rule
from jaxsp.delta_rule.delta_rule import AffineMap
from jaxsp.delta_rule.spans import RowSpans


def compute(
    q: Float[Array, "B l G K"],
    k: Float[Array, "B l G K"],
    v: Float[Array, "B l H V"],
    g: Float32[Array, "B l H"],
    beta: Float32[Array, "B l H"],
    is_first: Bool[Array, "B l"],
    *,
    spans: RowSpans,
    max_chunks: int | None = None,
) -> Float[Array, "B l H V"]:
    """Outputs of this device's tokens: see `delta_rule.compute`.

    Args: max_chunks: maximum number of chunks of a section; None: the kernels' maximum.
    """
    sections = _Sections.divide(spans, max_chunks or jla.MAX_GRID_YZ)
    normalize = lambda x: delta_rule.normalize(x).astype(v.dtype)
    q, k, v, g, beta, is_first = map(
        sections.split, (normalize(q), normalize(k), v, g, beta, is_first)
    )
    by_chunk = jnp.swapaxes(g, 1, 2).reshape(*g.shape[::2], -1, jla.CHUNK)
    decay = (jnp.cumsum(by_chunk, -1) * jla.LOG2E).reshape(*g.shape[::2], -1)
    run = jax.custom_vjp(lambda *inputs: sections.run_forward(*inputs)[0])
    run.defvjp(sections.run_forward, sections.run_backward)
    return sections.join(run(q, k, v, decay, jnp.swapaxes(beta, 1, 2), _find_runs(is_first)))


def _find_runs(is_first: Bool[Array, "P t"]) -> jla.Segments:
    """For each token: the number of its segment within the chunk, whether it sees the state that
    enters the chunk, and whether it is in the segment that leaves it."""
    number = jnp.cumsum(is_first.astype(jnp.int32), -1).reshape(len(is_first), -1, jla.CHUNK)
    entering = jnp.pad(number[:, :-1, -1:], [(0, 0), (1, 0), (0, 0)])  # nothing before is segment 0
    flatten = lambda x: x.astype(jnp.float32).reshape(is_first.shape)
    return jla.Segments(
        run=flatten(number - number[..., :1]),
        cin=flatten(number == entering),
        tail=flatten(number == number[..., -1:]),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sections:
    """Division of a device's tokens into P sections, and the passes over them.

    Dims: P sections, of all rows; t tokens of a section, with padding; n chunks of a section. The
    kernels' states are transposed, [V, K].
    """

    spans: RowSpans
    per_span: int
    tokens: int
    """Tokens of a section, with padding."""

    @classmethod
    def divide(cls, spans: RowSpans, max_chunks: int) -> "_Sections":
        chunks = math.ceil(spans.span_tokens / jla.CHUNK)
        per_span = math.ceil(chunks / max_chunks)
        return cls(spans=spans, per_span=per_span, tokens=math.ceil(chunks / per_span) * jla.CHUNK)

    def split(self, x: Array) -> Array:
        """[B, l, ...] -> [P, t, ...]. Padding is 0, which changes no state."""
        spans = self.spans
        x = x.reshape(-1, spans.span_tokens, *x.shape[2:])
        padding = self.per_span * self.tokens - spans.span_tokens
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(-1, self.tokens, *x.shape[2:])

    def join(self, x: Array) -> Array:
        """The inverse of `split`."""
        spans = self.spans
        x = x.reshape(-1, self.per_span * self.tokens, *x.shape[2:])[:, : spans.span_tokens]
        return x.reshape(-1, spans.tokens_per_device, *x.shape[2:])

    @property
    def _is_whole_row(self) -> bool:
        return self.per_span == 1 and self.spans.span_tokens == self.spans.row_tokens

    def _stitch(
        self, m: Float32[Array, "P H K K"], u: Float32[Array, "P H K V"], **options: Any
    ) -> Float32[Array, "P H V K"]:
        """States that enter the sections."""
        by_row = AffineMap(
            *(x.reshape(-1, self.spans.count * self.per_span, *x.shape[1:]) for x in (m, u))
        )
        states = jax.vmap(lambda maps: delta_rule.stitch(maps, self.spans, **options))(by_row)
        return _transpose(states.reshape(u.shape))

    def run_forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        decay: Float32[Array, "P H t"],
        beta: Float32[Array, "P H t"],
        runs: jla.Segments,
    ) -> tuple[Array, tuple[Any, ...]]:
        """Outputs, and what the backward pass needs. Args: decay: log2 of the decay since the
        chunk's start."""
        K = k.shape[-1]
        inverse = chunk_passes.kkt_fwd(k, beta, seg=runs)
        m = states = None
        if not self._is_whole_row:
            _, maps = state_passes.state_fwd_wy(
                k,
                v,
                inverse,
                decay,
                beta,
                None,
                store_states=False,
                out_final=True,
                aug=True,
                seg=runs,
            )
            m = _transpose(maps[:, :, :K])
            states = self._stitch(m, _transpose(maps[:, :, K:]))
        out, _ = fused_fwd_wy(
            q,
            k,
            v,
            inverse,
            decay,
            beta,
            states,
            scale=K**-0.5,
            out_final=False,
            out_dtype=v.dtype,
            seg=runs,
        )
        return out, (q, k, v, decay, beta, runs, inverse, m, states)

    def run_backward(self, residuals: tuple[Any, ...], dout: Array) -> tuple[Array | None, ...]:
        q, k, v, decay, beta, runs, inverse, m, states = residuals
        scale = k.shape[-1] ** -0.5
        pull = functools.partial(
            state_passes.state_bwd_wy, q, k, dout, inverse, decay, beta, scale=scale, seg=runs
        )
        dstates = None
        if not self._is_whole_row:
            _, _, du = pull(None, want_dh0=True, store_grads=False)
            dstates = self._stitch(_transpose(m), _transpose(du), is_reversed=True)
        chunk_states, _ = state_passes.state_fwd_wy(k, v, inverse, decay, beta, states, seg=runs)
        chunk_dstates, dv, _ = pull(dstates, want_dh0=False)
        dq, dk, dbeta, ddecay = state_passes.chunk_grads(
            q, k, v, dout, inverse, decay, beta, chunk_states, chunk_dstates, scale=scale, seg=runs
        )

        def add_value_heads(x: Array) -> Array:
            by_key = x.astype(jnp.float32).reshape(*q.shape[:3], -1, q.shape[3])
            return by_key.sum(3).astype(q.dtype)

        # ddecay: for natural logarithms
        return add_value_heads(dq), add_value_heads(dk), dv, ddecay / jla.LOG2E, dbeta, None


def _transpose(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)
