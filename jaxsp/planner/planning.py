"""A plan: what a config's training step takes, sends and computes on GPUs that are not there, and whether it fits."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxsp import attention
from jaxsp.config import schema
from jaxsp.core import axes, errors
from jaxsp.model import flops
from jaxsp.model.config import ModelConfig
from jaxsp.planner.compile import budget, compiled, memory
from jaxsp.planner.cost import comms, roofline
from jaxsp.runtime import device_mesh
from jaxsp.training import memory_fit, memory_options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known of a step without running it; sizes in GiB (2**30 bytes), times in seconds, of each device."""

    device: str
    """From gpus.KINDS."""
    num_devices: int
    node_devices: int
    mesh: Mapping[str, int]
    row_tokens: int
    rows_per_step: int
    rows_at_once: int
    max_documents_per_row: int
    document_tokens: int
    """That the rows are thought to be filled with documents of; attention's arithmetic depends on it."""
    attention: str
    """How the devices of a group share it, such as `Ulysses of 8`; empty where there is one."""
    attention_bytes: int
    """That a device sends for a layer in a turn, by the formula;"""
    attention_others: Mapping[str, int]
    """and what it would by other kinds."""
    kernel: str
    why_not_cudnn: str
    """Where the kernel is not cuDNN, though nobody asked for another."""
    head_chunks: int
    remat: str
    """As decided, where the config says auto."""
    mlp_tile_tokens: int
    """MLP tile size as decided; all of a device's tokens if there are no tiles."""
    loss_tile_tokens: int
    """Loss tile size as decided; all of a device's tokens if there are no tiles."""
    levers: str
    """All of them in words."""
    offload_activations: str
    offload_optimizer: str
    fits: bool
    binds: str
    """`device` or `host`: what does not fit, or else the one that is fuller."""
    short: str
    """What does not fit, in words; empty if all does."""
    ways_out: Sequence[str]
    """Levers of the config that are not turned yet, and other changes, where it does not fit."""
    device_gib: float
    """What JAX takes of a device, cuDNN's allowance included;"""
    room_gib: float
    """and what it may."""
    host_gib: float
    """What arrays take of a node's memory, all its devices together;"""
    host_room_gib: float
    """and what they may."""
    host_pool_gib: float
    """Size of XLA's pool of pinned host memory, for all devices of a node: a power of two for each,
    up to a limit."""
    memory: Mapping[str, float]
    """Memory by cause on a device, at its peak. All except `kept free` add up to device_gib."""
    host_memory: Mapping[str, float]
    """By cause, in a node, when it is fullest; adds up to host_gib."""
    causes: Sequence[Mapping[str, Any]]
    """Each cause at its own fullest moment, beside its formula where it has one: name, device_gib, host_gib, formula_gib."""
    bytes_moved: float
    """That a device sends in a step, by the compiled program;"""
    bytes_formula: float
    """and by the formulas."""
    moved: Sequence[Mapping[str, Any]]
    """Collectives of a step by kind: kind, axes, bytes, formula, estimated seconds, and those that
    nothing overlaps."""
    flops_needed: float
    """As in metrics.jsonl's tflops_per_device: causal, document by document, nothing computed twice;"""
    flops_executed: float | None
    """and what the compiled program does. None, as what follows, where there is no estimate."""
    host_bytes: tuple[float, float] | None
    """From the host to a device in a step, and back."""
    step_s_estimate: float | None
    """From a roofline of published rates, which are for bfloat16 and cuDNN; None for others. A measured step is likely to
    take roofline.LIKELY times as long."""
    tokens_per_s_estimate: float | None
    """Of all devices, if the rows are full."""
    mfu_estimate: float | None
    seconds_estimate: Mapping[str, float]
    """Estimated seconds by cause."""
    limited_by: str | None
    """The cause that takes most of the time."""
    transfers: Sequence[Mapping[str, Any]]
    """Collectives and host copies of the program: kind, op_name, bytes and seconds in a step,
    seconds that nothing overlaps, and runs."""
    jax: str
    plan_s: float
    """What it took to compile and read it."""


def of(
    settings: schema.Config,
    *,
    model: ModelConfig,
    site: compiled.Site,
    document_tokens: int | None = None,
) -> Plan:
    """The plan of a config's step for its longest rows.

    Args:
        document_tokens: of the documents that fill the rows; None: each row is one document.
    Raises: UserError for what training would refuse before it compiles, and for rows of several lengths; RuntimeError where XLA
        offloads nothing that it should.
    """
    began = time.perf_counter()
    sizes = device_mesh.shape(settings.mesh, site.num_devices)
    heads = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    found, degree = memory_options.problems(settings, platform="gpu"), None
    try:
        degree = attention.choose_kind(settings, window=model.sliding_window, **heads).degree
    except errors.UserError as problem:
        found.extend(problem.problems)
    found.extend(device_mesh.divisions(settings, sizes, degree=degree))
    lengths, most = settings.data.row_lengths, settings.data.max_documents_per_row
    if len(lengths) > 1:
        found.append(
            f"data.row_tokens = {list(lengths)}: must be one length in a plan. Use data.row_tokens={settings.data.longest_row}."
        )
    if document_tokens is not None and -(-settings.data.longest_row // document_tokens) > most:
        found.append(
            f"--document-tokens = {document_tokens}: rows of {settings.data.longest_row:,} tokens hold {most} documents at "
            f"most (data.max_documents_per_row). Use {-(-settings.data.longest_row // most)} or more."
        )
    if found:
        raise errors.UserError(found)
    devices = compiled.devices(site.kind, site.num_devices)
    device_bytes = int(site.limits.device)
    program, choice = compiled.program(settings, model=model, devices=devices, device_bytes=device_bytes)
    fitted = memory_fit.fit(
        program,
        room=memory_fit.room_of(program, site.limits),
        uncounted=choice.uncounted_bytes,
        compile_step=lambda candidate: compiled.compile_step(candidate, choice),
        measure=budget.needs_of,
    )
    memory_options.check_offloads(fitted.program, fitted.needs)
    return _plan(fitted, settings=settings, site=site, document_tokens=document_tokens, began=began)


def _plan(
    fitted: memory_fit.Fitted,
    *,
    settings: schema.Config,
    site: compiled.Site,
    document_tokens: int | None,
    began: float,
) -> Plan:
    step, program, needs, room, gib = fitted.run, fitted.program, fitted.needs, fitted.room, memory_fit.GIB
    found = budget.of_step(step)
    sent = comms.sent(step.written.text)
    formula = comms.formula(program)
    length = min(document_tokens or settings.data.longest_row, settings.data.longest_row)
    pieces = roofline.filled(rows=settings.batch.rows_per_step, row_tokens=settings.data.longest_row, document_tokens=length)
    expected = roofline.estimate(step, sent, ceilings=site.gpu.ceilings, node_devices=site.node_devices, piece_lengths=pieces)
    needed = flops.step_flops(program.model, pieces) / program.mesh.size
    step_s = expected.step_s if expected else None
    tokens = settings.batch.rows_per_step * settings.data.longest_row
    reserved = site.gpu.memory_bytes - room.device
    device_is_short = needs.total > room.device
    return Plan(
        device=site.kind,
        num_devices=site.num_devices,
        node_devices=site.node_devices,
        mesh={axis: program.mesh.shape[axis] for axis in axes.ALL},
        row_tokens=settings.data.longest_row,
        rows_per_step=settings.batch.rows_per_step,
        rows_at_once=settings.batch.rows_at_once,
        max_documents_per_row=settings.data.max_documents_per_row,
        document_tokens=length,
        attention=step.choice.kind.words,
        attention_bytes=step.choice.bytes,
        attention_others=dict(step.choice.others),
        kernel=step.choice.kernel,
        why_not_cudnn=step.choice.why,
        head_chunks=step.choice.head_chunks,
        remat=program.how.remat,
        mlp_tile_tokens=min(program.tile, program.tokens),
        loss_tile_tokens=min(program.loss_tile, program.tokens),
        levers=memory_options.describe(program),
        offload_activations=settings.memory.offload_activations,
        offload_optimizer=settings.memory.offload_optimizer,
        fits=not fitted.shortage,
        binds="device"
        if device_is_short or (needs.host <= room.host and needs.total / room.device >= needs.host / room.host)
        else "host",
        short=fitted.shortage,
        ways_out=memory_options.ways_out(dataclasses.replace(program, config=settings), device_is_short=device_is_short)
        if fitted.shortage
        else [],
        device_gib=needs.total / gib,
        room_gib=room.device / gib,
        host_gib=needs.host * site.node_devices / gib,
        host_room_gib=room.host * site.node_devices / gib,
        host_pool_gib=_pool(fitted, room) * site.node_devices / gib,
        memory={name: size / gib for name, size in found.device.items()} | {budget.RESERVED: reserved / gib},
        host_memory={name: size * site.node_devices / gib for name, size in found.host.items() if size},
        causes=[
            {
                "name": cause.name,
                "device_gib": cause.device / gib,
                "host_gib": cause.host / gib,
                "formula_gib": None if cause.formula is None else cause.formula / gib,
            }
            for cause in memory.causes(step)
        ],
        bytes_moved=comms.total(sent),
        bytes_formula=sum(formula.values()),
        moved=_moved(sent, formula, program.mesh.shape, expected),
        flops_needed=needed,
        flops_executed=expected.flops_executed if expected else None,
        host_bytes=expected.host_bytes if expected else None,
        step_s_estimate=step_s,
        tokens_per_s_estimate=tokens / step_s if step_s else None,
        mfu_estimate=needed / step_s / site.gpu.ceilings.peak_tflops / 1e12 if step_s else None,
        seconds_estimate=expected.seconds if expected else {},
        limited_by=roofline.limiting(expected.seconds) if expected else None,
        transfers=[dataclasses.asdict(one) for one in expected.transfers] if expected else [],
        jax=jax.__version__,
        plan_s=time.perf_counter() - began,
    )


def _pool(fitted: memory_fit.Fitted, room: memory_fit.Room) -> float:
    """Bytes of pinned host memory for each device."""
    if not fitted.needs.host:
        return 0.0
    limit = min(room.host, memory_fit.pool_bytes(memory_fit.offloaded_by(fitted.program)))
    return max(float(fitted.needs.host), device_mesh.pool_size(fitted.needs.host, limit))


def _moved(
    sent: Sequence[comms.Sent],
    formula: Mapping[str, float],
    sizes: Mapping[str, int],
    expected: roofline.Estimate | None,
) -> list[dict[str, Any]]:
    """What is sent, by kind, beside the formula of the kind. All-reduces of gradients go along one axis and along all."""
    found: dict[str, dict[str, Any]] = {}
    for one in comms.along(sent, sizes):
        of_kind = found.setdefault(
            one.kind, {"kind": one.kind, "axes": [], "bytes": 0.0, "formula": formula.get(one.kind, 0.0)}
        )
        of_kind["axes"].append(" x ".join(one.axes))
        of_kind["bytes"] += one.bytes
    for of_kind in found.values():
        own = [one for one in expected.transfers if one.kind == of_kind["kind"]] if expected else []
        of_kind["seconds"] = sum(one.seconds for one in own) if expected else None
        of_kind["waited_s"] = sum(one.waited_s for one in own) if expected else None
    return list(found.values())
