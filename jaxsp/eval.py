"""python -m jaxsp.eval WHAT [key.path=value ...]: loss, perplexity and accuracy on data sets that are not learned from."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import rich.console

from jaxsp import cli, prepare
from jaxsp.core import config, errors, processes
from jaxsp.core import mesh as meshes
from jaxsp.hf import weights
from jaxsp.training import banner, checkpoint, evaluator, metrics, sharding, step

_UNUSED: dict[str, dict[str, Any]] = {
    "run": {"directory": "unused", "steps": 1},
    "data": {"train": [{"source": "unused", "format": "tokens"}]},
    "batch": {"rows_per_step": 1},
    "optimizer": {"learning_rate": 0.0},
}
"""What a config has to have for training, and nobody asks for here."""


def main(arguments: list[str]) -> None:
    """The command. Raises: UserError with every problem that can be found before the first row."""
    parser = cli.parser("eval", "Evaluates a model on data.eval, packed into rows as in training.", fields=True, several=True)
    parser.add_argument("what", metavar="WHAT", help="a run's directory, a checkpoint, a Hugging Face folder or a hub name")
    parser.add_argument("changes", metavar="key.path=value", nargs="*", default=[], help="changes a field of the config")
    parser.add_argument("--config", metavar="CONFIG.yaml", help="the fields to start from; default: those of the run")
    parser.add_argument("--out", metavar="FILE", help="appends the results to this file; default: eval.jsonl of the run")
    given = parser.parse_intermixed_args(arguments)
    found = checkpoint.newest(given.what)
    meta = None if found is None else checkpoint.read_meta(found)
    settings = _settings(given.what, given.config, given.changes, meta)
    process = cli.process(given)
    meshes.choose_platform(virtual_cpu_devices=settings.mesh.virtual_cpu_devices, num_processes=process.num_processes)
    processes.start(process)
    run = None if found is None else found.parent.parent
    asked = prepare.read(
        settings,
        devices=jax.devices(),
        problems=cli.Problems(),
        with_training=False,
        fields=None if meta is None else meta.model,
        kept=None if run is None else run / "model",
    )
    program = asked.program
    if found is not None:
        master = checkpoint.restore_weights(found, step.shapes(program)[0].master)
    else:
        assert asked.folder is not None, "what is no checkpoint is a source"
        master = sharding.load(program.table, program.mesh, weights.open_folder(asked.folder, program.table).read)
    out = pathlib.Path(given.out) if given.out else None if run is None else run / metrics.EVAL
    console = rich.console.Console(quiet=jax.process_index() > 0)
    console.print(f"{given.what}{f', step {meta.step}' if meta else ''}", highlight=False, soft_wrap=True)
    for result in evaluator.Evaluator(program, asked.evals).run(master, num_steps=meta.step if meta else 0):
        console.print(banner.result(result), highlight=False, soft_wrap=True)
        if out is not None and jax.process_index() == 0:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(result), allow_nan=False) + "\n")
    if out is not None:
        console.print(f"-> {out}", highlight=False, soft_wrap=True)


def _settings(what: str, file: str | None, changes: list[str], meta: checkpoint.Meta | None) -> config.Config:
    """The fields of a run, or of a file, or those that a Hugging Face folder needs, with the changes."""
    start_from = _UNUSED if meta is None else meta.config
    fields = start_from if file is None else config.read(file)
    if meta is None:
        # what is evaluated is what was named, whatever the file trains
        fields = fields | {"model": fields.get("model", {}) | {"source": what, "config": None}}
    settings = config.parse(fields, changes)
    if not settings.data.eval:
        raise errors.UserError(
            "data.eval: missing. Name what to evaluate on, for example data.eval='[{source: held-out/*.txt, format: text}]'."
        )
    return settings


if __name__ == "__main__":
    cli.run(main)
