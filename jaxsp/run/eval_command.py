"""Work of the command `jaxsp eval`."""

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import rich.console

from jaxsp.blocks import rope
from jaxsp.checkpoint import run_paths
from jaxsp.core import files
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.data import dataset
from jaxsp.evaluation import retrieval
from jaxsp.evaluation.evaluator import Evaluator
from jaxsp.evaluation.retrieval import RetrievalEvaluator
from jaxsp.generation import generator
from jaxsp.hf import context_range
from jaxsp.run import comparison, config_file, given_model, model_files, preflight
from jaxsp.run import console as output
from jaxsp.run.build import PreparedModel
from jaxsp.run.config_file import Config
from jaxsp.run.given_model import GivenModel
from jaxsp.run.references import Reference
from jaxsp.system import jsonl
from jaxsp.system.distributed import Process


def evaluate(
    *,
    what: str,
    process: Process,
    config_path: str | None,
    changes: list[str],
    out: str | None,
    baseline: str | None,
    lm_eval: str | None,
    harness_options: dict[str, Any],
) -> None:
    """Evaluates a model, prints its results, and appends them to files: see `jaxsp eval --help`."""
    before = None if baseline is None else comparison.read(baseline)
    given = given_model.find(what)
    config = _load_config(given, config_path, changes, needs_data=lm_eval is None)
    run = None if given.checkpoint is None else run_paths.find_run_dir(given.checkpoint)
    target = _choose_target(out, None if files.is_url(what) else run, baseline)
    preflight.start(config, process)
    tasks = None
    if lm_eval is not None:
        from jaxsp.evaluation import harness

        tasks = harness.find_tasks(lm_eval, **harness_options)
    resolved = given.resolve(config)
    spec = resolved.spec
    if tasks is not None:
        generator.check_head(spec)
    console = rich.console.Console(quiet=jax.process_index() > 0, markup=False)
    print_line = lambda text: output.print_line(console, text)
    reference = Reference(
        spec=spec,
        source=config.model.source,
        adapter_source=config.adapter.source,
        run_dir=run,
        is_resume=True,
    )
    if given.checkpoint is None and reference.list_missing(resolved.eval_sets):
        raise UserError(
            f"objective.type = {spec.config.objective.type}: needs a reference model, which is "
            "the model before training. Evaluate the run, or data with ref_chosen_logps and "
            "ref_rejected_logps."
        )
    reference.prepare(resolved.eval_sets, print_line=print_line)
    master = given.load_weights(resolved)
    print_line(given.describe(resolved))
    for text in _describe_inputs(resolved):
        print_line(text)
    eval_sets = Evaluator(spec, resolved.eval_sets, has_long_ppl=resolved.config.eval.long_ppl)
    lines = []

    def add(line: dict[str, Any]) -> None:
        lines.append(line)
        if target is not None and jax.process_index() == 0:
            jsonl.append_record(comparison.find_file(target, line), line)

    for evaluator in (eval_sets, RetrievalEvaluator(eval_sets, resolved.task_samples)):
        for line in evaluator.run(master, num_steps=given.step):
            print_line(output.format_result(line, with_step=given.meta is not None))
            add(line)
    if tasks is not None:
        tokenizer = model_files.load_tokenizer(
            resolved.config, resolved.model_folder, resolved.model_dir
        )
        model = harness.HarnessModel(
            eval_sets,
            master,
            tokenizer,
            stop_ids=model_files.list_stop_ids(resolved.hf_config, resolved.small_files, tokenizer),
            chat=resolved.config.data if tasks.apply_chat_template else None,
        )
        task_lines, table = harness.evaluate(model, tasks, num_steps=given.step)
        print_line(table)
        for line in task_lines:
            add(line)
    if target is not None:
        written = [str(comparison.find_file(target, line)) for line in lines]
        if jax.process_index() == 0:
            written.append(retrieval.draw_if_possible(target, lines))
        print_line(f"-> {', '.join(filter(None, dict.fromkeys(written)))}")
    if before is not None:
        comparison.print_table(console, before, lines)


def _choose_target(
    out: str | None, run: pathlib.Path | None, baseline: str | None
) -> pathlib.Path | None:
    """File of --out, else a run's directory; None if a run may be writing to a store, or there is
    none."""
    target = run if out is None else pathlib.Path(out)
    if target is None:
        return None
    folder = target if target.is_dir() else target.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise UserError(
            f"--out = {target}: {folder} must be a folder that can be written. Use --out FILE "
            "with a file in such a folder."
        )
    files_of = lambda path: {file.resolve() for file in comparison.list_files(path)}
    if baseline is not None and files_of(target) & files_of(baseline):
        raise UserError(
            f"--baseline = {baseline}: the results would be added to it. Use --out FILE with "
            "another file."
        )
    return target


def _describe_inputs(resolved: PreparedModel) -> Iterator[str]:
    """Yields lines about RoPE, texts that are longer than the model's range, and eval sets."""
    spec = resolved.spec
    if text := rope.describe(spec.model, is_changed=resolved.config.model.rope is not None):
        yield f"rope: {text}"
    documents = [int(data.documents.lengths.max()) for data in resolved.eval_sets]
    samples = [sample.length for of_task in resolved.task_samples.values() for sample in of_task]
    excesses = [
        # samples are not cut into rows
        context_range.describe_excess(
            resolved.hf_config,
            row_tokens=max(spec.config.row_tokens, least),
            longest_document=max(lengths),
        )
        for lengths, least in ((documents, 0), (samples, max(samples, default=0)))
        if lengths
    ]
    yield from (f"note: {text}" for text in dict.fromkeys(excesses) if text)
    for data in resolved.eval_sets:
        yield f"{data.name}: {dataset.describe_documents(data)}"


def _load_config(
    given: GivenModel, path: str | None, changes: list[str], *, needs_data: bool
) -> Config:
    """Loads the config of a file, a run or a model, with the given model and its run's adapter."""
    fields = given.fields if path is None else config_file.read(path)
    if given.fields and path is None and any(x.startswith("data.eval=") for x in changes):
        # held-out documents are replaced too: the run's training data may be on another machine
        fields = fields | {"data": fields["data"] | {"eval_fraction": None, "train": []}}
    problems = ProblemCollector()
    has_eval_sets = any(x.startswith(("data.eval", "eval.tasks")) for x in changes)
    has_eval_sets |= bool(fields.get("data", {}).get("eval"))
    with problems.collect():
        config = config_file.parse(given.add_model(fields), changes, trains=False)
        has_eval_sets = bool(config.data.eval or config.data.eval_fraction or config.eval.tasks)
    if needs_data and not has_eval_sets:
        problems.append(
            "data.eval: missing. Name the data to evaluate on, for example "
            "data.eval='[{source: held-out/*.txt, format: text}]', or a retrieval task: "
            "eval.tasks='[{task: needle, lengths: [4096]}]'."
        )
    problems.raise_if_any()
    given.check_config(config)
    return config
