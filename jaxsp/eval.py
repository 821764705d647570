"""jaxsp eval WHAT [key.path=value ...]: loss and accuracy on eval sets, and retrieval tasks.

Results of a run's checkpoint are appended to the run's eval.jsonl, tasks.jsonl and lm_eval.jsonl,
or to the file of --out.
"""

import argparse

from jaxsp import cli


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError with the problems of the input."""
    args = _make_parser().parse_intermixed_args(arguments)
    from jaxsp.run import eval_command  # imports jax

    eval_command.run(args)


def _make_parser() -> argparse.ArgumentParser:
    parser = cli.make_parser(
        "eval",
        "Evaluates a model on data.eval, packed into rows as in training.",
        config_help="sections",
        is_multi_process=True,
    )
    cli.add_model_arguments(parser)
    parser.add_argument(
        "--config",
        metavar="CONFIG.yaml",
        help="config to use; default: that of the run",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="file that the results are appended to, with a plot of needles beside it; default: "
        "eval.jsonl, tasks.jsonl and needle.png of a local run",
    )
    parser.add_argument(
        "--baseline",
        metavar="FILE",
        help="file of --out of another model, or its run: also print a table of differences",
    )
    group = parser.add_argument_group("lm-evaluation-harness (pip install 'jaxsp[lm-eval]')")
    group.add_argument(
        "--lm-eval", metavar="TASKS", help="its tasks to evaluate too, with commas between them"
    )
    group.add_argument("--lm-eval-tasks", metavar="FOLDER", help="folder of more tasks")
    group.add_argument(
        "--limit", type=int, metavar="N", help="records of each of its tasks; default: all"
    )
    group.add_argument(
        "--num-fewshot", type=int, metavar="N", help="examples in prompts; default: the task's"
    )
    group.add_argument(
        "--apply-chat-template",
        action="store_true",
        default=None,
        help="make prompts a chat, with examples as its turns, by data.chat_template and "
        "data.chat_template_kwargs; default: plain text",
    )
    return parser


if __name__ == "__main__":
    cli.run_command(main)
