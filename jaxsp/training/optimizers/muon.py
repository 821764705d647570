"""Muon: momentum whose matrices are made orthogonal by Newton-Schulz iterations.

The iterations need whole matrices, and matrices are sharded. An all-to-all exchanges layers for
shards: of a group of as many layers as there are shards, each device gets one whole matrix. Another
all-to-all brings the shards back. Nothing is computed twice, and a device sends its shard twice. An
all-gather of the momenta would send num_shards / 2 times as much (Llama-3.1-8B on 8 GPUs: 12.2 GB
instead of 3.1 GB per step), and each device would repeat all arithmetic.

    group of 2 layers   | layer 0, rows 0-1 | layer 0, rows 2-3 |
                        | layer 1, rows 0-1 | layer 1, rows 2-3 |
    all-to-all
    whole matrices      | layer 0, rows 0-3 | layer 1, rows 0-3 |
                          device 0            device 1

Sources: Jordan et al. 2024, kellerjordan.github.io/posts/muon (iterations and momentum); Liu et al.
2025, arXiv:2502.16982, section 2.2: the update is multiplied by 0.2 * sqrt(max(rows, columns)), so
that it is as large as AdamW's and takes AdamW's learning rate and weight decay.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxsp.core import axes
from jaxsp.model.layers import Parameter
from jaxsp.runtime import device_mesh
from jaxsp.training import sharding

SCOPE = "muon"
"""Scope name, in the compiled program, of the exchange and the iterations."""

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of a, a^3 and a^5, for a singular value a; five iterations bring singular values
near 1."""

_NUM_ITERATIONS = 5

_EPS = 1e-8
"""Number added to the norm of a matrix."""

_RMS = 0.2
"""Root mean square of an update's elements, as of AdamW's in practice."""


class MomentumState(NamedTuple):
    """State of a matrix."""

    count: Any
    """Number of updates."""
    mu: Any
    """Average gradient."""


def scale_by_momentum(beta: float) -> optax.GradientTransformation:
    """Nesterov momentum with bias correction, the part of Muon that needs no whole matrices."""

    def init(params: Any) -> MomentumState:
        return MomentumState(count=jnp.int32(0), mu=optax.tree.zeros_like(params))

    def update(updates: Any, state: MomentumState, params: Any = None) -> tuple[Any, MomentumState]:
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        count = optax.safe_increment(state.count)
        ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
        own = optax.tree.bias_correction(updates, beta, count)
        direction = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, own)
        return direction, MomentumState(count=count, mu=mu)

    return optax.GradientTransformation(init, update)


def group_size(param: Parameter, num_shards: int) -> int:
    """Number of layers that are updated at a time, so that each device has one whole matrix."""
    is_sharded = sharding.choose_placement(param, num_shards).dim is not None
    return num_shards if is_sharded else 1


def orthogonalize(
    param: Parameter, momenta: Float[Array, "n o i"], *, mesh: Mesh, dtype: jnp.dtype
) -> Float[Array, "n o i"]:
    """Updates, float32, of a group of layers of a weight, with padding as it is stored.

    Moves: twice the padded shards, in `dtype`: see `sent_bytes`.
    """
    num_shards = device_mesh.num_shards(mesh)
    dim = sharding.choose_placement(param, num_shards).dim
    scale = _RMS * max(param.shape) ** 0.5
    iterate = functools.partial(_iterate, is_tall=param.shape[0] > param.shape[1])
    with jax.named_scope(SCOPE):
        momenta = momenta.astype(dtype)
        if dim is None:
            return scale * iterate(momenta).astype(jnp.float32)

        def exchange(shards: Array) -> Array:
            num_layers = shards.shape[0]
            padding = [(0, -num_layers % num_shards), (0, 0), (0, 0)]
            whole = jax.lax.all_to_all(
                jnp.pad(shards, padding),
                axes.SHARDS,
                split_axis=0,
                concat_axis=dim + 1,
                tiled=True,
            )
            result = jax.lax.all_to_all(
                iterate(whole), axes.SHARDS, split_axis=dim + 1, concat_axis=0, tiled=True
            )
            return scale * result[:num_layers].astype(jnp.float32)

        spec = sharding.partition_spec(param, num_shards)
        on_mesh = jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return on_mesh(momenta)


def _iterate(matrices: Float[Array, "n o i"], *, is_tall: bool) -> Float[Array, "n o i"]:
    """Newton-Schulz iterations. Zero rows and columns, such as padding, stay zero."""
    dtype = matrices.dtype
    norms = jnp.sqrt(jnp.sum(jnp.square(matrices.astype(jnp.float32)), axis=(1, 2), keepdims=True))
    x = (matrices.astype(jnp.float32) / (norms + _EPS)).astype(dtype)
    if is_tall:
        x = x.mT
    a, b, c = (jnp.asarray(number, dtype) for number in _COEFFICIENTS)

    def iterate(_: Array, x: Array) -> Array:
        square = x @ x.mT
        return a * x + (b * square + c * square @ square) @ x

    # GPUs would multiply float32 matrices in TF32, with 10 bits of mantissa
    with jax.default_matmul_precision("float32" if dtype == jnp.float32 else None):
        x = jax.lax.fori_loop(0, _NUM_ITERATIONS, iterate, x)
    return x.mT if is_tall else x


def sent_bytes(param: Parameter, num_shards: int, itemsize: int) -> dict[str, float]:
    """Bytes that a device sends in a step for a weight: two all-to-alls of its shards.

    A group that is not full is padded with layers of zeros: 36 layers on 32 devices count as 64.
    """
    is_sharded = sharding.choose_placement(param, num_shards).dim is not None
    if not is_sharded or param.num_layers is None or len(param.shape) != 2:
        return {}
    size = sharding.shard_size(param, num_shards) // param.num_layers
    num_layers = -(-param.num_layers // num_shards) * num_shards
    return {"all-to-all": 2 * itemsize * num_layers * size * (1 - 1 / num_shards)}
