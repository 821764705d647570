"""Describes how a run computes attention."""

from jaxsp.attention.selection import AttentionChoice
from jaxsp.attention.workload import HasHeads

_MIN_MENTIONED_LSE_BYTES = 64 * 2**20


def describe(choice: AttentionChoice, model: HasHeads) -> str:
    """Describes a choice in one line."""
    kernel = _describe_kernel(choice)
    reason = ""
    if choice.fallback_reason:
        reason = f" ({choice.kernel.name} because {choice.fallback_reason})"
    strategy = choice.strategy
    if strategy.seq == 1:
        return f"{kernel}, all heads on each device{reason}"
    heads, kv_heads = strategy.local_heads(model.num_heads, model.num_kv_heads)
    part = (
        f"each device has {heads} of {model.num_heads} query heads and "
        f"{kv_heads} of {model.num_kv_heads} K/V heads"
    )
    if strategy.layout_degree > 1:
        part += f", and 2 of {2 * strategy.layout_degree} chunks of each row"
    traffic = (
        f"it sends {_format_bytes(choice.sent_bytes)} per layer and microbatch "
        "if attention is not recomputed"
    )
    if choice.alternatives:
        alternatives = ", ".join(
            f"{description}: {_format_bytes(num_bytes)}"
            for description, num_bytes in choice.alternatives
        )
        traffic += f" (alternatives: {alternatives})"
    return f"{strategy.description}, {kernel}; {part}; {traffic}{reason}"


def _describe_kernel(choice: AttentionChoice) -> str:
    settings = choice.settings
    description = f"{choice.kernel.describe()} kernel"
    if settings.head_chunks > 1:
        description += f", heads in {settings.head_chunks} chunks"
    if settings.lse_bytes >= _MIN_MENTIONED_LSE_BYTES:
        description += f", whose log-sum-exps need {settings.lse_bytes / 2**20:,.0f} MiB"
    if choice.window is not None:
        description += f", each token sees the last {choice.window:,} of its document"
    return description


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
