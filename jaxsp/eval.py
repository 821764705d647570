"""jaxsp eval WHAT [key.path=value ...]: loss, perplexity and accuracy on eval sets.

Results of a run's checkpoint are appended to the run's eval.jsonl. No field distinguishes them from
the lines that training wrote; use --out to keep them apart.
"""

import argparse
import functools
import os
import pathlib
from collections.abc import Callable

import jax
import rich.console

from jaxsp import cli
from jaxsp.blocks import rope
from jaxsp.config import config_file
from jaxsp.config.schema import Config
from jaxsp.core import urls
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.data.packing import summary
from jaxsp.processes import distributed
from jaxsp.reporting import console as output
from jaxsp.reporting import metrics
from jaxsp.run import jax_limits, references
from jaxsp.runtime import compilation_cache, jsonl, run_paths
from jaxsp.setup import build, given_model, initial_weights
from jaxsp.setup.given_model import GivenModel
from jaxsp.training.evaluator import Evaluator


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError with every problem found before the first row is read."""
    args = _make_parser().parse_intermixed_args(arguments)
    given = given_model.find(args.what)
    checkpoint = given.checkpoint
    config = _load_config(given, args.config, args.changes)
    # a run may be writing to the store, so results are only printed
    out = _find_output(args.out, None if urls.is_url(args.what) else checkpoint)
    process = cli.detect_process(args)
    jax_limits.choose_platform(config, process)
    compilation_cache.enable(config.run.compilation_cache, num_processes=process.num_processes)
    distributed.initialize(process)
    given.fetch()
    resolved = given.resolve(config)
    spec = resolved.run_spec.longest
    console = rich.console.Console(quiet=jax.process_index() > 0, markup=False)
    print_line = functools.partial(output.print_line, console)
    _prepare_references(resolved, checkpoint, print_line)
    master = given.load_weights(resolved)
    mesh = " x ".join(f"{axis} {size}" for axis, size in spec.mesh.shape.items())
    print_line(f"{given.description}; {config.model.compute_dtype} compute on {mesh}")
    if text := rope.describe(spec.model, is_changed=config.model.rope is not None):
        print_line(f"rope: {text}")
    for data in resolved.evals:
        print_line(f"{data.name}: {summary.describe_documents(data)}")
    for line in Evaluator(spec, resolved.evals).run(master, num_steps=given.step):
        print_line(output.format_evaluation(line, with_step=given.meta is not None))
        if out is not None and jax.process_index() == 0:
            jsonl.append_record(out, line)
    if out is not None:
        print_line(f"-> {out}")


def _make_parser() -> argparse.ArgumentParser:
    parser = cli.make_parser(
        "eval",
        "Evaluates a model on data.eval, packed into rows as in training.",
        documents_fields=True,
        is_multi_process=True,
    )
    cli.add_config_arguments(
        parser,
        "what",
        metavar="WHAT",
        help_text="a run's directory, a checkpoint, a Hugging Face folder or a hub name",
    )
    parser.add_argument(
        "--config",
        metavar="CONFIG.yaml",
        help="config to use; default: that of the run",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="file that the results are appended to; default: eval.jsonl of a local run",
    )
    return parser


def _find_output(path: str | None, checkpoint: pathlib.Path | None) -> pathlib.Path | None:
    """Returns the file for the results; None to only print them. Raises: UserError."""
    run = None if checkpoint is None else run_paths.find_run_dir(checkpoint)
    if path:
        out = pathlib.Path(path)
    elif run is not None:
        out = run / metrics.EVAL_FILE
    else:
        return None
    if not (out.parent.is_dir() and os.access(out.parent, os.W_OK)):
        raise UserError(
            f"--out = {out}: {out.parent} must be a folder that can be written. Use --out FILE "
            "with a file in such a folder."
        )
    return out


def _prepare_references(
    resolved: build.ResolvedConfig,
    checkpoint: pathlib.Path | None,
    print_line: Callable[[str], None],
) -> None:
    """Computes or reads log-probabilities of the reference model, if the objective needs them.

    Raises: UserError if there is no reference model.
    """
    spec = resolved.run_spec.longest
    missing = references.list_missing(spec, resolved.evals)
    if not missing:
        return
    run = None if checkpoint is None else run_paths.find_run_dir(checkpoint)
    if checkpoint is None:
        raise UserError(
            f"objective.type = {spec.config.objective.type}: needs a reference model, which is the "
            "model before training. Evaluate the run, or data with ref_chosen_logps and "
            "ref_rejected_logps."
        )
    reference = initial_weights.Reference(spec)
    folders = [] if run is None else [run / references.FOLDER]
    known = references.read_identity(folders[0]) if folders else None
    references.prepare(
        spec,
        missing,
        folders=folders,
        weights_identity=known or reference.identify(),
        make_weights=reference.make,
        print_line=print_line,
    )


def _load_config(given: GivenModel, file: str | None, changes: list[str]) -> Config:
    """Loads the config of a file, of the run, or with placeholders for a model, and changes it.

    The model, and the adapter of a run, are always those that are given.
    """
    fields = given.fields if file is None else config_file.read(file)
    replaces_eval_sets = any(change.startswith("data.eval=") for change in changes)
    if given.meta is not None and file is None and replaces_eval_sets:
        # held-out documents are replaced too: the run's training data may be on another machine
        unused = {"eval_fraction": None, "train": given_model.UNUSED_TRAINING_DATA}
        fields = fields | {
            "data": fields["data"] | unused,
            "checkpoint": fields["checkpoint"] | {"best_eval": None},
            "run": fields["run"] | given_model.NO_EARLY_STOPPING,
        }
    problems = ProblemCollector()
    config = None
    with problems.collect():
        config = config_file.parse(given.add_model(fields), changes)
    if config is not None:
        has_eval_sets = bool(config.data.eval or config.data.eval_fraction)
    else:
        is_changed = any(change.startswith("data.eval") for change in changes)
        has_eval_sets = is_changed or bool(fields.get("data", {}).get("eval"))
    if not has_eval_sets:
        problems.append(
            "data.eval: missing. Name the data to evaluate on, for example "
            "data.eval='[{source: held-out/*.txt, format: text}]'."
        )
    problems.raise_if_any()
    assert config is not None
    given.check_config(config)
    return config


if __name__ == "__main__":
    cli.run_command(main)
