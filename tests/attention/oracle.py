"""Attention that materializes the whole score matrix: the slow and obvious oracle of tests; and
inputs for comparisons with it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxsp.attention.kernels import segments
from jaxsp.attention.kernels.kernel import (
    AttentionFunctions,
    Gradients,
    Kernel,
    KernelSettings,
    Saved,
    ScoreConfig,
)
from jaxsp.attention.kernels.segments import Segments

_PLAIN = ScoreConfig()


def attention(
    q_BLhK: Float[Array, "B L h K"],
    k_BLgK: Float[Array, "B L g K"],
    v_BLgK: Float[Array, "B L g K"],
    starts_BM: Int32[Array, "B M"],
    lengths_BM: Int32[Array, "B M"],
    *,
    score: ScoreConfig = _PLAIN,
    sinks_H: Float[Array, "h"] | None = None,
) -> Float[Array, "B L h K"]:
    """Causal softmax attention inside each segment, in float32; the output is undefined at padding.

    Units: memory and time grow with L * L.
    Args: sinks_H: a score of each head whose value is 0.
    """
    scores_BhLL, mask_BLL = _find_scores(q_BLhK, k_BLgK, starts_BM, lengths_BM, score)
    scores_BhLL = jnp.where(mask_BLL[:, None], scores_BhLL, -jnp.inf)
    if sinks_H is not None:
        sinks_BhL1 = jnp.broadcast_to(sinks_H[None, :, None, None], (*scores_BhLL.shape[:3], 1))
        scores_BhLL = jnp.concatenate([scores_BhLL, sinks_BhL1], axis=-1)
    weights_BhLL = jax.nn.softmax(scores_BhLL, axis=-1)[..., : q_BLhK.shape[1]]
    v_BLhK = _repeat(v_BLgK, q_BLhK)
    out = jnp.einsum("Bhqk,BkhK->BqhK", weights_BhLL, v_BLhK, precision="highest")
    return out.astype(q_BLhK.dtype)


def make_attend(score: ScoreConfig = _PLAIN) -> Callable[..., Array]:
    """The oracle with output and gradients of 0 at padding."""

    def attend(
        q: Array, k: Array, v: Array, starts: Array, lengths: Array, **options: Array
    ) -> Array:
        inside_BL11 = segments.segment_mask(starts, lengths, q.shape[1])[..., None, None]
        qkv = [jnp.where(inside_BL11, x, 0) for x in (q, k, v)]
        out = attention(*qkv, starts, lengths, score=score, **options)
        return jnp.where(inside_BL11, out, 0)

    return attend


def draw(B: int, L: int, h: int, g: int, K: int) -> list[np.ndarray]:
    """q, k, v and a cotangent of the output, made by numpy: JAX would compile each step."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((B, L, heads, K), np.float32) for heads in (h, g, g, h)]


def make_slots(rows: Sequence[Sequence[tuple[int, int]]], num_slots: int) -> list[np.ndarray]:
    """Starts and lengths of rows, given those of each segment."""
    starts, lengths = np.zeros((2, len(rows), num_slots), np.int32)
    for row, places in enumerate(rows):
        for slot, (start, length) in enumerate(places):
            starts[row, slot] = start
            lengths[row, slot] = length
    return [starts, lengths]


def differentiate(attend: Callable[..., Array]) -> Callable[..., dict[str, np.ndarray]]:
    """Compiled `(q, k, v, dout, starts, lengths, **options)` -> output, dq, dk, dv, and dsinks if
    there are sinks."""

    @jax.jit
    def compute(q, k, v, dout, starts, lengths, options):  # type: ignore[no-untyped-def]
        sinks = {"sinks_H": options.pop("sinks_H")} if "sinks_H" in options else {}
        run = lambda q, k, v, sinks: attend(q, k, v, starts, lengths, **sinks, **options)
        out, pull = jax.vjp(run, q, k, v, sinks)
        dq, dk, dv, dsinks = pull(dout)
        gradients = {"out": out, "dq": dq, "dk": dk, "dv": dv}
        return gradients | ({"dsinks": dsinks["sinks_H"]} if dsinks else {})

    return lambda *inputs, **options: jax.tree.map(np.asarray, compute(*inputs, options))


@dataclasses.dataclass(frozen=True)
class FunctionKernel(Kernel):
    """A differentiable function for whole rows as a kernel."""

    name = "function"

    function: Callable[..., Array]
    """`(q, k, v, starts, lengths) -> out`."""

    def make_row_functions(
        self, settings: KernelSettings, score: ScoreConfig
    ) -> AttentionFunctions:
        def forward(q: Array, k: Array, v: Array, segments: Segments) -> tuple[Array, Array]:
            B, L, h, _ = q.shape
            return self.function(q, k, v, *segments[:2]), jnp.full((B, h, L), jnp.nan)

        def backward(saved: Saved, segments: Segments) -> Gradients:
            function = lambda *qkv: self.function(*qkv, *segments[:2])
            return jax.vjp(function, *saved[:3])[1](saved.dout)

        return AttentionFunctions(forward, backward)


def forward(
    q: Array, k: Array, v: Array, rows: Segments, *, score: ScoreConfig
) -> tuple[Float[Array, "B L h K"], Float32[Array, "B h L"]]:
    """Output and log-sum-exp, undefined at padding."""
    starts, lengths, _ = rows
    scores, mask = _find_scores(q, k, starts, lengths, score)
    lse = jax.nn.logsumexp(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    return attention(q, k, v, starts, lengths, score=score), lse


def backward(saved: Saved, rows: Segments, *, score: ScoreConfig) -> Gradients:
    """dq, dk and dv, by the definition of the softmax, from the weights exp(score - lse)."""
    q, k, v, out, dout, lse = saved
    starts, lengths, _ = rows

    def find_scores(q: Array, k: Array) -> Array:
        return _find_scores(q, k, starts, lengths, score)[0]

    scores, pull_scores = jax.vjp(find_scores, q, k)
    mask = _find_scores(q, k, starts, lengths, score)[1][:, None]
    weights = jnp.where(mask, jnp.exp(scores - lse[..., None]), 0)
    v_of_head, pull_v = jax.vjp(lambda v: _repeat(v, q), v)
    dout, out = (x.astype(jnp.float32) for x in (dout, out))
    dweights = jnp.einsum("BqhK,BkhK->Bhqk", dout, v_of_head, precision="highest")
    delta = jnp.einsum("BqhK,BqhK->Bhq", dout, out, precision="highest")
    dq, dk = pull_scores(jnp.where(mask, weights * (dweights - delta[..., None]), 0))
    (dv,) = pull_v(jnp.einsum("Bhqk,BqhK->BkhK", weights, dout, precision="highest"))
    return dq, dk, dv


@dataclasses.dataclass(frozen=True)
class OracleKernel(Kernel):
    """The oracle as a kernel."""

    name = "oracle"

    def make_row_functions(
        self, settings: KernelSettings, score: ScoreConfig
    ) -> AttentionFunctions:
        return AttentionFunctions(
            functools.partial(forward, score=score), functools.partial(backward, score=score)
        )


def _find_scores(
    q_BLhK: Array, k_BLgK: Array, starts_BM: Array, lengths_BM: Array, score: ScoreConfig
) -> tuple[Float32[Array, "B h L L"], Bool[Array, "B L L"]]:
    """Scores of all pairs of tokens, and which of them are in the softmax."""
    L, _, K = q_BLhK.shape[1:]
    segment_BL = segments.segment_ids(starts_BM, lengths_BM, L)
    distance_LL = jnp.arange(L)[:, None] - jnp.arange(L)[None, :]
    near_LL = (distance_LL >= 0) & (distance_LL < (score.window or L))
    mask_BLL = (segment_BL[:, :, None] == segment_BL[:, None, :]) & near_LL[None]
    q_BLhK = q_BLhK.astype(jnp.float32)
    k_BLhK = _repeat(k_BLgK, q_BLhK)
    scores = jnp.einsum("BqhK,BkhK->Bhqk", q_BLhK, k_BLhK, precision="highest")
    scores = scores * (K**-0.5 if score.scale is None else score.scale)
    if score.softcap is not None:
        scores = score.softcap * jnp.tanh(scores / score.softcap)
    return scores, mask_BLL


def _repeat(x_BLgK: Array, q_BLhK: Array) -> Float32[Array, "B L h K"]:
    """Each K/V head once for every query head that uses it."""
    return jnp.repeat(x_BLgK, q_BLhK.shape[2] // x_BLgK.shape[2], axis=2).astype(jnp.float32)
