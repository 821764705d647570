"""The numbers of a step: what metrics.jsonl says, and the arithmetic behind FLOPs."""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from tensorboardX import record_writer
from tensorboardX.proto import event_pb2, summary_pb2

from jaxsp.model import decoder, layers
from jaxsp.model.config import ModelConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

METRICS, EVAL, BAD_STEPS = "metrics.jsonl", "eval.jsonl", "bad_steps.jsonl"
"""What a run directory's files of numbers are called."""

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "GH200": 989.0, "A100": 312.0, "B200": 2250.0}
"""Dense bfloat16 TFLOP/s of a device, from NVIDIA's data sheets (SXM), by a word of its name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One line of metrics.jsonl; None where a number does not exist on this machine or in this step."""

    step: int
    """Steps so far, this one counted."""
    epoch: int | None
    """Pass over the data, from 1, that the step's last row belongs to; None where sources are mixed by weight."""
    loss: float | None
    """Mean over the step's loss tokens; None where there is none, or it is not finite."""
    token_accuracy: float | None
    """Share of loss tokens that the model thought likeliest."""
    grad_norm: float | None
    """Global, before clipping; None where it is not finite."""
    learning_rate: float
    num_rows: int
    """Rows with at least one piece."""
    num_tokens: int
    """Tokens of all pieces, each once over the whole mesh, with a loss or not."""
    num_loss_tokens: int
    num_tokens_total: int
    """num_tokens of all steps so far."""
    num_tokens_by_source: dict[str, int]
    """num_tokens of each source."""
    row_tokens: int
    """Length of the step's rows."""
    padding_share: float
    """Of the step's token slots, those that no piece fills."""
    attention_imbalance: float
    """Attention work of the group of devices that has most, over the groups' mean, turn by turn; 1 is even."""
    step_s: float
    """Seconds between the end of the step before and the end of this one."""
    data_wait_s: float
    """Of these, waiting for the next rows."""
    save_s: float | None
    """Seconds that checkpoints kept steps from beginning since the line before; None where none was written."""
    tokens_per_s: float
    tokens_per_s_per_device: float
    tflops_per_device: float
    """Arithmetic that was needed (causal, piece by piece; recomputation not counted), per second."""
    mfu: float | None
    """tflops_per_device over the device's bfloat16 peak; None for devices that PEAK_TFLOPS does not know."""
    device_peak_gib: float | None
    """The most memory any device of this process had in use so far."""


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a disk, a quota or a file that is full answers."""


@contextlib.contextmanager
def though_full() -> Iterator[None]:
    """Goes on where what is printed finds no room: a log on a full disk is not worth a run."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise


def _say(words: str) -> None:
    with though_full():
        print(words, file=sys.stderr, flush=True)


class Lines:
    """A file that records are added to, each of them whole or not at all.

    While the disk is full they wait in memory: that is said once, and they are written as soon as there is room again.
    """

    def __init__(self, path: pathlib.Path):
        self._path, self._waiting = path, bytearray()
        self._file = path.open("ab", buffering=0)
        self._is_full = False

    def add(self, record: bytes) -> None:
        self._waiting += record
        self._write()

    def close(self) -> None:
        self._write()
        if self._waiting:
            _say(f"{self._path}: {len(self._waiting):,} bytes of it ARE LOST, the disk is still full")
        self._file.close()

    def _write(self) -> None:
        done = 0
        self._end = self._file.seek(0, os.SEEK_END)  # jaxsp.eval adds lines too
        try:
            while done < len(self._waiting):
                done += self._file.write(self._waiting[done:])
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._file.truncate(self._end)  # what is there of a record
            if not self._is_full:
                _say(f"{self._path} CANNOT BE WRITTEN: {error.strerror}. What belongs there waits for room")
            self._is_full = True
            return
        if self._is_full:
            _say(f"{self._path} is written again, nothing is missing")
        self._is_full = False
        self._waiting.clear()


class Writer:
    """Appends lines to metrics.jsonl and eval.jsonl, each readable at once, and their numbers for TensorBoard.

    Lines of steps after `from_step` are left from a run that went on from there once before; they go.
    With several processes, the first alone writes.
    """

    def __init__(self, directory: pathlib.Path, *, from_step: int, tensorboard: bool):
        self._files: dict[str, Lines] = {}
        self._board: Board | None = None
        if jax.process_index() > 0:
            return
        for name in (METRICS, EVAL, BAD_STEPS):
            keep_to(directory / name, from_step)
        self._directory = directory
        self._files = {name: Lines(directory / name) for name in (METRICS, EVAL)}
        if tensorboard:
            self._board = Board(directory / "tensorboard", from_step=from_step)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        if self._board is not None:
            self._board.close()

    def write(self, line: Line) -> None:
        """A step of training."""
        self._write(METRICS, dataclasses.asdict(line), "train")

    def write_result(self, result: "DataclassInstance") -> None:
        """An evaluation of one data set."""
        fields = dataclasses.asdict(result)
        self._write(EVAL, fields, f"eval/{fields['data']}")

    def write_bad_step(self, line: "DataclassInstance") -> None:
        """A step whose numbers are not finite; most runs have none, and no such file."""
        if jax.process_index() == 0:
            if BAD_STEPS not in self._files:
                self._files[BAD_STEPS] = Lines(self._directory / BAD_STEPS)
            self._files[BAD_STEPS].add(json.dumps(dataclasses.asdict(line), allow_nan=False).encode() + b"\n")

    def _write(self, name: str, fields: dict[str, Any], group: str) -> None:
        if name in self._files:
            self._files[name].add(json.dumps(fields, allow_nan=False).encode() + b"\n")
        if self._board is not None:
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
            self._board.add(numbers, step=fields["step"])


class Board:
    """TensorBoard's file of events.

    (tensorboardX writes them in a thread: on a full disk that dies, and the tenth event after it blocks the run for ever.)
    """

    def __init__(self, directory: pathlib.Path, *, from_step: int):
        directory.mkdir(parents=True, exist_ok=True)
        self._lines = Lines(directory / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}")
        self._add(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        # events of these steps that are there already do not count
        begins = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(event_pb2.Event(wall_time=time.time(), step=from_step + 1, session_log=begins))

    def add(self, numbers: dict[str, float], *, step: int) -> None:
        values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add(event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=values)))

    def close(self) -> None:
        self._lines.close()

    def _add(self, event: event_pb2.Event) -> None:
        """A record of TensorFlow's: its length, that one's checksum, the event, and its checksum."""
        data = event.SerializeToString()
        length, checksum = struct.pack("<Q", len(data)), record_writer.masked_crc32c
        self._lines.add(length + struct.pack("<I", checksum(length)) + data + struct.pack("<I", checksum(data)))


def append(path: pathlib.Path, result: "DataclassInstance") -> None:
    """Writes an evaluation as a line of a file that may be there, and may end in the middle of a line."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(dataclasses.asdict(result), allow_nan=False).encode() + b"\n")


def keep_to(path: pathlib.Path, step: int) -> None:
    """Takes from a file of lines those of steps after `step`, and any that was cut short; does nothing where there is none."""

    def is_kept(line: bytes) -> bool:
        try:
            return line.endswith(b"\n") and json.loads(line)["step"] <= step
        except (ValueError, TypeError, KeyError):  # whatever a damaged disk has made of it
            return False

    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if is_kept(line)]
        if kept != lines:
            partial = path.with_name(f"{path.name}.partial")
            with partial.open("wb") as file:
                file.writelines(kept)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)


class Trace:
    """A trace of some steps by JAX's profiler. The first process writes it; all of them begin and end it at the same steps."""

    def __init__(self, directory: pathlib.Path, steps: tuple[int, int] | None):
        self._directory = directory
        self._first, self._last = steps or (0, 0)
        self._running = False

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *_: object) -> None:
        if self._running:
            self.end()

    def begins(self, step: int) -> bool:
        """Whether it is to begin before this step; nothing else may be running then."""
        return step == self._first

    def begin(self) -> None:
        self._running = True
        if jax.process_index() == 0:
            jax.profiler.start_trace(str(self._directory))

    def ends(self, step: int) -> bool:
        """Whether it is to end when this step has ended."""
        return self._running and step == self._last

    def end(self) -> None:
        self._running = False
        if jax.process_index() == 0:
            jax.profiler.stop_trace()


def step_flops(model: ModelConfig, piece_lengths: np.ndarray) -> float:
    """Floating-point operations that a step over pieces of these lengths needs, forward and backward.

    A matrix costs 2 per element and token, attention 4 per head element and pair of tokens that see each other, of which
    a piece of n has n (n + 1) / 2; with a window of w, its tokens from the w-th on have w each. Backward costs twice as much
    as forward.
    """
    lengths = piece_lengths.astype(np.float64)
    table = decoder.table(model)
    stacked = [row for row in jax.tree.leaves(table["layers"]) if row.is_matrix]
    matrices = sum(row.size * row.num_layers for row in stacked) + decoder.head(table).size
    near = lengths if model.sliding_window is None else np.minimum(lengths, model.sliding_window)
    pairs = float(np.sum(near * (near + 1) / 2 + (lengths - near) * near))
    forward = 2 * matrices * float(lengths.sum()) + 4 * model.num_layers * model.num_heads * model.head_dim * pairs
    return 3 * forward


def num_parameters(table: layers.Weights) -> int:
    """Elements of all weights, padding not counted."""
    return sum(row.size * (row.num_layers or 1) for row in jax.tree.leaves(table))


def peak_tflops(device_kind: str) -> float | None:
    """The bfloat16 peak of a device, by JAX's name of its kind; None when we do not know it."""
    words = device_kind.replace("-", " ").split()
    return next((PEAK_TFLOPS[word] for word in words if word in PEAK_TFLOPS), None)


def peak_gib(devices: list[jax.Device]) -> float | None:
    """The most memory one of these devices had in use, ever; None where devices do not say."""
    peaks: list[Any] = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return max(peaks) / 2**30 if all(peak is not None for peak in peaks) else None
