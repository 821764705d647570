"""Weights of step 0: a Hugging Face folder's or random ones, and those of adapters."""

import dataclasses
from typing import Any

from jaxsp.blocks import layers
from jaxsp.blocks.layers import Parameter
from jaxsp.data.ingest import source_files
from jaxsp.hf import folder, peft, weights
from jaxsp.hf.folder import ModelFolder
from jaxsp.hf.weights import WeightReader
from jaxsp.model import decoder
from jaxsp.training import trainable, weight_init
from jaxsp.training.specs import StepSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """Source of the weights of step 0, whose files were checked."""

    spec: StepSpec
    reader: WeightReader | None
    """Weights of model.source; None: random ones."""
    adapter_reader: WeightReader | None
    """Weights of adapter.source; None: new adapters."""

    @property
    def left_out(self) -> str:
        """Description of tensors of model.source that are not read; empty if all are."""
        return "" if self.reader is None else self.reader.left_out

    def make(self) -> layers.Weights:
        """All weights, on the step's mesh."""
        return self._make(self.spec.table)

    def make_frozen(self) -> layers.Weights:
        """The frozen weights only, in the structure of `trainable.select_frozen`."""
        return self._make(trainable.select_frozen(self.spec.table, self.spec.table))

    def _make(self, table: layers.Weights) -> layers.Weights:
        spec = self.spec
        place: dict[str, Any] = {"mesh": spec.mesh, "is_on_host": spec.is_on_host}

        def select(is_selected: trainable.Predicate) -> layers.Weights:
            return trainable.select(table, table, is_selected)

        def is_in_adapter(param: Parameter) -> bool:
            if self.adapter_reader is None:
                return param.is_adapter
            return param.tensor_name((param.layers or [0])[0]) in self.adapter_reader.tensors

        def load(table: layers.Weights, reader: WeightReader | None) -> layers.Weights:
            if reader is None:
                return weight_init.random_weights(table, seed=spec.config.seed, **place)
            return weight_init.load_weights(table, read_slice=reader.read, **place)

        def is_new(param: Parameter) -> bool:
            """True for the head of a reward model that is made from a language model."""
            is_score = param.hf_name == decoder.SCORE_NAME and not is_in_adapter(param)
            return is_score and self.reader is not None and param.hf_name not in self.reader.tensors

        base = select(lambda param: not is_in_adapter(param) and not is_new(param))
        made = trainable.merge(
            load(base, self.reader), load(select(is_in_adapter), self.adapter_reader)
        )
        made = trainable.merge(made, load(select(is_new), None))
        if self.adapter_reader is None:
            made = weight_init.init_magnitudes(table, made, mesh=spec.mesh)
        return made


@dataclasses.dataclass(frozen=True)
class Reference:
    """Reference model of an objective: the model before step 1, also of a resumed run.

    New adapters change nothing, so that its weights have the structure of the run's.
    """

    spec: StepSpec
    source: str | None
    """The run's model.source."""
    adapter_source: str | None
    """The run's adapter.source; evaluations of a checkpoint have none in their config."""

    def _open(self) -> InitialWeights:
        return open_sources(
            self.spec,
            None if self.source is None else folder.find(self.source),
            None if self.adapter_source is None else peft.find(self.adapter_source),
        )

    def make(self) -> layers.Weights:
        """All weights, on the step's mesh. Raises: UserError as `open_sources`."""
        return self._open().make()

    def identify(self) -> str:
        """Fingerprint of the weights, which changes when a file does."""
        opened = self._open()
        readers = filter(None, (opened.reader, opened.adapter_reader))
        parts = [repr(source_files.file_identities(reader.list_files())) for reader in readers]
        if opened.reader is None:
            parts.insert(0, f"random weights, seed {self.spec.config.seed}")
        return ", ".join(parts)


def open_sources(
    spec: StepSpec, source: ModelFolder | None, adapter_source: ModelFolder | None
) -> InitialWeights:
    """Checks the files of the weights of step 0, and downloads them first if they are on the hub.

    Args:
        source: folder of model.source; None for random weights.
        adapter_source: folder of adapter.source; None for new adapters.
    Raises: UserError for tensors and files that are missing, damaged or of another model.
    """
    reader = None
    if source is not None:
        reader = weights.open_folder(source, decoder.plain_table(spec.model))
    adapter_reader = None
    if adapter_source is not None:
        adapter_reader = peft.open_weights(adapter_source, spec.table)
    return InitialWeights(spec=spec, reader=reader, adapter_reader=adapter_reader)
