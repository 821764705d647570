"""Comparison of one mesh for all row lengths with a mesh for each, as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxsp.config import yaml_io
from jaxsp.config.schema import Config
from jaxsp.planner.cost import roofline
from jaxsp.planner.degree_sweep import DegreeChoice


def format_choices(
    one: DegreeChoice | None,
    several: DegreeChoice | None,
    *,
    config: Config,
    data: Mapping[int, Any] | None,
) -> str:
    """Formats the fastest choice with one degree, and with one per length.

    Args: data: rows of the config's data by length; None: lengths have equal numbers of tokens.
    """
    if several is None:
        return (
            "no mesh and strategy fits the rows of all lengths and has an estimated time "
            "(bfloat16 and cuDNN attention)"
        )
    weights = "an epoch of the data, without padding"
    if data is None:
        weights = "equal numbers of tokens in rows of each length (--data reads the actual ones)"
    lines = [f"estimated tokens/s for {weights}:"]
    if one is None:
        lines.append("  no mesh fits the rows of all lengths")
    else:
        lines.append(f"  one degree for all:    {_format_choice(one, config)}")
    lines.append(f"  one degree per length: {_format_choice(several, config)}")
    if one is not None:
        ratio = several.tokens_per_s / one.tokens_per_s
        lines.append(f"  a degree per length is {ratio:.2f} times as fast as one degree")
    for label, choice in (("one degree for all", one), ("one per length", several)):
        if choice is not None and choice.unpacked_tokens_per_s is not None:
            lines.append(
                f"  with one document per row and {label}: "
                f"{choice.unpacked_tokens_per_s:,.0f} tokens/s; packing is "
                f"{choice.tokens_per_s / choice.unpacked_tokens_per_s:.2f} times as fast"
            )
    low, high = roofline.LIKELY_RANGE
    lines.append(f"all are estimates; measured times are likely {low:g} to {high:g} times as long")
    return "\n".join(lines)


def _format_choice(choice: DegreeChoice, config: Config) -> str:
    """Formats the speed of a choice, in total and by row length, and the changes of the config."""
    speeds = ", ".join(
        f"{row_tokens:,}: {tokens_per_s:,.0f}"
        for row_tokens, tokens_per_s in choice.length_tokens_per_s.items()
    )
    changes = " ".join(list_changes(choice, config))
    return f"{choice.tokens_per_s:,.0f} (rows of {speeds}): {changes}"


def list_changes(choice: DegreeChoice, config: Config) -> Sequence[str]:
    """Lists the changes of a config that make a choice, as `key.path=value`."""
    missing = choice.degrees[max(choice.degrees)]
    degrees = {
        row_tokens: choice.degrees.get(row_tokens, missing)
        for row_tokens in config.data.row_lengths
    }
    seq: Any = config.with_degrees(degrees).mesh.seq
    value = yaml_io.format_value(list(seq) if isinstance(seq, tuple) else seq)
    changes = [f"mesh.replica={choice.replica}", "mesh.data=-1"]
    changes.append(f"mesh.seq='{value}'" if isinstance(seq, tuple) else f"mesh.seq={value}")
    fields = config.attention.model_dump()
    changes += [
        f"attention.{name}={yaml_io.format_value(value)}"
        for name, value in choice.attention_fields.items()
        if fields[name] != value
    ]
    return changes
