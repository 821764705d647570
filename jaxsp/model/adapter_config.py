"""Config section of adapters (LoRA)."""

from collections.abc import Iterator
from typing import Annotated, Literal

import pydantic

from jaxsp.config import fields
from jaxsp.config.fields import (
    HERE,
    ConfigSection,
    Fraction,
    PositiveCount,
    PositiveFloat,
    with_examples,
)

SAVED_MODULES = {"embed_tokens": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
"""Tensors of `adapter.modules_to_save`, by name."""


class AdapterConfig(ConfigSection):
    """LoRA: small trained matrices beside the frozen matrices of every layer."""

    type: Literal["none", "lora", "dora"] = "none"
    """none: all weights are trained. lora: y = W x + scale B A x, where W is frozen. dora: each row
    of W + scale B A is also divided by its norm and multiplied by a trained magnitude. Adapters are
    trained in float32; frozen weights have no gradients and no optimizer state."""
    rank: Annotated[PositiveCount | None, with_examples(16)] = None
    """Rank of the matrices. null: 16, or that of adapter.source."""
    alpha: Annotated[PositiveFloat | None, with_examples(32.0)] = None
    """Numerator of the scale, alpha / rank. null: twice the rank, or that of adapter.source."""
    use_rslora: Annotated[bool | None, with_examples(True)] = None
    """Scale alpha / sqrt(rank) instead of alpha / rank. null: false, or that of adapter.source."""
    dropout: Fraction = 0.0
    """Fraction of the elements of A's input that are set to 0 in training, at random. The same
    elements on every mesh. Not for dora."""
    targets: Annotated[
        Literal["all-linear"] | tuple[str, ...] | None,
        with_examples("all-linear", "[q_proj, v_proj]"),
    ] = None
    """Projections of a layer with an adapter, by the names of Hugging Face's files: q_proj,
    k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj in most families. Those of experts are
    target_parameters; routers have no adapters. []: none. null: all-linear, or those of
    adapter.source."""
    target_parameters: Annotated[
        tuple[str, ...] | None,
        with_examples("[mlp.experts.gate_up_proj, mlp.experts.down_proj]", strict=False),
    ] = None
    """Tensors of experts with an adapter, by their names in transformers, as in PEFT: each expert
    has matrices of its own, and gate and up of an expert share one adapter. Not for dora, nor with
    dropout. null: none, or those of adapter.source. With targets: [], experts only."""
    modules_to_save: Annotated[
        tuple[Literal["embed_tokens", "lm_head"], ...],
        with_examples("[embed_tokens, lm_head]", strict=False),
    ] = ()
    """Embedding and head, if they are trained too, as whole float32 weights."""
    quantization: Literal["none", "int8", "nf4"] = "none"
    """Format of the frozen matrices of the layers except routers, which are dequantized layer by
    layer. int8: 8 bits, one scale per row. nf4: 4-bit codes with a scale for each 64 weights
    (QLoRA). none: model.compute_dtype."""
    source: Annotated[str | None, with_examples("adapters/first", min_length=1)] = None
    """Folder or hub name of a PEFT adapter to start from. null: a new adapter."""

    _expand_home = pydantic.field_validator("source")(fields.expand_home)

    def find_problems(self) -> Iterator[str]:
        if self.type == "dora" and self.dropout:
            yield (
                f"{self.show('dropout')}: must be 0 with {HERE}.type = dora. "
                f"Set {HERE}.type=lora, or {HERE}.dropout=0."
            )
        for name, field in type(self).model_fields.items() if self.type == "none" else ():
            if name != "type" and getattr(self, name) not in (field.default, None, ()):
                yield (
                    f"{self.show(name)}: has no effect, because {HERE}.type is none. "
                    f"Set {HERE}.type=lora, or leave it out."
                )

    @pydantic.field_validator("targets", mode="before")
    @classmethod
    def _check_targets(cls, value: object) -> object:
        if value is None or value == "all-linear":
            return value
        if not isinstance(value, list | tuple):
            raise ValueError("must be all-linear, or a list such as [q_proj, v_proj]")
        return tuple(value)
