"""Reads the files of a run directory for a report, also of runs that are running or damaged."""

import dataclasses
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from jaxsp.config import config_file
from jaxsp.core import files
from jaxsp.core.errors import UserError
from jaxsp.reporting import comparison, metrics
from jaxsp.reporting.starts import STARTS_FILE
from jaxsp.runtime import run_dir
from jaxsp.runtime.run_paths import CONFIG_FILE
from jaxsp.training.metric_table import METRICS, Line

_EVALUATED = "loss_per_doubling long_ppl num_key_tokens exact_rate answer_loss num_samples".split()
"""Numbers in lines of eval.jsonl or tasks.jsonl that are not among METRICS."""

POSITION_LOSSES = ("loss_by_position", "loss_of_filled_by_position")
"""Fields of eval.jsonl by position that are drawn."""

HEARTBEAT_MAX_AGE_S = 60
"""Age of the heartbeat up to which a run counts as running: twelve heartbeats."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Content of a run directory."""

    name: str
    """Name in the report; different for each run."""
    config: Mapping[str, Any]
    metrics: pd.DataFrame
    """Numbers of metrics.jsonl by step, NaN for null; and num_steps, those since the last line."""
    source_tokens: Mapping[str, float]
    """Tokens of each source in all lines of metrics.jsonl."""
    eval_sets: Sequence[str]
    """Names in `evals` without other settings than the run's."""
    evals: Mapping[str, pd.DataFrame]
    """Numbers of eval.jsonl by eval set, with settings that are not the run's, and step."""
    positions: Mapping[str, Mapping[int, pd.DataFrame]]
    """POSITION_LOSSES by eval set, step, and first position of a bucket."""
    tasks: Mapping[str, pd.DataFrame]
    """Numbers of tasks.jsonl by task with length (such as `needle 4,096`), and step."""
    needles: Sequence[Line]
    """Lines of tasks.jsonl of the task needle, of the last step that has some."""
    samples: Sequence[Mapping[str, Any]]
    """Lines of samples.jsonl; of several for a sample and step, the last one."""
    starts: Sequence[Mapping[str, Any]]
    nonfinite: Sequence[Mapping[str, Any]]
    banner: str
    num_damaged: int
    """Number of lines that could not be read, such as the last one of a running process."""
    is_running: bool


def read_runs(paths: Sequence[pathlib.Path]) -> list[RunRecord]:
    """Reads run directories. Raises: UserError for paths that are not different run directories."""
    problems = []
    for index, path in enumerate(paths):
        if not path.is_dir():
            problems.append(f"RUN = {path}: there is no such folder. Name a run's directory.")
        elif not (path / CONFIG_FILE).is_file():
            problems.append(
                f"RUN = {path}: is not a run's directory, which has a {CONFIG_FILE}. Name the "
                "folder of run.directory."
            )
        elif path.resolve() in [other.resolve() for other in paths[:index]]:
            problems.append(f"RUN = {path}: is named twice. Name it once.")
    if problems:
        raise UserError(problems)
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [_read_run(path, name) for path, name in zip(paths, names, strict=True)]


def _read_run(directory: pathlib.Path, name: str) -> RunRecord:
    """Reads a run directory. Raises: UserError if its config cannot be read."""
    names = (*metrics.TRACKED_FILES, metrics.SAMPLES_FILE, STARTS_FILE, metrics.NONFINITE_FILE)
    found = [_read_lines(directory / name) for name in names]
    (lines, evals, tasks, samples, starts, nonfinite), num_damaged = zip(*found, strict=True)
    # of several lines for a step, the last one counts
    lines = list({line["step"]: line for line in lines}.values())
    sources = [line.get("num_tokens_by_source") or {} for line in lines]
    set_names = [str(line.get("data")) for line in evals]
    by_set = _group(evals, set_names)
    tasks = [line for line in tasks if type(line.get("length")) is int]
    by_task = _group(tasks, [f"{line.get('task')} {line['length']:,}" for line in tasks])
    own_needles = [
        _clean_depths(line)
        for name, lines in by_task.items()
        for line in lines
        if line.get("task") == "needle" and name == f"needle {line['length']:,}"
    ]
    needles = [line for line in own_needles if line["exact_rate_by_depth"]]
    last = max((line["step"] for line in needles), default=0)
    banner = directory / "banner.txt"
    return RunRecord(
        name=name,
        config=config_file.read(directory / CONFIG_FILE),
        metrics=_to_frame(lines),
        source_tokens=pd.DataFrame(sources, dtype=float).sum().to_dict(),
        eval_sets=[name for name in dict.fromkeys(set_names) if name in by_set],
        evals={name: _to_frame(lines) for name, lines in by_set.items()},
        positions={name: _read_positions(lines) for name, lines in by_set.items()},
        tasks={name: _to_frame(lines) for name, lines in by_task.items()},
        needles=[line for line in needles if line["step"] == last],
        samples=[*{(x["step"], x.get("data"), x.get("sample")): x for x in samples}.values()],
        starts=starts,
        nonfinite=nonfinite,
        banner=banner.read_text("utf-8", "replace") if banner.is_file() else "",
        num_damaged=sum(num_damaged),
        is_running=_is_running(directory),
    )


def _read_lines(path: pathlib.Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the records of a file that have a step, and the number of damaged lines."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    records = [files.parse_json(line) or {} for line in lines if line.strip()]
    key = "from_step" if path.name == STARTS_FILE else "step"
    valid = [record for record in records if type(record.get(key)) is int]
    return valid, len(records) - len(valid)


def _group(lines: Sequence[Line], names: Sequence[str]) -> dict[str, list[Line]]:
    """Returns lines by name, and by settings that are not the run's, such as `books, float32`.

    The settings of the run are the first in the file: those of weights, and of data by name.
    """
    groups: dict[str, list[Line]] = {}
    of_weights: dict[str, Any] = {}
    of_data: dict[str, dict[str, Any]] = {}
    for line, name in zip(lines, names, strict=True):
        known = of_data.setdefault(name, {})
        for field in comparison.DATA_SETTINGS & line.keys():
            known.setdefault(field, line[field])
        for field in comparison.WEIGHT_SETTINGS.keys() & line.keys():
            of_weights.setdefault(field, line[field])
        differences = comparison.list_differences(line, of_weights | known)
        groups.setdefault(", ".join([name, *differences]), []).append(line)
    return groups


def _read_positions(lines: Sequence[Line]) -> dict[int, pd.DataFrame]:
    """Returns POSITION_LOSSES by step, without steps that have none."""
    by_step = {line["step"]: line for line in lines}
    frames = {
        step: pd.DataFrame({name: _to_series(by_step[step].get(name)) for name in POSITION_LOSSES})
        for step in sorted(by_step)
    }
    return {step: frame for step, frame in frames.items() if len(frame)}


def _clean_depths(line: Line) -> Line:
    """Returns a line of a needle without rates that are not numbers."""
    return {**line, "exact_rate_by_depth": dict(_to_series(line.get("exact_rate_by_depth")))}


def _to_series(numbers: Any) -> pd.Series:
    """Returns numbers by number, in ascending order; empty for what is not an object."""
    items = numbers.items() if isinstance(numbers, dict) else ()
    frame = pd.DataFrame(items, columns=["key", "value"]).apply(pd.to_numeric, errors="coerce")
    frame = frame.astype(float).replace([np.inf, -np.inf], np.nan)
    return frame.groupby("key")["value"].last()


def _to_frame(lines: Sequence[Line]) -> pd.DataFrame:
    """Returns numbers by step; NaN for what is not a finite number."""
    fields = [field.name for field in dataclasses.fields(metrics.StepFields)]
    frame = pd.DataFrame(list(lines), columns=[*METRICS, *fields, *_EVALUATED, "seconds"])
    frame = frame.apply(pd.to_numeric, errors="coerce").astype(float)
    frame = frame.replace([np.inf, -np.inf], np.nan).set_index("step")
    frame = frame[~frame.index.duplicated(keep="last")].sort_index()
    return frame.assign(num_steps=np.diff(frame.index, prepend=0.0))


def _is_running(directory: pathlib.Path) -> bool:
    """True if the process that holds the run's lock has written a heartbeat recently."""
    paths = [directory / name for name in (run_dir.HOLDER_FILE, run_dir.HEARTBEAT_FILE)]
    is_held = all(path.is_file() for path in paths)
    return is_held and time.time() - paths[1].stat().st_mtime < HEARTBEAT_MAX_AGE_S
