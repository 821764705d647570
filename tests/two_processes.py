"""Jobs of two processes on the CPUs of this machine."""

import pathlib
import socket
import subprocess
from collections.abc import Mapping
from typing import Any

from jaxsp.run import config_file
from tests import batches, commands, small_runs

ENDS_WITHIN_S = 30
"""Time limit from the failure of one process to the end of the other."""


def free_port() -> int:
    """Finds a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(
    *arguments: object, env: Mapping[str, str] | None = None, **options: Any
) -> list[subprocess.Popen]:
    """Starts Python twice, with the variables that torchrun sets; Gloo connects the processes."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        commands.start_python(*arguments, env={**job, "RANK": rank, **(env or {})}, **options)
        for rank in "01"
    ]


def wait(processes: list[subprocess.Popen], *, timeout: float = 300) -> list[tuple[str, str]]:
    """Waits until both have ended, and kills them after the time limit. Returns: their outputs."""
    try:
        return [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()


def write_config(
    folder: pathlib.Path, *, name: str, data: int, seq: int, steps: int = 3, devices: int = 8
) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes the config of a small run. Returns its file and the run's metrics.jsonl."""
    folder.joinpath("texts").mkdir(exist_ok=True)
    for number, words in enumerate(("one ", "and another ", "the third of them ")):
        path = folder / f"texts/{number}.txt"
        if not path.exists():  # a file that is written again is tokenized again
            path.write_text(words * 40, encoding="utf-8")
    sizes = {"hidden_size": 16, "num_attention_heads": 8, "head_dim": 4, "intermediate_size": 24}
    fields = small_runs.make_fields(
        folder,
        run={"directory": str(folder / name), "steps": steps},
        model={"config": batches.SMALL_LLAMA | sizes, "tokenizer": "bytes"},
        mesh={"data": data, "seq": seq, "virtual_cpu_devices": devices},
        data={"train": [{"source": str(folder / "texts/*.txt"), "format": "text"}]},
        batch={"rows_per_step": 2},
        optimizer={"name": "sgd", "learning_rate": 0.5, "schedule": "constant"},
    )
    config_file.save(config_file.parse(fields), folder / f"{name}.yaml")
    return folder / f"{name}.yaml", folder / name / "metrics.jsonl"
