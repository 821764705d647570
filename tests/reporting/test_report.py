"""Report of runs: the numbers of the page, escaping, long runs, damaged files, several runs."""

import html
import html.parser
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from jaxsp import report
from jaxsp.core.errors import UserError
from jaxsp.reporting.report import chart_data, comparison, downsampling, facts, page, run_files
from jaxsp.run import config_changes
from tests import messages
from tests.reporting import synthetic_runs
from tests.reporting.synthetic_runs import CONFIG, write_run

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)"> {{data}} & \'"'
"""Text that would run code, load an image or insert data if it were not escaped."""


class Page(html.parser.HTMLParser):
    """Elements of a page, its text, and its data."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.text = ""
        self.scripts = []
        self.feed(text)
        (data,) = (script for kind, script in self.scripts if kind == "application/json")
        self.data = json.loads(data)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append((dict(attributes).get("type"), ""))

    def handle_data(self, data):
        if self.lasttag == "script" and data.strip():
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)
        else:
            self.text += data


def make_page(*directories):
    runs = run_files.read_runs(directories)
    text = page.render(runs, is_neutral=config_changes.is_neutral)
    return Page(text), text


def test_the_data_of_the_page_is_that_of_the_files(tmp_path):
    lines = list(synthetic_runs.metrics_lines(50))
    lines[9] |= {"loss": None, "token_accuracy": None, "checkpoint_wait_s": 2.5}
    evals = synthetic_runs.eval_lines([25, 50], names=("held out", "code"))
    starts = [synthetic_runs.start_line(), synthetic_runs.start_line(20, previous_step=24)]
    actual, _ = make_page(write_run(tmp_path / "a", lines, evals=evals, starts=starts))
    (run,) = actual.data["runs"]
    for name in chart_data.SERIES:
        assert run["series"][name] == {"mean": [line[name] for line in lines]}, name
    assert run["x"]["step"] == [line["step"] for line in lines]
    assert run["x"]["tokens"] == [line["num_tokens_total"] for line in lines]
    assert run["x"]["time"] == pytest.approx(np.cumsum([line["step_s"] for line in lines]))
    assert run["first_steps"] is None
    assert run["restarts"]["tokens"] == [lines[19]["num_tokens_total"]]
    for eval_set in run["evals"]:
        expected = [line["loss"] for line in evals if line["data"] == eval_set["name"]]
        assert eval_set["series"]["loss"] == expected
        assert eval_set["x"]["step"] == [25, 50]
        assert eval_set["x"]["tokens"][1] == lines[49]["num_tokens_total"]
    losses = [line["loss"] for line in lines if line["loss"] is not None]
    assert f"{np.mean(losses[-20:]):.4f}" in actual.text
    assert "20 (4 steps repeated)" in actual.text


def test_names_from_users_stay_text(tmp_path):
    lines = synthetic_runs.metrics_lines(3, sources=(HOSTILE, "b"))
    config = CONFIG | {"model": {"source": HOSTILE}, HOSTILE: HOSTILE}
    directory = write_run(
        # a name with every character that a folder may have
        tmp_path / HOSTILE.replace("/", ""),
        lines,
        evals=synthetic_runs.eval_lines([3], names=(HOSTILE,)),
        starts=[synthetic_runs.start_line(device_kind=HOSTILE, config_changes=[HOSTILE])],
        config=config,
    )
    other = write_run(tmp_path / "other", synthetic_runs.metrics_lines(3), config=CONFIG)
    for directories in ([directory], [directory, other]):
        actual, _ = make_page(*directories)
        assert [tag for tag, _ in actual.elements if tag == "script"] == ["script", "script"]
        assert "img" not in {tag for tag, _ in actual.elements}
        names = {name for _, attributes in actual.elements for name in attributes}
        assert not {name for name in names if name.startswith("on")}
        assert HOSTILE in actual.text, "the name of a source"
        run = actual.data["runs"][0]
        assert (run["name"], run["evals"][0]["name"]) == (directory.name, HOSTILE)


def test_the_page_needs_no_network(tmp_path):
    directory = write_run(tmp_path / "a", synthetic_runs.metrics_lines(3))
    actual, text = make_page(directory)
    assert not re.findall("https?:|url\\((?!#)|@import|//cdn", text)
    for tag, attributes in actual.elements:
        assert tag not in ("iframe", "object", "embed")
        assert "src" not in attributes
        assert attributes.get("href", "data:,") == "data:,"
    (policy,) = (
        attributes["content"] for _, attributes in actual.elements if "http-equiv" in attributes
    )
    assert policy.startswith("default-src 'none'")


def test_a_million_steps_keep_their_extremes_in_a_small_page(tmp_path):
    directory = write_run(tmp_path / "a", synthetic_runs.metrics_lines(20))
    (run,) = run_files.read_runs([directory])
    count = 1_000_000
    random = np.random.default_rng(0)
    columns = {name: random.random(count) for name in run.columns}
    columns["step"] = np.arange(1.0, count + 1)
    columns["num_tokens_total"] = np.cumsum(np.full(count, 32_000.0))
    columns["loss"][[777_776, 123_456]] = (900.0, -1.0)
    columns["loss"][5000:9000] = np.nan
    long = run_files.RunRecord(**(vars(run) | {"columns": columns}))
    (data,) = chart_data.build_data([long])["runs"]
    loss = data["series"]["loss"]
    points = len(data["x"]["step"])
    assert points <= chart_data.MAX_POINTS
    for values in loss.values():
        assert len(values) == points
    for index, extreme, place in ((777_776, 900.0, "max"), (123_456, -1.0, "min")):
        point = loss[place].index(extreme)
        assert data["first_steps"][point] <= index + 1 <= data["x"]["step"][point]
    assert loss["mean"][12] is loss["min"][12] is loss["max"][12] is None, "all lines are null"
    assert (data["first_steps"][0], data["x"]["step"][-1]) == (1, count)
    text = page.render([long], is_neutral=config_changes.is_neutral)
    assert len(text) < 3e6
    assert "stands for up to 500 of 1,000,000 lines" in text


@pytest.mark.parametrize("num_lines", [0, 1, 7, 100, 101])
def test_groups_cover_every_line_once(num_lines):
    groups = downsampling.group_lines(num_lines, max_points=10)
    values = np.random.default_rng(0).random(num_lines)
    reduced = groups.reduce(values)
    if num_lines == 0:
        assert reduced is None
        return
    parts = np.split(values, groups.starts[1:])
    assert sum(map(len, parts)) == num_lines
    assert len(parts) == min(num_lines, 10)
    assert reduced["mean"] == pytest.approx([part.mean() for part in parts])
    if num_lines > 10:
        assert reduced["min"] == [part.min() for part in parts]
        assert reduced["max"] == [part.max() for part in parts]
    assert groups.take_last(values).tolist() == [part[-1] for part in parts]


def test_damaged_lines_are_left_out_and_counted(tmp_path):
    lines = list(synthetic_runs.metrics_lines(5))
    directory = write_run(tmp_path / "a", lines)
    with (directory / "metrics.jsonl").open("ab") as file:
        # another process repeated a step; then a full disk, a flipped bit, and a running process
        file.write(json.dumps(lines[2] | {"loss": 9.5}).encode() + b"\n")
        file.write(b'[1, 2]\n{"step": "x"}\n\xff\xfe\n{"step": 6, "lo')
    (run,) = run_files.read_runs([directory])
    assert run.num_damaged == 4
    assert run.columns["step"].tolist() == [1, 2, 3, 4, 5]
    assert run.columns["loss"][2] == 9.5
    actual, _ = make_page(directory)
    assert "4 lines of the run's files could not be read" in actual.text


def nonfinite_lines():
    lines = list(synthetic_runs.metrics_lines(3))
    return [line | {"loss": None, "grad_norm": None, "mfu": None} for line in lines]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"lines": []}, ["ended: 0 of 400 steps", "no step in metrics.jsonl yet"]),
        ({"lines": synthetic_runs.metrics_lines(1)}, ["ended: 1 of 400 steps"]),
        ({"lines": synthetic_runs.metrics_lines(400)}, ["complete: 400 of 400 steps"]),
        (
            {"lines": nonfinite_lines(), "nonfinite": [{"step": 2, "loss": "nan"}]},
            ["Non-finite steps1"],
        ),
        (
            {"lines": [{"step": 10, "loss": 2.0, "step_s": 0.5}, {"step": 20, "step_s": 0.5}]},
            ["Not every step has a line", "Timeabout 10 s"],
        ),
        (
            {"lines": [], "evals": synthetic_runs.eval_lines([0])},
            ["not recorded: an older version"],
        ),
    ],
    ids="none one complete nonfinite sparse evaluated".split(),
)
def test_unusual_runs_have_a_report(tmp_path, fields, expected):
    actual, _ = make_page(write_run(tmp_path / "a", **fields))
    text = " ".join(actual.text.split())
    for part in expected:
        assert part in text


def test_a_run_with_a_new_heartbeat_is_running(tmp_path):
    directory = write_run(tmp_path / "a", synthetic_runs.metrics_lines(2))
    (directory / "heartbeat.json").touch()
    assert "ended: 2 of 400 steps" in make_page(directory)[1], "without lock.json"
    (directory / "lock.json").touch()
    assert "running: 2 of 400 steps" in make_page(directory)[1]


def test_memory_and_time_are_shown_by_cause(tmp_path):
    lines = list(synthetic_runs.metrics_lines(100))
    evals = synthetic_runs.eval_lines([50, 100])
    directory = write_run(tmp_path / "a", lines, evals=evals, starts=[synthetic_runs.start_line()])
    (run,) = run_files.read_runs([directory])
    time = facts.measure_time(run)
    assert time.step + time.data_wait == pytest.approx(sum(line["step_s"] for line in lines))
    assert time.data_wait == pytest.approx(sum(line["data_wait_s"] for line in lines))
    assert (time.evaluation, time.checkpoint, time.compilation) == (8.0, 2.5, 41.5)
    actual, _ = make_page(directory)
    for text in ("60.0 GiB of 71.0 GiB available", "26.0 GiB", "61.2 GiB measured"):
        assert text in " ".join(actual.text.split())


def write_mesh_runs(folder):
    """Three runs: of two meshes with the same losses to 1e-6, and of another learning rate."""
    config = {**CONFIG, "mesh": {"replica": 1, "data": 8, "seq": 1}}
    other = {**CONFIG, "optimizer": {"learning_rate": 0.5}}
    lines = list(synthetic_runs.metrics_lines(40))
    close = [{**line, "loss": line["loss"] + 1e-6 * (line["step"] == 7)} for line in lines]
    far = [{**line, "loss": line["loss"] + 0.25, "num_rows": 9} for line in lines[:30]]
    return [
        write_run(folder / "x/2x4", lines),
        write_run(folder / "y/2x4", close, config=config),
        write_run(folder / "far", far, config=other),
    ]


def test_runs_side_by_side_are_compared_step_by_step(tmp_path):
    directories = write_mesh_runs(tmp_path)
    actual, _ = make_page(*directories[:2])
    assert [run["name"] for run in actual.data["runs"]] == ["x/2x4", "y/2x4"]
    assert "differ by at most 1e-6 over 40 common steps (at step 7)" in actual.text
    assert "None of these fields changes what is learned" in actual.text
    differences = actual.data["runs"][1]["series"]["loss_difference"]["mean"]
    assert differences[6] == pytest.approx(1e-6)
    assert sum(differences) == differences[6]

    first, second, far = run_files.read_runs(directories)
    difference = comparison.compare_losses(first, far)
    assert difference.max_difference == pytest.approx(0.25)
    assert (difference.num_steps, difference.num_unequal_counts) == (30, 30)
    assert comparison.compare_losses(first, second).num_unequal_counts == 0
    fields = comparison.compare_configs([first, second, far], is_neutral=config_changes.is_neutral)
    assert [(field.field, field.is_neutral) for field in fields] == [
        ("optimizer.learning_rate", False),
        ("mesh.data", True),
        ("mesh.seq", True),
    ]
    assert fields[0].values == ("0.0001", "0.0001", "0.5")
    assert comparison.describe_difference([first, first]).startswith("The losses are equal")


def test_runs_without_a_common_step_are_compared_otherwise(tmp_path):
    lines = list(synthetic_runs.metrics_lines(6))
    directories = [write_run(tmp_path / "a", lines[:3]), write_run(tmp_path / "b", lines[3:])]
    assert "no common step with a loss" in make_page(*directories)[0].text


def test_the_command_writes_into_the_run_or_the_current_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write_run(tmp_path / name, synthetic_runs.metrics_lines(2))
    report.main(["a"])
    report.main(["a", "b"])
    report.main(["a", "b", "--out", "a/both.html"])
    for path, num_runs in (("a/report.html", 1), ("report.html", 2), ("a/both.html", 2)):
        assert len(Page((tmp_path / path).read_text()).data["runs"]) == num_runs
    assert "-> a/both.html" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["missing"], ["RUN = missing: there is no such folder"]),
        (["empty"], ["RUN = empty: is not a run's directory", "config.yaml"]),
        (["a", "missing", "empty"], ["RUN = missing", "\nRUN = empty"]),
        (["a", "./a"], ["named twice"]),
        (["a", "--out", "missing/x.html"], ["--out = missing/x.html"]),
        (["broken"], ["broken/config.yaml: cannot be read"]),
    ],
)
def test_folders_that_are_not_runs_are_refused(tmp_path, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "a", synthetic_runs.metrics_lines(2))
    (write_run(tmp_path / "broken", []) / "config.yaml").write_text("a: [")
    with pytest.raises(UserError, match=messages.containing(*expected)):
        report.main(words)


@pytest.mark.e2e
def test_the_script_has_no_syntax_error(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node, which checks the syntax of the page's script")
    actual, _ = make_page(write_run(tmp_path / "a", synthetic_runs.metrics_lines(2)))
    (script,) = (text for kind, text in actual.scripts if kind is None)
    (tmp_path / "script.js").write_text(script)
    done = subprocess.run(
        [node, "--check", tmp_path / "script.js"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
