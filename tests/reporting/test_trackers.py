"""Trackers: what they receive, and that a failing or blocked one neither delays nor ends a run."""

import json
import re
import threading
import time

import pytest

from jaxsp.config import config_file, yaml_io
from jaxsp.config.run_schema import LoggingConfig
from jaxsp.core.errors import UserError
from jaxsp.reporting.trackers import background, mlflow_tracker, registry, tracker
from jaxsp.reporting.trackers.background import BackgroundTracker
from jaxsp.reporting.trackers.tracker import TrackedRun, Tracker
from tests import messages


class FakeTracker(Tracker):
    """Keeps what it receives; fails the given number of times, and may block."""

    def __init__(self, *, num_failures=0, known_step=-1, blocked_by=None):
        super().__init__(None)
        self.points = []
        self.num_starts = 0
        self.outcome = None
        self.is_abandoned = False
        self._num_failures = num_failures
        self._known_step = known_step
        self._last_steps = {}
        self._blocked_by = blocked_by

    def start(self):
        self.num_starts += 1

    def has(self, point):
        return point.step <= self._last_steps.get(point.group, self._known_step)

    def log(self, points):
        if self._blocked_by is not None:
            self._blocked_by.wait()
        if self._num_failures > 0:
            self._num_failures -= 1
            raise ConnectionRefusedError(111, "Connection refused")
        self.points += points
        self._last_steps |= {point.group: point.step for point in points}

    def finish(self, outcome):
        self.outcome = outcome

    def abandon(self):
        self.is_abandoned = True


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(background, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(background, "MAX_RETRY_S", 0.02)
    monkeypatch.setattr(background, "SEND_INTERVAL_S", 0.01)


class Files:
    """Files of numbers in a folder, and threads that get the points added from now."""

    def __init__(self, folder):
        self.metrics = folder / "metrics.jsonl"
        self.evals = folder / "eval.jsonl"
        self.tasks = folder / "tasks.jsonl"
        self.threads = []

    def add_step(self, step):
        fields = {"step": step, "loss": step / 3, "num_loss_tokens": 7}
        self._add(self.metrics, fields)

    def add_eval(self, step):
        self._add(self.evals, {"step": step, "data": "json", "loss": step / 7})

    def add_task(self, step, length):
        rates = {"exact_rate": 0.5, "exact_rate_by_depth": {"0": 0.0, "1": 1.0}}
        self._add(self.tasks, {"step": step, "task": "needle", "length": length, **rates})

    def read_points(self):
        return tracker.read_points(self.metrics, self.evals, self.tasks)

    def start(self, fake):
        self.threads.append(BackgroundTracker("fake", fake, self.read_points))
        return self.threads[-1]

    def _add(self, path, fields):
        with path.open("a") as file:
            file.write(f"{json.dumps(fields)}\n")
        for thread in self.threads:
            thread.log(tracker.make_point(fields))


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def finish(thread, *, outcome="finished", limit_s=60.0):
    """Finishes, and returns how many seconds it took."""
    began = time.monotonic()
    thread.request_finish(outcome)
    thread.join(began + limit_s)
    return time.monotonic() - began


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def steps_of(points):
    return [(point.group, point.step) for point in points]


def test_a_tracker_receives_every_number_of_both_files_in_the_order_of_steps(files):
    fake = FakeTracker()
    for step in range(1, 40):
        files.add_step(step)
    thread = files.start(fake)
    for step in range(40, 101):
        files.add_step(step)
        if step % 50 == 0:
            files.add_eval(step)
    finish(thread, outcome="stopped")
    expected = [("train", step) for step in range(1, 101)]
    expected.insert(50, ("eval/json", 50))
    assert steps_of(fake.points) == [*expected, ("eval/json", 100)]
    assert fake.points[2].numbers == {"train/loss": 1.0, "train/num_loss_tokens": 7.0}
    assert fake.points[50].numbers == {"eval/json/loss": 50 / 7}
    assert fake.outcome == "stopped"


def test_a_step_is_read_before_its_evaluations_and_a_damaged_line_is_left_out(files):
    for step in range(1, 4):
        files.add_step(step)
        files.add_eval(step)
        for length in (64, 128):
            files.add_task(step, length)
    with files.metrics.open("a") as file:
        file.write('[3]\n{"step": 4, "lo')
    groups = ("train", "eval/json", "task/needle/64", "task/needle/128")
    assert steps_of(files.read_points()) == [
        (group, step) for step in range(1, 4) for group in groups
    ]
    *_, last = files.read_points()
    assert last.numbers == {
        "task/needle/128/exact_rate": 0.5,
        "task/needle/128/exact_rate_by_depth/0": 0.0,
        "task/needle/128/exact_rate_by_depth/1": 1.0,
    }


def test_a_sample_is_a_point_with_texts(tmp_path):
    line = {
        "step": 3,
        "data": "json",
        "sample": 1,
        "prompt": "a\nb",
        "answer": "c",
        "reference": "",
    }
    (tmp_path / "samples.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    (point,) = tracker.read_points(tmp_path / "samples.jsonl")
    assert (point.group, point.step, point.numbers) == ("sample/json/1", 3, {})
    assert point.texts == {"prompt": "a\nb", "answer": "c", "reference": ""}
    assert point.markdown.startswith("**prompt**\n\n    a\n    b\n\n**answer**\n\n    c\n")


def test_lines_that_are_added_while_the_files_are_read_are_not_read(files):
    files.add_step(1)
    points = files.read_points()
    files.add_eval(1)
    files.add_step(2)
    assert steps_of(points) == [("train", 1)]


def test_a_tracker_that_fails_for_a_while_misses_nothing(files, capfd):
    fake = FakeTracker(num_failures=3)
    thread = files.start(fake)
    for step in range(1, 6):
        files.add_step(step)
    wait_until(lambda: fake.points)
    finish(thread)
    assert [point.step for point in fake.points] == [1, 2, 3, 4, 5]
    assert fake.num_starts == 4
    failed, recovered = capfd.readouterr().err.splitlines()
    assert failed.startswith("fake: FAILS: Connection refused")
    assert recovered.startswith("fake: works again")


def test_a_tracker_that_always_fails_costs_two_lines_and_no_time(files, capfd):
    fake = FakeTracker(num_failures=10**9)
    thread = files.start(fake)
    for step in range(1, 5):
        files.add_step(step)
    wait_until(lambda: fake.num_starts >= 3)
    assert finish(thread, limit_s=60) < 10
    failed, lost = capfd.readouterr().err.splitlines()
    assert "FAILS" in failed
    assert re.match(messages.containing("fake", 1, 4, "Connection refused"), lost)
    assert fake.outcome is None
    assert fake.is_abandoned


def test_a_blocked_tracker_delays_neither_a_step_nor_the_end(files, capfd):
    released = threading.Event()
    fake = FakeTracker(blocked_by=released)
    files.add_step(1)
    thread = files.start(fake)
    began = time.monotonic()
    for step in range(2, 1001):
        files.add_step(step)
    assert time.monotonic() - began < 10
    assert 0.2 < finish(thread, limit_s=0.3) < 10
    (lost,) = capfd.readouterr().err.splitlines()
    assert re.match(messages.containing("fake", 1, "1,000", "does not answer"), lost)
    assert fake.is_abandoned
    released.set()


def test_a_resumed_tracker_receives_what_it_misses_and_nothing_twice(files):
    """An earlier process has written steps 1 to 6, of which the tracker has received 1 to 4."""
    for step in range(1, 7):
        files.add_step(step)
    fake = FakeTracker(known_step=4)
    thread = files.start(fake)
    files.add_step(7)
    finish(thread)
    assert [point.step for point in fake.points] == [5, 6, 7]


def make_config(folder, *changes):
    fields = {
        "run": {"directory": str(folder), "steps": 3},
        "model": {"config": {"model_type": "llama"}},
        "data": {"train": [{"source": "a.txt", "format": "text"}], "row_tokens": 128},
        "batch": {"rows_per_step": 8},
        "optimizer": {"learning_rate": 1e-3},
    }
    return config_file.parse(fields, changes)


def test_only_a_resumed_run_keeps_its_ids(tmp_path):
    config = make_config(tmp_path)
    first = TrackedRun(config, from_step=0, is_resume=False)
    first.write_id("wandb", "abc")
    first.write_id("mlflow", {"run_id": "1"})
    resumed = TrackedRun(config, from_step=1, is_resume=True)
    assert (resumed.read_id("wandb"), resumed.read_id("mlflow")) == ("abc", {"run_id": "1"})
    assert TrackedRun(config, from_step=0, is_resume=False).read_id("wandb") is None


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, '{"complete": 3}'])
def test_damaged_ids_are_as_those_of_a_new_run(tmp_path, content):
    (tmp_path / tracker.STATE_FILE).write_text(content)
    run = TrackedRun(make_config(tmp_path), from_step=1, is_resume=True)
    assert run.read_id("wandb") is None
    assert run.complete == []
    run.write_id("wandb", "abc")
    again = TrackedRun(make_config(tmp_path), from_step=1, is_resume=True)
    assert again.read_id("wandb") == "abc"


@pytest.fixture
def fake_kind(monkeypatch):
    """Lets logging.trackers=[mlflow] be the tracker that the test appends to a list."""
    fakes = []

    class Loaded(FakeTracker):
        def __new__(cls, run):
            return fakes[-1]

    monkeypatch.setattr(registry, "load", lambda name: Loaded)
    return fakes


def run_trackers(run, files):
    with registry.Trackers(run, ("mlflow",)) as trackers:
        trackers.start(files.metrics, files.evals, files.tasks)
        trackers.log(tracker.make_point({"step": 1, "loss": 2.0}))


def test_a_tracker_on_this_machine_is_waited_for(files, tmp_path, fake_kind, monkeypatch, capfd):
    monkeypatch.setattr(registry, "FINISH_TIMEOUT_S", 0.01)
    files.add_step(1)
    for is_local in (True, False):
        released = threading.Event()
        fake = FakeTracker(blocked_by=released)
        fake.is_local = is_local
        fake_kind.append(fake)
        threading.Timer(0.3, released.set).start()
        run_trackers(TrackedRun(make_config(tmp_path), from_step=0, is_resume=False), files)
        assert fake.is_abandoned != is_local
    assert "ARE NOT SENT" in capfd.readouterr().err


def test_a_run_that_is_done_sends_what_a_tracker_misses_once(files, tmp_path, fake_kind, capfd):
    config = make_config(tmp_path)
    for step in (1, 2, 3):
        files.add_step(step)
    fake_kind.append(FakeTracker(num_failures=10**9))
    run_trackers(TrackedRun(config, from_step=0, is_resume=False), files)
    assert fake_kind[-1].points == []

    def send(**fields):
        fake_kind.append(FakeTracker(known_step=1, **fields))
        run = TrackedRun(config, from_step=-1, is_resume=True)
        registry.send_missing(run, ("mlflow",), [files.metrics, files.evals, files.tasks])
        return [point.step for point in fake_kind[-1].points], fake_kind[-1].outcome

    capfd.readouterr()
    assert send(num_failures=10**9) == ([], None)
    (lost,) = (line for line in capfd.readouterr().err.splitlines() if "NOT SENT" in line)
    assert re.match(messages.containing("mlflow", 1, 3), lost)
    assert send() == ([2, 3], "finished")
    assert capfd.readouterr().err.splitlines() == ["mlflow: has all values of this run"]
    assert send() == ([], None)
    # a run that goes on after all has new values
    run_trackers(TrackedRun(config, from_step=3, is_resume=True), files)
    assert fake_kind[-1].outcome == "finished"


def test_params_have_the_names_of_the_command_line(tmp_path):
    run = TrackedRun(make_config(tmp_path), from_step=0, is_resume=False)
    params = dict(yaml_io.flatten(run.config))
    assert params["data.train.0.source"] == "a.txt"
    assert params["run.steps"] == 3
    assert params["logging.trackers"] == ["tensorboard"]


def test_a_missing_package_is_an_error_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(
        registry.importlib.util, "find_spec", lambda name: None if name == "wandb" else name
    )
    registry.check_installed(LoggingConfig(trackers=("tensorboard", "mlflow")))
    with pytest.raises(UserError, match=r"pip install 'jaxsp\[wandb\]'"):
        registry.check_installed(LoggingConfig(trackers=("tensorboard", "wandb")))


def test_a_single_name_is_a_list_and_a_tracker_counts_once(tmp_path):
    assert make_config(tmp_path, "logging.trackers=wandb").logging.trackers == ("wandb",)
    with pytest.raises(UserError, match="twice"):
        make_config(tmp_path, "logging.trackers=[wandb, wandb]")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("train/loss", "train/loss"),
        ("train/num_tokens_by_source/{stdlib}/*.py", "train/num_tokens_by_source/_stdlib_/_.py"),
        ("eval//data/../x", "eval/_/data/_/x"),
    ],
)
def test_names_for_mlflow_have_no_character_that_it_refuses(name, key):
    assert mlflow_tracker.to_key(name) == key


def test_neither_the_banner_nor_an_error_has_a_password(tmp_path, monkeypatch):
    uri = "http://me:se/cr@et@host:5000/a?token=also-secret"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    run = TrackedRun(make_config(tmp_path), from_step=0, is_resume=False)
    assert (
        mlflow_tracker.MlflowTracker.describe(run)
        == "mlflow at http://host:5000/a, experiment jaxsp"
    )
    error = ValueError(f"request to {uri} failed: 0123456789 is refused")
    connection = ConnectionError(f"cannot reach {uri}")
    for text in map(background.describe_error, (error, connection, OSError(5, f"of {uri}"))):
        assert not any(secret in text for secret in ("se/cr", "et@", "also-secret", "0123456789"))


def test_an_error_is_described_by_the_reason_that_the_system_gives():
    refused = RuntimeError("API request to http://host failed: HTTPConnectionPool ...")
    refused.__cause__ = ConnectionRefusedError(111, "Connection refused")
    assert background.describe_error(refused) == "Connection refused"
    closed = RuntimeError("aborted", ConnectionResetError("Remote end closed connection"))
    assert background.describe_error(closed) == "Remote end closed connection"
    assert background.describe_error(TimeoutError("timed out")) == "it does not answer"
    assert background.describe_error(KeyError("a")) == "KeyError: 'a'"
    assert len(background.describe_error(ValueError("word " * 100))) < 180
