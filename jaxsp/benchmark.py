"""Command `jaxsp benchmark`: times steps on this machine, on one mesh or on all."""

import pathlib

from jaxsp import cli
from jaxsp.core import files
from jaxsp.core.errors import UserError
from jaxsp.run import config_file


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError for a config that cannot run here."""
    text = "Times steps of a config on the devices of this machine. Keeps no results of training."
    parser = cli.make_parser("benchmark", text)
    cli.add_config_arguments(parser)
    parser.add_argument("--steps", metavar="N", type=int, default=5, help="timed steps; default: 5")
    text = "every mesh of the devices with every strategy; also compares the losses"
    parser.add_argument("--all-meshes", action="store_true", help=text)
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="also writes the results")
    given = parser.parse_intermixed_args(arguments)
    if given.steps < 1:
        raise UserError(f"--steps = {given.steps}: must be at least 1.")
    if given.json:
        cli.check_file(given.json, flag="--json")
    config = config_file.load(given.config, given.changes)
    # these import jax
    import rich.console

    from jaxsp.hf import published
    from jaxsp.run import benchmark, jax_limits
    from jaxsp.system import compilation_cache

    console = rich.console.Console(markup=False, highlight=False, soft_wrap=True)
    sizes = published.read_sizes(config.model, row_tokens=config.data.row_tokens)
    if sizes.note:
        console.print(f"{sizes.note}; random weights")
    changes = [*given.changes, *sizes.overrides]
    if given.all_meshes:
        run = (given.config, changes, given.steps)
        results = benchmark.benchmark_meshes(*run, sizes.model, console.print)
    else:
        config = config_file.load(given.config, changes)
        jax_limits.choose_platform(config)
        compilation_cache.enable(config.run.compilation_cache)
        result = benchmark.benchmark_steps(config, num_steps=given.steps)
        results = {result.mesh: result}
    console.print(benchmark.format_table(results))
    if given.json:
        meshes = {label: x if isinstance(x, str) else vars(x) for label, x in results.items()}
        contents = {"meshes": meshes, "published_sizes": sizes.note or None}
        cli.write_output(given.json, files.to_json(contents))
    if given.all_meshes:
        console.print(benchmark.check_losses(results, dtype=config.model.compute_dtype))


if __name__ == "__main__":
    cli.run_command(main)
