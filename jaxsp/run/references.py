"""Log-probabilities of the reference model: computed once before training, and kept in files.

They are in the run's directory, which a resumed run reads, and in the cache of `datasets`, which
other runs read, also those on other meshes. Files are named by fingerprints of data and model.
"""

import hashlib
import io
import os
import pathlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxsp.blocks import layers
from jaxsp.core import files
from jaxsp.core.units import format_count
from jaxsp.data.packing import dataset
from jaxsp.data.packing.dataset import PackedDataset
from jaxsp.evaluation import evaluator
from jaxsp.evaluation.evaluator import Evaluator
from jaxsp.training.specs import StepSpec

FOLDER = "references"
"""Folder in a run's directory."""

_IDENTITY_FILE = "model.txt"
"""File in the folder with the fingerprint of the reference model, whose files may be gone later."""

_VERSION = 1
"""Part of the names of files. Increase it when the same documents would get other numbers."""


def list_missing(spec: StepSpec, data_sets: Sequence[PackedDataset]) -> list[PackedDataset]:
    """Data sets whose log-probabilities by the reference model are needed and unknown."""
    if not spec.objective.needs_reference:
        return []
    return [data for data in data_sets if data.documents.references is None]


def prepare(
    spec: StepSpec,
    data_sets: Sequence[PackedDataset],
    *,
    folders: Sequence[pathlib.Path],
    weights_identity: str,
    make_weights: Callable[[], layers.Weights],
    print_line: Callable[[str], None] = lambda text: None,
    on_batch: Callable[[], None] = lambda: None,
) -> None:
    """Reads or computes the log-probabilities of the documents of data sets that have none.

    All processes call it together; process 0 reads and writes the files.

    Args:
        folders: folder in the run's directory, or none for an evaluation of a model without a run.
        weights_identity: fingerprint of the reference model's weights.
        make_weights: makes these weights, sharded as the step's.
    """
    import datasets

    missing = list_missing(spec, data_sets)
    weights = None
    for data in missing:
        num_documents = len(data.documents.lengths)
        name = _make_name(spec, data, weights_identity)
        cache = pathlib.Path(datasets.config.HF_DATASETS_CACHE) / "jaxsp" / FOLDER
        paths = [folder / name for folder in (*folders, cache)]
        references = None
        if jax.process_index() == 0:
            for path in paths:
                references = _read(path, num_documents) if references is None else references
        is_known = references is not None
        if jax.process_count() > 1 and multihost_utils.broadcast_one_to_all(np.int32(is_known)):
            sent = np.zeros(num_documents, np.float32) if references is None else references
            references = np.asarray(multihost_utils.broadcast_one_to_all(sent))
        if references is None:
            print_line(
                f"computing the log-probabilities of {format_count(num_documents, 'document')} of "
                f"{data.name} by the reference model"
            )
            weights = make_weights() if weights is None else weights
            rows = dataset.pack_documents(
                data.name,
                data.documents,
                **spec.config.packing,
                digests=data.digests,
            )
            sums = Evaluator(spec, [rows]).score(rows, weights, on_batch=on_batch)
            references = -sums.losses_D.astype(np.float32)
        existing = next(path for path in (cache, *cache.parents) if path.exists())
        # a cache may be read-only
        if jax.process_index() == 0 and os.access(existing, os.W_OK):
            _write(cache / name, references)
        data.documents.references = references


def keep(
    spec: StepSpec,
    data_sets: Sequence[PackedDataset],
    folder: pathlib.Path,
    *,
    find_identity: Callable[[pathlib.Path], str],
) -> None:
    """Writes the log-probabilities that jaxsp computed into a run's directory.

    Args:
        folder: see `FOLDER`.
        find_identity: returns the fingerprint of the reference model: see `choose_identity`.
    """
    if not spec.objective.needs_reference or jax.process_index() > 0:
        return
    computed = [data for data in data_sets if not data.documents.has_given_references]
    if not computed:
        return
    identity = find_identity(folder)
    for data in computed:
        references = data.documents.references
        assert references is not None, "prepared before"
        _write(folder / _make_name(spec, data, identity), references.astype(np.float32))
    files.write_atomic(folder / _IDENTITY_FILE, identity)


def choose_identity(folder: pathlib.Path, *, is_resume: bool, compute: Callable[[], str]) -> str:
    """Fingerprint of the reference model of a run.

    A resumed run has kept it. A run that starts in the directory of another one, which has no
    checkpoint, may have another model.
    """
    return (read_identity(folder) if is_resume else None) or compute()


def read_identity(folder: pathlib.Path) -> str | None:
    """Fingerprint of the reference model of the run that has this folder; None if it has none."""
    path = folder / _IDENTITY_FILE
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _make_name(spec: StepSpec, data: PackedDataset, weights_identity: str) -> str:
    """Name of the file for a data set and a model.

    Rounding counts as part of the model: compute dtype, 8-bit products and quantization.
    """
    config = spec.config
    names = (
        _VERSION,
        evaluator.identify_eval_set(data)["digest"],
        weights_identity,
        repr(spec.model),
        config.compute_dtype,
        config.adapter.quantization,
    )
    return f"{hashlib.sha256(repr(names).encode()).hexdigest()[:32]}.npy"


def _read(path: pathlib.Path, num_documents: int) -> np.ndarray | None:
    """Reads a file; None if it is missing or damaged."""
    if not path.exists() or not files.is_intact(path):
        return None
    values = np.load(path)
    return values if values.shape == (num_documents,) else None


def _write(path: pathlib.Path, values: np.ndarray) -> None:
    """Writes a file and its checksum, if it is missing or damaged."""
    if _read(path, len(values)) is not None:
        return
    content = io.BytesIO()
    np.save(content, values)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomic(path, content.getvalue())
    files.write_checksum(path)
