"""Work of the command `jaxsp score`."""

import functools
import hashlib
import os
import pathlib

import jax
import rich.console

from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.core.units import format_bytes, format_count
from jaxsp.data.packing import dataset
from jaxsp.hf import folder
from jaxsp.objectives.distill import Distill
from jaxsp.run import build, jax_limits, model_files, predictions
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
    if not isinstance(objective, Distill) or objective.predictions is None:
        raise UserError(
            "objective.predictions: missing. Name the folder to write: objective.type=distill "
            "objective.teacher=MODEL objective.predictions=FOLDER."
        )
    jax_limits.choose_platform(config, process)
    jax_platform.enable_cache(config.run.compilation_cache, num_processes=process.num_processes)
    distributed.initialize(process)
    live = objective.model_copy(update={"predictions": None})
    prepared = build.prepare_model(
        config.model_copy(update={"objective": live}),
        devices=jax.devices(),
        problems=ProblemCollector(),
    )
    assert prepared.train_set is not None, "prepared for training"
    spec = prepared.spec
    assert spec.teacher is not None, "the objective has a teacher"
    assert spec.common_vocab_size is not None, "known with the teacher"
    if objective.top_k >= spec.common_vocab_size:
        raise UserError(
            f"objective.top_k = {objective.top_k}: must be less than the "
            f"{spec.common_vocab_size:,} tokens of the vocabulary. Use a smaller one."
        )
    print_line = functools.partial(output.print_line, console)
    data_sets = [prepared.train_set, *prepared.eval_sets]
    num_tokens = sum(int(data.documents.lengths.sum()) for data in data_sets)
    size = format_bytes(num_tokens * 4 * (2 * objective.top_k + 1))
    print_line(
        f"{format_count(num_tokens, 'token')}, the {objective.top_k} likeliest after each: {size} "
        f"in {objective.predictions}"
    )
    teacher = spec.teacher.respec(rows_per_step=spec.global_microbatch_rows)
    source = folder.find(str(objective.teacher), field="objective.teacher")
    opened = model_files.open_weights(teacher, source, None)
    assert opened.reader is not None, "a teacher has files"
    meta = {
        "teacher": objective.teacher,
        "ends_of_files": [*map(_digest_end, opened.reader.list_files())],
        "vocab_size": spec.common_vocab_size,
    }
    weights = opened.make()
    compute = train_step.compile_top_k(
        teacher,
        top_k=objective.top_k,
        temperature=objective.temperature,
        vocab_size=spec.common_vocab_size,
    )
    for data in data_sets:
        predictions.write(
            predictions.find_folder(objective, data, model_ids=spec.model.vocab_size),
            dataset.pack_documents(
                data.name, data.documents, **teacher.config.packing, digests=data.digests
            ),
            meta,
            compute=functools.partial(compute, weights),
            spec=teacher,
            top_k=objective.top_k,
            print_line=print_line,
        )
    distributed.shutdown()


def _digest_end(path: pathlib.Path) -> str:
    """Digest of the last weights of a file, which differ after any training."""
    with path.open("rb") as file:
        file.seek(-min(2**20, path.stat().st_size), os.SEEK_END)
        return hashlib.sha256(file.read()).hexdigest()
