"""Configuration of blocks that only some families have, and names of norms in files."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormNames:
    """Names of a layer's norms in Hugging Face's files; None: there is no norm at this place."""

    pre_attention: str | None = "input_layernorm"
    post_attention: str | None = None
    """Norm of attention's output, before it is added to the residual."""
    pre_mlp: str | None = "post_attention_layernorm"
    post_mlp: str | None = None


LLAMA_NORMS = NormNames()
"""Norms before attention and before the MLP."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNetNames:
    """Names of a delta net's weights in Hugging Face's files, after `linear_attn.`."""

    qkv: tuple[str, ...] = ("in_proj_qkv",)
    """Projections to queries, keys and values: one for all of them, or one for each. Projections
    with the same name, also of the following, have rows of each key head in one tensor."""
    filters: tuple[str, ...] = ("conv1d",)
    """Filters of the convolution, in the same order; one for all, or one for each."""
    gate: str = "in_proj_z"
    decay: str = "in_proj_a"
    strength: str = "in_proj_b"
    norm: str = "norm"
    out: str = "out_proj"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNetConfig:
    """Gated delta nets, and what differs in the layers that have them."""

    num_key_heads: int
    num_heads: int
    """Number of value heads, a multiple of the key heads: each key head serves several."""
    key_size: int
    """Elements of a key or query of a head."""
    value_size: int
    """Elements of a value of a head."""
    filter_size: int
    """Tokens that the convolution sees, including the token itself."""
    strength_scale: float = 1.0
    """Factor on the sigmoids that are the strengths. Strengths up to 2 allow negative eigenvalues
    of a state's change (OLMo Hybrid)."""
    norm_eps: float | None = None
    """Epsilon of the norm of each head; None: that of the model's other norms."""
    names: DeltaNetNames = DeltaNetNames()
    norm_names: NormNames = LLAMA_NORMS
    """Names of the norms of the layers with delta nets."""
    decay_range: tuple[float, float] = (0.01, 16.0)
    """Range of exp(A_log) of random weights, which is uniform."""
    step_range: tuple[float, float] | None = None
    """Range of the softplus of random dt_bias, whose logarithm is uniform; None: dt_bias is 1."""
    kernel: str = "xla"
    """Name of the kernel of the delta rule: see `delta_rule.kernels`."""

    @property
    def num_channels(self) -> int:
        """Elements of all queries, keys and values of a token."""
        keys = 2 * self.num_key_heads * self.key_size
        return keys + self.num_heads * self.value_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Names of the weights of experts in Hugging Face's files, in which `{expert}`
    stands for the number of an expert with a tensor of its own."""

    router: str = "mlp.gate.weight"
    router_bias: str | None = None
    """Bias of the router's logits; None: there is none."""
    expert_scale: str | None = None
    """Factors on each expert's weights (Gemma 4); None: there are none."""
    correction: str | None = None
    """Numbers that are added to an expert's score for the choice only (GLM-4.5); None: none."""
    gate: str = "mlp.experts.{expert}.gate_proj.weight"
    """Name of the first projection; if it is also `up`, the tensor has the rows of both."""
    up: str = "mlp.experts.{expert}.up_proj.weight"
    down: str = "mlp.experts.{expert}.down_proj.weight"
    shared: str = "mlp.shared_expert"
    """Module of the expert that all tokens have."""
    shared_gate: str | None = "mlp.shared_expert_gate"
    """Projection to the number by whose sigmoid its output is multiplied; None: there is none."""
    module: str = "mlp.experts"
    """Module of a layer in transformers that has the matrices of all experts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClampedGate:
    """Function of gate and up in place of activation(gate) * up (gpt-oss):
    gate * sigmoid(alpha * gate) * (up + 1), after limiting gate to at most `limit`, and up to
    at most `limit` and at least -`limit`."""

    alpha: float
    limit: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Layers whose feed-forward is a choice of experts for each token."""

    num_experts: int
    num_chosen: int
    """Number of experts of a token."""
    size: int
    """Elements between the two matrices of an expert."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Function of the router's logits."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    """Number of groups of experts in which a token's experts are: those with the largest sums of
    two scores (GLM-4.5)."""
    is_normalized: bool = True
    """True if the weights of a token's experts are divided by their sum."""
    weight_scale: float = 1.0
    """Factor on these weights (GLM-4.5)."""
    kernel: str = "xla"
    """Name of the kernel of the matrix products: see `experts.kernels`."""
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    """Factors of the router's losses (`experts.routing`)."""
    clamped_gate: ClampedGate | None = None
    has_bias: bool = False
    """True if each expert's projections have biases."""
    router_file_dtype: str | None = None
    """dtype of the router in exported files; None: that of the export."""
    is_transposed: bool = False
    """True if files have matrices as [in, out], and rows of gate and up alternate (gpt-oss)."""
    names: ExpertNames = ExpertNames()
    shared_size: int | None = None
    """Elements between the matrices of an expert that all tokens have; None: there is none."""
    has_own_names: bool = True
    """True if PEFT takes the last parts of the names of experts' matrices, such as gate_proj, for
    theirs wherever they occur (Qwen3, not Qwen3.5). Shared experts and MLPs then have no adapters,
    which PEFT could not load."""

    @property
    def adapted_tensors(self) -> tuple[str, ...]:
        """Names of the tensors that PEFT adapts, each of all experts, in the module's order."""
        return tuple(f"{self.names.module}.{name}" for name in ("gate_up_proj", "down_proj"))

    @property
    def has_losses(self) -> bool:
        """True if the router has losses of its own."""
        return self.aux_loss_coef > 0 or self.z_loss_coef > 0
