"""This process's place in its job, from its arguments or from its launcher's variables.

Devices and memory limits are set before JAX starts, so the place is read here. JAX itself finds the
address of process 0 under SLURM and Open MPI 4. The rest of its detection is not used: it does not
know torchrun, takes a batch script of SLURM for a job of its own, and gives the only process of a
node one GPU of eight (test_cluster.py has these jobs).
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from jaxsp.core.errors import UserError
from jaxsp.system import hardware

_MASTER = ("MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process:
    """One of the processes of a job."""

    index: int = 0
    num_processes: int = 1
    coordinator: str | None = None
    """Address of process 0; None: JAX finds it, or there is only one process."""
    launcher: str = "deactivate"
    """JAX's name of the method that finds the address of process 0."""
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

    Arguments take precedence over the variables of torchrun, Open MPI and SLURM, in this order.

    Raises: UserError for invalid and for missing values.
    """
    values = {
        "--coordinator": coordinator,
        "--num-processes": num_processes,
        "--process-id": process_index,
    }
    arguments = {name: str(value) for name, value in values.items() if value is not None}
    if arguments:
        _require(arguments, values)
        process = _parse_place(arguments, "--num-processes", "--process-id")
        _check_address("--coordinator", arguments["--coordinator"])
        return dataclasses.replace(process, coordinator=coordinator)
    variables = {name: value for name, value in environ.items() if value}
    names: tuple[str, ...] = ("WORLD_SIZE", "RANK", *_MASTER)
    local_names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "RANK" in variables or "WORLD_SIZE" in variables:
        launcher = "torchrun"
    elif "OMPI_COMM_WORLD_SIZE" in variables:
        launcher = "ompi"
        local_names = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
        names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", *local_names)
        if "OMPI_MCA_orte_hnp_uri" not in variables:  # from Open MPI 5 on
            names += _MASTER
    elif "SLURM_STEP_NUM_TASKS" in variables:  # only srun sets it, not sbatch
        launcher = "slurm"
        names = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")
    elif variables.keys().isdisjoint(_MASTER):
        return Process()
    else:
        launcher = "torchrun"
    if variables.get(names[0]) == "1":
        return Process()
    _require(variables, names)
    process = _parse_place(variables, *names[:2])
    index: int | None
    count: int | None
    if launcher == "slurm":
        tasks_per_node: list[int] = []  # from a list such as 4(x2),1
        text = variables.get("SLURM_STEP_TASKS_PER_NODE", "")
        for tasks, num_nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
            tasks_per_node += [int(tasks)] * int(num_nodes or 1)
        node = int(variables.get("SLURM_NODEID", 0))
        count = tasks_per_node[node] if node < len(tasks_per_node) else None
        has_own_gpus = "SLURM_GPUS_PER_TASK" in variables  # each task sees only its own
        index = None if has_own_gpus else int(variables["SLURM_LOCALID"])
    else:
        index, count = (int(variables[x]) if x in variables else None for x in local_names)
    address: str | None = None
    if not variables.keys().isdisjoint(_MASTER):
        _require(variables, _MASTER)
        host = variables["MASTER_ADDR"]
        port = variables["MASTER_PORT"]
        if variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun itself listens at that port; Linux never assigns 61440 to 65535
            port = str(61440 + (int(port) + 1) % 4096)
        is_ipv6 = ":" in host and not host.startswith("[")
        address = f"[{host}]:{port}" if is_ipv6 else f"{host}:{port}"
        _check_address(":".join(_MASTER), address)
        launcher = "deactivate"
    return dataclasses.replace(
        process,
        coordinator=address,
        launcher=launcher,
        local_index=index,
        num_local_processes=count,
    )


def count_local_processes(
    process: Process, environ: Mapping[str, str], *, devices_per_process: int = 1
) -> int:
    """Number of processes on this node. Args: devices_per_process: if the job does not state it."""
    if process.num_processes == 1:
        return 1
    if process.num_local_processes is not None:
        return process.num_local_processes
    return max(1, hardware.count_gpus(environ) // devices_per_process)


def choose_local_gpus(process: Process, num_gpus: int) -> list[int] | None:
    """Indices of the GPUs that this process uses, of those that it sees; None: all.

    A process uses one GPU if the node has as many processes as GPUs. It uses all if it is the only
    process on the node, or if the scheduler left it only one.
    """
    index = process.local_index
    count = process.num_local_processes
    if index is None or count == 1 or num_gpus <= 1:
        # Without a list, JAX would take only the first under SLURM and Open MPI
        return [*range(num_gpus)] if process.coordinator is None else None
    if count not in (None, num_gpus) or index >= num_gpus:
        of_count = "" if count is None else f" of {count}"
        raise UserError(
            f"process {process.index}: is local process {index}{of_count} and sees {num_gpus} "
            f"GPUs, so it cannot know which one is its own. Start {num_gpus} processes per node, "
            "or one for all its GPUs; under SLURM, --gpus-per-task gives each task its own."
        )
    return [index]


def _require(variables: Mapping[str, str], names: Iterable[str]) -> None:
    missing = [name for name in names if name not in variables]
    if missing:
        values = ", ".join(f"{name} = {variables[name]}" for name in names if name in variables)
        raise UserError(
            f"{values}: {' and '.join(missing)} must be set too, in all processes, or pass "
            "--coordinator HOST:PORT --num-processes N --process-id I. "
            "For example MASTER_ADDR=node-0 MASTER_PORT=29500."
        )


def _parse_place(variables: Mapping[str, str], count_name: str, index_name: str) -> Process:
    texts = (variables[index_name], variables[count_name])
    if not all(text.isdecimal() for text in texts) or int(texts[0]) >= int(texts[1]):
        raise UserError(
            f"{index_name} = {texts[0]}, {count_name} = {texts[1]}: must be from 0 to the number "
            "of processes less 1. Use each number once."
        )
    return Process(index=int(texts[0]), num_processes=int(texts[1]))


def _check_address(name: str, text: str) -> None:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 2**16:
        raise UserError(
            f"{name} = {text}: must be a host and a port from 1 to 65535, for example node-0:29500."
        )
