"""Work of the command `jaxsp score`."""

import dataclasses
import functools
import hashlib
import io
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import rich.console
from jax.experimental import multihost_utils

from jaxsp.core import files
from jaxsp.core.batch import PREDICTIONS
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.core.units import format_bytes, format_count
from jaxsp.data import dataset, store
from jaxsp.data.dataset import PackedDataset
from jaxsp.evaluation import token_losses
from jaxsp.hf import folder
from jaxsp.objectives.distill import Distill
from jaxsp.run import build, model_files, preflight, references
from jaxsp.run import console as output
from jaxsp.run.config_file import Config
from jaxsp.run.references import ARRAY, CHECKSUMS, META
from jaxsp.system import distributed
from jaxsp.system.cluster import Process
from jaxsp.training import step_gradients, train_step
from jaxsp.training.specs import StepSpec


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
    preflight.start(config, process)
    live = objective.model_copy(update={"predictions": None, "top_k": 64})
    prepared = build.prepare_model(
        config.model_copy(update={"objective": live}),
        devices=jax.devices(),
        problems=ProblemCollector(),
    )
    spec = prepared.spec
    assert spec.teacher is not None, "the objective has one"
    vocab_size = spec.common_vocab_size
    assert vocab_size is not None, "known with the teacher"
    if objective.top_k >= vocab_size:
        raise UserError(
            f"objective.top_k = {objective.top_k}: must be less than the {vocab_size:,} tokens of "
            "the vocabulary. Use a smaller one."
        )
    print_line = functools.partial(output.print_line, console)
    data_sets = [*filter(None, [prepared.train_set]), *prepared.eval_sets]
    num_tokens = sum(int(data.documents.lengths.sum()) for data in data_sets)
    size = format_bytes(num_tokens * 4 * objective.predictions_width)
    print_line(
        f"{format_count(num_tokens, 'token')}, the {objective.top_k} likeliest after each: {size} "
        f"in {objective.predictions}"
    )
    teacher = dataclasses.replace(
        spec.teacher.respec(rows_per_step=spec.global_microbatch_rows), common_vocab_size=vocab_size
    )
    source = folder.find(str(objective.teacher), field="objective.teacher")
    opened = model_files.open_weights(teacher, source, None)
    assert opened.reader is not None, "a teacher has files"
    identity = repr([*map(_identify, opened.reader.list_files())])
    compute = functools.partial(step_gradients.compute_numbers, teacher, objective.predict)
    compute = functools.partial(train_step.compile_forward(teacher, compute), opened.make())
    for data in data_sets:
        _write(
            references.find_folder(objective, data, model_ids=spec.model.vocab_size),
            dataset.pack_documents(
                data.name, data.documents, **teacher.config.packing, digests=data.digests
            ),
            {"teacher": identity, "vocab_size": vocab_size},
            compute=compute,
            spec=teacher,
            width=objective.predictions_width,
            print_line=print_line,
        )
    distributed.shutdown()


def _write(
    folder: pathlib.Path,
    rows: PackedDataset,
    meta: dict[str, Any],
    *,
    compute: Callable[[Any], dict[str, Any]],
    spec: StepSpec,
    width: int,
    print_line: Callable[[str], None],
) -> None:
    """Computes and writes the predictions of one data set, or those that are missing.

    All processes call it together; process 0 reads and writes the files.

    Args: meta: content of meta.json. compute: predictions of a batch.
    Raises: UserError if the files of the teacher have changed.
    """
    values = None
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if files.read_json(folder / META) not in (None, meta):
            raise UserError(
                f"objective.predictions: {folder} has those of other files of the teacher. Name "
                "another folder, or remove it."
            )
        files.write_atomic(folder / META, json.dumps(meta))
        if not (folder / ARRAY).is_file():
            (folder / CHECKSUMS).unlink(missing_ok=True)  # those of a damaged array
            (folder / ARRAY).touch()
        shape = (int(rows.documents.lengths.sum()), width)
        values = np.memmap(folder / ARRAY, np.int32, "r+", shape=shape)  # zeros if it is new
    if _is_true_in_first_process((folder / CHECKSUMS).is_file()):
        print_line(f"{rows.name}: complete")
        return
    schedule = rows.make_schedule(spec.config.rows_per_step, epochs=1)
    loader = rows.make_loader(schedule, spec.placement)
    for number, (batch, counts) in enumerate(loader.batches(), 1):
        index_T, document_T, position_T = token_losses.find_places(
            counts, spec.placement.layout, row_tokens=spec.config.row_tokens
        )
        place_T = rows.documents.first_tokens[document_T] + position_T
        # the last log-probability is that of all other tokens, which is never 0
        is_written = values is not None and bool(values[place_T, -1].all())
        if not _is_true_in_first_process(is_written):
            computed = np.asarray(compute(batch)[PREDICTIONS])
            if values is not None:
                values[place_T] = computed.reshape(-1, width)[index_T]
        if number % max(1, len(schedule) // 10) == 0:
            print_line(f"{rows.name}: batch {number:,} of {len(schedule):,}")
    if values is not None:
        values.flush()
        content = io.BytesIO()
        np.save(content, store.compute_block_checksums(values.reshape(-1)))
        files.write_atomic(folder / CHECKSUMS, content.getvalue())
    print_line(
        f"{rows.name}: {format_count(int(rows.documents.lengths.sum()), 'token')} -> {folder}"
    )


def _identify(path: pathlib.Path) -> tuple[int, str]:
    """Size of a file and digest of its last weights, which differ after any training."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(-min(2**20, size), os.SEEK_END)
        return size, hashlib.sha256(file.read()).hexdigest()


def _is_true_in_first_process(value: bool) -> bool:
    return bool(multihost_utils.broadcast_one_to_all(np.int32(value)))
