"""Files of a config's model: config.json, tokenizer and weights."""

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any

from jaxsp.blocks.config import ModelConfig
from jaxsp.core.errors import ProblemCollector, UserError, at
from jaxsp.data.tokenization import tokenizers
from jaxsp.hf import folder, model_config, peft, weights
from jaxsp.hf.folder import ModelFolder
from jaxsp.hf.peft import ResolvedAdapter
from jaxsp.model import decoder
from jaxsp.run.config_file import Config
from jaxsp.run.data_sets import OpenedSources

if TYPE_CHECKING:
    import transformers


@dataclasses.dataclass(kw_only=True)
class ModelFiles:
    """Model of a config, as far as it could be read."""

    folder: ModelFolder | None = None
    """Folder of model.source; None if the model is described by the config or a checkpoint."""
    hf_config: dict[str, Any] | None = None
    config: ModelConfig | None = None
    """None if the folder or the family has a problem."""
    adapter: ResolvedAdapter | None = None
    """Adapters of `config`; None if it is None."""


def read_model(
    config: Config, hf_config: dict[str, Any] | None, problems: ProblemCollector
) -> ModelFiles:
    """Reads the model's config.json, changes its RoPE, adds adapters, and checks local weights."""
    files = ModelFiles()
    with problems.collect():
        source = None
        needs_folder = hf_config is None or config.step.has_frozen_weights
        if needs_folder and config.model.source is not None:
            source = folder.find(config.model.source)
            hf_config = source.config_fields if hf_config is None else hf_config
        hf_config = config.model.config if hf_config is None else hf_config
        assert hf_config is not None, "the schema requires one of them"
        files.folder = source
        files.hf_config = hf_config
        name = str(source.path / "config.json") if source else "model.config"
        with at(name):
            hf_config = model_config.resolve_fields(hf_config, config.model)
        if config.objective.type == "reward":
            hf_config = model_config.make_reward_fields(hf_config)
        elif model_config.is_reward_model(hf_config):
            raise UserError(
                f"objective.type = {config.objective.type}: {name} is that of a reward model, "
                "which has no head for tokens. Use objective.type=reward, or the model it was "
                "made from."
            )
        files.hf_config = hf_config
        with at(name):
            model = model_config.parse_model_config(hf_config, row_tokens=config.data.row_tokens)
        model = model_config.add_router_losses(model, config.model)
        if source is not None and not source.is_on_hub:
            weights.open_folder(source, decoder.param_table(model))
        files.adapter = peft.resolve(config.adapter, model)
        files.config = files.adapter.model
    return files


def load_checked_tokenizer(
    config: Config,
    files: ModelFiles,
    opened: OpenedSources,
    run_model_dir: pathlib.Path | None,
    problems: ProblemCollector,
) -> "transformers.PreTrainedTokenizerBase | None":
    """The tokenizer, if a source or the config needs one and it can be found."""
    is_source_missing = config.model.source is not None and files.hf_config is None
    needs_tokenizer = opened.have_text or config.eval.tasks or config.run.generate_samples
    if config.model.tokenizer is None and (is_source_missing or not needs_tokenizer):
        return None
    tokenizer = None
    with problems.collect():
        tokenizer = load_tokenizer(config, files.folder, run_model_dir)
        # A given model may have more tokens than rows of its embedding: gemma-3-1b has one more.
        # tokenize_dataset refuses those that occur.
        model = files.config if config.model.source is None else None
        if model is not None and len(tokenizer) > model.vocab_size:
            raise UserError(
                f"model.tokenizer: has {len(tokenizer):,} different tokens, but the model's "
                f"vocab_size is {model.vocab_size:,}. Set "
                f"model.config.vocab_size={len(tokenizer)}, or more."
            )
    return tokenizer


def load_tokenizer(
    config: Config, source: ModelFolder | None, run_model_dir: pathlib.Path | None
) -> "transformers.PreTrainedTokenizerBase":
    """Loads the tokenizer: the run's own copy, else model.tokenizer, else that of model.source.

    Raises: UserError if there is none.
    """
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
