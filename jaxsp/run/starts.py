"""Starts of a run: starts.jsonl has a line for each time that a process began to train."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import pathlib
import platform
from typing import Any

import jax

from jaxsp.core import files
from jaxsp.model import flops
from jaxsp.planning.descriptions import StepMemory
from jaxsp.run.metrics import METRICS_FILE
from jaxsp.run.run import Run
from jaxsp.system import jsonl, run_lock

STARTS_FILE = "starts.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartLine:
    """One line of starts.jsonl: one start of a run, new or resumed. Lines are never removed."""

    time: str
    """Time of the start, in ISO 8601 with the offset from UTC."""
    host: str
    """Name of the node of process 0."""
    from_step: int
    """Number of steps before the start; 0 for a new run."""
    previous_step: int | None
    """Step of the last line of metrics.jsonl before the start. Steps after from_step are repeated.
    null if there was no line."""
    checkpoint: str | None
    """Checkpoint that the run resumed from; null for a new run."""
    config_changes: list[str]
    """Config fields that differ from those of the checkpoint, with both values."""
    num_steps: int
    """Number of steps of the whole run."""
    num_parameters: int
    """Number of the model's parameters."""
    num_devices: int
    """Number of devices of the mesh."""
    device_kind: str
    """Name of the devices, as JAX reports it."""
    num_processes: int
    """Number of processes."""
    mesh: dict[str, int]
    """Size of each mesh axis, by name."""
    strategy: str
    """Attention strategy that was chosen, with its degrees. Empty if no devices share rows."""
    kernel: str
    """Attention kernel that was chosen."""
    jaxsp_version: str | None
    """Version of jaxsp; null if it is not installed as a package."""
    jax_version: str
    """Version of JAX."""
    python_version: str
    """Version of Python."""
    compile_s: float
    """Seconds to compile the step."""
    memory: dict[str, Any]
    """Memory of the compiled step: remat (chosen memory.remat), device and host (bytes per device,
    by cause) and device_available (bytes that the step may use on a device, or null). Weights,
    optimizer state and totals are exact; gradients and saved activations are formulas; other
    temporaries are the rest. host is empty if nothing is offloaded."""


def describe_start(run: Run, *, memory: StepMemory, compile_s: float) -> StartLine:
    """Returns the line of a start."""
    spec = run.spec
    devices = spec.mesh.devices.flatten()
    checkpoint = run.start.checkpoint
    version = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("jaxsp")
    return StartLine(
        time=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        host=platform.node(),
        from_step=run.start.step,
        previous_step=_read_last_step(run.directory / METRICS_FILE),
        checkpoint=None if checkpoint is None else str(checkpoint),
        config_changes=list(run.start.config_changes),
        num_steps=spec.num_steps,
        num_parameters=flops.num_parameters(spec.table),
        num_devices=len(devices),
        device_kind=devices[0].device_kind,
        num_processes=jax.process_count(),
        mesh=dict(spec.mesh.shape),
        strategy=spec.attention.strategy.description,
        kernel=spec.attention.kernel.name,
        jaxsp_version=version,
        jax_version=jax.__version__,
        python_version=platform.python_version(),
        compile_s=round(compile_s, 3),
        memory=dataclasses.asdict(memory),
    )


def record_start(directory: pathlib.Path, line: StartLine) -> None:
    """Appends the line of a start in process 0. Raises: UserError if it cannot be written."""
    if jax.process_index() == 0:
        with run_lock.report_write_errors(directory):
            jsonl.append_record(directory / STARTS_FILE, dataclasses.asdict(line))


def _read_last_step(path: pathlib.Path) -> int | None:
    """Step of the last complete line of a file; None if there is no such line."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    # the last line of a killed run may be damaged
    steps = ((files.parse_json(line) or {}).get("step") for line in reversed(lines))
    return next((step for step in steps if isinstance(step, int)), None)
