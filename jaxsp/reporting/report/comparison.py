"""Comparison of runs: config fields that differ, and differences of their losses."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxsp.config import yaml_io
from jaxsp.reporting.report import facts
from jaxsp.reporting.report.run_files import RunRecord

_LEFT_OUT = ("run.directory", "run.resume")
"""Fields that differ between any two runs, and change nothing."""

_EXACT_FIELDS = ("num_rows", "num_tokens", "num_loss_tokens")
"""Counts that are equal on every mesh."""

MAX_VALUE_CHARS = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigDifference:
    """A config field that is not the same in all runs."""

    field: str
    values: tuple[str, ...]
    """Value in each run, as YAML; empty if the run has no such field."""
    is_neutral: bool
    """True if the field changes what is learned by rounding at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossDifference:
    """Differences between the losses of two runs at the steps that both have."""

    name: str
    """Name of the run that is compared with the first one."""
    num_steps: int
    """Number of common steps with a loss in both runs."""
    max_difference: float
    max_step: int
    """Step with the largest difference."""
    max_relative: float
    """Largest difference relative to the first run's loss."""
    num_missing: int
    """Number of common steps at which exactly one of the runs has a loss."""
    num_unequal_counts: int
    """Number of common steps with different numbers of rows, tokens or loss tokens."""
    steps: np.ndarray
    differences: np.ndarray
    """Absolute difference of the losses at `steps`."""


def compare_configs(
    runs: Sequence[RunRecord], *, is_neutral: Callable[[str], bool]
) -> list[ConfigDifference]:
    """Finds the config fields that differ, those that change what is learned first.

    Args: is_neutral: True for names of fields that change what is learned by rounding at most.
    """
    configs = [dict(flatten(run.config)) for run in runs]
    fields = dict.fromkeys(field for config in configs for field in config)
    differences = []
    for field in fields:
        values = tuple(
            yaml_io.shorten(yaml_io.format_value(config[field]), MAX_VALUE_CHARS)
            if field in config
            else ""
            for config in configs
        )
        if len(set(values)) > 1 and field not in _LEFT_OUT:
            differences.append(
                ConfigDifference(field=field, values=values, is_neutral=is_neutral(field))
            )
    return sorted(differences, key=lambda difference: difference.is_neutral)


def flatten(value: Any, field: str = "") -> list[tuple[str, Any]]:
    """Returns each value of nested fields with its name, as in `key.path=value`."""
    if not isinstance(value, dict | list) or (field and not value):
        return [(field, value)]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [
        pair
        for name, item in items
        for pair in flatten(item, f"{field}.{name}" if field else str(name))
    ]


def compare_losses(first: RunRecord, other: RunRecord) -> LossDifference | None:
    """Compares the losses of two runs step by step; None if they have no common loss."""
    steps, in_first, in_other = np.intersect1d(
        first.columns["step"], other.columns["step"], assume_unique=True, return_indices=True
    )
    losses = first.columns["loss"][in_first]
    other_losses = other.columns["loss"][in_other]
    has_both = np.isfinite(losses) & np.isfinite(other_losses)
    if not has_both.any():
        return None
    differences = np.abs(losses - other_losses)[has_both]
    scale = np.maximum(np.abs(losses[has_both]), 1e-30)
    is_unequal = np.zeros(len(steps), bool)
    for field in _EXACT_FIELDS:
        counts = first.columns[field][in_first]
        other_counts = other.columns[field][in_other]
        is_unequal |= np.isfinite(counts) & np.isfinite(other_counts) & (counts != other_counts)
    largest = int(differences.argmax())
    return LossDifference(
        name=other.name,
        num_steps=len(differences),
        max_difference=float(differences[largest]),
        max_step=int(steps[has_both][largest]),
        max_relative=float((differences / scale).max()),
        num_missing=int((np.isfinite(losses) != np.isfinite(other_losses)).sum()),
        num_unequal_counts=int(is_unequal.sum()),
        steps=steps[has_both],
        differences=differences,
    )


def find_largest_difference(runs: Sequence[RunRecord]) -> tuple[float, int, int] | None:
    """Largest difference between any two losses of the same step.

    Returns: `(difference, step, number of steps that all runs have)`; None if there are none.
    """
    steps = runs[0].columns["step"][np.isfinite(runs[0].columns["loss"])]
    for run in runs[1:]:
        steps = np.intersect1d(
            steps, run.columns["step"][np.isfinite(run.columns["loss"])], assume_unique=True
        )
    if not len(steps):
        return None
    losses = np.stack(
        [run.columns["loss"][np.searchsorted(run.columns["step"], steps)] for run in runs]
    )
    spread = losses.max(0) - losses.min(0)
    largest = int(spread.argmax())
    return float(spread[largest]), int(steps[largest]), len(steps)


def describe_difference(runs: Sequence[RunRecord]) -> str:
    """Describes the largest difference between losses in a sentence."""
    largest = find_largest_difference(runs)
    if largest is None:
        return "The runs have no common step with a loss."
    difference, step, num_steps = largest
    common = "1 common step" if num_steps == 1 else f"{num_steps:,} common steps"
    if not difference:
        return f"The losses are equal in all digits over {common}."
    text = facts.format_small(difference)
    return f"The losses differ by at most {text} over {common} (at step {step:,})."
