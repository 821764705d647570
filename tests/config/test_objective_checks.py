"""The objective and the data must fit each other; every problem has a way that works."""

import re

import pytest

from jaxsp.config import config_file
from jaxsp.core.errors import UserError


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


CASES = [
    ({"type": "dpo"}, {"formats": ("preference", "text")}, "data.train.1.format = text: .*needs"),
    ({"type": "kto"}, {}, "format = preference: .*needs records of format unpaired"),
    ({"type": "sft"}, {}, "format = preference: .*objective.type=dpo, .*prompt_completion"),
    ({"type": "kto", "gamma": 1.0}, {"formats": ("unpaired",)}, "gamma = 1.0: must be null.*simpo"),
    ({"type": "ipo", "label_smoothing": 0.1}, {}, "because ipo does not have it"),
    ({"type": "dpo", "label_smoothing": 0.5}, {}, "label_smoothing = 0.5: .*less than 0.5"),
    ({"type": "dpo", "beta": 0.0}, {}, "beta = 0.0: .*greater than 0"),
    ({"type": "dpo"}, {"train_on": "all"}, "data.train_on = all: .*preference"),
    ({"type": "reward"}, {"adapter": ["lm_head"]}, "score, is always trained. Leave lm_head out"),
    ({"type": "dpo"}, {"max_segments_per_row": 1}, "max_segments_per_row = 1: must be at least 2"),
]


@pytest.mark.parametrize(("objective", "options", "pattern"), CASES)
def test_what_does_not_fit_is_refused(objective, options, pattern):
    with pytest.raises(UserError) as caught:
        parse(objective, **options)
    (problem,) = caught.value.problems
    assert re.search(pattern, problem), problem


def test_defaults_are_those_of_the_objective():
    objective = parse({"type": "orpo"}).objective
    assert (objective.value("beta"), objective.value("sft_weight")) == (0.1, 1.0)
    assert parse({"type": "simpo", "gamma": 0.7}).objective.value("gamma") == 0.7
