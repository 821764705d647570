"""A metric is a sum where it is computed, and a row of the table."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np

from jaxsp.core.batch import NO_LABEL
from jaxsp.run import report as page
from jaxsp.training import loss, metric_table
from jaxsp.training.metric_table import METRICS, Metric
from tests import batches, commands, small_runs


def train(folder, documents, *, steps):
    """Trains on documents of one row each, two microbatches of a row in each step."""
    text = "\n".join(json.dumps({"input_ids": document.tolist()}) for document in documents)
    (folder / "data.jsonl").write_text(text)
    source = {"source": str(folder / "data.jsonl"), "format": "tokens"}
    sections = {
        "run": {"steps": steps},
        "model": {"config": batches.SMALL_LLAMA},
        "data": {"eval": [source | {"name": "same"}]},
        "batch": {"rows_per_step": 2},
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
    }
    small_runs.train(small_runs.make_fields(folder, "data.jsonl", **sections))


def test_a_new_metric_is_in_the_lines_of_steps_and_evaluations_and_in_the_report(
    tmp_path, monkeypatch
):
    sum_tile = loss._sum_tile

    def count_even_labels(losses, tile):
        is_even_X = (tile.labels_X != NO_LABEL) & (tile.labels_X % 2 == 0)
        even = {"num_even": is_even_X.sum(dtype=jnp.int32)}
        return sum_tile(losses, tile) | even

    even = Metric(
        "Tokens before an even one, as a fraction of all.",
        lambda sums: metric_table.divide(sums["num_even"], sums["num_tokens"]),
        needs="num_even",
    )
    monkeypatch.setattr(loss, "_sum_tile", count_even_labels)
    monkeypatch.setitem(METRICS, "even_fraction", even)
    documents = np.random.default_rng(0).integers(0, 257, (4, 64))
    train(tmp_path, documents, steps=2)
    expected = (documents[:, 1:] % 2 == 0).mean(1) * 63 / 64
    lines = commands.read_lines(tmp_path / "run/metrics.jsonl")
    first, second = (line["even_fraction"] for line in lines)
    assert first != second
    assert np.isclose(first + second, expected.sum() / 2)
    (evaluation,) = commands.read_lines(tmp_path / "run/eval.jsonl")
    assert np.isclose(evaluation["even_fraction"], expected.mean())
    charts = {chart["title"]: chart for chart in page.draw([page.read_run(tmp_path / "run")])}
    assert charts["even_fraction"]["traces"][0]["y"] == [first, second]


@dataclasses.dataclass
class _Fields:
    step: int


def test_means_are_null_where_they_are_undefined():
    sums = {"loss_sum": 6.0, "loss_weight": 4, "num_correct": 1, "num_loss_tokens": 4}
    sums |= {"num_rows": 1, "num_tokens": 5}

    def means(**options):
        line = metric_table.make_line(_Fields(step=7), values, **options)
        assert next(iter(line)) == "step"
        return line["loss"], line["token_accuracy"], line["num_tokens"]

    values = metric_table.compute_metrics(sums)
    assert means() == (1.5, 0.25, 5)
    assert means(is_finite=False) == (1.5, None, 5)
    values["loss"] = float("nan")
    assert means() == (None, 0.25, 5)
    values = metric_table.compute_metrics(dict.fromkeys(sums, 0) | {"num_tokens": 5})
    assert means() == (None, None, 5)
