"""Command `jaxsp benchmark`: times steps on this machine, on one mesh or on all."""

import argparse
import dataclasses
import pathlib

import rich.console

from jaxsp import cli
from jaxsp.config import config_file
from jaxsp.core import files
from jaxsp.core.errors import UserError
from jaxsp.hf import published
from jaxsp.hf.published import ModelSizes
from jaxsp.run import benchmark, jax_limits, mesh_benchmark
from jaxsp.runtime import compilation_cache


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError for a config that cannot run here."""
    given = _parse_arguments(arguments)
    config = config_file.load(given.config, given.changes)
    console = rich.console.Console(markup=False, highlight=False, soft_wrap=True)
    sizes = published.read_sizes(config.model, row_tokens=config.data.row_tokens)
    if sizes.note:
        console.print(f"{sizes.note}; random weights")
    changes = [*given.changes, *sizes.overrides]
    if given.all_meshes:
        _benchmark_all(given, changes, sizes, console)
    else:
        _benchmark_one(given, changes, sizes, console)


def _parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line. Raises: UserError for values that cannot work."""
    parser = cli.make_parser(
        "benchmark",
        "Times steps of a config on the devices of this machine. Keeps no results of training.",
    )
    cli.add_config_arguments(parser)
    parser.add_argument(
        "--steps",
        metavar="N",
        type=int,
        default=5,
        help="steps to time, after one that is not timed; default: 5",
    )
    parser.add_argument(
        "--all-meshes",
        action="store_true",
        help="every mesh of the devices with every strategy; also compares the losses",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=pathlib.Path, help="also writes the results to a file"
    )
    given = parser.parse_intermixed_args(arguments)
    if given.steps < 1:
        raise UserError(f"--steps = {given.steps}: must be at least 1.")
    if given.json:
        cli.check_file(given.json, flag="--json")
    return given


def _benchmark_one(
    given: argparse.Namespace, changes: list[str], sizes: ModelSizes, console: rich.console.Console
) -> None:
    """Times the config's own mesh."""
    config = config_file.load(given.config, changes)
    jax_limits.choose_platform(config)
    compilation_cache.enable(config.run.compilation_cache)
    result = benchmark.benchmark_steps(config, num_steps=given.steps)
    mesh = " x ".join(f"{axis} {size}" for axis, size in result.mesh.items())
    peak = "" if result.peak_gib is None else f", peak memory {result.peak_gib:.2f} GiB"
    console.print(
        f"{result.num_devices} x {result.device_kind}, mesh {mesh}: {result.step_s:.4g} s per "
        f"step, {result.tokens_per_s:,.0f} tokens/s{peak}, planned {result.device_gib:.2f} GiB; "
        f"losses {result.losses[0]:.4f} to {result.losses[-1]:.4f}"
    )
    if given.json:
        result = dataclasses.replace(result, published_sizes=sizes.note or None)
        files.write_output(given.json, files.to_json(dataclasses.asdict(result)))


def _benchmark_all(
    given: argparse.Namespace, changes: list[str], sizes: ModelSizes, console: rich.console.Console
) -> None:
    """Times every mesh. Raises: RuntimeError if their losses differ."""
    results = mesh_benchmark.benchmark_meshes(
        given.config,
        changes,
        num_steps=given.steps,
        model=sizes.model,
        print_line=console.print,
    )
    console.print(mesh_benchmark.format_table(results))
    if given.json:
        meshes = [dataclasses.asdict(result) for result in results]
        result = {"meshes": meshes, "published_sizes": sizes.note or None}
        files.write_output(given.json, files.to_json(result))
    console.print(mesh_benchmark.check_losses(results))


if __name__ == "__main__":
    cli.run_command(main)
