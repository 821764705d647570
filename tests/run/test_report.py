"""Report of runs: the numbers of the page, escaping, unusual runs, and the command."""

import html.parser
import json

import numpy as np
import pytest

from jaxsp import report
from jaxsp.run import report as page
from tests.run import synthetic_runs
from tests.run.synthetic_runs import CONFIG, write_run

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)"> {{data}} & \'"'
"""Text that would run code, load an image or insert data if it were not escaped."""


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

    def read_lines(self, title):
        """Values of each line of a chart, by its name."""
        return {trace["name"]: trace["y"] for trace in self.charts[title]["traces"]}


@pytest.fixture(autouse=True)
def short_script(monkeypatch):
    """Replaces the megabytes of plotly."""
    monkeypatch.setattr(page.plotly.offline, "get_plotlyjs", lambda: "/* plotly */")


def make_page(folder, *directories):
    report.main([*map(str, directories), "--out", str(folder / "page.html")])
    return Page((folder / "page.html").read_text(encoding="utf-8"))


def test_the_page_shows_the_numbers_of_the_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [
        line | {"chosen_logp": -line["step"], "router_entropy": 1 / line["step"]}
        for line in synthetic_runs.metrics_lines(50)
    ]
    lines[9] |= {"loss": None, "mfu": "x"}
    evals = synthetic_runs.eval_lines([25, 50], names=("held out", "code"))
    evals[-2]["loss_by_position"] = {"0": 3.0, "128": 2.0}
    tasks = [synthetic_runs.task_line(50, "needle", 4096, exact_rate=0.25)]
    starts = [synthetic_runs.start_line(), synthetic_runs.start_line(20, previous_step=24)]
    starts[1]["memory"]["host"] = {"moments": 3 * 2**30}
    kinds = {"eval": evals, "tasks": tasks, "starts": starts}
    kinds["nonfinite_steps"] = [{"step": 10, "loss": "nan"}]
    shown = make_page(tmp_path, write_run(tmp_path / "a", lines, **kinds).relative_to(tmp_path))
    titles = {field: title for field, (title, _) in page.CHARTS.items()}
    for field in ("learning_rate", "device_peak_gib"):
        assert shown.read_lines(titles[field]) == {"a": [line[field] for line in lines]}
    raw, average = shown.charts["Training loss"]["traces"]
    losses = [line["loss"] for line in lines if line["loss"] is not None]
    assert raw["y"] == losses
    assert raw["x"] == [line["step"] for line in lines if line["loss"] is not None]
    means = [losses[0], *np.convolve(losses, [0.5, 0.5], "valid")]
    assert average["y"] == pytest.approx(means)
    assert len(shown.charts[titles["mfu"]]["traces"][0]["y"]) == 49
    assert shown.charts["Log-probability of chosen answers"]["traces"]
    assert shown.charts["router_entropy"]["traces"]
    assert shown.read_lines("Evaluation: loss") == {
        f"a: {name}": [line["loss"] for line in evals if line["data"] == name]
        for name in ("held out", "code")
    }
    assert shown.read_lines("Evaluation: exact_rate") == {"a: task needle, 4096 tokens": [0.25]}
    position = shown.charts["Loss by position in the document, last evaluation"]
    assert [(trace["x"], trace["y"]) for trace in position["traces"]] == [([64, 128], [3.0, 2.0])]
    assert next(iter(shown.charts)) == "Training loss"
    for text in (
        "Steps 50 of 400",
        f"Loss, mean of the last 20 lines {np.mean(losses[-20:]):.4f}",
        f"Tokens {lines[-1]['num_tokens_total']:,}",
        "Peak memory of a device 61.2 GiB",
        "8 x NVIDIA H100 80GB HBM3, data 2 x seq 4",
        "Starts 2 Non-finite steps 1",
        f"held out: loss {evals[-2]['loss']:.4f}",
        "held out: loss from position 128 2.0000",
        "saved activations 26 other temporaries 17 available 71 host: moments 3",
    ):
        assert text in shown.text


def test_names_from_users_stay_text_in_a_page_that_loads_nothing(tmp_path):
    directory = write_run(
        # a name with every character that a folder may have
        tmp_path / HOSTILE.replace("/", ""),
        synthetic_runs.metrics_lines(3),
        eval=synthetic_runs.eval_lines([3], names=(HOSTILE,)),
        starts=[synthetic_runs.start_line(device_kind=HOSTILE)],
        config=CONFIG | {"model": {"source": HOSTILE}, HOSTILE: HOSTILE},
    )
    other = write_run(tmp_path / "other", synthetic_runs.metrics_lines(3), config=CONFIG)
    for directories in ([directory], [directory, other]):
        shown = make_page(tmp_path, *directories)
        assert [tag for tag, _ in shown.elements].count("script") == 3
        assert not {"img", "iframe", "link", "object"} & {tag for tag, _ in shown.elements}
        names = {name for _, attributes in shown.elements for name in attributes}
        assert not {name for name in names if name.startswith("on") or name == "src"}
        assert shown.text.count(" ".join(HOSTILE.split())) >= 2, "the device and the eval set"
        traces = [trace["name"] for chart in shown.charts.values() for trace in chart["traces"]]
        assert not [name for name in traces if "<" in name], "plotly draws tags in names"
        (policy,) = (x["content"] for _, x in shown.elements if "http-equiv" in x)
        assert policy.startswith("default-src 'none'")


def test_the_command_writes_into_the_run_or_the_current_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", synthetic_runs.metrics_lines(2))
    write_run(tmp_path / "empty", [])
    report.main(["a"])
    report.main(["a", "empty"])
    report.main(["empty", "--out", "a/empty.html"])
    for path, num_lines in (("a/report.html", 1), ("report.html", 1), ("a/empty.html", 0)):
        shown = Page((tmp_path / path).read_text(encoding="utf-8"))
        charts = shown.charts.get("Training loss", {"traces": []})
        assert len(charts["traces"]) == num_lines
    assert "-> a/empty.html (" in capsys.readouterr().out
