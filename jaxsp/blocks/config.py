"""Configuration of a decoder and its blocks: the fields in which model families differ, with names
of weights in files."""

import dataclasses
import functools
import itertools
from typing import Literal, NamedTuple

from jaxsp.attention.kernels.kernel import ScoreConfig


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding of a layer."""

    frequencies: tuple[float, ...] = dataclasses.field(repr=False)
    """Radians per position of each rotated pair of a head's elements, computed in float64. Fewer
    than head_dim / 2: only the first elements are rotated. Empty, or all 0: none."""
    scale: float = 1.0
    """Factor on cosines and sines (the attention factor of YaRN and LongRoPE)."""
    description: str
    """For messages. Example: `yarn, theta 1,000,000, factor 4 over 32,768 positions`."""


ATTENTION = "attention"
"""Name of the mixer that computes softmax attention."""


DELTA_NET = "delta_net"
"""Name of the mixer that is a gated delta net."""


MLP = "mlp"
"""Name of the feed-forward that is the same for all tokens."""


EXPERTS = "experts"
"""Name of the feed-forward that is a choice of experts."""


MLP_AND_EXPERTS = "mlp_and_experts"
"""Name of the feed-forward that has both."""


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class LayerSizes:
    """Fields of `ModelConfig` that are others in the layers of a kind. Either all layers of a model
    have sizes of their own, or none."""

    name: str
    """Name of the kind in the parameter table. Kinds are sorted by it."""
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    has_value_projection: bool = True
    stored_keys: str | None = None
    shared_keys: str | None = None

    @property
    def heads(self) -> tuple[int, int]:
        """Number of K/V heads, and size of a head."""
        return self.num_kv_heads, self.head_dim


class LayerKind(NamedTuple):
    """Blocks of a layer and their sizes. Weights of layers of one kind are stacked."""

    mixer: str
    """Name of the part in which the tokens of a row meet: see `blocks.registry.MIXERS`."""
    feed_forward: str
    """Name in `blocks.registry.FEED_FORWARDS`."""
    sizes: LayerSizes | None = None
    """None: those of the model."""

    @property
    def name(self) -> str:
        """Name of the kind's weights in the parameter table, if there are several kinds."""
        parts = [self.mixer, self.feed_forward]
        return "_".join(parts if self.sizes is None else [*parts, self.sizes.name])


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The fields in which layers of one model differ."""

    window: int | None = None
    """Number of tokens that a token attends to, including itself; None: all before it in its
    segment."""
    rope: Rope | None
    """None for a layer without attention."""
    mixer: str = "attention"
    feed_forward: str = MLP
    sizes: LayerSizes | None = None

    @property
    def kind(self) -> LayerKind:
        return LayerKind(self.mixer, self.feed_forward, self.sizes)


class LayerSegment(NamedTuple):
    """Layers whose kinds repeat: `first` to `first + repeats * len(period) - 1`."""

    first: int
    period: tuple[LayerKind, ...]
    repeats: int

    @property
    def num_layers(self) -> int:
        return self.repeats * len(self.period)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryScale:
    """Queries grow with their position in the segment: 1 + beta * log(1 + position // original).

    Source: Ministral 3's published code (`llama_4_scaling_beta`).
    """

    beta: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters beside the projections of every layer: y = W x + scale * B (A x).

    An adapted tensor of experts has an A and a B for each expert. Gate and up are one tensor, so
    they have one A.

    With `is_dora`, each row of W + scale * B A is divided by its norm, and multiplied by a trained
    magnitude; the norm counts as a constant in the backward pass.

    Source: Hu et al. 2021 (LoRA); Liu et al. 2024 (DoRA), sections 4.1 and 4.3.
    """

    rank: int
    scale: float
    targets: tuple[str, ...]
    """Names of the adapted projections in a layer. Example: `self_attn.q_proj`."""
    target_parameters: tuple[str, ...] = ()
    """Those of `ExpertsConfig.adapted_tensors` that are adapted, in that order."""
    is_dora: bool = False
    dropout: float = 0.0
    """Fraction of the elements of A's input that are set to 0 in training."""

    def name_module(self, tensor: str) -> str:
        """Module of the adapter of one of `target_parameters`, by PEFT's name.

        The adapter of a module's last tensor is around that of the one before it.
        """
        module = tensor.rpartition(".")[0]
        return module if tensor == self.target_parameters[-1] else f"{module}.base_layer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Llama-style decoder. A family is a choice of these fields, never a subclass."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Elements between the matrices of an MLP; 0 if no layer has one."""
    layers: tuple[LayerConfig, ...]
    """One entry for each layer."""
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    """Norm: x / rms(x) * w, the same with 1 + w (Gemma), or with the mean subtracted (Cohere)."""
    norm_eps: float
    post_norm_eps: float | None = None
    """Epsilon of the norms of the outputs of attention and MLP; None: norm_eps."""
    last_norm: Literal["rms"] | None = None
    """Norm after the last layer, if it differs from `norm`."""
    norm_names: NormNames = LLAMA_NORMS
    qk_norm: Literal["none", "head", "head_without_weight", "projection"] = "none"
    """Norm of q and k before RoPE: none, of each head (Qwen3), the same without a weight (Muse
    Glimmer), or of all heads together (OLMo)."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation of the MLP's gate; gelu_tanh is the approximation by tanh."""
    is_parallel: bool = False
    """True if attention and MLP have the same input, and their outputs are added (Cohere)."""
    has_value_norm: bool = False
    """True if values go through a norm of each head without a weight (Gemma 4)."""
    has_value_projection: bool = True
    """False if values are the key projection's results, before their norm and RoPE (Gemma 4)."""
    stored_keys: str | None = None
    """Name of the keys and values of a kind's only layer, which later layers share; None: they
    are its own."""
    shared_keys: str | None = None
    """Name of the keys and values of another layer that attention has; None: its own."""
    has_layer_scale: bool = False
    """True if a layer's output, with the residual, is multiplied by a number of its own that is
    not trained (Gemma 4)."""
    per_layer_size: int = 0
    """Elements of an input of each layer besides the residual, which is made of a token's row in a
    table of the layer and a projection of the first layer's input (Gemma 4); 0: there is none."""
    per_layer_vocab_size: int = 0
    """Rows of these tables."""
    qkv_bias: bool = False
    output_bias: bool = False
    """True if attention's output projection has a bias."""
    mlp_bias: bool = False
    linear_dtype: str | None = None
    """Dtype of products of linear layers, such as `float8`; None: the compute dtype."""
    has_fused_qkv: bool = False
    """True if q, k and v are one tensor in Hugging Face's files (Phi-3)."""
    has_fused_gate_up: bool = False
    """True if gate and up are one tensor in Hugging Face's files (Phi-3, GLM-4)."""
    rope_interleaved: bool = False
    """True if RoPE rotates the pairs (2i, 2i + 1) instead of (i, i + half) (GLM-4, Cohere)."""
    query_scale: QueryScale | None = None
    attention_scale: float | None = None
    """Factor on products of q and k; None: head_dim ** -0.5."""
    attention_softcap: float | None = None
    """Limit c of attention scores, c * tanh(score / c); None: no limit (Gemma 2: 50)."""
    has_sinks: bool = False
    """True if each head has a learned score of a key with value 0 (gpt-oss)."""
    attention_gate: Literal["none", "q_proj", "gate_proj"] = "none"
    """Projection of the gate by whose sigmoid attention's output is multiplied: the query
    projection, which has it beside each head's query (Qwen3.5), or its own (Muse Glimmer)."""
    has_embedding_norm: bool = False
    """True if embeddings go through an RMS norm without a weight (Muse Glimmer)."""
    embedding_scale: float = 1.0
    """Factor on embeddings, rounded to the compute dtype (Gemma: hidden_size ** 0.5)."""
    residual_scale: float = 1.0
    """Factor on the outputs of attention and MLP before they are added (Granite)."""
    logit_scale: float = 1.0
    """Factor on logits (Cohere, Granite)."""
    logit_softcap: float | None = None
    """Limit c of logits, c * tanh(logit / c); None: no limit (Gemma 2: 30)."""
    padding_id: int | None = None
    """Token whose embedding gets no gradient from inputs (torch's `padding_idx`); None: no such
    token. If the embedding is also the head, it gets the head's gradient."""
    tie_embeddings: bool
    """True if the head is the embedding; it then has no tensor of its own."""
    has_scores: bool = False
    """True for a reward model: its head is a single row, whose product is a score."""
    initializer_range: float
    """Standard deviation of randomly initialized matrices."""
    delta_net: DeltaNetConfig | None = None
    """Sizes of the layers whose mixer is a gated delta net; None: there are none."""
    experts: ExpertsConfig | None = None
    """Sizes of the layers whose feed-forward is experts; None: there are none."""
    lora: Lora | None = None
    teacher: "ModelConfig | None" = None
    """Model whose predictions the objective compares with; None: it has none, or the model without
    `lora`."""

    @property
    def num_logits(self) -> int:
        """Rows of the head."""
        return 1 if self.has_scores else self.vocab_size

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct kinds of the layers, in order of first use."""
        return tuple(dict.fromkeys(layer.kind for layer in self.layers))

    def of_kind(self, kind: LayerKind) -> "ModelConfig":
        """The model as the layers of a kind see it: with their sizes, and only these layers."""
        if kind.sizes is None:
            return self
        return _select_kind(self, kind)

    @functools.cached_property
    def segments(self) -> tuple[LayerSegment, ...]:
        """The layers in order, as few segments as a greedy search finds."""
        kinds = [layer.kind for layer in self.layers]
        segments: list[LayerSegment] = []
        first = 0
        while first < len(kinds):
            segments.append(_find_segment(kinds, first))
            first += segments[-1].num_layers
        return tuple(segments)

    @property
    def inner_loop(self) -> int:
        """Number of layers of the longest loop over layers of a kind inside a loop over periods; 0
        if there is none."""
        periods = [segment.period for segment in self.segments if len(segment.period) > 1]
        runs = (len(list(run)) for period in periods for _, run in itertools.groupby(period))
        return max((length for length in runs if length > 1), default=0)

    @property
    def attention_layers(self) -> tuple[LayerConfig, ...]:
        """The layers with attention."""
        return tuple(layer for layer in self.layers if layer.mixer == ATTENTION)

    @property
    def layer_scores(self) -> tuple[ScoreConfig, ...]:
        """Computation of attention's scores, for each layer with attention."""
        return tuple(
            ScoreConfig(
                scale=self.attention_scale,
                window=layer.window,
                softcap=self.attention_softcap,
                heads=None if layer.sizes is None else layer.sizes.heads,
            )
            for layer in self.attention_layers
        )

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct RoPEs of the layers, in order of first use."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))


@functools.lru_cache(maxsize=64)
def _select_kind(config: ModelConfig, kind: LayerKind) -> ModelConfig:
    assert kind.sizes is not None, "the caller checks it"
    sizes = {name: value for name, value in vars(kind.sizes).items() if name != "name"}
    layers = tuple(layer for layer in config.layers if layer.kind == kind)
    return dataclasses.replace(config, layers=layers, **sizes)


def _find_segment(kinds: list[LayerKind], first: int) -> LayerSegment:
    """The segment that covers most layers from `first` on, with the shortest period.

    A period of several layers must occur at least twice.
    """

    def repeats(length: int) -> int:
        period = kinds[first : first + length]
        count = 1
        while kinds[first + count * length : first + (count + 1) * length] == period:
            count += 1
        return count

    best = 1
    for length in range(2, (len(kinds) - first) // 2 + 1):
        count = repeats(length)
        if count > 1 and count * length > best * repeats(best):
            best = length
    return LayerSegment(first, tuple(kinds[first : first + best]), repeats(best))
