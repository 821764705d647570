"""Weights of step 0: a Hugging Face folder's or random ones, and those of adapters."""

import dataclasses
from typing import Any

from jaxsp.blocks import layers
from jaxsp.blocks.layers import Parameter
from jaxsp.hf import folder, peft, weights
from jaxsp.hf.folder import ModelFolder
from jaxsp.hf.weights import WeightReader
from jaxsp.model import decoder
from jaxsp.objectives.distill import find_teacher
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
    teacher: "InitialWeights | None" = None
    """Weights of the objective's teacher, if it is another model."""

    def make(self, *, frozen_only: bool = False) -> layers.Weights:
        """All weights on the step's mesh, or those of `trainable.select_frozen`."""
        spec = self.spec
        table = spec.table
        if frozen_only:
            table = trainable.select_frozen(table, table)
        place: dict[str, Any] = {"mesh": spec.mesh, "is_on_host": spec.is_on_host}
        made: layers.Weights = {}
        for reader in (None, *filter(None, (self.reader, self.adapter_reader))):
            is_own = lambda param, reader=reader: self._find_reader(param) is reader
            part = trainable.select(table, table, is_own)
            if reader is None:
                loaded = weight_init.random_weights(part, seed=spec.config.seed, **place)
            else:
                loaded = weight_init.load_weights(part, read_slice=reader.read, **place)
            made = trainable.merge(made, loaded)
        if self.teacher is not None:
            made["teacher"] = self.teacher.make()
        if self.adapter_reader is None:
            made = weight_init.init_magnitudes(table, made, mesh=spec.mesh)
        return made

    def _find_reader(self, param: Parameter) -> WeightReader | None:
        """Reader of a weight; None if it is random."""
        name = param.tensor_name((param.layers or [0])[0])
        if self.adapter_reader is not None and name in self.adapter_reader.tensors:
            return self.adapter_reader
        if self.adapter_reader is None and param.is_adapter:
            return None
        if self.reader is not None and param.hf_name == decoder.SCORE_NAME:
            # the head of a reward model that is made from a language model is new
            return self.reader if param.hf_name in self.reader.tensors else None
        return self.reader


def open_sources(
    spec: StepSpec, source: ModelFolder | None, adapter_source: ModelFolder | None
) -> InitialWeights:
    """Checks the files of the weights of step 0, and downloads them first if they are on the hub.

    Args: source, adapter_source: of model and adapter; None for random weights and new adapters.
    Raises: UserError for tensors and files that are missing, damaged or of another model.
    """
    reader = None
    if source is not None:
        reader = weights.open_folder(source, decoder.plain_table(spec.model))
    adapter_reader = None
    if adapter_source is not None:
        adapter_reader = peft.open_weights(adapter_source, spec.table)
    teacher = None
    if (name := find_teacher(spec.objective)) is not None:
        assert spec.teacher is not None, "a step has its objective's teacher"
        source = folder.find(name, field="objective.teacher")
        teacher = open_sources(spec.teacher, source, None)
    return InitialWeights(spec=spec, reader=reader, adapter_reader=adapter_reader, teacher=teacher)
