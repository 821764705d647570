"""Decides the memory options that the config leaves open, so that the step fits its devices.

Less recomputation and larger tiles are faster, so candidates are tried from the fastest to the
slowest. A formula skips those that cannot fit, because compiling with autotuning takes minutes on a
GPU. For the others, the memory of the compiled program decides.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsp.attention.choice import AttentionChoice
from jaxsp.core import units
from jaxsp.memory import memory_formula
from jaxsp.memory.available_memory import MemoryLimit
from jaxsp.model.remat import RematPolicy, has_saved_products
from jaxsp.sharding import host_offload
from jaxsp.training.specs import StepSpec

MAX_PREDICTED_RATIO = 1.15
"""Maximum ratio of predicted to available memory for which a candidate is compiled.

The prediction is 0.93 to 1.08 times what jax 0.12 compiles (tests/memory/test_memory_fit.py), and
1.14 times for 7.5M tokens of Llama-3.1-8B on eight H100s.
"""


MAX_REPEATED_RATIO = 0.99
"""Maximum ratio of a candidate's predicted memory to that of one that did not fit, for which it is
compiled: smaller tiles do not help where memory is fullest elsewhere."""

KEPT_MARGIN = 0.01
"""Fraction of the device memory that is left free when the number of layers that keep the MLP's
products is computed."""


MAX_KEPT_TRIES = 3
"""Maximum number of numbers of such layers that are compiled."""

MIN_MORE_KEPT = 1 / 20
"""Minimum fraction of the layers that another number of them has to be larger by."""


class MemoryUse(NamedTuple):
    """Memory of a compiled step for each device, in bytes."""

    device: int
    host: int
    uncounted_workspace: int = 0
    """Estimate of cuDNN's workspace, if the compiled program does not count it (absent GPUs)."""
    workspace: int = 0
    """cuDNN's workspace, if the compiled program counts it."""
    estimated_workspace: int = 0
    """Estimate of cuDNN's workspace, to compare with `workspace`."""

    @property
    def device_total(self) -> int:
        """Memory of the device, counted or not."""
        return self.device + self.uncounted_workspace


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A step whose memory options are decided."""

    spec: StepSpec
    executable: Any
    """Result of `compile_step`, an argument of `fit`."""
    memory_use: MemoryUse
    memory_limit: MemoryLimit
    shortage: str = ""
    """Description of what does not fit; empty if everything fits."""
    full_remat_reason: str = ""
    """Reason that `auto` recomputes attention; empty if it does not."""


def fit(
    spec: StepSpec,
    *,
    limit: MemoryLimit,
    compile_step: Callable[[StepSpec], Any],
    measure: Callable[[Any], MemoryUse],
) -> CompiledStep:
    """Compiles candidates, and returns the first that fits, or else the last one.

    Args:
        compile_step: compiles a step whose memory options are decided.
        measure: memory of what `compile_step` returned; must be equal in all processes, so that all
            choose the same candidate.
    """
    candidates = list(list_candidates(spec, is_memory_known=math.isfinite(limit.device)))
    scale = 1.0
    too_large = math.inf
    reason = ""
    for candidate in candidates:
        formula = memory_formula.predict_bytes(candidate)
        predicted = scale * formula
        is_last = candidate is candidates[-1]
        saves_attention = candidate.remat_policy.is_attention_saved
        if formula > MAX_REPEATED_RATIO * too_large and not is_last:
            continue
        if not is_last and predicted > MAX_PREDICTED_RATIO * limit.device:
            if saves_attention:
                size = units.format_bytes(predicted)
                reason = f"keeping attention's output needs about {size} on each device"
            continue
        executable = compile_step(candidate)
        memory_use = measure(executable)
        shortage = describe_shortage(memory_use, limit)
        # All candidates offload the same arrays: no other one helps if host memory is short
        if memory_use.device_total <= limit.device or is_last:
            step = CompiledStep(
                spec=candidate,
                executable=executable,
                memory_use=memory_use,
                memory_limit=limit,
                shortage=shortage,
                full_remat_reason="" if saves_attention else reason,
            )
            if not (math.isfinite(limit.device) and can_keep_more(spec, candidate)):
                return step
            return _keep_mlp_layers(step, compile_step=compile_step, measure=measure)
        if saves_attention:
            reason = f"keeping attention's output needs {shortage}"
        scale *= max(1.0, memory_use.device_total / predicted)
        too_large = formula
    raise AssertionError("there is at least one candidate, and the last one is compiled")


def can_keep_more(spec: StepSpec, candidate: StepSpec) -> bool:
    """True if the layers of a candidate may keep the MLP's products."""
    is_tiled = candidate.mlp_tile < candidate.tokens_per_device
    saves_only_attention = candidate.config.memory.remat == "save_attention"
    return saves_only_attention and not is_tiled and _is_number_of_layers_free(spec)


def _is_number_of_layers_free(spec: StepSpec) -> bool:
    """True if as many layers as fit keep the MLP's products."""
    memory = spec.config.memory
    remats = list_remats(spec, is_memory_known=True)
    return (
        "auto" == memory.remat == memory.kept_mlp_layers
        and RematPolicy(remat=remats[0]).is_mlp_saved
    )


def _keep_mlp_layers(
    step: CompiledStep,
    *,
    compile_step: Callable[[StepSpec], Any],
    measure: Callable[[Any], MemoryUse],
) -> CompiledStep:
    """The step with the MLP's products kept in as many layers as fit, or almost as many."""
    limit = step.memory_limit.device
    target = int((1 - KEPT_MARGIN) * limit)
    totals = memory_formula.list_kept_mlp_bytes(step.spec)
    room = target - step.memory_use.device_total
    for _ in range(MAX_KEPT_TRIES):
        kept = step.spec.config.memory.kept_mlp_layers
        assert isinstance(kept, int)
        fitting = bisect.bisect_right(totals, totals[kept] + room) - 1
        number = totals.index(totals[fitting])
        if number - kept < max(1, MIN_MORE_KEPT * len(totals)):
            break
        spec = step.spec.respec(
            memory={"remat": "save_attention_and_mlp", "kept_mlp_layers": number}
        )
        executable = compile_step(spec)
        memory_use = measure(executable)
        if memory_use.device_total <= limit:
            step = dataclasses.replace(
                step, spec=spec, executable=executable, memory_use=memory_use
            )
            room = target - memory_use.device_total
        else:
            room -= memory_use.device_total - target
    return step


def list_candidates(spec: StepSpec, *, is_memory_known: bool) -> Iterator[StepSpec]:
    """Steps whose memory options are decided, the fastest first.

    Args:
        is_memory_known: True if the devices' memory is known. If not, tiles have a safe size.
    """
    for remat in list_remats(spec, is_memory_known=is_memory_known):
        loss_tiles = spec.loss_tiles if is_memory_known else [spec.loss_tile]
        kept_mlp_layers: int = 0
        mlp_tiles = spec.mlp_tiles if is_memory_known else [spec.mlp_tile]
        if RematPolicy(remat=remat).is_mlp_saved:  # activations of tiles cannot be saved
            mlp_tiles = [tile for tile in spec.mlp_tiles if tile == spec.tokens_per_device]
            requested = spec.config.memory.kept_mlp_layers
            kept_mlp_layers = spec.model.num_layers if requested == "auto" else requested
        elif is_memory_known and _is_number_of_layers_free(spec):
            # The memory of all logits is better used for products of the MLP
            loss_tiles = loss_tiles[1:] or loss_tiles
        for during_attention in list_offloads_during_attention(spec, remat):
            # With all tokens at once, the MLP needs more memory than attention
            tiles = mlp_tiles if during_attention == "never" else mlp_tiles[1:] or mlp_tiles
            for mlp_tile, loss_tile in itertools.product(tiles, loss_tiles):
                memory = {
                    "remat": remat,
                    "kept_mlp_layers": kept_mlp_layers,
                    "mlp_tile_tokens": mlp_tile,
                    "loss_tile_tokens": loss_tile,
                    "offload_during_attention": during_attention,
                }
                yield spec.respec(memory=memory)


def list_offloads_during_attention(spec: StepSpec, remat: str) -> list[str]:
    """Values of memory.offload_during_attention in the order in which they are tried."""
    memory = spec.config.memory
    if memory.offload_during_attention != "auto":
        return [memory.offload_during_attention]
    is_possible = (
        RematPolicy(remat=remat, offload_activations=memory.offload_activations).can_split_layers
        and jax.__version_info__ >= host_offload.MIN_RELEASE
    )
    return ["never", "always"] if is_possible else ["never"]


def list_remats(spec: StepSpec, *, is_memory_known: bool) -> list[str]:
    """Values of memory.remat in the order in which they are tried."""
    memory = spec.config.memory
    if memory.remat != "auto":
        return [memory.remat]
    if spec.remat_policy.has_own_backward_pass:
        return ["full"]
    if spec.remat_policy.is_attention_offloaded:
        return ["save_attention"]
    frees_memory = spec.remat_policy.is_input_offloaded or spec.has_offloaded_state
    if frees_memory or not is_memory_known:
        return ["save_attention", "full"]
    if memory.kept_mlp_layers == 0 or not has_saved_products(spec.model):
        return ["save_attention", "full"]
    return ["save_attention_and_mlp", "save_attention", "full"]


def read_memory_use(executable: jax.stages.Compiled, choice: AttentionChoice) -> MemoryUse:
    """Memory of a compiled step, from XLA's memory analysis.

    If the step was compiled with a GPU present, cuDNN's workspace is a call's last result, and so
    part of the temporaries. Otherwise the estimate is added.
    """
    analysis = executable.memory_analysis()

    def total(prefix: str) -> int:
        def size(kind: str) -> int:
            return getattr(analysis, f"{prefix}{kind}_size_in_bytes")

        return size("argument") + size("output") - size("alias") + size("temp")

    workspace = None
    workspace_bytes = choice.settings.workspace_bytes
    if workspace_bytes:
        workspace = choice.kernel.read_workspace_bytes(executable.as_text() or "")
    return MemoryUse(
        device=total(""),
        host=total("host_"),
        uncounted_workspace=workspace_bytes if workspace is None else 0,
        workspace=workspace or 0,
        estimated_workspace=workspace_bytes,
    )


def max_over_processes(memory_use: MemoryUse) -> MemoryUse:
    """Maximum over all processes.

    Each process compiles for its own devices, and all must choose the same options.
    """
    # JAX has no 64-bit integers by default
    parts = np.array([divmod(num_bytes, units.MIB) for num_bytes in memory_use], np.int32)
    gathered = multihost_utils.process_allgather(parts).astype(np.int64)
    sizes = gathered.reshape(-1, len(memory_use), 2) @ [units.MIB, 1]
    return MemoryUse(*map(int, sizes.max(0)))


def describe_shortage(memory_use: MemoryUse, limit: MemoryLimit) -> str:
    """Describes what does not fit; empty if everything fits."""
    if memory_use.device_total > limit.device:
        cudnn = ""
        if memory_use.uncounted_workspace:
            cudnn = f" (about {units.format_bytes(memory_use.uncounted_workspace)} of it for cuDNN)"
        needed = f"{units.format_bytes(memory_use.device_total)} on each device{cudnn}"
        return f"{needed}, but only {units.format_bytes(limit.device)} is available"
    if limit.host < 0:
        missing = units.format_bytes(memory_use.host - limit.host)
        return f"{missing} more host memory per device than is available, with a checkpoint's copy"
    if memory_use.host > limit.pinned:
        needed = f"{units.format_bytes(memory_use.host)} of host memory per device"
        return f"{needed}, but only {units.format_bytes(limit.pinned)} is available"
    return ""
