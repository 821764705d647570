"""TensorBoard: event files in the run directory."""

import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from jaxsp.run.trackers.tracker import Client, Outcome, TrackedRun, Tracker
from jaxsp.system.jsonl import AppendFile


class TensorBoard(Tracker):
    """TensorBoard event files in run.directory/tensorboard."""

    type: Literal["tensorboard"] = "tensorboard"

    folder: ClassVar[str | None] = "tensorboard"

    def start(self, run: TrackedRun) -> Client:
        return _EventFile(run)


class _EventFile(Client):
    """Writes TensorBoard's event file.

    tensorboardX's SummaryWriter is not used: its thread dies on a full disk, and the tenth event
    after that blocks the run forever.
    """

    def __init__(self, run: TrackedRun):
        # takes seconds if PyTorch is installed, because tensorboardX imports it
        from tensorboardX import record_writer
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event_pb2 = event_pb2
        self._summary_pb2 = summary_pb2
        self._compute_checksum = record_writer.masked_crc32c
        directory = run.directory / "tensorboard"
        directory.mkdir(parents=True, exist_ok=True)
        suffix = f"{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendFile(directory / f"events.out.tfevents.{suffix}")
        self._add_event(file_version="brain.Event:2")
        # a session start makes TensorBoard drop older events of the steps from here on
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add_event(step=run.from_step + 1, session_log=start)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        values = [
            self._summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in numbers.items()
        ]
        self._add_event(step=step, summary=self._summary_pb2.Summary(value=values))

    def close(self, outcome: Outcome) -> None:
        self._file.close()

    def _add_event(self, **fields: Any) -> None:
        """Writes a TFRecord: length, checksum of the length, event, checksum of the event."""
        data = self._event_pb2.Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = [struct.pack("<I", self._compute_checksum(part)) for part in (length, data)]
        self._file.add(length + checksums[0] + data + checksums[1])
