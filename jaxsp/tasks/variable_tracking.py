"""Variable tracking: a chain of assignments, as RULER's `vt` (NVIDIA/RULER)."""

from typing import Literal

import numpy as np

from jaxsp.tasks.haystack import HaystackTask, Question
from jaxsp.tasks.task import draw_words

_NUM_HOPS = 4


class VariableTracking(HaystackTask):
    """All variables in a chain of assignments of one value (vt).

    As in RULER, one chain of 4 hops is spread over the haystack in its order, names have 5 capital
    letters, and values 5 digits. All names are asked for. Different from RULER: in the order of the
    assignments, because the whole answer must be the greedy one; and the prompt has no solved
    example before the text.
    """

    task: Literal["variable_tracking"] = "variable_tracking"

    def draw(self, random: np.random.Generator) -> Question:
        names = [word.upper() for word in draw_words(random, _NUM_HOPS + 1, num_letters=5)]
        value = random.integers(10_000, 100_000)
        sources = [str(value), *(f"VAR {name}" for name in names[:-1])]
        return Question(
            introduction="Track the assignments of variables in this text.\n",
            needles=tuple(
                f"VAR {name} = {source}\n" for name, source in zip(names, sources, strict=True)
            ),
            question=f"Question: Which variables have the value {value}, in the order of their "
            f"assignments?\nAnswer: The {len(names)} variables are",
            answer=f" {', '.join(names)}",
        )
