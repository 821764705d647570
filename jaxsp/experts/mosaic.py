"""The experts of all tokens in Pallas kernels for Hopper GPUs: three matrix products.

Tiles have 128 places of one expert each, so that kernels need no masks. Empty places are zeros, and
tiles after the last expert's are left out: what they contain is never read.

Dims: P places, N tiles of t places, E experts, D model, i and o of a matrix; else as in
`experts.tiled`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from jaxsp.experts import tiled
from jaxsp.experts.tiled import Places, Tiles

_TILE = tiled.KERNEL_TILE
"""Places of a tile, rows of the results of a thread block, and columns."""

_STEP = 64
"""Elements of the summed dim that are multiplied at a time; they divide it."""

_NUM_BUFFERS = 4
"""Number of these steps in shared memory at a time."""

_NUM_BLOCKS = 132
"""Number of thread blocks, which share the tiles of results: the multiprocessors of H100 and H200.
"""


class Groups(NamedTuple):
    """Tiles of each expert."""

    experts_N: Any
    """Expert of each tile, int32 [N]."""
    ends_E: Any
    """Number of tiles up to those of each expert, int32 [E]."""


class Weight(NamedTuple):
    """A weight of all experts, and zeros whose gradient is the weight's, in float32."""

    value: Float[Array, "E ..."]
    holder: Float32[Array, "E ..."]
    groups: Groups

    def multiply(self, x_Pi: Float[Array, "P i"]) -> Float[Array, "P o"]:
        """Each place times the transposed matrix of its expert, [E, o, i]."""
        _, o, i = self.value.shape
        # Adapters have small dims
        widths = [(0, 0), (0, -o % _STEP), (0, -i % _STEP)]
        padded = self._replace(
            value=jnp.pad(self.value, widths), holder=jnp.pad(self.holder, widths)
        )
        return _multiply(jnp.pad(x_Pi, [(0, 0), widths[2]]), padded)[:, :o]

    def add_to(self, y_Po: Float[Array, "P o"]) -> Float[Array, "P o"]:
        """Adds the bias of its expert, [E, o], to each place, in float32."""
        return _add_bias(y_Po, self)


BlockFunction = Callable[[Float[Array, "P D"], Any], Float[Array, "P D"]]
"""Function that computes the outputs of all places from their tokens and a tree of `Weight`."""


def apply(
    function: BlockFunction,
    weights: Any,
    x_TD: Float[Array, "T D"],
    shares_TK: Float32[Array, "T K"],
    experts_TK: Int32[Array, "T K"],
) -> Float[Array, "T D"]:
    """Sum of the outputs of a token's experts, each times the token's share of it: see
    `tiled.apply`.
    Memory: intermediate values of all places, and float32 gradients of all experts' weights."""
    num_experts = len(jax.tree.leaves(weights)[0])
    num_slots = experts_TK.size
    number = min(num_slots, (num_slots + num_experts * (_TILE - 1)) // _TILE)
    tiles = Tiles(size=_TILE, block=number, number=number)
    where = tiled.find_places(experts_TK, tiles, num_experts=num_experts)
    return _apply(function, weights, x_TD, shares_TK, where)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(
    function: BlockFunction, weights: Any, x_TD: Array, shares_TK: Array, where: Places
) -> Array:
    weights = jax.tree.map(lambda weight: weight.astype(x_TD.dtype), weights)
    x_PD = tiled.read_tokens(x_TD, where.slots_Nt.reshape(-1), shares_TK.shape[1])
    y_TKD = tiled.read_places(function(x_PD, _hold(weights, where)), where)
    return jnp.sum(y_TKD.astype(jnp.float32) * shares_TK[..., None], axis=1).astype(x_TD.dtype)


def _apply_backward(
    function: BlockFunction, residuals: tuple[Any, ...], dout_TD: Array
) -> tuple[Any, Array, Array, None]:
    given, x_TD, shares_TK, where = residuals
    weights = jax.tree.map(lambda weight: weight.astype(x_TD.dtype), given)
    slots_P = where.slots_Nt.reshape(-1)
    read = functools.partial(tiled.read_tokens, slots=slots_P, num_chosen=shares_TK.shape[1])
    shares_P = shares_TK.reshape(-1).at[slots_P].get(mode="fill", fill_value=0)
    dout_PD = read(dout_TD).astype(jnp.float32)
    y_PD, pull = jax.vjp(function, read(x_TD), _hold(weights, where))
    dx_PD, dweights = pull((dout_PD * shares_P[:, None]).astype(y_PD.dtype))
    dshares_P = jnp.sum(y_PD.astype(jnp.float32) * dout_PD, axis=-1)
    dx_TKD = tiled.read_places(dx_PD, where).astype(jnp.float32)
    dweights = jax.tree.map(lambda weight, own: own.holder.astype(weight.dtype), given, dweights)
    return dweights, jnp.sum(dx_TKD, axis=1).astype(x_TD.dtype), dshares_P[where.places_TK], None


_apply.defvjp(lambda function, *inputs: (_apply(function, *inputs), inputs), _apply_backward)


def _hold(weights: Any, where: Places) -> Any:
    """Weights of all experts, in a tree of `Weight`."""
    groups = Groups(where.experts_N, where.ends_E)
    hold = lambda weight: Weight(weight, jnp.zeros(weight.shape, jnp.float32), groups)
    return jax.tree.map(hold, weights)


@jax.custom_vjp
def _multiply(x_Pi: Array, matrix: Weight) -> Array:
    return multiply(x_Pi, matrix.value, matrix.groups, is_transposed=False)


def _multiply_backward(residuals: tuple[Array, Weight], dy_Po: Array) -> tuple[Array, Weight]:
    x_Pi, matrix = residuals
    dx_Pi = multiply(dy_Po, matrix.value, matrix.groups, is_transposed=True)
    gradient = add_products(dy_Po, x_Pi, matrix.groups)
    return dx_Pi, _make_gradient(matrix, gradient)


_multiply.defvjp(lambda x, matrix: (_multiply(x, matrix), (x, matrix)), _multiply_backward)


@jax.custom_vjp
def _add_bias(y_Po: Array, bias: Weight) -> Array:
    y_Nto = y_Po.reshape(-1, _TILE, y_Po.shape[-1]).astype(jnp.float32)
    bias_No = bias.value[bias.groups.experts_N].astype(jnp.float32)
    return (y_Nto + bias_No[:, None]).astype(y_Po.dtype).reshape(y_Po.shape)


def _add_bias_backward(bias: Weight, dy_Po: Array) -> tuple[Array, Weight]:
    groups = bias.groups
    is_used_N = jnp.arange(len(groups.experts_N), dtype=jnp.int32) < groups.ends_E[-1]
    sums_No = jnp.sum(dy_Po.reshape(-1, _TILE, dy_Po.shape[-1]).astype(jnp.float32), axis=1)
    sums_No = jnp.where(is_used_N[:, None], sums_No, 0)
    of_expert_NE = jax.nn.one_hot(groups.experts_N, len(groups.ends_E), dtype=jnp.float32)
    # A product and no scattered addition, whose order may differ from run to run
    gradient = jnp.einsum("NE,No->Eo", of_expert_NE, sums_No, precision=jax.lax.Precision.HIGHEST)
    return dy_Po, _make_gradient(bias, gradient)


_add_bias.defvjp(lambda y, bias: (_add_bias(y, bias), bias), _add_bias_backward)


def _make_gradient(weight: Weight, gradient: Array) -> Weight:
    """Result of a backward pass for a weight: its gradient as that of the holder."""
    return weight._replace(
        value=jnp.zeros_like(weight.value), holder=gradient, groups=Groups(None, None)
    )


def multiply(
    x_Pi: Float[Array, "P i"], matrix: Float[Array, "E ..."], groups: Groups, *, is_transposed: bool
) -> Float[Array, "P o"]:
    """Each place times the matrix of its expert: [E, o, i], or [E, i, o] if `is_transposed`.
    Precision: sums in float32, results in the dtype of x."""
    P, i = x_Pi.shape
    o = matrix.shape[2] if is_transposed else matrix.shape[1]
    num_columns = -(-o // _TILE)

    def run(experts_N: Any, ends_E: Any, x_ref: Any, matrix_ref: Any, y_ref: Any) -> None:
        @plgpu.nd_loop((P // _TILE * num_columns,), collective_axes="block")
        def run_tile(loop: Any) -> None:
            tile, column = plgpu.planar_snake(loop.index[0], (P // _TILE, num_columns), 1, 2)

            @pl.when(tile < ends_E[len(groups.ends_E) - 1])
            def _() -> None:
                own_ref = matrix_ref.at[experts_N[tile]]
                inner = (_STEP, _TILE) if is_transposed else (_TILE, _STEP)
                find = lambda k: (k, column) if is_transposed else (column, k)
                transpose = lambda ref: ref if is_transposed else ref.transpose((1, 0))

                def sum_steps(sums: Any) -> None:
                    plgpu.emit_pipeline(
                        lambda _, x, own: plgpu.wgmma(sums, x, transpose(own)),
                        grid=(i // _STEP,),
                        in_specs=[
                            plgpu.BlockSpec((_TILE, _STEP), lambda k: (tile, k), delay_release=1),
                            plgpu.BlockSpec(inner, find, delay_release=1),
                        ],
                        max_concurrent_steps=_NUM_BUFFERS,
                    )(x_ref, own_ref)

                _sum_and_store(
                    sum_steps,
                    y_ref.at[pl.ds(tile * _TILE, _TILE), pl.ds(column * _TILE, _TILE)],
                )

    return _make_kernel(run, (P, o), x_Pi.dtype)(*groups, x_Pi, matrix)


def add_products(
    dy_Po: Float[Array, "P o"], x_Pi: Float[Array, "P i"], groups: Groups
) -> Float32[Array, "E o i"]:
    """Sum over each expert's places of the outer products of dy and x; 0 for one without places."""
    P, o = dy_Po.shape
    i = x_Pi.shape[1]
    counts = (-(-o // _TILE), -(-i // _TILE))
    num_experts = len(groups.ends_E)
    swizzle = plgpu.find_swizzle(8 * _TILE * dy_Po.dtype.itemsize)
    transforms = (
        plgpu.TilingTransform((8, swizzle // dy_Po.dtype.itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )

    def run(_: Any, ends_E: Any, dy_ref: Any, x_ref: Any, sums_ref: Any) -> None:
        @plgpu.nd_loop((num_experts, counts[0] * counts[1]), collective_axes="block")
        def run_tile(loop: Any) -> None:
            expert = loop.index[0]
            row, column = plgpu.planar_snake(loop.index[1], counts, 1, 2)
            first = jnp.where(expert == 0, 0, ends_E[jnp.maximum(expert - 1, 0)])
            number = ends_E[expert] - first
            own = pl.ds(pl.multiple_of(first * _TILE, _TILE), P)

            def sum_places(sums: Any) -> None:
                pipeline = plgpu.emit_pipeline(
                    lambda _, dy, x: plgpu.wgmma(sums, dy.transpose((1, 0)), x),
                    grid=(number * (_TILE // _STEP),),
                    in_specs=[
                        plgpu.BlockSpec(
                            (_STEP, _TILE),
                            lambda k, part=part: (k, part),
                            delay_release=1,
                            transforms=transforms,
                        )
                        for part in (row, column)
                    ],
                    max_concurrent_steps=_NUM_BUFFERS,
                )
                pl.when(number > 0)(lambda: pipeline(dy_ref.at[own, :], x_ref.at[own, :]))

            _sum_and_store(
                sum_places,
                sums_ref.at[expert, pl.ds(row * _TILE, _TILE), pl.ds(column * _TILE, _TILE)],
            )

    return _make_kernel(run, (num_experts, o, i), jnp.float32)(*groups, dy_Po, x_Pi)


def _sum_and_store(add: Callable[[Any], Any], result_ref: Any) -> None:
    """Stores a tile of sums, to which `add` adds products. Args: result_ref: in device memory."""

    def sum_up(sums: Any) -> Array:
        add(sums)
        return sums[...]

    total = pl.run_scoped(sum_up, plgpu.ACC((_TILE, _TILE)))

    def store(buffer: Any) -> None:
        buffer[...] = total.astype(buffer.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, result_ref)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(store, plgpu.SMEM((_TILE, _TILE), dtype=result_ref.dtype))


def _make_kernel(run: Callable[..., None], shape: tuple[int, ...], dtype: Any) -> Callable:
    """Kernel on all multiprocessors. Args: run: gets references to inputs and to the result."""
    options: dict[str, Any] = {  # the first has another name before jax 0.11
        "out_type": jax.ShapeDtypeStruct(shape, dtype),
        "grid": (_NUM_BLOCKS,),
        "grid_names": ("block",),
        "compiler_params": plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    }
    return plgpu.kernel(run, **options)
