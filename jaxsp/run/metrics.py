"""Lines of a run's files, such as metrics.jsonl, and their writer."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxsp.core import units
from jaxsp.system import jsonl
from jaxsp.system.jsonl import AppendFile
from jaxsp.training.metric_table import Line

METRICS_FILE = "metrics.jsonl"
EVAL_FILE = "eval.jsonl"
TASKS_FILE = "tasks.jsonl"
SAMPLES_FILE = "samples.jsonl"
HARNESS_FILE = "lm_eval.jsonl"
STARTS_FILE = "starts.jsonl"
NONFINITE_FILE = "nonfinite_steps.jsonl"

TRACKED_FILES = (METRICS_FILE, EVAL_FILE, TASKS_FILE)
"""Files whose numbers the trackers show."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFields:
    """One line of metrics.jsonl: one training step. Undefined numbers are null.

    Counts and losses mean the same on every mesh. attention_imbalance, times, speeds and memory
    depend on the mesh.
    """

    step: int
    """Number of steps so far, including this one. A step without loss tokens, or with a non-finite
    loss or gradient norm, counts but changes no weight."""
    epoch: int | None
    """Pass over the data that the step's last row belongs to, from 1. null if sources have
    weights."""
    grad_norm: float | None
    """Global norm of the step's gradient before clipping. null if it is not finite."""
    learning_rate: float
    """Learning rate of this update."""
    num_tokens_total: int
    """Sum of num_tokens over all steps so far."""
    num_tokens_by_source: dict[str, int]
    """num_tokens of each source, by name."""
    padding_fraction: float
    """Fraction of the step's token slots that no segment fills."""
    attention_imbalance: float
    """Attention work of the slowest devices relative to the mean over devices: 1 is balanced.
    Groups wait for each other in each microbatch, and devices of a group in each layer, or with a
    ring in each of its steps. The work of a row is the sum of its squared segment lengths."""
    step_s: float
    """Seconds from the end of the previous step to the end of this one, without evaluations and
    checkpoints between them."""
    data_wait_s: float
    """Seconds of step_s that devices waited for the step's rows."""
    checkpoint_wait_s: float | None
    """Seconds that checkpoints have delayed steps since the previous line. null if none was
    written."""
    tokens_per_s: float
    """num_tokens / step_s."""
    tokens_per_s_per_device: float
    """tokens_per_s divided by the number of devices."""
    tflops_per_device: float
    """TFLOP/s of required arithmetic on each device: causal attention within each document, without
    recomputation."""
    mfu: float | None
    """tflops_per_device divided by the GPU's bfloat16 peak. null for unknown devices."""
    device_peak_gib: float | None
    """Highest memory use of any device of this process so far, in GiB. null on CPUs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonfiniteStep:
    """One line of nonfinite_steps.jsonl: a step whose loss or gradient norm was not finite."""

    step: int
    """Number of steps so far, including this one."""
    loss: float | str
    """Mean loss. nan, inf and -inf are text, because JSON has no such numbers."""
    grad_norm: float | str
    """Global norm of the gradient before clipping, as for loss."""
    learning_rate: float
    """Learning rate of this update, which was not applied."""
    rows: list[int]
    """Indices of the step's rows in the sequence of rows, from 0."""
    documents: list[dict[str, Any]]
    """All segments of these rows. Each has row (index of its row, as in rows), source (name),
    record_index (index of the record in its source, from 0), location (file, and line or row),
    first_token (offset of the segment in its document) and tokens (length of the segment)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartLine:
    """One line of starts.jsonl: one start of a run, new or resumed. Lines are never removed."""

    time: str
    """Time of the start, in ISO 8601 with the offset from UTC."""
    host: str
    """Name of the node of process 0."""
    from_step: int
    """Number of steps before the start; 0 for a new run."""
    previous_step: int | None
    """Step of the last line of metrics.jsonl before the start. Steps after from_step are repeated.
    null if there was no line."""
    checkpoint: str | None
    """Checkpoint that the run resumed from; null for a new run."""
    config_changes: list[str]
    """Config fields that differ from those of the checkpoint, with both values."""
    num_steps: int
    """Number of steps of the whole run."""
    num_parameters: int
    """Number of the model's parameters."""
    num_devices: int
    """Number of devices of the mesh."""
    device_kind: str
    """Name of the devices, as JAX reports it."""
    num_processes: int
    """Number of processes."""
    mesh: dict[str, int]
    """Size of each mesh axis, by name."""
    strategy: str
    """Attention strategy that was chosen, with its degrees. Empty if no devices share rows."""
    kernel: str
    """Attention kernel that was chosen."""
    jaxsp_version: str | None
    """Version of jaxsp; null if it is not installed as a package."""
    jax_version: str
    """Version of JAX."""
    python_version: str
    """Version of Python."""
    compile_s: float
    """Seconds to compile the step."""
    memory: dict[str, Any]
    """Memory of the compiled step: remat (chosen memory.remat), device and host (bytes per device,
    by cause) and device_available (bytes that the step may use on a device, or null). Weights,
    optimizer state and totals are exact; gradients and saved activations are formulas; other
    temporaries are the rest. host is empty if nothing is offloaded."""


class MetricsWriter:
    """Appends lines to the files of numbers, in process 0; the others ignore every call.

    Existing lines of steps after `from_step` are removed: the run repeats those steps. Damaged
    lines are set aside.

    Args: receivers: called with each line of TRACKED_FILES after it is written.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        from_step: int,
        receivers: Sequence[Callable[[Line], None]] = (),
    ):
        self._directory = directory
        self._receivers = receivers
        self._files: dict[str, AppendFile] = {}
        if jax.process_index() > 0:
            return
        for name in (*TRACKED_FILES, SAMPLES_FILE, NONFINITE_FILE):
            is_regular = name == METRICS_FILE
            jsonl.truncate_after(directory / name, from_step, has_regular_steps=is_regular)
        for name in (METRICS_FILE, EVAL_FILE):
            self._files[name] = AppendFile(directory / name)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def sync(self) -> None:
        """Makes the written lines survive a power failure. Raises: OSError if the disk is full."""
        for file in self._files.values():
            file.sync()

    def write(self, file_name: str, line: Line) -> None:
        """Writes a line of any of the files. The first one creates the file."""
        if jax.process_index() > 0:
            return
        if file_name not in self._files:
            self._files[file_name] = AppendFile(self._directory / file_name)
        self._files[file_name].add(jsonl.to_line(line))
        for receive in self._receivers if file_name in TRACKED_FILES else ():
            receive(dict(line))


def peak_gib(devices: list[jax.Device]) -> float | None:
    """Returns the highest memory use of any of these devices so far; None if not reported."""
    stats = [device.memory_stats() or {} for device in devices]
    if not all("peak_bytes_in_use" in device_stats for device_stats in stats):
        return None
    return max(device_stats["peak_bytes_in_use"] for device_stats in stats) / units.GIB
