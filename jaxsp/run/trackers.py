"""Trackers of a run's numbers: their config, and the connections to them.

W&B's environment variables hold, such as WANDB_API_KEY, WANDB_MODE, WANDB_ENTITY and WANDB_DIR, and
MLflow's.
"""

import abc
import dataclasses
import importlib.util
import logging
import os
import pathlib
import re
import socket
import struct
import textwrap
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from jaxsp.config import fields, yaml_io
from jaxsp.config.fields import Choice, ConfigSection, PositiveCount, with_examples
from jaxsp.core import files
from jaxsp.core.errors import UserError
from jaxsp.system import distributed, output
from jaxsp.system.jsonl import AppendFile

IDS_FILE = "trackers.json"
"""File of a run directory with the ids of the run in its trackers."""

Outcome = Literal["finished", "stopped", "failed"]
"""End of a process: all steps are done, it was stopped and can be resumed, or it failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """Facts about a run for its trackers."""

    directory: pathlib.Path
    config: dict[str, Any]
    """The whole config, as JSON values."""
    shutdown_grace: timedelta
    from_step: int
    """Last step whose numbers were recorded by an earlier process."""
    ids: dict[str, Any]
    """Ids of a resumed run by tracker."""

    def keep_id(self, tracker: str, run_id: str) -> None:
        """Keeps the id of the run in a tracker for processes that resume it. Raises: OSError."""
        self.ids[tracker] = run_id
        files.write_json(self.directory / IDS_FILE, self.ids)


class Client(abc.ABC):
    """Connection of a run to a tracker. If a method raises, the run continues without it."""

    @abc.abstractmethod
    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Records numbers by name. Must return within a second, also if a server hangs."""

    @abc.abstractmethod
    def close(self, outcome: Outcome) -> None:
        """Completes the record of this process."""


class Tracker(ConfigSection, abc.ABC):
    """Program or service that shows the numbers of a run."""

    type: str
    """Tracker that shows the run's metrics."""

    folder: ClassVar[str | None] = None
    """Folder of the run directory with its files, for the banner."""

    @abc.abstractmethod
    def start(self, run: TrackedRun) -> Client:
        """Starts the run in the tracker, or continues it. May raise any exception."""


class Service(Tracker):
    """Tracker with projects and names of runs. Its extra has the name of its type."""

    package: ClassVar[str]
    """Module that must be installed."""
    project: Annotated[str | None, with_examples("long-context", min_length=1)] = None
    """Project in wandb, or experiment in mlflow. null: the environment variable WANDB_PROJECT or
    MLFLOW_EXPERIMENT_NAME, or jaxsp if it is not set."""
    run_name: Annotated[str | None, with_examples("qwen3-64k", min_length=1)] = None
    """Name of the run. null: the environment variable WANDB_NAME or MLFLOW_RUN_NAME, or the name of
    run.directory if it is not set."""

    def find_project(self, variable: str) -> str:
        """project, else the value of a variable of the environment, else the default."""
        return self.project or os.environ.get(variable) or "jaxsp"

    def find_name(self, variable: str, run: TrackedRun) -> str:
        """Returns run_name, else the value of a variable, else the run directory's name."""
        return self.run_name or os.environ.get(variable) or run.directory.resolve().name


def print_failure(name: str, text: str) -> None:
    """Prints a line about a tracker that fails, without secrets. Args: text: time and reason."""
    text = textwrap.shorten(output.redact(text), 300)
    distributed.log(f"{name}: OFF for this process, metrics.jsonl has all values: {text}")


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


WANDB_INIT_TIMEOUT_S = 30.0
"""Time limit for W&B's server to accept the run. W&B's default is 90."""

WANDB_FINISH_TIMEOUT_S = 10.0
"""Time limit at the end to upload the rest, at most run.shutdown_grace. W&B has none."""


class Wandb(Service):
    """Weights & Biases; offline, in run.directory/wandb, without a login."""

    type: Literal["wandb"] = "wandb"
    package: ClassVar[str] = "wandb"

    def start(self, run: TrackedRun) -> Client:
        import wandb

        # Otherwise W&B sends its errors to its makers
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        mode: Any = wandb.setup(wandb.Settings(silent=True)).settings.mode
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            mode = "offline"
        grace_s = run.shutdown_grace.total_seconds()
        started = wandb.init(
            mode=mode,
            id=run.ids.get("wandb"),
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or run.directory,
            project=self.find_project("WANDB_PROJECT"),
            name=self.find_name("WANDB_NAME", run),
            config=run.config,
            allow_val_change=True,
            settings=wandb.Settings(
                console="off",
                init_timeout=WANDB_INIT_TIMEOUT_S,
                finish_timeout=max(1.0, min(WANDB_FINISH_TIMEOUT_S, grace_s)),
                finish_timeout_raises=True,
            ),
        )
        run.keep_id("wandb", started.id)
        if started.offline:
            distributed.log(f"wandb: offline; upload with wandb sync {started.settings.sync_dir}")
        return _WandbClient(started)


class _WandbClient(Client):
    """Run of W&B, whose process of its own (wandb-core) writes and uploads what it is given.

    Online, W&B keeps the first values of steps that a resumed run repeats.
    """

    def __init__(self, run: Any):
        self._run = run

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=int(outcome == "failed"))


# MLFLOW_* where a user sets none: its own defaults retry for minutes, and send usage data
MLFLOW_SETTINGS = "DISABLE_TELEMETRY=1 LOGGING_LEVEL=WARNING ASYNC_LOGGING_BUFFERING_SECONDS=1"
MLFLOW_SETTINGS += " HTTP_REQUEST_MAX_RETRIES=1 HTTP_REQUEST_TIMEOUT=5"
MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MLFLOW_PAUSE_S = 60.0  # without requests after one that failed: they delay the end of the process


class Mlflow(Service):
    """The server of the environment variable MLFLOW_TRACKING_URI; without one, the database
    run.directory/mlflow.db."""

    type: Literal["mlflow"] = "mlflow"
    package: ClassVar[str] = "mlflow"

    def start(self, run: TrackedRun) -> Client:
        for setting in MLFLOW_SETTINGS.split():
            os.environ.setdefault(*f"MLFLOW_{setting}".split("="))
        import mlflow  # reads them

        logging.getLogger("alembic").setLevel(logging.WARNING)  # of 60 lines for a new database
        local = f"sqlite:///{run.directory.resolve()}/mlflow.db"
        mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or local)
        mlflow.set_experiment(self.find_project("MLFLOW_EXPERIMENT_NAME"))
        place = f"mlflow at {output.strip_credentials(mlflow.get_tracking_uri())}"
        name = self.find_name("MLFLOW_RUN_NAME", run)
        started = mlflow.start_run(run.ids.get(place), run_name=name)
        if place not in run.ids:
            run.keep_id(place, started.info.run_id)
            values = yaml_io.flatten(run.config)
            mlflow.log_params({to_key(name): value for name, value in values})
        return _MlflowClient(mlflow)


class _MlflowClient(Client):
    """Run of MLflow, whose threads send the numbers. It keeps all values of steps that repeat."""

    def __init__(self, mlflow: Any):
        self._mlflow = mlflow
        self._paused_until = 0.0
        queue = "mlflow.utils.async_logging.async_logging_queue"
        logging.getLogger(queue).addFilter(self._record_failure)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        if time.monotonic() >= self._paused_until:
            values = {to_key(name): value for name, value in numbers.items()}
            self._mlflow.log_metrics(values, step, synchronous=False)

    def close(self, outcome: Outcome) -> None:
        self._mlflow.end_run(MLFLOW_STATUS[outcome])

    def _record_failure(self, record: logging.LogRecord) -> bool:
        if not self._paused_until:
            print_failure("mlflow", f"for a minute or more: {record.getMessage()}")
        self._paused_until = time.monotonic() + MLFLOW_PAUSE_S
        return False  # not printed by MLflow


def to_key(name: str) -> str:
    """Returns a name with _ for characters and parts that MLflow refuses in names."""
    return re.sub(r"[^\w/.\- :]|(?<![^/])\.{0,2}(?![^/])", "_", name)[:250]


TRACKERS = (TensorBoard, Wandb, Mlflow)

TRACKER = Choice(selector="type", types=TRACKERS, is_name=True)


class LoggingConfig(ConfigSection):
    """Logs in addition to metrics.jsonl."""

    trackers: Annotated[
        tuple[Annotated[Tracker, TRACKER], ...],
        with_examples("[tensorboard, wandb]", strict=False),
    ] = (TensorBoard(),)
    """Trackers that show the values of metrics.jsonl and eval.jsonl. An entry is a name, or a
    mapping of type and the fields of that tracker. A failing tracker neither ends the run nor
    delays a step."""
    profile_steps: Annotated[
        tuple[PositiveCount, PositiveCount] | None, with_examples("[3, 5]", strict=False)
    ] = None
    """First and last step to trace with JAX's profiler. The trace is in run.directory/profile, for
    XProf or Perfetto."""

    @pydantic.field_validator("trackers", mode="before")
    @classmethod
    def _check_trackers(cls, value: Any) -> Any:
        entries = [value] if isinstance(value, str) else value
        if isinstance(entries, list | tuple):
            names = [*filter(None, map(TRACKER.find, entries))]
            if len({*names}) < len(names):
                raise ValueError("must not name a tracker twice")
        return entries

    @pydantic.field_validator("profile_steps", mode="before")
    @classmethod
    def _check_profile_steps(cls, value: Any) -> Any:
        if value is None:
            return value
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        if not is_pair or not all(map(fields.is_count, value)) or value[0] > value[1]:
            raise ValueError("must be the first and the last step, counted from 1, or null")
        return value

    def check_installed(self) -> None:
        """Raises: UserError if the package of a tracker is not installed."""
        for tracker in self.trackers:
            name = tracker.type
            if isinstance(tracker, Service) and importlib.util.find_spec(tracker.package) is None:
                raise UserError(
                    f"logging.trackers = [{', '.join(each.type for each in self.trackers)}]: "
                    f"{name} needs the package {tracker.package}, which is not installed. "
                    f"Use pip install 'jaxsp[{name}]'."
                )
