"""Work of the command `jaxsp export`."""

import argparse
import pathlib
from typing import TYPE_CHECKING

import rich.console

from jaxsp.blocks.config import ModelConfig
from jaxsp.checkpoint import reader, run_paths, run_storage
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.core import urls
from jaxsp.core.errors import UserError, at
from jaxsp.data.chat import chat_template
from jaxsp.data.tokenization import tokenizers
from jaxsp.hf import folder, model_config, multimodal, peft
from jaxsp.hf.weights import check_target, export_model, open_other_parts
from jaxsp.model import adapters
from jaxsp.run import config_file, merging, resume, stop_tokens
from jaxsp.run import console as output
from jaxsp.run.config_file import Config
from jaxsp.system import jax_platform
from jaxsp.training import trainable

if TYPE_CHECKING:
    import transformers


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    if urls.is_url(args.out):
        raise UserError(f"OUT_DIR = {args.out}: must be a folder of this machine. Use hf.")
    check_target(args.out)
    jax_platform.choose_platform(virtual_cpu_devices=None)
    with at("RUN_OR_CHECKPOINT", args.run):
        checkpoint = run_paths.find_latest(run_storage.make_local(args.run))
        if checkpoint is None and not pathlib.Path(args.run).exists():
            raise UserError("there is no such folder.")
    if checkpoint is None:
        raise UserError(
            f"{args.run}: holds no checkpoint. Use a run's directory, or a folder in its "
            "checkpoints/."
        )
    meta = reader.read_meta(checkpoint)
    config: Config = config_file.parse(meta.config)
    with at("model.config"):
        model = model_config.parse_model_config(meta.model, row_tokens=config.data.row_tokens)
    model = adapters.add_adapter(model, config.adapter)
    if args.merge and model.lora is None:
        raise UserError(f"--merge: {args.run} has no adapter. Leave the flag out.")
    is_adapter = model.lora is not None and not args.merge
    if args.source is not None:
        has_other_parts = not is_adapter and multimodal.are_exported(meta.model)
        is_random = config.model.source is None
        reason = ""
        if not has_other_parts and is_random:
            reason = "started from random weights (model.config), not from a checkpoint"
        elif not has_other_parts and not config.step.has_frozen_weights:
            reason = "has all weights of the export in its checkpoint"
        if reason:
            raise UserError(f"--source = {args.source}: {args.run} {reason}. Leave it out.")
        if not is_random:  # a run from random weights keeps them
            config = config.with_fields(model={"source": args.source})
    console = rich.console.Console(markup=False)
    export = _export_adapter if is_adapter else _export_model
    for line in export(args, checkpoint, meta, config, model):
        output.print_line(console, line)


def _export_adapter(
    args: argparse.Namespace,
    checkpoint: pathlib.Path,
    meta: CheckpointMeta,
    config: Config,
    model: ModelConfig,
) -> list[str]:
    """Exports the adapters in PEFT's format, and returns the lines to print."""
    if args.dtype == "bfloat16":
        raise UserError("--dtype = bfloat16: adapters are float32. Use --merge, or leave it out.")
    table = trainable.build_table(model, config.step)
    model_dir = resume.find_model_dir(checkpoint)
    peft.save_adapter(
        reader.read_weights(checkpoint, table),
        table=trainable.select_trained(table, table),
        adapter=config.adapter,
        model=model,
        base=config.model.source,
        directory=args.out,
        is_multimodal=model_dir is not None and multimodal.is_multimodal(model_dir),
        small_files=model_dir,
    )
    write_chat_template(config, pathlib.Path(args.out))
    lines = [f"{args.run}, step {meta.step} -> {args.out} (adapter, float32)"]
    tokenizer = _check_tokenizer(args.out, lines)
    if meta.model.get("eos_token_id") is not None and not model.has_scores:
        stops = stop_tokens.describe(meta.model["eos_token_id"], tokenizer)
        lines.append(f"PEFT stops at the end tokens of the base; give generate() {stops}")
    if config.model.source is None:
        return [*lines, "it belongs to random weights (model.config), which are in no file"]
    if (quantization := config.adapter.quantization) != "none":
        lines.append(
            f"it was trained on the base in {quantization}: on the unquantized base its outputs "
            "differ; --merge exports a model that keeps them"
        )
    auto_class = model_config.find_auto_class(meta.model)
    arguments = repr(str(args.out))
    if model.has_scores:
        arguments += ", num_labels=1"
    loader = f"peft.AutoPeft{auto_class.removeprefix('Auto')}.from_pretrained({arguments})"
    if multimodal.are_exported(meta.model):  # PEFT's class loads models for text only
        base = f"transformers.{auto_class}.from_pretrained({config.model.source!r})"
        loader = f"peft.PeftModel.from_pretrained({base}, {str(args.out)!r})"
    text = f"load it with {loader}, which needs PyTorch; --merge exports the whole model instead"
    return [*lines, text]


def _export_model(
    args: argparse.Namespace,
    checkpoint: pathlib.Path,
    meta: CheckpointMeta,
    config: Config,
    model: ModelConfig,
) -> list[str]:
    """Exports the whole model, and returns the lines to print.

    Weights are written in the run's compute dtype by default, as used for its losses.
    """
    out = pathlib.Path(args.out)
    parts = None
    has_other_parts = multimodal.are_exported(meta.model)
    if has_other_parts and args.source is not None:
        parts = open_other_parts(folder.find(args.source, field="--source"), model)
    elif has_other_parts:
        suggestion = (
            f"The export of {meta.model['model_type']} copies the other parts of a multimodal "
            "checkpoint: name its folder with --source."
        )
        if config.model.source is None:
            raise UserError(f"{args.run}: started from random weights (model.config). {suggestion}")
        try:
            source = folder.find(config.model.source)
        except UserError as error:
            raise UserError([f"{problem} {suggestion}" for problem in error.problems]) from None
        parts = open_other_parts(source, model)
    table = trainable.build_table(model, config.step)
    weights = reader.read_weights(checkpoint, table)
    if config.step.has_frozen_weights:
        table, weights = merging.merge_base(checkpoint, weights, config=config, model=model)
    model_dir = resume.find_model_dir(checkpoint)
    tokenizer = None
    small_files = None
    name = config.model.tokenizer
    if model_dir is not None and (model_dir / "config.json").is_file():
        small_files = model_dir  # everything that model.source had besides its weights
    else:
        if model_dir is not None and name != tokenizers.BYTE_TOKENIZER:
            has_tokenizer = (model_dir / "tokenizer_config.json").is_file()
            name = str(model_dir) if has_tokenizer else None
        if name is not None:
            with at("model.tokenizer", name):
                tokenizer = tokenizers.load(name)
    dtype = args.dtype or config.model.compute_dtype
    export_model(
        weights,
        table=table,
        fields=meta.model,
        tokenizer=tokenizer,
        small_files=small_files,
        directory=out,
        dtype=dtype,
        other_parts=parts,
    )
    write_chat_template(config, out)
    lines = [f"{args.run}, step {meta.step} -> {out} ({dtype})"]
    tokenizer = _check_tokenizer(out, lines)
    generation = folder.read_json(out / stop_tokens.GENERATION_CONFIG)
    if generation.get("eos_token_id") is not None and not model.has_scores:
        stops = stop_tokens.describe(generation["eos_token_id"], tokenizer)
        lines.append(f"generation stops at {stops}")
    if parts is not None:
        count = len(parts.tensors)
        lines.append(f"{count:,} tensors of other parts are copies of those of {parts.source.path}")
    auto_class = model_config.find_auto_class(meta.model)
    lines.append(
        f"load it with transformers.{auto_class}.from_pretrained({str(out)!r}), which needs PyTorch"
    )
    return lines


def write_chat_template(config: Config, directory: pathlib.Path) -> None:
    """Writes the run's chat template, so that chats are rendered as in training."""
    template = config.data.chat_template
    if config.data.chat_template_kwargs and (directory / "tokenizer_config.json").is_file():
        with at(str(directory)):
            tokenizer = tokenizers.load(str(directory))
        template = chat_template.load_template(config.data, tokenizer)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _check_tokenizer(
    directory: str | pathlib.Path, lines: list[str]
) -> "transformers.PreTrainedTokenizerBase | None":
    """Loads the tokenizer of an export, if it has one. Adds to `lines` why it cannot be loaded."""
    if not pathlib.Path(directory, "tokenizer_config.json").is_file():
        return None
    try:
        with at(str(directory)), at("its tokenizer"):
            return tokenizers.load(str(directory))
    except UserError as error:  # training on token ids did not need it
        lines.append(str(error))
        return None
