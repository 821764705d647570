"""Attention workload of a model's layers: the input of strategies and kernels."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxsp.attention.kernels.kernel import AttentionWorkload, ScoreConfig


@runtime_checkable
class HasHeads(Protocol):
    """The fields of a model that attention depends on; `blocks.config.ModelConfig` has them."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def layer_scores(self) -> Sequence[ScoreConfig]:
        """Scores of each layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupRows:
    """Rows that a sequence-parallel group works on together: fields of `AttentionWorkload`."""

    num_rows: int
    row_tokens: int
    max_segments: int
    seq: int
    dtype: str
    is_deterministic: bool = False


def count_workloads(
    rows: GroupRows, model: HasHeads, *, remat: str = "save_attention"
) -> dict[AttentionWorkload, int]:
    """Number of a model's layers with each workload, in the order in which they first occur.

    Args: remat: value of memory.remat.
    """
    counts: collections.Counter[AttentionWorkload] = collections.Counter()
    kinds = collections.Counter(drop_long_windows(model.layer_scores, row_tokens=rows.row_tokens))
    for score, num_layers in kinds.items():
        num_kv_heads, head_dim = score.heads or (model.num_kv_heads, model.head_dim)
        workload = AttentionWorkload(
            **dataclasses.asdict(rows),
            num_heads=model.num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=score.window,
            softcap=score.softcap,
            remat=remat,
            has_windowed_kinds=any(kind.window is not None for kind in kinds),
            has_other_kinds=any(kind != score and kind.heads == score.heads for kind in kinds),
        )
        counts[workload] += num_layers
    return dict(counts)


def drop_long_windows(scores: Sequence[ScoreConfig], *, row_tokens: int) -> tuple[ScoreConfig, ...]:
    """Removes windows that are at least as long as a row, because they mask nothing."""
    return tuple(
        dataclasses.replace(score, window=None)
        if score.window is not None and score.window >= row_tokens
        else score
        for score in scores
    )
