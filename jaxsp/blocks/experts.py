"""Experts as the feed-forward of a layer: a router chooses some of them for each token.

Dims: T tokens, E experts, K experts of a token, F elements between an expert's matrices; else as in
`blocks.layers`.
"""

import dataclasses

import jax
from jaxtyping import Array, Float

from jaxsp.blocks.block import FeedForward
from jaxsp.blocks.config import ExpertsConfig, ModelConfig
from jaxsp.blocks.dropout import Keys
from jaxsp.blocks.layers import Parameter, declare_param
from jaxsp.blocks.linear import Linear
from jaxsp.blocks.mlp import Mlp, activate
from jaxsp.experts import routing, tiled
from jaxsp.experts.tiled import Weight


class Experts(FeedForward):
    """The weighted sum of the chosen experts, each of which is an `Mlp`, and of a shared one."""

    checkpoint_names = Mlp.checkpoint_names  # of the shared expert; the others are recomputed

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
        self.shared: Mlp | None = None
        self.shared_gate: Linear | None = None
        if sizes.shared_size is not None:
            self.shared = Mlp(config, size=sizes.shared_size, name="mlp.shared_expert")
            self.shared_gate = Linear(
                D, 1, hf_name="mlp.shared_expert_gate", bias=False, config=config
            )
        self.sizes = sizes
        self.activation = config.activation

    def __call__(self, x: Float[Array, "B l D"], keys: Keys | None = None) -> Float[Array, "B l D"]:
        x_TD = x.reshape(-1, x.shape[-1])
        shares_TK, experts_TK = routing.route(
            x_TD,
            self.router[...],
            num_chosen=self.sizes.num_chosen,
            is_normalized=self.sizes.is_normalized,
        )
        weights = {"gate": self.gate[...], "up": self.up[...], "down": self.down[...]}
        out_TD = tiled.apply(self._run_block, weights, x_TD, shares_TK, experts_TK)
        out = out_TD.reshape(x.shape)
        if self.shared is None or self.shared_gate is None:
            return out
        return out + jax.nn.sigmoid(self.shared_gate(x, keys)) * self.shared(x, keys)

    def _run_block(self, x: Array, weights: dict[str, Weight]) -> Array:
        gate, up = (tiled.multiply(x, weights[name]) for name in ("gate", "up"))
        return tiled.multiply(activate(gate, self.activation) * up, weights["down"])

    @staticmethod
    def describe(config: ModelConfig, tokens_per_device: int) -> str:
        sizes = _sizes(config)
        text = f"{sizes.num_chosen} of {sizes.num_experts} experts"
        if sizes.shared_size is not None:
            text += " and a shared one"
        # Three matrices of each expert, against a token's input and output for each of its experts
        least = 3 * sizes.num_experts * sizes.size // (2 * sizes.num_chosen)
        if tokens_per_device < least:
            text += (
                f" (below {least:,} tokens per device, gathering their weights sends more than an "
                f"exchange of tokens would; there are {tokens_per_device:,})"
            )
        return text

    @staticmethod
    def saved_widths(config: ModelConfig) -> list[int]:
        return 2 * [_sizes(config).shared_size or 0]

    @staticmethod
    def backward_width(config: ModelConfig) -> int:
        """Gradients of all places, and of slots in the order of tokens."""
        sizes = _sizes(config)
        # Of the places, a third may be empty (`places.choose_tiles`)
        slots = 5 * sizes.num_chosen // 2
        return slots * config.hidden_size + 4 * (sizes.shared_size or 0)

    @staticmethod
    def active_fraction(config: ModelConfig, param: Parameter) -> float:
        sizes = _sizes(config)
        return 1.0 if param.num_experts is None else sizes.num_chosen / sizes.num_experts


def _sizes(config: ModelConfig) -> ExpertsConfig:
    assert config.experts is not None, "layers with experts need their sizes"
    return config.experts
