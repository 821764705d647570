"""Files of a config's model: config.json, tokenizer, weights and stop tokens.

Stop tokens of a fine-tuned model are those that end the turns of its training chats. A base model
ends documents with <|endoftext|>. If chats teach it to end turns with <|im_end|>, and only
<|endoftext|> is in its eos_token_id, generation goes on after every answer.
"""

import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING, Any

from jaxsp.blocks import layers
from jaxsp.blocks.config import ModelConfig
from jaxsp.blocks.layers import Parameter
from jaxsp.config import json_values
from jaxsp.config.yaml_io import format_value
from jaxsp.core.errors import UserError, at
from jaxsp.data import chat_template, tokenize, tokenizers
from jaxsp.data.chat_template import TemplateRenderer
from jaxsp.hf import folder, model_config, peft, weights
from jaxsp.hf.folder import ModelFolder
from jaxsp.hf.model_source import ModelSourceConfig
from jaxsp.hf.peft import ResolvedAdapter
from jaxsp.hf.weights import WeightReader
from jaxsp.model import decoder
from jaxsp.objectives.distill import find_teacher
from jaxsp.run.config_file import Config
from jaxsp.run.data_sets import OpenedSources
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
    own = tokenizer.get_vocab()
    with at("objective.teacher", teacher), at("its tokenizer"):
        theirs = tokenizers.load(str(source.path)).get_vocab()
        if changed := sorted(number for _, number in own.items() ^ theirs.items()):
            tokens = [
                repr(next((token for token, number in vocab.items() if number == changed[0]), None))
                for vocab in (theirs, own)
            ]
            raise UserError(
                f"differs from the model's: token {changed[0]} is {tokens[0]}, and {tokens[1]} in "
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


GENERATION_CONFIG = "generation_config.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopTokens:
    """Special tokens that end the assistant's turns in the training data."""

    alternatives: tuple[tuple[int, ...], ...] = ()
    """Ends of a turn, each as its tokens; generation must stop at one token of each."""
    description: str = ""
    """Part of a line of the banner; empty without chats."""

    def add_to(self, fields: dict[str, Any], *, default: Any = None) -> dict[str, Any]:
        """Returns fields with those tokens that eos_token_id, by default `default`, lacks."""
        if not self.alternatives:
            return fields
        eos_ids = fields.get("eos_token_id")
        eos_ids = default if eos_ids is None else eos_ids
        ids = _list_ids(eos_ids)
        added = [tokens[-1] for tokens in self.alternatives if not set(tokens) & set(ids)]
        merged = [*dict.fromkeys([*added, *ids])]
        if added:
            eos_ids = merged if len(merged) > 1 else merged[0]
        return fields | {"eos_token_id": eos_ids}

    def add_to_file(self, directory: pathlib.Path, *, default: Any) -> None:
        """Adds the tokens to a folder's generation config. Without one, the export makes one."""
        path = directory / GENERATION_CONFIG
        if self.alternatives and path.is_file():
            fields = folder.read_json(path)
            weights.write_json(path, self.add_to(fields, default=default))


def find_stop_tokens(opened: OpenedSources, config: Config, tokenizer: Any) -> StopTokens:
    """Finds the stop tokens of the training data; none without chats."""
    for field, source in opened.train.items():
        if not source.is_chat:
            continue
        entries = opened.records[field].entries()
        texts = (x["record"] for x in entries if x["problem"] is None)
        if isinstance(json.loads(next(texts, "{}")).get("prompt"), str):
            continue  # a prompt and a completion of plain text
        options = tokenize.resolve_options(source, data=config.data, tokenizer=tokenizer)
        assert options is not None, "chats have a tokenizer"
        template = options.template  # all sources have the same
        try:
            renderer = TemplateRenderer(
                {}, tokenizer=tokenizer, template=template, with_marks=False
            )
        except UserError:  # several templates, none of which is for all records
            break
        end = chat_template.find_turn_end(tokenizer, renderer.template)
        alternatives = tuple(tuple(tokenizer.convert_tokens_to_ids(x)) for x in end.stops)
        description = ""
        if end.stops:
            description = f"turns end with {' or '.join(map(''.join, end.stops))}"
        elif end.text:
            description = (
                f"turns end with {end.text.strip()!r}, which is not a special token: generation "
                "does not stop there"
            )
        return StopTokens(alternatives=alternatives, description=description)
    return StopTokens()


def list_stop_ids(
    hf_config: dict[str, Any], directory: pathlib.Path | None, tokenizer: Any
) -> list[int]:
    """Tokens at which generation stops: those of config.json, of the generation config of the
    model's folder if it has one, and the tokenizer's end token."""
    ids = _list_ids(hf_config.get("eos_token_id"))
    path = None if directory is None else directory / GENERATION_CONFIG
    if path is not None and path.is_file():
        ids += _list_ids(folder.read_json(path).get("eos_token_id"))
    if tokenizer is not None:
        ids += _list_ids(tokenizer.eos_token_id)
    return list(dict.fromkeys(ids))


def _list_ids(eos_ids: Any) -> list[int]:
    if eos_ids is None:
        return []
    ids = eos_ids if isinstance(eos_ids, list) else [eos_ids]
    if not all(map(json_values.is_integer, ids)):  # config.json is checked before
        text = f"{GENERATION_CONFIG}: eos_token_id = {format_value(eos_ids)}"
        raise UserError(f"{text}: must be a token id, a list of them, or null.")
    return list(ids)
