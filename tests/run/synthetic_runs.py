"""Run directories with invented numbers, as a run writes them."""

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxsp.config import yaml_io

CONFIG: Mapping[str, Any] = {
    "run": {"directory": "runs/x", "steps": 400, "log_every": 1},
    "model": {"source": "org/model"},
    "mesh": {"replica": 1, "data": 2, "seq": 4},
    "data": {"train": [{"source": "books", "weight": 3.0}], "row_tokens": 4096},
    "optimizer": {"learning_rate": 1e-4},
}

SETTINGS = {"row_tokens": 4096, "compute_dtype": "bfloat16", "rope": None}


def metrics_lines(num_steps: int) -> Iterator[dict[str, Any]]:
    """Yields lines of metrics.jsonl."""
    rng = np.random.default_rng(0)
    for step in range(1, num_steps + 1):
        num_tokens = 32_768 - int(rng.integers(0, 900))
        step_s = 1.5 + 0.1 * rng.random()
        yield {
            "step": step,
            "loss": 2 + 3 * np.exp(-step / 300) + 0.2 * rng.standard_normal(),
            "grad_norm": np.exp(0.4 * rng.standard_normal()),
            "learning_rate": 1e-4 * min(1, step / 50),
            "num_tokens_total": 32_000 * step,
            "num_tokens_by_source": {"books": num_tokens},
            "padding_fraction": 1 - num_tokens / 32_768,
            "checkpoint_wait_s": 2.5 if step % 100 == 0 else None,
            "tokens_per_s": num_tokens / step_s,
            "mfu": 600 / step_s / 989,
            "device_peak_gib": 61.25,
        }


def eval_lines(steps: list[int], *, names: tuple[str, ...] = ("held out",)) -> list[dict[str, Any]]:
    """Lines of eval.jsonl."""
    return [
        {
            "step": step,
            "data": name,
            "data_digest": f"digest of {name}",
            "loss": 2.2 + 2 / (step + 1) + 0.3 * number,
            "token_accuracy": 0.55,
            **SETTINGS,
        }
        for step in steps
        for number, name in enumerate(names)
    ]


def task_line(step: int, task: str, length: int, **fields: Any) -> dict[str, Any]:
    """Line of tasks.jsonl."""
    own = {"step": step, "task": task, "length": length, "exact_rate": 0.5, "answer_loss": 1.25}
    return {**own, "exact_rate_by_depth": {}, "answer_loss_by_depth": {}, **SETTINGS, **fields}


def start_line(from_step: int = 0, **fields: Any) -> dict[str, Any]:
    """Line of starts.jsonl."""
    gib = 2**30
    device = {"weights": 4 * gib, "saved activations": 26 * gib, "other temporaries": 17 * gib}
    return {
        "from_step": from_step,
        "num_steps": 400,
        "num_devices": 8,
        "device_kind": "NVIDIA H100 80GB HBM3",
        "mesh": {"replica": 1, "data": 2, "seq": 4},
        "strategy": "Ulysses of 4",
        "kernel": "cudnn",
        "memory": {"device": device, "host": {}, "device_available": 71 * gib},
        **fields,
    }


def write_run(
    directory: pathlib.Path,
    lines: Any,
    *,
    config: Mapping[str, Any] = CONFIG,
    **files: Any,
) -> pathlib.Path:
    """Writes a run directory, and returns it. Args: files: lines of other files, by name."""
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml_io.dump(dict(config)), encoding="utf-8")
    for name, records in {"metrics": lines, **files}.items():
        text = "".join(f"{json.dumps(record)}\n" for record in records)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return directory
