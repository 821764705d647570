"""python -m jaxsp.export RUN_OR_CHECKPOINT OUT_DIR: exports weights to Hugging Face format."""

import argparse
import pathlib
from typing import TYPE_CHECKING

import rich.console

from jaxsp import cli
from jaxsp.checkpoint import reader
from jaxsp.config import config_file
from jaxsp.config.schema import Config
from jaxsp.core import urls
from jaxsp.core.errors import UserError
from jaxsp.data.tokenization import tokenizers
from jaxsp.hf import model_config, writer
from jaxsp.model import decoder
from jaxsp.run import resume
from jaxsp.runtime import jax_platform, run_paths
from jaxsp.storage import copies

if TYPE_CHECKING:
    import transformers


def main(arguments: list[str]) -> None:
    """Runs the command. Weights are written in the run's compute dtype, as used for its losses."""
    args = _make_parser().parse_args(arguments)
    if urls.is_url(args.out):
        raise UserError(f"OUT_DIR = {args.out}: must be a folder of this machine. Use hf.")
    out = pathlib.Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: already exists. Use a new or empty folder, or remove it.")
    jax_platform.choose_platform(virtual_cpu_devices=None)
    checkpoint = run_paths.find_latest(copies.make_local(args.run, field="RUN_OR_CHECKPOINT"))
    if checkpoint is None:
        raise UserError(
            f"{args.run}: holds no checkpoint. Use a run's directory, or a folder in its "
            "checkpoints/."
        )
    copies.fetch(checkpoint)
    meta = reader.read_meta(checkpoint)
    config = config_file.parse(meta.config)
    table = decoder.param_table(model_config.parse_model_config(meta.model, field="model.config"))
    model_dir = resume.find_model_dir(checkpoint)
    tokenizer = None
    small_files = None
    if model_dir is not None and (model_dir / "config.json").is_file():
        small_files = model_dir  # everything that model.source had besides its weights
    else:
        tokenizer = _load_tokenizer(config, model_dir)
    dtype = args.dtype or config.model.compute_dtype
    writer.export_model(
        reader.read_weights(checkpoint, table),
        table=table,
        fields=meta.model,
        tokenizer=tokenizer,
        small_files=small_files,
        directory=out,
        dtype=dtype,
    )
    if config.data.chat_template is not None:  # chats must be rendered as in training
        (out / "chat_template.jinja").write_text(config.data.chat_template, encoding="utf-8")
    lines = [f"{args.run}, step {meta.step} -> {out} ({dtype})"]
    if tokenizer is not None and not tokenizers.is_loaded_unchanged(tokenizer, out):
        lines.append(
            f"transformers' AutoTokenizer uses another class for {meta.model['model_type']} and "
            "reads this tokenizer wrongly; load it with "
            f"transformers.PreTrainedTokenizerFast.from_pretrained({str(out)!r})"
        )
    lines.append(
        f"load it with transformers.AutoModelForCausalLM.from_pretrained({str(out)!r}), "
        "which needs PyTorch"
    )
    console = rich.console.Console(markup=False)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _make_parser() -> argparse.ArgumentParser:
    parser = cli.make_parser("export", "Exports a run's weights to a Hugging Face folder.")
    parser.add_argument(
        "run",
        metavar="RUN_OR_CHECKPOINT",
        help="a run's directory (its latest checkpoint), or a checkpoint; also as a URL",
    )
    parser.add_argument(
        "out", metavar="OUT_DIR", help="folder to create; must not exist, or be empty"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="dtype of the weights; default: the run's compute_dtype",
    )
    return parser


def _load_tokenizer(
    config: Config, model_dir: pathlib.Path | None
) -> "transformers.PreTrainedTokenizerBase | None":
    """Loads the run's tokenizer from its model folder, else by name; None if it read token ids."""
    name = config.model.tokenizer
    if model_dir is not None and name != tokenizers.BYTE_TOKENIZER:
        has_tokenizer = (model_dir / "tokenizer_config.json").is_file()
        return tokenizers.load(str(model_dir)) if has_tokenizer else None
    return None if name is None else tokenizers.load(name)


if __name__ == "__main__":
    cli.run_command(main)
