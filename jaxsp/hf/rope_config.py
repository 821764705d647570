"""Fields of `model.rope`, which change the rotary position embedding of a model."""

from typing import Annotated, Any, Literal

import pydantic

from jaxsp.config.fields import ConfigSection, PositiveCount, PositiveFloat, with_examples

_Factor = Annotated[float, pydantic.Field(ge=1, allow_inf_nan=False)]
_NonNegative = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
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
    mscale: Annotated[_NonNegative | None, with_examples(1.0)] = None
    """Weight in yarn's factor of cosines and sines; it needs mscale_all_dim."""
    mscale_all_dim: Annotated[_NonNegative | None, with_examples(1.0)] = None
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
        given.pop("type", None)
        given.pop("longrope_factors", None)
        if "theta" in given:
            given["rope_theta"] = given.pop("theta")
        return given
