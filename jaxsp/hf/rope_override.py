"""Context extension: `model.rope` and `model.max_position_embeddings` change a config.json.

The changed fields are the model's config.json from then on: in checkpoints and in the export, which
transformers and vLLM read. Changing them again gives the same fields.
"""

import dataclasses
from typing import Any

from jaxsp.config.rope_schema import RopeConfig
from jaxsp.config.schema import ModelSourceConfig
from jaxsp.core import errors
from jaxsp.core.errors import UserError
from jaxsp.hf import rope_fields, rope_forms, rope_types
from jaxsp.hf.json_values import format_value
from jaxsp.hf.rope_forms import FULL_ATTENTION, RopeSupport

_EXTENDING = ("type", "factor", "original_max_position_embeddings")
"""Fields of model.rope that determine how many positions the model has."""


def apply(
    fields: dict[str, Any],
    model: ModelSourceConfig,
    *,
    resolved: dict[str, Any],
    support: RopeSupport,
) -> dict[str, Any]:
    """Returns the fields of a config.json with the changes of the config.

    Args:
        fields: valid fields of a config.json.
        resolved: the fields with transformers' defaults, with `rope_parameters`.
        support: rotary features of the model's family.
    Raises: UserError for fields that do not fit the type or the family.
    """
    if model.rope is None:
        if model.max_position_embeddings is None:
            return fields
        return fields | {"max_position_embeddings": model.max_position_embeddings}
    groups = resolved["rope_parameters"]
    is_nested = rope_forms.is_nested(groups, support)
    own = groups[FULL_ATTENTION] if is_nested else groups
    change = _Change(
        rope=model.rope,
        own={name: value for name, value in own.items() if value is not None},
        own_positions=resolved["max_position_embeddings"],
        positions=model.max_position_embeddings,
        support=support,
    )
    problems = change.find_problems()
    if problems:
        raise UserError(problems)
    group = change.make_group()
    changed = {name: value for name, value in fields.items() if name not in rope_forms.FIELDS}
    changed["rope_parameters"] = {**groups, FULL_ATTENTION: group} if is_nested else group
    if support.has_outside_original and rope_fields.ORIGINAL in group:
        changed[rope_fields.ORIGINAL] = group[rope_fields.ORIGINAL]
    return changed | {"max_position_embeddings": change.find_positions(group)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Change:
    """Change of one group of `rope_parameters`."""

    rope: RopeConfig
    own: dict[str, Any]
    """The model's own group, without nulls."""
    own_positions: int
    """The model's own max_position_embeddings."""
    positions: int | None
    """model.max_position_embeddings."""
    support: RopeSupport

    @property
    def own_type(self) -> str:
        return self.own["rope_type"]

    @property
    def new_type(self) -> str:
        return self.rope.type or self.own_type

    @property
    def original(self) -> int:
        """Number of positions before the extension."""
        if self.rope.original_max_position_embeddings is not None:
            return self.rope.original_max_position_embeddings
        if self.own_type == self.new_type and rope_fields.ORIGINAL in self.own:
            return self.own[rope_fields.ORIGINAL]
        if self.own_type == self.new_type == "linear":
            return round(self.own_positions / self.own["factor"])
        return self.own_positions

    def find_problems(self) -> list[str]:
        """Fields that the type or the family does not have, and missing ones."""
        name_of_type = self.new_type
        if name_of_type not in self.support.types:
            return [
                f"model.rope.type = {name_of_type}: is not implemented in this family's code in "
                f"transformers. Use {errors.format_choices(self.support.types)}."
            ]
        rope_type = rope_types.TYPES[name_of_type]
        given = self.rope.given_fields()
        allowed = {*rope_type.fields, "rope_theta"}
        if not self.support.has_partial_rotary:
            allowed.discard("partial_rotary_factor")
        if name_of_type == "linear":  # determines max_position_embeddings
            allowed.add(rope_fields.ORIGINAL)
        if name_of_type == "longrope":
            allowed.add("longrope_factors")
        problems = [
            f"model.rope.{name} = {format_value(value)}: is not a field of {name_of_type}"
            f"{'' if self.rope.type else ', the type of the model'}. "
            f"{self._suggest(name)}"
            for name, value in self.rope.model_dump(mode="json", exclude_none=True).items()
            if name not in ("type", "theta") and name not in allowed
        ]
        group = given if self.rope.type else self.own | given
        for name in rope_type.required:
            if name in group or name == rope_fields.ORIGINAL:
                continue
            if name == "factor" and self.positions is not None:
                continue
            problems.append(f"model.rope.{name}: missing. {rope_fields.EXAMPLES[name]}")
        if name_of_type == "yarn" and self.positions is None and "factor" not in group:
            problems.append(
                "model.rope.factor: missing. Set it, for example model.rope.factor=4, or set "
                "model.max_position_embeddings."
            )
        return problems

    def _suggest(self, name: str) -> str:
        """Suggestion for a field that the type does not have."""
        types = ["longrope"] if name == "longrope_factors" else []
        if name != "partial_rotary_factor":
            types += [kind for kind, entry in rope_types.TYPES.items() if name in entry.fields]
        types = [kind for kind in ("yarn", "longrope", "llama3") if kind in types]
        types = [kind for kind in types if kind in self.support.types]
        return f"Leave it out, or set model.rope.type={types[0]}." if types else "Leave it out."

    def make_group(self) -> dict[str, Any]:
        """The changed group. Its factor and original range are never left out."""
        given = self.rope.given_fields()
        kept = self.own
        if self.rope.type is not None:
            names = ("rope_theta", "partial_rotary_factor", *self.support.extra_fields)
            kept = {name: self.own[name] for name in names if name in self.own}
        group = {**kept, "rope_type": self.new_type, **given}
        group.pop("type", None)
        fields = rope_types.TYPES[self.new_type].fields
        if rope_fields.ORIGINAL in fields:
            group[rope_fields.ORIGINAL] = self.original
        else:
            group.pop(rope_fields.ORIGINAL, None)
        if self.new_type in ("yarn", "linear") and "factor" not in group:
            assert self.positions is not None, "checked before"
            group["factor"] = max(1.0, self.positions / self.original)
        if self.rope.longrope_factors is not None:
            divisors = group[f"{self.rope.longrope_factors}_factor"]
            group |= {"short_factor": divisors, "long_factor": divisors}
        return group

    def find_positions(self, group: dict[str, Any]) -> int:
        """max_position_embeddings after the change."""
        if self.positions is not None:
            return self.positions
        given = self.rope.model_dump(exclude_none=True)
        is_extended = any(name in given for name in _EXTENDING)
        if is_extended and rope_types.TYPES[self.new_type].extends_range and "factor" in group:
            return round(group["factor"] * self.original)
        return self.own_positions
