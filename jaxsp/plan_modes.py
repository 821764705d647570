"""Modes of `jaxsp plan`: one step, a table of GPUs, the longest row, or a ranking of meshes."""

import dataclasses
import itertools
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import rich.console

from jaxsp import cli
from jaxsp.config.schema import Config
from jaxsp.core import durations, files
from jaxsp.core.errors import UserError
from jaxsp.hf.published import ModelSizes
from jaxsp.planner import mesh_sweep, planning, report, search, tables
from jaxsp.planner.compile.compiled import Cluster
from jaxsp.planner.mesh_sweep import MeshPlan
from jaxsp.planner.planning import Plan


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
            cli.write_output(self.json_file, files.to_json(result))
            self.console.print(f"written: {self.json_file}")


def plan_several(request: PlanRequest, clusters: Sequence[Cluster]) -> None:
    """Plans the config's step on each kind of GPU."""
    plans = []
    refusals = []
    for cluster in clusters:
        devices = f"{cluster.num_devices} x {cluster.device_type}"
        try:
            plan = request.plan(request.resolve_config(cluster), cluster)
        except UserError as error:
            refusals.append(f"{devices}: {str(error).splitlines()[0]}")
            request.console.print(f"{devices}: refused")
            continue
        spent = durations.describe(plan.plan_s)
        request.console.print(f"{devices}: compiled in {spent}")
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
    longest = search.find_longest_row(
        request.config,
        model=request.sizes.model,
        cluster=cluster,
        on_result=lambda length: console.print(report.format_length(length)),
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


def plan_meshes(request: PlanRequest) -> None:
    """Plans every mesh."""
    config = request.config
    model = request.sizes.model
    cluster = request.cluster
    console = request.console
    combinations = mesh_sweep.list_combinations(config, model, num_devices=cluster.num_devices)
    console.print(f"{len(combinations)} combinations of mesh and attention strategy to compile:")
    numbers = itertools.count(1)

    def print_mesh(mesh_plan: MeshPlan) -> None:
        count = f"{next(numbers)} of {len(combinations)}"
        console.print(report.format_mesh_plan(mesh_plan, count=count))

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
    request.write_json({"meshes": [dataclasses.asdict(mesh_plan) for mesh_plan in mesh_plans]})
