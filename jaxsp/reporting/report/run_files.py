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
from jaxsp.reporting import metrics
from jaxsp.reporting.starts import STARTS_FILE
from jaxsp.runtime import run_dir
from jaxsp.runtime.run_paths import CONFIG_FILE
from jaxsp.training.metric_table import METRICS

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
    evals: Mapping[str, pd.DataFrame]
    """Numbers of eval.jsonl by eval set and step."""
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
    names = (
        *(metrics.METRICS_FILE, metrics.EVAL_FILE, metrics.SAMPLES_FILE),
        *(STARTS_FILE, metrics.NONFINITE_FILE),
    )
    found = [_read_lines(directory / name) for name in names]
    (lines, evals, samples, starts, nonfinite), num_damaged = zip(*found, strict=True)
    # of several lines for a step, the last one counts
    lines = list({line["step"]: line for line in lines}.values())
    sources = [line.get("num_tokens_by_source") or {} for line in lines]
    sets = dict.fromkeys(str(line.get("data")) for line in evals)
    banner = directory / "banner.txt"
    return RunRecord(
        name=name,
        config=config_file.read(directory / CONFIG_FILE),
        metrics=_to_frame(lines),
        source_tokens=pd.DataFrame(sources, dtype=float).sum().to_dict(),
        evals={name: _to_frame([x for x in evals if str(x.get("data")) == name]) for name in sets},
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


def _to_frame(lines: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Returns numbers by step; NaN for what is not a finite number."""
    fields = [field.name for field in dataclasses.fields(metrics.StepFields)]
    frame = pd.DataFrame(list(lines), columns=[*METRICS, *fields, "seconds"])
    frame = frame.apply(pd.to_numeric, errors="coerce").astype(float)
    frame = frame.replace([np.inf, -np.inf], np.nan).set_index("step")
    frame = frame[~frame.index.duplicated(keep="last")].sort_index()
    return frame.assign(num_steps=np.diff(frame.index, prepend=0.0))


def _is_running(directory: pathlib.Path) -> bool:
    """True if the process that holds the run's lock has written a heartbeat recently."""
    paths = [directory / name for name in (run_dir.HOLDER_FILE, run_dir.HEARTBEAT_FILE)]
    is_held = all(path.is_file() for path in paths)
    return is_held and time.time() - paths[1].stat().st_mtime < HEARTBEAT_MAX_AGE_S
