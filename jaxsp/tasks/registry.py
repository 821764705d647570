"""All evaluation tasks."""

from jaxsp.config.fields import Choice
from jaxsp.tasks.frequent_words import FrequentWords
from jaxsp.tasks.needles import MultiKey, MultiQuery, MultiValue, Needle
from jaxsp.tasks.variable_tracking import VariableTracking

TASKS = (Needle, MultiKey, MultiValue, MultiQuery, VariableTracking, FrequentWords)

TASK = Choice(selector="task", types=TASKS)
