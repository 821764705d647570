"""How the processes of a job begin, talk and end together."""

import contextlib
import faulthandler
import os
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from jaxsp.core.errors import UserError
from jaxsp.runtime import cluster, hardware
from jaxsp.runtime.cluster import Process

JOIN_TIMEOUT_S = 300
"""Every process of a job has to be there within so many seconds, jax's default: nodes pull their images minutes apart."""

HEARTBEAT_TIMEOUT_S = 20
"""A process that was not heard of for so long counts as dead, and JAX ends the others; jax's default is 100. With 20 they are
gone 17 to 19 s after a process was killed or stopped (jax 0.10.1 and 0.12.0, two processes on one machine), of the 30 that
a job may take. A thread of C++ sends them: a process that held Python's lock for 25 s with a limit of 10 was not missed."""

SHUTDOWN_TIMEOUT_S = 300
"""How long a process that is done waits for the others, jax's default: one may be writing still. Nobody waits so long for one
that has failed, which says so, nor for one that is dead, which is missed."""

POLL_INTERVAL_S = 0.5
"""How often a process asks what the others have told."""

OWN_ERROR_GRACE_S = 1.0
"""A process that hears of another's failure has so long to find the same mistake, and to end with its own words."""

EXIT_GRACE_S = 3.0
"""JAX ends all processes as soon as process 0 is gone. It stays for the others to go first, so long at most: twice what they
take to hear why, and to go."""

EXIT_HUNG = 75
"""Exit code of a process that hung: the same command goes on from its checkpoint (EX_TEMPFAIL of sysexits.h)."""

TESTED_JAX_VERSIONS = "0.10.1 to 0.12.0"
"""Versions of JAX whose store of keys and values is known; it has no public name."""


_stdout_fd = 1
"""File descriptor that Python prints to."""

_ERASE_LINE = "\r\x1b[2K"

_this_process = Process()
_kv_client: Any = None
"""Where processes tell each other something: JAX's, kept by process 0. None before they have met, and after they parted."""
_kv_lock = threading.Lock()
_disconnected = threading.Event()
_FAILED, _EXITED = "failed", "gone"


def this_process() -> Process:
    """This process, as `start` was told; alone before that."""
    return _this_process


def initialize(process: Process, *, timeout_s: float = JOIN_TIMEOUT_S) -> None:
    """Joins the job; nothing, for a process alone. Call after mesh.choose_platform and before JAX counts devices.

    Where the others do not come in time, the process ends with exit code 1 and says who waited for whom.
    """
    global _this_process, _kv_client
    _this_process = process
    if process.num_processes == 1:
        return
    import jax  # here: the launcher, which starts no job of its own, forks, and importing jax begins a thread

    # JAX would take SIGTERM as a notice for those who ask for it, and `kill` would do nothing
    jax.config.update("jax_enable_preemption_service", False)
    joined = threading.Event()
    # in a thread: jax ends the process when its own time is up, and nothing can catch that
    threading.Thread(
        target=_limit_join_time, args=(process, joined, timeout_s), daemon=True
    ).start()
    host = process.coordinator.rpartition(":")[0]
    num_gpus = hardware.count_gpus(os.environ)
    gpus = cluster.choose_local_gpus(process, num_gpus)
    if not num_gpus:
        _discard_gloo_output()
    try:
        jax.distributed.initialize(
            process.coordinator,
            process.num_processes,
            process.index,
            local_device_ids=gpus,
            cluster_detection_method="deactivate",
            # a job of one node listens to nobody else; jax would listen on every network
            coordinator_bind_address=process.coordinator
            if host in ("127.0.0.1", "localhost")
            else None,
            initialization_timeout=int(timeout_s) + 60,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S,
        )
    except (
        jax.errors.JaxRuntimeError
    ) as error:  # the others wait until their time is up, and say so
        raise UserError(
            f"{process.coordinator}: the processes cannot meet there: {str(error).splitlines()[0]}. Name a host of process 0 "
            "and a port that is free."
        ) from None
    finally:
        joined.set()
    _kv_client = _get_kv_client()
    _disconnected.clear()
    threading.Thread(target=_watch_peers, name="hears of processes that fail", daemon=True).start()


def _discard_gloo_output() -> None:
    """Discards what is not printed through sys.stdout.

    Gloo, which connects CPU devices, prints a line for each group of processes to file descriptor 1,
    in the middle of other lines, and has no option for that.
    """
    global _stdout_fd
    sys.stdout.flush()
    _stdout_fd = os.dup(1)
    sys.stdout = open(  # noqa: SIM115 - open until the process ends
        _stdout_fd,
        "w",
        encoding=sys.stdout.encoding,
        errors=sys.stdout.errors,
        buffering=1 if os.isatty(_stdout_fd) else -1,
    )
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def publish(name: str, value: str) -> None:
    """Tells the other processes something; nobody, where there are none, or not yet, or no more. Once for each name."""
    with _kv_lock:
        if _kv_client is not None:
            _kv_client.key_value_set(f"jaxsp/{name}/{_this_process.index}", value)


def published(name: str) -> dict[int, str]:
    """What processes have told under a name, by their number; they need not be alive any more."""
    with _kv_lock:
        found = [] if _kv_client is None else _kv_client.key_value_dir_get(f"jaxsp/{name}/")
    return {int(key.rpartition("/")[2]): value for key, value in found}


def is_connected() -> bool:
    """Whether there are other processes to talk to."""
    return _kv_client is not None


def line_prefix(index: int) -> str:
    """Stands before what a process other than 0 says."""
    return f"process {index}: "


@contextlib.contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """Goes on where nobody can hear what is said: a log on a full disk, or a terminal that is gone, is not worth a run."""
    with contextlib.suppress(OSError):
        yield


def log(text: str) -> None:
    """Says something on stderr, each line under this process's number; of process 0, as it is."""
    text = textwrap.indent(
        text.rstrip(), line_prefix(_this_process.index), lambda _: _this_process.index > 0
    )
    with ignore_broken_pipe():
        # on a terminal, in place of the progress bar and ^C, which are drawn without a line break
        begin = _ERASE_LINE if os.isatty(2) else ""
        os.write(
            2, f"{begin}{text}\n".encode()
        )  # at once, whatever the main thread is in the middle of


def log_stacks() -> None:
    """Says where every thread of this process is."""
    file = os.memfd_create("stacks")
    faulthandler.dump_traceback(file, all_threads=True)
    log(os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace"))
    os.close(file)


def shutdown() -> None:
    """Leaves the job when all is done; waits for the others, SHUTDOWN_S at most. Nothing, where it has left already."""
    if not _disconnect():
        return
    import jax

    jax.distributed.shutdown()


def abort_job(code: int) -> NoReturn:
    """Ends this process at once, after its last words, and all others of the job with the same exit code.

    A usual exit would wait for the others, who wait for it.
    """
    exit_now(code, exit_key=_FAILED)


def exit_now(code: int, *, exit_key: str = _EXITED) -> NoReturn:
    """Ends this process at once, from any thread; process 0 after the others, LAST_WORDS_S later at most."""
    goodbye = threading.Thread(target=_announce_exit, args=(code, exit_key), daemon=True)
    goodbye.start()
    goodbye.join(EXIT_GRACE_S)  # a process 0 that is stopped does not answer
    if os.isatty(_stdout_fd):
        os.write(_stdout_fd, b"\x1b[?25h")  # the cursor, which a progress bar hides
    os._exit(code)


def _announce_exit(code: int, farewell: str) -> None:
    if not is_connected():
        return
    import jax

    try:
        publish(farewell, str(code))
        while (
            _this_process.index == 0
            and len(published(_FAILED) | published(_EXITED)) < _this_process.num_processes
        ):
            time.sleep(POLL_INTERVAL_S / 5)
    except jax.errors.JaxRuntimeError:
        pass  # process 0 is gone already, and JAX ends whom it has left


def find_failed_peer() -> tuple[int, int] | None:
    """Which of the other processes has failed already and said why, and its exit code."""
    if not is_connected():
        return None
    import jax

    try:
        return min(
            (
                (index, int(code))
                for index, code in published(_FAILED).items()
                if index != _this_process.index
            ),
            default=None,
        )
    except jax.errors.JaxRuntimeError:
        return None  # process 0 is gone, without a word


def _watch_peers() -> None:
    """Ends this process when another has failed."""
    import jax

    while not _disconnected.wait(POLL_INTERVAL_S):
        try:
            failed = published(_FAILED)
        except jax.errors.JaxRuntimeError:
            return  # process 0 is gone, and JAX ends this one
        for index, code in failed.items():
            if index != _this_process.index:
                time.sleep(OWN_ERROR_GRACE_S)
                log(f"ends because process {index} has failed, with exit code {code}")
                if int(code) == EXIT_HUNG:  # which of them is stuck?
                    log_stacks()
                exit_now(int(code))


def _disconnect() -> bool:
    """Ends the talk, if there was any."""
    global _kv_client
    with _kv_lock:
        talked, _kv_client = _kv_client is not None, None
    _disconnected.set()
    return talked


def _get_kv_client() -> Any:
    """JAX's own store. Raises: UserError where this JAX has none that we know."""
    import jax
    from jax._src import distributed

    client = getattr(getattr(distributed, "global_state", None), "client", None)
    if not all(hasattr(client, name) for name in ("key_value_set", "key_value_dir_get")):
        raise UserError(
            f"jax = {jax.__version__}: keeps what processes tell each other where we do not know it; {TESTED_JAX_VERSIONS} are known. "
            "Install one of these, or use one process."
        )
    return client


def _limit_join_time(process: Process, joined: threading.Event, seconds: float) -> None:
    """Says what is waited for, and ends the process when the time is up."""
    others = (
        f"the other {process.num_processes - 1}"
        if process.num_processes > 2
        else "the other process"
    )
    whom = (
        f"{others} to come to {process.coordinator}"
        if process.index == 0
        else f"process 0 at {process.coordinator}"
    )
    name = f"process {process.index} of {process.num_processes}"
    if joined.wait(seconds / 8):
        return
    print(f"{name}: waits for {whom}, {seconds:g} s at most", file=sys.stderr, flush=True)
    if joined.wait(seconds * 7 / 8):
        return
    print(
        f"{name}: waited {seconds:g} s for {whom}{_describe_coordinator(process)}. All {process.num_processes} have to be started within "
        "that time, with the same coordinator, and every node has to reach its port.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def _describe_coordinator(process: Process) -> str:
    """Whether process 0 can be reached."""
    if process.index == 0:
        return ""
    host, _, port = process.coordinator.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
    except OSError as error:
        return f" (it does not answer: {error.strerror or error})"
    return " (it answers, so another process is missing)"
