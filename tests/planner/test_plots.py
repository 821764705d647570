"""Pictures of plans: what is drawn is what was planned."""

import pathlib
import sys

import pytest

from jaxsp.planner import budget, plots, shapes
from tests.planner import made

figure = pytest.importorskip("matplotlib.figure", reason="pictures need the plan extra")


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    figures = []
    save = figure.Figure.savefig

    def kept(self, *given, **named):
        figures.append(self)
        save(self, *given, **named)

    monkeypatch.setattr(figure.Figure, "savefig", kept)
    return figures


def grown(row_tokens, *, host=0.0, remat="attention"):
    memory = {budget.WEIGHTS: 10.0, budget.ATTENTION: row_tokens / 10000, budget.RESERVED: 6.3}
    return made.plan(row_tokens=row_tokens, memory=memory, host_gib=host, host_memory={budget.RESIDUALS: host}, remat=remat)


def test_memory_is_drawn_by_cause_over_the_row_s_length_against_the_device(tmp_path, drawn):
    plots.lengths([grown(200_000), grown(100_000)], tmp_path / "a.png", title="a title")
    (one,) = drawn
    (panel,) = one.axes
    corners = [area.get_paths()[0].vertices for area in panel.collections]
    for x, heights in ((100.0, [10.0, 20.0, 26.3]), (200.0, [10.0, 30.0, 36.3])):
        assert [points[points[:, 0] == x, 1].max() for points in corners] == pytest.approx(heights)
    (limit,) = [line for line in panel.lines if len(set(line.get_ydata())) == 1 and line.get_ydata()[0] > 0]
    assert limit.get_ydata()[0] == pytest.approx(72.8 + 6.3)
    assert panel.get_xlim() == (100.0, 200.0)
    assert {text.get_text() for text in one.legends[0].get_texts()} == {"weights", "attention", "kept free"}
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_host_holds_gets_a_panel_and_a_change_of_remat_a_mark(tmp_path, drawn):
    plots.lengths([grown(100_000, host=5.0), grown(200_000, host=9.0, remat="full")], tmp_path / "a.svg", title="a title")
    device, host = drawn[0].axes
    assert host.collections[0].get_paths()[0].get_extents().y1 == pytest.approx(9.0)
    assert "remat full" in {text.get_text() for text in device.texts}
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()


def test_meshes_are_bars_the_best_on_top_and_none_for_those_that_were_refused(tmp_path, drawn):
    found = [
        shapes.Shape(mesh={"replica": 1, "data": 1, "seq": 8}, kind={"kind": "ulysses"}, plan=made.plan(), why=""),
        shapes.Shape(
            mesh={"replica": 1, "data": 2, "seq": 4},
            kind={"kind": "ring"},
            plan=made.plan(fits=False, step_s_estimate=7.0),
            why="",
        ),
        shapes.Shape(mesh={"replica": 1, "data": 8, "seq": 1}, kind={"kind": "auto"}, plan=None, why="no"),
    ]
    plots.meshes(found, tmp_path / "a.png", title="a title")
    memory, times = drawn[0].axes
    assert [bar.get_width() for bar in times.patches] == [7.0, 5.0], "from the bottom up"
    assert [label.get_text() for label in memory.get_yticklabels()] == ["1 x 2 x 4  ring", "1 x 1 x 8  ulysses"]
    fits, does_not = sorted((text.get_text() for text in times.texts), key=len)
    assert (fits, does_not[:4]) == ("5 s", "7 s ")


def test_one_length_alone_is_no_picture(tmp_path):
    with pytest.raises(ValueError, match=r"^--plot = .*a\.png: .*lengths"):
        plots.lengths([grown(100_000)], tmp_path / "a.png", title="a title")


def test_what_is_no_picture_is_said_before_anything_is_compiled():
    plots.check(pathlib.Path("a.pdf"))
    with pytest.raises(ValueError, match=r"^--plot = a\.jpeg: .*\.png, \.svg or \.pdf"):
        plots.check(pathlib.Path("a.jpeg"))


def test_without_matplotlib_it_is_said_before_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"^--plot = a\.png: .*pip install matplotlib"):
        plots.check(pathlib.Path("a.png"))
