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
    "attention": {"strategy": "auto"},
    "data": {"train": [{"source": "books", "weight": 3.0}], "row_tokens": 4096},
    "batch": {"rows_per_step": 8},
    "optimizer": {"learning_rate": 1e-4},
}


def metrics_lines(
    num_steps: int, *, seed: int = 0, noise: float = 0.0, sources: tuple[str, ...] = ("books",)
) -> Iterator[dict[str, Any]]:
    """Yields lines of metrics.jsonl. Args: noise: added to each loss, which `seed` determines."""
    rng = np.random.default_rng(0)
    rounding = np.random.default_rng(seed)
    total = 0
    for step in range(1, num_steps + 1):
        num_tokens = 32_768 - int(rng.integers(0, 900))
        total += num_tokens
        step_s = 1.5 + 0.1 * rng.random()
        parts = rng.multinomial(num_tokens, np.full(len(sources), 1 / len(sources))).tolist()
        tflops = 400 * 1.5 / step_s
        loss = 2 + 3 * np.exp(-step / 300) + 0.2 * rng.standard_normal()
        yield {
            "step": step,
            "epoch": 1,
            "loss": float(loss + noise * rounding.standard_normal()),
            "token_accuracy": 0.5 + 0.1 * rng.random(),
            "grad_norm": float(np.exp(0.4 * rng.standard_normal())),
            "learning_rate": 1e-4 * min(1, step / 50),
            "num_rows": 8,
            "num_tokens": num_tokens,
            "num_loss_tokens": num_tokens - 64,
            "num_tokens_total": total,
            "num_tokens_by_source": dict(zip(sources, parts, strict=True)),
            "padding_fraction": 1 - num_tokens / 32_768,
            "attention_imbalance": 1 + 0.2 * rng.random(),
            "step_s": step_s,
            "data_wait_s": 0.01 * rng.random(),
            "checkpoint_wait_s": 2.5 if step % 100 == 0 else None,
            "tokens_per_s": num_tokens / step_s,
            "tokens_per_s_per_device": num_tokens / step_s / 8,
            "tflops_per_device": tflops,
            "mfu": tflops / 989,
            "device_peak_gib": 61.25,
        }


def eval_lines(steps: list[int], *, names: tuple[str, ...] = ("held out",)) -> list[dict[str, Any]]:
    """Lines of eval.jsonl."""
    return [
        {
            "step": step,
            "data": name,
            "data_digest": f"digest of {name}",
            "row_tokens": 4096,
            "compute_dtype": "bfloat16",
            "rope": None,
            "loss": 2.2 + 2 / (step + 1) + 0.3 * number,
            "perplexity": float(np.exp(2.2 + 2 / (step + 1))),
            "token_accuracy": 0.55,
            "num_documents": 10,
            "num_rows": 4,
            "num_tokens": 16_000,
            "num_loss_tokens": 15_990,
            "seconds": 4.0,
        }
        for step in steps
        for number, name in enumerate(names)
    ]


def positions(*losses: float, num_filled: int = 0) -> dict[str, Any]:
    """Fields by position in a line of eval.jsonl. Args: losses: of the first buckets."""
    by_position = dict(zip(("0", "128", "256", "512"), losses, strict=False))
    filled = {position: loss + 0.5 for position, loss in list(by_position.items())[:num_filled]}
    return {"loss_by_position": by_position, "loss_of_filled_by_position": filled}


def task_line(step: int, task: str, length: int, **fields: Any) -> dict[str, Any]:
    """Line of tasks.jsonl."""
    return {
        "step": step,
        "task": task,
        "length": length,
        "row_tokens": 8192,
        "compute_dtype": "bfloat16",
        "rope": None,
        "exact_rate": 0.5,
        "answer_loss": 1.25,
        "exact_rate_by_depth": {},
        "answer_loss_by_depth": {},
        "num_samples": 20,
        "num_answer_tokens": 160,
        **fields,
    }


def start_line(from_step: int = 0, **fields: Any) -> dict[str, Any]:
    """Line of starts.jsonl."""
    gib = 2**30
    return {
        "time": "2026-11-01T10:00:00+00:00",
        "host": "node-1",
        "from_step": from_step,
        "previous_step": None,
        "checkpoint": None if from_step == 0 else f"runs/x/checkpoints/{from_step}",
        "config_changes": [],
        "num_steps": 400,
        "num_parameters": 8_000_000_000,
        "num_devices": 8,
        "device_kind": "NVIDIA H100 80GB HBM3",
        "num_processes": 1,
        "mesh": {"replica": 1, "data": 2, "seq": 4},
        "strategy": "Ulysses of 4",
        "kernel": "cudnn",
        "jaxsp_version": "0.1.0",
        "jax_version": "0.12.0",
        "python_version": "3.12.3",
        "compile_s": 41.5,
        "memory": {
            "remat": "save_attention",
            "device": {
                "weights": 4 * gib,
                "optimizer state": 8 * gib,
                "cuDNN workspace": gib,
                "gradients": 4 * gib,
                "saved activations": 26 * gib,
                "other temporaries": 17 * gib,
            },
            "host": {},
            "device_available": 71 * gib,
        },
        **fields,
    }


def write_run(
    directory: pathlib.Path,
    lines: Any,
    *,
    evals: Any = (),
    tasks: Any = (),
    starts: Any = (),
    nonfinite: Any = (),
    samples: Any = (),
    config: Mapping[str, Any] = CONFIG,
) -> pathlib.Path:
    """Writes a run directory. Files without lines are left out. Returns: the directory."""
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml_io.dump(dict(config)), encoding="utf-8")
    files = {
        "metrics.jsonl": lines,
        "eval.jsonl": evals,
        "tasks.jsonl": tasks,
        "samples.jsonl": samples,
        "starts.jsonl": starts,
        "nonfinite_steps.jsonl": nonfinite,
    }
    for name, records in files.items():
        text = "".join(f"{json.dumps(record)}\n" for record in records)
        if text:
            (directory / name).write_text(text, encoding="utf-8")
    return directory
