"""Heatmaps of needles: the numbers in the cells are those of the results."""

import numpy as np
import pytest

from jaxsp.evaluation import retrieval

figure = pytest.importorskip("matplotlib.figure", reason="plots need the plan extra")


def result(length, by_depth, **fields):
    line = {"step": 7, "task": "needle", "length": length, "exact_rate_by_depth": by_depth}
    return {**line, "num_samples": 20 * len(by_depth), **fields}


def test_cells_have_the_rates_in_ascending_order(monkeypatch, tmp_path):
    figures = []
    save = figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, *x, **y: figures.append(self) or save(self, *x, **y)
    )
    results = [result(1024, {"1": 0.25}), result(512, {"0": 1.0, "1": 0.5})]
    retrieval.write_heatmap(tmp_path / "a.png", results)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    panel = figures[-1].axes[0]
    assert [text.get_text() for text in panel.texts] == ["1.00", "none", "0.50", "0.25"]
    (image,) = panel.images
    np.testing.assert_array_equal(image.get_array().filled(-1), [[1.0, -1], [0.5, 0.25]])
    assert (image.norm.vmin, image.norm.vmax) == (0, 1)
    assert [label.get_text() for label in panel.get_xticklabels()] == ["512", "1,024"]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["0%", "100%"]
    assert "not RULER's score" in panel.get_title()
    assert "step 7" in figures[-1].get_suptitle()


def test_without_needles_or_matplotlib_nothing_is_drawn(monkeypatch, tmp_path):
    needle = result(512, {"0": 1.0})
    assert retrieval.draw_if_possible(tmp_path, [result(512, {}, task="multi_key")]) == ""
    assert retrieval.draw_if_possible(tmp_path / "a.jsonl", [needle]).endswith("a-needle.png")
    monkeypatch.setattr(retrieval.importlib.util, "find_spec", lambda name: None)
    assert "which needs matplotlib" in retrieval.draw_if_possible(tmp_path, [needle])
