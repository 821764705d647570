"""Base class of kernels: attention over the tokens that one device has, forward and backward.

To add a kernel, write a subclass of `Kernel` in a file of its own and add it to
`jaxsp.attention.selection.KERNELS`.
"""

import abc
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Float, Float32

from jaxsp.attention.kernels.segments import Segments


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """Scores of a layer's attention. Layers with equal fields are of one kind."""

    scale: float | None = None
    """Factor of the scores; None: head_dim**-0.5."""
    window: int | None = None
    """Number of tokens that a token sees, including itself; None: all before it."""
    softcap: float | None = None
    """A cap c turns a score into c * tanh(score / c), before the mask; None: no cap."""
    heads: tuple[int, int] | None = None
    """Number of K/V heads and size of a head; None: those of the model."""

    def find_scale(self, head_dim: int) -> float:
        """Returns the factor of the scores of heads of this size."""
        return head_dim**-0.5 if self.scale is None else self.scale


@runtime_checkable
class Device(Protocol):
    """A jax.Device, present or absent. NVIDIA's have a `compute_capability`, for example `9.0`."""

    @property
    def device_kind(self) -> str: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionWorkload:
    """Attention of layers of one kind, each in one microbatch of a sequence-parallel group.

    A strategy changes it to what the kernel of a device computes at a time: whole rows or chunks of
    them, for some of the heads.
    """

    num_rows: int
    """Rows that the group works on together."""
    row_tokens: int
    """Tokens of a whole row."""
    max_segments: int
    """Maximum number of segments of a row. With 1, rows are not packed."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """dtype of q, k, v, the output and their gradients."""
    seq: int = 1
    """Number of devices that hold different tokens of a row."""
    window: int | None = None
    """Number of tokens that a token sees, including itself; None: all before it."""
    softcap: float | None = None
    """Cap of the scores: see `ScoreConfig`."""
    remat: str = "save_attention"
    """Value of memory.remat."""
    is_deterministic: bool = False
    """True if gradients must be bitwise equal in every run: run.deterministic."""
    has_windowed_kinds: bool = False
    """True if layers of any kind have a sliding window."""
    has_other_kinds: bool = False
    """True if layers with the same heads are of other kinds. Then XLA merges no collectives of the
    recomputed forward pass with those of the backward pass, because each is in a branch of its
    own."""
    ulysses_degree: int = 1
    """Number of devices that hold the same tokens, each for other heads."""
    chunk_tokens: int | None = None
    """Tokens of a chunk, with its halo if there is a window; None: rows are whole."""
    chunks_per_row: int = 1
    chunks_per_device: int = 1
    num_earlier_keys: int = 0
    """Number of keys before a chunk that are processed at a time."""
    has_score_workspace: bool = False
    """True if the backward pass writes the gradients of all scores to memory: see
    `cudnn_limits.adapt_to_devices`."""
    copies_segments: bool = False
    """True if segments are copied to rows of their own: see `KernelSettings`."""

    @property
    def tokens_per_device(self) -> int:
        """Tokens of a row that one device holds."""
        # 0 would not reach the check that rows can be divided
        return max(1, self.row_tokens // self.seq)

    @property
    def kernel_rows(self) -> int:
        """Number of rows that the kernel computes: each chunk is one."""
        return self.num_rows * self.chunks_per_device

    @property
    def kernel_row_tokens(self) -> int:
        return self.chunk_tokens or self.row_tokens

    @property
    def kernel_tokens(self) -> int:
        """Tokens of all rows that the kernel computes."""
        return self.kernel_rows * self.kernel_row_tokens

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def is_packed(self) -> bool:
        return self.max_segments > 1

    @property
    def has_window(self) -> bool:
        """True if the window hides any token of a row from another."""
        return self.window is not None and self.window < self.row_tokens

    def row_multiple(self, chunk_multiple: int) -> int:
        """Number that the tokens of a whole row must be a multiple of.

        Args: chunk_multiple: number that the tokens of a chunk must be a multiple of.
        """
        return self.chunks_per_row * math.lcm(chunk_multiple, self.ulysses_degree)


class UnsupportedReason(NamedTuple):
    """Reason that a kernel cannot run a workload."""

    reason: str
    """The rest of a sentence that begins with the kernel's title."""
    suggestion: str
    """A sentence with a change that would work."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSettings:
    """Division of a kernel's work, and the memory that it needs."""

    head_chunks: int = 1
    """Number of chunks of a device's heads, computed one after another."""
    capacity_factor: int = 4
    """Capacity of the bins of a packed cuDNN call, as a multiple of the rows' tokens."""
    copies_segments: bool = False
    """True if cuDNN's calls compute copies of the segments, because the GPU has no packed calls."""
    workspace_bytes: int = 0
    """Estimate of device memory in addition to the compiled program's memory analysis."""


class Saved(NamedTuple):
    """Arrays that a backward pass starts from. The output and the log-sum-exp may include keys that
    are not in `k`."""

    q: Float[Array, "B L h K"]
    k: Float[Array, "B L g K"]
    v: Float[Array, "B L g K"]
    out: Float[Array, "B L h K"]
    dout: Float[Array, "B L h K"]
    lse: Float32[Array, "B h L"]


Gradients = tuple[Float[Array, "B L h K"], Float[Array, "B D g K"], Float[Array, "B D g K"]]
"""dq, dk and dv."""


class AttentionFunctions(NamedTuple):
    """Forward and backward pass of attention for one kind of layer."""

    forward: Callable[..., tuple[Array, Array]]
    """`(q, k, v, segments) -> out, lse`. Shapes: q_BLhK, k_BLgK, v_BLgK -> out_BLhK, lse_BhL."""
    backward: Callable[..., Gradients]
    """`(saved, segments) -> dq, dk, dv`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkKernel:
    """A kernel's functions for chunks of rows."""

    packed: AttentionFunctions
    """Causal attention inside each segment."""
    off_diagonal: AttentionFunctions
    """Attention of an `OffDiagonalBlock`, which is the last argument, without a mask inside.
    Results of other queries and keys are undefined."""


class Kernel(abc.ABC):
    """A way to compute attention on one device. Only `name` and `make_row_functions` are required.

    A kernel gives forward and backward functions for the scores of one kind of layer. The kinds of
    a model, sinks, and the names of residuals are added around them: see `jaxsp.attention.attend`.
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

    @abc.abstractmethod
    def make_row_functions(
        self, settings: KernelSettings, score: ScoreConfig
    ) -> AttentionFunctions:
        """Returns the functions that compute whole rows with these scores.

        The backward pass uses only the output and log-sum-exp that it is given: with sinks, they
        are not those of the forward pass.
        """

    def make_chunk_kernel(self, settings: KernelSettings, score: ScoreConfig) -> ChunkKernel:
        """Returns the functions that compute chunks of rows with these scores. A kernel without
        them is for strategies that give each device whole rows."""
        raise NotImplementedError(f"{self.name} computes whole rows only")

    def make_tables(self, settings: KernelSettings, rows: Segments, row_tokens: int) -> Any:
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
        self, workload: AttentionWorkload, *, devices: Sequence[Device], device_bytes: int | None
    ) -> list[UnsupportedReason]:
        """Returns the reasons that the kernel cannot run this on these devices; empty if it can.

        Args: device_bytes: memory of a device; None: unknown.
        """
        return []

    def legal_head_chunks(self, workload: AttentionWorkload) -> list[int]:
        """Returns the numbers of chunks that the heads can be divided into."""
        return [1]

    def configure(
        self,
        workload: AttentionWorkload,
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


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def find_local_devices(devices: Sequence[Device]) -> list[Any]:
    """Returns the devices that this process has; none if the program is only compiled for them."""
    return [device for device in jax.local_devices() if device in devices]


def min_device_bytes(devices: Sequence[Device]) -> int | None:
    """Memory that JAX may use on each of this process's devices: the minimum; None if unknown."""
    stats = [device.memory_stats() or {} for device in find_local_devices(devices)]
    limits = [stat["bytes_limit"] for stat in stats if "bytes_limit" in stat]
    return min(limits, default=None)


def lowest_capability(devices: Sequence[Device]) -> tuple[int, int]:
    """The lowest compute capability of the devices; (0, 0) if one of them has none."""
    capabilities = []
    for device in devices:
        match = re.fullmatch(r"(\d+)\.(\d+)", getattr(device, "compute_capability", ""))
        capabilities.append((int(match[1]), int(match[2])) if match else (0, 0))
    return min(capabilities)
