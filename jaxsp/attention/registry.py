"""All exchanges of tokens and all kernels. To add one, write its file and add a line here; a value
of the config (`AttentionConfig`) makes it available to users."""

from jaxsp.attention.all_gather import AllGather
from jaxsp.attention.kernels.blockwise import BlockwiseKernel
from jaxsp.attention.kernels.cudnn import CudnnKernel
from jaxsp.attention.kernels.kernel import Kernel
from jaxsp.attention.ring import Ring
from jaxsp.attention.token_exchange import TokenExchange

TOKEN_EXCHANGES: dict[str, type[TokenExchange]] = {
    exchange.name: exchange for exchange in (Ring, AllGather)
}
"""Exchanges of tokens by name, in the order in which alternatives are listed."""

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (CudnnKernel(), BlockwiseKernel())}
"""Kernels by name. `auto` uses the first that has no unsupported reasons."""
