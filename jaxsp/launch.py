"""Trains with one process per GPU of this node, and starts a job that hangs again.

With more than 64 GPUs, one process per node uses all its GPUs.

`jaxsp launch [--processes N] CONFIG.yaml [key.path=value ...]`. A job that fails, or that
loses a process, is not started again. The first SIGTERM, SIGINT or SIGHUP is forwarded to the
processes, which write a checkpoint if there is time; a second one kills them.
"""

import argparse
import os
import socket
import sys

from jaxsp import cli
from jaxsp.config import config_file
from jaxsp.config.run_schema import RunConfig
from jaxsp.core import exit_codes
from jaxsp.core.errors import ProblemCollector
from jaxsp.processes import child_processes, cluster, hardware
from jaxsp.processes.child_processes import SignalForwarder
from jaxsp.processes.cluster import Process
from jaxsp.runtime import run_paths


def main(arguments: list[str]) -> None:
    """Runs the command.

    Raises:
        UserError: before any process is started.
        SystemExit: with the exit code of the first process that failed.
    """
    args = _parser().parse_intermixed_args(arguments)
    config = config_file.load(args.config, args.changes)  # prints an error in it once
    with SignalForwarder() as signals:
        _run_with_restarts(args, config.run, signals)


def _parser() -> argparse.ArgumentParser:
    parser = cli.make_parser(
        "launch",
        "Trains as jaxsp train does, with one process for each GPU of this node, or one for all "
        f"of them in a job of more than {cluster.MAX_ONE_GPU_PROCESSES} GPUs.",
    )
    cli.add_config_arguments(parser)
    parser.add_argument(
        "--processes",
        metavar="N",
        type=int,
        help="number on this node; without a GPU, they share the virtual CPU devices",
    )
    parser.add_argument(
        "--restarts",
        metavar="N",
        type=int,
        default=3,
        help="restarts in a row of a job that hangs, without a new checkpoint; default: 3",
    )
    nodes = parser.add_argument_group("several nodes", "one launch on each, with the same N")
    nodes.add_argument("--nodes", metavar="NODES", type=int, default=1)
    nodes.add_argument(
        "--node", metavar="I", type=int, default=0, help="index of this node, from 0"
    )
    nodes.add_argument("--coordinator", metavar="HOST:PORT", help="node 0 and a free port there")
    return parser


def _run_with_restarts(
    args: argparse.Namespace, config: RunConfig, signals: SignalForwarder
) -> None:
    """Trains, and starts again after a hang. Raises: SystemExit after any other failure."""
    train = [sys.executable, "-m", "jaxsp.train", args.config, *args.changes]
    if args.verbose:
        train.append("--verbose")
    command = train
    restarts_left = args.restarts
    latest_step = _latest_step(config)
    # A single node gets a new port each time
    while child_processes.run_processes(command, _plan_processes(args), signals):
        step = _latest_step(config)
        if step > latest_step:
            restarts_left = args.restarts
            latest_step = step
        if restarts_left == 0:
            print(
                f"not started again: {args.restarts} restarts in a row without a new checkpoint",
                file=sys.stderr,
            )
            sys.exit(exit_codes.HUNG)
        restarts_left -= 1
        start = f"from the checkpoint of step {step}" if step else "from the beginning"
        print(f"all processes start again, {start}", file=sys.stderr, flush=True)
        if config.resume == "never":
            command = [*train, "run.resume=auto"]


def _latest_step(config: RunConfig) -> int:
    """Step of the latest checkpoint in the run's directory; 0 if there is none."""
    checkpoint = run_paths.find_latest_in_run(run_paths.local_dir(config))
    return 0 if checkpoint is None else int(checkpoint.name)


def _plan_processes(args: argparse.Namespace) -> list[Process]:
    """Processes of this node. Raises: UserError for invalid arguments."""
    problems = ProblemCollector()
    num_gpus = hardware.count_gpus(os.environ)
    num_local = args.processes
    if num_local is None:
        is_large = args.nodes * num_gpus > cluster.MAX_ONE_GPU_PROCESSES
        num_local = 1 if is_large else num_gpus
    if args.processes is None and num_gpus == 0:
        problems.append(
            "--processes: missing, and this node has no NVIDIA GPU. "
            "On virtual CPU devices: --processes 2."
        )
    elif num_local < 1 or 0 < num_gpus < num_local:
        rule = "must be at least 1"
        if num_gpus > 0:
            rule = f"must be from 1 to {num_gpus}, the GPUs of this node"
        problems.append(f"--processes = {num_local}: {rule}. Leave it out.")
    if not 0 <= args.node < args.nodes:
        problems.append(
            f"--node = {args.node}: must be from 0 to {args.nodes - 1}, with --nodes {args.nodes}."
        )
    if args.nodes > 1 and args.coordinator is None:
        problems.append(
            f"--nodes = {args.nodes}: --coordinator is missing. "
            "Use the same on all nodes: --coordinator node-0:29500."
        )
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"):
        count = os.environ.get(name, "1")
        if args.nodes == 1 and count != "1":
            problems.append(
                f"{name} = {count}: {count} launches were started, and each would be a separate "
                "job. Start jaxsp train instead, or one launch per node with --nodes, --node and "
                "--coordinator."
            )
    problems.raise_if_any()
    coordinator = f"127.0.0.1:{free_port()}"
    if args.coordinator is not None:
        coordinator = cluster.check_address("--coordinator", args.coordinator)
    return [
        Process(
            index=args.node * num_local + local_index,
            num_processes=args.nodes * num_local,
            coordinator=coordinator,
            local_index=local_index,
            num_local_processes=num_local,
        )
        for local_index in range(num_local)
    ]


def free_port() -> int:
    """Finds a free port of this node."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


if __name__ == "__main__":
    cli.run_command(main)
