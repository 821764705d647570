"""python -m jaxsp.plan CONFIG.yaml [key.path=value ...]

Plans memory, traffic and time of a run on absent GPUs.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import rich.console

from jaxsp import cli
from jaxsp.config import config_file
from jaxsp.config.schema import Config
from jaxsp.core import durations
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.hf import published
from jaxsp.hf.published import ModelSizes
from jaxsp.model.config import ModelConfig
from jaxsp.planner import mesh_sweep, planning, plots, report, search, tables
from jaxsp.planner.compile import compiled, gpus
from jaxsp.planner.compile.compiled import Cluster
from jaxsp.planner.mesh_sweep import MeshPlan
from jaxsp.planner.planning import Plan
from jaxsp.planner.progress import Progress
from jaxsp.planner.search import TriedLength
from jaxsp.runtime import memory_limits

_PLOT_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
"""Lengths for a plot of memory, as factors of the config's row length."""

_LONGEST_PLOT_FACTORS = (0.125, 0.25, 0.5, 0.75)
"""More lengths for a plot after a search, as factors of the longest row."""


def main(arguments: list[str]) -> None:
    """Runs the command.

    Raises: UserError for what training would refuse, and for conflicting flags.
    """
    given = parse_arguments(arguments)
    config = config_file.load(given.config, given.changes)
    console = rich.console.Console(markup=False, highlight=False, soft_wrap=True)
    sizes = published.read_sizes(config.model)
    if sizes.note:
        console.print(sizes.note)
    _check_single_length(given, config)
    # this machine's GPUs are not used; XLA must not print messages about steps that do not fit
    jax.config.update("jax_platforms", "cpu")
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    # steps that are compiled here do not run
    jax.config.update("jax_enable_compilation_cache", False)
    clusters = [_make_cluster(device, given, config) for device in given.device or ["h100-80gb"]]
    request = PlanRequest(
        args=given, config=config, sizes=sizes, cluster=clusters[0], console=console
    )
    if given.host_gib is None or given.node_devices is None:
        console.print(f"assumed: {report.format_assumptions(clusters[0])}")
    if given.meshes:
        _plan_meshes(request)
    elif given.longest:
        _find_longest(request)
    elif len(clusters) > 1 or len(config.data.row_lengths) > 1:
        _plan_several(request, clusters)
    else:
        _plan_one(request)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The parsed command, with the config, model and first kind of GPU that it names."""

    args: argparse.Namespace
    config: Config
    sizes: ModelSizes
    cluster: Cluster
    console: rich.console.Console

    @property
    def model(self) -> ModelConfig:
        """The model's sizes."""
        return self.sizes.model

    @property
    def model_name(self) -> str:
        """The model's name in output."""
        name = self.config.model.source or "the config's model"
        return f"{name} (published sizes)" if self.sizes.published else name

    @property
    def train_tokens(self) -> float | None:
        """Tokens to train on; None if they are unknown."""
        if self.args.tokens is not None:
            return float(self.args.tokens)
        if self.config.run.steps is None:
            return None
        step_tokens = self.config.batch.rows_per_step * self.config.data.max_row_tokens
        return float(self.config.run.steps * step_tokens)


def _plan_one(request: PlanRequest) -> None:
    """Plans the config's step."""
    shown = planning.plan_step(
        request.config,
        model=request.model,
        cluster=request.cluster,
        document_tokens=request.args.document_tokens,
    )
    request.console.print(
        report.format_plan(shown, model=request.model_name, tokens=request.train_tokens)
    )
    _write_json(request.args.json, dataclasses.asdict(shown), request.sizes, request.console)
    _plot_lengths(request, shown, [shown], _PLOT_FACTORS)


def _plan_several(request: PlanRequest, clusters: Sequence[Cluster]) -> None:
    """Plans the config's steps for rows of each length, on each kind of GPU."""
    plans = []
    refusals = []
    progress = Progress(len(clusters) * len(request.config.data.row_lengths))
    for cluster in clusters:
        for row_tokens in request.config.data.row_lengths:
            config = request.config.with_row_tokens(row_tokens)
            label = f"{cluster.num_devices} x {cluster.device_type}, rows of {row_tokens:,} tokens"
            try:
                plan = planning.plan_step(
                    config,
                    model=request.model,
                    cluster=cluster,
                    document_tokens=request.args.document_tokens,
                )
            except UserError as error:
                refusals.append(f"{label}: {str(error).splitlines()[0]}")
                request.console.print(f"{label}: refused [{progress.advance()}]")
                continue
            spent = durations.describe(plan.plan_s)
            request.console.print(f"{label}: compiled in {spent} [{progress.advance()}]")
            plans.append(plan)
    if not plans:
        raise UserError(refusals)
    request.console.print(tables.format_comparison(plans, tokens=request.train_tokens))
    for refusal in refusals:
        request.console.print(f"refused: {refusal}")
    result = {"plans": [dataclasses.asdict(plan) for plan in plans]}
    _write_json(request.args.json, result, request.sizes, request.console)


def _plot_lengths(
    request: PlanRequest, shown: Plan, around: list[Plan], factors: Sequence[float]
) -> None:
    """Draws memory over row lengths around a plan if --plot is given."""
    if not request.args.plot:
        return
    lengths = _choose_plot_lengths(request, shown, around, factors)
    progress = Progress(len(lengths))
    for row_tokens in lengths:
        config = search.with_row_tokens(request.config, row_tokens)
        verdict = "planned"
        try:
            around.append(planning.plan_step(config, model=request.model, cluster=request.cluster))
        except UserError:  # lengths that cuDNN cannot compute are left out
            verdict = "refused, and left out"
        request.console.print(
            f"for the plot: {row_tokens:,} tokens {verdict} [{progress.advance()}]"
        )
    devices = f"{request.cluster.num_devices} x {request.cluster.device_type}"
    mesh = report.format_mesh(shown.mesh)
    title = f"{request.model_name} on {devices}, {mesh}: planned, not measured"
    plots.plot_lengths(around, request.args.plot, title=title)
    request.console.print(f"drawn: {request.args.plot}")


def _choose_plot_lengths(
    request: PlanRequest, shown: Plan, around: Sequence[Plan], factors: Sequence[float]
) -> list[int]:
    """Chooses row lengths for a plot besides those that were planned."""
    unit = 128 * request.config.mesh.seq
    planned = {plan.row_tokens for plan in around}
    lengths = [round(factor * shown.row_tokens / unit) * unit for factor in factors]
    return [length for length in dict.fromkeys(lengths) if length and length not in planned]


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line.

    Raises: UserError for invalid numbers and conflicting flags.
    """
    parser = cli.make_parser(
        "plan",
        "Compiles a config's training step for absent GPUs, and prints its memory, traffic and "
        "estimated time.",
        documents_fields=True,
    )
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument(
        "changes",
        metavar="key.path=value",
        nargs="*",
        default=[],
        help="changes a field of the config",
    )
    _add_flags(parser)
    given = parser.parse_intermixed_args(_repeat_device_flag(arguments))
    _check_arguments(given)
    return given


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        metavar="KIND",
        action="append",
        help=f"one or more of {', '.join(gpus.GPUS)} (default: h100-80gb); compares several in a "
        "table",
    )
    parser.add_argument(
        "--devices",
        metavar="N",
        type=int,
        help="number of GPUs; default: the product of the mesh, with data=-1 filling a node of 8",
    )
    parser.add_argument(
        "--node-devices",
        metavar="N",
        type=int,
        help="GPUs per node; default: 8, or all if there are fewer",
    )
    parser.add_argument(
        "--host-gib",
        metavar="GIB",
        type=float,
        help="host memory of a node; default: 250 per GPU",
    )
    parser.add_argument(
        "--document-tokens",
        metavar="N",
        type=int,
        help="length of the documents that fill a row, for the time; default: the whole row",
    )
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=float,
        help="tokens to train on, such as 10e9, for GPU-hours and days; default: all steps",
    )
    question = parser.add_mutually_exclusive_group()
    question.add_argument("--longest", action="store_true", help="finds the longest row that fits")
    question.add_argument(
        "--meshes", action="store_true", help="plans every mesh of these devices, and ranks them"
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        type=pathlib.Path,
        help="draws memory over the row length, or the meshes",
    )
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="writes the plan as JSON")


def _repeat_device_flag(arguments: Sequence[str]) -> list[str]:
    """Rewrites `--device a100 h100` to `--device a100 --device h100`.

    The config and changes may follow."""
    words: list[str] = []
    is_device = False
    for word in arguments:
        if is_device and words[-1] != "--device":
            is_device = _DEVICE_TYPE.fullmatch(word) is not None
            if is_device:
                words.append("--device")
        is_device = is_device or word == "--device"
        words.append(word)
    return words


_DEVICE_TYPE = re.compile(r"[a-z]+\d[\w-]*")
"""Matches names of GPUs, known or not, and neither file.yaml nor key.path=value."""


def _check_arguments(given: argparse.Namespace) -> None:
    """Checks flags. Raises: UserError for invalid numbers and conflicting flags."""
    problems = ProblemCollector()
    for flag in ("devices", "node_devices", "host_gib", "document_tokens", "tokens"):
        value = getattr(given, flag)
        if value is not None and not 0 < value < math.inf:
            name = flag.replace("_", "-")
            problems.append(
                f"--{name} = {value}: must be greater than 0 and finite. Use 1 or more."
            )
    if len(given.device or ()) > 1:
        for flag in ("longest", "meshes", "plot"):
            if getattr(given, flag):
                problems.append(
                    f"--{flag}: needs one type of GPU. Use one --device, or leave --{flag} out."
                )
    if given.longest and given.document_tokens is not None:
        problems.append(
            "--document-tokens: must not be set with --longest, whose rows are one document. "
            "Leave it out."
        )
    for flag in ("json", "plot"):
        if getattr(given, flag):
            with problems.collect():
                cli.check_file(getattr(given, flag), flag=f"--{flag}")
    if given.plot:
        with problems.collect():
            plots.check_output(given.plot)
    problems.raise_if_any()


def _check_single_length(given: argparse.Namespace, config: Config) -> None:
    """Checks that a config has one row length if a flag needs that. Raises: UserError if not."""
    lengths = config.data.row_lengths
    flags = [flag for flag in ("meshes", "plot") if getattr(given, flag)]
    if len(lengths) > 1 and flags and not given.longest:
        raise UserError(
            f"data.row_tokens = {list(lengths)}: must be one length with --{flags[0]}. "
            f"Use data.row_tokens={lengths[-1]}."
        )


def _make_cluster(device: str, given: argparse.Namespace, config: Config) -> Cluster:
    """Makes a cluster of a type of GPU. Raises: UserError if the mesh does not fit its devices."""
    mesh = config.mesh
    is_fixed = mesh.data != -1
    unit = mesh.replica * mesh.seq
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
            f"{mesh.data}, mesh.seq = {mesh.seq}). Use --devices {unit}{other}."
        )
    return compiled.make_cluster(
        device, num_devices, node_devices=given.node_devices, node_host_gib=given.host_gib
    )


def _find_longest(request: PlanRequest) -> None:
    """Finds the longest row that fits."""
    console = request.console
    cluster = request.cluster
    began = time.perf_counter()
    console.print(f"the longest row on {cluster.num_devices} x {cluster.device_type}:")
    progress = Progress(search.USUAL_NUM_LENGTHS, is_exact=False)

    def show(length: TriedLength) -> None:
        console.print(report.format_length(length, progress=progress.advance()))

    longest = search.find_longest_row(
        request.config, model=request.model, cluster=cluster, on_result=show
    )
    console.print(report.format_longest(longest, seconds=time.perf_counter() - began))
    shown = longest.plan or longest.shortest_failing.plan
    result = {
        "longest_row_tokens": longest.plan and longest.plan.row_tokens,
        "tried": [
            {"row_tokens": length.row_tokens, "fits": not length.problem, "why": length.problem}
            for length in longest.tried
        ],
    }
    if shown is not None:
        console.print(
            report.format_plan(shown, model=request.model_name, tokens=request.train_tokens)
        )
        result = dataclasses.asdict(shown) | result
    _write_json(request.args.json, result, request.sizes, console)
    if shown is not None:
        plans = [length.plan for length in longest.tried if length.plan is not None]
        _plot_lengths(request, shown, plans, _LONGEST_PLOT_FACTORS)


def _plan_meshes(request: PlanRequest) -> None:
    """Plans every mesh."""
    config = request.config
    cluster = request.cluster
    console = request.console
    count = len(
        mesh_sweep.list_combinations(config, request.model, num_devices=cluster.num_devices)
    )
    console.print(f"{count} combinations of mesh and attention strategy to compile:")
    progress = Progress(count)

    def show(mesh_plan: MeshPlan) -> None:
        console.print(report.format_mesh_plan(mesh_plan, progress=progress.advance()))

    with console.status("compiling"):
        mesh_plans = mesh_sweep.plan_meshes(
            config,
            model=request.model,
            cluster=cluster,
            document_tokens=request.args.document_tokens,
            on_result=show,
        )
    rows = f"{config.batch.rows_per_step} rows of {config.data.max_row_tokens:,} tokens per step"
    workload = f"{rows} on {cluster.num_devices} x {cluster.device_type}"
    console.print(workload)
    console.print(tables.format_ranking(mesh_plans))
    if request.args.plot:
        title = f"{request.model_name}, {workload}: planned, not measured"
        plots.plot_meshes(mesh_plans, request.args.plot, title=title)
        console.print(f"drawn: {request.args.plot}")
    result = {"meshes": [dataclasses.asdict(mesh_plan) for mesh_plan in mesh_plans]}
    _write_json(request.args.json, result, request.sizes, console)


def _write_json(
    file: pathlib.Path | None,
    result: dict[str, Any],
    sizes: ModelSizes,
    console: rich.console.Console,
) -> None:
    """Writes the plan, and whether the model's sizes are published ones."""
    if file is not None:
        whole = result | {"published_sizes": sizes.note or None}
        file.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        console.print(f"written: {file}")


if __name__ == "__main__":
    cli.run_command(main)
