"""Work of the command `jaxsp export`."""

import pathlib
from typing import Literal

from jaxsp.blocks.config import ModelConfig
from jaxsp.checkpoint import reader, run_paths, run_storage
from jaxsp.core import files
from jaxsp.core.errors import UserError, at
from jaxsp.data import chat_template, tokenizers
from jaxsp.hf import folder, model_config, multimodal, peft
from jaxsp.hf.weights import WeightReader, check_target, export_model, open_other_parts
from jaxsp.model import adapters
from jaxsp.run import config_file, merging, model_files, resume, stop_tokens
from jaxsp.run.config_file import Config
from jaxsp.system import jax_platform
from jaxsp.training import specs, train_state


def export(
    *,
    run: str,
    out: str,
    merge: bool,
    source: str | None,
    dtype: Literal["bfloat16", "float32"] | None,
) -> list[str]:
    """Exports a model, or the adapters of a run in PEFT's format: see `jaxsp export --help`.

    Returns: lines to print. Raises: UserError with the problems of the input.
    """
    if files.is_url(out):
        raise UserError(f"OUT_DIR = {out}: must be a folder of this machine. Use hf.")
    directory = pathlib.Path(out)
    check_target(directory)
    jax_platform.choose_platform(virtual_cpu_devices=None)
    with at("RUN_OR_CHECKPOINT", run):
        checkpoint = run_paths.find_latest(run_storage.make_local(run))
        if checkpoint is None and not pathlib.Path(run).exists():
            raise UserError("there is no such folder.")
    if checkpoint is None:
        raise UserError(
            f"{run}: holds no checkpoint. Use a run's directory, or a folder in its checkpoints/."
        )
    meta = reader.read_meta(checkpoint)
    config = config_file.parse(meta.config)
    with at("model.config"):
        model = model_config.parse_model_config(meta.model, row_tokens=config.data.row_tokens)
    model = adapters.add_adapter(model, config.adapter)
    if merge and model.lora is None:
        raise UserError(f"--merge: {run} has no adapter. Leave the flag out.")
    is_adapter = model.lora is not None and not merge
    if is_adapter and dtype == "bfloat16":
        raise UserError("--dtype = bfloat16: adapters are float32. Use --merge, or leave it out.")
    dtype = dtype or config.model.compute_dtype
    has_other_parts = multimodal.are_exported(meta.model)
    copies_parts = has_other_parts and not is_adapter
    if source is not None:
        reason = ""
        if config.model.source is None:
            reason = "started from random weights (model.config), not from a checkpoint"
        elif not config.step.has_frozen_weights:
            reason = "has all weights of the export in its checkpoint"
        if reason and not copies_parts:
            raise UserError(f"--source = {source}: {run} {reason}. Leave it out.")
        if config.model.source is not None:  # a run from random weights keeps them
            config = config.with_fields(model={"source": source})
    parts = None
    if copies_parts:
        parts = _open_other_parts(run, source, config, model, kind=meta.model["model_type"])
    table = specs.build_table(model, config.step)
    weights = reader.read_weights(checkpoint, table)
    model_dir = resume.find_model_dir(checkpoint)
    if is_adapter:
        peft.save_adapter(
            weights,
            table=train_state.select_trained(table, table),
            adapter=config.adapter,
            model=model,
            base=config.model.source,
            directory=directory,
            is_multimodal=model_dir is not None and multimodal.is_multimodal(model_dir),
            small_files=model_dir,
        )
    else:
        if config.step.has_frozen_weights:
            table, weights = merging.merge_base(checkpoint, weights, config=config, model=model)
        # the run's copy has everything that model.source had besides its weights
        is_complete = model_dir is not None and (model_dir / "config.json").is_file()
        tokenizer = None
        if not is_complete and config.model.tokenizer is not None:
            tokenizer = model_files.load_tokenizer(config, None, model_dir)
        export_model(
            weights,
            table=table,
            fields=meta.model,
            tokenizer=tokenizer,
            small_files=model_dir if is_complete else None,
            directory=directory,
            dtype=dtype,
            other_parts=parts,
        )
    write_chat_template(config, directory)
    kind = "adapter, float32" if is_adapter else dtype
    lines = [f"{run}, step {meta.step} -> {directory} ({kind})"]
    tokenizer = None
    if (directory / "tokenizer_config.json").is_file():
        try:
            with at(str(directory)), at("its tokenizer"):
                tokenizer = tokenizers.load(str(directory))
        except UserError as error:  # training on token ids did not need it
            lines.append(str(error))
    fields = meta.model
    stop = "PEFT stops at the end tokens of the base; give generate()"
    if not is_adapter:
        fields = folder.read_json(directory / stop_tokens.GENERATION_CONFIG)
        stop = "generation stops at"
    if fields.get("eos_token_id") is not None and not model.has_scores:
        lines.append(f"{stop} {stop_tokens.describe(fields['eos_token_id'], tokenizer)}")
    if parts is not None:
        text = f"{len(parts.tensors):,} tensors of other parts are copies of those of "
        lines.append(f"{text}{parts.source.path}")
    if is_adapter and config.model.source is None:
        return [*lines, "it belongs to random weights (model.config), which are in no file"]
    quantization = config.adapter.quantization
    if is_adapter and quantization != "none":
        lines.append(
            f"it was trained on the base in {quantization}: on the unquantized base its outputs "
            "differ; --merge exports a model that keeps them"
        )
    path = repr(str(directory))
    auto_class = model_config.find_auto_class(meta.model)
    loader = f"transformers.{auto_class}.from_pretrained({path})"
    if is_adapter and has_other_parts:  # PEFT's own class loads models for text only
        base = f"transformers.{auto_class}.from_pretrained({config.model.source!r})"
        loader = f"peft.PeftModel.from_pretrained({base}, {path})"
    elif is_adapter:
        arguments = f"{path}, num_labels=1" if model.has_scores else path
        loader = f"peft.AutoPeft{auto_class.removeprefix('Auto')}.from_pretrained({arguments})"
    text = f"load it with {loader}, which needs PyTorch"
    return [*lines, f"{text}; --merge exports the whole model instead" if is_adapter else text]


def _open_other_parts(
    name: str, source: str | None, config: Config, model: ModelConfig, *, kind: str
) -> WeightReader:
    """Opens the other parts of the multimodal checkpoint that a run started from."""
    if source is not None:
        return open_other_parts(folder.find(source, field="--source"), model)
    suggestion = (
        f"The export of {kind} copies the other parts of a multimodal checkpoint: name its folder "
        "with --source."
    )
    if config.model.source is None:
        raise UserError(f"{name}: started from random weights (model.config). {suggestion}")
    try:
        found = folder.find(config.model.source)
    except UserError as error:
        raise UserError([f"{problem} {suggestion}" for problem in error.problems]) from None
    return open_other_parts(found, model)


def write_chat_template(config: Config, directory: pathlib.Path) -> None:
    """Writes the run's chat template, so that chats are rendered as in training."""
    template = config.data.chat_template
    if config.data.chat_template_kwargs and (directory / "tokenizer_config.json").is_file():
        with at(str(directory)):
            tokenizer = tokenizers.load(str(directory))
        template = chat_template.load_template(config.data, tokenizer)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
