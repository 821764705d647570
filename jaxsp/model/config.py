"""Configuration of a decoder: the fields in which model families differ."""

import dataclasses

from jaxsp.attention import ScoreConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1's scaling of low RoPE frequencies (rope_type llama3).

    The fields are those of a Hugging Face config.json.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding of a layer."""

    frequencies: tuple[float, ...]
    """Radians per position of each rotated pair of a head's elements."""
    scale: float = 1.0
    """Factor of cosine and sine (attention factor of YaRN and LongRoPE)."""
    description: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Llama-style decoder. A family is a choice of these fields, never a subclass."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_llama3: Llama3Rope | None
    qkv_bias: bool
    output_bias: bool
    """True if attention's output projection has a bias."""
    mlp_bias: bool
    qk_norm: bool
    """True if each head of q and k has an RMS norm before RoPE (Qwen3)."""
    sliding_window: int | None
    """Number of tokens that a token attends to in every layer, including itself (Mistral 7B v0.1:
    4096).

    None: all tokens before it in its segment.
    """
    tie_embeddings: bool
    """True if the head is the embedding; it then has no tensor of its own."""
    initializer_range: float
    """Standard deviation of randomly initialized matrices."""

    @property
    def layer_scores(self) -> tuple[ScoreConfig, ...]:
        """Attention scores of each layer."""
        return (ScoreConfig(window=self.sliding_window),) * self.num_layers
