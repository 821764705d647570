"""Protocol of strategies: ways for a sequence-parallel group to share attention.

To add a strategy, write a subclass of `Strategy` in a file of its own and add it to
`jaxsp.attention.registry.STRATEGIES`.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxsp.attention.kernels.kernel import (
    Kernel,
    KernelSettings,
    KernelWorkload,
    RowKernel,
    ScoreConfig,
)
from jaxsp.config.schema import AttentionConfig, Config
from jaxsp.core.errors import UserError
from jaxsp.core.layout import KEPT_ORDER, Layout


@runtime_checkable
class HasHeads(Protocol):
    """The fields of a model that attention depends on; `model.config.ModelConfig` has them."""

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
class LayerWorkload:
    """Attention of layers of one kind, each in one microbatch of a sequence-parallel group."""

    num_rows: int
    """Rows that the group works on together."""
    tokens_per_device: int
    """Tokens of a row that one device holds."""
    row_tokens: int
    max_segments: int
    """Maximum number of segments of a row."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """dtype of q, k, v, the output and their gradients."""
    window: int | None = None
    """Number of tokens that a token sees, including itself; None: all before it."""
    softcap: float | None = None
    """Cap of the scores: see `ScoreConfig`."""
    remat: str = "save_attention"
    """Value of memory.remat."""
    is_deterministic: bool = False
    has_windowed_kinds: bool = False
    """True if layers of any kind have a sliding window."""
    has_other_kinds: bool = False
    """True if the model has layers of other kinds. Then XLA merges no collectives of the recomputed
    forward pass with those of the backward pass, because each is in a branch of its own."""

    @classmethod
    def from_config(
        cls, config: Config, model: HasHeads, score: ScoreConfig, *, remat: str | None = None
    ) -> "LayerWorkload":
        """The workload of a config's rows, all of one length, in layers with these scores.

        Args: remat: replaces memory.remat of the config.
        """
        row_tokens = config.data.max_row_tokens
        kinds = drop_long_windows(model.layer_scores, row_tokens=row_tokens)
        (score,) = drop_long_windows([score], row_tokens=row_tokens)
        return cls(
            num_rows=config.batch.rows_per_microbatch,
            # 0 would not reach the check that rows can be divided
            tokens_per_device=max(1, config.data.max_row_tokens // config.mesh.degree),
            row_tokens=config.data.max_row_tokens,
            max_segments=config.data.max_segments_per_row,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=config.model.compute_dtype,
            window=score.window,
            softcap=score.softcap,
            remat=config.memory.remat if remat is None else remat,
            is_deterministic=config.run.deterministic,
            has_windowed_kinds=any(kind.window is not None for kind in kinds),
            has_other_kinds=len(set(kinds)) > 1,
        )

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def qkv_bytes(self) -> tuple[int, int]:
        """Bytes of a device's queries, and of its keys and values together."""
        head = self.num_rows * self.tokens_per_device * self.head_dim * self.itemsize
        return self.num_heads * head, 2 * self.num_kv_heads * head

    @property
    def has_window(self) -> bool:
        """True if the window hides any token of a row from another."""
        return self.window is not None and self.window < self.row_tokens

    @property
    def recomputes_attention(self) -> bool:
        """True if the backward pass computes attention again."""
        return self.remat == "full"

    @property
    def recomputes_projections(self) -> bool:
        """True if the backward pass computes q, k and v again."""
        return self.remat != "none"

    def to_kernel_workload(self) -> KernelWorkload:
        """The workload of a kernel that computes whole rows for all of these heads."""
        return KernelWorkload(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            row_tokens=self.row_tokens,
            num_rows=self.num_rows,
            max_segments=self.max_segments,
            window=self.window,
            dtype=self.dtype,
            softcap=self.softcap,
            whole_row_tokens=self.row_tokens,
            is_deterministic=self.is_deterministic,
        )


def count_workloads(
    config: Config, model: HasHeads, *, remat: str | None = None
) -> dict[LayerWorkload, int]:
    """Number of a model's layers with each workload, in the order in which they first occur.

    Args: remat: replaces memory.remat of the config.
    """
    counts: collections.Counter[LayerWorkload] = collections.Counter()
    for score, num_layers in collections.Counter(model.layer_scores).items():
        counts[LayerWorkload.from_config(config, model, score, remat=remat)] += num_layers
    return dict(counts)


def drop_long_windows(scores: Sequence[ScoreConfig], *, row_tokens: int) -> tuple[ScoreConfig, ...]:
    """Removes windows that are at least as long as a row, because they mask nothing."""
    return tuple(
        dataclasses.replace(score, window=None)
        if score.window is not None and score.window >= row_tokens
        else score
        for score in scores
    )


@runtime_checkable
class Strategy(Protocol):
    """A way to share attention among `seq` devices. Implementations are frozen dataclasses."""

    name: ClassVar[str]
    """Value of attention.strategy."""
    options: ClassVar[frozenset[str]] = frozenset()
    """Fields of the config's attention that only strategies with them use."""

    seq: int
    """Number of devices in a group."""

    @classmethod
    def candidates(
        cls, requested: AttentionConfig, workload: LayerWorkload, *, seq: int
    ) -> Sequence["Strategy"]:
        """Returns the ways in which `seq` devices, at least 2, can share these heads."""

    @classmethod
    def raise_if_impossible(
        cls, requested: AttentionConfig, workload: LayerWorkload, *, seq: int
    ) -> None:
        """Raises: UserError if this strategy is requested and has no candidates."""
        if not cls.candidates(requested, workload, seq=seq):
            raise UserError(
                f"attention.strategy = {cls.name}: {workload.num_heads} query heads and "
                f"{workload.num_kv_heads} K/V heads cannot be shared by mesh.seq = {seq} devices. "
                "Use attention.strategy=auto."
            )

    def find_problem(self, workload: LayerWorkload) -> str | None:
        """Returns an error message if the options do not fit the heads; None if they do."""
        return None

    @property
    def label(self) -> str:
        """Name in tables. Example: `hybrid 4`."""
        return self.name

    @property
    def description(self) -> str:
        """Name in sentences, with degrees. Example: `Ulysses of 4 x ring of 2`."""
        return f"{self.name} of {self.seq}"

    @property
    def config_fields(self) -> dict[str, Any]:
        """Fields of the config's attention that request this strategy."""
        return {"strategy": self.name}

    @property
    def layout(self) -> Layout:
        """Order of the rows' tokens. If they keep it, kernels compute whole rows, otherwise
        chunks."""
        return KEPT_ORDER

    @property
    def has_ring_steps(self) -> bool:
        """True if the devices of a group wait for each other at each hop of a ring."""
        return False

    @property
    def all_to_all_size(self) -> int:
        """Number of devices in an all-to-all; 1 if there is none."""
        return 1

    def local_heads(self, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
        """Returns the query heads and K/V heads that a device attends with."""
        return num_heads, num_kv_heads

    def kernel_workload(self, workload: LayerWorkload) -> KernelWorkload:
        """Returns what the kernel of one device computes at a time."""

    def sent_bytes(self, workload: LayerWorkload) -> dict[str, int]:
        """Returns the bytes that one device sends to others per layer and microbatch, forward and
        backward, by collective operation."""

    def backward_bytes(self, workload: LayerWorkload, settings: KernelSettings) -> int:
        """Returns the device memory of queries, keys, values, output and their gradients in the
        backward pass."""

    def device_groups(self, operation: str) -> list[list[int]]:
        """Returns the groups of devices that a collective operation connects, as positions along
        `seq`."""
        return [list(range(self.seq))]

    def communicators(self) -> list[list[int]]:
        """Returns the groups in which the first device communicates, as positions along `seq`."""
        return [list(range(self.seq))]

    def build(
        self, kernel: Kernel, settings: KernelSettings, *, kinds: Sequence[ScoreConfig]
    ) -> RowKernel:
        """Returns the function that is called inside shard_map with this device's shard of rows.

        Outputs and gradients are 0 at padding. Unless rows keep their order, `kernel` must have
        functions for chunks.

        Args: kinds: scores of each kind of layer.
        """

    def make_tables(
        self, starts_BM: Int32[Array, "B M"], lengths_BM: Int32[Array, "B M"], *, row_tokens: int
    ) -> Any:
        """Returns what all layers of a microbatch share about the segments of chunked rows; None
        for nothing. Called inside shard_map."""
        return None

    def on_one_device(self) -> "Strategy | None":
        """Returns a strategy that computes chunks in the same way on one device, for tests of a
        kernel; None if this one computes no chunks."""
        return None


def mask_padding(
    kernel: Kernel, attend: RowKernel, segment_mask: Callable[..., Array]
) -> RowKernel:
    """`attend` with outputs and gradients of 0 at padding.

    Whatever a kernel computes there, even NaN, is dropped. Kernels that mask padding themselves do
    so with fewer passes over their inputs.
    """
    if kernel.masks_padding:
        return attend

    def attend_masked(
        q_BLhK: Array,
        k_BLgK: Array,
        v_BLgK: Array,
        starts_BM: Array,
        lengths_BM: Array,
        **options: Any,
    ) -> Array:
        inside_BL11 = segment_mask(starts_BM, lengths_BM, q_BLhK.shape[1])[..., None, None]
        q_BLhK, k_BLgK, v_BLgK = (
            jnp.where(inside_BL11, x, jnp.zeros((), x.dtype)) for x in (q_BLhK, k_BLgK, v_BLgK)
        )
        out_BLhK = attend(q_BLhK, k_BLgK, v_BLgK, starts_BM, lengths_BM, **options)
        return jnp.where(inside_BL11, out_BLhK, jnp.zeros((), out_BLhK.dtype))

    return attend_masked
