"""Questions of `jaxsp plan`: one step, a table of GPUs, the longest row, or a ranking of meshes."""

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
from jaxsp.planner.compile.compiled import Cluster
from jaxsp.planner.mesh_sweep import MeshPlan
from jaxsp.planner.planning import Plan
from jaxsp.planner.progress import Progress
from jaxsp.planner.search import TriedLength


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
        """Replaces `auto` in mesh.seq and batch.rows_per_microbatch by the numbers that training
        chooses on some GPUs.

        Raises: UserError if there are none.
        """
        given = self.config
        config = planning.resolve_config(given, model=self.sizes.model, cluster=cluster)
        cluster_name = f"{cluster.num_devices} x {cluster.device_type}"
        if given.mesh.seq == "auto":
            self.console.print(f"mesh.seq = auto on {cluster_name}: {config.mesh.seq}")
        if given.batch.rows_per_microbatch == "auto":
            rows = config.batch.rows_per_microbatch
            self.console.print(f"batch.rows_per_microbatch = auto on {cluster_name}: {rows}")
        return config

    def plan(self, config: Config, cluster: Cluster) -> Plan:
        """Plans a step. Raises: UserError."""
        return planning.plan_step(
            config,
            model=self.sizes.model,
            cluster=cluster,
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
            result = result | {"published_sizes": self.sizes.note or None}
            files.write_output(self.json_file, files.to_json(result))
            self.console.print(f"written: {self.json_file}")

    def draw(self, plans: Mapping[str, Plan]) -> None:
        """Draws plans by their labels, if there is a `plot_file`."""
        if self.plot_file is None or not plans:
            return
        devices = f"{self.cluster.num_devices} x {self.cluster.device_type}"
        title = f"{self.model_name} on {devices}: planned, not measured"
        plots.plot_plans(plans, self.plot_file, title=title)
        self.console.print(f"drawn: {self.plot_file}")

    def draw_lengths(self, plans: Sequence[Plan]) -> None:
        """Draws plans of several row lengths, the shortest at the top."""
        ordered = sorted(plans, key=lambda plan: plan.row_tokens)
        self.draw({f"{plan.row_tokens:,} tokens, {plan.remat}": plan for plan in ordered})


def plan_one(request: PlanRequest) -> None:
    """Plans the config's step."""
    plan = request.plan(request.resolve_config(request.cluster), request.cluster)
    request.print_plan(plan)
    request.write_json(dataclasses.asdict(plan))
    request.draw_lengths([plan])


def plan_several(request: PlanRequest, clusters: Sequence[Cluster]) -> None:
    """Plans the config's step on each kind of GPU."""
    plans = []
    refusals = []
    progress = Progress(len(clusters))
    for cluster in clusters:
        devices = f"{cluster.num_devices} x {cluster.device_type}"
        try:
            plan = request.plan(request.resolve_config(cluster), cluster)
        except UserError as error:
            refusals.append(f"{devices}: {str(error).splitlines()[0]}")
            request.console.print(f"{devices}: refused [{progress.advance()}]")
            continue
        spent = durations.describe(plan.plan_s)
        request.console.print(f"{devices}: compiled in {spent} [{progress.advance()}]")
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
    request.draw_lengths([length.plan for length in longest.tried if length.plan is not None])


def plan_meshes(request: PlanRequest) -> None:
    """Plans every mesh."""
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
    rows = f"{config.batch.rows_per_step} rows of {config.data.row_tokens:,} tokens per step"
    console.print(f"{rows} on {cluster.num_devices} x {cluster.device_type}")
    console.print(tables.format_ranking(mesh_plans))
    request.draw(
        {
            f"{report.format_mesh(mesh_plan.mesh)}, {mesh_plan.strategy}": mesh_plan.plan
            for mesh_plan in mesh_plans
            if mesh_plan.plan is not None
        }
    )
    request.write_json({"meshes": [dataclasses.asdict(mesh_plan) for mesh_plan in mesh_plans]})
