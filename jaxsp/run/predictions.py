"""Stored predictions of a teacher: the k likeliest tokens after each token, and the rest's mass.

Example: objective.predictions = predictions/qwen3 with one data set of 10 tokens and top_k 2 has

    predictions/qwen3/3f0c.../meta.json         files of the teacher, and the ids of its softmax
    predictions/qwen3/3f0c.../predictions       int32[10, 5]: two ids, and the bits of three float32
                                                log-probabilities, the last of all others together
    predictions/qwen3/3f0c.../checksums.npy     once it is complete

A folder's name is a digest of everything that they depend on, except the teacher's weights.
"""

import hashlib
import pathlib

import numpy as np

from jaxsp.core import files
from jaxsp.core.errors import ProblemCollector, UserError, at
from jaxsp.data.dataset import PackedDataset
from jaxsp.data.documents import StoredPredictions
from jaxsp.data.store import CheckedIds
from jaxsp.evaluation import evaluator
from jaxsp.objectives.distill import Distill

ARRAY = "predictions"
CHECKSUMS = "checksums.npy"
META = "meta.json"


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
            meta = files.read_json(folder / META)
            if meta is None:
                raise UserError(
                    f"has none for these documents of {data.name} in rows of "
                    f"{data.stream.row_tokens:,} tokens by {objective.teacher} with temperature "
                    f"{objective.temperature:g} and top_k {objective.top_k}. Write them first: "
                    "jaxsp score CONFIG.yaml; or let the teacher run in each step: "
                    "objective.predictions=null objective.top_k=64."
                )
            if not all((folder / name).is_file() for name in (ARRAY, CHECKSUMS)):
                raise UserError(
                    f"is incomplete for {data.name}. Run the same jaxsp score again: it continues."
                )
            path = folder / ARRAY
            values = np.memmap(path, np.int32, "r")
            checked = CheckedIds(values, np.load(folder / CHECKSUMS), path)
            data.documents.predictions = StoredPredictions(checked, objective.predictions_width)
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
