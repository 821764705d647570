"""Commands in subprocesses, the documents that they read, and the JSON lines that they write."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

REPO = pathlib.Path(__file__).parent.parent

COUNTS = (
    "step",
    "epoch",
    "num_rows",
    "num_tokens",
    "num_loss_tokens",
    "num_tokens_total",
    "padding_fraction",
)
"""Fields of metrics.jsonl that are equal on every mesh and in every run of a config."""


def start_python(
    *arguments: object, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen:
    """Starts Python in the repository, and captures its output as text.

    Args: env: environment variables in addition to those of this process.
    """
    options = {
        "cwd": REPO,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        **options,
    }
    words = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(words, env={**os.environ, **(env or {})}, **options)


def run_python(
    *arguments: object, env: Mapping[str, str] | None = None, timeout: float = 600
) -> subprocess.CompletedProcess:
    """Runs Python in the repository, and captures its output as text.

    Args: env: environment variables in addition to those of this process.
    """
    with start_python(*arguments, env=env) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def flatten_numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a line of metrics.jsonl or eval.jsonl, under the names that trackers show."""
    numbers: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, dict):
            inner = flatten_numbers(value).items()
            numbers |= {f"{name}/{key}": number for key, number in inner}
        elif isinstance(value, int | float):
            numbers[name] = value
    return numbers


def write_documents(
    path: pathlib.Path, lengths: Sequence[int], *, seed: int = 0, has_labels: bool = False
) -> None:
    """Writes random documents of these lengths, for a vocabulary of 257 tokens.

    Args: has_labels: adds labels; four of ten are masked.
    """
    rng = np.random.default_rng(seed)
    records = [{"input_ids": rng.integers(0, 257, length).tolist()} for length in lengths]
    if has_labels:
        for record in records:
            is_masked = rng.random(len(record["input_ids"])) < 0.4
            record["labels"] = np.where(is_masked, -100, record["input_ids"]).tolist()
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")


def write_trajectories(path: pathlib.Path, *, num_records: int) -> None:
    """Writes random trajectories of 10 to 39 tokens, for a vocabulary of 257 tokens."""
    rng = np.random.default_rng(4)
    records = []
    for _ in range(num_records):
        length = rng.integers(10, 40)
        num_prompt = rng.integers(1, 8)
        num_sampled = int(length - num_prompt)
        record = {
            "input_ids": rng.integers(0, 257, length).tolist(),
            "loss_mask": [0] * num_prompt + [1] * num_sampled,
            "advantages": rng.normal(),
            "old_logps": (-5.5 + 0.1 * rng.normal(size=num_sampled)).tolist(),
        }
        records.append(json.dumps(record))
    path.write_text("\n".join(records), encoding="utf-8")


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
