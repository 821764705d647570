"""Trackers: what they receive, and that one that fails or hangs neither delays nor ends a run."""

import http.server
import json
import threading
import time

import pytest
import yaml

from jaxsp.core.errors import UserError
from jaxsp.run import config_file, run_directory, trackers
from jaxsp.run.run_directory import Trackers
from jaxsp.run.trackers import TRACKERS, LoggingConfig
from tests import batches, commands, small_runs


def make_config(folder, *changes):
    fields = small_runs.make_fields(folder, run={"directory": str(folder)}, logging={})
    fields["model"]["config"] = {"model_type": "llama"}
    return config_file.parse(fields, changes)


class FakeClient(trackers.Client):
    """Keeps what it receives. `failing` is the name of a method that raises."""

    def __init__(self, run, failing=None):
        self.first_ids = dict(run.ids)
        self.received = []
        self._failing = failing
        run.keep_id("fake", "an id")
        self._receive("start")

    def log(self, numbers, step):
        self._receive("log", step, numbers)

    def close(self, outcome):
        self._receive("close", outcome)

    def _receive(self, name, *values):
        self.received.append((name, *values))
        if name == self._failing:
            raise ConnectionError("no route to http://me:secret@host")


@pytest.fixture
def fakes(monkeypatch):
    """Replaces the trackers by fake ones, of which wandb fails in the method named `failing`."""
    started = {"failing": None}

    def start(self, run):
        started[self.type] = client = FakeClient.__new__(FakeClient)
        client.__init__(run, started["failing"] if self.type == "wandb" else None)
        return client

    for kind in TRACKERS:
        monkeypatch.setattr(kind, "start", start)
    return started


@pytest.mark.parametrize(("failing", "num_calls"), [("start", 1), ("log", 2), ("close", 4)])
def test_a_tracker_that_fails_costs_one_line_and_no_other(
    tmp_path, capfd, fakes, failing, num_calls
):
    fakes["failing"] = failing
    config = make_config(tmp_path, "logging.trackers=[wandb, mlflow]")
    with Trackers(config, from_step=0, is_resume=False) as running:
        running.log({"step": 1, "loss": 2.0})
        running.log({"step": 2, "data": "books", "loss": None, "loss_by_position": {"0": 3}})
        running.outcome = "stopped"
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("wandb: OFF")
    assert "secret" not in line
    assert fakes["mlflow"].received == [
        ("start",),
        ("log", 1, {"train/loss": 2.0}),
        ("log", 2, {"eval/books/loss_by_position/0": 3.0}),
        ("close", "stopped"),
    ]
    assert len(fakes["wandb"].received) == num_calls


def test_only_a_resumed_run_keeps_its_ids_and_an_exception_is_a_failed_run(tmp_path, fakes):
    config = make_config(tmp_path, "logging.trackers=mlflow")

    def start(*, is_resume):
        with Trackers(config, from_step=0, is_resume=is_resume):
            return fakes["mlflow"].first_ids

    assert start(is_resume=False) == {}
    assert start(is_resume=True) == {"fake": "an id"}
    assert start(is_resume=False) == {}
    (tmp_path / trackers.IDS_FILE).write_text("{")
    assert start(is_resume=True) == {}
    with pytest.raises(ZeroDivisionError), Trackers(config, from_step=0, is_resume=False):
        _ = 1 / 0
    assert fakes["mlflow"].received[-1] == ("close", "failed")


def test_a_missing_package_is_an_error_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wandb" else name)
    LoggingConfig(trackers=["tensorboard", "mlflow"]).check_installed()
    with pytest.raises(UserError, match=r"pip install 'jaxsp\[wandb\]'"):
        LoggingConfig(trackers=["tensorboard", "wandb"]).check_installed()


class HangingServer(http.server.ThreadingHTTPServer):
    """MLflow's server: does not answer requests for the paths in `hanging`."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hanging = ()
        self.num_metrics = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if any(path in self.path for path in self.server.hanging):
            time.sleep(60)
        if "log-batch" in self.path:
            self.server.num_metrics += len(json.loads(body).get("metrics", ()))
        ids = {"experiment_id": "1", "lifecycle_stage": "active"}
        info = {"run_id": "0123abcd", "status": "RUNNING", **ids}
        text = json.dumps({"experiment": ids, "run": {"info": info}})
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST

    def log_message(self, *_):
        """Prints nothing."""


@pytest.fixture
def server(monkeypatch):
    server = HangingServer()
    uri = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("WANDB_BASE_URL", uri)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.e2e
def test_an_mlflow_server_that_hangs_during_the_run_delays_no_step(tmp_path, capfd, server):
    pytest.importorskip("mlflow", reason="needs mlflow-skinny")
    config = make_config(tmp_path, "logging.trackers=mlflow")
    delays = []

    def log(step):
        began = time.monotonic()
        running.log({"step": step, "loss": 2.0})
        delays.append(time.monotonic() - began)

    with Trackers(config, from_step=0, is_resume=False) as running:
        log(1)
        deadline = time.monotonic() + 30
        while not server.num_metrics and time.monotonic() < deadline:
            time.sleep(0.1)
        assert server.num_metrics == 1
        server.hanging = ("log-batch", "update")
        for step in range(2, 60):
            log(step)
            time.sleep(0.1)
        began = time.monotonic()
    assert time.monotonic() - began < 20
    assert max(delays) < 1
    failures = [line for line in capfd.readouterr().err.splitlines() if "OFF" in line]
    assert failures[0].startswith("mlflow: OFF")
    assert len(failures) <= 2, "of the steps, and of the end"


@pytest.mark.e2e
def test_a_server_that_hangs_at_the_start_costs_one_line(tmp_path, capfd, server, monkeypatch):
    pytest.importorskip("wandb")
    server.hanging = ("",)
    monkeypatch.setattr(trackers, "WANDB_INIT_TIMEOUT_S", 2.0)
    began = time.monotonic()
    config = make_config(tmp_path, "logging.trackers=wandb")
    with Trackers(config, from_step=0, is_resume=False) as running:
        running.log({"step": 1, "loss": 2.0})
    assert time.monotonic() - began < 40
    (failure,) = (line for line in capfd.readouterr().err.splitlines() if "OFF" in line)
    assert failure.startswith("wandb: OFF")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Directory of a run of all trackers, trained in two processes, and their outputs."""
    pytest.importorskip("mlflow", reason="needs mlflow-skinny")
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("trackers")
    commands.write_documents(folder / "a*.jsonl", [64] * 8)
    source = {"source": str(folder / "a*.jsonl"), "format": "tokens", "name": "a*"}
    sections = {
        "run": {"steps": 2, "eval_every": 1},
        "model": {"config": batches.SMALL_LLAMA},
        "mesh": {"virtual_cpu_devices": 1},
        "data": {"train": [source], "eval": [source | {"name": "held out"}]},
        "logging": {"trackers": ["tensorboard", "wandb", {"type": "mlflow", "project": "tests"}]},
    }
    fields = small_runs.make_fields(folder, **sections)
    (folder / "config.yaml").write_text(yaml.safe_dump(fields))
    env = {"HOME": str(folder), "NETRC": str(folder / "netrc"), "WANDB_API_KEY": ""}
    words = ("-m", "jaxsp.train", folder / "config.yaml")
    processes = [
        commands.run_python(*words, f"run.steps={steps}", env=env, timeout=300) for steps in (2, 3)
    ]
    for process in processes:
        assert process.returncode == 0, process.stderr
    return folder / "run", [process.stderr for process in processes]


def read_expected(directory):
    """Numbers of metrics.jsonl and eval.jsonl, by name and step."""
    return {
        (name, line["step"]): value
        for file in ("metrics.jsonl", "eval.jsonl")
        for line in commands.read_lines(directory / file)
        for name, value in run_directory.name_numbers(line).items()
    }


@pytest.mark.slow
@pytest.mark.e2e
# of SQLAlchemy, in MLflow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_has_every_number_of_both_processes_in_one_run(run):
    import mlflow

    directory, _ = run
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{directory}/mlflow.db")
    experiment = client.get_experiment_by_name("tests")
    (tracked,) = client.search_runs([experiment.experiment_id])
    numbers = {
        (name, metric.step): metric.value
        for name in tracked.data.metrics
        for metric in client.get_metric_history(tracked.info.run_id, name)
    }
    expected = read_expected(directory)
    assert {step for _, step in expected} == {1, 2, 3}
    assert numbers == {(trackers.to_key(x), step): n for (x, step), n in expected.items()}
    assert (tracked.info.run_name, tracked.info.status) == ("run", "FINISHED")
    assert tracked.data.params["data.row_tokens"] == "64"


@pytest.mark.slow
@pytest.mark.e2e
def test_wandb_has_a_folder_of_the_same_run_for_each_process(run):
    directory, outputs = run
    folders = sorted((directory / "wandb").glob("offline-run-*"))
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1
    for folder, output, last_step in zip(folders, outputs, (2, 3), strict=True):
        assert f"wandb sync {folder}" in output
        (path,) = folder.glob("*.wandb")
        content = path.read_bytes()
        loss = json.dumps(read_expected(directory)["train/loss", last_step])
        assert b"train/loss" in content
        assert b"eval/held out/loss" in content
        assert loss.encode() in content
