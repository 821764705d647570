"""Protocol of a kernel: attention over the tokens that one device has, forward and backward.

To add a kernel, write a subclass of `Kernel` in a file of its own and add it to
`jaxsp.attention.registry.KERNELS`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from jaxtyping import Array, Int32

from jaxsp.attention.kernels.workload import Device, KernelWorkload, UnsupportedReason

RowKernel = Callable[..., Array]
"""Attention over rows: `(q, k, v, starts, lengths) -> out`, with an argument `tables` if
`Kernel.make_tables` returns any.

Shapes: q_BLhK, k_BLgK, v_BLgK, starts_BM, lengths_BM -> out_BLhK; h is a multiple of g.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSettings:
    """Division of a kernel's work, and the memory that it needs."""

    head_chunks: int = 1
    """Number of chunks of a device's heads, computed one after another."""
    capacity_factor: int = 4
    """Capacity of the slots of a packed cuDNN call, as a multiple of the rows' tokens."""
    workspace_bytes: int = 0
    """Estimate of device memory in addition to the compiled program's memory analysis."""
    lse_bytes: int = 0
    """Device memory of log-sum-exps before they are compressed and after they are expanded. The
    memory analysis counts it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkKernel:
    """A kernel's functions for chunks of rows: see `kernels.blockwise`, which has all four."""

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]
    off_diagonal_forward: Callable[..., tuple[Array, Array]]
    off_diagonal_backward: Callable[..., tuple[Array, Array, Array]]


@runtime_checkable
class Kernel(Protocol):
    """A way to compute attention on one device. Only `name` and `make_row_kernel` are required.

    Residuals of the backward pass have the names of `kernels.checkpoint_names`, so that a remat
    policy can save or offload them. Without the names they are recomputed.
    Implementations are frozen dataclasses without fields: processes compare their `repr`.
    """

    name: ClassVar[str]
    """Value of attention.kernel."""
    masks_padding: ClassVar[bool] = False
    """True if outputs and gradients at padding are 0 whatever is there. Otherwise the strategy
    masks inputs and outputs."""
    supports_head_chunks: ClassVar[bool] = False
    """True if the kernel can compute a device's heads in chunks, one after another."""
    needs_selfcheck: ClassVar[bool] = False
    """True if the kernel is compared with the blockwise kernel before training on a GPU."""
    custom_call_prefix: ClassVar[str] = ""
    """Prefix of the custom call targets in a compiled program; empty if XLA compiles the kernel."""

    def make_row_kernel(self, settings: KernelSettings, *, window: int | None) -> RowKernel:
        """Returns the function that computes whole rows.

        Args: window: number of tokens that a token sees, including itself; None: all before it.
        """
        ...

    def make_chunk_kernel(self, settings: KernelSettings) -> ChunkKernel | None:
        """Returns the functions that compute chunks of rows; None if there are none, so that rows
        must be whole."""
        return None

    def make_tables(
        self,
        settings: KernelSettings,
        starts_BM: Int32[Array, "B M"],
        lengths_BM: Int32[Array, "B M"],
        *,
        row_tokens: int,
    ) -> Any:
        """Returns the tables of the segments of whole rows that all layers share; None for none."""
        return None

    @property
    def title(self) -> str:
        """Name in sentences."""
        return self.name

    def describe(self) -> str:
        """Returns the name with the version, if there is one. Example: cuDNN 9.28.0."""
        return self.title

    def unsupported_reasons(
        self, workload: KernelWorkload, *, devices: Sequence[Device], device_bytes: int | None
    ) -> list[UnsupportedReason]:
        """Returns the reasons that the kernel cannot run this on these devices; empty if it can.

        Args: device_bytes: memory of a device; None: unknown.
        """
        return []

    def legal_head_chunks(self, workload: KernelWorkload) -> list[int]:
        """Returns the numbers of chunks that the heads can be divided into."""
        return [1]

    def configure(
        self,
        workload: KernelWorkload,
        *,
        devices: Sequence[Device],
        device_bytes: int | None,
        head_chunks: int | None,
    ) -> KernelSettings:
        """Divides the work.

        Args: head_chunks: requested number; None: the kernel chooses.
        Raises: UserError if that is not possible, or does not fit an empty device.
        """
        return KernelSettings()

    def read_workspace_bytes(self, program_text: str) -> int | None:
        """Returns the size of the workspace that a compiled program has; None if it has none."""
        return None


@dataclasses.dataclass(frozen=True)
class FunctionKernel(Kernel):
    """A function for whole rows as a kernel, for tests and experiments. It must apply a sliding
    window itself."""

    name = "function"

    function: RowKernel

    def make_row_kernel(self, settings: KernelSettings, *, window: int | None) -> RowKernel:
        return self.function
