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
import jax.numpy as jnp
from jaxtyping import Array

from jaxsp.attention.kernels.residuals import AttentionFunctions, Gradients, Saved
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
class KernelWorkload:
    """Attention that one device computes at a time: whole rows or chunks, for its heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    row_tokens: int
    num_rows: int
    max_segments: int
    """Maximum number of segments of a row. With 1, rows are not packed."""
    window: int | None
    """Number of tokens that a token sees, including itself; None: all before it."""
    dtype: str
    softcap: float | None = None
    """Cap of the scores: see `ScoreConfig`."""
    chunks_per_row: int = 1
    """Number of chunks that a whole row is cut into. Each chunk counts as a row here."""
    chunks_per_device: int = 1
    """Number of chunks of a whole row that one device computes."""
    num_earlier_keys: int = 0
    """Number of keys before a chunk that are processed at a time."""
    ulysses_degree: int = 1
    """Number of devices that hold the same chunks, each for other heads."""
    whole_row_tokens: int | None = None
    """Tokens of a whole row, if rows are cut into chunks."""
    is_deterministic: bool = False
    """True if gradients must be bitwise equal in every run: run.deterministic."""
    has_score_workspace: bool = False
    """True if the backward pass writes the gradients of all scores to memory: see
    `cudnn_memory.adapt_to_devices`."""

    copies_segments: bool = False
    """True if segments are copied to rows of their own: see `KernelSettings`."""

    @property
    def whole_row_shape(self) -> tuple[int, int]:
        """Number of whole rows, and tokens of each."""
        return self.num_rows // self.chunks_per_device, self.whole_row_tokens or self.row_tokens

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.row_tokens

    @property
    def is_packed(self) -> bool:
        return self.max_segments > 1

    @property
    def has_window(self) -> bool:
        """True if the window hides any token of a row from another."""
        return self.window is not None and self.window < self.row_tokens

    def num_q_elements(self, head_chunks: int) -> int:
        """Number of elements of the queries of one head chunk."""
        return self.num_tokens * (self.num_heads // head_chunks) * self.head_dim

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
    lse_bytes: int = 0
    """Device memory of log-sum-exps before they are compressed and after they are expanded. The
    memory analysis counts it."""


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
    a model, sinks, and the names of residuals, with which a remat policy can save or offload them,
    are added around them: see `residuals.attend`.
    Implementations are frozen dataclasses without fields: processes compare their `repr`.
    """

    name: ClassVar[str]
    """Value of attention.kernel."""
    masks_padding: ClassVar[bool] = False
    """True if outputs and gradients at padding are 0 whatever is there. Otherwise the strategy
    masks inputs and outputs."""
    supports_head_chunks: ClassVar[bool] = False
    """True if the kernel can compute a device's heads in chunks, one after another."""
    has_lse: ClassVar[bool] = True
    """True if the forward pass returns a log-sum-exp."""
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

    def make_chunk_kernel(self, settings: KernelSettings, score: ScoreConfig) -> ChunkKernel | None:
        """Returns the functions that compute chunks of rows with these scores; None if there are
        none, so that rows must be whole."""
        return None

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
    """A differentiable function for whole rows as a kernel, for tests and experiments.

    All layers are of one kind, without sinks (which need a log-sum-exp), and the function must
    apply their window, scale and softcap.
    """

    name = "function"
    has_lse = False

    function: Callable[..., Array]
    """`(q, k, v, starts, lengths) -> out`."""

    def make_row_functions(
        self, settings: KernelSettings, score: ScoreConfig
    ) -> AttentionFunctions:
        def forward(q: Array, k: Array, v: Array, segments: Segments) -> tuple[Array, Array]:
            B, L, h, _ = q.shape
            return self.function(q, k, v, *segments[:2]), jnp.full((B, h, L), jnp.nan)

        def backward(saved: Saved, segments: Segments) -> Gradients:
            function = lambda *qkv: self.function(*qkv, *segments[:2])
            return jax.vjp(function, *saved[:3])[1](saved.dout)

        return AttentionFunctions(forward, backward)


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
