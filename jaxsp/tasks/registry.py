"""Evaluation tasks by `eval.tasks.0.task`."""

from jaxsp.tasks.frequent_words import FrequentWords
from jaxsp.tasks.needles import MultiKey, MultiQuery, MultiValue, Needle
from jaxsp.tasks.task import Task
from jaxsp.tasks.variable_tracking import VariableTracking

TASKS: dict[str, Task] = {
    "needle": Needle(),
    "multi_key": MultiKey(),
    "multi_value": MultiValue(),
    "multi_query": MultiQuery(),
    "variable_tracking": VariableTracking(),
    "frequent_words": FrequentWords(),
}
