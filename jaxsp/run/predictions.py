"""Stored predictions of a teacher: the k likeliest tokens after each token, and the rest's mass.

Example: objective.predictions = predictions/qwen3 with one data set of 10 tokens and top_k 2 has

    predictions/qwen3/3f0c.../meta.json         teacher, and the number of ids of its softmax
    predictions/qwen3/3f0c.../predictions.npy   int32[10, 5]: two ids, and the bits of three float32
                                                log-probabilities, the last of all others together
    predictions/qwen3/3f0c.../checksums.npy     once it is complete

A folder's name is a digest of everything that they depend on, except the teacher's weights.
"""

import hashlib
import io
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsp.core import files
from jaxsp.core.errors import ProblemCollector, UserError, at
from jaxsp.core.units import format_count
from jaxsp.data.ingest import cache
from jaxsp.data.ingest.cache import BLOCK_IDS, CheckedIds
from jaxsp.data.packing.dataset import PackedDataset
from jaxsp.data.packing.row_reader import StoredPredictions
from jaxsp.evaluation import evaluator, token_losses
from jaxsp.objectives.distill import Distill
from jaxsp.training.specs import StepSpec

_ARRAY = "predictions.npy"
_CHECKSUMS = "checksums.npy"
_META = "meta.json"


def attach(objective: Distill, data_sets: list[PackedDataset], *, model_ids: int) -> int:
    """Opens the stored predictions of data sets, and attaches them to their documents.

    Args: model_ids: number of token ids of the model.
    Returns: number of ids that model and teacher have.
    Raises: UserError for predictions that are missing or incomplete.
    """
    problems = ProblemCollector()
    vocab_size = model_ids
    for data in data_sets:
        folder = find_folder(objective, data, model_ids=model_ids)
        with problems.collect(), at("objective.predictions", objective.predictions):
            meta = files.read_json(folder / _META)
            if meta is None or not (folder / _ARRAY).is_file():
                raise UserError(
                    f"has none for these documents of {data.name} in rows of "
                    f"{data.stream.row_tokens:,} tokens by {objective.teacher} with temperature "
                    f"{objective.temperature:g} and top_k {objective.top_k}. Write them first: "
                    "jaxsp score CONFIG.yaml; or let the teacher run in each step: "
                    "objective.predictions=null objective.top_k=64."
                )
            if not (folder / _CHECKSUMS).is_file():
                raise UserError(
                    f"is incomplete for {data.name}. Run the same jaxsp score again: it continues."
                )
            values = np.load(folder / _ARRAY, mmap_mode="r").reshape(-1)
            lengths = data.documents.lengths
            data.documents.predictions = StoredPredictions(
                values=CheckedIds(values, np.load(folder / _CHECKSUMS), folder / _ARRAY),
                top_k=objective.top_k,
                firsts=np.cumsum(lengths) - lengths,
            )
            vocab_size = meta["vocab_size"]
    problems.raise_if_any()
    return vocab_size


def find_folder(objective: Distill, data: PackedDataset, *, model_ids: int) -> pathlib.Path:
    """Folder of a data set's predictions."""
    names = "teacher teacher_quantization teacher_linear_dtype temperature top_k".split()
    settings = [getattr(objective, name) for name in names]
    settings += [model_ids, evaluator.identify_eval_set(data)["digest"]]
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()
    return pathlib.Path(str(objective.predictions)) / digest[:32]


def write(
    folder: pathlib.Path,
    rows: PackedDataset,
    meta: dict[str, Any],
    *,
    compute: Callable[[Any], Any],
    spec: StepSpec,
    top_k: int,
    print_line: Callable[[str], None],
) -> None:
    """Computes and writes the predictions of one data set, or those that are missing.

    All processes call it together; process 0 reads and writes the files.

    Args: meta: content of meta.json. compute: `step_gradients.compute_top_k` of a batch.
    """
    is_writer = jax.process_index() == 0
    lengths = rows.documents.lengths
    firsts = np.cumsum(lengths) - lengths
    shape = (int(lengths.sum()), 2 * top_k + 1)
    values: np.memmap | None = None
    is_complete = False
    if is_writer:
        is_complete = (folder / _CHECKSUMS).is_file() and (folder / _ARRAY).is_file()
        values = _open(folder, shape, meta)
    if _is_true_in_first_process(is_complete):
        print_line(f"{rows.name}: complete")
        return
    schedule = rows.make_schedule(spec.config.rows_per_step, epochs=1)
    loader = rows.make_loader(schedule, spec.placement)
    for number, (batch, counts) in enumerate(loader.batches(), 1):
        index_T, document_T, position_T = token_losses.find_places(
            counts, spec.placement.layout, row_tokens=spec.config.row_tokens
        )
        place_T = firsts[document_T] + position_T
        # the last log-probability is that of all other tokens, which is never 0
        is_written = values is not None and bool(values[place_T, -1].all())
        if not _is_true_in_first_process(is_written):
            ids_BLK, logps_BLK = map(np.asarray, compute(batch))
            if values is not None:
                both_BLK = np.concatenate([ids_BLK, logps_BLK.view(np.int32)], axis=-1)
                values[place_T] = both_BLK.reshape(-1, shape[1])[index_T]
        if number % max(1, len(schedule) // 10) == 0:
            print_line(f"{rows.name}: batch {number:,} of {len(schedule):,}")
    if values is not None:
        values.flush()
        flat = values.reshape(-1)
        blocks = (flat[begin : begin + BLOCK_IDS] for begin in range(0, len(flat), BLOCK_IDS))
        content = io.BytesIO()
        np.save(content, np.array([*map(cache.compute_checksum, blocks)], np.uint32))
        files.write_atomic(folder / _CHECKSUMS, content.getvalue())
    print_line(f"{rows.name}: {format_count(shape[0], 'token')} -> {folder}")


def _open(folder: pathlib.Path, shape: tuple[int, int], meta: dict[str, Any]) -> np.memmap:
    """Opens the file of predictions, or makes one of zeros. Raises: UserError if the files of the
    teacher have changed."""
    written = files.read_json(folder / _META)
    if written is not None and written != meta and (folder / _ARRAY).is_file():
        raise UserError(
            f"objective.predictions: {folder} has those of other files of the teacher. Name "
            "another folder, or remove it."
        )
    folder.mkdir(parents=True, exist_ok=True)
    files.write_atomic(folder / _META, json.dumps(meta))
    if (folder / _ARRAY).is_file():
        return np.lib.format.open_memmap(folder / _ARRAY, mode="r+")
    (folder / _CHECKSUMS).unlink(missing_ok=True)
    partial = folder / f"{_ARRAY}.partial"
    np.lib.format.open_memmap(partial, mode="w+", dtype=np.int32, shape=shape)
    partial.rename(folder / _ARRAY)
    return np.lib.format.open_memmap(folder / _ARRAY, mode="r+")


def _is_true_in_first_process(value: bool) -> bool:
    if jax.process_count() == 1:
        return value
    return bool(multihost_utils.broadcast_one_to_all(np.int32(value)))
