"""The two blocks of a layer: a mixer, in which the tokens of a row meet, and a feed-forward.

Each is a file and a line in registry.py. It declares its weights and computes;
nothing else in jaxsp knows its dims.

    x -> norm -> mixer's input -> mix -> mixer's output -> + x -> norm -> feed-forward -> + x
         |___ in tiles of tokens __|     |_____________ in tiles of tokens ___________|

Only `mix` communicates. Everything else treats each token independently.
"""

import abc
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from jaxsp.attention.attend import Attend
from jaxsp.blocks.config import LayerConfig, ModelConfig, NormNames
from jaxsp.blocks.layers import (
    Parameter,
    Weights,
    activate,
    apply_norm,
    declare_norm,
    declare_param,
    scale,
)
from jaxsp.blocks.linear import Keys, Linear
from jaxsp.core.batch import Batch


class RowInputs(NamedTuple):
    """Inputs of `Mixer.mix` besides the arrays that it mixes: the rows, and who shares them."""

    batch: Batch
    attend: Attend
    """Attention of this mesh; its strategy tells other mixers how rows are divided."""
    tables: Any
    """Result of `Attend.make_segment_tables`."""
    attention_kind: Int32[Array, ""] | int
    """Index of the layer's scores into `Attend.kinds`."""


class LayerCache(NamedTuple):
    """Arrays of a mixer that later tokens of the rows need, by names of the mixer's choice."""

    tokens: dict[str, Array]
    """Arrays [B, l, ...] of tokens, which stay on the device where the tokens are."""
    states: dict[str, Array]
    """Arrays [B, ...] of rows, the same on all devices of a group. Each token replaces them."""


class NextToken(NamedTuple):
    """Inputs of `Mixer.decode` besides the arrays that it mixes: the cache of the tokens before."""

    prompts: dict[str, Array]
    """`LayerCache.tokens` of the prompts, [B, l, ...]."""
    answers: dict[str, Array]
    """The same of the new tokens so far, [B, n, ...], with empty slots at the end."""
    states: dict[str, Array]
    """`LayerCache.states`."""
    prompt_positions_Bl: Int32[Array, "B l"]
    """Positions of the tokens in `prompts`; -1 at padding."""
    answer_positions_Bn: Int32[Array, "B n"]
    """Positions of the tokens in `answers`; -1 at empty slots."""
    positions_B: Int32[Array, "B"]
    """Positions of the next tokens."""
    is_own: Bool[Array, ""]
    """True on the device of a group that will hold the next tokens."""
    window: Int32[Array, ""]
    """Number of tokens that a token of this layer sees, including itself."""


class MixerInput(nnx.Module):
    """Part of a layer before the mixing: the norm, and projections of a subclass.

    A subclass has `__call__(x_BlD, positions_Bl, keys, rope_index=0)`, with keys as in
    `FeedForward` and the index of the layer's RoPE into `ModelConfig.ropes`. It returns the arrays
    to mix, and those for the part after the mixing, of which `mlp_input` of `normalize` is first.
    """

    def __init__(self, config: ModelConfig):
        self.norm = declare_norm(config.hidden_size, config.norm_names.pre_attention, config)
        self.is_parallel = config.is_parallel

    def normalize(
        self, x_BlD: Float[Array, "B l D"]
    ) -> tuple[Float[Array, "B l D"], Float[Array, "B l D"] | None]:
        """Input of the projections, and mlp_input: the same array if the feed-forward has the
        mixer's input (`ModelConfig.is_parallel`), else None."""
        x_BlD = apply_norm(self.norm, x_BlD)
        return x_BlD, x_BlD if self.is_parallel else None


Statistics = dict[str, Any]
"""Numbers of each token, float32 arrays [B, l, ...] by name, which are summed over rows. They may
have gradients."""


class FeedForward(nnx.Module):
    """A function of each token, made for a `ModelConfig`."""

    checkpoint_names: ClassVar[tuple[str, ...]]
    """Names of the results that `remat: save_attention_and_mlp` keeps."""
    has_statistics: ClassVar[bool] = False
    reads_residual: ClassVar[bool] = False
    """True if it is also called with the residual, the input of the norm before it."""

    def __init__(self, config: ModelConfig): ...

    def __call__(
        self, x: Float[Array, "B l D"], keys: Keys | None
    ) -> tuple[Float[Array, "B l D"], Statistics]:
        """Args: keys: of the tokens, for dropout; None: no dropout."""
        raise NotImplementedError

    @staticmethod
    def has_kept_products(config: ModelConfig) -> bool:
        """True if it has results with `checkpoint_names`."""
        return True

    @staticmethod
    def describe(config: ModelConfig, tokens_per_device: int | None) -> str:
        """Noun phrase for the banner. Args: tokens_per_device: see `decoder.describe_layers`."""
        raise NotImplementedError

    @staticmethod
    def tile_width(config: ModelConfig) -> int:
        """Elements for each token of a tile that are live at once in the backward pass, by which
        tiles are chosen before anything is traced."""
        raise NotImplementedError

    @staticmethod
    def active_fraction(config: ModelConfig, param: Parameter) -> float:
        """Fraction of the elements of a matrix of this block that one token is multiplied with."""
        return 1.0


class Mixer(abc.ABC):
    """The part of a layer in which the tokens of a row meet."""

    description: ClassVar[str]
    """Noun phrase for the banner."""
    checkpoint_names: ClassVar[tuple[str, ...]]
    """Names of the results that all policies but `remat: full` keep."""

    def norm_names(self, config: ModelConfig) -> NormNames:
        """Names of the norms of a layer with this mixer."""
        return config.norm_names

    @abc.abstractmethod
    def declare_input(self, config: ModelConfig) -> MixerInput: ...

    def declare_weights(self, config: ModelConfig) -> nnx.Module | None:
        """Weights of `mix` itself; None: it has none."""
        return None

    @abc.abstractmethod
    def declare_output(self, config: ModelConfig) -> nnx.Module:
        """Module that is called with the mixed array, [B, l, ...], the carried arrays and the keys
        of dropout, and returns [B, l, D]."""

    @abc.abstractmethod
    def mix(
        self, config: ModelConfig, weights: Weights, inputs: Sequence[Array], rows: RowInputs
    ) -> Array:
        """Mixes this device's tokens with the other tokens of their rows. Shapes: [B, l, ...].

        Args: weights: whole weights of `declare_weights`.
        """

    @abc.abstractmethod
    def prefill(
        self, config: ModelConfig, weights: Weights, inputs: Sequence[Array], rows: RowInputs
    ) -> tuple[Array, LayerCache]:
        """Computes `mix`, and the cache. Each row is one segment, which starts at its first token;
        no gradients."""

    @abc.abstractmethod
    def decode(
        self, config: ModelConfig, weights: Weights, inputs: Sequence[Array], token: NextToken
    ) -> tuple[Array, LayerCache]:
        """Computes `mix` for the next token of each row, on every device of a group.

        Shapes: inputs and result are [B, 1, ...].
        Returns: the result; and the cache of the next token only, with the new states.
        """

    @abc.abstractmethod
    def output_bytes(self, config: ModelConfig, itemsize: int) -> int:
        """Bytes of the results in `checkpoint_names`, for each token: their part of host memory,
        which is reserved before JAX starts."""

    @abc.abstractmethod
    def forward_flops(
        self, config: ModelConfig, layer: LayerConfig, segment_lengths: np.ndarray
    ) -> float:
        """Floating-point operations of `mix` in a layer, for segments of these lengths."""


class PerLayerInput(nnx.Module):
    """Adds an input of the layer to the residual: norm(project(activation(gate(x)) * input)).

    Source: Gemma 4 (Gemma4TextDecoderLayer of transformers).
    """

    def __init__(self, config: ModelConfig):
        D = config.hidden_size
        P = config.per_layer_size
        linear = functools.partial(Linear, bias=False, config=config)
        self.gate = linear(D, P, hf_name="per_layer_input_gate")
        self.projection = linear(P, D, hf_name="per_layer_projection")
        self.norm = declare_norm(D, "post_per_layer_input_norm", config)
        self.activation = config.activation

    def __call__(
        self, x_BlD: Float[Array, "B l D"], input_BlP: Float[Array, "B l P"], keys: Keys | None
    ) -> Float[Array, "B l D"]:
        gate_BlP = activate(self.gate(x_BlD, keys), self.activation)
        return apply_norm(self.norm, self.projection(gate_BlP * input_BlP, keys))


class LayerOutput(nnx.Module):
    """Part of a layer after the mixing: output projection and feed-forward, each with a residual.

    Names of norms are those of attention and MLP: see `NormNames`.
    """

    def __init__(self, config: ModelConfig, mixer: Mixer, feed_forward: type[FeedForward]):
        D = config.hidden_size
        names = config.norm_names
        self.o = mixer.declare_output(config)
        self.output_norm = declare_norm(D, names.post_attention, config, eps=config.post_norm_eps)
        self.norm = declare_norm(D, names.pre_mlp, config)
        self.mlp: Any = feed_forward(config)  # called with the residual too if it reads it
        self.mlp_norm = declare_norm(D, names.post_mlp, config, eps=config.post_norm_eps)
        self.residual_scale = config.residual_scale
        layer_scale: nnx.Param | None = None
        if config.has_layer_scale:
            layer_scale = declare_param(Parameter(shape=(1,), hf_name="layer_scalar", mean=1.0))
        self.layer_scale = layer_scale
        self.per_layer_input = PerLayerInput(config) if config.per_layer_size else None

    def __call__(
        self,
        x_BlD: Float[Array, "B l D"],
        mixed: Float[Array, "B l ..."],
        mlp_input: Float[Array, "B l D"] | None,
        keys: Keys | None,
        *carried: Any,
    ) -> tuple[Float[Array, "B l D"], Statistics]:
        """Args: keys: as in `FeedForward`. mlp_input, carried: see `MixerInput`; the last of them
        is the input of `PerLayerInput`, if there is one."""
        gates = carried if self.per_layer_input is None else carried[:-1]
        out_BlD = self.o(mixed, *gates, keys=keys)
        x_BlD = x_BlD + scale(apply_norm(self.output_norm, out_BlD), self.residual_scale)
        if mlp_input is None:
            mlp_input = apply_norm(self.norm, x_BlD)
        residual = (x_BlD,) if self.mlp.reads_residual else ()
        mlp_out_BlD, statistics = self.mlp(mlp_input, keys, *residual)
        mlp_out_BlD = apply_norm(self.mlp_norm, mlp_out_BlD)
        x_BlD = x_BlD + scale(mlp_out_BlD, self.residual_scale)
        if self.per_layer_input is not None:
            x_BlD = x_BlD + self.per_layer_input(x_BlD, carried[-1], keys)
        if self.layer_scale is not None:
            factor = jax.lax.stop_gradient(self.layer_scale[...])[0]
            x_BlD = x_BlD * factor.astype(x_BlD.dtype)
        return x_BlD, statistics
