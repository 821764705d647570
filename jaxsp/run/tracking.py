"""Trackers of a run, and the numbers that they receive."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxsp.core import files
from jaxsp.run.config_file import Config
from jaxsp.run.trackers import tracker
from jaxsp.run.trackers.tracker import Client, Outcome, TrackedRun, Tracker


class Trackers:
    """Context of a run's trackers."""

    def __init__(self, config: Config, *, from_step: int, is_resume: bool):
        """Starts the trackers in process 0. Args: is_resume: False if they do not have it yet."""
        directory = config.run.local_dir
        saved = files.read_json(directory / tracker.IDS_FILE) if is_resume else None
        run = TrackedRun(
            directory=directory,
            config=config.model_dump(mode="json"),
            shutdown_grace=config.run.shutdown_grace,
            from_step=from_step,
            ids=saved or {},
        )
        self.outcome: Outcome = "finished"
        """End of the run, if no exception ends it."""
        self._clients: dict[str, Client] = {}
        for choice in config.logging.trackers if jax.process_index() == 0 else ():
            self._try(choice.type, self._start, choice, run)

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        outcome = self.outcome if kind is None else "failed"
        for name, client in list(self._clients.items()):
            self._try(name, client.close, outcome)

    def log(self, line: Mapping[str, Any]) -> None:
        """Records the numbers of a line of metrics.jsonl, eval.jsonl or tasks.jsonl."""
        numbers = name_numbers(line)
        for name, client in list(self._clients.items()):
            self._try(name, client.log, numbers, line["step"])

    def _start(self, choice: Tracker, run: TrackedRun) -> None:
        self._clients[choice.type] = choice.start(run)

    def _try(self, name: str, call: Callable[..., None], *arguments: Any) -> None:
        """Calls a tracker, and leaves it out from then on if it fails."""
        try:
            call(*arguments)
        except Exception as error:  # the clients raise errors of many kinds
            self._clients.pop(name, None)
            tracker.print_failure(name, f"{type(error).__name__}: {error}")


def name_numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a line by name: the group, such as train or eval/NAME, and field."""
    group = "train"
    if "task" in line:
        group = f"task/{line['task']}/{line['length']}"
    elif "data" in line:
        group = f"eval/{line['data']}"
    fields = dict(line)
    for field, value in line.items():
        if isinstance(value, dict):
            fields |= {f"{field}/{name}": number for name, number in value.items()}
    return {
        f"{group}/{name}": float(value)
        for name, value in fields.items()
        if name not in ("step", "length") and isinstance(value, int | float)
    }
