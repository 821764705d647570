"""Reads the files of a run directory for a report, also of runs that are running or damaged."""

import array
import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import yaml

from jaxsp.config import yaml_io
from jaxsp.core.errors import UserError
from jaxsp.reporting import metrics
from jaxsp.reporting.metrics import MetricsLine
from jaxsp.reporting.starts import STARTS_FILE
from jaxsp.runtime import run_dir
from jaxsp.runtime.run_paths import CONFIG_FILE

SOURCES_FIELD = "num_tokens_by_source"

NUMBER_FIELDS = tuple(
    field.name for field in dataclasses.fields(MetricsLine) if field.name != SOURCES_FIELD
)
"""Fields of metrics.jsonl that are numbers."""

HEARTBEAT_MAX_AGE_S = 60
"""Age of the heartbeat up to which a run counts as running: twelve heartbeats."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Content of a run directory."""

    name: str
    """Name in the report; different for each run."""
    directory: pathlib.Path
    config: Mapping[str, Any]
    columns: Mapping[str, np.ndarray]
    """Numbers of metrics.jsonl by field, sorted by step; NaN for null."""
    source_tokens: Mapping[str, np.ndarray]
    """Tokens of each source in each line of metrics.jsonl, by name."""
    evals: Sequence[Mapping[str, Any]]
    """Lines of eval.jsonl, sorted by step; the last line for each step and eval set."""
    starts: Sequence[Mapping[str, Any]]
    """Lines of starts.jsonl; empty for runs of versions that did not write it."""
    nonfinite: Sequence[Mapping[str, Any]]
    banner: str
    num_damaged: int
    """Number of lines that could not be read, such as the last one of a running process."""
    is_running: bool

    @property
    def num_lines(self) -> int:
        """Number of lines of metrics.jsonl."""
        return len(self.columns["step"])

    @property
    def last_step(self) -> int:
        """Step of the last line of metrics.jsonl; 0 if there is none."""
        return int(self.columns["step"][-1]) if self.num_lines else 0

    @property
    def num_steps(self) -> int | None:
        """Number of steps of the whole run; None if it is not known."""
        if self.starts and _is_count(self.starts[-1].get("num_steps")):
            return int(self.starts[-1]["num_steps"])
        steps = self.get("run", "steps")
        return int(steps) if _is_count(steps) else None

    def get(self, *path: str) -> Any:
        """Value of a config field; None if there is no such field."""
        value: Any = self.config
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value


def read_runs(paths: Sequence[pathlib.Path]) -> list[RunRecord]:
    """Reads run directories. Raises: UserError for folders that are not."""
    check_directories(paths)
    names = _choose_names([path.resolve() for path in paths])
    return [_read_run(path, name) for path, name in zip(paths, names, strict=True)]


def check_directories(paths: Sequence[pathlib.Path]) -> None:
    """Checks that paths are different run directories. Raises: UserError if not."""
    problems = [problem for path in paths if (problem := _find_problem(path))]
    resolved = [path.resolve() for path in paths]
    problems += [
        f"RUN = {path}: is named twice. Name it once."
        for index, path in enumerate(paths)
        if resolved[index] in resolved[:index]
    ]
    if problems:
        raise UserError(problems)


def _find_problem(path: pathlib.Path) -> str | None:
    """Reason that a path is not a run directory; None if it is one."""
    if not path.is_dir():
        return f"RUN = {path}: there is no such folder. Name a run's directory."
    if not (path / CONFIG_FILE).is_file():
        return (
            f"RUN = {path}: is not a run's directory, which has a {CONFIG_FILE}. Name the folder "
            "of run.directory."
        )
    return None


def _choose_names(paths: Sequence[pathlib.Path]) -> list[str]:
    """Shortest ends of the paths that are all different, at least the last folder."""
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _read_run(directory: pathlib.Path, name: str) -> RunRecord:
    """Reads a run directory. Raises: UserError if its config cannot be read."""
    columns, source_tokens, num_damaged = _read_metrics(directory / metrics.METRICS_FILE)
    evals, num_damaged_evals = _read_lines(directory / metrics.EVAL_FILE)
    starts, num_damaged_starts = _read_lines(directory / STARTS_FILE, needs_step=False)
    nonfinite, num_damaged_nonfinite = _read_lines(directory / metrics.NONFINITE_FILE)
    latest = {(int(line["step"]), str(line.get("data"))): line for line in evals}
    banner = directory / "banner.txt"
    return RunRecord(
        name=name,
        directory=directory,
        config=_read_config(directory / CONFIG_FILE),
        columns=columns,
        source_tokens=source_tokens,
        evals=[latest[key] for key in sorted(latest)],
        starts=starts,
        nonfinite=nonfinite,
        banner=banner.read_text("utf-8", "replace") if banner.is_file() else "",
        num_damaged=num_damaged + num_damaged_evals + num_damaged_starts + num_damaged_nonfinite,
        is_running=_is_running(directory),
    )


def _read_config(path: pathlib.Path) -> dict[str, Any]:
    """Fields of a config, which may be of another version."""
    try:
        fields = yaml_io.load(path.read_text("utf-8", "replace"))
    except (yaml.YAMLError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: cannot be read: {reason}. Restore the file.") from None
    return fields if isinstance(fields, dict) else {}


def _is_running(directory: pathlib.Path) -> bool:
    """True if the process that holds the run's lock has written a heartbeat recently."""
    heartbeat = directory / run_dir.HEARTBEAT_FILE
    try:
        age_s = time.time() - heartbeat.stat().st_mtime
    except OSError:
        return False
    return (directory / run_dir.HOLDER_FILE).exists() and age_s < HEARTBEAT_MAX_AGE_S


def _parse_lines(path: pathlib.Path, *, needs_step: bool) -> Iterator[dict[str, Any] | None]:
    """Yields the records of a file, and None for damaged lines. The file may not exist."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                yield None
                continue
            is_valid = isinstance(record, dict)
            if is_valid and needs_step:
                is_valid = _is_count(record.get("step"))
            yield record if is_valid else None


def _read_lines(path: pathlib.Path, *, needs_step: bool = True) -> tuple[list[dict[str, Any]], int]:
    """Returns the records of a file, and the number of damaged lines."""
    records = list(_parse_lines(path, needs_step=needs_step))
    valid = [record for record in records if record is not None]
    return valid, len(records) - len(valid)


def _read_metrics(
    path: pathlib.Path,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], int]:
    """Returns columns, tokens by source, and the number of damaged lines of metrics.jsonl."""
    columns = {name: array.array("d") for name in NUMBER_FIELDS}
    source_tokens: dict[str, array.array] = {}
    num_damaged = 0
    num_lines = 0
    for record in _parse_lines(path, needs_step=True):
        if record is None:
            num_damaged += 1
            continue
        for name, column in columns.items():
            column.append(to_number(record.get(name)))
        by_source = record.get(SOURCES_FIELD)
        for name, tokens in by_source.items() if isinstance(by_source, dict) else ():
            column = source_tokens.setdefault(name, array.array("d"))
            column.extend([0.0] * (num_lines - len(column)))
            column.append(to_number(tokens))
        num_lines += 1
    for column in source_tokens.values():
        column.extend([0.0] * (num_lines - len(column)))
    steps = np.array(columns["step"])
    # the last line of each step
    _, from_end = np.unique(steps[::-1], return_index=True)
    kept = len(steps) - 1 - from_end
    return (
        {name: np.array(column)[kept] for name, column in columns.items()},
        {name: np.array(column)[kept] for name, column in source_tokens.items()},
        num_damaged,
    )


def to_number(value: object) -> float:
    """Returns a finite number; NaN for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:
        return math.nan


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
