"""Work of the command `jaxsp score`."""

import dataclasses
import functools

import jax
import rich.console

from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.core.units import format_bytes, format_count
from jaxsp.data.packing import dataset
from jaxsp.hf import folder
from jaxsp.objectives.distill import Distill
from jaxsp.run import build, initial_weights, jax_limits, teacher_scores
from jaxsp.run import console as output
from jaxsp.run.config_file import Config
from jaxsp.system import distributed, jax_platform
from jaxsp.system.cluster import Process
from jaxsp.training import train_step


def score(config: Config, process: Process, console: rich.console.Console) -> None:
    """Writes the predictions of a config's teacher for its data sets: see `jaxsp score --help`.

    A second call continues where the first one ended. Raises: UserError.
    """
    objective = config.objective
    if not isinstance(objective, Distill) or objective.scores is None:
        raise UserError(
            "objective.scores: missing. Name the folder to write: objective.type=distill "
            "objective.teacher=MODEL objective.scores=FOLDER."
        )
    jax_limits.choose_platform(config, process)
    jax_platform.enable_cache(config.run.compilation_cache, num_processes=process.num_processes)
    distributed.initialize(process)
    live = objective.model_copy(update={"scores": None})
    prepared = build.prepare_model(
        config.model_copy(update={"objective": live}),
        devices=jax.devices(),
        problems=ProblemCollector(),
    )
    assert prepared.train_set is not None, "prepared for training"
    spec = prepared.spec
    assert spec.teacher is not None, "the objective has a teacher"
    teacher = dataclasses.replace(
        spec.teacher, config=spec.teacher.config.change(rows_per_step=spec.global_microbatch_rows)
    )
    vocab_size = min(spec.model.vocab_size, teacher.model.vocab_size)
    if objective.top_k >= vocab_size:
        raise UserError(
            f"objective.top_k = {objective.top_k}: must be less than the {vocab_size:,} tokens of "
            "the vocabulary. Use a smaller one."
        )
    data_sets = [prepared.train_set, *prepared.eval_sets]
    sizes = [int(data.documents.lengths.sum()) for data in data_sets]
    num_bytes = sum(sizes) * 4 * (2 * objective.top_k + 1)
    output.print_line(
        console,
        f"{format_count(sum(sizes), 'token')}, the {objective.top_k} likeliest after each: "
        f"{format_bytes(num_bytes)} in {objective.scores}",
    )
    source = folder.find(str(objective.teacher), field="objective.teacher")
    weights = initial_weights.open_sources(teacher, source, None).make()
    compute = train_step.compile_top_k(
        teacher,
        top_k=objective.top_k,
        temperature=objective.temperature,
        vocab_size=vocab_size,
    )
    for data, num_tokens in zip(data_sets, sizes, strict=True):
        target = teacher_scores.find_folder(objective, data)
        rows = dataset.pack_documents(
            data.name, data.documents, **teacher.config.packing, digests=data.digests
        )
        teacher_scores.write(
            target,
            teacher_scores.describe(objective, data),
            num_tokens=num_tokens,
            rows=rows,
            compute=functools.partial(compute, weights),
            spec=teacher,
            print_line=functools.partial(output.print_line, console),
        )
    distributed.shutdown()
