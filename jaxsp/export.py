"""jaxsp export RUN_OR_CHECKPOINT OUT_DIR: exports weights to Hugging Face format."""

import argparse

from jaxsp import cli


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError with the problems of the input."""
    args = _make_parser().parse_args(arguments)
    from jaxsp.run import export_command  # imports jax

    export_command.run(args)


def _make_parser() -> argparse.ArgumentParser:
    parser = cli.make_parser(
        "export", "Exports a run's weights to a Hugging Face folder, or its adapters to PEFT's."
    )
    parser.add_argument(
        "run",
        metavar="RUN_OR_CHECKPOINT",
        help="a run's directory (its latest checkpoint), or a checkpoint; also as a URL",
    )
    parser.add_argument(
        "out", metavar="OUT_DIR", help="folder to create; must not exist, or be empty"
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="adds the adapters of a LoRA run to the base, and exports the whole model",
    )
    parser.add_argument(
        "--source",
        metavar="FOLDER_OR_NAME",
        help="the checkpoint that the run started from, if it is no longer at model.source; only "
        "with adapters, frozen weights, and multimodal models that are exported whole",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="dtype of a model's weights; default: the run's compute_dtype",
    )
    return parser


if __name__ == "__main__":
    cli.run_command(main)
