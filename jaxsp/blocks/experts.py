"""Experts as the feed-forward of a layer: a router chooses some of them for each token.

Dims: T tokens, E experts, K experts of a token, F elements between an expert's matrices, N tiles of
t places (`experts.places`); else as in `blocks.layers`.
"""

import dataclasses

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxsp.blocks.block import FeedForward
from jaxsp.blocks.config import ExpertsConfig, ModelConfig
from jaxsp.blocks.dropout import Keys
from jaxsp.blocks.layers import Parameter, declare_param
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
        is_fused = names.gate == names.up
        matrix = Parameter(
            shape=(E, F, D), hf_name=names.gate, num_experts=E, std=config.initializer_range
        )
        self.gate, self.up = (
            declare_param(
                dataclasses.replace(
                    matrix, hf_name=name, hf_rows=(first, 2 * F) if is_fused else None
                )
            )
            for name, first in ((names.gate, 0), (names.up, F))
        )
        self.down = declare_param(dataclasses.replace(matrix, shape=(E, D, F), hf_name=names.down))
        shared: Mlp | None = None
        shared_gate: Linear | None = None
        if sizes.shared_size is not None:
            shared = Mlp(config, size=sizes.shared_size, name="mlp.shared_expert")
            shared_gate = Linear(D, 1, hf_name="mlp.shared_expert_gate", bias=False, config=config)
        self.shared = shared
        self.shared_gate = shared_gate
        self.sizes = sizes
        self.activation = config.activation

    def __call__(self, x: Float[Array, "B l D"], keys: Keys | None = None) -> Float[Array, "B l D"]:
        x_TD = x.reshape(-1, x.shape[-1])
        weights_TK, experts_TK = routing.route(
            x_TD,
            self.router[...],
            num_chosen=self.sizes.num_chosen,
            is_normalized=self.sizes.is_normalized,
        )
        num_experts = self.sizes.num_experts
        tiles = places.choose_tiles(experts_TK.size, num_experts)
        where = places.find_places(experts_TK, tiles, num_experts=num_experts)

        def multiply(x_Nti: Array, matrices: Array) -> Array:
            return grouped_products.multiply(tiles.block, x_Nti, matrices, where.experts_N)

        x_NtD = places.spread(x_TD, where)
        products = (multiply(x_NtD, self.gate[...]), multiply(x_NtD, self.up[...]))
        gate, up = map(checkpoint_name, products, self.checkpoint_names)
        y_NtD = multiply(activate(gate, self.activation) * up, self.down[...])
        out = places.combine(y_NtD, weights_TK, where).reshape(x.shape)
        if self.shared is None or self.shared_gate is None:
            return out
        return out + jax.nn.sigmoid(self.shared_gate(x, keys)) * self.shared(x, keys)

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


def _num_places(sizes: ExpertsConfig) -> int:
    """Places for each token, rounded up: with `choose_tiles`, a third of all may be empty."""
    return -(-3 * sizes.num_chosen // 2)
