"""The processes of a job: how many there are, which of them this is, and how they begin and end together."""

import contextlib
import dataclasses
import faulthandler
import os
import pathlib
import re
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from jaxsp.core import errors

JOIN_S = 300
"""Every process of a job has to be there within so many seconds, jax's default: nodes pull their images minutes apart."""

HEARTBEAT_S = 20
"""A process that was not heard of for so long counts as dead, and JAX ends the others; jax's default is 100. With 20 they are
gone 17 to 19 s after a process was killed or stopped (jax 0.10.1 and 0.12.0, two processes on one machine), of the 30 that
a job may take. A thread of C++ sends them: a process that held Python's lock for 25 s with a limit of 10 was not missed."""

SHUTDOWN_S = 300
"""How long a process that is done waits for the others, jax's default: one may be writing still. Nobody waits so long for one
that has failed, which says so, nor for one that is dead, which is missed."""

HEAR_S = 0.5
"""How often a process asks what the others have told."""

OWN_WORDS_S = 1.0
"""A process that hears of another's failure has so long to find the same mistake, and to end with its own words."""

LAST_WORDS_S = 3.0
"""JAX ends all processes as soon as process 0 is gone. It stays for the others to go first, so long at most: twice what they
take to hear why, and to go."""

AGAIN = 75
"""Exit code of a process that hung: the same command goes on from its checkpoint (EX_TEMPFAIL of sysexits.h)."""

TESTED = "0.10.1 to 0.12.0"
"""Versions of JAX whose store of keys and values is known; it has no public name."""

_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
_WAY_OUT = "Or give --coordinator HOST:PORT --num-processes N --process-id I."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process:
    """One of the processes of a job."""

    index: int = 0
    num_processes: int = 1
    coordinator: str = ""
    """Host and port where process 0 listens."""
    local_index: int | None = None
    """Its number among the processes of its node, where that is known."""
    num_local: int | None = None


_here = Process()
_store: Any = None
"""Where processes tell each other something: JAX's, kept by process 0. None before they have met, and after they parted."""
_talking = threading.Lock()
_parted = threading.Event()
_FAILED, _GONE = "failed", "gone"


def here() -> Process:
    """This process, as `start` was told; alone before that."""
    return _here


def find(
    environ: Mapping[str, str], *, coordinator: str | None = None, num_processes: int | None = None, index: int | None = None
) -> Process:
    """Which process of which job this is, by what was said, else by torchrun's, Open MPI's or SLURM's variables.

    In the shell of sbatch and salloc SLURM_NTASKS counts tasks that nobody has started; SLURM_STEP_NUM_TASKS is there where
    srun has, and says how many.

    Raises: UserError for numbers that cannot be, and where something is missing.
    """
    said = {"--coordinator": coordinator, "--num-processes": num_processes, "--process-id": index}
    if given := {name: str(value) for name, value in said.items() if value is not None}:
        _complete(given, tuple(said), "Give all three.")
        count, own = _place(given, "--num-processes", "--process-id")
        return Process(index=own, num_processes=count, coordinator=address("--coordinator", given["--coordinator"]))
    variables = {name: value for name, value in environ.items() if value}
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _torchrun(variables)
    if "OMPI_COMM_WORLD_SIZE" in variables:
        return _open_mpi(variables)
    if "SLURM_STEP_NUM_TASKS" in variables:
        return _slurm(variables)
    if "MASTER_ADDR" in variables or "MASTER_PORT" in variables:
        _complete(variables, _TORCHRUN, f"Set all four, or none. {_WAY_OUT}")
    if "PMI_SIZE" in variables and _number(variables, "PMI_SIZE", least=1) > 1:
        raise errors.UserError(
            f"PMI_SIZE = {variables['PMI_SIZE']}: of mpirun's, jaxsp knows Open MPI's alone. Use srun, torchrun or "
            "python -m jaxsp.launch, or give --coordinator HOST:PORT --num-processes N --process-id I."
        )
    return Process()


def num_gpus(environ: Mapping[str, str]) -> int:
    """NVIDIA GPUs that JAX would use here, counted without waking JAX."""
    dev = pathlib.Path("/dev")
    there = len([*dev.glob("nvidia[0-9]*")]) or int((dev / "dxg").exists())  # dxg: under WSL, which does not say how many
    if environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if not there or visible is None:
        return there
    names = [name.strip() for name in visible.split(",")]
    # as CUDA reads it: a name that cannot be, such as -1, ends the list
    return next((place for place, name in enumerate(names) if not name or name.startswith("-")), len(names))


def num_local(process: Process, environ: Mapping[str, str]) -> int:
    """Processes on this node; where nobody has said it, one for each GPU of it."""
    if process.num_processes == 1:
        return 1
    return process.num_local or max(1, num_gpus(environ))


def host_memory() -> int:
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


def local_gpus(process: Process, num_gpus: int) -> list[int] | None:
    """Which of the node's GPUs are this process's; None: all that it sees.

    One, where there are as many processes on the node; all, for the only process, or where the scheduler left it but one.
    (jax's own detection under SLURM takes one GPU of eight when each node has a single process.)
    """
    if process.local_index is None or process.num_local == 1 or num_gpus <= 1:
        return None
    if (num_gpus if process.num_local is None else process.num_local) != num_gpus or process.local_index >= num_gpus:
        raise errors.UserError(
            f"process {process.index} is number {process.local_index} of {process.num_local or 'some'} on its node, and sees "
            f"{num_gpus} GPUs: it cannot tell which are its own. Start {num_gpus} processes on a node, or one for all its "
            "GPUs; under SLURM, --gpus-per-task gives each task its own."
        )
    return [process.local_index]


def start(process: Process, *, seconds: float = JOIN_S) -> None:
    """Joins the job; nothing, for a process alone. Call after mesh.choose_platform and before JAX counts devices.

    Where the others do not come in time, the process ends with exit code 1 and says who waited for whom.
    """
    global _here, _store
    _here = process
    if process.num_processes == 1:
        return
    import jax  # here: the launcher, which starts no job of its own, forks, and importing jax begins a thread

    # JAX would take SIGTERM as a notice for those who ask for it, and `kill` would do nothing
    jax.config.update("jax_enable_preemption_service", False)
    joined = threading.Event()
    # in a thread: jax ends the process when its own time is up, and nothing can catch that
    threading.Thread(target=_wait, args=(process, joined, seconds), daemon=True).start()
    host = process.coordinator.rpartition(":")[0]
    gpus = local_gpus(process, num_gpus(os.environ))
    try:
        jax.distributed.initialize(
            process.coordinator,
            process.num_processes,
            process.index,
            local_device_ids=gpus,
            cluster_detection_method="deactivate",
            # a job of one node listens to nobody else; jax would listen on every network
            coordinator_bind_address=process.coordinator if host in ("127.0.0.1", "localhost") else None,
            initialization_timeout=int(seconds) + 60,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except jax.errors.JaxRuntimeError as error:  # the others wait until their time is up, and say so
        raise errors.UserError(
            f"{process.coordinator}: the processes cannot meet there: {str(error).splitlines()[0]}. Name a host of process 0 "
            "and a port that is free."
        ) from None
    finally:
        joined.set()
    _store = _keys_and_values()
    _parted.clear()
    threading.Thread(target=_hear, name="hears of processes that fail", daemon=True).start()


def tell(name: str, value: str) -> None:
    """Tells the other processes something; nobody, where there are none, or not yet, or no more. Once for each name."""
    with _talking:
        if _store is not None:
            _store.key_value_set(f"jaxsp/{name}/{_here.index}", value)


def told(name: str) -> dict[int, str]:
    """What processes have told under a name, by their number; they need not be alive any more."""
    with _talking:
        found = [] if _store is None else _store.key_value_dir_get(f"jaxsp/{name}/")
    return {int(key.rpartition("/")[2]): value for key, value in found}


def talk() -> bool:
    """Whether there are other processes to talk to."""
    return _store is not None


def prefix(index: int) -> str:
    """Stands before what a process other than 0 says."""
    return f"process {index}: "


@contextlib.contextmanager
def though_deaf() -> Iterator[None]:
    """Goes on where nobody can hear what is said: a log on a full disk, or a terminal that is gone, is not worth a run."""
    with contextlib.suppress(OSError):
        yield


def say(words: str) -> None:
    """Says something on stderr, each line under this process's number; of process 0, as it is."""
    text = textwrap.indent(words.rstrip(), prefix(_here.index), lambda _: _here.index > 0)
    with though_deaf():
        os.write(2, f"{text}\n".encode())  # at once, whatever the main thread is in the middle of


def say_stacks() -> None:
    """Says where every thread of this process is."""
    file = os.memfd_create("stacks")
    faulthandler.dump_traceback(file, all_threads=True)
    say(os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace"))
    os.close(file)


def end() -> None:
    """Leaves the job when all is done; waits for the others, SHUTDOWN_S at most. Nothing, where it has left already."""
    if not _part():
        return
    import jax

    jax.distributed.shutdown()


def fail(code: int) -> NoReturn:
    """Ends this process at once, after its last words, and all others of the job with the same exit code.

    A usual exit would wait for the others, who wait for it.
    """
    leave(code, farewell=_FAILED)


def leave(code: int, *, farewell: str = _GONE) -> NoReturn:
    """Ends this process at once, from any thread; process 0 after the others, LAST_WORDS_S later at most."""
    goodbye = threading.Thread(target=_say_goodbye, args=(code, farewell), daemon=True)
    goodbye.start()
    goodbye.join(LAST_WORDS_S)  # a process 0 that is stopped does not answer
    if os.isatty(1):
        os.write(1, b"\x1b[?25h")  # the cursor, which a progress bar hides
    os._exit(code)


def _say_goodbye(code: int, farewell: str) -> None:
    if not talk():
        return
    import jax

    try:
        tell(farewell, str(code))
        while _here.index == 0 and len(told(_FAILED) | told(_GONE)) < _here.num_processes:
            time.sleep(HEAR_S / 5)
    except jax.errors.JaxRuntimeError:
        pass  # process 0 is gone already, and JAX ends whom it has left


def failed_before() -> tuple[int, int] | None:
    """Which of the other processes has failed already and said why, and its exit code."""
    if not talk():
        return None
    import jax

    try:
        return min(((index, int(code)) for index, code in told(_FAILED).items() if index != _here.index), default=None)
    except jax.errors.JaxRuntimeError:
        return None  # process 0 is gone, without a word


def _hear() -> None:
    """Ends this process when another has failed."""
    import jax

    while not _parted.wait(HEAR_S):
        try:
            failed = told(_FAILED)
        except jax.errors.JaxRuntimeError:
            return  # process 0 is gone, and JAX ends this one
        for index, code in failed.items():
            if index != _here.index:
                time.sleep(OWN_WORDS_S)
                say(f"ends because process {index} has failed, with exit code {code}")
                if int(code) == AGAIN:  # which of them is stuck?
                    say_stacks()
                leave(int(code))


def _part() -> bool:
    """Ends the talk, if there was any."""
    global _store
    with _talking:
        talked, _store = _store is not None, None
    _parted.set()
    return talked


def _keys_and_values() -> Any:
    """JAX's own store. Raises: UserError where this JAX has none that we know."""
    import jax
    from jax._src import distributed

    client = getattr(getattr(distributed, "global_state", None), "client", None)
    if not all(hasattr(client, name) for name in ("key_value_set", "key_value_dir_get")):
        raise errors.UserError(
            f"jax = {jax.__version__}: keeps what processes tell each other where we do not know it; {TESTED} are known. "
            "Install one of these, or use one process."
        )
    return client


def _wait(process: Process, joined: threading.Event, seconds: float) -> None:
    """Says what is waited for, and ends the process when the time is up."""
    others = f"the other {process.num_processes - 1}" if process.num_processes > 2 else "the other process"
    whom = f"{others} to come to {process.coordinator}" if process.index == 0 else f"process 0 at {process.coordinator}"
    name = f"process {process.index} of {process.num_processes}"
    if joined.wait(seconds / 8):
        return
    print(f"{name}: waits for {whom}, {seconds:g} s at most", file=sys.stderr, flush=True)
    if joined.wait(seconds * 7 / 8):
        return
    print(
        f"{name}: waited {seconds:g} s for {whom}{_answer(process)}. All {process.num_processes} have to be started within "
        "that time, with the same coordinator, and every node has to reach its port.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def _answer(process: Process) -> str:
    """Whether process 0 can be reached."""
    if process.index == 0:
        return ""
    host, _, port = process.coordinator.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
    except OSError as error:
        return f" (it does not answer: {error.strerror or error})"
    return " (it answers, so another process is missing)"


def _torchrun(variables: Mapping[str, str]) -> Process:
    _complete(variables, ("WORLD_SIZE", "RANK"), f"Set both, or none. {_WAY_OUT}")
    count, own = _place(variables, "WORLD_SIZE", "RANK")
    if count == 1:
        return Process()
    _complete(variables, _TORCHRUN, f"Set all four, or none. {_WAY_OUT}")
    coordinator = _master(variables)
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun itself listens at that port
        host, _, port = coordinator.rpartition(":")
        coordinator = f"{host}:{_port(int(port) + 1)}"
    return Process(
        index=own,
        num_processes=count,
        coordinator=coordinator,
        local_index=_number(variables, "LOCAL_RANK") if "LOCAL_RANK" in variables else None,
        num_local=_number(variables, "LOCAL_WORLD_SIZE", least=1) if "LOCAL_WORLD_SIZE" in variables else None,
    )


def _open_mpi(variables: Mapping[str, str]) -> Process:
    """Source: where mpirun listens, as jax's ompi_cluster; it says so up to Open MPI 4 only."""
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")]
    _complete(variables, names, f"mpirun sets them all. {_WAY_OUT}")
    count, own = _place(variables, *names[:2])
    if count == 1:
        return Process()
    num_local, local = _place(variables, *names[2:])
    uri = re.match(r"(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^],]+))", variables.get("OMPI_MCA_orte_hnp_uri", ""))
    if "MASTER_ADDR" in variables or "MASTER_PORT" in variables:
        coordinator = _master(variables)
    elif uri:
        coordinator = _join(uri[2] or uri[3], _port(int(uri[1]) // 4096))  # job ids of mpirun are multiples of 4096
    else:
        raise errors.UserError(
            f"OMPI_COMM_WORLD_SIZE = {count}: mpirun does not say where process 0 listens. Say it for all: "
            "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 python -m jaxsp.train ..."
        )
    return Process(index=own, num_processes=count, coordinator=coordinator, local_index=local, num_local=num_local)


def _slurm(variables: Mapping[str, str]) -> Process:
    """Source: port by the job's number, as jax's slurm_cluster; the step's is added, since steps of a job run side by side."""
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
    count = _number(variables, names[0], least=1)
    if count == 1:
        return Process()
    _complete(variables, names, f"srun sets them all. {_WAY_OUT}")
    count, own = _place(variables, *names[:2])
    if "MASTER_ADDR" in variables or "MASTER_PORT" in variables:
        coordinator = _master(variables)
    else:
        # node[001-004,7],other or rack[0-1]n[0-3]: the first name of the first entry
        first = re.match(r"(?:[^,[]|\[[^]]*\])+", variables["SLURM_STEP_NODELIST"])
        host = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0] if first else "")
        number = _number(variables, "SLURM_JOB_ID") + 7 * _number({"SLURM_STEP_ID": "0", **variables}, "SLURM_STEP_ID")
        coordinator = _join(host, _port(number))
    per_node = [
        int(tasks)
        for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
        for _ in range(int(nodes or 1))
    ]
    node = _number({"SLURM_NODEID": "0", **variables}, "SLURM_NODEID")
    return Process(
        index=own,
        num_processes=count,
        coordinator=coordinator,
        # each task sees its own GPUs alone then, and uses all of them
        local_index=None if "SLURM_GPUS_PER_TASK" in variables else _number(variables, "SLURM_LOCALID"),
        num_local=per_node[node] if node < len(per_node) else None,
    )


def _complete(variables: Mapping[str, str], names: tuple[str, ...] | list[str], way_out: str) -> None:
    """Raises: UserError if some of the names are not set."""
    missing = [name for name in names if name not in variables]
    if missing:
        said = ", ".join(f"{name} = {variables[name]}" for name in names if name in variables)
        raise errors.UserError(f"{said}: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. {way_out}")


def _place(variables: Mapping[str, str], count_name: str, index_name: str) -> tuple[int, int]:
    """How many there are, and which of them this is."""
    count, index = _number(variables, count_name, least=1), _number(variables, index_name)
    if index >= count:
        raise errors.UserError(
            f"{index_name} = {index}: with {count_name} = {count} they go from 0 to {count - 1}. Use one of these, each once."
        )
    return count, index


def _number(variables: Mapping[str, str], name: str, *, least: int = 0) -> int:
    text = variables[name]
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise errors.UserError(f"{name} = {text}: must be a whole number, {least} or more, for example {name}={least + 1}.")
    return int(text)


def _master(variables: Mapping[str, str]) -> str:
    _complete(variables, _TORCHRUN[:2], "Set both, for example MASTER_ADDR=node-0 MASTER_PORT=29500.")
    port = variables["MASTER_PORT"]
    return address("MASTER_ADDR:MASTER_PORT", _join(variables["MASTER_ADDR"], port))


def _join(host: str, port: object) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def address(name: str, text: str) -> str:
    """A coordinator's host and port, as they are. Raises: UserError if they are none."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 2**16:
        raise errors.UserError(f"{name} = {text}: must be a host and a port from 1 to 65535, for example node-0:29500.")
    return text


def _port(number: int) -> int:
    """The same port in all processes: one of 61440 to 65535, which Linux gives to nobody by itself."""
    return 61440 + number % 4096
