"""Experts as the feed-forward of a layer, also beside an MLP: a router chooses some for each token.

Dims: T tokens, E experts, K experts of a token, F elements between an expert's matrices; else as in
`blocks.layers`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxsp.blocks.block import FeedForward, Statistics
from jaxsp.blocks.config import ExpertsConfig, Lora, ModelConfig
from jaxsp.blocks.layers import (
    NormWithoutWeight,
    Parameter,
    RowGroups,
    activate,
    apply_norm,
    declare_norm,
    declare_param,
    scale,
)
from jaxsp.blocks.linear import Keys, Linear
from jaxsp.blocks.mlp import Mlp
from jaxsp.experts import kernels, routing


class Experts(FeedForward):
    """The weighted sum of the chosen experts, each of which is an `Mlp`, and of a shared one."""

    checkpoint_names = Mlp.checkpoint_names  # of the shared expert; the others are recomputed
    has_statistics = True

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
                file_dtype=sizes.router_file_dtype,
            )
        )

        def vector(name: str | None, **options: Any) -> nnx.Param | None:
            if name is None:
                return None
            return declare_param(
                Parameter(shape=(E,), hf_name=name, compute_dtype="float32", **options)
            )

        self.router_bias = vector(names.router_bias)
        self.expert_scale = vector(names.expert_scale, mean=1.0)
        self.correction = vector(names.correction, file_dtype="float32")
        gate_up, down = sizes.adapted_tensors
        gate_rows, up_rows = _find_adapted_rows(sizes)
        self.gate, self.gate_bias = self._declare((F, D), names.gate, gate_up, gate_rows, config)
        self.up, self.up_bias = self._declare((F, D), names.up, gate_up, up_rows, config)
        self.down, self.down_bias = self._declare((D, F), names.down, down, None, config)
        self.gate_up_a, self.gate_b, self.up_b = _declare_adapter(config.lora, self.gate, self.up)
        self.down_a, self.down_b = _declare_adapter(config.lora, self.down)
        self.adapter_scale = 1.0 if config.lora is None else config.lora.scale
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
        self,
        shape: tuple[int, int],
        name: str,
        adapted_tensor: str,
        adapted_rows: RowGroups | None,
        config: ModelConfig,
    ) -> tuple[nnx.Param, nnx.Param | None]:
        """The matrices of all experts, and their biases."""
        sizes = _sizes(config)
        E = sizes.num_experts
        rows = adapted_rows if sizes.names.gate == sizes.names.up else None
        matrix = Parameter(
            shape=(E, *shape),
            hf_name=name,
            hf_rows=rows,
            is_transposed=sizes.is_transposed,
            num_experts=E,
            adapted_tensor=adapted_tensor,
            adapted_rows=adapted_rows,
            std=config.initializer_range,
        )
        bias = Parameter(shape=(E, shape[0]), hf_name=f"{name}_bias", hf_rows=rows, num_experts=E)
        return declare_param(matrix), declare_param(bias) if sizes.has_bias else None

    def __call__(
        self,
        x: Float[Array, "B l D"],
        keys: Keys | None = None,
        router_input: Float[Array, "B l D"] | None = None,
    ) -> tuple[Float[Array, "B l D"], Statistics]:
        """Args: router_input: None: x."""
        x_TD = x.reshape(-1, x.shape[-1])
        routed_TD = x_TD if router_input is None else router_input.reshape(x_TD.shape)
        logits_TE = routing.compute_logits(routed_TD, self.router[...], _value(self.router_bias))
        shares_TK, experts_TK = routing.route(
            logits_TE,
            num_chosen=self.sizes.num_chosen,
            is_normalized=self.sizes.is_normalized,
            correction_E=_value(self.correction),
            is_sigmoid=self.sizes.scores == "sigmoid",
            num_groups=self.sizes.num_groups,
            num_chosen_groups=self.sizes.num_chosen_groups,
            scale=self.sizes.weight_scale,
        )
        if self.expert_scale is not None:
            shares_TK *= self.expert_scale[...].astype(jnp.float32)[experts_TK]
        params = {name: getattr(self, name) for name in _EXPERT_WEIGHTS}
        weights = {name: param[...] for name, param in params.items() if param is not None}
        apply = kernels.find(self.sizes.kernel)
        out_TD = apply(self._run_block, weights, x_TD, shares_TK, experts_TK)
        out = out_TD.reshape(x.shape)
        statistics = routing.measure(logits_TE, experts_TK)
        if not self.sizes.has_losses:
            statistics = jax.lax.stop_gradient(statistics)
        statistics = jax.tree.map(lambda y: y.reshape(*x.shape[:2], *y.shape[1:]), statistics)
        if self.shared is None:
            return out, statistics
        shared, _ = self.shared(x, keys)
        if self.shared_gate is not None:
            # In float32 and broadcast, so that the gate's gradient is summed in float32
            gate = jax.nn.sigmoid(self.shared_gate(x, keys).astype(jnp.float32))
            gated = shared.astype(jnp.float32) * jnp.broadcast_to(gate, shared.shape)
            shared = gated.astype(shared.dtype)
        return out + shared, statistics

    def _run_block(self, x: Array, weights: dict[str, Any]) -> Array:
        """Args: weights: those of a kernel, such as `tiled.Weight`."""

        def reduce(x: Array, name: str) -> Array | None:
            """Input of an adapter's matrix B; None: there is no adapter."""
            a = weights.get(f"{name}_a")
            return None if a is None else a.multiply(x)

        def multiply(x: Array, name: str, reduced: Array | None) -> Array:
            y = weights[name].multiply(x)
            if reduced is not None:
                y = y + scale(weights[f"{name}_b"].multiply(reduced), self.adapter_scale)
            bias = weights.get(f"{name}_bias")
            return y if bias is None else bias.add_to(y)

        reduced = reduce(x, "gate_up")
        joined = self._join(multiply(x, "gate", reduced), multiply(x, "up", reduced))
        return multiply(joined, "down", reduce(joined, "down"))

    def _join(self, gate: Array, up: Array) -> Array:
        """Input of the last matrix."""
        clamped = self.sizes.clamped_gate
        if clamped is None:
            return activate(gate, self.activation) * up
        limit = clamped.limit
        gate32 = gate.astype(jnp.float32)
        up32 = up.astype(jnp.float32)
        # As in torch, gradients are whole at the limit
        gate32 = jnp.where(gate32 > limit, limit, gate32)
        up32 = jnp.where(jnp.abs(up32) > limit, limit * jnp.sign(up32), up32)
        joined = gate32 * jax.nn.sigmoid(clamped.alpha * gate32) * (up32 + 1)
        return joined.astype(gate.dtype)

    @staticmethod
    def describe(config: ModelConfig, tokens_per_device: int | None) -> str:
        sizes = _sizes(config)
        text = f"{sizes.num_chosen} of {sizes.num_experts} experts"
        if sizes.shared_size is not None:
            text += " and a shared one"
        if sizes.kernel == "mosaic":
            text += " in Mosaic kernels"
        # Three matrices of each expert, against a token's input and output for each of its experts
        least = 3 * sizes.num_experts * sizes.size // (2 * sizes.num_chosen)
        if tokens_per_device is not None and tokens_per_device < least:
            text += (
                f" (below {least:,} tokens per device, gathering their weights sends more than an "
                f"exchange of tokens would; there are {tokens_per_device:,})"
            )
        return text

    @staticmethod
    def has_kept_products(config: ModelConfig) -> bool:
        return _sizes(config).shared_size is not None

    @staticmethod
    def tile_width(config: ModelConfig) -> int:
        """Gradients of all places, of which a third may be empty (`tiled.choose_tiles`), and of
        slots in the order of tokens; with kernels, all that places have, inputs and gradients."""
        sizes = _sizes(config)
        per_slot = 5 * config.hidden_size / 2
        if sizes.kernel != "xla":
            per_slot = 4 * config.hidden_size + 6 * sizes.size
        return int(sizes.num_chosen * per_slot) + 4 * (sizes.shared_size or 0)

    @staticmethod
    def active_fraction(config: ModelConfig, param: Parameter) -> float:
        sizes = _sizes(config)
        return 1.0 if param.num_experts is None else sizes.num_chosen / sizes.num_experts


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


def _sizes(config: ModelConfig) -> ExpertsConfig:
    assert config.experts is not None, "layers with experts need their sizes"
    return config.experts


_EXPERT_WEIGHTS = (
    *("gate", "up", "down", "gate_bias", "up_bias", "down_bias"),
    *("gate_up_a", "gate_b", "up_b", "down_a", "down_b"),
)
"""Attributes with a weight of each expert; those of adapters end with `_a` and `_b`."""


def _declare_adapter(lora: Lora | None, *weights: nnx.Param) -> list[nnx.Param | None]:
    """Matrices of the adapter of a tensor: A, and a B for each of the weights that share it."""
    params: list[Parameter] = [weight.param for weight in weights]
    first = params[0]
    tensor = first.adapted_tensor
    if lora is None or tensor is None or tensor not in lora.target_parameters:
        return [None, *(None for _ in params)]
    name = lora.name_module(tensor)
    E = first.num_experts
    dim_in = first.shape[-1]
    a = Parameter(
        shape=(*first.shape[:1], lora.rank, dim_in),
        hf_name=f"{name}.lora_A.weight",
        num_experts=E,
        expert_layout="rows",
        std=(3 * dim_in) ** -0.5,
        is_adapter=True,
    )
    matrices = [a] + [
        Parameter(
            shape=(*param.shape[:-1], lora.rank),
            hf_name=f"{name}.lora_B.weight",
            hf_rows=param.adapted_rows,
            num_experts=E,
            expert_layout="columns",
            is_adapter=True,
        )
        for param in params
    ]
    return [declare_param(matrix) for matrix in matrices]


def _find_adapted_rows(sizes: ExpertsConfig) -> tuple[RowGroups, RowGroups]:
    """Rows of gate and of up in transformers' tensor of both."""
    if sizes.is_transposed:
        return RowGroups(0, 1, 2), RowGroups(1, 1, 2)
    F = sizes.size
    return RowGroups(0, F, 2 * F), RowGroups(F, F, 2 * F)


def _value(param: nnx.Param | None) -> Array | None:
    return None if param is None else param[...]
