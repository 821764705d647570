"""Results of the command `jaxsp.plan`: one step, a table of GPUs and row lengths, the longest row,
or a ranking of meshes."""

import dataclasses
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console

from jaxsp.config.schema import Config
from jaxsp.core import durations, files
from jaxsp.core.errors import UserError
from jaxsp.hf.published import ModelSizes
from jaxsp.planner import mesh_sweep, planning, plots, report, search, tables
from jaxsp.planner.compile import compiled
from jaxsp.planner.compile.compiled import Cluster
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
    """A config and its model, for one kind of GPU, and where results go."""

    config: Config
    sizes: ModelSizes
    cluster: Cluster
    console: rich.console.Console
    document_tokens: int | None = None
    """Length of the documents that fill the rows; None: each row is one document."""
    train_tokens: float | None = None
    """Tokens to train on, for the cost; None if they are unknown."""
    json_file: pathlib.Path | None = None
    plot_file: pathlib.Path | None = None

    @property
    def model_name(self) -> str:
        """The model's name in output."""
        name = self.config.model.source or "the config's model"
        return f"{name} (published sizes)" if self.sizes.published else name

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
            document_tokens=self.document_tokens,
        )

    def print_plan(self, plan: Plan) -> None:
        """Prints the report of a plan."""
        self.console.print(
            report.format_plan(plan, model=self.model_name, tokens=self.train_tokens)
        )

    def write_json(self, result: dict[str, Any]) -> None:
        """Writes a result, and the source of published model sizes, to `json_file`."""
        if self.json_file:
            files.write_json(self.json_file, result | {"published_sizes": self.sizes.note or None})
            self.console.print(f"written: {self.json_file}")

    def draw(self, plans: Mapping[str, Plan], *, subject: str) -> None:
        """Draws plans by their labels in `plot_file`."""
        assert self.plot_file is not None, "callers check for a file"
        title = f"{self.model_name}, {subject}: planned, not measured"
        plots.plot_plans(plans, self.plot_file, title=title)
        self.console.print(f"drawn: {self.plot_file}")


def plan_one(request: PlanRequest) -> None:
    """Plans the config's step."""
    (row_tokens,) = request.config.data.row_lengths
    config = request.resolve_config(request.cluster).with_row_tokens(row_tokens)
    plan = request.plan(config)
    request.print_plan(plan)
    request.write_json(dataclasses.asdict(plan))
    _draw_lengths(request, config, plan, [plan], _PLOT_FACTORS)


def plan_several(request: PlanRequest, clusters: Sequence[Cluster]) -> None:
    """Plans the config's steps for rows of each length, on each kind of GPU."""
    plans = []
    refusals = []
    row_lengths = request.config.data.row_lengths
    progress = Progress(len(clusters) * len(row_lengths))
    for cluster in clusters:
        devices = f"{cluster.num_devices} x {cluster.device_type}"
        try:
            config = request.resolve_config(cluster)
        except UserError as error:
            refusals.append(f"{devices}: {str(error).splitlines()[0]}")
            continue
        for row_tokens in row_lengths:
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
    request.write_json({"plans": [dataclasses.asdict(plan) for plan in plans]})


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
    """Draws plans, and more of them for rows of other lengths, if there is a `plot_file`.

    Args: config: the config of one row length.
    """
    if not request.plot_file:
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
    """Plans every mesh, for the longest rows."""
    config = request.config
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
        document_tokens=request.document_tokens,
        on_result=print_mesh,
    )
    rows = f"{config.batch.rows_per_step} rows of {config.data.max_row_tokens:,} tokens per step"
    if len(config.data.row_lengths) > 1:
        rows += " (the longest rows decide what fits)"
    workload = f"{rows} on {cluster.num_devices} x {cluster.device_type}"
    console.print(workload)
    console.print(tables.format_ranking(mesh_plans))
    if request.plot_file:
        plans = {
            f"{report.format_mesh(mesh_plan.mesh)}, {mesh_plan.strategy}": mesh_plan.plan
            for mesh_plan in mesh_plans
            if mesh_plan.plan is not None
        }
        request.draw(plans, subject=workload)
    request.write_json({"meshes": [dataclasses.asdict(mesh_plan) for mesh_plan in mesh_plans]})
