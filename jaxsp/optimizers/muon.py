"""Muon: momentum whose matrices are made orthogonal by Newton-Schulz iterations.

Sources: Jordan et al. 2024, kellerjordan.github.io/posts/muon (iterations and momentum); Liu et al.
2025, arXiv:2502.16982, section 2.2: the update is multiplied by 0.2 * sqrt(max(rows, columns)), so
that it is as large as AdamW's and takes AdamW's learning rate and weight decay.

The iterations need whole matrices on a device. An all-to-all exchanges matrices for shards: of a
group of as many layers as there are shards, each device gets one whole matrix. A layer with experts
has a matrix for each, so a group of fewer layers is enough. Another all-to-all brings the shards
back. Nothing is computed twice, and a device sends its shard twice. An all-gather of all matrices
would send num_shards / 2 times as much (Llama-3.1-8B on 8 GPUs: 12.2 GB instead of 3.1 GB per
step), and each device would repeat all arithmetic.

    group of 2 layers   | layer 0, rows 0-1 | layer 0, rows 2-3 |
                        | layer 1, rows 0-1 | layer 1, rows 2-3 |
    all-to-all
    whole matrices      | layer 0, rows 0-3 | layer 1, rows 0-3 |
                          device 0            device 1
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxsp.blocks.layers import Parameter
from jaxsp.core import axes
from jaxsp.sharding import sharding
from jaxsp.system import device_mesh

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of a, a^3 and a^5, for a singular value a; five iterations bring singular values
near 1."""

_NUM_ITERATIONS = 5
_EPS = 1e-8  # number added to the norm of a matrix
_RMS = 0.2  # root mean square of an update's elements, as of AdamW's in practice


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


def orthogonalize(param: Parameter, matrices: Float[Array, "n o i"]) -> Float[Array, "n o i"]:
    """Updates of whole matrices of a weight, from their momenta, computed in their dtype by
    Newton-Schulz iterations. Zero rows and columns, such as padding, stay zero."""
    dtype = matrices.dtype
    is_tall = param.matrix_shape[0] > param.matrix_shape[1]
    x32 = matrices.astype(jnp.float32)
    norms = jnp.sqrt(jnp.sum(x32 * x32, axis=(1, 2), keepdims=True))
    x = (x32 / (norms + _EPS)).astype(dtype)
    if is_tall:
        x = x.mT
    a, b, c = (jnp.asarray(number, dtype) for number in _COEFFICIENTS)

    def iterate(_: Array, x: Array) -> Array:
        square = x @ x.mT
        return a * x + (b * square + c * square @ square) @ x

    # GPUs would multiply float32 matrices in TF32, with 10 bits of mantissa
    with jax.default_matmul_precision("float32" if dtype == jnp.float32 else None):
        x = jax.lax.fori_loop(0, _NUM_ITERATIONS, iterate, x)
    scale = jnp.asarray(_RMS * max(param.matrix_shape) ** 0.5, dtype)
    return scale * (x.mT if is_tall else x)


# Exchange of layers for shards

SCOPE = "matrix_exchange"
"""Scope name, in the compiled program, of the exchange and of what is computed in between."""


def group_size(param: Parameter, num_shards: int) -> int:
    """Number of layers that are exchanged at a time, so that each device has one whole matrix.
    A device has several if a layer has more experts than there are shards."""
    if has_whole_matrices(param, num_shards):
        return 1
    return max(1, num_shards // (param.num_experts or 1))


def has_whole_matrices(param: Parameter, num_shards: int) -> bool:
    """True if no matrix is divided among devices."""
    dim = sharding.choose_placement(param, num_shards).dim
    return dim is None or (param.num_experts is not None and dim == 0)


def map_matrices(
    param: Parameter,
    function: Callable[[Array], Array],
    matrices: Float[Array, "n *e o i"],
    *,
    mesh: Mesh,
) -> Float[Array, "n *e o i"]:
    """Results of a function of whole matrices [m, o, i], for a group of layers, with padding as
    stored; m counts the experts of all layers.

    The function must return zeros for a matrix of zeros, and keep zero rows and columns.

    Moves: twice the padded shards: see `sent_bytes`.
    """
    num_shards = device_mesh.num_shards(mesh)
    dim = sharding.choose_placement(param, num_shards).dim
    with jax.named_scope(SCOPE):
        if dim is None:
            whole = matrices.reshape(-1, *matrices.shape[-2:])
            return function(whole).reshape(matrices.shape)

        def exchange(layers: Array) -> Array:
            shards = layers.reshape(-1, *layers.shape[-2:])
            if has_whole_matrices(param, num_shards):
                return function(shards).reshape(layers.shape)
            axis = dim if param.num_experts else dim + 1
            num_matrices = len(shards)
            padding = [(0, -num_matrices % num_shards), (0, 0), (0, 0)]
            whole = jax.lax.all_to_all(
                jnp.pad(shards, padding), axes.SHARDS, split_axis=0, concat_axis=axis, tiled=True
            )
            result = jax.lax.all_to_all(
                function(whole), axes.SHARDS, split_axis=axis, concat_axis=0, tiled=True
            )
            return result[:num_matrices].reshape(layers.shape)

        spec = sharding.partition_spec(param, num_shards)
        on_mesh = jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return on_mesh(matrices)
