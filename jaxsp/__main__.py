"""Command `jaxsp`: starts the command that it is given, such as `jaxsp train CONFIG.yaml`."""

import importlib
import sys

from jaxsp.core import errors

_COMMANDS = {
    "train": "trains a model and writes a run directory",
    "plan": "plans memory, time and traffic of a run, without a GPU",
    "eval": "computes loss and perplexity of a run or a model",
    "generate": "continues a text or answers a question with a run or a model",
    "score": "writes a teacher's predictions for the data of a distillation",
    "export": "writes a run's weights as a Hugging Face folder",
    "report": "writes one HTML page about one run or several",
    "benchmark": "times steps of a config on this machine",
    "convert": "writes a config from one of another system",
}
"""Description of each command."""

_MODULES = {"plan": "plan_cli"}  # jaxsp.plan is a function
_HELP = "jaxsp COMMAND --help documents a command, jaxsp train --help data a section of the config."


def main() -> None:
    """Runs the command line of this process; without a command, lists them all."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        lines = [f"  {command_name:<11}{text}" for command_name, text in _COMMANDS.items()]
        print("usage: jaxsp COMMAND ...", "", *lines, "", _HELP, sep="\n", flush=True)
    elif name in _COMMANDS:
        from jaxsp import cli

        sys.argv = [f"jaxsp {name}", *arguments]
        cli.run_command(importlib.import_module(f"jaxsp.{_MODULES.get(name, name)}").main)
    else:
        nearest = errors.find_nearest(name, _COMMANDS)
        suggestion = errors.format_choices([nearest] if nearest else _COMMANDS)
        print(errors.escape(f"jaxsp {name}: no such command. Use {suggestion}."), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
