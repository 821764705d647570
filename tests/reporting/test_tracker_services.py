"""Real trackers: an MLflow server on this machine, which is killed during a run, and W&B offline.

One run is trained in three processes, the second and third of which resume it.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import yaml

from tests import batches, commands

mlflow = pytest.importorskip("mlflow", reason="needs mlflow-skinny")
pytest.importorskip("flask_cors", reason="MLflow's server needs flask-cors")
pytest.importorskip("wandb", reason="needs wandb")

pytestmark = [
    pytest.mark.e2e,
    # of SQLAlchemy, in MLflow
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

NUM_STEPS = 24
"""Steps of the run with a killed server. With their evaluations, they take longer than the start of
MLflow's client."""

NUM_EVAL_DOCUMENTS = 200

SOURCE = "a*.jsonl"
"""Name of the training data, with a character that MLflow refuses."""


class Server:
    """MLflow's server with a database in a folder."""

    def __init__(self, folder):
        self._log = folder / "server.log"
        self.database = f"sqlite:///{folder}/server.db"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self._port}"

    def start(self):
        words = ("-m", "mlflow", "server", "--backend-store-uri", self.database, "--workers", "1")
        words += ("--host", "127.0.0.1", "--port", str(self._port))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                # without its executor of jobs, which needs more packages and processes
                env={
                    **os.environ,
                    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
                    "MLFLOW_DISABLE_TELEMETRY": "true",
                },
                cwd=self._log.parent,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self):
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
                return
            time.sleep(0.2)
        pytest.fail(f"MLflow's server does not start: {self._log.read_text()[-2000:]}")

    def kill(self):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with data and the config of a run."""
    folder = tmp_path_factory.mktemp("trackers")
    commands.write_documents(folder / "a.jsonl", [64] * 40)
    commands.write_documents(folder / "eval.jsonl", [64] * NUM_EVAL_DOCUMENTS, seed=1)
    source = {"source": str(folder / "a.jsonl"), "format": "tokens", "name": SOURCE}
    held_out = {"source": str(folder / "eval.jsonl"), "format": "tokens", "name": "held out"}
    fields = {
        "run": {"directory": str(folder / "run"), "steps": 4, "eval_every": 1},
        "model": {"config": batches.SMALL_LLAMA, "compute_dtype": "float32"},
        "mesh": {"virtual_cpu_devices": 1},
        "data": {"train": [source], "eval": [held_out], "row_tokens": 64},
        "batch": {"rows_per_step": 1},
        "optimizer": {"learning_rate": 0.01},
        "logging": {"trackers": ["tensorboard", "wandb", "mlflow"], "project": "tests"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(fields))
    return folder


@pytest.fixture(scope="module")
def server(folder):
    server = Server(folder)
    server.start()
    server.wait()
    yield server
    with contextlib.suppress(ProcessLookupError):
        server.kill()


def start(folder, server, *, steps):
    """Starts the run, or resumes it."""
    env = {
        "HOME": str(folder),  # no login of the user
        "NETRC": str(folder / "netrc"),
        "WANDB_API_KEY": "",
        "MLFLOW_TRACKING_URI": server.uri,
    }
    return commands.start_python(
        "-m",
        "jaxsp.train",
        folder / "config.yaml",
        f"run.steps={steps}",
        env=env,
    )


def end(process):
    """Waits for a run. Returns its output, and its lines on stderr about trackers."""
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    lines = [line for line in stderr.splitlines() if "wandb" in line or "mlflow" in line.lower()]
    return " ".join(stdout.split()), lines


def read_expected(directory):
    """Numbers of metrics.jsonl and eval.jsonl, by name and step."""
    numbers = {}
    for name in ("metrics.jsonl", "eval.jsonl"):
        for line in commands.read_lines(directory / name):
            group = f"eval/{line.pop('data')}" if "data" in line else "train"
            step = line.pop("step")
            for field, value in commands.flatten_numbers(line).items():
                numbers[f"{group}/{field}", step] = value
    return numbers


def read_mlflow_run(uri):
    """The only run of an MLflow server or database, with the last value of each metric."""
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def read_mlflow(uri):
    """Numbers of the only run of an MLflow server or database, by name and step, and the run."""
    client = mlflow.MlflowClient(tracking_uri=uri)
    run = read_mlflow_run(uri)
    numbers = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            original = name.replace("a_.jsonl", SOURCE)
            assert (original, metric.step) not in numbers, "a step twice"
            numbers[original, metric.step] = metric.value
    return numbers, run


def read_records(path):
    """Records of a W&B file: LevelDB's log format, after 7 bytes.

    Blocks have 32 KiB. A part has a checksum (4 bytes), its length (2) and its kind (1): whole 1,
    first 2, middle 3, last 4.
    """
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    assert content[:4] == b":W&B"
    start = 7
    data = b""
    while start + 7 <= len(content):
        left = 2**15 - start % 2**15
        if left < 7:
            start += left
            continue
        length = int.from_bytes(content[start + 4 : start + 6], "little")
        kind = content[start + 6]
        data += content[start + 7 : start + 7 + length]
        start += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(data)
            data = b""


def read_wandb(directory):
    """Numbers of the latest process in W&B's offline files, and the record of its run."""
    (path,) = (directory / "wandb/latest-run").glob("*.wandb")
    numbers = {}
    run = None
    for record in read_records(path):
        if record.WhichOneof("record_type") == "run":
            run = record.run
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            for name, value in items.items():
                if not name.startswith("_"):
                    assert (name, items["_step"]) not in numbers
                    numbers[name, items["_step"]] = value
    return numbers, run


def test_mlflow_and_wandb_show_every_number_of_metrics_and_eval(folder, server):
    printed, lines = end(start(folder, server, steps=4))
    assert lines == []
    directory = folder / "run"
    assert f"wandb sync {directory}/wandb/latest-run" in printed
    assert server.uri in printed
    expected = read_expected(directory)
    assert {step for _, step in expected} == {1, 2, 3, 4}
    numbers, run = read_mlflow(server.uri)
    assert numbers == expected
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["data.row_tokens"] == "64"
    numbers, record = read_wandb(directory)
    assert numbers == expected
    assert (record.project, record.display_name) == ("tests", "run")
    config = {item.key: json.loads(item.value_json) for item in record.config.update}
    assert config["data"]["row_tokens"] == 64


@pytest.mark.slow
def test_a_run_whose_mlflow_server_is_killed_ends_well(folder, server):
    directory = folder / "run"
    _, first = read_mlflow(server.uri)
    first_wandb_id = read_wandb(directory)[1].run_id
    process = start(folder, server, steps=NUM_STEPS)
    total = "train/num_tokens_total"
    while read_mlflow_run(server.uri).data.metrics[total] == first.data.metrics[total]:
        assert process.poll() is None, "ended before MLflow received a step"
        time.sleep(0.05)
    process.send_signal(signal.SIGSTOP)  # otherwise the run might end first
    server.kill()
    process.send_signal(signal.SIGCONT)
    _, (failed, lost) = end(process)
    # before a request or during one
    assert re.match(
        r"mlflow: FAILS: (Connection refused|Connection reset|Remote end closed)", failed
    )
    assert lost.startswith("mlflow: ")
    assert "NOT SENT" in lost
    expected = read_expected(directory)
    assert {step for _, step in expected} == set(range(1, NUM_STEPS + 1))
    numbers, run = read_mlflow(server.database)
    assert run.info.run_id == first.info.run_id
    assert {step for _, step in numbers} >= {1, 2, 3, 4, 5}
    assert numbers.items() < expected.items()
    numbers, record = read_wandb(directory)
    assert record.run_id == first_wandb_id
    assert numbers == expected, "all steps, also those of the first process"


@pytest.mark.slow
def test_the_next_process_sends_what_a_killed_server_has_missed(folder, server):
    server.start()
    server.wait()
    _, lines = end(start(folder, server, steps=NUM_STEPS + 2))
    assert lines == []
    numbers, run = read_mlflow(server.uri)
    assert numbers == read_expected(folder / "run")
    assert run.data.tags["run.steps"] == str(NUM_STEPS + 2)
