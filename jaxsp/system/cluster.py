"""This process's place in its job, from its arguments or from its launcher's variables.

JAX's own detection is not used: it fails in 9 of the 20 jobs of test_cluster.py (jax 0.10.1; 10
with 0.12.0). It does not know torchrun and MASTER_ADDR, needs mpi4py for Open MPI 5, does not parse
`rack[0-1]n[2-3]`, gives steps of a SLURM job that run at the same time one port, gives the only
process of a node one GPU of eight, and does not name what to set.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from jaxsp.core.errors import UserError
from jaxsp.system import hardware

_MASTER = ("MASTER_ADDR", "MASTER_PORT")
_TORCHRUN = (*_MASTER, "WORLD_SIZE", "RANK")
_TORCHRUN_LOCAL = (
    ("local_index", "LOCAL_RANK", 0),
    ("num_local_processes", "LOCAL_WORLD_SIZE", 1),
)
"""Optional variables of torchrun, by field of `Process`, with their minimum."""
_OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
_OPEN_MPI_LOCAL = ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
_SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
_SLURM_OTHERS = ("SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
_ARGUMENTS = "--coordinator HOST:PORT --num-processes N --process-id I"
_SUGGESTION = f"Or pass {_ARGUMENTS}."

MAX_ONE_GPU_PROCESSES = 64
"""Number of GPUs up to which each has a process of its own. With more, one process uses all GPUs of
a node: process 0 has an eighth of the others to answer, and storage an eighth of the imports."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process:
    """One of the processes of a job."""

    index: int = 0
    num_processes: int = 1
    coordinator: str = ""
    local_index: int | None = None
    """Index among the processes of the node; None: unknown."""
    num_local_processes: int | None = None
    """Number of processes on the node; None: unknown."""


def detect_process(
    environ: Mapping[str, str],
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
) -> Process:
    """Finds this process's place in its job.

    Arguments take precedence over the variables of torchrun, Open MPI and SLURM. Only srun sets
    SLURM_STEP_NUM_TASKS.

    Raises: UserError for invalid and for missing values.
    """
    values = {
        "--coordinator": coordinator,
        "--num-processes": num_processes,
        "--process-id": process_index,
    }
    arguments = {name: str(value) for name, value in values.items() if value is not None}
    if arguments:
        _require_all(arguments, values, "Pass all three.")
        process = _parse_place(arguments, "--num-processes", "--process-id")
        address = _check_address("--coordinator", arguments["--coordinator"])
        return dataclasses.replace(process, coordinator=address)
    variables = {name: value for name, value in environ.items() if value}
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _detect_torchrun(variables)
    if "OMPI_COMM_WORLD_SIZE" in variables:
        return _detect_open_mpi(variables)
    if "SLURM_STEP_NUM_TASKS" in variables:
        return _detect_slurm(variables)
    if not variables.keys().isdisjoint(_MASTER):
        _require_all(variables, _TORCHRUN, f"Set all four, or none. {_SUGGESTION}")
    if "PMI_SIZE" in variables and _parse_int(variables, "PMI_SIZE", minimum=1) > 1:
        raise UserError(
            f"PMI_SIZE = {variables['PMI_SIZE']}: mpirun must be that of Open MPI. "
            f"Use srun or torchrun, or pass {_ARGUMENTS}."
        )
    return Process()


def count_local_processes(
    process: Process, environ: Mapping[str, str], *, devices_per_process: int = 1
) -> int:
    """Number of processes on this node.

    Args: devices_per_process: GPUs of each process, for jobs that do not state the number.
    """
    if process.num_processes == 1:
        return 1
    if process.num_local_processes is not None:
        return process.num_local_processes
    return max(1, hardware.count_gpus(environ) // devices_per_process)


def find_count_warning(process: Process) -> str | None:
    """Describes how to start fewer processes, if a large job has several per node."""
    if process.num_local_processes in (None, 1) or process.num_processes <= MAX_ONE_GPU_PROCESSES:
        return None
    return (
        f"{process.num_processes} processes start slowly: with more than {MAX_ONE_GPU_PROCESSES} "
        "GPUs, start one process per node, which uses all GPUs there: srun --ntasks-per-node=1, "
        "torchrun --nproc-per-node=1 or mpirun --map-by ppr:1:node."
    )


def choose_local_gpus(process: Process, num_gpus: int) -> list[int] | None:
    """Indices of the node's GPUs that this process uses; None: all that it sees.

    A process uses one GPU if the node has as many processes as GPUs. It uses all if it is the only
    process on the node, or if the scheduler left it only one.

    Args: num_gpus: number of GPUs that the process sees.
    """
    index = process.local_index
    count = process.num_local_processes
    if index is None or count == 1 or num_gpus <= 1:
        return None
    if count not in (None, num_gpus) or index >= num_gpus:
        of_count = "" if count is None else f" of {count}"
        raise UserError(
            f"process {process.index}: is local process {index}{of_count} and sees {num_gpus} "
            f"GPUs, so it cannot know which one is its own. Start {num_gpus} processes per node, "
            "or one for all its GPUs; under SLURM, --gpus-per-task gives each task its own."
        )
    return [index]


def _detect_torchrun(variables: Mapping[str, str]) -> Process:
    _require_all(variables, ("WORLD_SIZE", "RANK"), f"Set both, or none. {_SUGGESTION}")
    process = _parse_place(variables, "WORLD_SIZE", "RANK")
    if process.num_processes == 1:
        return process
    _require_all(variables, _TORCHRUN, f"Set all four, or none. {_SUGGESTION}")
    coordinator = _parse_master(variables)
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun itself listens at that port
        host, _, port = coordinator.rpartition(":")
        coordinator = f"{host}:{_choose_port(int(port) + 1)}"
    local = {
        field: _parse_int(variables, name, minimum)
        for field, name, minimum in _TORCHRUN_LOCAL
        if name in variables
    }
    return dataclasses.replace(process, coordinator=coordinator, **local)


def _detect_open_mpi(variables: Mapping[str, str]) -> Process:
    """Place in a job of mpirun, which gives its address up to Open MPI 4 only."""
    _require_all(variables, (*_OPEN_MPI, *_OPEN_MPI_LOCAL), f"mpirun sets them all. {_SUGGESTION}")
    process = _parse_place(variables, *_OPEN_MPI)
    if process.num_processes == 1:
        return process
    local = _parse_place(variables, *_OPEN_MPI_LOCAL)
    uri = re.match(
        r"(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^],]+))",
        variables.get("OMPI_MCA_orte_hnp_uri", ""),
    )
    if not variables.keys().isdisjoint(_MASTER):
        coordinator = _parse_master(variables)
    elif uri:
        # Job ids of mpirun are multiples of 4096
        coordinator = _format_address(uri[2] or uri[3], _choose_port(int(uri[1]) // 4096))
    else:
        raise UserError(
            f"OMPI_COMM_WORLD_SIZE = {process.num_processes}: the address of process 0 is missing, "
            "since this mpirun does not publish one. Set it for all processes: "
            "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 jaxsp train ..."
        )
    return dataclasses.replace(
        process,
        coordinator=coordinator,
        local_index=local.index,
        num_local_processes=local.num_processes,
    )


def _detect_slurm(variables: Mapping[str, str]) -> Process:
    """Place in a job step of srun."""
    if _parse_int(variables, "SLURM_STEP_NUM_TASKS", 1) == 1:
        return Process()
    _require_all(variables, (*_SLURM, *_SLURM_OTHERS), f"srun sets them all. {_SUGGESTION}")
    process = _parse_place(variables, *_SLURM)
    variables = {"SLURM_STEP_ID": "0", "SLURM_NODEID": "0", **variables}
    if not variables.keys().isdisjoint(_MASTER):
        coordinator = _parse_master(variables)
    else:
        # node[001-004,7],other or rack[0-1]n[0-3]: the first name of the first entry
        first = re.match(r"(?:[^,[]|\[[^]]*\])+", variables["SLURM_STEP_NODELIST"])
        host = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0] if first else "")
        number = _parse_int(variables, "SLURM_JOB_ID") + 7 * _parse_int(variables, "SLURM_STEP_ID")
        coordinator = _format_address(host, _choose_port(number))
    tasks_per_node: list[int] = []  # from a list such as 4(x2),1
    text = variables.get("SLURM_STEP_TASKS_PER_NODE", "")
    for tasks, num_nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks_per_node += [int(tasks)] * int(num_nodes or 1)
    node = _parse_int(variables, "SLURM_NODEID")
    has_own_gpus = "SLURM_GPUS_PER_TASK" in variables  # each task sees only its own
    return dataclasses.replace(
        process,
        coordinator=coordinator,
        local_index=None if has_own_gpus else _parse_int(variables, "SLURM_LOCALID"),
        num_local_processes=tasks_per_node[node] if node < len(tasks_per_node) else None,
    )


def _require_all(variables: Mapping[str, str], names: Iterable[str], suggestion: str) -> None:
    """Raises: UserError if some of the names are not set."""
    missing = [name for name in names if name not in variables]
    if missing:
        values = ", ".join(f"{name} = {variables[name]}" for name in names if name in variables)
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(f"{values}: {' and '.join(missing)} {verb} missing. {suggestion}")


def _parse_place(variables: Mapping[str, str], count_name: str, index_name: str) -> Process:
    """Number of processes, and the index of this one."""
    count = _parse_int(variables, count_name, 1)
    index = _parse_int(variables, index_name)
    if index >= count:
        raise UserError(
            f"{index_name} = {index}: must be from 0 to {count - 1}, with {count_name} = {count}. "
            "Use each number once."
        )
    return Process(index=index, num_processes=count)


def _parse_int(variables: Mapping[str, str], name: str, minimum: int = 0) -> int:
    text = variables[name]
    if not (text.isascii() and text.isdecimal()) or int(text) < minimum:
        raise UserError(
            f"{name} = {text}: must be a whole number of at least {minimum}, "
            f"for example {name}={minimum + 1}."
        )
    return int(text)


def _parse_master(variables: Mapping[str, str]) -> str:
    suggestion = "Set both, for example MASTER_ADDR=node-0 MASTER_PORT=29500."
    _require_all(variables, _MASTER, suggestion)
    address = _format_address(variables["MASTER_ADDR"], variables["MASTER_PORT"])
    return _check_address("MASTER_ADDR:MASTER_PORT", address)


def _format_address(host: str, port: object) -> str:
    is_ipv6 = ":" in host and not host.startswith("[")
    return f"[{host}]:{port}" if is_ipv6 else f"{host}:{port}"


def _check_address(name: str, text: str) -> str:
    """Returns a coordinator's host and port unchanged. Raises: UserError if they are invalid."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 2**16:
        raise UserError(
            f"{name} = {text}: must be a host and a port from 1 to 65535, for example node-0:29500."
        )
    return text


def _choose_port(number: int) -> int:
    """Chooses the same port in all processes, from 61440 to 65535, which Linux never assigns."""
    return 61440 + number % 4096
