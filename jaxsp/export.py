"""python -m jaxsp.export RUN_OR_CHECKPOINT OUT_DIR: makes a Hugging Face folder of a run's weights."""

import pathlib

import rich.console

from jaxsp import cli
from jaxsp.core import config, errors
from jaxsp.core import mesh as meshes
from jaxsp.data import text
from jaxsp.hf import families, weights
from jaxsp.model import decoder
from jaxsp.training import checkpoint


def main(arguments: list[str]) -> None:
    """The command. Weights are written in the run's compute dtype, which is what its losses were computed with."""
    parser = cli.parser("export", "Makes a Hugging Face folder of a run's weights.")
    parser.add_argument("run", metavar="RUN_OR_CHECKPOINT", help="a run's directory (its newest checkpoint), or a checkpoint")
    parser.add_argument("out", metavar="OUT_DIR", help="the folder to make; must not exist, or be empty")
    given = parser.parse_args(arguments)
    out = pathlib.Path(given.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):  # before the weights are read
        raise errors.UserError(f"{out}: exists already. Name a new or an empty folder, or remove it.")
    meshes.choose_platform(virtual_cpu_devices=None)
    found = checkpoint.latest(given.run)
    settings = config.parse(checkpoint.read_meta(found)["config"])
    table = decoder.table(families.model_config(settings.model.config, field="model.config"))
    tokenizer = None if settings.model.tokenizer is None else text.load_tokenizer(settings.model.tokenizer)
    try:
        master = checkpoint.read_weights(found, table)
    except (ValueError, OSError) as error:  # what orbax raises for files that are missing or cut short
        reason = str(error).split(" [")[0].splitlines()[0]
        raise errors.UserError(f"{found}: the checkpoint cannot be read: {reason}") from error
    weights.export(
        master,
        table=table,
        fields=settings.model.config,
        tokenizer=tokenizer,
        directory=out,
        dtype=settings.model.compute_dtype,
    )
    console = rich.console.Console()
    console.print(f"{given.run}, step {found.name} -> {out} ({settings.model.compute_dtype})", highlight=False, soft_wrap=True)
    if tokenizer is not None and not text.loads_as(tokenizer, out):
        console.print(
            f"transformers' AutoTokenizer takes another class for {settings.model.config['model_type']} and reads this "
            f"tokenizer wrongly; load it with transformers.PreTrainedTokenizerFast.from_pretrained({str(out)!r})",
            soft_wrap=True,
        )
    console.print(
        f"load it with transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})", highlight=False, soft_wrap=True
    )


if __name__ == "__main__":
    cli.run(main)
