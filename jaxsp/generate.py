"""jaxsp generate WHAT --prompt TEXT [key.path=value ...]: continues a text or answers a chat."""

import argparse

from jaxsp import cli


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError with the problems of the input."""
    args = _make_parser().parse_intermixed_args(arguments)
    from jaxsp.run import generate_command  # imports jax

    generate_command.run(args)


def _make_parser() -> argparse.ArgumentParser:
    parser = cli.make_parser(
        "generate",
        "Continues a text, or answers a question of a chat, and prints the tokens as they come.",
        config_help="sections",
        is_multi_process=True,
    )
    cli.add_model_arguments(parser)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--prompt", metavar="TEXT", help="text to continue")
    group.add_argument("--prompt-file", metavar="FILE", help="file with the text to continue")
    group.add_argument(
        "--chat", metavar="TEXT", help="message of a user to answer, in the chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message before that of --chat")
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=int,
        default=128,
        help="maximum number of tokens of the answer; default: 128",
    )
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        default=0.0,
        help="divisor of the logits of samples; default: 0, the likeliest tokens",
    )
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        default=1.0,
        help="samples come from the likeliest tokens with at least this probability; default: 1",
    )
    parser.add_argument(
        "--seed", metavar="S", type=int, default=0, help="seed of samples; default: 0"
    )
    return parser


if __name__ == "__main__":
    cli.run_command(main)
