"""Stored predictions of a teacher: the k likeliest tokens after each token, and the rest's mass.

Example: objective.scores = scores/qwen3 with one data set of 10 tokens and top_k 2 has

    scores/qwen3/3f0c.../meta.json     teacher, temperature, and digest of the tokens
    scores/qwen3/3f0c.../scores.npy    int32[10, 5]: two ids, and the bits of three float32
                                       log-probabilities, the last of all other tokens together
    scores/qwen3/3f0c.../blocks.npy    checksums, once it is complete
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxsp.core import files
from jaxsp.core.errors import ProblemCollector, UserError, at
from jaxsp.core.units import format_count
from jaxsp.data.ingest import cache
from jaxsp.data.ingest.cache import BLOCK_IDS, CheckedIds
from jaxsp.data.packing.dataset import PackedDataset
from jaxsp.data.packing.row_reader import StoredScores
from jaxsp.evaluation import evaluator, token_losses
from jaxsp.objectives.distill import Distill
from jaxsp.training.specs import StepSpec

_SCORES = "scores.npy"
_BLOCKS = "blocks.npy"
_META = "meta.json"
_DONE = "done.json"


def attach(objective: Distill, data_sets: list[PackedDataset]) -> None:
    """Opens the stored predictions of data sets, and attaches them to their documents.

    Raises: UserError for predictions that are missing, incomplete, or of another teacher,
        temperature or top_k.
    """
    problems = ProblemCollector()
    for data in data_sets:
        target = find_folder(objective, data)
        with problems.collect(), at("objective.scores", objective.scores):
            written = files.read_json(target / _META)
            if written is None:
                raise UserError(
                    f"has no predictions for {data.name}, or its data, seed or row length have "
                    "changed. Write them first: jaxsp score CONFIG.yaml."
                )
            for name, value in describe(objective, data).items():
                if name != "data" and written.get(name) != value:
                    raise UserError(
                        f"was written with objective.{name} = {written.get(name)}, not {value}. "
                        "Use that value, or write others: jaxsp score CONFIG.yaml "
                        f"objective.scores={objective.scores}-2."
                    )
            if not (target / _BLOCKS).is_file():
                raise UserError(
                    f"is incomplete for {data.name}. Run the same jaxsp score again: it continues."
                )
            scores = np.load(target / _SCORES, mmap_mode="r")
            # damage removes the metadata, so that jaxsp score writes all again
            checked = CheckedIds(scores.reshape(-1), np.load(target / _BLOCKS), target / _META)
            lengths = data.documents.lengths
            data.documents.scores = StoredScores(
                values=checked, top_k=objective.top_k, firsts=np.cumsum(lengths) - lengths
            )
    problems.raise_if_any()


def find_folder(objective: Distill, data: PackedDataset) -> pathlib.Path:
    """Folder of a data set's predictions, by the digest of its tokens and cuts."""
    digest = evaluator.identify_eval_set(data)["digest"]
    return pathlib.Path(str(objective.scores)) / digest[:32]


def describe(objective: Distill, data: PackedDataset) -> dict[str, Any]:
    """Settings that the predictions depend on beside the tokens, as in meta.json."""
    names = "teacher teacher_quantization teacher_linear_dtype temperature top_k".split()
    return {name: getattr(objective, name) for name in names} | {"data": data.name}


def write(
    target: pathlib.Path,
    meta: dict[str, Any],
    *,
    num_tokens: int,
    rows: PackedDataset,
    compute: Callable[[Any], Any],
    spec: StepSpec,
    print_line: Callable[[str], None],
) -> None:
    """Computes and writes the predictions of one data set, or those that are missing."""
    has_meta = files.read_json(target / _META) == meta
    if has_meta and (target / _BLOCKS).is_file():
        print_line(f"{rows.name}: complete")
        return
    is_writer = jax.process_index() == 0
    schedule = rows.make_schedule(spec.config.rows_per_step, epochs=1)
    loader = rows.make_loader(schedule, spec.placement)
    done = files.read_json(target / _DONE) if has_meta else None
    first = (done or {}).get("batches", 0)
    scores = None
    if is_writer:
        target.mkdir(parents=True, exist_ok=True)
        (target / _BLOCKS).unlink(missing_ok=True)
        files.write_atomic(target / _META, json.dumps(meta))
        shape = (num_tokens, 2 * meta["top_k"] + 1)
        mode: Any = {"mode": "r+"} if first else {"mode": "w+", "dtype": np.int32, "shape": shape}
        scores = np.lib.format.open_memmap(target / _SCORES, **mode)
    lengths = rows.documents.lengths
    firsts = np.cumsum(lengths) - lengths
    for number, (batch, counts) in enumerate(loader.batches(first=first), first):
        ids_BLK, logps_BLK = map(np.asarray, compute(batch))
        if scores is not None:
            index_T, document_T, position_T = token_losses.find_places(
                counts, spec.placement.layout, row_tokens=ids_BLK.shape[2]
            )
            numbers_TK = np.concatenate([ids_BLK, logps_BLK.view(np.int32)], axis=-1)
            numbers_TK = numbers_TK.reshape(-1, numbers_TK.shape[-1])
            scores[firsts[document_T] + position_T] = numbers_TK[index_T]
            scores.flush()
            files.write_atomic(target / _DONE, json.dumps({"batches": number + 1}))
    if scores is not None:
        flat = scores.reshape(-1)
        blocks = [
            cache.compute_checksum(flat[begin : begin + BLOCK_IDS])
            for begin in range(0, len(flat), BLOCK_IDS)
        ]
        np.save(target / _BLOCKS, np.array(blocks, np.uint32))
    print_line(f"{rows.name}: {format_count(num_tokens, 'token')} -> {target}")
