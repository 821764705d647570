"""A compiled step's memory at its fullest moment, told by cause: the parts add up to all of it."""

import dataclasses
from collections.abc import Iterator, Mapping

import jax

from jaxsp import attention
from jaxsp.model.layers import Parameter
from jaxsp.planner.compile import memory
from jaxsp.planner.compile.compiled import PlannedStep
from jaxsp.planner.compile.memory import Buffer
from jaxsp.runtime import device_mesh
from jaxsp.training import memory_fit, sharding
from jaxsp.training.memory_fit import MemoryUse

WEIGHTS, OPTIMIZER, GRADIENTS, SAVED_ACTIVATIONS = "weights", "optimizer", "gradients", "residuals"
ATTENTION, SOFTMAX_STATISTICS, CUDNN_WORKSPACE = (
    "attention",
    "attention statistic",
    "cuDNN workspace",
)
LAYER_TEMPORARIES, LOGITS, GATHERED_WEIGHTS, OTHER, RESERVED = (
    "layer",
    "loss",
    "gathers",
    "other",
    "kept free",
)

CATEGORIES: Mapping[str, str] = {
    WEIGHTS: "float32 master weights, and copies to compute with where the master waits on the host",
    OPTIMIZER: "the optimizer's averages",
    GRADIENTS: "summed over the step, a share of each on every device",
    SAVED_ACTIVATIONS: "what a layer keeps for its backward pass: its input, what attention gave",
    ATTENTION: "queries, keys, values, outputs, their gradients, and what is being sent to other devices",
    SOFTMAX_STATISTICS: "attention's log-sum-exps in float32, for packed rows as cuDNN has them",
    CUDNN_WORKSPACE: "an estimate of cuDNN's backward workspace, which XLA only counts on a GPU",
    LAYER_TEMPORARIES: "the stream between layers, and the tiles of the MLP",
    LOGITS: "tiles of logits",
    GATHERED_WEIGHTS: "whole weights of a layer or of the head while they are used, and their gradients before they are shared out",
    OTHER: "all else, and gaps between arrays",
    RESERVED: "for CUDA's context, NCCL's buffers and fragmentation",
}
"""What memory is told by, and what belongs to each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """Bytes by cause, of each device; those of the host are its share for one device."""

    device: Mapping[str, int]
    """At the moment when the device is fullest. Adds up to what JAX takes of it; RESERVED is not in it."""
    host: Mapping[str, int]
    """The same for the host, at its own fullest moment."""


def measure_step(step: PlannedStep) -> MemoryUse:
    """Memory of a compiled step, with the estimate of cuDNN's workspace added at its backward
    calls."""
    counted = memory_fit.read_memory_use(
        step.executable,
        kernel=step.choice.kernel,
        workspace_bytes=step.choice.settings.workspace_bytes,
    )
    if not counted.uncounted_workspace:
        return counted
    arrays = [array for array in memory.read_buffers(step.dump) if not array.on_host]
    calls = memory.find_backward_calls(step.dump, step.choice.kernel)
    beside = max(
        memory.compute_peak_bytes(
            [array for array in arrays if array.first_use <= call <= array.last_use]
        )
        for call in calls
    )
    given = sum(
        size for (_, on_host), size in memory.read_argument_bytes(step.dump).items() if not on_host
    )
    free = counted.device - given - beside
    return counted._replace(uncounted_workspace=max(0, counted.uncounted_workspace - free))


def break_down_peak(step: PlannedStep) -> MemoryBreakdown:
    """What takes a compiled step's memory when it is fullest, on the device and on the host."""
    needs = measure_step(step)
    given, arrays = memory.read_argument_bytes(step.dump), memory.read_buffers(step.dump)
    told: dict[bool, dict[str, int]] = {}
    for on_host, total in {False: needs.device_total, True: needs.host}.items():
        parts = dict.fromkeys(CATEGORIES, 0)
        del parts[RESERVED]
        for argument, cause in (("state.master", WEIGHTS), ("state.opt_state", OPTIMIZER)):
            parts[cause] = given.get((argument, on_host), 0)
        workspaces = {}
        if needs.uncounted_workspace and not on_host:
            workspaces = dict.fromkeys(
                memory.find_backward_calls(step.dump, step.choice.kernel),
                step.choice.settings.workspace_bytes,
            )
            parts[CUDNN_WORKSPACE] = step.choice.settings.workspace_bytes
        for cause, size in _categorize_peak(
            step, [array for array in arrays if array.on_host == on_host], workspaces
        ):
            parts[cause] += size
        parts[OTHER] += total - sum(parts.values())
        told[on_host] = parts
    return MemoryBreakdown(device=told[False], host=told[True])


def _categorize_peak(
    step: PlannedStep, arrays: list[Buffer], workspaces: Mapping[int, int]
) -> Iterator[tuple[str, int]]:
    """Cause and bytes of each array that is there when all take most; a byte that two arrays share is the first one's."""
    tell = _Classifier(step)
    covered = 0
    for array in sorted(
        memory.find_peak_buffers(arrays, workspaces),
        key=lambda array: (array.begin_byte, array.end_byte),
    ):
        yield tell(array), max(0, array.end_byte - max(array.begin_byte, covered))
        covered = max(covered, array.end_byte)


class _Classifier:
    """Tells what an array of a step belongs to, by its shape, and where that does not say it, by the operation's name."""

    def __init__(self, step: PlannedStep):
        program, model = step.program, step.program.model
        config = program.config
        strategy = step.choice.strategy
        num_shards = device_mesh.num_shards(program.mesh)
        rows = list(jax.tree.leaves(program.table))
        self._num_layers = model.num_layers
        self._head_dim = model.head_dim
        self._row_tokens = config.data.max_row_tokens
        self._device_tokens = program.tokens_per_device
        self._mlp_tile = min(program.mlp_tile, program.tokens_per_device)
        self._loss_tile = min(program.loss_tile, self._device_tokens)
        # of a layer: its input, what attention gave, and its log-sum-exps. Heads that happen to be as many as layers are others
        of_heads = model.num_heads * model.head_dim
        self._saved_sizes = {
            self._device_tokens * size for size in (model.hidden_size, of_heads, model.num_heads)
        }
        self._vocab_size = model.vocab_size
        self._widths = {model.hidden_size, model.intermediate_size}
        all_to_all_size = strategy.all_to_all_size
        _, local_kv_heads = strategy.local_heads(model.num_heads, model.num_kv_heads)
        held = local_kv_heads * all_to_all_size
        self._head_counts = {
            heads // part
            for heads in (model.num_heads, held, model.num_heads + 2 * held)
            for part in (1, all_to_all_size)
        }
        large = [row for row in rows if row.size >= sharding.MIN_SHARDED_SIZE]
        self._gathered_sizes = {row.size for row in large}
        self._shard_shapes = {_shard_shape(row, num_shards) for row in large}
        self._has_lse_arrays = step.choice.settings.lse_bytes > 0

    def __call__(self, array: Buffer) -> str:
        dims = tuple(dim for dim in array.dims if dim > 1)
        stacked = len(array.dims) > 1 and array.dims[0] == self._num_layers
        if stacked and dims[1:] in self._shard_shapes:
            return GRADIENTS if array.dtype == "f32" else WEIGHTS
        if stacked and array.num_elements // self._num_layers in self._saved_sizes:
            return SAVED_ACTIVATIONS
        if f"/{attention.SCOPE}/" in array.op_name or self._has_heads(array, dims):
            is_statistic = (
                self._has_lse_arrays and array.dtype == "f32" and self._head_dim not in dims
            )
            return SOFTMAX_STATISTICS if is_statistic else ATTENTION
        if array.num_elements in self._gathered_sizes:
            return GATHERED_WEIGHTS
        if f"/{sharding.WEIGHTS_SCOPE}/" in array.op_name:
            return GATHERED_WEIGHTS
        if self._vocab_size in dims and (
            array.num_elements % (self._vocab_size * self._loss_tile) == 0
        ):
            return LOGITS
        if dims in self._shard_shapes:
            return GRADIENTS if array.dtype == "f32" else GATHERED_WEIGHTS
        wide = self._widths & set(dims)
        if wide and (
            array.num_elements % self._device_tokens == 0
            or array.num_elements % self._mlp_tile == 0
        ):
            return LAYER_TEMPORARIES
        return OTHER

    def _has_heads(self, array: Buffer, dims: tuple[int, ...]) -> bool:
        """Whether heads of tokens are in it, as attention has them: of a share of a row, or of a whole one."""
        if not dims or dims[-1] != self._head_dim:
            return False
        heads = array.num_elements // (self._head_dim * self._device_tokens)
        return array.num_elements % (self._head_dim * self._device_tokens) == 0 and (
            heads in self._head_counts or self._row_tokens in dims
        )


def _shard_shape(row: Parameter, num_shards: int) -> tuple[int, ...]:
    """Shape of the part of one layer of a weight that a device holds, dims of 1 left out."""
    placed = sharding.choose_placement(row, num_shards)
    return tuple(
        dim
        for dim in (
            size // num_shards if place == placed.dim else size
            for place, size in enumerate(placed.stored_shape)
        )
        if dim > 1
    )
