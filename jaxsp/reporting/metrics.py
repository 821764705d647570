"""The numbers of a step: what metrics.jsonl says, and the arithmetic behind FLOPs."""

import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING, Any

import jax

from jaxsp.runtime import jsonl
from jaxsp.runtime.jsonl import AppendFile

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

METRICS_FILE, EVAL_FILE, NONFINITE_FILE = "metrics.jsonl", "eval.jsonl", "nonfinite_steps.jsonl"
"""What a run directory's files of numbers are called."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsLine:
    """One line of metrics.jsonl: one training step. Undefined numbers are null.

    Counts and losses mean the same on every mesh. attention_imbalance, times, speeds and memory
    depend on the mesh.
    """

    step: int
    """Number of steps so far, including this one. A step without loss tokens, or with a non-finite
    loss or gradient norm, counts but changes no weight."""
    epoch: int | None
    """Pass over the data that the step's last row belongs to, from 1. null if sources have weights."""
    loss: float | None
    """Mean loss over the step's loss tokens, over all rows at once (not a mean of means). null if
    there are no loss tokens or the loss is not finite."""
    token_accuracy: float | None
    """Fraction of loss tokens whose top-1 prediction is correct. null if there are no loss
    tokens or the step is not finite."""
    grad_norm: float | None
    """Global norm of the step's gradient before clipping. null if it is not finite."""
    learning_rate: float
    """Learning rate of this update."""
    num_rows: int
    """Number of rows with at least one segment."""
    num_tokens: int
    """Number of tokens in all segments of the step, each counted once over the whole mesh, whether
    or not it has a loss."""
    num_loss_tokens: int
    """Number of tokens whose next token is a training target. A document of n tokens has at most
    n - 1, however it is cut."""
    num_tokens_total: int
    """Sum of num_tokens over all steps so far."""
    num_tokens_by_source: dict[str, int]
    """num_tokens of each source, by name."""
    row_tokens: int
    """Row length of the step, in tokens."""
    padding_fraction: float
    """Fraction of the step's token slots that no segment fills."""
    attention_imbalance: float
    """Attention work (sum of squared segment lengths) of each microbatch's busiest
    sequence-parallel group, relative to the mean over groups. 1 is balanced."""
    step_s: float
    """Seconds from the end of the previous step to the end of this one, without evaluations and
    checkpoints between them."""
    data_wait_s: float
    """Seconds of step_s that devices waited for the step's rows."""
    checkpoint_wait_s: float | None
    """Seconds that checkpoints have delayed steps since the previous line. null if none was written."""
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


class MetricsWriter:
    """Appends lines to metrics.jsonl and eval.jsonl, each readable at once, and their numbers for TensorBoard.

    Lines of steps after `from_step` are left from a run that went on from there once before; they go.
    With several processes, the first alone writes.
    """

    def __init__(self, directory: pathlib.Path, *, from_step: int, tensorboard: bool):
        self._files: dict[str, AppendFile] = {}
        self._tensorboard: TensorBoardWriter | None = None
        if jax.process_index() > 0:
            return
        for name in (METRICS_FILE, EVAL_FILE, NONFINITE_FILE):
            jsonl.truncate_after(directory / name, from_step)
        self._directory = directory
        self._files = {name: AppendFile(directory / name) for name in (METRICS_FILE, EVAL_FILE)}
        if tensorboard:
            from jaxsp.reporting.tensorboard import TensorBoardWriter

            self._tensorboard = TensorBoardWriter(directory / "tensorboard", from_step=from_step)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def sync(self) -> None:
        """Makes what was written outlive a power cut. Raises: OSError where some of it finds no room."""
        for file in self._files.values():
            file.sync()
        if self._tensorboard is not None:
            self._tensorboard.sync()

    def write_step(self, line: MetricsLine) -> None:
        """A step of training."""
        self._write(METRICS_FILE, dataclasses.asdict(line), "train")

    def write_eval(self, result: "DataclassInstance") -> None:
        """An evaluation of one data set."""
        fields = dataclasses.asdict(result)
        self._write(EVAL_FILE, fields, f"eval/{fields['data']}")

    def write_nonfinite_step(self, line: "DataclassInstance") -> None:
        """A step whose numbers are not finite; most runs have none, and no such file."""
        if jax.process_index() == 0:
            if NONFINITE_FILE not in self._files:
                self._files[NONFINITE_FILE] = AppendFile(self._directory / NONFINITE_FILE)
            self._files[NONFINITE_FILE].add(
                json.dumps(dataclasses.asdict(line), allow_nan=False).encode() + b"\n"
            )

    def _write(self, name: str, fields: dict[str, Any], group: str) -> None:
        if name in self._files:
            self._files[name].add(json.dumps(fields, allow_nan=False).encode() + b"\n")
        if self._tensorboard is not None:
            parts = {
                f"{field}/{name}": part
                for field, value in fields.items()
                if isinstance(value, dict)
                for name, part in value.items()
            }
            numbers = {
                f"{group}/{field}": float(value)
                for field, value in (fields | parts).items()
                if field != "step" and isinstance(value, int | float)
            }
            self._tensorboard.add_scalars(numbers, step=fields["step"])


class ProfilerTrace:
    """A trace of some steps by JAX's profiler. The first process writes it; all of them begin and end it at the same steps."""

    def __init__(self, directory: pathlib.Path, steps: tuple[int, int] | None):
        self._directory = directory
        self._first, self._last = steps or (0, 0)
        self._is_running = False

    def __enter__(self) -> "ProfilerTrace":
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_running:
            self.stop()

    def should_start(self, step: int) -> bool:
        """Whether it is to begin before this step; nothing else may be running then."""
        return step == self._first

    def start(self) -> None:
        self._is_running = True
        if jax.process_index() == 0:
            jax.profiler.start_trace(str(self._directory))

    def should_stop(self, step: int) -> bool:
        """Whether it is to end when this step has ended."""
        return self._is_running and step == self._last

    def stop(self) -> None:
        self._is_running = False
        if jax.process_index() == 0:
            jax.profiler.stop_trace()


def peak_gib(devices: list[jax.Device]) -> float | None:
    """The most memory one of these devices had in use, ever; None where devices do not say."""
    peaks: list[Any] = [
        (device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices
    ]
    return max(peaks) / 2**30 if all(peak is not None for peak in peaks) else None
