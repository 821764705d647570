"""Times how the processes of a large job join process 0, and what their reads cost it.

    python -m scripts.bench.polling --out scripts/bench/results/today-polling.json

This process has the service of process 0, and 8 others have the clients of all processes of the
job, without devices. First all of them join. Then they read what others have published, as often as
processes of a job do (`distributed.poll_interval_s`), and as often as they can.
"""

import contextlib
import dataclasses
import itertools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from jax._src.lib import _jax

from jaxsp.processes import distributed
from scripts.bench import machine, results

MODULE = "scripts.bench.polling"

PROCESSES = 8
"""Processes that the clients are divided among."""

_LINE = "{:>9} {:>8} {:<9} {:>8} {:>11} {:>12} {:>11}"

HEADER = _LINE.format(
    "processes", "join s", "reads", "reads/s", "CPU of 0", "mean ms", "longest ms"
)
"""CPU of 0: seconds of CPU of the service per second. Then the time of a read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A job, and one frequency of reads."""

    num_processes: int
    join_s: float
    reads: str
    """paced, as in a job, or unpaced."""
    reads_per_s: float
    cpu_fraction: float
    mean_ms: float
    longest_ms: float


def main(arguments: list[str]) -> int:
    """Runs the command."""
    parser = results.make_parser(MODULE, __doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[64, 1024], help="of each job")
    parser.add_argument("--seconds", type=float, default=8, help="of reads of a case")
    parser.add_argument("--clients", nargs=4, type=int, help="first, end, number, port: internal")
    args = parser.parse_args(arguments)
    if args.clients is not None:
        run_clients(*args.clients, seconds=args.seconds)
        return 0
    contents = results.open_results(MODULE, arguments, **machine.read_cpu_versions("jax", "jaxlib"))
    print(HEADER)
    for num_processes in args.processes:
        for case in run_job(num_processes, args.seconds):
            print(format_case(case), flush=True)
            contents["cases"].append(dataclasses.asdict(case))
            results.write(args.out, contents)
    return 0


def format_case(case: Case) -> str:
    """Formats a case as a line under HEADER."""
    return _LINE.format(
        case.num_processes,
        f"{case.join_s:.1f}",
        case.reads,
        f"{case.reads_per_s:,.0f}",
        f"{case.cpu_fraction:.3f}",
        f"{case.mean_ms:.2f}",
        f"{case.longest_ms:.1f}",
    )


def run_job(num_processes: int, seconds: float) -> Iterator[Case]:
    """Starts the clients of a job; the time of starting Python is not counted."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = f"127.0.0.1:{port}"
    service = _jax.get_distributed_runtime_service(address, num_processes)
    count = min(PROCESSES, num_processes)
    ends = [number * num_processes // count for number in range(count + 1)]
    with contextlib.ExitStack() as stack:
        clients = []
        for first, end in itertools.pairwise(ends):
            words = ["-m", MODULE, "--seconds", str(seconds), "--clients"]
            words += [str(number) for number in (first, end, num_processes, port)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process = stack.enter_context(subprocess.Popen([sys.executable, *words], **pipes))
            stack.callback(process.kill)
            clients.append(process)
        _command(clients)  # when they have imported jax
        began = time.perf_counter()
        _command(clients)
        join_s = time.perf_counter() - began
        for reads in ("paced", "unpaced"):
            began = time.perf_counter()
            cpu_s = time.process_time()
            counts = [list(map(float, words)) for words in _command(clients)]
            wall_s = time.perf_counter() - began
            yield Case(
                num_processes=num_processes,
                join_s=join_s,
                reads=reads,
                reads_per_s=sum(number for number, _, _ in counts) / wall_s,
                cpu_fraction=(time.process_time() - cpu_s) / wall_s,
                mean_ms=1e3 * sum(mean for _, mean, _ in counts) / len(counts),
                longest_ms=1e3 * max(longest for _, _, longest in counts),
            )
    service.shutdown()


def _command(clients: list[subprocess.Popen]) -> list[list[str]]:
    """Starts the next phase of all clients, and waits for it. Returns: the words they print."""
    for client in clients:
        assert client.stdin is not None
        client.stdin.write("\n")
        client.stdin.flush()
    return [client.stdout.readline().split() for client in clients if client.stdout is not None]


def run_clients(first: int, end: int, num_processes: int, port: int, *, seconds: float) -> None:
    """Runs the clients of some processes of a job, one phase for each line of stdin."""
    sys.stdin.readline()
    print("imported", flush=True)
    clients = [
        _jax.get_distributed_runtime_client(
            f"127.0.0.1:{port}", index, init_timeout=300, shutdown_on_destruction=False
        )
        for index in range(first, end)
    ]
    sys.stdin.readline()
    threads = [threading.Thread(target=client.connect) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("joined", flush=True)
    job_interval_s = max(distributed.POLL_INTERVAL_S, num_processes / distributed.MAX_POLLS_PER_S)
    for interval_s in (job_interval_s / len(clients), 0.0):
        sys.stdin.readline()
        times = []
        next_read = time.perf_counter()
        stop = next_read + seconds
        while (began := time.perf_counter()) < stop:
            clients[len(times) % len(clients)].key_value_dir_get("jaxsp/event/")
            now = time.perf_counter()
            times.append(now - began)
            next_read += interval_s
            time.sleep(max(next_read - now, 0))
        print(len(times), sum(times) / len(times), max(times), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
