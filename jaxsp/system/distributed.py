"""Processes of a job: their place in it, how they exchange short texts, print and end together.

JAX ends the others 100 s after one has died. A process that fails or hangs tells them at once,
through JAX's key-value store, which needs no collective.
"""

import contextlib
import dataclasses
import faulthandler
import os
import re
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from jaxsp.core import errors
from jaxsp.core.errors import ExitCode, UserError
from jaxsp.system import hardware, output

# jax is imported in functions: every command imports this module, also those that print a help.

JOIN_TIMEOUT_S = 300  # for all processes of a job: nodes pull their images minutes apart
SHUTDOWN_TIMEOUT_S = 1200  # a finished process waits for others, which may still be writing
POLL_S = 0.5  # time between two reads of what the other processes have published
OWN_ERROR_GRACE_S = 1.0  # for a process to print its own message for an error that ends another too

MAX_POLLS_PER_S = 200
"""Reads per second that process 0 answers, at most: with more processes, each reads less often.
They take 6 % of a core (2 cores, scripts/bench/LOG.md, 2026-11-26)."""

EXIT_GRACE_S = 3.0
"""Time that process 0 waits for the others to end, since JAX ends them when it is gone, in addition
to the time between two reads. Twice what they need."""

_MASTER = ("MASTER_ADDR", "MASTER_PORT")

_FAILED_KEY = "event/failed"
_EXITED_KEY = "event/exited"
STOP_KEY = "event/stop"
"""Key of requests to stop. `last_read` has them without a request to process 0."""


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


this_process = Process()
"""The process given to `initialize`; before that, the only process of a job."""
_stdout_fd = 1
_kv_client: Any = None
"""JAX's key-value store, kept by process 0; None before `initialize` and after `shutdown`."""
_kv_lock = threading.Lock()
_disconnected = threading.Event()
_events: dict[str, dict[int, str]] = {}
"""Values by key and process that the last read of all events has found."""


def detect_process(
    environ: Mapping[str, str],
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
) -> Process:
    """Finds this process's place in its job.

    Arguments take precedence over the variables of torchrun, Open MPI and SLURM, in this order.
    Devices and memory limits are set before JAX starts, so the place is read here. JAX itself finds
    the address of process 0 under SLURM and Open MPI 4. The rest of its detection is not used: it
    does not know torchrun and MASTER_ADDR, needs mpi4py for Open MPI 5, and gives the only process
    of a node one GPU of eight (test_cluster.py has these jobs).

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
    elif variables.get("PMI_SIZE", "1") != "1":
        raise UserError(
            f"PMI_SIZE = {variables['PMI_SIZE']}: mpirun must be that of Open MPI. Use srun or "
            "torchrun, or pass --coordinator, --num-processes and --process-id."
        )
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
        node = _parse_index(variables, "SLURM_NODEID") or 0
        count = tasks_per_node[node] if node < len(tasks_per_node) else None
        has_own_gpus = "SLURM_GPUS_PER_TASK" in variables  # each task sees only its own
        index = None if has_own_gpus else _parse_index(variables, "SLURM_LOCALID")
    else:
        index, count = (_parse_index(variables, name) for name in local_names)
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


def initialize(process: Process, *, timeout_s: float = JOIN_TIMEOUT_S) -> None:
    """Joins the job; does nothing if it has a single process.

    Call it after jax_platform.choose_platform and before JAX counts devices. If the other processes
    do not join in time, JAX aborts this one.
    """
    global this_process, _kv_client, _stdout_fd
    this_process = process
    if process.num_processes == 1:
        return
    import jax

    # Otherwise JAX takes SIGTERM as a preemption notice, and `kill` does nothing
    jax.config.update("jax_enable_preemption_service", False)
    num_gpus = hardware.count_gpus(os.environ)
    local_gpus = choose_local_gpus(process, num_gpus)
    if num_gpus == 0:
        # Gloo, which connects CPU devices, prints a line for each group of processes to file
        # descriptor 1, in the middle of other lines, and has no option for that
        sys.stdout.flush()
        _stdout_fd = os.dup(1)
        sys.stdout = output.open_output(_stdout_fd, sys.stdout)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
    address = process.coordinator
    # JAX would listen on every network; the processes of one node need only the local one
    is_one_node = (address or "").rpartition(":")[0] in ("127.0.0.1", "localhost")
    try:
        jax.distributed.initialize(
            address,
            process.num_processes,
            process.index,
            local_device_ids=local_gpus,
            cluster_detection_method=process.launcher,
            coordinator_bind_address=address if is_one_node else None,
            initialization_timeout=int(timeout_s),
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S,
        )
    except jax.errors.JaxRuntimeError as error:
        # The other processes end at the end of their time limit
        raise UserError(
            f"{address or process.launcher}: processes cannot connect: {errors.first_line(error)}. "
            "Set MASTER_ADDR to a host name of process 0, and MASTER_PORT to a free port."
        ) from None
    from jax._src import distributed  # the store has no public name

    _kv_client = distributed.global_state.client
    _disconnected.clear()
    threading.Thread(target=_watch_peers, name="peer failures", daemon=True).start()


def publish(key: str, value: str) -> None:
    """Publishes this process's value of a key to the other processes, at most once per key; only
    between `initialize` and `shutdown` of a job with several."""
    with _kv_lock:
        if _kv_client is not None:
            _kv_client.key_value_set(f"jaxsp/{key}/{this_process.index}", value)


def read_folder(folder: str) -> dict[str, dict[int, str]]:
    """Values by key and process index of all keys in a folder, in one request; also those that
    ended processes have published."""
    with _kv_lock:
        items = [] if _kv_client is None else _kv_client.key_value_dir_get(f"jaxsp/{folder}/")
    values: dict[str, dict[int, str]] = {}
    for name, value in items:
        key, _, index = name.removeprefix("jaxsp/").rpartition("/")
        values.setdefault(key, {})[int(index)] = value
    return values


def last_read(key: str) -> dict[int, str]:
    """Values of an event's key by process index, read at most `poll_interval_s` ago."""
    return _events.get(key, {})


def poll_interval_s(shortest_s: float = POLL_S) -> float:
    """Seconds between two reads of what others have published: 5.1 with 1,024 processes."""
    return max(shortest_s, this_process.num_processes / MAX_POLLS_PER_S)


def is_connected() -> bool:
    """True between `initialize` and `shutdown` of a job with several processes."""
    return _kv_client is not None


def to_lines(text: str) -> str:
    """Escapes a text for the terminal. Every process except 0 adds its index to each line."""
    text = errors.escape(text.rstrip(), keep="\n\t")
    if (index := this_process.index) > 0:
        text = textwrap.indent(text, f"process {index}: ", lambda _: True)
    return text


def log(text: str) -> None:
    """Prints lines to stderr, from any thread, as `to_lines` has them."""
    text = to_lines(text)
    with contextlib.suppress(OSError):  # such as a terminal that is closed
        # On a terminal, replaces the progress bar and ^C, which have no line break
        begin = "\r\x1b[2K" if os.isatty(2) else ""
        os.write(2, f"{begin}{text}\n".encode(errors="backslashreplace"))


def log_stacks(text: str) -> None:
    """Prints a text and the stack of every thread of this process."""
    log(text)
    has_memfd = hasattr(os, "memfd_create")  # a disk may be why a process hangs
    with open(os.memfd_create("jaxsp"), "w+b") if has_memfd else tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        log(file.read().decode(errors="replace"))


def shutdown() -> None:
    """Leaves the job at its end, after waiting for the others. Does nothing the second time."""
    global _kv_client
    with _kv_lock:
        was_connected = is_connected()
        _kv_client = None
    _disconnected.set()
    if was_connected:
        import jax

        jax.distributed.shutdown()


def abort_job(code: int) -> NoReturn:
    """Ends this process immediately, and makes all others of the job end with the same exit code.
    With sys.exit, this process would wait for the others, and they for it."""
    exit_now(code, key=_FAILED_KEY)


def exit_now(code: int, *, key: str = _EXITED_KEY) -> NoReturn:
    """Ends this process immediately, from any thread.
    Process 0 waits for the others to end, at most 3 s and the time between two reads."""

    def announce() -> None:
        if not is_connected():
            return
        import jax

        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 has ended: JAX ends all
            publish(key, str(code))
            num_ended = 0
            while this_process.index == 0 and num_ended < this_process.num_processes:
                events = read_folder("event")
                num_ended = len(events.get(_FAILED_KEY, {}) | events.get(_EXITED_KEY, {}))
                time.sleep(POLL_S / 5)

    # In a thread, because a process 0 that is suspended does not answer
    announcement = threading.Thread(target=announce, daemon=True)
    announcement.start()
    announcement.join(EXIT_GRACE_S + poll_interval_s())
    if os.isatty(_stdout_fd):
        os.write(_stdout_fd, b"\x1b[?25h")  # shows the cursor, which a progress bar hides
    os._exit(code)


def find_failed_peer() -> tuple[int, int] | None:
    """Index and exit code of another process that has published its failure; None if none has."""
    global _events
    if not is_connected():
        return None
    import jax

    # Process 0 may have ended without publishing anything, so that JAX ends this one
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        _events = read_folder("event")
    failed = last_read(_FAILED_KEY)
    peers = [(index, int(code)) for index, code in failed.items() if index != this_process.index]
    return min(peers, default=None)


def _watch_peers() -> None:
    """Reads events, and ends this process after another has failed."""
    while not _disconnected.wait(poll_interval_s()):
        failed = find_failed_peer()
        if failed is None or _disconnected.is_set():
            continue
        time.sleep(OWN_ERROR_GRACE_S)
        index, code = failed
        # the stacks show which process is stuck
        show = log_stacks if code == ExitCode.HUNG else log
        show(f"ends because process {index} has failed, with exit code {code}")
        exit_now(code)


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


def _parse_index(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name)
    if text is not None and not text.isdecimal():
        raise UserError(f"{name} = {text}: must be a whole number, as a launcher sets it.")
    return None if text is None else int(text)


def _check_address(name: str, text: str) -> None:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 2**16:
        raise UserError(
            f"{name} = {text}: must be a host and a port from 1 to 65535, for example node-0:29500."
        )
