"""MLflow: the server of MLFLOW_TRACKING_URI, or a database in the run directory.

MLflow's environment variables hold: MLFLOW_TRACKING_URI, MLFLOW_TRACKING_USERNAME, _PASSWORD and
_TOKEN, MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_NAME, MLFLOW_HTTP_REQUEST_TIMEOUT.
"""

import json
import logging
import os
import re
import time
from collections.abc import Sequence

from jaxsp.config import yaml_io
from jaxsp.core import redaction
from jaxsp.processes import distributed
from jaxsp.reporting.trackers import tracker
from jaxsp.reporting.trackers.background import describe_error
from jaxsp.reporting.trackers.tracker import Outcome, Point, TrackedRun, Tracker

NAME = "mlflow"

DATABASE = "mlflow.db"
"""File in the run directory, without MLFLOW_TRACKING_URI."""

MAX_NUMBERS = 1_000
"""Maximum number of metrics in a request of MLflow."""

MAX_PARAMS = 100
"""Maximum number of params, and of tags, in a request of MLflow."""

MAX_PARAM_LENGTH = 6_000
"""Maximum number of characters of a param of MLflow."""

STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
"""MLflow's status of a run at the end of a process. A process that is killed leaves RUNNING."""

ENVIRONMENT = {
    # Otherwise a request to a server that is gone blocks for minutes and prints each attempt
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    # Otherwise MLflow sends usage data to its makers
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Settings of MLflow that a user may override."""


class MlflowTracker(Tracker):
    """Run of MLflow.

    MLflow keeps every value of a metric, so steps that MLflow has are not sent again: of steps that
    a run repeats, it keeps the first values.
    """

    def __init__(self, run: TrackedRun):
        super().__init__(run)
        self._uri = _find_uri(run)
        self.is_local = self._uri.startswith("sqlite:")
        self._run_id = ""
        self._failed_texts = False
        self._last_steps: dict[str, int] = {}
        """Last step that MLflow has, by group."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)

    @classmethod
    def describe(cls, run: TrackedRun) -> str:
        address = redaction.strip_credentials(_find_uri(run))
        return f"mlflow at {address}, experiment {_find_experiment(run)}"

    def start(self) -> None:
        import mlflow

        for name in ("mlflow", "alembic"):  # the creation of a database prints 60 lines
            logging.getLogger(name).setLevel(logging.WARNING)
        self._client = mlflow.MlflowClient(tracking_uri=self._uri)
        self._last_steps = {}
        saved = self._run.read_id(NAME)
        address = redaction.strip_credentials(self._uri)
        if not self._run_id and saved is not None and saved["tracking_uri"] == address:
            self._run_id = saved["run_id"]
        if not self._run_id:
            self._run_id = self._create_run()
            self._run.write_id(NAME, {"tracking_uri": address, "run_id": self._run_id})
        self._client.update_run(self._run_id, status="RUNNING")
        self._log_config()

    def has(self, point: Point) -> bool:
        if point.texts:  # written again, a text replaces itself
            return False
        if point.group not in self._last_steps:
            # a count, which every point of the group has
            names = (name for name in point.numbers if "/num_" in name)
            name = to_key(next(names, f"{point.group}/num_loss_tokens"))
            history = self._client.get_metric_history(self._run_id, name)
            self._last_steps[point.group] = max((metric.step for metric in history), default=-1)
        return point.step <= self._last_steps[point.group]

    def log(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        batch: list[Metric] = []
        for point in points:
            if point.texts:
                self._log_texts(point)
            metrics = [
                Metric(to_key(name), number, now_ms, point.step)
                for name, number in point.numbers.items()
            ]
            if len(batch) + len(metrics) > MAX_NUMBERS:
                self._client.log_batch(self._run_id, metrics=batch)
                batch = []
            batch += metrics
        self._client.log_batch(self._run_id, metrics=batch)

    def _log_texts(self, point: Point) -> None:
        """Writes texts as an artifact, whose store may be out of reach where the server is not."""
        if self._failed_texts:
            return
        try:
            name = f"{to_key(point.group)}/step_{point.step}.md"
            self._client.log_text(self._run_id, point.markdown, name)
        except Exception as error:  # the libraries of stores raise errors of many kinds
            self._failed_texts = True
            distributed.log(
                f"mlflow: cannot store samples: {describe_error(error)}. samples.jsonl has them"
            )

    def finish(self, outcome: Outcome) -> None:
        self._client.set_terminated(self._run_id, status=STATUS[outcome])

    def _create_run(self) -> str:
        name = _find_experiment(self._run)
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            artifacts = None
            if self._uri == _local_uri(self._run):  # otherwise a folder in the working directory
                artifacts = (self._run.directory / "mlartifacts").resolve().as_uri()
            experiment_id = self._client.create_experiment(name, artifact_location=artifacts)
        run_name = self._run.name or os.environ.get("MLFLOW_RUN_NAME") or self._run.default_name
        return self._client.create_run(experiment_id, run_name=run_name).info.run_id

    def _log_config(self) -> None:
        """Records the config as params. Fields that a resumed run changes become tags."""
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self._run_id).data.params
        values = {
            to_key(name): (value if isinstance(value, str) else json.dumps(value))[
                :MAX_PARAM_LENGTH
            ]
            for name, value in yaml_io.flatten(self._run.config)
        }
        params = [Param(name, value) for name, value in values.items() if name not in known]
        tags = [
            RunTag(name, value) for name, value in values.items() if known.get(name, value) != value
        ]
        for start in range(0, max(len(params), len(tags)), MAX_PARAMS):
            part = slice(start, start + MAX_PARAMS)
            self._client.log_batch(self._run_id, params=params[part], tags=tags[part])


def to_key(name: str) -> str:
    """Returns a name with _ for what MLflow refuses in names of metrics and params."""
    parts = re.sub(r"[^\w/.\- :]", "_", name).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)[:250]


def _find_uri(run: TrackedRun) -> str:
    return os.environ.get("MLFLOW_TRACKING_URI") or _local_uri(run)


def _local_uri(run: TrackedRun) -> str:
    return f"sqlite:///{(run.directory / DATABASE).resolve()}"


def _find_experiment(run: TrackedRun) -> str:
    return run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or tracker.DEFAULT_PROJECT
