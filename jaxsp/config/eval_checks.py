"""Rules that involve several fields of an evaluation task."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxsp.config import owner_checks, yaml_io
from jaxsp.config.eval_schema import TASK_DEFAULTS


def check(section: Mapping[str, Any]) -> Iterator[str]:
    """Yields a message for each rule that is broken.

    The fields are raw: pydantic reports values of the wrong type.
    """
    tasks = section.get("tasks")
    if not isinstance(tasks, list | tuple):
        return
    owners: dict[tuple[str, int], int] = {}
    for number, entry in enumerate(tasks):
        if isinstance(entry, dict):
            yield from owner_checks.check_owners(
                f"eval.tasks.{number}", entry, "task", "", TASK_DEFAULTS
            )
            yield from _check_lengths(entry, number, owners)


def _check_lengths(
    entry: dict[str, Any], number: int, owners: dict[tuple[str, int], int]
) -> Iterator[str]:
    """Checks that no task has a length twice, because results are named by both.

    Args: owners: index of the entry that has a task and a length; lengths of this one are added.
    """
    task = entry.get("task")
    lengths = entry.get("lengths")
    if not isinstance(task, str) or not isinstance(lengths, list | tuple):
        return
    repeated = {}
    for length in lengths:
        if isinstance(length, int):
            if (task, length) in owners:
                repeated[length] = owners[task, length]
            owners.setdefault((task, length), number)
    if not repeated:
        return
    name = f"eval.tasks.{number}"
    length, owner = next(iter(repeated.items()))
    rest = list(dict.fromkeys(length for length in lengths if owners.get((task, length)) == number))
    suggestion = f"Use {name}.lengths={yaml_io.format_value(rest)}"
    yield (
        f"{name}.lengths = {yaml_io.format_value(list(lengths))}: must have each length once for "
        f"each task, and eval.tasks.{owner} has {length} for {task}. "
        f"{suggestion if rest else f'Leave {name} out'}."
    )
