"""Config section of evaluations: what is measured beside the loss of the eval sets."""

from collections.abc import Iterator
from typing import Annotated

from jaxsp.config import yaml_io
from jaxsp.config.fields import HERE, Choice, ConfigSection, with_examples
from jaxsp.tasks.frequent_words import FrequentWords
from jaxsp.tasks.needles import MultiKey, MultiQuery, MultiValue, Needle
from jaxsp.tasks.task import Task
from jaxsp.tasks.variable_tracking import VariableTracking

TASKS = (Needle, MultiKey, MultiValue, MultiQuery, VariableTracking, FrequentWords)

TASK = Choice(selector="task", types=TASKS)


class EvalConfig(ConfigSection):
    """Evaluations in addition to the loss on data.eval."""

    tasks: Annotated[
        tuple[Annotated[Task, TASK], ...],
        with_examples("[{task: needle, lengths: [4096, 32768]}]", strict=False),
    ] = ()
    """Retrieval tasks to measure at each evaluation."""
    long_ppl: bool = False
    """Also compute LongPPL of each eval set (Fang et al. 2024): perplexity of tokens that depend on
    far context: those whose loss falls by more than 2 to below 2 if the model sees more than the
    4,096 tokens before them. Takes a pass over five times the tokens."""

    def find_problems(self) -> Iterator[str]:
        """Checks that no task has a length twice, because results are named by both."""
        owners: dict[tuple[str, int], int] = {}
        for number, task in enumerate(self.tasks):
            repeated: list[int] = []
            rest: list[int] = []
            for length in task.lengths:
                is_first = owners.setdefault((task.task, length), number) == number
                (rest if is_first and length not in rest else repeated).append(length)
            for length in repeated[:1]:
                name = f"{HERE}.tasks.{number}"
                suggestion = f"Use {name}.lengths={yaml_io.format_value(rest)}"
                yield (
                    f"{name}.lengths = {yaml_io.format_value(list(task.lengths))}: must have each "
                    f"length once for each task, and {HERE}.tasks.{owners[task.task, length]} "
                    f"has {length} for {task.task}. {suggestion if rest else f'Leave {name} out'}."
                )
