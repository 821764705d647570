"""A compiled step's memory at its fullest moment, told by cause: the parts add up to all of it."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import jax

from jaxsp import attention
from jaxsp.model import layers
from jaxsp.planner.compile import compiled, memory
from jaxsp.runtime import device_mesh
from jaxsp.training import memory_fit, sharding

WEIGHTS, OPTIMIZER, GRADIENTS, RESIDUALS = "weights", "optimizer", "gradients", "residuals"
ATTENTION, STATISTIC, WORKSPACE = "attention", "attention statistic", "cuDNN workspace"
LAYER, LOSS, GATHERS, OTHER, RESERVED = "layer", "loss", "gathers", "other", "kept free"

CAUSES: Mapping[str, str] = {
    WEIGHTS: "float32 master weights, and copies to compute with where the master waits on the host",
    OPTIMIZER: "the optimizer's averages",
    GRADIENTS: "summed over the step, a share of each on every device",
    RESIDUALS: "what a layer keeps for its backward pass: its input, what attention gave",
    ATTENTION: "queries, keys, values, outputs, their gradients, and what is being sent to other devices",
    STATISTIC: "attention's log-sum-exps in float32, for packed rows as cuDNN has them",
    WORKSPACE: "an estimate of cuDNN's backward workspace, which XLA only counts on a GPU",
    LAYER: "the stream between layers, and the tiles of the MLP",
    LOSS: "tiles of logits",
    GATHERS: "whole weights of a layer or of the head while they are used, and their gradients before they are shared out",
    OTHER: "all else, and gaps between arrays",
    RESERVED: "for CUDA's context, NCCL's buffers and fragmentation",
}
"""What memory is told by, and what belongs to each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes by cause, of each device; those of the host are its share for one device."""

    device: Mapping[str, int]
    """At the moment when the device is fullest. Adds up to what JAX takes of it; RESERVED is not in it."""
    host: Mapping[str, int]
    """The same for the host, at its own fullest moment."""


def needs_of(step: compiled.Step) -> memory_fit.Needs:
    """Memory of a compiled step, with the estimate of cuDNN's workspace added at its backward
    calls."""
    counted = memory_fit.measured(step.executable, step.choice.uncounted_bytes)
    if not counted.uncounted:
        return counted
    arrays = [array for array in memory.held(step.written) if not array.on_host]
    calls = memory.cudnn_calls(step.written)
    beside = max(memory.most([array for array in arrays if array.first <= call <= array.last]) for call in calls)
    given = sum(size for (_, on_host), size in memory.of_arguments(step.written).items() if not on_host)
    free = counted.device - given - beside
    return counted._replace(uncounted=max(0, counted.uncounted - free))


def of_step(step: compiled.Step) -> Budget:
    """What takes a compiled step's memory when it is fullest, on the device and on the host."""
    needs = needs_of(step)
    given, arrays = memory.of_arguments(step.written), memory.held(step.written)
    told: dict[bool, dict[str, int]] = {}
    for on_host, total in {False: needs.total, True: needs.host}.items():
        parts = dict.fromkeys(CAUSES, 0)
        del parts[RESERVED]
        for argument, cause in (("state.master", WEIGHTS), ("state.opt", OPTIMIZER)):
            parts[cause] = given.get((argument, on_host), 0)
        workspaces = {}
        if needs.uncounted and not on_host:
            workspaces = dict.fromkeys(memory.cudnn_calls(step.written), step.choice.uncounted_bytes)
            parts[WORKSPACE] = step.choice.uncounted_bytes
        for cause, size in _at_the_fullest(step, [array for array in arrays if array.on_host == on_host], workspaces):
            parts[cause] += size
        parts[OTHER] += total - sum(parts.values())
        told[on_host] = parts
    return Budget(device=told[False], host=told[True])


def _at_the_fullest(step: compiled.Step, arrays: list[memory.Held], workspaces: Mapping[int, int]) -> Iterator[tuple[str, int]]:
    """Cause and bytes of each array that is there when all take most; a byte that two arrays share is the first one's."""
    tell = _Teller(step)
    covered = 0
    for array in sorted(memory.at_the_most(arrays, workspaces), key=lambda array: (array.begin, array.end)):
        yield tell(array), max(0, array.end - max(array.begin, covered))
        covered = max(covered, array.end)


class _Teller:
    """Tells what an array of a step belongs to, by its shape, and where that does not say it, by the operation's name."""

    def __init__(self, step: compiled.Step):
        program, model = step.program, step.program.model
        settings = program.config
        inner, num_shards = step.choice.kind.inner, device_mesh.num_shards(program.mesh)
        rows = list(jax.tree.leaves(program.table))
        self._num_layers = model.num_layers
        self._head_dim = model.head_dim
        self._row_tokens = settings.data.longest_row
        self._own = program.tokens
        self._tile = min(program.tile, program.tokens)
        self._loss_tile = min(program.loss_tile, self._own)
        # of a layer: its input, what attention gave, and its log-sum-exps. Heads that happen to be as many as layers are others
        of_heads = model.num_heads * model.head_dim
        self._kept = {self._own * size for size in (model.hidden_size, of_heads, model.num_heads)}
        self._vocab_size = model.vocab_size
        self._widths = {model.hidden_size, model.intermediate_size}
        held = math.lcm(model.num_kv_heads, inner)
        self._heads = {heads // part for heads in (model.num_heads, held, model.num_heads + 2 * held) for part in (1, inner)}
        large = [row for row in rows if row.size >= sharding.REPLICATED_BELOW]
        self._whole = {row.size for row in large}
        self._shards = {_shard(row, num_shards) for row in large}
        self._cudnn = step.choice.kernel == "cudnn"

    def __call__(self, array: memory.Held) -> str:
        dims = tuple(dim for dim in array.dims if dim > 1)
        stacked = len(array.dims) > 1 and array.dims[0] == self._num_layers
        if stacked and dims[1:] in self._shards:
            return GRADIENTS if array.dtype == "f32" else WEIGHTS
        if stacked and array.size // self._num_layers in self._kept:
            return RESIDUALS
        if f"/{attention.SCOPE}/" in array.op_name or self._is_of_heads(array, dims):
            is_statistic = self._cudnn and array.dtype == "f32" and self._head_dim not in dims
            return STATISTIC if is_statistic else ATTENTION
        if array.size in self._whole:
            return GATHERS
        if f"/{sharding.SCOPE}/" in array.op_name:
            return GATHERS
        if self._vocab_size in dims and (array.size % (self._vocab_size * self._loss_tile) == 0):
            return LOSS
        if dims in self._shards:
            return GRADIENTS if array.dtype == "f32" else GATHERS
        wide = self._widths & set(dims)
        if wide and (array.size % self._own == 0 or array.size % self._tile == 0):
            return LAYER
        return OTHER

    def _is_of_heads(self, array: memory.Held, dims: tuple[int, ...]) -> bool:
        """Whether heads of tokens are in it, as attention has them: of a share of a row, or of a whole one."""
        if not dims or dims[-1] != self._head_dim:
            return False
        heads = array.size // (self._head_dim * self._own)
        return array.size % (self._head_dim * self._own) == 0 and (heads in self._heads or self._row_tokens in dims)


def _shard(row: layers.Parameter, num_shards: int) -> tuple[int, ...]:
    """Shape of the part of one layer of a weight that a device holds, dims of 1 left out."""
    placed = sharding.place(row, num_shards)
    return tuple(
        dim
        for dim in (size // num_shards if place == placed.dim else size for place, size in enumerate(placed.stored))
        if dim > 1
    )
