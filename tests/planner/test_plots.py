"""Plots of plans: the bars have the planned sizes and times."""

import pathlib
import sys

import pytest

from jaxsp.memory import memory_causes
from jaxsp.planner import planning, plots
from tests.planner import example_plans

figure = pytest.importorskip("matplotlib.figure", reason="plots need the plan extra")


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """Draws plans by label, and returns the panels of the saved figure."""
    figures = []
    save = figure.Figure.savefig

    def save_and_keep(self, *args, **kwargs):
        figures.append(self)
        save(self, *args, **kwargs)

    def draw(plans, name="a.png"):
        plots.plot_plans(plans, tmp_path / name, title="a title")
        return figures[-1].axes

    monkeypatch.setattr(figure.Figure, "savefig", save_and_keep)
    return draw


def widths(panel):
    """Widths of a panel's bars by cause or `_`, from top to bottom."""
    return {bars.get_label(): [bar.get_width() for bar in bars] for bars in panel.containers}


def test_memory_and_time_are_bars_in_the_order_of_the_plans(draw, tmp_path):
    plans = {
        "short": example_plans.make_plan(),
        "long": example_plans.make_plan(fits=False, step_s_estimate=7.0),
    }
    device, times = draw(plans)
    assert [label.get_text() for label in device.get_yticklabels()] == [
        "short",
        "long (does not fit)",
    ]
    assert device.yaxis_inverted(), "the first plan is at the top"
    sizes = {memory_causes.WEIGHTS: 10.0, memory_causes.OTHER: 20.0, planning.RESERVED: 6.3}
    assert widths(device) == {cause: pytest.approx([size] * 2) for cause, size in sizes.items()}
    ends = [bars[0].get_x() + bars[0].get_width() for bars in device.containers]
    assert max(ends) == pytest.approx(sum(sizes.values())), "causes are stacked"
    (limit,) = device.lines
    assert limit.get_xdata()[0] == pytest.approx(72.8 + 6.3)
    assert [*widths(times).values()] == [[5.0, 7.0]]
    assert [text.get_text() for text in times.texts] == ["5 s", "7 s"]
    legend = {text.get_text() for text in device.figure.legends[0].get_texts()}
    assert legend == sizes.keys()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_host_memory_gets_a_panel_and_a_missing_estimate_none(draw, tmp_path):
    host_memory = {memory_causes.ACTIVATIONS: 9.0}
    plan = example_plans.make_plan(host_gib=9.0, host_memory=host_memory, step_s_estimate=None)
    _, host = draw({"a plan": plan}, "a.svg")
    assert widths(host) == {memory_causes.ACTIVATIONS: [9.0]}
    assert host.lines[0].get_xdata()[0] == 1960.0
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()


def test_a_file_of_another_format_is_refused_before_compiling():
    plots.check_output(pathlib.Path("a.pdf"))
    with pytest.raises(ValueError, match=r"^--plot = a\.jpeg: .*\.png, \.svg or \.pdf"):
        plots.check_output(pathlib.Path("a.jpeg"))


def test_a_missing_matplotlib_is_reported_before_compiling(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"^--plot = a\.png: .*pip install matplotlib"):
        plots.check_output(pathlib.Path("a.png"))
