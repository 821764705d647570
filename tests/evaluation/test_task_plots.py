"""Heatmaps of needles: the numbers in the cells are those of the results."""

import numpy as np
import pytest

from jaxsp.evaluation import retrieval

figure = pytest.importorskip("matplotlib.figure", reason="plots need the plan extra")


def result(length, by_depth, **fields):
    line = {"step": 7, "task": "needle", "length": length, "exact_rate_by_depth": by_depth}
    return {**line, "num_samples": 20 * len(by_depth), **fields}


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """Draws results, and returns the figure."""
    figures = []
    save = figure.Figure.savefig

    def save_and_keep(self, *args, **kwargs):
        figures.append(self)
        save(self, *args, **kwargs)

    def draw(results):
        retrieval.write_heatmap(tmp_path / "a.png", results)
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
        return figures[-1]

    monkeypatch.setattr(figure.Figure, "savefig", save_and_keep)
    return draw


def test_cells_have_the_rates_in_ascending_order(draw):
    drawn = draw([result(1024, {"1": 0.25}), result(512, {"0": 1.0, "1": 0.5})])
    panel = drawn.axes[0]
    assert [text.get_text() for text in panel.texts] == ["1.00", "none", "0.50", "0.25"]
    (image,) = panel.images
    np.testing.assert_array_equal(image.get_array().filled(-1), [[1.0, -1], [0.5, 0.25]])
    assert (image.norm.vmin, image.norm.vmax) == (0, 1)
    assert [label.get_text() for label in panel.get_xticklabels()] == ["512", "1,024"]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["0%", "100%"]
    assert "not RULER's score" in panel.get_title()
    assert "step 7, 20 samples" in drawn.get_suptitle()


def test_numbers_are_readable_on_their_colors(draw):
    rates = np.linspace(0, 1, 51)
    panel = draw([result(512, {f"{rate:.3g}": rate for rate in rates})]).axes[0]
    for text, rate in zip(panel.texts, rates, strict=True):
        luminances = sorted(
            luminance(color) for color in (text.get_color(), panel.images[0].cmap(rate))
        )
        assert (luminances[1] + 0.05) / (luminances[0] + 0.05) > 4.5


def luminance(color):
    """Relative luminance. Source: WCAG 2.2, which asks for a contrast of 4.5."""
    from matplotlib import colors

    rgb = np.array(colors.to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def test_without_needles_or_matplotlib_nothing_is_drawn(monkeypatch, tmp_path):
    needle = result(512, {"0": 1.0})
    assert retrieval.draw_if_possible(tmp_path, [result(512, {}, task="multi_key")]) == ""
    assert retrieval.draw_if_possible(tmp_path / "a.jsonl", [needle]).endswith("a-needle.png")
    monkeypatch.setattr(retrieval.importlib.util, "find_spec", lambda name: None)
    assert "which needs matplotlib" in retrieval.draw_if_possible(tmp_path, [needle])
