"""Evaluation tasks: fields that do not apply and results with one name are refused."""

from jaxsp.config import config_errors, config_file, yaml_io
from jaxsp.config.eval_schema import TaskConfig


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
