"""python -m jaxsp.plan CONFIG.yaml [key.path=value ...]: what a run would take on GPUs that are not here."""

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
from jaxsp.planner import mesh_sweep, planning, plots, report, search
from jaxsp.planner.compile import compiled, gpus
from jaxsp.planner.compile.compiled import Cluster
from jaxsp.planner.mesh_sweep import MeshPlan
from jaxsp.planner.planning import Plan
from jaxsp.planner.progress import Progress
from jaxsp.planner.search import TriedLength
from jaxsp.runtime import memory_limits

_PLOT_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
"""Rows that a picture of memory is made of, over the config's."""

_LONGEST_PLOT_FACTORS = (0.125, 0.25, 0.5, 0.75)
"""Those that it is made of besides what was tried, over the longest."""


def main(arguments: list[str]) -> None:
    """The command. Raises: UserError with what training would refuse, and for flags that contradict each other."""
    given = parse_arguments(arguments)
    config = config_file.load(given.config, given.changes)
    console = rich.console.Console(markup=False, highlight=False, soft_wrap=True)
    sizes = published.read_sizes(config.model)
    if sizes.note:
        console.print(sizes.note)
    _check_single_length(given, config)
    # GPUs of this machine are not needed, and XLA would print its own messages about what does not fit
    jax.config.update("jax_platforms", "cpu")
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    jax.config.update(
        "jax_enable_compilation_cache", False
    )  # what is compiled here is not for running
    sites = [_make_cluster(kind, given, config) for kind in given.device or ["h100-80gb"]]
    asked_for = PlanRequest(
        args=given, config=config, sizes=sizes, cluster=sites[0], console=console
    )
    if given.host_gib is None or given.node_devices is None:
        console.print(f"assumed: {report.format_assumptions(sites[0])}")
    if given.meshes:
        _plan_meshes(asked_for)
    elif given.longest:
        _find_longest(asked_for)
    elif len(sites) > 1 or len(config.data.row_lengths) > 1:
        _plan_several(asked_for, sites)
    else:
        _plan_one(asked_for)


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
        run, step_tokens = (
            self.config.run,
            self.config.batch.rows_per_step * self.config.data.max_row_tokens,
        )
        if self.args.tokens is not None:
            return self.args.tokens
        return None if run.steps is None else float(run.steps * step_tokens)


def _plan_one(asked: PlanRequest) -> None:
    """Plans the config's step."""
    shown = planning.plan_step(
        asked.config,
        model=asked.model,
        cluster=asked.cluster,
        document_tokens=asked.args.document_tokens,
    )
    asked.console.print(
        report.format_plan(shown, model=asked.model_name, tokens=asked.train_tokens)
    )
    _write_json(asked.args.json, dataclasses.asdict(shown), asked.sizes, asked.console)
    _plot_lengths(asked, shown, [shown], _PLOT_FACTORS)


def _plan_several(asked: PlanRequest, sites: Sequence[Cluster]) -> None:
    """Plans the config's steps for rows of each length, on each kind of GPU."""
    found, refused = [], []
    counted = Progress(len(sites) * len(asked.config.data.row_lengths))
    for site in sites:
        for row_tokens in asked.config.data.row_lengths:
            config = asked.config.with_row_tokens(row_tokens)
            words = f"{site.num_devices} x {site.device_type}, rows of {row_tokens:,} tokens"
            try:
                plan = planning.plan_step(
                    config,
                    model=asked.model,
                    cluster=site,
                    document_tokens=asked.args.document_tokens,
                )
            except UserError as error:
                refused.append(f"{words}: {str(error).splitlines()[0]}")
                asked.console.print(f"{words}: refused [{counted.advance()}]")
                continue
            spent = durations.describe(plan.plan_s)
            asked.console.print(f"{words}: compiled in {spent} [{counted.advance()}]")
            found.append(plan)
    if not found:
        raise UserError(refused)
    asked.console.print(report.format_comparison(found, tokens=asked.train_tokens))
    for words in refused:
        asked.console.print(f"refused: {words}")
    result = {"plans": [dataclasses.asdict(plan) for plan in found]}
    _write_json(asked.args.json, result, asked.sizes, asked.console)


def _plot_lengths(
    asked: PlanRequest, shown: Plan, around: list[Plan], factors: Sequence[float]
) -> None:
    """Draws memory over the row's length around a plan, if asked for."""
    if not asked.args.plot:
        return
    lengths = _choose_plot_lengths(asked, shown, around, factors)
    counted = Progress(len(lengths))
    for row_tokens in lengths:
        of_length = search.with_row_tokens(asked.config, row_tokens)
        verdict = "planned"
        try:
            around.append(planning.plan_step(of_length, model=asked.model, cluster=asked.cluster))
        except UserError:  # lengths that cuDNN cannot compute are left out
            verdict = "refused, and left out"
        asked.console.print(
            f"for the picture: {row_tokens:,} tokens {verdict} [{counted.advance()}]"
        )
    site = asked.cluster
    title = f"{asked.model_name} on {site.num_devices} x {site.device_type}, {report.format_mesh(shown.mesh)}: planned, not measured"
    plots.plot_lengths(around, asked.args.plot, title=title)
    asked.console.print(f"drawn: {asked.args.plot}")


def _choose_plot_lengths(
    asked: PlanRequest, shown: Plan, around: Sequence[Plan], factors: Sequence[float]
) -> list[int]:
    """Row lengths that a picture needs besides those that were planned."""
    unit = 128 * asked.config.mesh.seq
    planned = {plan.row_tokens for plan in around}
    lengths = [round(factor * shown.row_tokens / unit) * unit for factor in factors]
    return [length for length in dict.fromkeys(lengths) if length and length not in planned]


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """What the command's words ask for. Raises: UserError for numbers that cannot be, and what contradicts each other."""
    parser = cli.make_parser(
        "plan",
        "Compiles a config's training step for GPUs that are not here, and says what it takes, sends and computes.",
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
    parser.add_argument(
        "--device",
        metavar="KIND",
        action="append",
        help=f"one or more of {', '.join(gpus.GPUS)}; default: h100-80gb. Several are compared in a table",
    )
    parser.add_argument(
        "--devices",
        metavar="N",
        type=int,
        help="how many; default: as many as the mesh names, and a node of 8 where data is -1",
    )
    parser.add_argument(
        "--node-devices",
        metavar="N",
        type=int,
        help="GPUs of a node; default: 8, or all if there are fewer",
    )
    parser.add_argument(
        "--host-gib",
        metavar="GIB",
        type=float,
        help="memory of a node; default: 250 for each of its GPUs",
    )
    parser.add_argument(
        "--document-tokens",
        metavar="N",
        type=int,
        help="of the documents that fill a row, for the time; default: one document",
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
        help="draws memory over the row's length, or the meshes",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=pathlib.Path, help="writes the numbers there too"
    )
    given = parser.parse_intermixed_args(_repeat_device_flag(arguments))
    _check_arguments(given)
    return given


def _repeat_device_flag(arguments: Sequence[str]) -> list[str]:
    """`--device a100 h100` as `--device a100 --device h100`. The config and changes may follow them."""
    words: list[str] = []
    is_device = False
    for word in arguments:
        if is_device and words[-1] != "--device":
            is_device = _DEVICE_TYPE.fullmatch(word) is not None
            words += ["--device"] * is_device
        is_device = is_device or word == "--device"
        words.append(word)
    return words


_DEVICE_TYPE = re.compile(r"[a-z]+\d[\w-]*")
"""Matches names of GPUs, known or not, but no file.yaml and no key.path=value."""


def _check_arguments(given: argparse.Namespace) -> None:
    """Raises: UserError for numbers that cannot be, and for questions that contradict each other."""
    problems = ProblemCollector()
    for flag in ("devices", "node_devices", "host_gib", "document_tokens", "tokens"):
        value = getattr(given, flag)
        if value is not None and not 0 < value < math.inf:
            problems.append(
                f"--{flag.replace('_', '-')} = {value}: has to be a number, and more than nothing. Use 1 or more."
            )
    if len(given.device or ()) > 1:
        for flag in ("longest", "meshes", "plot"):
            if getattr(given, flag):
                problems.append(
                    f"--{flag}: needs one kind of GPU. Give one --device, or leave --{flag} out."
                )
    if given.longest and given.document_tokens is not None:
        problems.append(
            "--document-tokens: the longest row is sought as one document. Leave it out."
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
    """Raises: UserError for flags that need one row length, if the config has several."""
    lengths = config.data.row_lengths
    wrong = [flag for flag in ("meshes", "plot") if getattr(given, flag)]
    if len(lengths) > 1 and wrong and not given.longest:
        raise UserError(
            f"data.row_tokens = {list(lengths)}: must be one length with --{wrong[0]}. Use data.row_tokens={lengths[-1]}."
        )


def _make_cluster(kind: str, given: argparse.Namespace, config: Config) -> Cluster:
    """Nodes of a kind of GPU. Raises: UserError for devices that the mesh does not fit."""
    mesh = config.mesh
    inner = mesh.replica * mesh.seq
    named = f"mesh.replica = {mesh.replica}, mesh.data = {mesh.data}, mesh.seq = {mesh.seq}"
    count = (
        inner * mesh.data
        if mesh.data != -1
        else -(-memory_limits.DEVICES_PER_NODE // inner) * inner
    )
    count = given.devices or count
    if not given.meshes and (count % inner if mesh.data == -1 else count != inner * mesh.data):
        fits = (
            f"{inner}, or a multiple of it"
            if mesh.data == -1
            else f"{inner * mesh.data}, or mesh.data=-1"
        )
        raise UserError(f"--devices = {count}: {named} are for others. Use --devices {fits}.")
    return compiled.make_cluster(
        kind, count, node_devices=given.node_devices, node_host_gib=given.host_gib
    )


def _find_longest(asked: PlanRequest) -> None:
    """Finds the longest row that fits."""
    console, site = asked.console, asked.cluster
    began = time.perf_counter()
    console.print(f"the longest row on {site.num_devices} x {site.device_type}:")
    counted = Progress(search.USUAL_NUM_LENGTHS, is_exact=False)

    def show(one: TriedLength) -> None:
        console.print(report.format_length(one, progress=counted.advance()))

    found = search.find_longest_row(asked.config, model=asked.model, cluster=site, on_result=show)
    console.print(report.format_longest(found, seconds=time.perf_counter() - began))
    shown = found.plan or found.shortest_failing.plan
    result = {
        "longest_row_tokens": found.plan and found.plan.row_tokens,
        "tried": [
            {"row_tokens": one.row_tokens, "fits": not one.problem, "why": one.problem}
            for one in found.tried
        ],
    }
    if shown is not None:
        console.print(report.format_plan(shown, model=asked.model_name, tokens=asked.train_tokens))
        result = dataclasses.asdict(shown) | result
    _write_json(asked.args.json, result, asked.sizes, console)
    if shown is not None:
        _plot_lengths(
            asked,
            shown,
            [one.plan for one in found.tried if one.plan is not None],
            _LONGEST_PLOT_FACTORS,
        )


def _plan_meshes(asked: PlanRequest) -> None:
    """Plans every mesh."""
    given, config, site, console = asked.args, asked.config, asked.cluster, asked.console
    count = len(mesh_sweep.list_combinations(config, asked.model, num_devices=site.num_devices))
    console.print(f"{count} meshes with their kinds of attention, each a step to compile:")
    counted = Progress(count)

    def show(shape: MeshPlan) -> None:
        console.print(report.format_mesh_plan(shape, progress=counted.advance()))

    with console.status("compiling"):
        found = mesh_sweep.plan_meshes(
            config,
            model=asked.model,
            cluster=site,
            document_tokens=given.document_tokens,
            on_result=show,
        )
    rows = f"{config.batch.rows_per_step} rows of {config.data.max_row_tokens:,} tokens"
    console.print(f"{rows} a step on {site.num_devices} x {site.device_type}")
    console.print(report.format_ranking(found))
    if given.plot:
        where = f"{asked.model_name}, {rows} a step on {site.num_devices} x {site.device_type}"
        plots.plot_meshes(found, given.plot, title=f"{where}: planned, not measured")
        console.print(f"drawn: {given.plot}")
    _write_json(
        given.json, {"meshes": [dataclasses.asdict(one) for one in found]}, asked.sizes, console
    )


def _write_json(
    file: pathlib.Path | None,
    result: dict[str, Any],
    sizes: ModelSizes,
    console: rich.console.Console,
) -> None:
    """Writes the numbers, and whether they are of published sizes."""
    if file is not None:
        whole = result | {"published_sizes": sizes.note or None}
        file.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        console.print(f"written: {file}")


if __name__ == "__main__":
    cli.run_command(main)
