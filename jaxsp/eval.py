"""jaxsp eval WHAT [key.path=value ...]: loss and accuracy on eval sets, and retrieval tasks.

Results of a run's checkpoint are appended to the run's eval.jsonl, tasks.jsonl and lm_eval.jsonl,
or to the file of --out.
"""

import importlib.util

from jaxsp import cli
from jaxsp.core.errors import UserError


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError with the problems of the input."""
    text = "Evaluates a model on data.eval, packed into rows as in training."
    parser = cli.make_parser("eval", text, takes="WHAT", is_multi_process=True)
    add = parser.add_argument
    text = "config to use; default: that of the run"
    add("--config", dest="config_path", metavar="CONFIG.yaml", help=text)
    text = "file that the results are appended to, with a plot of needles beside it; default: "
    text += "eval.jsonl, tasks.jsonl and needle.png of a local run"
    add("--out", metavar="FILE", help=text)
    text = "file of --out of another model, or its run: also print a table of differences"
    add("--baseline", metavar="FILE", help=text)
    group = parser.add_argument_group("lm-evaluation-harness (pip install 'jaxsp[lm-eval]')")
    add = group.add_argument
    add("--lm-eval", metavar="TASKS", help="its tasks to evaluate too, with commas between them")
    shots = "examples in prompts; default: the task's"
    text = "make prompts a chat, with examples as its turns, by data.chat_template and "
    text += "data.chat_template_kwargs; default: plain text"
    options = [
        add("--lm-eval-tasks", dest="folder", metavar="FOLDER", help="folder of more tasks"),
        add("--limit", type=int, metavar="N", help="records of each of its tasks; default: all"),
        add("--num-fewshot", type=int, metavar="N", help=shots),
        add("--apply-chat-template", action="store_true", default=None, help=text),
    ]
    values = cli.parse(parser, arguments)
    harness_options = {option.dest: values.pop(option.dest) for option in options}
    name = values["lm_eval"]
    for option in options:
        if name is None and harness_options[option.dest] is not None:
            flag = option.option_strings[0]
            raise UserError(f"{flag}: is for lm-evaluation-harness. Use it with --lm-eval TASK.")
    if name is not None and importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f"--lm-eval = {name}: needs lm-evaluation-harness, which is not installed. Use pip "
            "install 'jaxsp[lm-eval]'."
        )
    from jaxsp.run import eval_command  # imports jax

    eval_command.evaluate(**values, harness_options=harness_options)


if __name__ == "__main__":
    cli.run_command(main)
