"""TensorBoard: event files in the run directory.

Importing this module takes seconds if PyTorch is installed, because tensorboardX imports it.
"""

import os
import socket
import struct
import time
from collections.abc import Sequence

from tensorboardX import record_writer
from tensorboardX.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2

from jaxsp.reporting.trackers.tracker import Outcome, Point, Tracker
from jaxsp.runtime.jsonl import AppendFile


class TensorBoardTracker(Tracker):
    """Writes TensorBoard's event file.

    tensorboardX's SummaryWriter is not used: its thread dies on a full disk, and the tenth event
    after that blocks the run forever.
    """

    needs_thread = False

    def start(self) -> None:
        directory = self._run.directory / "tensorboard"
        directory.mkdir(parents=True, exist_ok=True)
        suffix = f"{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendFile(directory / f"events.out.tfevents.{suffix}")
        self._add_event(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        # a session start makes TensorBoard drop older events of the steps from here on
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        first_step = self._run.from_step + 1
        self._add_event(event_pb2.Event(wall_time=time.time(), step=first_step, session_log=start))

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            values = [
                summary_pb2.Summary.Value(tag=name, simple_value=value)
                for name, value in point.numbers.items()
            ]
            if point.texts:
                values.append(_make_text(point.group, point.markdown))
            summary = summary_pb2.Summary(value=values)
            self._add_event(
                event_pb2.Event(wall_time=time.time(), step=point.step, summary=summary)
            )

    def sync(self) -> None:
        self._file.sync()

    def finish(self, outcome: Outcome) -> None:
        self._file.close()

    def _add_event(self, event: event_pb2.Event) -> None:
        """Writes a TFRecord: length, checksum of the length, event, checksum of the event."""
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.add(length + _checksum(length) + data + _checksum(data))


def _make_text(tag: str, text: str) -> summary_pb2.Summary.Value:
    """Value that TensorBoard's text plugin shows, as Markdown."""
    plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
    shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
    return summary_pb2.Summary.Value(
        tag=tag,
        metadata=summary_pb2.SummaryMetadata(plugin_data=plugin),
        tensor=tensor_pb2.TensorProto(
            dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape
        ),
    )


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", record_writer.masked_crc32c(data))
