"""jaxsp plan CONFIG.yaml [key.path=value ...]

Plans memory, traffic and time of a run on absent GPUs.
"""

import argparse
import dataclasses
import math
import os
import pathlib
import re

import jax
import rich.console

from jaxsp import cli, plan_modes
from jaxsp.blocks.config import ModelConfig
from jaxsp.config import yaml_io
from jaxsp.config.schema import Config
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.hf import folder, peft, published
from jaxsp.hf.rope import context_range
from jaxsp.planner.compile import compiled, gpus
from jaxsp.planner.compile.compiled import Cluster
from jaxsp.runtime import memory_limits
from jaxsp.setup import config_file, data_preparation
from jaxsp.setup.model_files import ModelFiles

_NUMBERS = {
    "--devices": (
        "N",
        int,
        "number of GPUs; default: the product of the mesh, with data=-1 filling a node of 8",
    ),
    "--node-devices": ("N", int, "GPUs per node; default: 8, or all if there are fewer"),
    "--host-gib": ("GIB", float, "host memory of a node; default: 250 per GPU"),
    "--document-tokens": (
        "N",
        int,
        "length of the documents that fill a row, for the time; default: the whole row",
    ),
    "--tokens": (
        "N",
        float,
        "tokens to train on, such as 10e9, for GPU-hours and days; default: all steps",
    ),
}
"""Flags with a positive number: metavar, type and help."""

_DEVICE_TYPE = re.compile(r"[a-z]+\d[\w-]*")
"""Matches names of GPUs, known or not, and neither file.yaml nor key.path=value."""


def main(arguments: list[str]) -> None:
    """Runs the command.

    Raises: UserError for what training would refuse, and for conflicting flags.
    """
    given = parse_arguments(arguments)
    config = config_file.load(given.config, given.changes)
    console = rich.console.Console(markup=False, highlight=False, soft_wrap=True)
    row_tokens = config.data.row_tokens
    sizes = published.read_sizes(config.model, row_tokens=row_tokens)
    excess = context_range.describe_excess(sizes.fields, row_tokens=row_tokens)
    adapter = peft.resolve(config.adapter, sizes.model)
    config = config.model_copy(update={"adapter": adapter.config})
    sizes = dataclasses.replace(sizes, model=adapter.model)
    for note in filter(None, (sizes.note, excess)):
        console.print(note)
    if given.longest and config.mesh.seq == "auto":
        degree = given.devices or memory_limits.DEVICES_PER_NODE
        raise UserError(
            "mesh.seq = auto: must be a number with --longest, because it follows from the row "
            f"length. Use mesh.seq={degree // config.mesh.replica or 1}."
        )
    # this machine's GPUs are not used; XLA must not print messages about steps that do not fit
    jax.config.update("jax_platforms", "cpu")
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    # steps that are compiled here do not run
    jax.config.update("jax_enable_compilation_cache", False)
    clusters = [_make_cluster(device, given, config) for device in given.device or ["h100-80gb"]]
    num_steps = config.run.steps
    if given.data:
        num_steps = _print_data(config, sizes.model, console)
    train_tokens = given.tokens
    if train_tokens is None and num_steps is not None:
        train_tokens = float(num_steps * config.batch.rows_per_step * row_tokens)
    request = plan_modes.PlanRequest(
        config=config,
        sizes=sizes,
        cluster=clusters[0],
        console=console,
        document_tokens=given.document_tokens,
        train_tokens=train_tokens,
        json_file=given.json,
    )
    if given.host_gib is None or given.node_devices is None:
        cluster = clusters[0]
        console.print(
            f"assumed: nodes of {cluster.node_devices} GPUs with {cluster.node_host_gib:,.0f} GiB "
            "of memory (--node-devices, --host-gib)"
        )
    if given.meshes:
        plan_modes.plan_meshes(request)
    elif given.longest:
        plan_modes.find_longest(request)
    elif len(clusters) > 1:
        plan_modes.plan_several(request, clusters)
    else:
        plan = request.plan(request.resolve_config(clusters[0]), clusters[0])
        request.print_plan(plan)
        request.write_json(dataclasses.asdict(plan))


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line.

    Raises: UserError for invalid numbers and conflicting flags.
    """
    parser = cli.make_parser(
        "plan",
        "Compiles a config's training step for absent GPUs, and prints its memory, traffic and "
        "estimated time.",
        config_help="fields",
    )
    cli.add_config_arguments(parser)
    parser.add_argument(
        "--device",
        metavar="KIND [KIND ...]",
        action="append",
        help=f"one or more of {', '.join(gpus.GPUS)} (default: h100-80gb); compares several in a "
        "table",
    )
    for flag, (metavar, number, text) in _NUMBERS.items():
        parser.add_argument(flag, metavar=metavar, type=number, help=text)
    parser.add_argument(
        "--data",
        action="store_true",
        help="reads data.train, and prints its rows and steps, from which the cost follows",
    )
    question = parser.add_mutually_exclusive_group()
    question.add_argument("--longest", action="store_true", help="finds the longest row that fits")
    question.add_argument(
        "--meshes",
        action="store_true",
        help="plans every mesh of these devices, and ranks them",
    )
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="writes the plan as JSON")
    # Rewrites `--device a100 h100` to `--device a100 --device h100`
    words: list[str] = []
    for word in arguments:
        if words[-2:-1] == ["--device"] and _DEVICE_TYPE.fullmatch(word):
            words.append("--device")
        words.append(word)
    given = parser.parse_intermixed_args(words)
    values = {f"--{name.replace('_', '-')}": value for name, value in vars(given).items()}
    problems = ProblemCollector(
        f"{flag} = {values[flag]}: must be greater than 0 and finite. Use 1 or more."
        for flag in _NUMBERS
        if values[flag] is not None and not 0 < values[flag] < math.inf
    )
    if len(given.device or ()) > 1:
        problems += [
            f"{flag}: needs one type of GPU. Use one --device, or leave {flag} out."
            for flag in ("--longest", "--meshes")
            if values[flag]
        ]
    if given.longest and given.document_tokens is not None:
        problems.append(
            "--document-tokens: must not be set with --longest, whose rows are one document. "
            "Leave it out."
        )
    if given.json:
        with problems.collect():
            cli.check_file(given.json, flag="--json")
    problems.raise_if_any()
    return given


def _print_data(config: Config, model: ModelConfig, console: rich.console.Console) -> int:
    """Prints rows and steps of the training data, and returns the steps. Raises: UserError."""
    config = config.with_fields(data={"eval": ()})
    files = ModelFiles(config=model)
    # The sizes may be published ones, without the model's folder
    needs_tokenizer = any(source.format != "tokens" for source in config.data.train)
    if needs_tokenizer and config.model.tokenizer is None and config.model.source is not None:
        source = folder.find(config.model.source)
        files = ModelFiles(config=model, folder=source, hf_config=source.config_fields)
    return data_preparation.print_data(config, files, console, ProblemCollector())


def _make_cluster(device: str, given: argparse.Namespace, config: Config) -> Cluster:
    """Makes a cluster of a type of GPU. Raises: UserError if the mesh does not fit its devices."""
    mesh = config.mesh
    is_fixed = mesh.data != -1
    unit = mesh.replica
    if mesh.seq != "auto":
        unit *= config.mesh.degree
    num_devices = -(-memory_limits.DEVICES_PER_NODE // unit) * unit
    if is_fixed:
        unit *= mesh.data
        num_devices = unit
    num_devices = given.devices or num_devices
    is_legal = num_devices == unit if is_fixed else num_devices % unit == 0
    if not is_legal and not given.meshes:
        rule = f"must be {unit}" if is_fixed else f"must be a multiple of {unit}"
        other = ", or mesh.data=-1" if is_fixed else ""
        raise UserError(
            f"--devices = {num_devices}: {rule} (mesh.replica = {mesh.replica}, mesh.data = "
            f"{mesh.data}, mesh.seq = {yaml_io.format_value(mesh.seq)}). Use --devices "
            f"{unit}{other}."
        )
    return compiled.make_cluster(
        device, num_devices, node_devices=given.node_devices, node_host_gib=given.host_gib
    )


if __name__ == "__main__":
    cli.run_command(main)
