"""Attention over packed rows, shared by the devices of a sequence-parallel group.

`choose` decides on a strategy (how devices share attention) and a kernel (how one device computes
its part); `make_chosen_attend` returns the function that the model calls inside shard_map with this
device's shard of rows,

    q_BlHK, k_BlGK, v_BlGK, starts_BM, lengths_BM -> out_BlHK

It is causal within each segment, with nothing between segments. Tokens outside segments have
output 0 and gradient 0. To add a strategy, see `token_exchange.py`; to add a kernel,
`kernels/kernel.py`.
"""

from jaxsp.attention.attend import (
    KINDS_SCOPE,
    SCOPE,
    Attend,
    as_kernel,
    find_collectives,
    make_attend,
    make_chosen_attend,
)
from jaxsp.attention.cached_attention import CachedKeys
from jaxsp.attention.cached_attention import attend as attend_to_cache
from jaxsp.attention.choice import AttentionChoice, describe
from jaxsp.attention.chunks.ring_hops import SCOPE as RING_HOPS_SCOPE
from jaxsp.attention.kernels.kernel import Kernel, KernelSettings, ScoreConfig
from jaxsp.attention.kernels.residuals import CHECKPOINT_NAMES
from jaxsp.attention.selection import (
    StrategyOption,
    choose,
    choose_strategy,
    list_options,
)
from jaxsp.attention.strategies.strategy import Strategy, combine
from jaxsp.attention.strategies.workload import HasHeads, LayerWorkload, count_workloads

__all__ = [
    "CHECKPOINT_NAMES",
    "KINDS_SCOPE",
    "RING_HOPS_SCOPE",
    "SCOPE",
    "Attend",
    "AttentionChoice",
    "CachedKeys",
    "HasHeads",
    "Kernel",
    "KernelSettings",
    "LayerWorkload",
    "ScoreConfig",
    "Strategy",
    "StrategyOption",
    "as_kernel",
    "attend_to_cache",
    "choose",
    "choose_strategy",
    "combine",
    "count_workloads",
    "describe",
    "find_collectives",
    "list_options",
    "make_attend",
    "make_chosen_attend",
]
