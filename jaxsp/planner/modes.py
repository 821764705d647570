"""Modes of the command `jaxsp.plan`: a step, several GPUs or row lengths, the longest row, all
meshes."""

import argparse
import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console

from jaxsp.config.schema import Config
from jaxsp.core import durations, files
from jaxsp.core.errors import UserError
from jaxsp.hf.published import ModelSizes
from jaxsp.planner import (
    degree_report,
    degree_sweep,
    mesh_sweep,
    planning,
    plots,
    report,
    search,
    tables,
)
from jaxsp.planner.compile import compiled
from jaxsp.planner.compile.compiled import Cluster
from jaxsp.planner.data_rows import LengthData
from jaxsp.planner.degree_sweep import DegreeSweep, LengthPlan
from jaxsp.planner.mesh_sweep import MeshPlan
from jaxsp.planner.planning import Plan
from jaxsp.planner.progress import Progress
from jaxsp.planner.search import TriedLength
from jaxsp.training import row_meshes

_PLOT_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
"""Lengths for a plot of memory, as factors of the config's row length."""

_LONGEST_PLOT_FACTORS = (0.125, 0.25, 0.5, 0.75)
"""More lengths for a plot after a search, as factors of the longest row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The parsed command, with the config, model and first kind of GPU that it names."""

    args: argparse.Namespace
    config: Config
    sizes: ModelSizes
    cluster: Cluster
    console: rich.console.Console
    data: Mapping[int, LengthData] | None = None
    """Rows of the config's data, by their length; None: documents have an assumed length."""

    @property
    def model_name(self) -> str:
        """The model's name in output."""
        name = self.config.model.source or "the config's model"
        return f"{name} (published sizes)" if self.sizes.published else name

    @property
    def train_tokens(self) -> float | None:
        """Tokens to train on; None if they are unknown."""
        if self.args.tokens is not None or self.config.run.steps is None:
            return self.args.tokens
        step_tokens = self.config.batch.rows_per_step * self.config.data.max_row_tokens
        return float(self.config.run.steps * step_tokens)

    @property
    def row_lengths(self) -> Sequence[int]:
        """Row lengths to plan, the shortest first: those that the data needs."""
        return self.config.data.row_lengths if self.data is None else list(self.data)

    def resolve_config(self, cluster: Cluster) -> Config:
        """Replaces `mesh.seq: auto` by the numbers that training chooses on some GPUs.

        Raises: UserError if there are none.
        """
        if self.config.mesh.seq != "auto":
            return self.config
        limits = cluster.memory_limit
        config = row_meshes.resolve_degrees(
            self.config,
            self.sizes.model,
            devices=compiled.make_devices(cluster.device_type, cluster.num_devices),
            limits=limits,
            device_bytes=int(limits.device),
        )
        degrees = ", ".join(
            f"{degree} for rows of {row_tokens:,}" for row_tokens, degree in config.degrees.items()
        )
        self.console.print(
            f"mesh.seq = auto on {cluster.num_devices} x {cluster.device_type}: {degrees}"
        )
        return config

    def plan(self, config: Config, cluster: Cluster | None = None) -> Plan:
        """Plans a step, by default for the first kind of GPU. Raises: UserError."""
        return planning.plan_step(
            config,
            model=self.sizes.model,
            cluster=cluster or self.cluster,
            document_tokens=self.args.document_tokens,
            data=self.find_data(config),
        )

    def find_data(self, config: Config) -> LengthData | None:
        """Finds the rows of the length of a config."""
        return None if self.data is None else self.data.get(config.data.max_row_tokens)

    def print_plan(self, plan: Plan) -> None:
        """Prints the report of a plan."""
        self.console.print(
            report.format_plan(plan, model=self.model_name, tokens=self.train_tokens)
        )

    def write_json(self, result: dict[str, Any]) -> None:
        """Writes a result, and the source of published model sizes, if --json is given."""
        if self.args.json:
            result = result | {"published_sizes": self.sizes.note or None}
            files.write_output(self.args.json, files.to_json(result))
            self.console.print(f"written: {self.args.json}")

    def draw(self, plans: Mapping[str, Plan], *, subject: str) -> None:
        """Draws plans by their labels in the file of --plot."""
        title = f"{self.model_name}, {subject}: planned, not measured"
        plots.plot_plans(plans, self.args.plot, title=title)
        self.console.print(f"drawn: {self.args.plot}")


def plan_one(request: PlanRequest) -> None:
    """Plans the config's step."""
    (row_tokens,) = request.row_lengths
    config = request.resolve_config(request.cluster).with_row_tokens(row_tokens)
    plan = request.plan(config)
    request.print_plan(plan)
    request.write_json(dataclasses.asdict(plan))
    _draw_lengths(request, config, plan, [plan], _PLOT_FACTORS)


def plan_several(request: PlanRequest, clusters: Sequence[Cluster]) -> None:
    """Plans the config's steps for rows of each length, on each kind of GPU."""
    plans = []
    refusals = []
    progress = Progress(len(clusters) * len(request.row_lengths))
    for cluster in clusters:
        devices = f"{cluster.num_devices} x {cluster.device_type}"
        try:
            config = request.resolve_config(cluster)
        except UserError as error:
            refusals.append(f"{devices}: {str(error).splitlines()[0]}")
            continue
        for row_tokens in request.row_lengths:
            label = f"{devices}, rows of {row_tokens:,} tokens"
            try:
                plan = request.plan(config.with_row_tokens(row_tokens), cluster)
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
    totals = {} if request.data is None or refusals else _sum_epochs(request, plans, clusters)
    request.write_json(
        {"plans": [dataclasses.asdict(plan) for plan in plans], "tokens_per_s_of_epoch": totals}
    )


def _sum_epochs(
    request: PlanRequest, plans: Sequence[Plan], clusters: Sequence[Cluster]
) -> dict[str, float]:
    """Prints the data, and the estimated tokens/s of an epoch on each kind of GPU."""
    for plan in plans[: len(request.row_lengths)]:
        request.console.print(report.format_row_counts(plan))
    totals = {}
    data = plans[0].data
    period = "an epoch" if data is None else data.period
    for cluster in clusters:
        of_cluster = [plan for plan in plans if plan.device_type == cluster.device_type]
        if all(plan.step_s_estimate for plan in of_cluster):
            totals[cluster.device_type], _ = degree_sweep.sum_tokens_per_s(of_cluster)
            request.console.print(
                f"{period} on {cluster.num_devices} x {cluster.device_type}: "
                f"{totals[cluster.device_type]:,.0f} tokens/s without padding, an estimate"
            )
    return totals


def find_longest(request: PlanRequest) -> None:
    """Finds the longest row that fits."""
    console = request.console
    cluster = request.cluster
    began = time.perf_counter()
    console.print(f"the longest row on {cluster.num_devices} x {cluster.device_type}:")

    def print_length(length: TriedLength) -> None:
        console.print(report.format_length(length))

    longest = search.find_longest_row(
        request.config, model=request.sizes.model, cluster=cluster, on_result=print_length
    )
    console.print(report.format_longest(longest, seconds=time.perf_counter() - began))
    plan = longest.plan or longest.shortest_failing.plan
    result = {
        "longest_row_tokens": longest.plan and longest.plan.row_tokens,
        "tried": [
            {"row_tokens": length.row_tokens, "fits": not length.problem, "why": length.problem}
            for length in longest.tried
        ],
    }
    if plan is None:
        request.write_json(result)
        return
    request.print_plan(plan)
    request.write_json(dataclasses.asdict(plan) | result)
    plans = [length.plan for length in longest.tried if length.plan is not None]
    config = request.config.with_row_tokens(request.config.data.max_row_tokens)
    _draw_lengths(request, config, plan, plans, _LONGEST_PLOT_FACTORS)


def _draw_lengths(
    request: PlanRequest,
    config: Config,
    center: Plan,
    plans: Sequence[Plan],
    factors: Sequence[float],
) -> None:
    """Draws plans, and more of them for rows of other lengths, if --plot is given.

    Args: config: the config of one row length.
    """
    if not request.args.plot:
        return
    unit = 128 * config.mesh.degree
    by_length = {plan.row_tokens: plan for plan in plans}
    lengths = {round(factor * center.row_tokens / unit) * unit for factor in factors} - {0}
    missing = sorted(lengths - by_length.keys())
    progress = Progress(len(missing))
    for row_tokens in missing:
        verdict = "planned"
        try:
            by_length[row_tokens] = request.plan(search.with_row_tokens(config, row_tokens))
        except UserError:  # lengths that cuDNN cannot compute are left out
            verdict = "refused, and left out"
        request.console.print(
            f"for the plot: {row_tokens:,} tokens {verdict} [{progress.advance()}]"
        )
    devices = f"{request.cluster.num_devices} x {request.cluster.device_type}"
    request.draw(
        {
            f"{row_tokens:,} tokens, {plan.remat}": plan
            for row_tokens, plan in sorted(by_length.items())
        },
        subject=f"{devices}, {report.format_mesh(center.mesh)}",
    )


def plan_meshes(request: PlanRequest) -> None:
    """Plans every mesh."""
    (row_tokens,) = request.row_lengths
    # each mesh replaces the degree
    config = request.config.with_degrees(dict.fromkeys(request.config.data.row_lengths, 1))
    config = config.with_row_tokens(row_tokens)
    model = request.sizes.model
    cluster = request.cluster
    console = request.console
    combinations = mesh_sweep.list_combinations(config, model, num_devices=cluster.num_devices)
    console.print(f"{len(combinations)} combinations of mesh and attention strategy to compile:")
    progress = Progress(len(combinations))

    def print_mesh(mesh_plan: MeshPlan) -> None:
        console.print(report.format_mesh_plan(mesh_plan, progress=progress.advance()))

    mesh_plans = mesh_sweep.plan_meshes(
        config,
        model=model,
        cluster=cluster,
        document_tokens=request.args.document_tokens,
        data=request.find_data(config),
        on_result=print_mesh,
    )
    rows = f"{config.batch.rows_per_step} rows of {config.data.max_row_tokens:,} tokens per step"
    workload = f"{rows} on {cluster.num_devices} x {cluster.device_type}"
    console.print(workload)
    console.print(tables.format_ranking(mesh_plans))
    if request.args.plot:
        plans = {
            f"{report.format_mesh(mesh_plan.mesh)}, {mesh_plan.strategy}": mesh_plan.plan
            for mesh_plan in mesh_plans
            if mesh_plan.plan is not None
        }
        request.draw(plans, subject=workload)
    request.write_json({"meshes": [dataclasses.asdict(mesh_plan) for mesh_plan in mesh_plans]})


def plan_meshes_per_length(request: PlanRequest) -> None:
    """Plans every mesh for each row length, and compares one degree with one per length."""
    config = request.config
    cluster = request.cluster
    console = request.console
    lengths = request.row_lengths
    count = itertools.count(1)

    def print_result(result: LengthPlan) -> None:
        label = f"{next(count)}: {result.row_tokens:,} tokens"
        console.print(report.format_mesh_plan(result.mesh_plan, progress=label))

    console.print(
        "combinations of row length, mesh and attention strategy, the longest rows first:"
    )
    results = DegreeSweep(
        config,
        model=request.sizes.model,
        cluster=cluster,
        row_lengths=lengths,
        document_tokens=request.args.document_tokens,
        data=request.data,
        on_result=print_result,
    ).run()
    ranked = {}
    for row_tokens in lengths:
        # different degrees of the longest rows may give the same step
        of_length = {
            id(result.mesh_plan): result.mesh_plan
            for result in results
            if result.row_tokens == row_tokens
        }
        ranked[row_tokens] = mesh_sweep.sort_by_rank(list(of_length.values()))
        console.print(
            f"{row_tokens:,} tokens per row on {cluster.num_devices} x {cluster.device_type}"
        )
        console.print(tables.format_ranking(ranked[row_tokens]))
    one = degree_sweep.choose_one_degree(results, lengths)
    several = degree_sweep.choose_degrees(results, lengths)
    console.print(degree_report.format_choices(one, several, config=config, data=request.data))
    request.write_json(
        {
            "meshes": {
                row_tokens: [dataclasses.asdict(mesh_plan) for mesh_plan in mesh_plans]
                for row_tokens, mesh_plans in ranked.items()
            },
            "one_degree": one and dataclasses.asdict(one),
            "degree_per_length": several and dataclasses.asdict(several),
        }
    )
