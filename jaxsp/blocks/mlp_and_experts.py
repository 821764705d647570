"""An MLP and experts side by side as the feed-forward of a layer."""

import functools

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxsp.blocks.block import FeedForward, Statistics
from jaxsp.blocks.config import ModelConfig
from jaxsp.blocks.dropout import Keys
from jaxsp.blocks.experts import Experts
from jaxsp.blocks.layers import (
    NormWithoutWeight,
    Parameter,
    apply_norm,
    declare_norm,
    declare_param,
)
from jaxsp.blocks.mlp import Mlp


class MlpAndExperts(FeedForward):
    """The sum of an MLP and of experts, each after a norm of its own.

    Experts and their router have norms of the residual as their inputs.

    Source: Gemma 4 (Gemma4TextDecoderLayer of transformers).
    """

    checkpoint_names = Mlp.checkpoint_names
    has_statistics = True
    reads_residual = True

    def __init__(self, config: ModelConfig):
        D = config.hidden_size
        norm = functools.partial(declare_norm, D, config=config)
        self.mlp = Mlp(config)
        self.mlp_norm = norm("post_feedforward_layernorm_1")
        self.experts_input_norm = norm("pre_feedforward_layernorm_2")
        self.experts = Experts(config)
        self.experts_norm = norm("post_feedforward_layernorm_2")
        self.router_norm = NormWithoutWeight(config)
        vector = Parameter(shape=(D,), hf_name="router.scale", mean=1.0, compute_dtype="float32")
        self.router_scale: nnx.Param = declare_param(vector)

    def __call__(
        self,
        x: Float[Array, "B l D"],
        keys: Keys | None = None,
        residual: Float[Array, "B l D"] | None = None,
    ) -> tuple[Float[Array, "B l D"], Statistics]:
        assert residual is not None, "the layer passes it"
        # In float32 and broadcast, so that the gradient of the scale is summed in float32
        router_input = self.router_norm(residual.astype(jnp.float32))
        scale = self.router_scale[...].astype(jnp.float32) * x.shape[-1] ** -0.5
        router_input *= jnp.broadcast_to(scale, x.shape)
        experts_input = apply_norm(self.experts_input_norm, residual)
        of_experts, statistics = self.experts(experts_input, keys, router_input)
        of_mlp, _ = self.mlp(x, keys)
        out = apply_norm(self.mlp_norm, of_mlp) + apply_norm(self.experts_norm, of_experts)
        return out, statistics

    @staticmethod
    def describe(config: ModelConfig, tokens_per_device: int | None) -> str:
        return f"an MLP and {Experts.describe(config, tokens_per_device)}"

    @staticmethod
    def tile_width(config: ModelConfig) -> int:
        return Mlp.tile_width(config) + Experts.tile_width(config)

    @staticmethod
    def active_fraction(config: ModelConfig, param: Parameter) -> float:
        return Experts.active_fraction(config, param)
