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

from jaxsp.core import errors
from jaxsp.runtime import cluster

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


_stdout = 1
"""File descriptor that Python prints to."""

_ERASE_LINE = "\r\x1b[2K"

_here = cluster.Process()
_store: Any = None
"""Where processes tell each other something: JAX's, kept by process 0. None before they have met, and after they parted."""
_talking = threading.Lock()
_parted = threading.Event()
_FAILED, _GONE = "failed", "gone"


def here() -> cluster.Process:
    """This process, as `start` was told; alone before that."""
    return _here


def start(process: cluster.Process, *, seconds: float = JOIN_S) -> None:
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
    num_gpus = cluster.num_gpus(os.environ)
    gpus = cluster.local_gpus(process, num_gpus)
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


def _discard_gloo_output() -> None:
    """Discards what is not printed through sys.stdout.

    Gloo, which connects CPU devices, prints a line for each group of processes to file descriptor 1,
    in the middle of other lines, and has no option for that.
    """
    global _stdout
    sys.stdout.flush()
    _stdout = os.dup(1)
    sys.stdout = open(  # noqa: SIM115 - open until the process ends
        _stdout,
        "w",
        encoding=sys.stdout.encoding,
        errors=sys.stdout.errors,
        buffering=1 if os.isatty(_stdout) else -1,
    )
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


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
        # on a terminal, in place of the progress bar and ^C, which are drawn without a line break
        begin = _ERASE_LINE if os.isatty(2) else ""
        os.write(2, f"{begin}{text}\n".encode())  # at once, whatever the main thread is in the middle of


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
    if os.isatty(_stdout):
        os.write(_stdout, b"\x1b[?25h")  # the cursor, which a progress bar hides
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


def _wait(process: cluster.Process, joined: threading.Event, seconds: float) -> None:
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


def _answer(process: cluster.Process) -> str:
    """Whether process 0 can be reached."""
    if process.index == 0:
        return ""
    host, _, port = process.coordinator.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
    except OSError as error:
        return f" (it does not answer: {error.strerror or error})"
    return " (it answers, so another process is missing)"
