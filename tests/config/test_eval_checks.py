"""Evaluation tasks: fields that do not apply and results with one name are refused."""

import re

import pytest

from jaxsp.config import config_errors, config_file, yaml_io
from jaxsp.config.eval_schema import TaskConfig
from jaxsp.core.errors import UserError

SIZES = {"lengths": [512]}


def parse(*tasks, words=()):
    return config_file.parse(
        {
            "run": {"directory": "unused", "steps": 1},
            "model": {"config": {"model_type": "llama"}},
            "data": {"train": [{"source": "a.txt", "format": "text"}], "row_tokens": 64},
            "batch": {"rows_per_step": 2},
            "optimizer": {"learning_rate": 0.1},
            "eval": {"tasks": list(tasks)},
        },
        words,
    )


NEEDLE = {"task": "needle", "lengths": [512, 1024]}

CASES = [
    ([{"task": "multi_key", "depths": 5, **SIZES}], "tasks.0.depths = 5: must be null, .*needle"),
    ([NEEDLE, {"task": "needle", "lengths": [256, 512]}], r"tasks.1.* has 512 .*lengths=\[256\]\."),
    ([NEEDLE, {"task": "needle", "lengths": [1024]}], r"tasks.0 has 1024 .*Leave eval.tasks.1 out"),
    ([{"task": "needle", "lengths": [512, 512]}], r"Use eval.tasks.0.lengths=\[512\]"),
    ([{"task": "needle", "lengths": []}], "tasks.0.lengths = .*at least 1 entry"),
    ([{"task": "needle", "lengths": [0]}], "tasks.0.lengths.0 = 0: must be at least 1"),
    ([{"task": "needle", "lengths": [5.5]}], "tasks.0.lengths.0 = 5.5: .*integer"),
    ([{"task": "needles", **SIZES}], "tasks.0.task = needles: .*eval.tasks.0.task=needle"),
    ([{"task": "needle", "length": 3, **SIZES}], "length = 3: unknown. Did you mean .*lengths"),
    ([{"task": "needle", "seed": -1, **SIZES}], "seed = -1: must be at least 0"),
]


@pytest.mark.parametrize(("tasks", "pattern"), CASES)
def test_what_does_not_fit_is_refused(tasks, pattern):
    with pytest.raises(UserError) as caught:
        parse(*tasks)
    (problem,) = caught.value.problems
    assert re.search(pattern, problem), problem


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        ([], "eval.long_ppl = true: needs an eval set"),
        (["data.eval_fraction=0.1", "objective.type=orpo"], "objective.type = orpo compares"),
    ],
)
def test_long_ppl_needs_texts(words, pattern):
    with pytest.raises(UserError, match=pattern):
        parse(words=["eval.long_ppl=true", *words])


def test_a_saved_config_loads_again():
    config = parse(NEEDLE | {"depths": 3}, {"task": "multi_key", "lengths": [512, 1024]})
    assert [task.num_depths for task in config.eval.tasks] == [3, None]
    saved = config_file.parse(config.model_dump(mode="json"))
    assert saved.eval == config.eval


def test_fields_of_tasks_have_docstrings_and_examples_that_work():
    text = config_errors.describe_fields()
    for name, field in TaskConfig.model_fields.items():
        assert field.description
        assert f"  eval.tasks[].{name}  (" in text
        example = config_errors.format_example(f"eval.tasks.0.{name}")
        value = yaml_io.load(example.partition("=")[2])
        assert config_errors.coerce_value(f"eval.tasks.0.{name}", value) is not None


def test_seed_is_that_of_the_run():
    assert config_errors.suggest_override("seed").startswith("run.seed=")
