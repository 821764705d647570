"""MLflow: the server of MLFLOW_TRACKING_URI, or mlflow.db in the run directory."""

import logging
import os
import re
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from jaxsp.config import yaml_io
from jaxsp.run.trackers.tracker import Client, Outcome, Service, TrackedRun, print_failure
from jaxsp.system import output

# MLFLOW_* where a user sets none: its own defaults retry for minutes, and send usage data
SETTINGS = "DISABLE_TELEMETRY=1 LOGGING_LEVEL=WARNING ASYNC_LOGGING_BUFFERING_SECONDS=1"
SETTINGS += " HTTP_REQUEST_MAX_RETRIES=1 HTTP_REQUEST_TIMEOUT=5"
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
PAUSE_S = 60.0  # without requests after one that failed: they delay the end of the process


class Mlflow(Service):
    """The server of the environment variable MLFLOW_TRACKING_URI; without one, the database
    run.directory/mlflow.db."""

    type: Literal["mlflow"] = "mlflow"
    package: ClassVar[str] = "mlflow"

    def start(self, run: TrackedRun) -> Client:
        for setting in SETTINGS.split():
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
            fields = yaml_io.flatten(run.config)
            mlflow.log_params({to_key(name): value for name, value in fields})
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
        self._mlflow.end_run(STATUS[outcome])

    def _record_failure(self, record: logging.LogRecord) -> bool:
        if not self._paused_until:
            print_failure("mlflow", f"for a minute or more: {record.getMessage()}")
        self._paused_until = time.monotonic() + PAUSE_S
        return False  # not printed by MLflow


def to_key(name: str) -> str:
    """Returns a name with _ for characters and parts that MLflow refuses in names."""
    return re.sub(r"[^\w/.\- :]|(?<![^/])\.{0,2}(?![^/])", "_", name)[:250]
