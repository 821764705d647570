"""python -m jaxsp.eval WHAT [key.path=value ...]: loss, perplexity and accuracy on data sets that are not learned from."""

import os
import pathlib
from typing import Any

import jax
import rich.console

from jaxsp import cli
from jaxsp.checkpoint import reader
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.config import config_file
from jaxsp.config.schema import Config
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.hf import folder
from jaxsp.hf.folder import HubError
from jaxsp.reporting import banner, metrics
from jaxsp.reporting import console as output
from jaxsp.run import build, resume
from jaxsp.runtime import cluster, distributed, jax_platform, jsonl, run_paths
from jaxsp.training import train_step
from jaxsp.training.evaluator import Evaluator

_PLACEHOLDER_FIELDS: dict[str, dict[str, Any]] = {
    "run": {"directory": "unused", "steps": 1},
    "data": {"train": [{"source": "unused", "format": "tokens"}]},
    "batch": {"rows_per_step": 1},
    "optimizer": {"learning_rate": 0.0},
}
"""What a config has to have for training, and nobody asks for here."""


def main(arguments: list[str]) -> None:
    """The command. Raises: UserError with every problem that can be found before the first row."""
    parser = cli.make_parser(
        "eval",
        "Evaluates a model on data.eval, packed into rows as in training.",
        documents_fields=True,
        is_multi_process=True,
    )
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="a run's directory, a checkpoint, a Hugging Face folder or a hub name",
    )
    parser.add_argument(
        "changes",
        metavar="key.path=value",
        nargs="*",
        default=[],
        help="changes a field of the config",
    )
    parser.add_argument(
        "--config",
        metavar="CONFIG.yaml",
        help="the fields to start from; default: those of the run",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="appends the results to this file; default: eval.jsonl of the run",
    )
    given = parser.parse_intermixed_args(arguments)
    found = run_paths.find_latest(given.what)
    if found is None and (pathlib.Path(given.what) / "config.yaml").is_file():
        raise UserError(
            f"{given.what}: holds no checkpoint yet. A run writes one at its end, and as run.save_every says."
        )
    meta = None if found is None else reader.read_meta(found)
    if meta is None:
        _check_model(given.what)  # before anything is said of the fields that are missing
    config = _load_config(given.what, given.config, given.changes, meta)
    # nothing waits for a backward pass that does not come, and there is no optimizer
    idle = config.memory.model_copy(
        update={"offload_activations": "none", "offload_optimizer": "none"}
    )
    config = config.model_copy(update={"memory": idle})
    run = None if found is None else run_paths.find_run_dir(found)
    out = pathlib.Path(given.out) if given.out else None if run is None else run / metrics.EVAL_FILE
    if out is not None and not (out.parent.is_dir() and os.access(out.parent, os.W_OK)):
        raise UserError(
            f"--out = {out}: cannot be written there. Name a file in a folder that can be."
        )
    process = cli.detect_process(given)
    jax_platform.choose_platform(
        virtual_cpu_devices=config.mesh.virtual_cpu_devices,
        num_processes=process.num_processes,
        num_local_processes=cluster.count_local_processes(process, os.environ),
    )
    distributed.initialize(process)
    own_tokenizer = meta is not None and config.model.tokenizer == meta.config["model"]["tokenizer"]
    asked = build.resolve_config(
        config,
        devices=jax.devices(),
        problems=ProblemCollector(),
        for_training=False,
        hf_config=None if meta is None else meta.model,
        run_model_dir=resume.find_model_dir(found) if found is not None and own_tokenizer else None,
    )
    program = asked.program
    if found is not None:
        master = reader.restore_weights(
            found, train_step.abstract_weights(program), table=program.table
        )
    else:
        assert asked.model_folder is not None, "what is no checkpoint is a source"
        master = build.make_weight_loader(program, asked.model_folder)()
    console = rich.console.Console(quiet=jax.process_index() > 0, markup=False)
    how = f"computed in {config.model.compute_dtype} on {' x '.join(f'{a} {n}' for a, n in program.mesh.shape.items())}"
    console.print(
        f"{given.what}{f', step {meta.step}' if meta else ''}; {how}",
        highlight=False,
        soft_wrap=True,
    )
    for one in asked.evals:
        console.print(
            f"{one.name}: {banner.describe_documents(one)}", highlight=False, soft_wrap=True
        )
    for result in Evaluator(program, asked.evals).run(master, num_steps=meta.step if meta else 0):
        console.print(output.format_result(result), highlight=False, soft_wrap=True)
        if out is not None and jax.process_index() == 0:
            jsonl.append_record(out, result)
    if out is not None:
        console.print(f"-> {out}", highlight=False, soft_wrap=True)


def _check_model(what: str) -> None:
    """Raises: UserError for what is not a run, and not a model either."""
    path = pathlib.Path(what)
    try:
        folder.find(what, field="WHAT")
    except UserError as error:
        if (path / "config.json").is_file():
            raise
        reason = str(error).removeprefix(f"WHAT = {what}: ")
        if isinstance(error, HubError) and not path.exists():
            reason = f"there is no folder {path.absolute()}, and for a model {error.reason}."
        raise UserError(
            f"{what}: must be a run's directory, a checkpoint, a folder with a model's "
            f"config.json, or the name of a model on the hub; {reason}"
        ) from None


def _load_config(
    what: str, file: str | None, changes: list[str], meta: CheckpointMeta | None
) -> Config:
    """The fields of a run, or of a file, or those that a Hugging Face folder needs, with the changes."""
    start_from = _PLACEHOLDER_FIELDS if meta is None else meta.config
    fields = start_from if file is None else config_file.read(file)
    # what is evaluated is what was named, whatever the file trains
    model = {"source": what, "config": None}
    if meta is not None:
        model = {name: meta.config["model"][name] for name in model}
    names_sets = any(word.startswith("data.eval=") for word in changes)
    if meta is not None and file is None and names_sets:
        # they replace those of the run, held-out documents included: its training data may be elsewhere
        fields = fields | {
            "data": fields["data"] | {"eval_fraction": None},
            "checkpoint": fields["checkpoint"] | {"best_eval": None},
            "run": fields["run"] | {"early_stopping_patience": None, "early_stopping_min_delta": 0},
        }
    problems, config = ProblemCollector(), None
    with problems.collect():
        config = config_file.parse(fields | {"model": fields.get("model", {}) | model}, changes)
    asked = fields.get("data", {}).get("eval") or any(
        word.startswith("data.eval") for word in changes
    )
    if not (asked if config is None else config.data.eval or config.data.eval_fraction):
        problems.append(
            "data.eval: missing. Name what to evaluate on, for example data.eval='[{source: held-out/*.txt, format: text}]'."
        )
    problems.raise_if_any()
    assert config is not None
    changed = [name for name, value in model.items() if getattr(config.model, name) != value]
    if changed:
        raise UserError(
            f"model.{changed[0]}: the model is that of {what}. Name another in its place to evaluate it."
        )
    return config


if __name__ == "__main__":
    cli.run_command(main)
