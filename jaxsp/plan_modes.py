"""Modes of `jaxsp plan`: one step, a table of GPUs, the longest row, or a ranking of meshes."""

import argparse
import dataclasses
import itertools
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import rich.console

from jaxsp import cli
from jaxsp.blocks.config import ModelConfig
from jaxsp.config import yaml_io
from jaxsp.core import durations, files
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.hf import context_range, folder, peft, published
from jaxsp.hf.published import ModelSizes
from jaxsp.planning import absent, longest, meshes, planner, report
from jaxsp.planning.absent import Cluster
from jaxsp.planning.meshes import MeshPlan
from jaxsp.planning.planner import Plan
from jaxsp.run import data_sets
from jaxsp.run.config_file import Config
from jaxsp.system import memory_limits
from jaxsp.training.step_config import StepConfig


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

    def resolve_config(self, cluster: Cluster) -> StepConfig:
        """Replaces `auto` in mesh.seq and batch.rows_per_microbatch by the numbers that training
        chooses on some GPUs.

        Raises: UserError if there are none.
        """
        given = self.config.step
        config = planner.resolve_config(given, model=self.sizes.model, cluster=cluster)
        cluster_name = f"{cluster.num_devices} x {cluster.device_type}"
        if given.mesh.seq == "auto":
            self.console.print(f"mesh.seq = auto on {cluster_name}: {config.mesh.seq}")
        if given.rows_per_microbatch == "auto":
            rows = config.rows_per_microbatch
            self.console.print(f"batch.rows_per_microbatch = auto on {cluster_name}: {rows}")
        return config

    def plan(self, config: StepConfig, cluster: Cluster) -> Plan:
        """Plans a step. Raises: UserError."""
        return planner.plan_step(
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
    request.console.print(report.format_comparison(plans, tokens=request.train_tokens))
    for refusal in refusals:
        request.console.print(f"refused: {refusal}")
    request.write_json({"plans": [dataclasses.asdict(plan) for plan in plans]})


def find_longest(request: PlanRequest) -> None:
    """Finds the longest row that fits."""
    console = request.console
    cluster = request.cluster
    began = time.perf_counter()
    console.print(f"the longest row on {cluster.num_devices} x {cluster.device_type}:")
    found = longest.find_longest_row(
        request.config.step,
        model=request.sizes.model,
        cluster=cluster,
        on_result=lambda length: console.print(report.format_length(length)),
    )
    console.print(report.format_longest(found, seconds=time.perf_counter() - began))
    plan = found.plan or found.shortest_failing.plan
    result = {
        "longest_row_tokens": found.plan and found.plan.row_tokens,
        "tried": [
            {"row_tokens": length.row_tokens, "fits": not length.problem, "why": length.problem}
            for length in found.tried
        ],
    }
    if plan is None:
        request.write_json(result)
        return
    request.print_plan(plan)
    request.write_json(dataclasses.asdict(plan) | result)


def plan_meshes(request: PlanRequest) -> None:
    """Plans every mesh."""
    config = request.config.step
    model = request.sizes.model
    cluster = request.cluster
    console = request.console
    combinations = meshes.list_combinations(config, model, num_devices=cluster.num_devices)
    console.print(f"{len(combinations)} combinations of mesh and attention strategy to compile:")
    numbers = itertools.count(1)

    def print_mesh(mesh_plan: MeshPlan) -> None:
        count = f"{next(numbers)} of {len(combinations)}"
        console.print(report.format_mesh_plan(mesh_plan, count=count))

    mesh_plans = meshes.plan_meshes(
        config,
        model=model,
        cluster=cluster,
        document_tokens=request.document_tokens,
        on_result=print_mesh,
    )
    rows = f"{config.rows_per_step} rows of {config.row_tokens:,} tokens per step"
    console.print(f"{rows} on {cluster.num_devices} x {cluster.device_type}")
    console.print(report.format_ranking(mesh_plans))
    request.write_json({"meshes": [dataclasses.asdict(mesh_plan) for mesh_plan in mesh_plans]})


def run(given: argparse.Namespace, config: Config) -> None:
    """Runs the command for parsed arguments."""
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
    request = PlanRequest(
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
        plan_meshes(request)
    elif given.longest:
        find_longest(request)
    elif len(clusters) > 1:
        plan_several(request, clusters)
    else:
        plan = request.plan(request.resolve_config(clusters[0]), clusters[0])
        request.print_plan(plan)
        request.write_json(dataclasses.asdict(plan))


def _print_data(config: Config, model: ModelConfig, console: rich.console.Console) -> int:
    """Prints rows and steps of the training data, and returns the steps. Raises: UserError."""
    config = config.with_fields(data={"eval": ()}, eval={"tasks": ()}, run={"generate_samples": 0})
    source = None
    # The sizes may be published ones, without the model's folder
    needs_tokenizer = any(each.needs_tokenizer for each in config.data.train)
    if needs_tokenizer and config.model.tokenizer is None and config.model.source is not None:
        source = folder.find(config.model.source)
    return data_sets.print_data(config, source, model, console, ProblemCollector())


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
    return absent.make_cluster(
        device, num_devices, node_devices=given.node_devices, node_host_gib=given.host_gib
    )
