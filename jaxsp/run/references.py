"""Stored results of other models: a reference model's, and predictions of a teacher.

Log-probabilities of the reference model are computed once before training, and kept in files.

They are in the run's directory, which a resumed run reads, and in the cache of `datasets`, which
other runs read, also those on other meshes. Files are named by fingerprints of data and model.

Stored predictions of a teacher: the k likeliest tokens after each token, and the rest's mass.

Example: objective.predictions = predictions/qwen3 with one data set of 10 tokens and top_k 2 has

    predictions/qwen3/3f0c.../meta.json         files of the teacher, and the ids of its softmax
    predictions/qwen3/3f0c.../predictions       int32[10, 5]: two ids, and the bits of three float32
                                                log-probabilities, the last of all others together
    predictions/qwen3/3f0c.../checksums.npy     once it is complete

A folder's name is a digest of everything that they depend on, except the teacher's weights.
"""

import dataclasses
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
from jaxsp.core.errors import ProblemCollector, UserError, at
from jaxsp.core.units import format_count
from jaxsp.data import dataset, sources
from jaxsp.data.dataset import PackedDataset
from jaxsp.data.documents import StoredPredictions
from jaxsp.data.store import CheckedIds
from jaxsp.evaluation import evaluator
from jaxsp.evaluation.evaluator import Evaluator
from jaxsp.hf import folder, peft
from jaxsp.objectives.distill import Distill
from jaxsp.run import model_files
from jaxsp.run.model_files import InitialWeights
from jaxsp.training.specs import StepSpec

FOLDER = "references"
"""Folder in a run's directory."""

_IDENTITY_FILE = "model.txt"
"""File in the folder with the fingerprint of the reference model, whose files may be gone later."""

_VERSION = 1
"""Part of the names of files. Increase it when the same documents would get other numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """Reference model of an objective: the model before step 1, also of a resumed run.

    New adapters change nothing, so that its weights have the structure of the run's.
    """

    spec: StepSpec
    source: str | None
    """The run's model.source."""
    adapter_source: str | None
    """The run's adapter.source; evaluations of a checkpoint have none in their config."""
    run_dir: pathlib.Path | None
    """Directory of the run; None for an evaluation of a model without a run."""
    is_resume: bool
    """True if the run has started before, with this model, whose files may be gone. A run in the
    directory of another one, which has no checkpoint, may have another model."""

    def open(self) -> InitialWeights:
        """Raises: UserError as `model_files.open_weights`."""
        return model_files.open_weights(
            self.spec,
            None if self.source is None else folder.find(self.source),
            None if self.adapter_source is None else peft.find(self.adapter_source),
        )

    def identify(self) -> str:
        """Fingerprint of the weights, which changes when a file does."""
        opened = self.open()
        readers = filter(None, (opened.reader, opened.adapter_reader))
        parts = [repr(sources.file_identities(reader.list_files())) for reader in readers]
        if opened.reader is None:
            parts.insert(0, f"random weights, seed {self.spec.config.seed}")
        return ", ".join(parts)

    def _find_identity(self) -> str:
        """The fingerprint that the run has kept, if it is resumed; otherwise that of the files."""
        path = None if self.run_dir is None else self.run_dir / FOLDER / _IDENTITY_FILE
        if self.is_resume and path is not None and path.is_file():
            return path.read_text(encoding="utf-8")
        return self.identify()

    def list_missing(self, data_sets: Sequence[PackedDataset]) -> list[PackedDataset]:
        """Data sets whose log-probabilities are needed and unknown."""
        is_needed = self.spec.objective.needs_reference
        return [x for x in data_sets if is_needed and x.documents.references is None]

    def prepare(
        self,
        data_sets: Sequence[PackedDataset],
        *,
        make_weights: Callable[[], layers.Weights] | None = None,
        print_line: Callable[[str], None],
        on_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """Reads or computes the log-probabilities of the documents of data sets that have none.

        All processes call it together; process 0 reads and writes the files.

        Args: make_weights: makes the model's weights, sharded as the step's; None: reads them.
        """
        import datasets

        missing = self.list_missing(data_sets)
        identity = self._find_identity() if missing else ""
        cache = pathlib.Path(datasets.config.HF_DATASETS_CACHE) / "jaxsp" / FOLDER
        existing = next(path for path in (cache, *cache.parents) if path.exists())
        weights = None
        for data in missing:
            num_documents = len(data.documents.lengths)
            name = _make_name(self.spec, data, identity)
            references = None
            if jax.process_index() == 0:
                if self.run_dir is not None:
                    references = _read(self.run_dir / FOLDER / name, num_documents)
                if references is None:
                    references = _read(cache / name, num_documents)
            is_known = references is not None
            if jax.process_count() > 1 and multihost_utils.broadcast_one_to_all(np.int32(is_known)):
                sent = np.zeros(num_documents, np.float32) if references is None else references
                references = np.asarray(multihost_utils.broadcast_one_to_all(sent))
            if references is None:
                print_line(
                    f"computing the log-probabilities of {format_count(num_documents, 'document')} "
                    f"of {data.name} by the reference model"
                )
                if weights is None:
                    weights = self.open().make() if make_weights is None else make_weights()
                rows = dataset.pack_documents(
                    data.name, data.documents, **self.spec.config.packing, digests=data.digests
                )
                sums = Evaluator(self.spec, [rows]).score(rows, weights, on_batch=on_batch)
                references = -sums.losses_D.astype(np.float32)
            # a cache may be read-only
            if jax.process_index() == 0 and os.access(existing, os.W_OK):
                _write(cache / name, references)
            data.documents.references = references

    def keep(self, data_sets: Sequence[PackedDataset]) -> None:
        """Writes the log-probabilities that jaxsp computed into the run's directory."""
        computed = [data for data in data_sets if not data.documents.has_given_references]
        is_needed = self.spec.objective.needs_reference
        if not is_needed or jax.process_index() > 0 or not computed:
            return
        assert self.run_dir is not None, "evaluations keep nothing"
        kept = self.run_dir / FOLDER
        identity = self._find_identity()
        for data in computed:
            references = data.documents.references
            assert references is not None, "prepared before"
            _write(kept / _make_name(self.spec, data, identity), references.astype(np.float32))
        files.write_atomic(kept / _IDENTITY_FILE, identity)


def _make_name(spec: StepSpec, data: PackedDataset, weights_identity: str) -> str:
    """Name of the file for a data set and a model, in which its rounding counts."""
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
