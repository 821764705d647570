"""Pictures of plans: what is drawn is what was planned."""

import pathlib
import sys

import pytest

from jaxsp.planner import plots
from jaxsp.planner.compile import memory
from jaxsp.planner.mesh_sweep import MeshPlan
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


def grown(row_tokens, *, host=0.0, growth=1.0, **changes):
    """A plan without tiles, whose attention takes `growth` GiB for 10,000 tokens."""
    sizes = {
        memory.WEIGHTS: 10.0,
        memory.ATTENTION: growth * row_tokens / 10000,
        memory.RESERVED: 6.3,
    }
    tiles = {"mlp_tile_tokens": row_tokens, "loss_tile_tokens": row_tokens}
    host_memory = {memory.SAVED_ACTIVATIONS: host}
    return made.plan(
        row_tokens=row_tokens,
        memory=sizes,
        host_gib=host,
        host_memory=host_memory,
        **tiles | changes,
    )


def test_memory_is_drawn_by_cause_over_the_row_s_length_against_the_device(tmp_path, drawn):
    plots.plot_lengths([grown(200_000), grown(100_000)], tmp_path / "a.png", title="a title")
    (one,) = drawn
    (panel,) = one.axes
    corners = [area.get_paths()[0].vertices for area in panel.collections]
    for x, heights in ((100_000, [10.0, 20.0, 26.3]), (200_000, [10.0, 30.0, 36.3])):
        assert [points[points[:, 0] == x, 1].max() for points in corners] == pytest.approx(heights)
    (limit,) = [line for line in panel.lines if line.get_marker() == "None"]
    assert limit.get_ydata()[0] == pytest.approx(72.8 + 6.3)
    assert panel.get_xlim() == (100_000, 200_000)
    assert {text.get_text() for text in one.legends[0].get_texts()} == {
        "weights",
        "attention",
        memory.RESERVED,
    }
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_host_holds_gets_a_panel(tmp_path, drawn):
    plots.plot_lengths(
        [grown(100_000, host=5.0), grown(200_000, host=9.0)], tmp_path / "a.svg", title="a title"
    )
    device, host = drawn[0].axes
    assert host.collections[0].get_paths()[0].get_extents().y1 == pytest.approx(9.0)
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, []),
        ({"remat": "full"}, ["remat full"]),
        ({"head_chunks": 2}, ["2 head chunks"]),
        ({"kernel": "blockwise"}, ["blockwise"]),
        ({"mlp_tile_tokens": 4096, "loss_tile_tokens": 2048}, ["MLP in tiles", "loss in tiles"]),
    ],
)
def test_changes_of_the_program_are_named(changed, words):
    """Tiles as large as all tokens of a device, 131,072 / 8, are none."""
    tiles = {"mlp_tile_tokens": 16384, "loss_tile_tokens": 16384}
    before = made.plan(**tiles)
    after = made.plan(
        row_tokens=262144, **{name: 2 * size for name, size in tiles.items()} | changed
    )
    assert plots.describe_changes(before, after) == words


@pytest.mark.parametrize(
    ("longer", "place"),
    [(900_000, 628_000), (600_000, 400_000)],
    ids=["where the shorter row's program is full", "in the middle, if that is further"],
)
def test_a_change_of_the_program_is_a_cliff(tmp_path, drawn, longer, place):
    """1 GiB for 10,000 tokens and 16.3 of other causes fill the device's 79.1 at 628,000 tokens."""
    plots.plot_lengths(
        [grown(200_000), grown(longer, remat="full", growth=0.5)],
        tmp_path / "a.png",
        title="a title",
    )
    (panel,) = drawn[0].axes
    (attention,) = [area for area in panel.collections if area.get_label() == memory.ATTENTION]
    heights = {
        round(y, 3) for x, y in attention.get_paths()[0].vertices if x == pytest.approx(place)
    }
    assert heights == {10.0, 10.0 + place / 10000, 10.0 + place / 20000}
    lines = [line.get_xdata()[0] for line in panel.lines if line.get_linestyle() == ":"]
    assert lines == pytest.approx([place])
    assert "remat full" in drawn[0].get_supxlabel()


def test_a_row_that_does_not_fit_shows_which_is_the_longest_that_does(tmp_path, drawn):
    plots.plot_lengths(
        [grown(100_000), grown(200_000), grown(210_000, fits=False)],
        tmp_path / "a.png",
        title="a title",
    )
    (panel,) = drawn[0].axes
    (label,) = [text.get_text() for text in panel.texts if "longest" in text.get_text()]
    assert "200K" in label


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (512, "512"),
        (131_072, "131K"),
        (999_424, "999K"),
        (999_900, "1M"),
        (3_670_016, "3.67M"),
        (40_000_000, "40M"),
    ],
)
def test_tokens_are_written_in_thousands_and_millions(number, words):
    assert plots.format_tokens(number) == words


def test_meshes_are_bars_the_best_on_top_and_none_for_those_that_were_refused(tmp_path, drawn):
    found = [
        MeshPlan(
            mesh={"replica": 1, "data": 1, "seq": 8},
            strategy="ulysses",
            attention_fields={"strategy": "ulysses"},
            plan=made.plan(),
            problem="",
        ),
        MeshPlan(
            mesh={"replica": 1, "data": 2, "seq": 4},
            strategy="ring",
            attention_fields={"strategy": "ring"},
            plan=made.plan(fits=False, step_s_estimate=7.0),
            problem="",
        ),
        MeshPlan(
            mesh={"replica": 1, "data": 8, "seq": 1},
            strategy="auto",
            attention_fields={"strategy": "auto"},
            plan=None,
            problem="no",
        ),
    ]
    plots.plot_meshes(found, tmp_path / "a.png", title="a title")
    memory, times = drawn[0].axes
    assert [bar.get_width() for bar in times.patches] == [7.0, 5.0], "from the bottom up"
    assert [label.get_text() for label in memory.get_yticklabels()] == [
        "1 x 2 x 4  ring",
        "1 x 1 x 8  ulysses",
    ]
    fits, does_not = sorted((text.get_text() for text in times.texts), key=len)
    assert (fits, does_not[:4]) == ("5 s", "7 s ")


def test_one_length_alone_is_no_picture(tmp_path):
    with pytest.raises(ValueError, match=r"^--plot = .*a\.png: .*lengths"):
        plots.plot_lengths([grown(100_000)], tmp_path / "a.png", title="a title")


def test_what_is_no_picture_is_said_before_anything_is_compiled():
    plots.check_output(pathlib.Path("a.pdf"))
    with pytest.raises(ValueError, match=r"^--plot = a\.jpeg: .*\.png, \.svg or \.pdf"):
        plots.check_output(pathlib.Path("a.jpeg"))


def test_without_matplotlib_it_is_said_before_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"^--plot = a\.png: .*pip install matplotlib"):
        plots.check_output(pathlib.Path("a.png"))
