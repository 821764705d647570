"""A plan: what a config's training step takes, sends and computes on GPUs that are not there, and whether it fits."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxsp import attention
from jaxsp.config.schema import Config
from jaxsp.core import axes
from jaxsp.core.errors import UserError
from jaxsp.model import flops
from jaxsp.model.config import ModelConfig
from jaxsp.planner.compile import compiled, memory
from jaxsp.planner.compile.compiled import Cluster
from jaxsp.planner.cost import comms, roofline
from jaxsp.planner.cost.comms import Collective
from jaxsp.planner.cost.roofline import TimeEstimate
from jaxsp.runtime import device_mesh, memory_limits
from jaxsp.training import memory_fit, memory_options
from jaxsp.training.memory_fit import CompiledStep, MemoryLimit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known of a step without running it; sizes in GiB (2**30 bytes), times in seconds, of each device."""

    device_type: str
    """From gpus.KINDS."""
    num_devices: int
    node_devices: int
    mesh: Mapping[str, int]
    row_tokens: int
    rows_per_step: int
    rows_per_microbatch: int
    max_segments_per_row: int
    document_tokens: int
    """That the rows are thought to be filled with documents of; attention's arithmetic depends on it."""
    strategy: str
    """How the devices of a group share it, such as `Ulysses of 8`; empty where there is one."""
    attention_bytes: int
    """That a device sends for a layer in a turn, by the formula;"""
    alternative_bytes: Mapping[str, int]
    """and what it would by other kinds."""
    kernel: str
    kernel_title: str
    """Name of the kernel in sentences."""
    fallback_reason: str
    """Reason that `auto` did not use its first kernel; empty if it did."""
    head_chunks: int
    remat: str
    """As decided, where the config says auto."""
    mlp_tile_tokens: int
    """MLP tile size as decided; all of a device's tokens if there are no tiles."""
    loss_tile_tokens: int
    """Loss tile size as decided; all of a device's tokens if there are no tiles."""
    memory_options: str
    """All of them in words."""
    offload_activations: str
    offload_optimizer: str
    fits: bool
    memory_bottleneck: str
    """`device` or `host`: what does not fit, or else the one that is fuller."""
    shortage: str
    """What does not fit, in words; empty if all does."""
    suggestions: Sequence[str]
    """Levers of the config that are not turned yet, and other changes, where it does not fit."""
    device_gib: float
    """What JAX takes of a device, cuDNN's allowance included;"""
    device_limit_gib: float
    """and what it may."""
    host_gib: float
    """What arrays take of a node's memory, all its devices together;"""
    host_limit_gib: float
    """and what they may."""
    host_pool_gib: float
    """Size of XLA's pool of pinned host memory, for all devices of a node: a power of two for each,
    up to a limit."""
    memory: Mapping[str, float]
    """Memory by cause on a device, at its peak. All except `kept free` add up to device_gib."""
    host_memory: Mapping[str, float]
    """By cause, in a node, when it is fullest; adds up to host_gib."""
    sent_bytes: float
    """That a device sends in a step, by the compiled program;"""
    formula_bytes: float
    """and by the formulas."""
    collectives: Sequence[Mapping[str, Any]]
    """Collectives of a step by kind: kind, axes, bytes, formula, estimated seconds, and those that
    nothing overlaps."""
    model_flops: float
    """As in metrics.jsonl's tflops_per_device: causal, document by document, nothing computed twice;"""
    hardware_flops: float | None
    """and what the compiled program does. None, as what follows, where there is no estimate."""
    host_copy_bytes: tuple[float, float] | None
    """From the host to a device in a step, and back."""
    step_s_estimate: float | None
    """From a roofline of published rates, which are for bfloat16 and cuDNN; None for others. A measured step is likely to
    take roofline.LIKELY times as long."""
    tokens_per_s_estimate: float | None
    """Of all devices, if the rows are full."""
    mfu_estimate: float | None
    seconds_estimate: Mapping[str, float]
    """Estimated seconds by cause."""
    time_bottleneck: str | None
    """The cause that takes most of the time."""
    transfers: Sequence[Mapping[str, Any]]
    """Collectives and host copies of the program: kind, op_name, bytes and seconds in a step,
    seconds that nothing overlaps, and runs."""
    jax_version: str
    plan_s: float
    """What it took to compile and read it."""


def plan_step(
    config: Config,
    *,
    model: ModelConfig,
    cluster: Cluster,
    document_tokens: int | None = None,
) -> Plan:
    """The plan of a config's step for its longest rows.

    Args:
        document_tokens: of the documents that fill the rows; None: each row is one document.
    Raises: UserError for what training would refuse before it compiles, and for rows of several lengths; RuntimeError where XLA
        offloads nothing that it should.
    """
    began = time.perf_counter()
    sizes = device_mesh.resolve_axis_sizes(config.mesh, cluster.num_devices)
    found, degree = memory_options.find_problems(config, platform="gpu"), None
    try:
        degree = attention.choose_strategy(config, model).layout_degree
    except UserError as problem:
        found.extend(problem.problems)
    found.extend(device_mesh.find_division_problems(config, sizes, degree=degree))
    lengths, most = config.data.row_lengths, config.data.max_segments_per_row
    if len(lengths) > 1:
        found.append(
            f"data.row_tokens = {list(lengths)}: must be one length in a plan. Use data.row_tokens={config.data.max_row_tokens}."
        )
    if document_tokens is not None and -(-config.data.max_row_tokens // document_tokens) > most:
        found.append(
            f"--document-tokens = {document_tokens}: rows of {config.data.max_row_tokens:,} tokens hold {most} documents at "
            f"most (data.max_segments_per_row). Use {-(-config.data.max_row_tokens // most)} or more."
        )
    if found:
        raise UserError(found)
    devices = compiled.make_devices(cluster.device_type, cluster.num_devices)
    device_bytes = int(cluster.memory_limit.device)
    program, choice = compiled.build_program(
        config, model=model, devices=devices, device_bytes=device_bytes
    )
    fitted = memory_fit.fit(
        program,
        limit=memory_fit.subtract_reserves(program, cluster.memory_limit),
        workspace_bytes=choice.settings.workspace_bytes,
        compile_step=lambda candidate: compiled.compile_program(candidate, choice),
        measure=memory.measure_step,
    )
    memory_options.check_offloads(fitted.program, fitted.memory_use)
    return _build_plan(
        fitted, config=config, site=cluster, document_tokens=document_tokens, began=began
    )


def _build_plan(
    fitted: CompiledStep,
    *,
    config: Config,
    site: Cluster,
    document_tokens: int | None,
    began: float,
) -> Plan:
    step, program, needs, room, gib = (
        fitted.executable,
        fitted.program,
        fitted.memory_use,
        fitted.memory_limit,
        memory_fit.GIB,
    )
    found = memory.break_down_peak(step)
    sent = comms.parse_collectives(step.dump.hlo_text)
    formula = comms.compute_formula_bytes(program)
    length = min(document_tokens or config.data.max_row_tokens, config.data.max_row_tokens)
    pieces = roofline.make_segment_lengths(
        rows=config.batch.rows_per_step,
        row_tokens=config.data.max_row_tokens,
        document_tokens=length,
    )
    expected = roofline.estimate_step(
        step,
        sent,
        ceilings=site.gpu.ceilings,
        node_devices=site.node_devices,
        segment_lengths=pieces,
    )
    needed = flops.step_flops(program.model, pieces) / program.mesh.size
    step_s = expected.step_s if expected else None
    tokens = config.batch.rows_per_step * config.data.max_row_tokens
    reserved = site.gpu.memory_bytes - room.device
    device_is_short = needs.device_total > room.device
    return Plan(
        device_type=site.device_type,
        num_devices=site.num_devices,
        node_devices=site.node_devices,
        mesh={axis: program.mesh.shape[axis] for axis in axes.ALL},
        row_tokens=config.data.max_row_tokens,
        rows_per_step=config.batch.rows_per_step,
        rows_per_microbatch=config.batch.rows_per_microbatch,
        max_segments_per_row=config.data.max_segments_per_row,
        document_tokens=length,
        strategy=step.choice.strategy.description,
        attention_bytes=step.choice.sent_bytes,
        alternative_bytes=dict(step.choice.alternatives),
        kernel=step.choice.kernel.name,
        kernel_title=step.choice.kernel.title,
        fallback_reason=step.choice.fallback_reason,
        head_chunks=step.choice.settings.head_chunks,
        remat=program.remat_policy.remat,
        mlp_tile_tokens=min(program.mlp_tile, program.tokens_per_device),
        loss_tile_tokens=min(program.loss_tile, program.tokens_per_device),
        memory_options=memory_options.describe(program),
        offload_activations=config.memory.offload_activations,
        offload_optimizer=config.memory.offload_optimizer,
        fits=not fitted.shortage,
        memory_bottleneck="device"
        if device_is_short
        or (needs.host <= room.host and needs.device_total / room.device >= needs.host / room.host)
        else "host",
        shortage=fitted.shortage,
        suggestions=memory_options.suggest_changes(
            dataclasses.replace(program, config=config), is_device_short=device_is_short
        )
        if fitted.shortage
        else [],
        device_gib=needs.device_total / gib,
        device_limit_gib=room.device / gib,
        host_gib=needs.host * site.node_devices / gib,
        host_limit_gib=room.host * site.node_devices / gib,
        host_pool_gib=_pinned_pool_bytes(fitted, room) * site.node_devices / gib,
        memory={name: size / gib for name, size in found.device.items()}
        | {memory.RESERVED: reserved / gib},
        host_memory={
            name: size * site.node_devices / gib for name, size in found.host.items() if size
        },
        sent_bytes=comms.sum_bytes(sent),
        formula_bytes=sum(formula.values()),
        collectives=_compare_collectives(sent, formula, program.mesh.shape, expected),
        model_flops=needed,
        hardware_flops=expected.hardware_flops if expected else None,
        host_copy_bytes=expected.host_copy_bytes if expected else None,
        step_s_estimate=step_s,
        tokens_per_s_estimate=tokens / step_s if step_s else None,
        mfu_estimate=needed / step_s / site.gpu.ceilings.peak_tflops / 1e12 if step_s else None,
        seconds_estimate=expected.seconds if expected else {},
        time_bottleneck=roofline.find_bottleneck(expected.seconds) if expected else None,
        transfers=[dataclasses.asdict(one) for one in expected.transfers] if expected else [],
        jax_version=jax.__version__,
        plan_s=time.perf_counter() - began,
    )


def _pinned_pool_bytes(fitted: CompiledStep, room: MemoryLimit) -> float:
    """Bytes of pinned host memory for each device."""
    if not fitted.memory_use.host:
        return 0.0
    limit = min(
        room.host, memory_fit.pool_bytes(memory_fit.program_offloaded_bytes(fitted.program))
    )
    return max(
        float(fitted.memory_use.host), memory_limits.pinned_pool_size(fitted.memory_use.host, limit)
    )


def _compare_collectives(
    sent: Sequence[Collective],
    formula: Mapping[str, float],
    sizes: Mapping[str, int],
    expected: TimeEstimate | None,
) -> list[dict[str, Any]]:
    """What is sent, by kind, beside the formula of the kind. All-reduces of gradients go along one axis and along all."""
    found: dict[str, dict[str, Any]] = {}
    for one in comms.sum_by_axes(sent, sizes):
        of_kind = found.setdefault(
            one.operation,
            {
                "kind": one.operation,
                "axes": [],
                "bytes": 0.0,
                "formula": formula.get(one.operation, 0.0),
            },
        )
        of_kind["axes"].append(" x ".join(one.axes))
        of_kind["bytes"] += one.num_bytes
    for of_kind in found.values():
        own = (
            [one for one in expected.transfers if one.operation == of_kind["kind"]]
            if expected
            else []
        )
        of_kind["seconds"] = sum(one.seconds for one in own) if expected else None
        of_kind["waited_s"] = sum(one.exposed_s for one in own) if expected else None
    return list(found.values())
