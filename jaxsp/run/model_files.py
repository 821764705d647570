"""Files of a config's model: config.json, tokenizer and weights."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxsp.config.schema import Config
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.data.tokenization import tokenizers
from jaxsp.hf import folder, model_config, weights
from jaxsp.hf.folder import ModelFolder
from jaxsp.model import decoder, layers
from jaxsp.model.config import ModelConfig
from jaxsp.run.data_sets import OpenedSources
from jaxsp.training import weight_init
from jaxsp.training.program import Program

if TYPE_CHECKING:
    import transformers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """Model of a config, as far as it could be read."""

    folder: ModelFolder | None = None
    """Folder of model.source; None if the model is described by the config or a checkpoint."""
    hf_config: dict[str, Any] | None = None
    config: ModelConfig | None = None
    """None if the folder or the family has a problem."""


def read_model(
    config: Config, hf_config: dict[str, Any] | None, problems: ProblemCollector
) -> ModelFiles:
    """Reads the model's config.json, changes its RoPE, and checks local weight files."""
    files = ModelFiles()
    with problems.collect():
        source = None
        if hf_config is None and config.model.source is not None:
            source = folder.find(config.model.source)
            hf_config = source.config_fields
        hf_config = hf_config or config.model.config
        assert hf_config is not None, "the schema requires one of them"
        files = ModelFiles(folder=source, hf_config=hf_config)
        field = str(source.path / "config.json") if source else "model.config"
        hf_config = model_config.resolve_fields(hf_config, config.model, field=field)
        files = dataclasses.replace(files, hf_config=hf_config)
        model = model_config.parse_model_config(
            hf_config, field=field, row_tokens=config.data.max_row_tokens
        )
        files = dataclasses.replace(files, config=model)
        if source is not None and not source.is_on_hub:
            weights.open_folder(source, decoder.param_table(model))
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
    if config.model.tokenizer is None and (is_source_missing or not opened.have_text):
        return None
    tokenizer = None
    with problems.collect():
        tokenizer = load_tokenizer(config, files.folder, run_model_dir)
        if files.config is not None and len(tokenizer) > files.config.vocab_size:
            suggestion = f"Set model.config.vocab_size={len(tokenizer)}, or more."
            if config.model.source is not None:
                suggestion = "Use the model's own tokenizer: model.tokenizer=null."
            raise UserError(
                f"model.tokenizer: has {len(tokenizer):,} different tokens, but the model's "
                f"vocab_size is {files.config.vocab_size:,}. {suggestion}"
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
            return tokenizers.load(str(run_model_dir))
    if name is not None:
        return tokenizers.load(name)
    if source is None:
        raise UserError(
            "model.tokenizer = null: text needs one. Use bytes, or a folder or hub name."
        )
    return tokenizers.load(
        str(source.path), error_prefix=f"model.source = {source.source}: its tokenizer"
    )


def make_weight_loader(
    program: Program, source: ModelFolder
) -> tuple[Callable[[], layers.Weights], str]:
    """Function that loads a Hugging Face folder's weights onto the program's mesh.

    The files are checked now, and downloaded first if they are on the hub.

    Returns: the function, and a description of tensors that it does not read; empty if it reads
        all.
    Raises: UserError for tensors and files that are missing, damaged or of another model.
    """
    reader = weights.open_folder(source, program.table)
    load = functools.partial(
        weight_init.load_weights,
        program.table,
        program.mesh,
        reader.read,
        is_on_host=program.is_on_host,
    )
    return load, reader.left_out
