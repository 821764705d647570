"""What tells one decoder from another."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1's stretching of slow rotations (rope_type llama3): fields as in a Hugging Face config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama kind; a family is a choice of these fields, never a subclass."""

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
    """Of attention's output projection."""
    mlp_bias: bool
    qk_norm: bool
    """RMS norm over each head of q and k, before the rotation (Qwen3)."""
    sliding_window: int | None
    """How many tokens a token sees, itself among them, in every layer (Mistral 7B v0.1: 4096); None: its whole piece so far."""
    tie_embeddings: bool
    """The head is the embedding; there is no tensor for it."""
    initializer_range: float
    """Standard deviation of random matrices."""
