"""All strategies and kernels. To add one, write its file and add a line here; a value of the config
(`AttentionConfig`) makes it available to users."""

from jaxsp.attention.all_gather import AllGather
from jaxsp.attention.hybrid import OUTER_STRATEGIES, Hybrid
from jaxsp.attention.kernels.blockwise import BlockwiseKernel
from jaxsp.attention.kernels.cudnn import CudnnKernel
from jaxsp.attention.kernels.kernel import Kernel
from jaxsp.attention.ring import Ring
from jaxsp.attention.strategy import Strategy
from jaxsp.attention.ulysses import Ulysses

STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy for strategy in (Ulysses, Hybrid, Ring, AllGather)
}
"""Strategies by name, in the order in which alternatives are listed."""

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (CudnnKernel(), BlockwiseKernel())}
"""Kernels by name. `auto` uses the first that has no unsupported reasons."""

__all__ = ["KERNELS", "OUTER_STRATEGIES", "STRATEGIES"]
