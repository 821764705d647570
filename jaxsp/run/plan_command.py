"""Work of the command `jaxsp plan`: one step, a table of GPUs, the longest row, or all meshes."""

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import rich.console

from jaxsp.config import yaml_io
from jaxsp.core import units
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.hf import context_range, folder, peft, published
from jaxsp.objectives.distill import find_teacher
from jaxsp.planning import absent, planner, report, searches
from jaxsp.planning.absent import Cluster
from jaxsp.planning.planner import Plan
from jaxsp.run import preview
from jaxsp.run.config_file import Config
from jaxsp.system import hardware


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
    """Plans a config on absent GPUs, and prints the plans: see `jaxsp plan --help`.

    Returns: content of the JSON file.
    """
    console = rich.console.Console(markup=False, highlight=False, soft_wrap=True)
    row_tokens = config.data.row_tokens
    teacher = find_teacher(config.objective)
    sizes = published.read_sizes(config.model, row_tokens=row_tokens, teacher=teacher)
    adapter = peft.resolve(config.adapter, sizes.model)
    model = adapter.model
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
        read = config.with_fields(
            data={"eval": ()}, eval={"tasks": ()}, run={"generate_samples": 0}
        )
        source = None
        # The sizes may be published ones, without the model's folder
        needs_tokenizer = any(each.needs_tokenizer for each in config.data.train)
        if needs_tokenizer and config.model.tokenizer is None and config.model.source is not None:
            source = folder.find(config.model.source)
        num_steps = preview.print_data(read, source, model, console, ProblemCollector())
    if tokens is None and num_steps is not None:
        tokens = float(num_steps * config.batch.rows_per_step * row_tokens)
    cluster = clusters[0]
    if host_gib is None or node_devices is None:
        console.print(
            f"assumed: nodes of {cluster.node_devices} GPUs with {cluster.node_host_gib:,.0f} GiB "
            "of memory (--node-devices, --host-gib)"
        )
    step = config.step

    def plan_one(cluster: Cluster) -> Plan:
        """Plans the step, and prints the numbers that training chooses for `auto`."""
        resolved = planner.resolve_config(step, model=model, cluster=cluster)
        on = f"= auto on {cluster.num_devices} x {cluster.device_type}"
        if step.mesh.seq == "auto":
            console.print(f"mesh.seq {on}: {resolved.mesh.seq}")
        if step.rows_per_microbatch == "auto":
            console.print(f"batch.rows_per_microbatch {on}: {resolved.rows_per_microbatch}")
        return planner.plan_step(
            resolved, model=model, cluster=cluster, document_tokens=document_tokens
        )

    devices_text = f"{cluster.num_devices} x {cluster.device_type}"
    found: Plan | None = None
    result: dict[str, Any] = {}
    if len(clusters) > 1:
        result = _compare(clusters, plan_one, console, tokens=tokens)
    elif mode == "meshes":
        combinations = searches.list_combinations(step, model, num_devices=cluster.num_devices)
        num = len(combinations)
        console.print(f"{num} combinations of mesh and attention strategy to compile:")
        counts = (f"{number} of {num}" for number in itertools.count(1))
        mesh_plans = searches.plan_meshes(
            step,
            model=model,
            cluster=cluster,
            document_tokens=document_tokens,
            on_result=lambda x: console.print(report.format_mesh_plan(x, count=next(counts))),
        )
        rows = f"{step.rows_per_step} rows of {row_tokens:,} tokens per step"
        console.print(f"{rows} on {devices_text}")
        console.print(report.format_ranking(mesh_plans))
        result = {"meshes": [dataclasses.asdict(mesh_plan) for mesh_plan in mesh_plans]}
    elif mode == "longest":
        began = time.perf_counter()
        console.print(f"the longest row on {devices_text}:")
        row = searches.find_longest_row(
            step,
            model=model,
            cluster=cluster,
            on_result=lambda length: console.print(report.format_length(length)),
        )
        console.print(report.format_longest(row, seconds=time.perf_counter() - began))
        found = row.plan or row.shortest_failing.plan
        tried = [
            {"row_tokens": x.row_tokens, "fits": not x.problem, "why": x.problem} for x in row.tried
        ]
        result = {"longest_row_tokens": row.plan and row.plan.row_tokens, "tried": tried}
    else:
        found = plan_one(cluster)
    if found is not None:
        name = config.model.source or "the config's model"
        name += " (published sizes)" if sizes.published else ""
        console.print(report.format_plan(found, model=name, tokens=tokens))
        result = dataclasses.asdict(found) | result
    return result | {"published_sizes": sizes.note or None}


def _compare(
    clusters: Sequence[Cluster],
    plan_one: Callable[[Cluster], Plan],
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
            plans.append(plan_one(cluster))
            outcome = f"compiled in {units.format_seconds(plans[-1].plan_s)}"
        except UserError as error:
            refusals.append(f"{devices}: {str(error).splitlines()[0]}")
        console.print(f"{devices}: {outcome}")
    if not plans:
        raise UserError(refusals)
    console.print(report.format_comparison(plans, tokens=tokens))
    for refusal in refusals:
        console.print(f"refused: {refusal}")
    return {"plans": [dataclasses.asdict(each) for each in plans]}


def count_devices(config: Config, num_devices: int | None, *, is_fixed: bool = True) -> int:
    """Number of devices: by default the product of the mesh, with data=-1 filling a node of 8.

    Args: is_fixed: the config's mesh must fit them.
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
