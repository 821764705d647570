"""The objective and the data must fit each other; every problem has a way that works."""

from jaxsp.config import config_file


def parse(objective, *, formats=("preference",), adapter=(), **data):
    sources = [{"source": f"{number}.jsonl", "format": name} for number, name in enumerate(formats)]
    return config_file.parse(
        {
            "run": {"directory": "unused", "steps": 1},
            "model": {"config": {"model_type": "llama"}},
            "data": {"train": sources, "row_tokens": 64, **data},
            "batch": {"rows_per_step": 2},
            "optimizer": {"learning_rate": 0.1},
            "objective": objective,
            "adapter": {"type": "lora", "modules_to_save": [*adapter]} if adapter else {},
        }
    )


def test_defaults_are_those_of_the_objective():
    objective = parse({"type": "orpo"}).objective
    assert (objective.value("beta"), objective.value("sft_weight")) == (0.1, 1.0)
    assert parse({"type": "simpo", "gamma": 0.7}).objective.value("gamma") == 0.7
