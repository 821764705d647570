"""Work of the command `jaxsp eval`."""

import argparse
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import jax
import rich.console

from jaxsp.blocks import rope
from jaxsp.blocks.layers import Weights
from jaxsp.checkpoint import run_paths
from jaxsp.core import urls
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.data.packing import summary
from jaxsp.evaluation.evaluator import Evaluator
from jaxsp.evaluation.retrieval import RetrievalEvaluator
from jaxsp.generation import generator
from jaxsp.hf import context_range
from jaxsp.run import (
    comparison,
    config_file,
    eval_files,
    given_model,
    jax_limits,
    model_files,
    stop_tokens,
)
from jaxsp.run import console as output
from jaxsp.run.config_file import Config
from jaxsp.run.given_model import GivenModel
from jaxsp.run.references import Reference
from jaxsp.run.run import PreparedModel
from jaxsp.system import cluster, compilation_cache, distributed
from jaxsp.training.metric_table import Line

if TYPE_CHECKING:
    from jaxsp.run.harness import HarnessTasks


def run(args: argparse.Namespace) -> None:
    """Runs the command. Raises: UserError with every problem found before the first row is read."""
    baseline = None if args.baseline is None else comparison.read(args.baseline)
    given = given_model.find(args.what)
    checkpoint = given.checkpoint
    config = _load_config(given, args.config, args.changes, needs_data=args.lm_eval is None)
    # a run may be writing to the store, so results are only printed
    run = None if checkpoint is None else run_paths.find_run_dir(checkpoint)
    out = eval_files.choose(args.out, None if urls.is_url(args.what) else run)
    if args.baseline is not None and out is not None:
        written = {path.resolve() for path in (out.evals, out.tasks, out.harness)}
        if written & {path.resolve() for path in comparison.list_files(args.baseline)}:
            raise UserError(
                f"--baseline = {args.baseline}: the results would be added to it. Use --out FILE "
                "with another file."
            )
    process = cluster.read_arguments(args)
    jax_limits.choose_platform(config, process)
    compilation_cache.enable(config.run.compilation_cache, num_processes=process.num_processes)
    distributed.initialize(process)
    harness_tasks = _find_harness_tasks(args)
    resolved = given.resolve(config)
    spec = resolved.spec
    if harness_tasks is not None:
        generator.check_head(spec)
    console = rich.console.Console(quiet=jax.process_index() > 0, markup=False)
    print_line = functools.partial(output.print_line, console)
    reference = Reference(
        spec=spec,
        source=config.model.source,
        adapter_source=config.adapter.source,
        run_dir=run,
        is_resume=True,
    )
    if reference.list_missing(resolved.eval_sets):
        if checkpoint is None:
            raise UserError(
                f"objective.type = {spec.config.objective.type}: needs a reference model, which is "
                "the model before training. Evaluate the run, or data with ref_chosen_logps and "
                "ref_rejected_logps."
            )
        reference.prepare(resolved.eval_sets, print_line=print_line)
    master = given.load_weights(resolved)
    mesh = " x ".join(f"{axis} {size}" for axis, size in spec.mesh.shape.items())
    print_line(f"{given.description}; {config.model.compute_dtype} compute on {mesh}")
    if text := rope.describe(spec.model, is_changed=config.model.rope is not None):
        print_line(f"rope: {text}")
    row_tokens = spec.config.row_tokens
    documents = [int(data.documents.lengths.max()) for data in resolved.eval_sets]
    samples = [sample.length for of_task in resolved.task_samples.values() for sample in of_task]
    excesses = [
        # samples are not cut into rows
        context_range.describe_excess(
            resolved.hf_config, row_tokens=max(row_tokens, least), longest_document=max(lengths)
        )
        for lengths, least in ((documents, 0), (samples, max(samples, default=0)))
        if lengths
    ]
    for text in filter(None, dict.fromkeys(excesses)):
        print_line(f"note: {text}")
    for data in resolved.eval_sets:
        print_line(f"{data.name}: {summary.describe_documents(data)}")
    lines = []
    for line in _evaluate(given, resolved, master, harness_tasks, print_line):
        lines.append(line)
        if out is not None:
            out.append(line)
    if out is not None:
        print_line(f"-> {out.draw(lines)}")
    if baseline is not None:
        comparison.print_table(console, baseline, lines)


def _evaluate(
    given: GivenModel,
    resolved: PreparedModel,
    master: Weights,
    harness_tasks: "HarnessTasks | None",
    print_line: Callable[[str], None],
) -> Iterator[Line]:
    """Yields the lines of eval sets, retrieval tasks and the harness, and prints each."""
    spec = resolved.spec
    eval_sets = Evaluator(spec, resolved.eval_sets, has_long_ppl=resolved.config.eval.long_ppl)
    evaluate_tasks = None
    if harness_tasks is not None:
        from jaxsp.run import harness

        own_dir = given.find_model_dir(resolved.config)
        tokenizer = model_files.load_tokenizer(resolved.config, resolved.model_folder, own_dir)
        if own_dir is None and resolved.model_folder is not None:
            own_dir = resolved.model_folder.path
        stop_ids = stop_tokens.list_stop_ids(resolved.hf_config, own_dir, tokenizer)
        model = harness.HarnessModel(
            eval_sets,
            master,
            tokenizer,
            stop_ids=stop_ids,
            chat=resolved.config.data if harness_tasks.apply_chat_template else None,
        )
        evaluate_tasks = functools.partial(harness.evaluate, model, harness_tasks)
    for evaluator in (eval_sets, RetrievalEvaluator(eval_sets, resolved.task_samples)):
        for line in evaluator.run(master, num_steps=given.step):
            print_line(output.format_result(line, with_step=given.meta is not None))
            yield line
    if evaluate_tasks is not None:
        lines, table = evaluate_tasks(num_steps=given.step)
        print_line(table)
        yield from lines


def _find_harness_tasks(args: argparse.Namespace) -> "HarnessTasks | None":
    """Finds the tasks of the harness before the model is read. Raises: UserError."""
    if args.lm_eval is None:
        for name in ("lm_eval_tasks", "limit", "num_fewshot", "apply_chat_template"):
            if getattr(args, name) is not None:
                raise UserError(
                    f"--{name.replace('_', '-')}: is for lm-evaluation-harness. Use it with "
                    "--lm-eval TASK."
                )
        return None
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f"--lm-eval = {args.lm_eval}: needs lm-evaluation-harness, which is not installed. "
            "Use pip install 'jaxsp[lm-eval]'."
        )
    from jaxsp.run import harness

    return harness.find_tasks(
        args.lm_eval,
        folder=args.lm_eval_tasks,
        limit=args.limit,
        num_fewshot=args.num_fewshot,
        apply_chat_template=args.apply_chat_template is not None,
    )


def _load_config(
    given: GivenModel, file: str | None, changes: list[str], *, needs_data: bool
) -> Config:
    """Loads the config of a file, of the run, or of a model, and changes it.

    The model, and the adapter of a run, are always those that are given.
    """
    fields = given.fields if file is None else config_file.read(file)
    replaces_eval_sets = any(change.startswith("data.eval=") for change in changes)
    if given.meta is not None and file is None and replaces_eval_sets:
        # held-out documents are replaced too: the run's training data may be on another machine
        fields = fields | {"data": fields["data"] | {"eval_fraction": None, "train": []}}
    problems = ProblemCollector()
    config = None
    with problems.collect():
        config = config_file.parse(given.add_model(fields), changes, trains=False)
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
    given.check_config(config)
    return config
