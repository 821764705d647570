"""Report of runs: the numbers of the page, escaping, comparison, unusual runs, the command."""

import html.parser
import json
import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest

from jaxsp import report
from jaxsp.core.errors import UserError
from jaxsp.reporting.report import charts
from tests import messages
from tests.reporting import synthetic_runs
from tests.reporting.synthetic_runs import CONFIG, write_run

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)"> {{data}} & \'"'
"""Text that would run code, load an image or insert data if it were not escaped."""

OTHER_CHARTS = "eval_loss difference loss_by_position loss_per_doubling long_ppl exact_rate".split()
"""Charts whose numbers are not a field of metrics.jsonl."""


class Page(html.parser.HTMLParser):
    """Elements of a page, its text, and its charts by title."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.text = ""
        self.scripts = []
        self.feed(text)
        self.text = " ".join(self.text.split())
        self.charts = {chart["title"]: chart for chart in json.loads(self.scripts[0])}

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.lasttag == "script":
            self.scripts[-1] += data
        else:
            self.text += f" {data}"


def make_page(folder, *directories):
    report.main([*map(str, directories), "--out", str(folder / "page.html")])
    return Page((folder / "page.html").read_text(encoding="utf-8"))


def test_the_page_shows_the_numbers_of_the_files(tmp_path):
    kinds = ("router_", "reward_", "chosen_", "rejected_")
    of_few_runs = [name for name in charts.CHARTS if name.startswith(kinds)]
    lines = [
        line | {name: line["step"] / (2 + i) for i, name in enumerate(of_few_runs)}
        for line in synthetic_runs.metrics_lines(50)
    ]
    lines[9] |= {"loss": None, "token_accuracy": None, "checkpoint_wait_s": 2.5}
    evals = synthetic_runs.eval_lines([25, 50], names=("held out", "code"))
    starts = [synthetic_runs.start_line(), synthetic_runs.start_line(20, previous_step=24)]
    starts[1]["memory"]["host"] = {"moments": 3 * 2**30}
    nonfinite = [{"step": 10, "loss": "nan"}]
    page = make_page(
        tmp_path, write_run(tmp_path / "a", lines, evals=evals, starts=starts, nonfinite=nonfinite)
    )
    fields = {title: field for field, (title, *_) in charts.CHARTS.items()}
    of_steps = {title for title, field in fields.items() if field not in OTHER_CHARTS}
    for title in of_steps:
        trace = page.charts[title]["traces"][0]
        assert trace["y"] == [line[fields[title]] for line in lines], title
        assert trace["x"]["step"] == [line["step"] for line in lines]
        assert trace["x"]["tokens"] == [line["num_tokens_total"] for line in lines]
        minutes = np.cumsum([line["step_s"] for line in lines]) / 60
        assert trace["x"]["time"] == pytest.approx(minutes, abs=1e-3)
    averages = page.charts["Token accuracy"]["traces"][1]
    assert averages["name"].endswith("average of 2 lines")
    assert averages["y"][10] == lines[10]["token_accuracy"], "the line before is null"
    assert averages["y"][49] == pytest.approx(
        (lines[48]["token_accuracy"] + lines[49]["token_accuracy"]) / 2
    )
    _, _, restart, cross = page.charts["Loss"]["traces"]
    assert restart["x"]["step"] == [20, 20, 20]
    assert cross["x"]["tokens"] == [lines[9]["num_tokens_total"]]
    for trace in page.charts["Evaluation loss"]["traces"]:
        assert trace["y"] == [line["loss"] for line in evals if line["data"] == trace["name"]]
        assert trace["x"]["tokens"][1] == lines[49]["num_tokens_total"]
    losses = [line["loss"] for line in lines if line["loss"] is not None]
    steps_s = sum(line["step_s"] - line["data_wait_s"] for line in lines)
    total_s = sum(line["step_s"] for line in lines) + 16 + 2.5 + 83
    for text in (
        f"{np.mean(losses[-20:]):.4f}",
        f"steps, without waits {steps_s:.1f} {steps_s / total_s:.1%} data wait",
        f"evaluation 16.0 {16 / total_s:.1%} checkpoint wait 2.5 {2.5 / total_s:.1%}",
        f"compilation 83.0 {83 / total_s:.1%}",
        "saved activations 26 43.3% other temporaries 17 28.3%",
        "Host memory by cause For each device. GiB a moments 3 100.0%",
        "compiled 60 GiB Memory per device, available 71 GiB",
        "Model org/model",
        f"books {lines[-1]['num_tokens_total']:,}",
        "Restarts 1 Non-finite steps 1",
        "20 24 data 2 x seq 4 8 NVIDIA H100",
    ):
        assert text in page.text


def test_the_loss_by_position_is_that_of_the_first_and_last_evaluation(tmp_path):
    losses = [(4.0, 3.5), (3.0, 2.5), (2.0, 1.5, 1.0)]
    evals = [
        line | synthetic_runs.positions(*of_step, num_filled=2)
        for line, of_step in zip(synthetic_runs.eval_lines([0, 25, 50]), losses, strict=True)
    ]
    only_last = synthetic_runs.eval_lines([50], names=("code",))
    only_last[0] |= synthetic_runs.positions(7.0)
    directory = write_run(
        tmp_path / "a", synthetic_runs.metrics_lines(50), evals=[*evals, *only_last]
    )
    chart = make_page(tmp_path, directory).charts["Loss by position in the document"]
    lines = {
        (trace["name"], trace["line"]["width"], trace["line"]["dash"]): (trace["x"], trace["y"])
        for trace in chart["traces"]
    }
    assert lines == {
        ("held out, step 0", 1, "solid"): ([64, 128], [4.0, 3.5]),
        ("held out, step 50", 2, "solid"): ([64, 128, 256], [2.0, 1.5, 1.0]),
        ("held out, step 50, filled", 2, "dash"): ([64, 128], [2.5, 2.0]),
        ("code, step 50", 2, "solid"): ([64], [7.0]),
    }
    ticks = dict(zip(chart["x_axis"]["tickvals"], chart["x_axis"]["ticktext"], strict=True))
    assert (ticks[64], ticks[128], ticks[1 << 25]) == ("0", "128", "32M")


def make_evaluated_run(directory):
    """Writes a run with a second eval set that has no LongPPL, and two tasks."""
    evals = synthetic_runs.eval_lines([0, 50], names=("books", "code"))
    for line in evals:
        line |= {"loss_per_doubling": -0.001 * line["step"], "long_ppl": None, "num_key_tokens": 0}
        if line["data"] == "books":
            line |= {"long_ppl": 1234.5, "num_key_tokens": 81}
    tasks = [
        synthetic_runs.task_line(50, "needle", 8192, exact_rate_by_depth={"0.5": 0.25, "1": 0.5}),
        synthetic_runs.task_line(50, "needle", 4096, exact_rate_by_depth={"0": 0.5, "1": 1.0}),
        synthetic_runs.task_line(50, "multi_key", 4096, exact_rate=0.125, num_samples=1000),
        # jaxsp eval appends lines of earlier checkpoints
        synthetic_runs.task_line(0, "needle", 4096, exact_rate_by_depth={"0": 0.0}),
    ]
    return write_run(directory, synthetic_runs.metrics_lines(50), evals=evals, tasks=tasks)


def test_long_context_results_have_curves_tables_and_a_heatmap(tmp_path):
    page = make_page(tmp_path, make_evaluated_run(tmp_path / "a"))
    curves = {
        (title, trace["name"]): trace["y"]
        for title in ("Loss per doubling of the position", "LongPPL", "Retrieval: exact answers")
        for trace in page.charts[title]["traces"]
    }
    assert curves == {
        ("Loss per doubling of the position", "books"): [0, -0.05],
        ("Loss per doubling of the position", "code"): [0, -0.05],
        ("LongPPL", "books"): [1234.5, 1234.5],
        ("Retrieval: exact answers", "needle 4,096"): [0.5, 0.5],
        ("Retrieval: exact answers", "needle 8,192"): [0.5],
        ("Retrieval: exact answers", "multi_key 4,096"): [0.125],
    }
    dark, light = page.charts["Needles: exact answers"]["traces"]
    assert (dark["x"], dark["y"]) == (["4,096", "8,192"], ["0%", "50%", "100%"])
    assert dark["z"] == [[None, None], [None, 0.25], [None, None]]
    assert light["z"] == [[0.5, None], [None, None], [1.0, 0.5]]
    for text in (
        "step loss token accuracy loss per doubling LongPPL key tokens books 50 2.2392 55.0% "
        "-0.0500 1,234.50 81 code 50 2.5392 55.0% -0.0500 - 0 Retrieval tasks",
        "step exact answers answer loss samples needle 8,192 50 50.0% 1.2500 20 needle 4,096 50",
        "multi_key 4,096 50 12.5% 1.2500 1,000",
    ):
        assert text in page.text


def test_results_of_other_settings_are_apart(tmp_path):
    """jaxsp eval appends lines of the same steps, with whatever settings it was given."""
    evals = synthetic_runs.eval_lines([25, 50])
    cut = {"data_digest": "of other cuts", "row_tokens": 32_768}
    changes = (cut, cut | {"compute_dtype": "float32"}, {"rope": "yarn"}, {"data_digest": "x"})
    evals += [evals[-1] | {"loss": 0.5 + n} | change for n, change in enumerate(changes)]
    evals.append(evals[-2] | {"data": "code"})
    # other rows that cut no document change nothing: the line replaces that of training
    evals.append(evals[1] | {"loss": 2.25, "row_tokens": 512})
    tasks = [
        synthetic_runs.task_line(50, "needle", 64, exact_rate_by_depth={"0": 0.25}),
        synthetic_runs.task_line(50, "needle", 64, exact_rate_by_depth={"0": 1.0}, rope="yarn"),
        # a length that the run does not evaluate
        synthetic_runs.task_line(50, "needle", 512, exact_rate_by_depth={"0": 0.5}, rope="yarn"),
    ]
    lines = synthetic_runs.metrics_lines(50)
    page = make_page(tmp_path, write_run(tmp_path / "a", lines, evals=evals, tasks=tasks))
    last = {trace["name"]: trace["y"][-1] for trace in page.charts["Evaluation loss"]["traces"]}
    assert last == {
        "held out": 2.25,
        "held out, rows of 32,768 tokens": 0.5,
        "held out, rows of 32,768 tokens, float32 compute": 1.5,
        "held out, RoPE yarn": 2.5,
        "held out, data x": 3.5,
        "code, RoPE yarn": 2.5,
    }
    assert "held out 2.2500 at step 50 Median" in page.text, "the best of the run's own"
    assert "needle 64, RoPE yarn 50 50.0%" in page.text
    dashes = {
        trace["name"]: trace["line"]["dash"]
        for trace in page.charts["Retrieval: exact answers"]["traces"]
    }
    assert dashes["needle 64"] == dashes["needle 64, RoPE yarn"] != dashes["needle 512, RoPE yarn"]
    light, dark = page.charts["Needles: exact answers"]["traces"]
    assert [light["z"], dark["z"]] == [[[0.25]], [[None]]]


def test_long_context_results_of_several_runs_are_side_by_side(tmp_path):
    directories = [make_evaluated_run(tmp_path / name) for name in "ab"]
    page = make_page(
        tmp_path, *directories, write_run(tmp_path / "old", synthetic_runs.metrics_lines(2))
    )
    assert [title for title in page.charts if title.startswith("Needles")] == [
        "Needles: exact answers, a",
        "Needles: exact answers, b",
    ]
    colors = [trace["meta"]["color"] for trace in page.charts["LongPPL"]["traces"]]
    assert colors == ["--run0", "--run1"]
    assert "multi_key 4,096 a 50 12.5% 1.2500 1,000 multi_key 4,096 b 50" in page.text


def test_names_from_users_stay_text_in_a_page_that_loads_nothing(tmp_path):
    texts = dict.fromkeys(("data", "prompt", "answer", "reference"), HOSTILE)
    sample = {"step": 3, "sample": 0, **texts}
    directory = write_run(
        # a name with every character that a folder may have
        tmp_path / HOSTILE.replace("/", ""),
        synthetic_runs.metrics_lines(3, sources=(HOSTILE, "b")),
        evals=synthetic_runs.eval_lines([3], names=(HOSTILE,)),
        starts=[synthetic_runs.start_line(device_kind=HOSTILE, config_changes=[HOSTILE])],
        samples=[sample],
        config=CONFIG | {"model": {"source": HOSTILE}, HOSTILE: HOSTILE},
    )
    other = write_run(tmp_path / "other", synthetic_runs.metrics_lines(3), config=CONFIG)
    for directories in ([directory], [directory, other]):
        page = make_page(tmp_path, *directories)
        assert [tag for tag, _ in page.elements].count("script") == 3
        assert not {"img", "iframe", "object", "embed"} & {tag for tag, _ in page.elements}
        names = {name for _, attributes in page.elements for name in attributes}
        assert not {name for name in names if name.startswith("on") or name == "src"}
        assert " ".join(HOSTILE.split()) in page.text, "the name of a source"
        for chart in page.charts.values():
            # plotly draws tags in names
            assert not re.search("[<>]", "".join(trace["name"] for trace in chart["traces"]))
        (policy,) = (x["content"] for _, x in page.elements if "http-equiv" in x)
        assert policy.startswith("default-src 'none'")


def test_long_runs_keep_their_extremes(tmp_path):
    lines = list(synthetic_runs.metrics_lines(10_000))
    lines[7776] |= {"loss": 900.0}
    lines[1234] |= {"loss": -1.0}
    for line in lines[5000:5100]:
        line["loss"] = None
    page = make_page(tmp_path, write_run(tmp_path / "a", lines))
    trace = page.charts["Loss"]["traces"][0]
    assert len(trace["y"]) == len(trace["x"]["step"]) <= charts.MAX_POINTS
    assert trace["x"]["step"] == sorted(trace["x"]["step"])
    places = dict(zip(trace["x"]["step"], trace["y"], strict=True))
    assert (places[7777], places[1235]) == (900.0, -1.0)
    assert "Charts show the extremes of 10,000 lines" in page.text


def test_damaged_lines_are_left_out_and_counted(tmp_path):
    lines = list(synthetic_runs.metrics_lines(5))
    directory = write_run(tmp_path / "a", lines)
    with (directory / "metrics.jsonl").open("ab") as file:
        # another process repeated a step; then a full disk, a flipped bit, and a running process
        file.write(json.dumps(lines[2] | {"loss": 9.5, "mfu": "x"}).encode() + b"\n")
        file.write(b'[1, 2]\n{"step": "x"}\n\xff\xfe\n{"step": 6, "lo')
    damaged = {"step": 5, "data": "x", "loss_by_position": {"0": 2.0, "1x": 3.0, "128": "y"}}
    (directory / "eval.jsonl").write_text(json.dumps(damaged))
    tasks = [
        synthetic_runs.task_line(5, "needle", 64, exact_rate_by_depth={"0": 0.5, "x": 1.0}),
        synthetic_runs.task_line(6, "needle", 64, exact_rate_by_depth=None),
        {"step": 6, "task": [], "length": "x"},
    ]
    (directory / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    page = make_page(tmp_path, directory)
    assert page.charts["Loss by position in the document"]["traces"][-1]["y"] == [2.0]
    assert page.charts["Needles: exact answers"]["traces"][1]["z"] == [[0.5]]
    losses = [*(line["loss"] for line in lines[:2]), 9.5, *(line["loss"] for line in lines[3:])]
    assert page.charts["Loss"]["traces"][0]["y"] == losses
    assert page.charts["Model FLOPs utilization (MFU)"]["traces"][0]["y"][2] is None
    assert f"books {lines[-1]['num_tokens_total']:,}" in page.text
    assert "4 lines could not be read" in page.text


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
            ["Non-finite steps 1"],
        ),
        (
            {"lines": [{"step": 10, "loss": 2.0, "step_s": 0.5}, {"step": 20, "step_s": 0.5}]},
            ["not every step has a line", "Time 10 s"],
        ),
        ({"lines": [], "evals": synthetic_runs.eval_lines([0])}, ["an older version"]),
    ],
    ids="none one complete nonfinite sparse evaluated".split(),
)
def test_unusual_runs_have_a_report(tmp_path, fields, expected):
    page = make_page(tmp_path, write_run(tmp_path / "a", **fields))
    for part in expected:
        assert part in page.text


def test_a_run_with_a_new_heartbeat_is_running(tmp_path):
    directory = write_run(tmp_path / "a", synthetic_runs.metrics_lines(2))
    (directory / "heartbeat.json").touch()
    assert "ended: 2 of 400 steps" in make_page(tmp_path, directory).text, "without lock.json"
    (directory / "lock.json").touch()
    assert "running: 2 of 400 steps" in make_page(tmp_path, directory).text


def test_runs_side_by_side_are_compared_step_by_step(tmp_path):
    lines = list(synthetic_runs.metrics_lines(40))
    close = [{**line, "loss": line["loss"] + 1e-6 * (line["step"] == 7)} for line in lines]
    far = [{**line, "loss": line["loss"] + 0.25, "num_rows": 9} for line in lines[:30]]
    mesh = {**CONFIG, "mesh": {"replica": 1, "data": 8, "seq": 1}}
    rate = {**CONFIG, "optimizer": {"learning_rate": 0.5}}
    late = [{**line, "step": line["step"] + 40} for line in lines]
    page = make_page(
        tmp_path,
        write_run(tmp_path / "x/2x4", lines),
        write_run(tmp_path / "y/2x4", close, config=mesh),
        write_run(tmp_path / "far", far, config=rate),
        write_run(tmp_path / "late", late),
    )
    names = [f"{tmp_path}/{name}" for name in ("x/2x4", "y/2x4", "far", "late")]
    assert [trace["name"] for trace in page.charts["Peak memory"]["traces"]] == names
    second, third = page.charts["Difference of the losses"]["traces"]
    assert [value for value in second["y"] if value] == pytest.approx([1e-6])
    assert third["y"] == pytest.approx([0.25] * 30)
    differences = page.text.split("Differences of the configs")[1].split("Charts")[0]
    for text in (
        "at most 1e-6 (at step 7) over 40 common steps. Numbers of rows and tokens differ in 0",
        "over 30 common steps. Numbers of rows and tokens differ in 30 of them",
        "late and " + names[0] + " have no common step with a loss",
    ):
        assert text in page.text
    assert "optimizer.learning_rate changes the model 0.0001 0.0001 0.5 0.0001" in differences
    assert differences.index("optimizer.learning_rate") < differences.index("mesh.seq rounding")


def test_the_command_writes_into_the_run_or_the_current_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write_run(tmp_path / name, synthetic_runs.metrics_lines(2))
    report.main(["a"])
    report.main(["a", "b"])
    report.main(["a", "b", "--out", "a/both.html"])
    for path, num_runs in (("a/report.html", 1), ("report.html", 2), ("a/both.html", 2)):
        page = Page((tmp_path / path).read_text(encoding="utf-8"))
        assert len(page.charts["Loss"]["traces"]) == num_runs
    assert "-> a/both.html (2." in capsys.readouterr().out


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
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which checks the syntax")
def test_the_script_has_no_syntax_error():
    script = pathlib.Path(charts.__file__).with_name("page.js")
    subprocess.run(["node", "--check", script], check=True)
