"""The chosen attention of a run: see `selection.choose_attention`."""

import collections
import dataclasses
from collections.abc import Sequence

from jaxsp.attention.kernels.kernel import Kernel, KernelSettings, ScoreConfig
from jaxsp.attention.strategies.strategy import Strategy
from jaxsp.attention.strategies.workload import HasHeads
from jaxsp.core import units

_MIN_MENTIONED_LSE_BYTES = 64 * units.MIB
"""Minimum memory of log-sum-exps that a description mentions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """Strategy, kernel and settings of attention, for rows of one length. Processes compare its
    `repr`."""

    strategy: Strategy
    alternatives: tuple[tuple[str, int], ...]
    """Descriptions of the other strategies that `auto` considered, with their `sent_bytes`."""
    sent_bytes: int
    """Bytes that each device sends per layer and microbatch if attention's results are saved for
    the backward pass, whatever memory.remat is: the mean of all layers."""
    kernel: Kernel
    settings: KernelSettings
    fallback_reason: str
    """Reason that `auto` did not use its first kernel; empty if it did."""
    layer_scores: tuple[ScoreConfig, ...]
    """Scores of each layer, without windows that are at least as long as the rows."""


def describe_choice(choice: AttentionChoice, model: HasHeads) -> str:
    """Describes a choice in one line."""
    kernel = _describe_kernel(choice)
    reason = ""
    if choice.fallback_reason:
        reason = f" ({choice.kernel.name} because {choice.fallback_reason})"
    strategy = choice.strategy
    if strategy.seq == 1:
        return f"{kernel}, all heads on each device{reason}"
    heads, kv_heads = strategy.heads.local_heads(model.num_heads, model.num_kv_heads)
    part = (
        f"each device has {heads} of {model.num_heads} query heads and "
        f"{kv_heads} of {model.num_kv_heads} K/V heads"
    )
    layout = strategy.layout
    if not layout.keeps_order:
        part += f", and {layout.chunks_per_device} of {layout.num_chunks} chunks of each row"
    average = " on average" if len(set(choice.layer_scores)) > 1 else ""
    traffic = (
        f"it sends {units.format_bytes(choice.sent_bytes)} per layer and microbatch{average} "
        "if attention is not recomputed"
    )
    if choice.alternatives:
        alternatives = ", ".join(
            f"{description}: {units.format_bytes(num_bytes)}"
            for description, num_bytes in choice.alternatives
        )
        traffic += f" (alternatives: {alternatives})"
    return f"{strategy.description}, {kernel}; {part}; {traffic}{reason}"


def _describe_kernel(choice: AttentionChoice) -> str:
    settings = choice.settings
    description = f"{choice.kernel.describe()} kernel"
    if settings.head_chunks > 1:
        description += f", heads in {settings.head_chunks} chunks"
    if settings.copies_segments:
        description += (
            f", segments copied to rows of their own in {settings.capacity_factor} times the memory"
        )
    if settings.lse_bytes >= _MIN_MENTIONED_LSE_BYTES:
        description += f", whose log-sum-exps need {settings.lse_bytes / units.MIB:,.0f} MiB"
    return description + "".join(f", {part}" for part in _describe_scores(choice.layer_scores))


def _describe_scores(layer_scores: Sequence[ScoreConfig]) -> list[str]:
    """Describes windows and softcaps, with the number of layers that have them if not all do.

    Example: `["52 of 62 layers: each token sees the last 1,024 of its document"]`.
    """
    parts: collections.Counter[str] = collections.Counter()
    for score in layer_scores:
        if score.window is not None:
            parts[f"each token sees the last {score.window:,} of its document"] += 1
        if score.softcap is not None:
            parts[f"scores are capped at {score.softcap:g}"] += 1
    num_layers = len(layer_scores)
    return [
        part if count == num_layers else f"{count} of {num_layers} layers: {part}"
        for part, count in parts.items()
    ]
