"""Work of the command `jaxsp plan`: one step, a table of GPUs, the longest row, or all meshes."""

import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import rich.console

from jaxsp.blocks.config import ModelConfig
from jaxsp.config import yaml_io
from jaxsp.core import durations
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.hf import context_range, folder, peft, published
from jaxsp.planning import absent, longest, meshes, planner, report
from jaxsp.planning.absent import Cluster
from jaxsp.planning.meshes import MeshPlan
from jaxsp.planning.planner import Plan
from jaxsp.run import data_sets
from jaxsp.run.config_file import Config
from jaxsp.system import hardware
from jaxsp.training.step_config import StepConfig


def plan(
    config: Config,
    *,
    mode: str,
    device: Sequence[str] | None,
    devices: int | None,
    node_devices: int | None,
    host_gib: float | None,
    document_tokens: int | None,
    tokens: float | None,
    data: bool,
) -> dict[str, Any]:
    """Plans a config on absent GPUs, and prints the plans.

    Args: see `jaxsp plan --help`. mode: step, longest or meshes.
    Returns: content of the JSON file. Raises: UserError for what training would refuse.
    """
    console = rich.console.Console(markup=False, highlight=False, soft_wrap=True)
    row_tokens = config.data.row_tokens
    sizes = published.read_sizes(config.model, row_tokens=row_tokens)
    adapter = peft.resolve(config.adapter, sizes.model)
    config = config.model_copy(update={"adapter": adapter.config})
    excess = context_range.describe_excess(sizes.fields, row_tokens=row_tokens)
    for note in filter(None, (sizes.note, excess)):
        console.print(note)
    if mode == "longest" and config.mesh.seq == "auto":
        degree = (devices or hardware.DEVICES_PER_NODE) // config.mesh.replica or 1
        raise UserError(
            "mesh.seq = auto: must be a number with --longest, because it follows from the row "
            f"length. Use mesh.seq={degree}."
        )
    # this machine's GPUs are not used; XLA must not print messages about steps that do not fit
    jax.config.update("jax_platforms", "cpu")
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    # steps that are compiled here do not run
    jax.config.update("jax_enable_compilation_cache", False)
    count = count_devices(config, devices, is_fixed=mode != "meshes")
    clusters = [
        absent.make_cluster(kind, count, node_devices=node_devices, node_host_gib=host_gib)
        for kind in device or ["h100-80gb"]
    ]
    num_steps = config.run.steps
    if data:
        num_steps = _print_data(config, adapter.model, console)
    if tokens is None and num_steps is not None:
        tokens = float(num_steps * config.batch.rows_per_step * row_tokens)
    cluster = clusters[0]
    if host_gib is None or node_devices is None:
        console.print(
            f"assumed: nodes of {cluster.node_devices} GPUs with {cluster.node_host_gib:,.0f} GiB "
            "of memory (--node-devices, --host-gib)"
        )
    plan_one = functools.partial(_plan_step, config.step, adapter.model, document_tokens)
    found: Plan | None = None
    result: dict[str, Any] = {}
    if len(clusters) > 1:
        result = _compare(clusters, plan_one, console, tokens=tokens)
    elif mode == "meshes":
        result = _plan_meshes(config.step, adapter.model, cluster, document_tokens, console)
    elif mode == "longest":
        found, result = _find_longest(config.step, adapter.model, cluster, console)
    else:
        found = plan_one(cluster, console)
    if found is not None:
        name = config.model.source or "the config's model"
        name += " (published sizes)" if sizes.published else ""
        console.print(report.format_plan(found, model=name, tokens=tokens))
        result = dataclasses.asdict(found) | result
    return result | {"published_sizes": sizes.note or None}


def count_devices(config: Config, num_devices: int | None, *, is_fixed: bool = True) -> int:
    """Number of devices: by default the product of the mesh, with data=-1 filling a node of 8.

    Args: is_fixed: the config's mesh must fit them.
    Raises: UserError if it does not.
    """
    mesh = config.mesh
    is_filling = mesh.data == -1
    unit = mesh.replica * (1 if mesh.seq == "auto" else mesh.degree)
    unit *= 1 if is_filling else mesh.data
    groups = -(-hardware.DEVICES_PER_NODE // unit) if is_filling else 1
    count = num_devices or groups * unit
    is_legal = count % unit == 0 if is_filling else count == unit
    if is_fixed and not is_legal:
        rule = f"must be a multiple of {unit}" if is_filling else f"must be {unit}"
        other = "" if is_filling else ", or mesh.data=-1"
        raise UserError(
            f"--devices = {count}: {rule} (mesh.replica = {mesh.replica}, mesh.data = "
            f"{mesh.data}, mesh.seq = {yaml_io.format_value(mesh.seq)}). Use --devices "
            f"{unit}{other}."
        )
    return count


def _plan_step(
    config: StepConfig,
    model: ModelConfig,
    document_tokens: int | None,
    cluster: Cluster,
    console: rich.console.Console,
) -> Plan:
    """Plans a step, and prints the numbers that training chooses for `auto`. Raises: UserError"""
    resolved = planner.resolve_config(config, model=model, cluster=cluster)
    devices = f"{cluster.num_devices} x {cluster.device_type}"
    if config.mesh.seq == "auto":
        console.print(f"mesh.seq = auto on {devices}: {resolved.mesh.seq}")
    if config.rows_per_microbatch == "auto":
        rows = resolved.rows_per_microbatch
        console.print(f"batch.rows_per_microbatch = auto on {devices}: {rows}")
    return planner.plan_step(
        resolved, model=model, cluster=cluster, document_tokens=document_tokens
    )


def _compare(
    clusters: Sequence[Cluster],
    plan_one: Callable[[Cluster, rich.console.Console], Plan],
    console: rich.console.Console,
    *,
    tokens: float | None,
) -> dict[str, Any]:
    """Plans a step on several types of GPUs, and prints a table. Raises: UserError if none can."""
    plans = []
    refusals = []
    for cluster in clusters:
        devices = f"{cluster.num_devices} x {cluster.device_type}"
        outcome = "refused"
        try:
            plans.append(plan_one(cluster, console))
            outcome = f"compiled in {durations.describe(plans[-1].plan_s)}"
        except UserError as error:
            refusals.append(f"{devices}: {str(error).splitlines()[0]}")
        console.print(f"{devices}: {outcome}")
    if not plans:
        raise UserError(refusals)
    console.print(report.format_comparison(plans, tokens=tokens))
    for refusal in refusals:
        console.print(f"refused: {refusal}")
    return {"plans": [dataclasses.asdict(each) for each in plans]}


def _find_longest(
    config: StepConfig, model: ModelConfig, cluster: Cluster, console: rich.console.Console
) -> tuple[Plan | None, dict[str, Any]]:
    """Finds the longest row that fits, or the shortest one that does not.

    Returns: its plan, if it has one; all rows that were tried.
    """
    began = time.perf_counter()
    console.print(f"the longest row on {cluster.num_devices} x {cluster.device_type}:")
    found = longest.find_longest_row(
        config,
        model=model,
        cluster=cluster,
        on_result=lambda length: console.print(report.format_length(length)),
    )
    console.print(report.format_longest(found, seconds=time.perf_counter() - began))
    return found.plan or found.shortest_failing.plan, {
        "longest_row_tokens": found.plan and found.plan.row_tokens,
        "tried": [
            {"row_tokens": length.row_tokens, "fits": not length.problem, "why": length.problem}
            for length in found.tried
        ],
    }


def _plan_meshes(
    config: StepConfig,
    model: ModelConfig,
    cluster: Cluster,
    document_tokens: int | None,
    console: rich.console.Console,
) -> dict[str, Any]:
    """Plans every mesh, and ranks them."""
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
        document_tokens=document_tokens,
        on_result=print_mesh,
    )
    rows = f"{config.rows_per_step} rows of {config.row_tokens:,} tokens per step"
    console.print(f"{rows} on {cluster.num_devices} x {cluster.device_type}")
    console.print(report.format_ranking(mesh_plans))
    return {"meshes": [dataclasses.asdict(mesh_plan) for mesh_plan in mesh_plans]}


def _print_data(config: Config, model: ModelConfig, console: rich.console.Console) -> int:
    """Prints rows and steps of the training data, and returns the steps. Raises: UserError."""
    config = config.with_fields(data={"eval": ()}, eval={"tasks": ()}, run={"generate_samples": 0})
    source = None
    # The sizes may be published ones, without the model's folder
    needs_tokenizer = any(each.needs_tokenizer for each in config.data.train)
    if needs_tokenizer and config.model.tokenizer is None and config.model.source is not None:
        source = folder.find(config.model.source)
    return data_sets.print_data(config, source, model, console, ProblemCollector())
