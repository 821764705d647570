"""jaxsp benchmark CONFIG.yaml: times steps on this machine, on one mesh or on all."""

import functools
import pathlib

from jaxsp import cli
from jaxsp.core import files
from jaxsp.core.errors import UserError
from jaxsp.run import config_file


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError for a config that cannot run here."""
    text = "Times steps of a config on the devices of this machine. Keeps no results of training."
    parser = cli.make_parser("benchmark", text, takes="CONFIG.yaml")
    add = parser.add_argument
    add("--steps", metavar="N", type=int, default=5, help="timed steps; default: 5")
    text = "every mesh of the devices with every strategy; also compares the losses"
    add("--all-meshes", action="store_true", help=text)
    add("--json", metavar="FILE", type=pathlib.Path, help="also writes the results")
    args = parser.parse_intermixed_args(arguments)
    if args.steps < 1:
        raise UserError(f"--steps = {args.steps}: must be at least 1.")
    if args.json:
        cli.check_file(args.json, flag="--json")
    config = config_file.load(args.config, args.changes)
    from jaxsp.hf import published  # imports jax
    from jaxsp.run import benchmark, preflight

    show = functools.partial(print, flush=True)
    sizes = published.read_sizes(config.model, row_tokens=config.data.row_tokens)
    if sizes.note:
        show(f"{sizes.note}; random weights")
    changes = [*args.changes, *sizes.overrides]
    results: benchmark.Results
    if args.all_meshes:
        results = benchmark.benchmark_meshes(args.config, changes, args.steps, sizes.model, show)
    else:
        config = config_file.load(args.config, changes)
        preflight.start(config)
        result = benchmark.benchmark_steps(config, num_steps=args.steps)
        results = {result.mesh: result}
    show(benchmark.format_table(results))
    if args.json:
        meshes = {label: x if isinstance(x, str) else vars(x) for label, x in results.items()}
        contents = {"meshes": meshes, "published_sizes": sizes.note or None}
        cli.write_output(args.json, files.to_json(contents), flag="--json")
    if args.all_meshes:
        show(benchmark.check_losses(results, dtype=config.model.compute_dtype))


if __name__ == "__main__":
    cli.run_command(main)
