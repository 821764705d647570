"""Solves the prompts of every task from their text."""

import collections
import re


def solve(task, prompt):
    """The answer to a prompt."""
    text, question = prompt.split("\nQuestion: ")
    return SOLUTIONS[task](text, question)


def _solve_needle(text, question):
    (key,) = re.findall(r"What is the access code of (\S+)\?", question)
    (value,) = re.findall(rf"The access code of {key} is (\d+)\.", text)
    return f" {value}"


def _solve_multi_value(text, question):
    (key,) = re.findall(r"access codes of (\S+),", question)
    return " " + ", ".join(re.findall(rf"An access code of {key} is (\d+)\.", text))


def _solve_multi_query(text, question):
    keys = re.findall(r"\w+-\w+", question)
    values = dict(re.findall(r"The access code of (\S+) is (\d+)\.", text))
    return " " + ", ".join(values[key] for key in keys)


def _solve_variable_tracking(text, question):
    (value,) = re.findall(r"have the value (\d+)", question)
    values = {}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
        values[name] = values.get(source, source)
    return " " + ", ".join(name for name in values if values[name] == value)


def _solve_frequent_words(text, question):
    words = text.partition("Text:")[2].split()
    counts = collections.Counter(word for word in words if word != "...")
    common = counts.most_common(4)
    assert len({count for _, count in common}) == 4, "the order is defined"
    return " " + ", ".join(word for word, _ in common[:3])


SOLUTIONS = {
    "needle": _solve_needle,
    "multi_key": _solve_needle,
    "multi_value": _solve_multi_value,
    "multi_query": _solve_multi_query,
    "variable_tracking": _solve_variable_tracking,
    "frequent_words": _solve_frequent_words,
}
