"""Early stopping counts evaluations without improvement, also across a resume."""

import re

import pytest

from jaxsp.run.config_file import RunConfig
from jaxsp.run.schedule import EarlyStopping
from tests import messages

EVAL_SET = {"name": "a", "digest": "tokens of a"}


def make(*, eval_set=EVAL_SET, before=None, patience=2, min_delta=0.0, metric="loss"):
    config = RunConfig(
        directory="x",
        steps=9,
        early_stopping_patience=patience,
        early_stopping_metric=metric,
        early_stopping_min_delta=min_delta,
    )
    return EarlyStopping(config, eval_set, resumed_state=before)


def find_stop(losses, **options):
    """Returns the index of the evaluation that ends the run, or None."""
    early_stopping = make(**options)
    for step, loss in enumerate(losses):
        early_stopping.expect_evaluation()
        name = options.get("metric", "loss")
        values = {"a": None if loss is None else float(loss), "b": -float(step)}
        early_stopping.record(step, {data: {name: value} for data, value in values.items()})
        if early_stopping.should_stop():
            return step
    return None


@pytest.mark.parametrize(
    ("losses", "options", "stop"),
    [
        ([3, 2, 1, 0, -1], {}, None),
        ([3, 2, 2, 2, 1], {}, 3),
        ([3, 2, 2.5, 1, 1.5, 1.2, 0], {}, 5),
        ([3, 2, 2.5, 1, 1.5, 1.2, 0], {"patience": 3}, None),
        ([3, 2.95, 2.85, 2.85, 2.85], {"min_delta": 0.1}, 4),
        ([3, None, 2, None, None], {}, 4),
        ([None, None], {}, 1),
        ([9, 9, 9, 9], {"eval_set": {"name": "b", "digest": "tokens of b"}}, None),
        ([9, 9, 9, 9], {"patience": None}, None),
        ([1, 2, 3, 4], {"metric": "reward_accuracy"}, None),
        ([1, 2, 1.5, 2.05, 3], {"metric": "reward_margin", "min_delta": 0.1}, 3),
    ],
)
def test_run_ends_after_patience_evaluations_without_improvement(losses, options, stop):
    assert find_stop(losses, **options) == stop


def record(early_stopping, step, loss, *, is_due=True):
    if is_due:
        early_stopping.expect_evaluation()
    early_stopping.record(step, {"a": {"loss": loss}})


def test_a_resumed_run_continues_counting():
    first = make(patience=3)
    for step, loss in enumerate([2.0, 1.0, 1.5]):
        record(first, step, loss)
    resumed = make(patience=3, before=first.state)
    assert resumed.state == first.state
    for step, loss in [(3, 1.2), (4, 1.1)]:
        assert not resumed.should_stop()
        record(resumed, step, loss)
    assert resumed.should_stop()
    expected = messages.containing("run.early_stopping_patience = 3", "1.0000", "step 1")
    assert re.search(expected, resumed.reason)
    assert make(patience=3, before=resumed.state).should_stop(), "the same command does not go on"
    assert not make(patience=4, before=resumed.state).should_stop()


def test_losses_of_another_eval_set_are_not_compared():
    first = make()
    record(first, 1, 1.0)
    assert make(before=first.state).state.best_value == 1.0
    other = {"name": "a", "digest": "other tokens"}
    assert make(before=first.state, eval_set=other).state.best_value is None
    renamed = make(before=first.state, eval_set=EVAL_SET | {"name": "b"})
    assert (renamed.state.data, renamed.state.best_value) == ("b", 1.0)
    assert make(before=first.state, patience=None).state is None


def test_an_evaluation_that_was_not_due_does_not_count():
    first = make(patience=2)
    for step, loss in enumerate([1.0, 2.0]):
        record(first, step, loss)
    for step in range(2, 9):  # evaluations of checkpoints written by stops
        record(first, step, 2.0, is_due=False)
    assert not first.should_stop()
    first.expect_evaluation()
    resumed = make(patience=2, before=first.state)  # a stop skipped an evaluation that was due
    record(resumed, 9, 2.0, is_due=False)
    assert resumed.should_stop()
