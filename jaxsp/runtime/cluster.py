"""Which process of which job this is, by what started it; and what its node has for it."""

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping

from jaxsp.core.errors import UserError

_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
_SUGGESTION = "Or give --coordinator HOST:PORT --num-processes N --process-id I."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process:
    """One of the processes of a job."""

    index: int = 0
    num_processes: int = 1
    coordinator: str = ""
    """Host and port where process 0 listens."""
    local_index: int | None = None
    """Its number among the processes of its node, where that is known."""
    num_local_processes: int | None = None


def detect_process(
    environ: Mapping[str, str],
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
) -> Process:
    """Which process of which job this is, by what was said, else by torchrun's, Open MPI's or SLURM's variables.

    In the shell of sbatch and salloc SLURM_NTASKS counts tasks that nobody has started; SLURM_STEP_NUM_TASKS is there where
    srun has, and says how many.

    Raises: UserError for numbers that cannot be, and where something is missing.
    """
    said = {
        "--coordinator": coordinator,
        "--num-processes": num_processes,
        "--process-id": process_index,
    }
    if given := {name: str(value) for name, value in said.items() if value is not None}:
        _require_all(given, tuple(said), "Give all three.")
        count, own = _parse_count_and_index(given, "--num-processes", "--process-id")
        return Process(
            index=own,
            num_processes=count,
            coordinator=check_address("--coordinator", given["--coordinator"]),
        )
    variables = {name: value for name, value in environ.items() if value}
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _detect_torchrun(variables)
    if "OMPI_COMM_WORLD_SIZE" in variables:
        return _detect_open_mpi(variables)
    if "SLURM_STEP_NUM_TASKS" in variables:
        return _detect_slurm(variables)
    if "MASTER_ADDR" in variables or "MASTER_PORT" in variables:
        _require_all(variables, _TORCHRUN, f"Set all four, or none. {_SUGGESTION}")
    if "PMI_SIZE" in variables and _parse_int(variables, "PMI_SIZE", minimum=1) > 1:
        raise UserError(
            f"PMI_SIZE = {variables['PMI_SIZE']}: of mpirun's, jaxsp knows Open MPI's alone. Use srun, torchrun or "
            "python -m jaxsp.launch, or give --coordinator HOST:PORT --num-processes N --process-id I."
        )
    return Process()


def count_gpus(environ: Mapping[str, str]) -> int:
    """NVIDIA GPUs that JAX would use here, counted without waking JAX."""
    dev = pathlib.Path("/dev")
    there = len([*dev.glob("nvidia[0-9]*")]) or int(
        (dev / "dxg").exists()
    )  # dxg: under WSL, which does not say how many
    if environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if not there or visible is None:
        return there
    names = [name.strip() for name in visible.split(",")]
    # as CUDA reads it: a name that cannot be, such as -1, ends the list
    return next(
        (place for place, name in enumerate(names) if not name or name.startswith("-")), len(names)
    )


def count_local_processes(
    process: Process, environ: Mapping[str, str], *, devices_per_process: int = 1
) -> int:
    """Number of processes on this node.

    Args: num_devices: GPUs of each process, for jobs that do not state the number of processes.
    """
    if process.num_processes == 1:
        return 1
    return process.num_local_processes or max(1, count_gpus(environ) // devices_per_process)


def host_memory_bytes() -> int:
    """Bytes of memory of this node, or of the container or job that the process is in."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    groups, own = pathlib.Path("/sys/fs/cgroup"), pathlib.Path("/proc/self/cgroup")
    # 0::/slurm/job_1/step_0: a limit may be the group's or that of one around it
    lines = own.read_text(encoding="utf-8").splitlines() if own.is_file() else []
    for name in [line.partition("::/")[2] for line in lines if line.startswith("0::/")]:
        for folder in (groups / name, *(groups / name).parents):
            file = folder / "memory.max"
            limit = file.read_text(encoding="ascii").strip() if file.is_file() else ""
            if limit.isdecimal():
                limits.append(int(limit))
    return min(limits)


def choose_local_gpus(process: Process, num_gpus: int) -> list[int] | None:
    """Which of the node's GPUs are this process's; None: all that it sees.

    One, where there are as many processes on the node; all, for the only process, or where the scheduler left it but one.
    (jax's own detection under SLURM takes one GPU of eight when each node has a single process.)
    """
    if process.local_index is None or process.num_local_processes == 1 or num_gpus <= 1:
        return None
    if (
        num_gpus if process.num_local_processes is None else process.num_local_processes
    ) != num_gpus or process.local_index >= num_gpus:
        raise UserError(
            f"process {process.index} is number {process.local_index} of {process.num_local_processes or 'some'} on its node, and sees "
            f"{num_gpus} GPUs: it cannot tell which are its own. Start {num_gpus} processes on a node, or one for all its "
            "GPUs; under SLURM, --gpus-per-task gives each task its own."
        )
    return [process.local_index]


def _detect_torchrun(variables: Mapping[str, str]) -> Process:
    _require_all(variables, ("WORLD_SIZE", "RANK"), f"Set both, or none. {_SUGGESTION}")
    count, own = _parse_count_and_index(variables, "WORLD_SIZE", "RANK")
    if count == 1:
        return Process()
    _require_all(variables, _TORCHRUN, f"Set all four, or none. {_SUGGESTION}")
    coordinator = _parse_master(variables)
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun itself listens at that port
        host, _, port = coordinator.rpartition(":")
        coordinator = f"{host}:{_choose_port(int(port) + 1)}"
    return Process(
        index=own,
        num_processes=count,
        coordinator=coordinator,
        local_index=_parse_int(variables, "LOCAL_RANK") if "LOCAL_RANK" in variables else None,
        num_local_processes=_parse_int(variables, "LOCAL_WORLD_SIZE", minimum=1)
        if "LOCAL_WORLD_SIZE" in variables
        else None,
    )


def _detect_open_mpi(variables: Mapping[str, str]) -> Process:
    """Source: where mpirun listens, as jax's ompi_cluster; it says so up to Open MPI 4 only."""
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")]
    _require_all(variables, names, f"mpirun sets them all. {_SUGGESTION}")
    count, own = _parse_count_and_index(variables, *names[:2])
    if count == 1:
        return Process()
    num_local, local = _parse_count_and_index(variables, *names[2:])
    uri = re.match(
        r"(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^],]+))",
        variables.get("OMPI_MCA_orte_hnp_uri", ""),
    )
    if "MASTER_ADDR" in variables or "MASTER_PORT" in variables:
        coordinator = _parse_master(variables)
    elif uri:
        coordinator = _format_address(
            uri[2] or uri[3], _choose_port(int(uri[1]) // 4096)
        )  # job ids of mpirun are multiples of 4096
    else:
        raise UserError(
            f"OMPI_COMM_WORLD_SIZE = {count}: mpirun does not say where process 0 listens. Say it for all: "
            "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 python -m jaxsp.train ..."
        )
    return Process(
        index=own,
        num_processes=count,
        coordinator=coordinator,
        local_index=local,
        num_local_processes=num_local,
    )


def _detect_slurm(variables: Mapping[str, str]) -> Process:
    """Source: port by the job's number, as jax's slurm_cluster; the step's is added, since steps of a job run side by side."""
    names = (
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_STEP_NODELIST",
        "SLURM_JOB_ID",
    )
    count = _parse_int(variables, names[0], minimum=1)
    if count == 1:
        return Process()
    _require_all(variables, names, f"srun sets them all. {_SUGGESTION}")
    count, own = _parse_count_and_index(variables, *names[:2])
    if "MASTER_ADDR" in variables or "MASTER_PORT" in variables:
        coordinator = _parse_master(variables)
    else:
        # node[001-004,7],other or rack[0-1]n[0-3]: the first name of the first entry
        first = re.match(r"(?:[^,[]|\[[^]]*\])+", variables["SLURM_STEP_NODELIST"])
        host = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0] if first else "")
        number = _parse_int(variables, "SLURM_JOB_ID") + 7 * _parse_int(
            {"SLURM_STEP_ID": "0", **variables}, "SLURM_STEP_ID"
        )
        coordinator = _format_address(host, _choose_port(number))
    per_node = [
        int(tasks)
        for tasks, nodes in re.findall(
            r"(\d+)(?:\(x(\d+)\))?", variables.get("SLURM_STEP_TASKS_PER_NODE", "")
        )
        for _ in range(int(nodes or 1))
    ]
    node = _parse_int({"SLURM_NODEID": "0", **variables}, "SLURM_NODEID")
    return Process(
        index=own,
        num_processes=count,
        coordinator=coordinator,
        # each task sees its own GPUs alone then, and uses all of them
        local_index=None
        if "SLURM_GPUS_PER_TASK" in variables
        else _parse_int(variables, "SLURM_LOCALID"),
        num_local_processes=per_node[node] if node < len(per_node) else None,
    )


def _require_all(
    variables: Mapping[str, str], names: tuple[str, ...] | list[str], suggestion: str
) -> None:
    """Raises: UserError if some of the names are not set."""
    missing = [name for name in names if name not in variables]
    if missing:
        said = ", ".join(f"{name} = {variables[name]}" for name in names if name in variables)
        raise UserError(
            f"{said}: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. {suggestion}"
        )


def _parse_count_and_index(
    variables: Mapping[str, str], count_name: str, index_name: str
) -> tuple[int, int]:
    """How many there are, and which of them this is."""
    count, index = _parse_int(variables, count_name, minimum=1), _parse_int(variables, index_name)
    if index >= count:
        raise UserError(
            f"{index_name} = {index}: with {count_name} = {count} they go from 0 to {count - 1}. Use one of these, each once."
        )
    return count, index


def _parse_int(variables: Mapping[str, str], name: str, *, minimum: int = 0) -> int:
    text = variables[name]
    if not (text.isascii() and text.isdecimal()) or int(text) < minimum:
        raise UserError(
            f"{name} = {text}: must be a whole number, {minimum} or more, for example {name}={minimum + 1}."
        )
    return int(text)


def _parse_master(variables: Mapping[str, str]) -> str:
    _require_all(
        variables, _TORCHRUN[:2], "Set both, for example MASTER_ADDR=node-0 MASTER_PORT=29500."
    )
    port = variables["MASTER_PORT"]
    return check_address("MASTER_ADDR:MASTER_PORT", _format_address(variables["MASTER_ADDR"], port))


def _format_address(host: str, port: object) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def check_address(name: str, text: str) -> str:
    """A coordinator's host and port, as they are. Raises: UserError if they are none."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 2**16:
        raise UserError(
            f"{name} = {text}: must be a host and a port from 1 to 65535, for example node-0:29500."
        )
    return text


def _choose_port(number: int) -> int:
    """The same port in all processes: one of 61440 to 65535, which Linux gives to nobody by itself."""
    return 61440 + number % 4096
