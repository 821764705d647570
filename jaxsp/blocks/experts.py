"""Experts as the feed-forward of a layer: a router chooses some of them for each token.

Dims: T tokens, E experts, K experts of a token, F elements between an expert's matrices, N tiles of
t places (`experts.places`); else as in `blocks.layers`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxsp.blocks.block import FeedForward
from jaxsp.blocks.config import ExpertsConfig, ModelConfig
from jaxsp.blocks.dropout import Keys
from jaxsp.blocks.layers import Parameter, RowGroups, declare_param
from jaxsp.blocks.linear import Linear
from jaxsp.blocks.mlp import Mlp, activate
from jaxsp.experts import grouped_products, places, routing


class Experts(FeedForward):
    """The weighted sum of the chosen experts, each of which is an `Mlp`, and of a shared one."""

    description = "experts"
    checkpoint_names = ("experts_gate", "experts_up", *Mlp.checkpoint_names)

    def __init__(self, config: ModelConfig):
        sizes = _sizes(config)
        D = config.hidden_size
        E = sizes.num_experts
        F = sizes.size
        names = sizes.names
        self.router = declare_param(
            Parameter(
                shape=(E, D),
                hf_name=names.router,
                std=config.initializer_range,
                compute_dtype="float32",
            )
        )

        def vector(name: str | None, **options: Any) -> nnx.Param | None:
            if name is None:
                return None
            return declare_param(
                Parameter(shape=(E,), hf_name=name, compute_dtype="float32", **options)
            )

        self.router_bias = vector(names.router_bias)
        self.correction = vector(names.correction, file_dtype="float32")
        gate_rows, up_rows = _find_rows(sizes)
        self.gate, self.gate_bias = self._declare((F, D), names.gate, gate_rows, config)
        self.up, self.up_bias = self._declare((F, D), names.up, up_rows, config)
        self.down, self.down_bias = self._declare((D, F), names.down, None, config)
        shared: Mlp | None = None
        shared_gate: Linear | None = None
        if sizes.shared_size is not None:
            shared = Mlp(config, size=sizes.shared_size, name=names.shared)
            if names.shared_gate is not None:
                shared_gate = Linear(D, 1, hf_name=names.shared_gate, bias=False, config=config)
        self.shared = shared
        self.shared_gate = shared_gate
        self.sizes = sizes
        self.activation = config.activation

    def _declare(
        self, shape: tuple[int, int], name: str, rows: RowGroups | None, config: ModelConfig
    ) -> tuple[nnx.Param, nnx.Param | None]:
        """The matrices of all experts, and their biases."""
        sizes = _sizes(config)
        E = sizes.num_experts
        matrix = Parameter(
            shape=(E, *shape),
            hf_name=name,
            hf_rows=rows,
            is_transposed=sizes.is_transposed,
            num_experts=E,
            std=config.initializer_range,
        )
        bias = Parameter(shape=(E, shape[0]), hf_name=f"{name}_bias", hf_rows=rows, num_experts=E)
        return declare_param(matrix), declare_param(bias) if sizes.has_bias else None

    def __call__(self, x: Float[Array, "B l D"], keys: Keys | None = None) -> Float[Array, "B l D"]:
        x_TD = x.reshape(-1, x.shape[-1])
        weights_TK, experts_TK = routing.route(
            x_TD,
            self.router[...],
            num_chosen=self.sizes.num_chosen,
            is_normalized=self.sizes.is_normalized,
            bias_E=_value(self.router_bias),
            correction_E=_value(self.correction),
            is_sigmoid=self.sizes.scores == "sigmoid",
            num_groups=self.sizes.num_groups,
            num_chosen_groups=self.sizes.num_chosen_groups,
            scale=self.sizes.weight_scale,
        )
        num_experts = self.sizes.num_experts
        tiles = places.choose_tiles(experts_TK.size, num_experts)
        where = places.find_places(experts_TK, tiles, num_experts=num_experts)

        def multiply(x_Nti: Array, matrices: nnx.Param, bias: nnx.Param | None) -> Array:
            y_Nto = grouped_products.multiply(tiles.block, x_Nti, matrices[...], where.experts_N)
            if bias is None:
                return y_Nto
            return grouped_products.add_biases(y_Nto, bias[...], where.experts_N)

        x_NtD = places.spread(x_TD, where)
        products = (
            multiply(x_NtD, self.gate, self.gate_bias),
            multiply(x_NtD, self.up, self.up_bias),
        )
        gate, up = map(checkpoint_name, products, self.checkpoint_names)
        y_NtD = multiply(self._join(gate, up), self.down, self.down_bias)
        out = places.combine(y_NtD, weights_TK, where).reshape(x.shape)
        if self.shared is None:
            return out
        shared = self.shared(x, keys)
        if self.shared_gate is not None:
            shared *= jax.nn.sigmoid(self.shared_gate(x, keys))
        return out + shared

    def _join(self, gate: Array, up: Array) -> Array:
        """Input of the last matrix."""
        clamped = self.sizes.clamped_gate
        if clamped is None:
            return activate(gate, self.activation) * up
        gate = jnp.minimum(gate, clamped.limit)
        up = jnp.clip(up, -clamped.limit, clamped.limit)
        return gate * jax.nn.sigmoid(clamped.alpha * gate) * (up + 1)

    @staticmethod
    def saved_widths(config: ModelConfig) -> list[int]:
        sizes = _sizes(config)
        shared = 2 * [sizes.shared_size] if sizes.shared_size else []
        return [*2 * [_num_places(sizes) * sizes.size], *shared]

    @staticmethod
    def backward_width(config: ModelConfig) -> int:
        """Gate, up and their gradients, and inputs, outputs and their gradients, of all places."""
        sizes = _sizes(config)
        widths = 4 * sizes.size + 4 * config.hidden_size
        return _num_places(sizes) * widths + 4 * (sizes.shared_size or 0)

    @staticmethod
    def active_fraction(config: ModelConfig, param: Parameter) -> float:
        sizes = _sizes(config)
        return 1.0 if param.num_experts is None else sizes.num_chosen / sizes.num_experts


def _sizes(config: ModelConfig) -> ExpertsConfig:
    assert config.experts is not None, "layers with experts need their sizes"
    return config.experts


def _find_rows(sizes: ExpertsConfig) -> tuple[RowGroups | None, RowGroups | None]:
    """Rows of gate and of up in the tensor that they share; None: each has its own."""
    if sizes.names.gate != sizes.names.up:
        return None, None
    if sizes.is_transposed:
        return RowGroups(0, 1, 2), RowGroups(1, 1, 2)
    F = sizes.size
    return RowGroups(0, F, 2 * F), RowGroups(F, F, 2 * F)


def _value(param: nnx.Param | None) -> Array | None:
    return None if param is None else param[...]


def _num_places(sizes: ExpertsConfig) -> int:
    """Places for each token, rounded up: with `choose_tiles`, a third of all may be empty."""
    return -(-3 * sizes.num_chosen // 2)
