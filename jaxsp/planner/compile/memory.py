"""Memory of a compiled step at its peak, by category. The categories add up to all of it."""

import dataclasses
from collections.abc import Iterator, Mapping

import jax

from jaxsp import attention
from jaxsp.model.layers import Parameter
from jaxsp.planner.compile import buffers
from jaxsp.planner.compile.buffers import Buffer
from jaxsp.planner.compile.compiled import PlannedStep
from jaxsp.runtime import device_mesh
from jaxsp.training import memory_fit, memory_formula, sharding
from jaxsp.training.memory_fit import MemoryUse

WEIGHTS = "weights"
OPTIMIZER = "optimizer"
GRADIENTS = "gradients"
SAVED_ACTIVATIONS = "saved activations"
ATTENTION = "attention"
SOFTMAX_STATISTICS = "softmax statistics"
CUDNN_WORKSPACE = "cuDNN workspace"
LAYER_TEMPORARIES = "layer temporaries"
LOGITS = "logits"
GATHERED_WEIGHTS = "gathered weights"
OTHER = "other"
RESERVED = "reserved"

CATEGORIES: Mapping[str, str] = {
    WEIGHTS: "float32 master weights, copies in the compute dtype if they are on the host, and "
    "frozen weights",
    OPTIMIZER: "the optimizer's state, such as moments",
    GRADIENTS: "summed over the step, one shard on each device",
    SAVED_ACTIVATIONS: "saved for the backward pass by all layers: their inputs, attention's "
    "outputs, and the matrix products that memory.remat keeps",
    ATTENTION: "queries, keys, values, outputs, their gradients, and buffers of collectives",
    SOFTMAX_STATISTICS: "attention's float32 log-sum-exps, packed rows in cuDNN's layout",
    CUDNN_WORKSPACE: "estimate of cuDNN's backward workspace, which XLA counts only on a GPU",
    LAYER_TEMPORARIES: "the residual stream, and tiles of the MLP",
    LOGITS: "tiles of logits",
    GATHERED_WEIGHTS: "whole weights of a layer or the head, and gradients before reduce-scatter",
    OTHER: "everything else, and gaps between arrays",
    RESERVED: "for CUDA's context, NCCL's buffers and fragmentation",
}
"""Categories of memory, with what belongs to each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """Bytes by category for each device."""

    device: Mapping[str, int]
    """Device memory at its peak. Adds up to all that JAX takes; RESERVED is not included."""
    host: Mapping[str, int]
    """Host memory for one device, at its own peak."""


def measure_step(step: PlannedStep) -> MemoryUse:
    """Measures the memory of a compiled step.

    Adds the part of the estimate of cuDNN's workspace that does not fit into memory that is free
    during the backward calls.

    Raises: RuntimeError if the program has no such calls.
    """
    kernel = step.choice.kernel
    counted = memory_fit.read_memory_use(
        step.executable, kernel=kernel, workspace_bytes=step.choice.settings.workspace_bytes
    )
    if not counted.uncounted_workspace:
        return counted
    on_device = [buffer for buffer in buffers.read_buffers(step.dump) if not buffer.on_host]
    calls = buffers.find_backward_calls(step.dump, kernel)
    if not calls:
        raise RuntimeError(
            f"the compiled step has no backward call of {kernel.title} attention "
            f"({kernel.custom_call_prefix}*Backward), so its memory cannot be planned"
        )
    live_bytes = max(
        buffers.compute_peak_bytes([buffer for buffer in on_device if buffer.is_live(call)])
        for call in calls
    )
    argument_bytes = sum(
        size for (_, on_host), size in buffers.read_argument_bytes(step.dump).items() if not on_host
    )
    free = counted.device - argument_bytes - live_bytes
    return counted._replace(uncounted_workspace=max(0, counted.uncounted_workspace - free))


def break_down_peak(step: PlannedStep) -> MemoryBreakdown:
    """Breaks the memory of a compiled step at its peak down into categories."""
    memory_use = measure_step(step)
    workspaces: dict[int, int] = {}
    if memory_use.uncounted_workspace:
        workspaces = dict.fromkeys(
            buffers.find_backward_calls(step.dump, step.choice.kernel),
            step.choice.settings.workspace_bytes,
        )
    return MemoryBreakdown(
        device=_break_down(step, memory_use.device_total, workspaces, on_host=False),
        host=_break_down(step, memory_use.host, {}, on_host=True),
    )


def _break_down(
    step: PlannedStep, total: int, workspaces: Mapping[int, int], *, on_host: bool
) -> dict[str, int]:
    """Bytes by category in device or host memory.

    Args: workspaces: bytes of cuDNN's workspace, by the number of the call.
    """
    sizes = {category: 0 for category in CATEGORIES if category != RESERVED}
    arguments = buffers.read_argument_bytes(step.dump)
    sizes[WEIGHTS] = arguments.get(("state.master", on_host), 0)
    sizes[OPTIMIZER] = arguments.get(("state.opt_state", on_host), 0)
    sizes[CUDNN_WORKSPACE] = max(workspaces.values(), default=0)
    candidates = [buffer for buffer in buffers.read_buffers(step.dump) if buffer.on_host == on_host]
    for category, size in _categorize_peak(step, candidates, workspaces):
        sizes[category] += size
    sizes[OTHER] += total - sum(sizes.values())
    return sizes


def _categorize_peak(
    step: PlannedStep, candidates: list[Buffer], workspaces: Mapping[int, int]
) -> Iterator[tuple[str, int]]:
    """Yields category and bytes of each array that is live at the peak.

    A byte that two arrays share counts for the first.
    """
    classify = _Classifier(step)
    covered = 0
    for buffer in sorted(
        buffers.find_peak_buffers(candidates, workspaces),
        key=lambda buffer: (buffer.begin_byte, buffer.end_byte),
    ):
        yield classify(buffer), max(0, buffer.end_byte - max(buffer.begin_byte, covered))
        covered = max(covered, buffer.end_byte)


class _Classifier:
    """Finds the category of an array by its shape, or else by the name of its operation."""

    def __init__(self, step: PlannedStep):
        program = step.program
        model = program.model
        self._num_layers = model.num_layers
        policy = program.remat_policy
        self._num_inputs = {
            model.num_layers,
            policy.num_groups(model.num_layers),
            policy.offload_every,
        }
        self._head_dim = model.head_dim
        self._row_tokens = program.config.data.max_row_tokens
        self._device_tokens = program.tokens_per_device
        self._mlp_tile = min(program.mlp_tile, self._device_tokens)
        self._loss_tile = min(program.loss_tile, self._device_tokens)
        self._vocab_size = model.vocab_size
        self._widths = {model.hidden_size, model.intermediate_size}
        strategy = step.choice.strategy
        _, local_kv_heads = strategy.local_heads(model.num_heads, model.num_kv_heads)
        repeated_kv_heads = local_kv_heads * strategy.all_to_all_size
        head_counts = (
            model.num_heads,
            repeated_kv_heads,
            model.num_heads + 2 * repeated_kv_heads,
        )
        self._head_counts = {
            heads // degree for heads in head_counts for degree in (1, strategy.all_to_all_size)
        }
        # of a layer: its input, attention's output, its log-sum-exps, and matrix products
        saved_widths = (
            model.hidden_size,
            model.num_heads * model.head_dim,
            model.num_heads,
            *memory_formula.saved_product_widths(program),
        )
        self._saved_sizes = {self._device_tokens * width for width in saved_widths}
        sharded = [
            param
            for param in jax.tree.leaves(program.table)
            if param.size >= sharding.MIN_SHARDED_SIZE
        ]
        num_shards = device_mesh.num_shards(program.mesh)
        self._gathered_sizes = {param.size for param in sharded}
        self._shard_shapes = {_shard_shape(param, num_shards) for param in sharded}
        self._has_lse_arrays = step.choice.settings.lse_bytes > 0

    def __call__(self, buffer: Buffer) -> str:
        dims = tuple(dim for dim in buffer.dims if dim > 1)
        # an array of as many heads as there are layers has other sizes
        is_stacked = len(buffer.dims) > 1 and buffer.dims[0] == self._num_layers
        if is_stacked and dims[1:] in self._shard_shapes:
            return GRADIENTS if buffer.dtype == "f32" else WEIGHTS
        is_stack_of_inputs = len(buffer.dims) > 1 and buffer.dims[0] in self._num_inputs
        if is_stack_of_inputs and buffer.num_elements // buffer.dims[0] in self._saved_sizes:
            if is_stacked or buffer.on_host:
                return SAVED_ACTIVATIONS
        if f"/{attention.SCOPE}/" in buffer.op_name or self._has_heads(buffer, dims):
            is_lse = self._has_lse_arrays and buffer.dtype == "f32" and self._head_dim not in dims
            return SOFTMAX_STATISTICS if is_lse else ATTENTION
        if buffer.num_elements in self._gathered_sizes:
            return GATHERED_WEIGHTS
        if f"/{sharding.WEIGHTS_SCOPE}/" in buffer.op_name:
            return GATHERED_WEIGHTS
        logits_size = self._vocab_size * self._loss_tile
        if self._vocab_size in dims and buffer.num_elements % logits_size == 0:
            return LOGITS
        if dims in self._shard_shapes:
            return GRADIENTS if buffer.dtype == "f32" else GATHERED_WEIGHTS
        tile_sizes = (self._device_tokens, self._mlp_tile)
        if self._widths & set(dims) and any(buffer.num_elements % size == 0 for size in tile_sizes):
            return LAYER_TEMPORARIES
        return OTHER

    def _has_heads(self, buffer: Buffer, dims: tuple[int, ...]) -> bool:
        """True if the array holds heads of the tokens of a device or of a whole row."""
        if not dims or dims[-1] != self._head_dim:
            return False
        num_heads, rest = divmod(buffer.num_elements, self._head_dim * self._device_tokens)
        return rest == 0 and (num_heads in self._head_counts or self._row_tokens in dims)


def _shard_shape(param: Parameter, num_shards: int) -> tuple[int, ...]:
    """Shape of a device's shard of one layer of a weight, without dims of 1."""
    placement = sharding.choose_placement(param, num_shards)
    shape = list(placement.stored_shape)
    if placement.dim is not None:
        shape[placement.dim] //= num_shards
    return tuple(size for size in shape if size > 1)
