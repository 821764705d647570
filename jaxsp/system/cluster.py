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
_TORCHRUN = "WORLD_SIZE"
_OPEN_MPI = "OMPI_COMM_WORLD_SIZE"
_SLURM = "SLURM_STEP_NUM_TASKS"  # only srun sets it; a batch script has SLURM_NTASKS too

_NEEDED = {
    _TORCHRUN: (*_MASTER, "RANK"),
    _OPEN_MPI: tuple(f"OMPI_COMM_WORLD_{name}" for name in ("LOCAL_SIZE", "LOCAL_RANK", "RANK")),
    _SLURM: ("SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_PROCID"),
}
"""Other variables of a launcher by its variable of the number of processes; the index is last."""


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
        _require(arguments, values, "Pass all three.")
        process = _parse_place(arguments, "--num-processes", "--process-id")
        address = arguments["--coordinator"]
        _check_address("--coordinator", address)
        return dataclasses.replace(process, coordinator=address)
    variables = {name: value for name, value in environ.items() if value}
    if "RANK" in variables or _TORCHRUN in variables:
        launcher = _TORCHRUN
    elif _OPEN_MPI in variables:
        launcher = _OPEN_MPI
    elif _SLURM in variables:
        launcher = _SLURM
    elif variables.get("PMI_SIZE", "1") != "1":
        raise UserError(
            f"PMI_SIZE = {variables['PMI_SIZE']}: mpirun must be that of Open MPI. Use srun or "
            "torchrun, or pass --coordinator, --num-processes and --process-id."
        )
    elif variables.keys().isdisjoint(_MASTER):
        return Process()
    else:
        launcher = _TORCHRUN
    if variables.get(launcher) == "1":
        return Process()
    arguments_help = "--coordinator HOST:PORT --num-processes N --process-id I"
    suggestion = f"Set them all, or none. Or pass {arguments_help}."
    _require(variables, (launcher, *_NEEDED[launcher]), suggestion)
    process = _parse_place(variables, launcher, _NEEDED[launcher][-1])

    if launcher == _SLURM:
        tasks_per_node: list[int] = []  # from a list such as 4(x2),1
        text = variables.get("SLURM_STEP_TASKS_PER_NODE", "")
        for tasks, num_nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
            tasks_per_node += [int(tasks)] * int(num_nodes or 1)
        node = _parse_int({"SLURM_NODEID": "0", **variables}, "SLURM_NODEID")
        count = tasks_per_node[node] if node < len(tasks_per_node) else None
        has_own_gpus = "SLURM_GPUS_PER_TASK" in variables  # each task sees only its own
        index = None if has_own_gpus else _parse_int(variables, "SLURM_LOCALID")
    else:
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")  # torchrun's, which other launchers lack
        if launcher == _OPEN_MPI:
            names = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
        index, count = (
            _parse_int(variables, name, minimum) if name in variables else None
            for minimum, name in enumerate(names)
        )

    if not variables.keys().isdisjoint(_MASTER):
        example = "Set both, for example MASTER_ADDR=node-0 MASTER_PORT=29500."
        _require(variables, _MASTER, example)
        host = variables["MASTER_ADDR"]
        port: str | int = variables["MASTER_PORT"]
        _check_address(":".join(_MASTER), f"{host}:{port}")
        if variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port = _choose_port(int(port) + 1)  # torchrun itself listens at that port
    elif launcher == _SLURM:
        # node[001-004,7],other or rack[0-1]n[0-3]: the first name of the first entry
        first = re.match(r"(?:[^,[]|\[[^]]*\])+", variables["SLURM_STEP_NODELIST"])
        host = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0] if first else "")
        step = _parse_int({"SLURM_STEP_ID": "0", **variables}, "SLURM_STEP_ID")
        port = _choose_port(_parse_int(variables, "SLURM_JOB_ID") + 7 * step)
    else:
        # up to Open MPI 4
        uri = re.match(
            r"(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^],]+))",
            variables.get("OMPI_MCA_orte_hnp_uri", ""),
        )
        if uri is None:
            raise UserError(
                f"{launcher} = {variables[launcher]}: the address of process 0 is missing, since "
                "this mpirun does not publish one. Set it for all processes: "
                "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 jaxsp train ..."
            )
        host = uri[2] or uri[3]
        port = _choose_port(int(uri[1]) // 4096)  # job ids of mpirun are multiples of 4096
    is_ipv6 = ":" in host and not host.startswith("[")
    return dataclasses.replace(
        process,
        coordinator=f"[{host}]:{port}" if is_ipv6 else f"{host}:{port}",
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


def _require(variables: Mapping[str, str], names: Iterable[str], suggestion: str) -> None:
    missing = [name for name in names if name not in variables]
    if missing:
        values = ", ".join(f"{name} = {variables[name]}" for name in names if name in variables)
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(f"{values}: {' and '.join(missing)} {verb} missing. {suggestion}")


def _parse_place(variables: Mapping[str, str], count_name: str, index_name: str) -> Process:
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


def _check_address(name: str, text: str) -> None:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 2**16:
        raise UserError(
            f"{name} = {text}: must be a host and a port from 1 to 65535, for example node-0:29500."
        )


def _choose_port(number: int) -> int:
    """Chooses the same port in all processes, from 61440 to 65535, which Linux never assigns."""
    return 61440 + number % 4096
