"""Config of the model: weights, tokenizer, dtypes, RoPE and context length."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pydantic

from jaxsp.config import fields
from jaxsp.config.fields import (
    HERE,
    ConfigSection,
    NonNegativeFloat,
    PositiveCount,
    PositiveFloat,
    with_examples,
)

_Factor = Annotated[float, pydantic.Field(ge=1, allow_inf_nan=False)]
_Theta = Annotated[float, pydantic.Field(gt=1, allow_inf_nan=False)]
_Fraction = Annotated[float, pydantic.Field(gt=0, le=1, allow_inf_nan=False)]
_Divisors = tuple[PositiveFloat, ...]


class RopeConfig(ConfigSection):
    """Changes of the model's rotary position embedding, to extend its context.

    Fields with the same name in config.json have the same meaning there.
    """

    type: Annotated[
        Literal["default", "linear", "llama3", "yarn", "longrope"] | None, with_examples("yarn")
    ] = None
    """Type, rope_type in config.json. A new type replaces all fields of the model's own, except
    theta and partial_rotary_factor. null: the model's own, in which the given fields are
    replaced."""
    factor: Annotated[_Factor | None, with_examples(4.0)] = None
    """Extended range divided by the original one, for linear, llama3, yarn and longrope. null with
    yarn or linear: model.max_position_embeddings divided by the original range."""
    theta: Annotated[_Theta | None, with_examples(8e6)] = None
    """Base of the frequencies, rope_theta in config.json."""
    original_max_position_embeddings: Annotated[PositiveCount | None, with_examples(32768)] = None
    """Range before the extension, for llama3, yarn and longrope. null: that of the model's own rope
    if it has this type; otherwise the model's max_position_embeddings."""
    partial_rotary_factor: Annotated[_Fraction | None, with_examples(0.75)] = None
    """Fraction of each head that is rotated, for families that have it (phi3, glm4)."""
    attention_factor: Annotated[PositiveFloat | None, with_examples(1.2)] = None
    """Factor of cosines and sines, for yarn and longrope. null: from the factor."""
    beta_fast: Annotated[PositiveFloat | None, with_examples(32.0)] = None
    """Rotations in the original range from which yarn does not scale a frequency. null: 32."""
    beta_slow: Annotated[PositiveFloat | None, with_examples(1.0)] = None
    """Rotations in the original range below which yarn divides a frequency by the factor. null:
    1."""
    mscale: Annotated[NonNegativeFloat | None, with_examples(1.0)] = None
    """Weight in yarn's factor of cosines and sines; it needs mscale_all_dim."""
    mscale_all_dim: Annotated[NonNegativeFloat | None, with_examples(1.0)] = None
    """Weight in the divisor of yarn's factor of cosines and sines; it needs mscale."""
    truncate: Annotated[bool | None, with_examples(False)] = None
    """Rounds the ends of yarn's ramp to whole pairs. null: true."""
    low_freq_factor: Annotated[PositiveFloat | None, with_examples(1.0)] = None
    """Rotations in the original range below which llama3 divides a frequency by the factor."""
    high_freq_factor: Annotated[PositiveFloat | None, with_examples(4.0)] = None
    """Rotations in the original range from which llama3 does not scale a frequency."""
    short_factor: Annotated[_Divisors | None, with_examples([1.0, 1.05, 1.1], strict=False)] = None
    """Divisor of each frequency in short rows, for longrope."""
    long_factor: Annotated[_Divisors | None, with_examples([1.0, 4.0, 16.0], strict=False)] = None
    """Divisor of each frequency in long rows, for longrope."""
    longrope_factors: Annotated[Literal["short", "long"] | None, with_examples("long")] = None
    """Factors that longrope has for all rows; the export then has them in both lists.
    null: long if data.row_tokens is above original_max_position_embeddings, otherwise short."""

    def given_fields(self) -> dict[str, Any]:
        """The fields that are not null, as in config.json; without type and longrope_factors."""
        given = self.model_dump(mode="json", exclude_none=True)
        names = {"theta": "rope_theta"}
        own = ("type", "longrope_factors")
        return {names.get(name, name): x for name, x in given.items() if name not in own}


class ModelSourceConfig(ConfigSection):
    """Model, tokenizer and dtype."""

    source: Annotated[str | None, with_examples("Qwen/Qwen3-0.6B", min_length=1)] = None
    """Hugging Face folder, or name on the hub: config.json, safetensors weights and tokenizer. Of a
    multimodal model (gemma3, gemma4, mistral3, qwen3_5, muse_glimmer), the text model is trained.
    Set this or config."""
    config: Annotated[
        dict[str, Any] | None, with_examples("{model_type: llama, hidden_size: 256}")
    ] = None
    """Fields of a Hugging Face config.json, for a model with random weights. They include
    model_type, such as llama or qwen3."""
    tokenizer: Annotated[str | None, with_examples("bytes")] = None
    """Tokenizer: `bytes` (256 bytes and an end token), or a folder or hub name. Its tokenizer.json
    is used also where transformers' AutoTokenizer would change it. null: that of
    model.source. Records with the format tokens need none."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of activations, and of weights when they are sent and gathered. Master weights are
    float32."""
    rope: Annotated[RopeConfig | None, with_examples("{type: yarn, factor: 4}")] = None
    """Changes of the rotary position embedding, to extend the context. They replace fields of the
    model's config.json, also in checkpoints and in the export. In models whose layers have
    different embeddings (Gemma 3, OLMo 3), they change the layers that attend to whole documents.
    null: the model's own."""
    max_position_embeddings: Annotated[PositiveCount | None, with_examples(131072)] = None
    """Number of positions that the model has after training, which replaces that of its
    config.json. null: factor times the original range if model.rope extends it; otherwise the
    model's own. Longer documents are trained on too; the banner has a note."""

    linear_dtype: Annotated[Literal["float8", "float8_all"] | None, with_examples("float8")] = None
    """float8: linear layers multiply activations, and gradients of activations, in 8-bit floats
    (e4m3) with a scale for each token: up to twice as fast on Hopper, Ada and Blackwell GPUs, with
    a rounding error of a few percent in each product. Matrices are gathered in 8 bits. Gradients of
    matrices, embedding, head, experts and adapters stay in compute_dtype, and master weights in
    float32. float8_all: also the products that are gradients of matrices, with float32 sums. null:
    all in compute_dtype."""
    delta_net_kernel: Literal["auto", "jla", "xla"] = "auto"
    """Kernel of gated delta nets. jla: kernels of the package jax-linear-attention for Hopper GPUs
    in bfloat16, with heads of 64 or 128 (pip install jaxsp[hopper]). xla: plain XLA, on any device.
    auto: jla where it runs, otherwise xla. A run compares jla with the recurrence before the first
    step; with auto, it uses xla if jla is wrong. A resumed run keeps the kernel if it can."""
    experts_kernel: Literal["auto", "mosaic", "xla"] = "auto"
    """Kernel of experts' matrix products. mosaic: kernels for Hopper GPUs in bfloat16, with jax
    0.11.1 or later. xla: a loop, on any device. auto: mosaic where it runs, otherwise xla. A run
    checks mosaic against xla before the first step."""
    router_aux_loss_coef: Annotated[NonNegativeFloat | None, with_examples(0.001)] = None
    """Factor of the load-balancing loss of experts' routers, that of transformers for batches of
    one row: a mean over rows, which is the same on every mesh. null: that of config.json if it has
    output_router_logits: true, otherwise 0. Routers that are balanced by a bias have no such loss
    (glm4_moe)."""
    router_z_loss_coef: NonNegativeFloat = 0.0
    """Factor of the z-loss of experts' routers, the mean square of their logits' log-sum-exp."""

    _expand_home = pydantic.field_validator("source", "tokenizer")(fields.expand_home)

    def find_problems(self) -> Iterator[str]:
        if self.source is None and self.config is None:
            yield (
                f"{HERE}.source, {HERE}.config: missing. Set one of them for the model, for "
                f"example {HERE}.source=Qwen/Qwen3-0.6B."
            )
        elif self.source is not None and self.config is not None:
            yield (
                f"{self.show('source')}, {self.show('config')}: only one of them may be set. "
                f"Write {HERE}.source=null or {HERE}.config=null."
            )
