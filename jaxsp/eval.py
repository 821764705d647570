"""jaxsp eval WHAT [key.path=value ...]: loss and accuracy on eval sets, and retrieval tasks.

Results of a run's checkpoint are appended to the run's eval.jsonl and tasks.jsonl. No field
distinguishes them from the lines that training wrote; use --out to keep them apart.
"""

import argparse
import functools
import importlib.util
import itertools
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import rich.console

from jaxsp import cli
from jaxsp.blocks import rope
from jaxsp.blocks.layers import Weights
from jaxsp.checkpoint import base, reader
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.config import config_file
from jaxsp.config.data_schema import PLACEHOLDER_SOURCE
from jaxsp.config.schema import Config
from jaxsp.core import urls
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.data.packing import summary
from jaxsp.evaluation.evaluator import Evaluator
from jaxsp.evaluation.retrieval import RetrievalEvaluator
from jaxsp.hf import folder
from jaxsp.hf.folder import HubError
from jaxsp.processes import distributed
from jaxsp.reporting import comparison, metrics, task_plots
from jaxsp.reporting import console as output
from jaxsp.run import jax_limits, references
from jaxsp.runtime import compilation_cache, jsonl, run_paths
from jaxsp.setup import build, initial_weights, model_files, resume
from jaxsp.storage import copies
from jaxsp.training import train_state
from jaxsp.training.metric_table import Line
from jaxsp.training.specs import StepSpec

_UNUSED_TRAINING_DATA = [{"source": PLACEHOLDER_SOURCE, "format": "tokens"}]

_PLACEHOLDER_FIELDS: dict[str, dict[str, Any]] = {
    "run": {"directory": "unused", "steps": 1},
    "data": {"train": _UNUSED_TRAINING_DATA},
    "batch": {"rows_per_step": 1},
    "optimizer": {"learning_rate": 0.0},
}
"""Fields that a config requires for training; an evaluation does not use them."""


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError with every problem found before the first row is read."""
    args = _make_parser().parse_intermixed_args(arguments)
    what = copies.make_local(args.what, field="WHAT")
    checkpoint = run_paths.find_latest(what)
    if checkpoint is None and (pathlib.Path(what) / run_paths.CONFIG_FILE).is_file():
        raise UserError(
            f"{args.what}: holds no checkpoint yet. A run writes one when it ends and when "
            "run.save_every requests it."
        )
    meta = None if checkpoint is None else reader.read_meta(checkpoint)
    if meta is None:
        _check_model(args.what)  # before missing fields are reported
    _check_harness(args)
    config = _load_config(
        args.what, args.config, args.changes, meta, needs_data=args.lm_eval is None
    )
    # a run may be writing to the store, so results are only printed
    baseline = None if args.baseline is None else comparison.read(args.baseline)
    out = _find_outputs(args.out, None if urls.is_url(args.what) else checkpoint)
    process = cli.detect_process(args)
    jax_limits.choose_platform(config, process)
    compilation_cache.enable(config.run.compilation_cache, num_processes=process.num_processes)
    distributed.initialize(process)
    if checkpoint is not None:
        copies.fetch(checkpoint)
    resolved = _resolve_config(config, checkpoint, meta)
    spec = resolved.run_spec.longest
    console = rich.console.Console(quiet=jax.process_index() > 0, markup=False)
    print_line = functools.partial(output.print_line, console)
    _prepare_references(resolved, checkpoint, print_line)
    if checkpoint is not None:
        like = train_state.abstract_weights(spec)
        frozen = initial_weights.open_sources(spec, resolved.model_folder, None).make_frozen()
        master = reader.restore_weights(checkpoint, like, table=spec.table, frozen=frozen)
        base.check(checkpoint, base.compute_checksums(spec.table, master))
    else:
        assert resolved.model_folder is not None, "WHAT is a model's source"
        master = initial_weights.open_sources(
            spec, resolved.model_folder, resolved.adapter_folder
        ).make()
    step = 0 if meta is None else meta.step
    name = args.what if meta is None else f"{args.what}, step {step}"
    mesh = " x ".join(f"{axis} {size}" for axis, size in spec.mesh.shape.items())
    print_line(f"{name}; {config.model.compute_dtype} compute on {mesh}")
    if text := rope.describe(spec.model, is_changed=config.model.rope is not None):
        print_line(f"rope: {text}")
    for data in resolved.evals:
        print_line(f"{data.name}: {summary.describe_documents(data)}")
    lines = []
    evaluators = (Evaluator(spec, resolved.evals), RetrievalEvaluator(spec, resolved.task_samples))
    for line in itertools.chain.from_iterable(
        each.run(master, num_steps=step) for each in evaluators
    ):
        lines.append(line)
        print_line(output.format_result(line, with_step=meta is not None))
        _append(out, line)
    if args.lm_eval:
        tokenizer = model_files.load_tokenizer(
            spec.config, resolved.model_folder, _find_model_dir(config, checkpoint, meta)
        )
        found, table = _run_harness(args, spec, master, tokenizer, num_steps=step)
        print_line(table)
        for line in found:
            _append(out, line)
        lines += found
    if out is not None:
        paths = list(dict.fromkeys(out.find(line) for line in lines))
        if jax.process_index() == 0:
            paths += task_plots.draw_if_possible(out.plot, lines)
        print_line(f"-> {', '.join(map(str, paths))}")
    if baseline is not None:
        comparison.print_table(console, baseline, lines)


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
        "--baseline",
        metavar="FILE",
        help="file of --out of another model: also print a table of differences",
    )
    parser.add_argument(
        "--config",
        metavar="CONFIG.yaml",
        help="config to use; default: that of the run",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="file that the results are appended to, with a plot of needles beside it; default: "
        "eval.jsonl, tasks.jsonl and needle.png of a local run",
    )
    group = parser.add_argument_group("lm-evaluation-harness (pip install 'jaxsp[lm-eval]')")
    group.add_argument(
        "--lm-eval", metavar="TASKS", help="its tasks to evaluate too, with commas between them"
    )
    group.add_argument("--lm-eval-tasks", metavar="FOLDER", help="folder of more tasks")
    group.add_argument(
        "--limit", type=int, metavar="N", help="records of each of its tasks; default: all"
    )
    group.add_argument(
        "--num-fewshot", type=int, metavar="N", help="examples in prompts; default: the task's"
    )
    return parser


class _Outputs(NamedTuple):
    """Files for the results."""

    evals: pathlib.Path
    tasks: pathlib.Path
    harness: pathlib.Path
    plot: pathlib.Path

    def find(self, line: Line) -> pathlib.Path:
        """File for a line."""
        if "lm_eval" in line:
            return self.harness
        return self.tasks if "task" in line else self.evals


def _append(outputs: _Outputs | None, line: Line) -> None:
    """Appends a line to its file."""
    if outputs is not None and jax.process_index() == 0:
        jsonl.append_record(outputs.find(line), line)


def _find_outputs(path: str | None, checkpoint: pathlib.Path | None) -> _Outputs | None:
    """Returns the files for the results; None to only print them. Raises: UserError."""
    run = None if checkpoint is None else run_paths.find_run_dir(checkpoint)
    if path:
        out = pathlib.Path(path)
        outputs = _Outputs(out, out, out, out.with_suffix(".png"))
    elif run is not None:
        out = run / metrics.EVAL_FILE
        outputs = _Outputs(
            out,
            run / metrics.TASKS_FILE,
            run / metrics.HARNESS_FILE,
            run / metrics.NEEDLE_PLOT,
        )
    else:
        return None
    if not (out.parent.is_dir() and os.access(out.parent, os.W_OK)):
        raise UserError(
            f"--out = {out}: {out.parent} must be a folder that can be written. Use --out FILE "
            "with a file in such a folder."
        )
    return outputs


def _resolve_config(
    config: Config, checkpoint: pathlib.Path | None, meta: CheckpointMeta | None
) -> build.ResolvedConfig:
    """Resolves the config for evaluation: without an optimizer or offloaded activations."""
    on_device: dict[str, Any] = {"offload_activations": "none", "offload_optimizer": "none"}
    on_device |= {"offload_every": 1, "offload_during_attention": "auto"}
    memory = config.memory.model_copy(update=on_device)
    adapter = config.adapter
    if checkpoint is not None:  # it contains the adapters, whose source may be gone
        adapter = adapter.model_copy(update={"source": None})
    return build.resolve_config(
        config.model_copy(update={"memory": memory, "adapter": adapter}),
        devices=jax.devices(),
        problems=ProblemCollector(),
        for_training=False,
        hf_config=None if meta is None else meta.model,
        run_model_dir=_find_model_dir(config, checkpoint, meta),
    )


def _find_model_dir(
    config: Config, checkpoint: pathlib.Path | None, meta: CheckpointMeta | None
) -> pathlib.Path | None:
    """Folder of a run's own copy of the tokenizer; None without one, or with another tokenizer."""
    if checkpoint is None or meta is None:
        return None
    has_own = config.model.tokenizer == meta.config["model"]["tokenizer"]
    return resume.find_model_dir(checkpoint) if has_own else None


def _run_harness(
    args: argparse.Namespace, spec: StepSpec, master: Weights, tokenizer: Any, *, num_steps: int
) -> tuple[list[Line], str]:
    """Runs tasks of lm-evaluation-harness; returns its lines, and its table."""
    from jaxsp.evaluation import harness

    return harness.evaluate(
        harness.HarnessModel(spec, master, tokenizer),
        args.lm_eval.split(","),
        num_steps=num_steps,
        limit=args.limit,
        num_fewshot=args.num_fewshot,
        include_path=args.lm_eval_tasks,
    )


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


def _check_model(what: str) -> None:
    """Checks that WHAT, which is not a run, is a model. Raises: UserError."""
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


_NO_EARLY_STOPPING = {
    "early_stopping_patience": None,
    "early_stopping_metric": "loss",
    "early_stopping_min_delta": 0,
}


def _check_harness(args: argparse.Namespace) -> None:
    """Checks the options of the harness before the model is read. Raises: UserError."""
    if args.lm_eval is None:
        for name in ("lm_eval_tasks", "limit", "num_fewshot"):
            if getattr(args, name) is not None:
                raise UserError(
                    f"--{name.replace('_', '-')}: is for lm-evaluation-harness. Use it with "
                    "--lm-eval TASK."
                )
    elif importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f"--lm-eval = {args.lm_eval}: needs lm-evaluation-harness, which is not installed. "
            "Use pip install 'jaxsp[lm-eval]'."
        )


def _load_config(
    what: str,
    file: str | None,
    changes: list[str],
    meta: CheckpointMeta | None,
    *,
    needs_data: bool,
) -> Config:
    """Loads the config of a file, of the run, or with placeholders for a model, and changes it.

    The model, and the adapter of a run, are always those of WHAT.
    """
    if file is not None:
        fields = config_file.read(file)
    elif meta is not None:
        fields = meta.config
    else:
        fields = _PLACEHOLDER_FIELDS
    model = {"source": what, "config": None}
    if meta is not None:
        model = {name: meta.config["model"][name] for name in model}
        fields = fields | {"adapter": meta.config["adapter"]}
    replaces_eval_sets = any(change.startswith("data.eval=") for change in changes)
    if meta is not None and file is None and replaces_eval_sets:
        # held-out documents are replaced too: the run's training data may be on another machine
        fields = fields | {
            "data": fields["data"] | {"eval_fraction": None, "train": _UNUSED_TRAINING_DATA},
            "checkpoint": fields["checkpoint"] | {"best_eval": None},
            "run": fields["run"] | _NO_EARLY_STOPPING,
        }
    problems = ProblemCollector()
    config = None
    with problems.collect():
        config = config_file.parse(fields | {"model": fields.get("model", {}) | model}, changes)
    if config is not None:
        has_eval_sets = bool(config.data.eval or config.data.eval_fraction or config.eval.tasks)
    else:
        is_changed = any(change.startswith(("data.eval", "eval.tasks")) for change in changes)
        has_eval_sets = is_changed or bool(fields.get("data", {}).get("eval"))
    if needs_data and not has_eval_sets:
        problems.append(
            "data.eval: missing. Name the data to evaluate on, for example "
            "data.eval='[{source: held-out/*.txt, format: text}]', or a retrieval task: "
            "eval.tasks='[{task: needle, lengths: [4096]}]'."
        )
    problems.raise_if_any()
    assert config is not None
    for name, value in model.items():
        if getattr(config.model, name) != value:
            raise UserError(
                f"model.{name}: must be the model of {what}. To evaluate another model, use its "
                f"name instead of {what}."
            )
    if meta is not None:
        trained = config_file.parse(meta.config).objective.type
        if "reward" in (trained, config.objective.type) and trained != config.objective.type:
            raise UserError(
                f"objective.type = {config.objective.type}: {what} was trained with {trained}, and "
                f"a reward model has another head. Use objective.type={trained}."
            )
    if meta is not None and config.adapter != config_file.parse(meta.config).adapter:
        raise UserError(
            f"adapter: must be that of {what}. To evaluate another one, export it, and use the "
            "name of its base with adapter.type=lora adapter.source=FOLDER."
        )
    return config


if __name__ == "__main__":
    cli.run_command(main)
