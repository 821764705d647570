"""Files of a config's model: config.json, tokenizer and weights."""

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any

from jaxsp.blocks import layers
from jaxsp.blocks.config import ModelConfig
from jaxsp.blocks.layers import Parameter
from jaxsp.core.errors import UserError, at
from jaxsp.data import tokenizers
from jaxsp.hf import folder, model_config, peft, weights
from jaxsp.hf.folder import ModelFolder
from jaxsp.hf.model_source import ModelSourceConfig
from jaxsp.hf.peft import ResolvedAdapter
from jaxsp.hf.weights import WeightReader
from jaxsp.model import decoder
from jaxsp.objectives.distill import find_teacher
from jaxsp.run.config_file import Config
from jaxsp.training import specs, train_state
from jaxsp.training.specs import StepSpec

if TYPE_CHECKING:
    import transformers


def read_model(
    config: Config, hf_config: dict[str, Any] | None = None
) -> tuple[ModelFolder | None, dict[str, Any], ResolvedAdapter]:
    """Reads the model's config.json, changes its RoPE, adds adapters, and checks local weights.

    Args: hf_config: fields of a checkpoint's config.json, instead of those of model.source.
    Returns: the folder of model.source, if it was read; the fields; the model with its adapters.
    """
    source = None
    field = "model.config"
    needs_folder = hf_config is None or config.step.has_frozen_weights
    if needs_folder and config.model.source is not None:
        source = folder.find(config.model.source)
        field = str(source.path / "config.json")
        hf_config = source.config_fields if hf_config is None else hf_config
    hf_config = config.model.config if hf_config is None else hf_config
    assert hf_config is not None, "the schema requires one of them"
    with at(field):
        hf_config = model_config.resolve_fields(hf_config, config.model)
    if config.objective.type == "reward":
        hf_config = model_config.make_reward_fields(hf_config)
    elif model_config.is_reward_model(hf_config):
        raise UserError(
            f"objective.type = {config.objective.type}: {field} is that of a reward model, "
            "which has no head for tokens. Use objective.type=reward, or the model it was "
            "made from."
        )
    with at(field):
        model = model_config.parse_model_config(hf_config, row_tokens=config.data.row_tokens)
    model = model_config.add_router_losses(model, config.model)
    if source is not None and not source.is_on_hub:
        weights.open_folder(source, decoder.param_table(model))
    if (teacher := find_teacher(config.objective)) is not None:
        model = dataclasses.replace(model, teacher=_read_teacher(config, teacher))
    return source, hf_config, peft.resolve(config.adapter, model)


def _read_teacher(config: Config, name: str) -> ModelConfig:
    """Reads the config.json of the objective's teacher, and checks that it has the model's tokens.

    Raises: UserError for another tokenizer.
    """
    source = folder.find(name, field="objective.teacher")
    with at("objective.teacher", name):
        fields = model_config.resolve_fields(source.config_fields, ModelSourceConfig(source=name))
        if model_config.is_reward_model(fields):
            raise UserError("is a reward model, which predicts no tokens. Name a language model.")
        teacher = model_config.parse_model_config(fields, row_tokens=config.data.row_tokens)
        if not source.is_on_hub:
            weights.open_folder(source, decoder.param_table(teacher))
    return teacher


def check_teacher_tokens(
    config: Config, tokenizer: "transformers.PreTrainedTokenizerBase | None"
) -> None:
    """Checks that the objective's teacher has the same token ids, if both have a tokenizer.

    Raises: UserError naming the first id that differs.
    """
    teacher = find_teacher(config.objective)
    if teacher is None or tokenizer is None:
        return
    source = folder.find(teacher, field="objective.teacher")
    if not any(
        (source.path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")
    ):
        return
    own = {number: token for token, number in tokenizer.get_vocab().items()}
    with at("objective.teacher", teacher), at("its tokenizer"):
        theirs = {x: token for token, x in tokenizers.load(str(source.path)).get_vocab().items()}
        changed = [
            number
            for number in sorted(own.keys() | theirs.keys())
            if own.get(number) != theirs.get(number)
        ]
        if changed:
            shown = [repr(ids.get(changed[0])) for ids in (own, theirs)]
            raise UserError(
                f"differs from the model's: token {changed[0]} is {shown[1]}, and {shown[0]} in "
                "the model's. Use a teacher with the same token ids."
            )


def load_checked_tokenizer(
    config: Config,
    source: ModelFolder | None,
    model: ModelConfig | None,
    run_model_dir: pathlib.Path | None = None,
    *,
    has_text: bool,
) -> "transformers.PreTrainedTokenizerBase | None":
    """The tokenizer; None if neither data (`has_text`) nor the config need one.

    Args: source, model: None if they have reported a problem.
    """
    is_needed = has_text or config.eval.tasks or config.run.generate_samples
    is_source_missing = config.model.source is not None and model is None
    if config.model.tokenizer is None and (is_source_missing or not is_needed):
        return None
    tokenizer = load_tokenizer(config, source, run_model_dir)
    # A given model may have more tokens than rows of its embedding: gemma-3-1b has one more.
    # tokenize_dataset refuses those that occur.
    if model is not None and config.model.source is None and len(tokenizer) > model.vocab_size:
        raise UserError(
            f"model.tokenizer: has {len(tokenizer):,} different tokens, but the model's "
            f"vocab_size is {model.vocab_size:,}. Set "
            f"model.config.vocab_size={len(tokenizer)}, or more."
        )
    return tokenizer


def load_tokenizer(
    config: Config, source: ModelFolder | None, run_model_dir: pathlib.Path | None
) -> "transformers.PreTrainedTokenizerBase":
    """Loads the tokenizer: the run's own copy, else model.tokenizer, else that of model.source."""
    name = config.model.tokenizer
    if run_model_dir is not None and name != tokenizers.BYTE_TOKENIZER:
        if (run_model_dir / "tokenizer_config.json").is_file():
            name = str(run_model_dir)
    if name is not None:
        with at("model.tokenizer", name):
            return tokenizers.load(name)
    if source is None:
        raise UserError(
            "model.tokenizer = null: text needs one, and so do run.generate_samples and "
            "eval.tasks. Use bytes, or a folder or hub name."
        )
    with at("model.source", source.source), at("its tokenizer"):
        return tokenizers.load(str(source.path))


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
        """All weights on the step's mesh, or those of `train_state.select_frozen`."""
        spec = self.spec
        table = spec.table
        if frozen_only:
            table = train_state.select_frozen(table, table)
        place: dict[str, Any] = {"mesh": spec.mesh, "is_on_host": spec.is_on_host}
        made: layers.Weights = {}
        for reader in (None, *filter(None, (self.reader, self.adapter_reader))):
            is_own = lambda param, reader=reader: self._find_reader(param) is reader
            part = specs.select(table, table, is_own)
            if reader is None:
                loaded = train_state.random_weights(part, seed=spec.config.seed, **place)
            else:
                loaded = train_state.load_weights(part, read_slice=reader.read, **place)
            made = train_state.merge(made, loaded)
        if self.teacher is not None:
            made["teacher"] = self.teacher.make()
        if self.adapter_reader is None:
            made = train_state.init_magnitudes(table, made, mesh=spec.mesh)
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


def open_weights(
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
        teacher = open_weights(spec.teacher, source, None)
    return InitialWeights(spec=spec, reader=reader, adapter_reader=adapter_reader, teacher=teacher)
