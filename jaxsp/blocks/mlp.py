"""Gated multilayer perceptron as the feed-forward of a layer."""

import functools

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxsp.blocks.block import FeedForward, Statistics
from jaxsp.blocks.config import ModelConfig
from jaxsp.blocks.layers import activate
from jaxsp.blocks.linear import Keys, Linear, declare_fused


class Mlp(FeedForward):
    """down(activation(gate(x)) * up(x))."""

    checkpoint_names = ("mlp_gate", "mlp_up")

    def __init__(self, config: ModelConfig, *, size: int | None = None, name: str = "mlp"):
        """Args: size: elements of gate and up; None: that of the model. name: in the files."""
        D = config.hidden_size
        F = size or config.intermediate_size
        linear = functools.partial(Linear, bias=config.mlp_bias, config=config)
        if config.has_fused_gate_up:
            fused = functools.partial(linear, D)
            self.gate, self.up = declare_fused(fused, [F, F], hf_name=f"{name}.gate_up_proj")
        else:
            self.gate = linear(D, F, hf_name=f"{name}.gate_proj")
            self.up = linear(D, F, hf_name=f"{name}.up_proj")
        self.down = linear(F, D, hf_name=f"{name}.down_proj")
        self.activation = config.activation

    def __call__(
        self, x: Float[Array, "B l D"], keys: Keys | None = None
    ) -> tuple[Float[Array, "B l D"], Statistics]:
        products = (self.gate(x, keys), self.up(x, keys))
        gate, up = map(checkpoint_name, products, self.checkpoint_names)
        return self.down(activate(gate, self.activation) * up, keys), {}

    @staticmethod
    def describe(config: ModelConfig, tokens_per_device: int | None) -> str:
        return "an MLP"

    @staticmethod
    def tile_width(config: ModelConfig) -> int:
        """Gate and up; and the gradients of both."""
        return 4 * config.intermediate_size
