"""Numbers for TensorBoard. To import it takes seconds where PyTorch is installed, which tensorboardX imports."""

import os
import pathlib
import socket
import struct
import time

from tensorboardX import record_writer
from tensorboardX.proto import event_pb2, summary_pb2

from jaxsp.runtime.jsonl import AppendFile


class TensorBoardWriter:
    """TensorBoard's file of events.

    (tensorboardX writes them in a thread: on a full disk that dies, and the tenth event after it blocks the run for ever.)
    """

    def __init__(self, directory: pathlib.Path, *, from_step: int):
        directory.mkdir(parents=True, exist_ok=True)
        self._file = AppendFile(
            directory
            / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        )
        self._add_event(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        # events of these steps that are there already do not count
        begins = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add_event(
            event_pb2.Event(wall_time=time.time(), step=from_step + 1, session_log=begins)
        )

    def add_scalars(self, scalars: dict[str, float], *, step: int) -> None:
        values = [
            summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in scalars.items()
        ]
        self._add_event(
            event_pb2.Event(
                wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=values)
            )
        )

    def sync(self) -> None:
        """As that of `records.Lines`."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _add_event(self, event: event_pb2.Event) -> None:
        """A record of TensorFlow's: its length, that one's checksum, the event, and its checksum."""
        data = event.SerializeToString()
        length, checksum = struct.pack("<Q", len(data)), record_writer.masked_crc32c
        self._file.add(
            length + struct.pack("<I", checksum(length)) + data + struct.pack("<I", checksum(data))
        )
