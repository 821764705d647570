"""python -m jaxsp.export RUN_OR_CHECKPOINT OUT_DIR: makes a Hugging Face folder of a run's weights."""

import pathlib
from typing import TYPE_CHECKING

import rich.console

from jaxsp import cli
from jaxsp.checkpoint import reader
from jaxsp.config import config_file
from jaxsp.config.schema import Config
from jaxsp.core.errors import UserError
from jaxsp.data.tokenization import tokenizers
from jaxsp.hf import families, weights
from jaxsp.model import decoder
from jaxsp.run import resume
from jaxsp.runtime import jax_platform, run_paths

if TYPE_CHECKING:
    import transformers


def main(arguments: list[str]) -> None:
    """The command. Weights are written in the run's compute dtype, which is what its losses were computed with."""
    parser = cli.make_parser("export", "Makes a Hugging Face folder of a run's weights.")
    parser.add_argument(
        "run",
        metavar="RUN_OR_CHECKPOINT",
        help="a run's directory (its newest checkpoint), or a checkpoint",
    )
    parser.add_argument(
        "out", metavar="OUT_DIR", help="the folder to make; must not exist, or be empty"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of the weights; default: the run's compute_dtype",
    )
    given = parser.parse_args(arguments)
    out = pathlib.Path(given.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):  # before the weights are read
        raise UserError(f"{out}: exists already. Name a new or an empty folder, or remove it.")
    jax_platform.choose_platform(virtual_cpu_devices=None)
    found = run_paths.find_latest(given.run)
    if found is None:
        raise UserError(
            f"{given.run}: holds no checkpoint. Give a run's directory, or a folder in its checkpoints/."
        )
    meta = reader.read_meta(found)
    config = config_file.parse(meta.config)
    table = decoder.param_table(families.parse_model_config(meta.model, field="model.config"))
    kept = resume.find_model_dir(found)
    # all that model.source had beside its weights, not a tokenizer alone
    is_whole = kept is not None and (kept / "config.json").is_file()
    tokenizer = None if is_whole else _load_tokenizer(config, kept)
    dtype = given.dtype or config.model.compute_dtype
    master = reader.read_weights(found, table)
    weights.export_model(
        master,
        table=table,
        fields=meta.model,
        tokenizer=tokenizer,
        small_files=kept if is_whole else None,
        directory=out,
        dtype=dtype,
    )
    if (
        config.data.chat_template is not None
    ):  # what was learned is what a chat has to be written like
        (out / "chat_template.jinja").write_text(config.data.chat_template, encoding="utf-8")
    console = rich.console.Console(markup=False)
    console.print(
        f"{given.run}, step {meta.step} -> {out} ({dtype})", highlight=False, soft_wrap=True
    )
    if tokenizer is not None and not tokenizers.is_loaded_unchanged(tokenizer, out):
        console.print(
            f"transformers' AutoTokenizer takes another class for {meta.model['model_type']} and reads this "
            f"tokenizer wrongly; load it with transformers.PreTrainedTokenizerFast.from_pretrained({str(out)!r})",
            soft_wrap=True,
        )
    console.print(
        f"load it with transformers.AutoModelForCausalLM.from_pretrained({str(out)!r}), which needs PyTorch",
        highlight=False,
        soft_wrap=True,
    )


def _load_tokenizer(
    config: Config, kept: pathlib.Path | None
) -> "transformers.PreTrainedTokenizerBase | None":
    """The run's tokenizer, from where it is kept, else by its name; None where training read tokens."""
    named = config.model.tokenizer
    if named != tokenizers.BYTE_TOKENIZER and kept is not None:
        return tokenizers.load(str(kept)) if (kept / "tokenizer_config.json").is_file() else None
    return None if named is None else tokenizers.load(named)


if __name__ == "__main__":
    cli.run_command(main)
