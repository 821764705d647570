"""Other processes of a job on this node: detects at once that one has ended.

JAX detects it only after 100 s without a heartbeat (`distributed.HEARTBEAT_TIMEOUT_S`).
"""

import os
import pathlib
import select
from collections.abc import Mapping


def describe_process() -> tuple[str, int]:
    """Name of the set of processes in which this one's id is valid, and its id.

    Processes share a name if they share a PID namespace: a node's, or a container's.
    """
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    namespace = os.readlink("/proc/self/ns/pid")
    return f"{boot}-{namespace}", os.getpid()


class LocalPeers:
    """Processes of this node that have not ended, by their index in the job."""

    def __init__(self) -> None:
        self._indices: dict[int, int] = {}
        """Index of each process, by a descriptor that is readable once the process has ended."""
        self._ended: set[int] = set()
        self._poller = select.poll()

    def add(self, pids: Mapping[int, int]) -> None:
        """Adds processes by their index, except those that were added before."""
        known = {*self._indices.values(), *self._ended}
        for index in pids.keys() - known:
            try:
                descriptor = os.pidfd_open(pids[index])
            except ProcessLookupError:
                self._ended.add(index)
            # Not permitted here, or a build of Python without the function (uv's, conda's):
            # heartbeats will detect it
            except (OSError, AttributeError):
                continue
            else:
                self._indices[descriptor] = index
                self._poller.register(descriptor, select.POLLIN)

    def wait(self, timeout_s: float) -> set[int]:
        """Waits until one of them ends. Returns: indices of all that have ended."""
        for descriptor, _ in self._poller.poll(1000 * timeout_s):
            self._poller.unregister(descriptor)
            os.close(descriptor)
            self._ended.add(self._indices.pop(descriptor))
        return self._ended
