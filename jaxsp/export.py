"""jaxsp export RUN_OR_CHECKPOINT OUT_DIR: exports weights to Hugging Face format."""

from jaxsp import cli


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError with the problems of the input."""
    text = "Exports a run's weights to a Hugging Face folder, or its adapters to PEFT's."
    parser = cli.make_parser("export", text)
    add = parser.add_argument
    text = "a run's directory (its latest checkpoint), or a checkpoint; also as a URL"
    add("run", metavar="RUN_OR_CHECKPOINT", help=text)
    add("out", metavar="OUT_DIR", help="folder to create; must not exist, or be empty")
    text = "adds the adapters of a LoRA run to the base, and exports the whole model"
    add("--merge", action="store_true", help=text)
    text = "the checkpoint that the run started from, if it is no longer at model.source; only "
    text += "with adapters, frozen weights, and multimodal models that are exported whole"
    add("--source", metavar="FOLDER_OR_NAME", help=text)
    text = "dtype of a model's weights; default: the run's compute_dtype"
    add("--dtype", choices=("bfloat16", "float32"), help=text)
    values = cli.parse(parser, arguments)
    # these import jax
    import rich.console

    from jaxsp.run import console, export_command

    for line in export_command.export(**values):
        console.print_line(rich.console.Console(markup=False), line)


if __name__ == "__main__":
    cli.run_command(main)
