"""jaxsp generate WHAT --prompt TEXT [key.path=value ...]: continues a text or answers a chat."""

from jaxsp import cli


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError with the problems of the input."""
    text = "Continues a text, or answers a question of a chat, and prints the tokens as they come."
    parser = cli.make_parser("generate", text, takes="WHAT", is_multi_process=True)
    group = parser.add_mutually_exclusive_group(required=True)
    add = group.add_argument
    add("--prompt", metavar="TEXT", help="text to continue")
    add("--prompt-file", metavar="FILE", help="file with the text to continue")
    add("--chat", metavar="TEXT", help="message of a user to answer, in the chat template")
    add = parser.add_argument
    add("--system", metavar="TEXT", help="system message before that of --chat")
    text = "maximum number of tokens of the answer; default: 128"
    add("--max-new-tokens", metavar="N", type=int, default=128, help=text)
    text = "divisor of the logits of samples; default: 0, the likeliest tokens"
    add("--temperature", metavar="T", type=float, default=0.0, help=text)
    text = "samples come from the likeliest tokens with at least this probability; default: 1"
    add("--top-p", metavar="P", type=float, default=1.0, help=text)
    add("--seed", metavar="S", type=int, default=0, help="seed of samples; default: 0")
    values = cli.parse(parser, arguments)
    from jaxsp.run import generate_command  # imports jax

    generate_command.generate(**values)


if __name__ == "__main__":
    cli.run_command(main)
