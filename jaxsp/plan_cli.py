"""jaxsp plan CONFIG.yaml [key.path=value ...]: memory, traffic and time of a run on absent GPUs."""

import math
import pathlib
import re
from typing import Any

from jaxsp import cli
from jaxsp.core import files
from jaxsp.core.errors import ProblemCollector
from jaxsp.planning import gpus
from jaxsp.run import config_file

_NUMBERS = ("--devices", "--node-devices", "--host-gib", "--document-tokens", "--tokens")
"""Flags with a positive number."""

_DEVICE_TYPE = re.compile(r"[a-z]+\d[\w-]*")
"""Matches names of GPUs, known or not, and neither file.yaml nor key.path=value."""


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError for what training would refuse, conflicting flags."""
    values = parse_arguments(arguments)
    config = config_file.load(values.pop("config"), values.pop("changes"))
    json_file = values.pop("json")
    from jaxsp.run import plan_command  # imports jax

    result = plan_command.plan(config, **values)
    if json_file:
        cli.write_output(json_file, files.to_json(result), flag="--json")
        print(f"written: {json_file}")


def parse_arguments(arguments: list[str]) -> dict[str, Any]:
    """Parses the command line. Raises: UserError for invalid numbers and conflicting flags."""
    text = "Compiles a config's training step for absent GPUs, and prints its memory, traffic and "
    parser = cli.make_parser("plan", f"{text}estimated time.", takes="CONFIG.yaml")
    add = parser.add_argument
    text = f"one or more of {', '.join(gpus.GPUS)} (default: h100-80gb); compares several in a "
    add("--device", metavar="KIND [KIND ...]", action="append", help=f"{text}table")
    text = "number of GPUs; default: the product of the mesh, with data=-1 filling a node of 8"
    add("--devices", metavar="N", type=int, help=text)
    text = "GPUs per node; default: 8, or all if there are fewer"
    add("--node-devices", metavar="N", type=int, help=text)
    text = "host memory of a node; default: 250 per GPU"
    add("--host-gib", metavar="GIB", type=float, help=text)
    text = "length of the documents that fill a row, for the time; default: the whole row"
    add("--document-tokens", metavar="N", type=int, help=text)
    text = "tokens to train on, such as 10e9, for GPU-hours and days; default: all steps"
    add("--tokens", metavar="N", type=float, help=text)
    text = "reads data.train, and prints its rows and steps, from which the cost follows"
    add("--data", action="store_true", help=text)
    mode = parser.add_mutually_exclusive_group()
    parser.set_defaults(mode="step")
    modes = {"longest": "finds the longest row that fits"}
    modes["meshes"] = "plans every mesh of these devices, and ranks them"
    for name, text in modes.items():
        mode.add_argument(f"--{name}", dest="mode", action="store_const", const=name, help=text)
    add("--json", metavar="FILE", type=pathlib.Path, help="writes the plan as JSON")
    # Rewrites `--device a100 h100` to `--device a100 --device h100`
    words: list[str] = []
    for word in arguments:
        if words[-2:-1] == ["--device"] and _DEVICE_TYPE.fullmatch(word):
            words.append("--device")
        words.append(word)
    values = cli.parse(parser, words)
    problems = ProblemCollector()
    for flag in _NUMBERS:
        value = values[flag[2:].replace("-", "_")]
        if value is not None and not 0 < value < math.inf:
            rule = "must be greater than 0 and finite. Use 1 or more."
            problems.append(f"{flag} = {value}: {rule}")
    mode = values["mode"]
    if len(values["device"] or ()) > 1 and mode != "step":
        rule = f"needs one type of GPU. Use one --device, or leave --{mode} out."
        problems.append(f"--{mode}: {rule}")
    if mode == "longest" and values["document_tokens"] is not None:
        problems.append(
            "--document-tokens: must not be set with --longest, whose rows are one document. "
            "Leave it out."
        )
    if values["json"]:
        with problems.collect():
            cli.check_file(values["json"], flag="--json")
    problems.raise_if_any()
    return values


if __name__ == "__main__":
    cli.run_command(main)
