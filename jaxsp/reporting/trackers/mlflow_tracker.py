"""MLflow: the server of MLFLOW_TRACKING_URI, or mlflow.db in the run directory."""

import logging
import os
import re
import time
from collections.abc import Mapping

from jaxsp.config import yaml_io
from jaxsp.processes import redaction
from jaxsp.reporting.trackers import trackers

# MLFLOW_* where a user sets none: its own defaults retry for minutes, and send usage data
SETTINGS = "DISABLE_TELEMETRY=1 LOGGING_LEVEL=WARNING ASYNC_LOGGING_BUFFERING_SECONDS=1"
SETTINGS += " HTTP_REQUEST_MAX_RETRIES=1 HTTP_REQUEST_TIMEOUT=5"
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
PAUSE_S = 60.0  # without requests after one that failed: they delay the end of the process


class MlflowTracker(trackers.Tracker):
    """Run of MLflow, whose threads send the numbers. It keeps all values of steps that repeat."""

    def __init__(self, run: trackers.TrackedRun):
        for setting in SETTINGS.split():
            os.environ.setdefault(*f"MLFLOW_{setting}".split("="))
        import mlflow  # reads them

        self._mlflow = mlflow
        self._paused_until = 0.0
        logging.getLogger("alembic").setLevel(logging.WARNING)  # of 60 lines for a new database
        local = f"sqlite:///{run.directory.resolve()}/mlflow.db"
        mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or local)
        mlflow.set_experiment(run.find_project("MLFLOW_EXPERIMENT_NAME"))
        place = f"mlflow at {redaction.strip_credentials(mlflow.get_tracking_uri())}"
        started = mlflow.start_run(run.ids.get(place), run_name=run.find_name("MLFLOW_RUN_NAME"))
        if place not in run.ids:
            run.keep_id(place, started.info.run_id)
            fields = yaml_io.flatten(run.config.model_dump(mode="json"))
            mlflow.log_params({to_key(name): value for name, value in fields})
        queue = "mlflow.utils.async_logging.async_logging_queue"
        logging.getLogger(queue).addFilter(self._record_failure)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        if time.monotonic() >= self._paused_until:
            values = {to_key(name): value for name, value in numbers.items()}
            self._mlflow.log_metrics(values, step, synchronous=False)

    def close(self, outcome: trackers.Outcome) -> None:
        self._mlflow.end_run(STATUS[outcome])

    def _record_failure(self, record: logging.LogRecord) -> bool:
        if not self._paused_until:
            trackers.print_failure("mlflow", f"for a minute or more: {record.getMessage()}")
        self._paused_until = time.monotonic() + PAUSE_S
        return False  # not printed by MLflow


def to_key(name: str) -> str:
    """Returns a name with _ for characters and parts that MLflow refuses in names."""
    return re.sub(r"[^\w/.\- :]|(?<![^/])\.{0,2}(?![^/])", "_", name)[:250]
