"""Plans: memory, communication and time of a config's training step on absent GPUs."""

import dataclasses
import time
from collections.abc import Mapping, Sequence

import jax

from jaxsp.attention.selection import choose_strategy, describe_exceptions
from jaxsp.blocks.config import ModelConfig
from jaxsp.core import axes
from jaxsp.core.errors import UserError
from jaxsp.core.units import GIB
from jaxsp.model import decoder
from jaxsp.optimizers import param_groups
from jaxsp.planning import absent, candidates, estimate, fit, hlo, step_time
from jaxsp.planning.absent import Cluster
from jaxsp.planning.fit import CompiledStep
from jaxsp.planning.hlo import Collective
from jaxsp.planning.step_time import TimeEstimate
from jaxsp.system import device_mesh, hardware
from jaxsp.training import step_descriptions
from jaxsp.training.specs import find_division_problems, make_spec
from jaxsp.training.step_config import StepConfig

RESERVED = "reserved"
"""Cause of memory in a plan: CUDA's context, NCCL's buffers and fragmentation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedCollective:
    """The collectives of one kind in a step."""

    kind: str
    axes: Sequence[str]
    """Axes of the mesh that they run along, such as `data x seq`."""
    bytes: float
    """Bytes that a device sends in a step, read from the compiled program."""
    node_bytes: float
    """Bytes that leave the busiest node."""
    num_runs: int
    seconds: float | None
    """Estimate; None without a time estimate."""
    waited_s: float | None
    """Those seconds that no computation overlaps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Facts and estimates about a step that was compiled but not run.

    Sizes are in GiB (2**30 bytes), times in seconds; both are for one device unless noted.
    """

    device_type: str
    num_devices: int
    node_devices: int
    """GPUs of a node."""
    mesh: Mapping[str, int]
    row_tokens: int
    rows_per_step: int
    rows_per_microbatch: int
    max_segments_per_row: int
    document_tokens: int
    """Assumed length of the documents that fill the rows; attention's arithmetic depends on it."""
    layers: str
    """Description of the blocks of the layers; empty if all have attention and an MLP."""
    strategy: str
    """Description of the attention strategy, such as `Ulysses of 8`; empty for groups of one
    device."""
    attention_bytes: int
    """Bytes that a device sends for attention per layer and microbatch, by formula."""
    alternative_bytes: Mapping[str, int]
    """The same for the other strategies that `auto` considered, by description."""
    kernel: str
    kernel_title: str
    """Name of the kernel for use in sentences."""
    fallback_reason: str
    """Reason that `auto` did not use its preferred kernel; empty if it did."""
    head_chunks: int
    remat: str
    """Value of memory.remat that the step uses; never `auto`."""
    mlp_tile_tokens: int
    """MLP tile size that the step uses; all of a device's tokens if there are no tiles."""
    loss_tile_tokens: int
    """Loss tile size that the step uses; all of a device's tokens if there are no tiles."""
    options: str
    """Description of all memory options, and of products in 8 bits."""
    fits: bool
    memory_bottleneck: str
    """Memory that runs out first: `device` or `host`."""
    shortage: str
    """Description of the memory that does not fit; empty if all fits."""
    suggestions: Sequence[str]
    """Changes of the config: if the step does not fit, those that need less memory, else those
    that use more and are faster."""
    device_gib: float
    """Device memory that the step needs, including the allowance for cuDNN."""
    device_limit_gib: float
    """Device memory that JAX may use."""
    host_gib: float
    """Host memory of a node that the offloaded arrays of its devices need."""
    host_limit_gib: float
    """Host memory of a node that offloaded arrays may use."""
    host_pool_gib: float
    """Size of XLA's pools of pinned host memory on a node. Each device has one pool. Its size is a
    power of two, up to a limit."""
    memory: Mapping[str, float]
    """Device memory by cause: see fit.CAUSES. All except `reserved` add up to device_gib.
    """
    host_memory: Mapping[str, float]
    """Host memory of a node by cause. Adds up to host_gib."""
    sent_bytes: float
    """Bytes that a device sends in a step, read from the compiled program."""
    collectives: Sequence[PlannedCollective]
    model_flops: float
    """FLOPs of a step, counted as for MFU: causal attention within documents, no recomputation."""
    jax_version: str
    plan_s: float
    """Time to compile and analyze the step."""
    hardware_flops: float | None = None
    """FLOPs of the compiled program, including recomputation; None without a time estimate."""
    host_copy_bytes: tuple[float, float] | None = None
    """Bytes copied in a step from the host to a device, and back; None without a time estimate."""
    step_s_estimate: float | None = None
    """Roofline estimate from published rates; None unless the step uses bfloat16 and cuDNN, because
    the rates are for those. Measured steps are likely to take step_time.LIKELY_RANGE times as long.
    """
    tokens_per_s_estimate: float | None = None
    """Tokens per second of all devices."""
    mfu_estimate: float | None = None
    objective: str = ""
    """Description of the objective; empty for sft."""
    reference_s_estimate: float | None = None
    """Seconds of the reference pass for the tokens of a step, at the rate of the step: it is one
    forward pass over all documents. None if the objective needs no reference model."""
    seconds_estimate: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Estimated seconds by cause."""
    time_bottleneck: str | None = None
    """Cause that takes most of the time."""


def resolve_config(config: StepConfig, *, model: ModelConfig, cluster: Cluster) -> StepConfig:
    """Replaces `auto` in mesh.seq and batch.rows_per_microbatch by what training chooses.

    Raises: UserError if rows cannot be divided among any number of devices.
    """
    if "auto" not in (config.mesh.seq, config.rows_per_microbatch):
        return config  # without XLA's compiler for GPUs
    return candidates.resolve(
        config,
        model,
        devices=absent.make_devices(cluster.device_type, cluster.num_devices),
        memory=cluster.memory_limit,
        device_bytes=int(cluster.memory_limit.device),
    )


def plan_step(
    config: StepConfig,
    *,
    model: ModelConfig,
    cluster: Cluster,
    document_tokens: int | None = None,
) -> Plan:
    """Plans the step of a config.

    Args:
        document_tokens: length of the documents that fill the rows; None: each row is one document.
    Raises: UserError if training would refuse the config before it compiles; RuntimeError if XLA
        ignores some of the requested offloading.
    """
    began = time.perf_counter()
    if found := _find_problems(config, model, cluster, document_tokens):
        raise UserError(found)
    devices = absent.make_devices(cluster.device_type, cluster.num_devices)
    spec = make_spec(config, model, devices=devices, device_bytes=int(cluster.memory_limit.device))
    spec = dataclasses.replace(spec, has_split_pairs=_has_split_pairs(config, document_tokens))
    limit = estimate.subtract_reserves(spec, cluster.memory_limit)
    fitted = fit.fit(
        spec,
        limit=limit._replace(device=limit.device * (1 - cluster.headroom)),
        compile_step=absent.compile_step,
        measure=absent.measure_step,
    )
    fit.check_offloads(fitted.spec, fitted.memory_use)
    suggestions: Sequence[str] = []
    use = fitted.memory_use
    limit = fitted.memory_limit
    if fitted.shortage:
        is_device_short = use.device_total > limit.device
        suggestions = candidates.suggest_changes(spec, is_device_short=is_device_short)
    elif fits_larger_microbatch(fitted):
        count = 2 * config.microbatch_rows
        suggestions = [f"batch.rows_per_microbatch={count}, which gathers weights half as often"]
    spec = fitted.spec
    config = spec.config
    choice = spec.attention
    options = (fit.describe(spec), step_descriptions.describe_products(spec))

    # Memory
    causes = fit.find_causes(fitted)
    device_memory = {name: size / GIB for name, size in causes.device.items()}
    device_memory[RESERVED] = (cluster.gpu.memory_bytes - limit.device) / GIB
    node_gib = cluster.node_devices / GIB
    pool_bytes = 0.0
    if use.host:
        largest = estimate.pool_bytes(estimate.step_offloaded_bytes(spec))
        pool_size = hardware.pinned_pool_size(use.host, min(limit.host, largest))
        pool_bytes = max(float(use.host), pool_size)
    is_device_fuller = use.device_total / limit.device >= use.host / limit.host
    is_bottleneck = use.host <= limit.host and is_device_fuller
    is_device = use.device_total > limit.device or is_bottleneck

    # Communication, arithmetic and time
    text = fitted.executable.dump.hlo_text
    node_devices = cluster.nvlink_domain_size
    document_tokens = min(document_tokens or config.row_tokens, config.row_tokens)
    segment_lengths = step_time.make_segment_lengths(
        rows=config.rows_per_step, row_tokens=config.row_tokens, document_tokens=document_tokens
    )
    collectives = hlo.parse_collectives(text)
    timed = step_time.estimate_step(
        spec,
        text,
        ceilings=cluster.gpu.ceilings,
        node_devices=node_devices,
        segment_lengths=segment_lengths,
    )
    model_flops = spec.count_flops(segment_lengths) / spec.mesh.size
    plan = Plan(
        device_type=cluster.device_type,
        num_devices=cluster.num_devices,
        node_devices=cluster.node_devices,
        mesh={axis: spec.mesh.shape[axis] for axis in axes.ALL},
        row_tokens=config.row_tokens,
        rows_per_step=config.rows_per_step,
        rows_per_microbatch=config.microbatch_rows,
        max_segments_per_row=config.max_segments,
        document_tokens=document_tokens,
        objective=step_descriptions.describe_objective(spec),
        layers=step_descriptions.describe_layers(spec),
        strategy=choice.strategy.description,
        attention_bytes=choice.sent_bytes,
        alternative_bytes=dict(choice.alternatives),
        kernel=choice.kernel.name,
        kernel_title=", ".join([choice.kernel.title, *describe_exceptions(choice)]),
        fallback_reason=choice.fallback_reason,
        head_chunks=choice.settings.head_chunks,
        remat=spec.remat_policy.remat,
        mlp_tile_tokens=min(spec.mlp_tile, spec.tokens_per_device),
        loss_tile_tokens=min(spec.loss_tile, spec.tokens_per_device),
        options="; ".join(filter(None, options)),
        fits=not fitted.shortage,
        memory_bottleneck="device" if is_device else "host",
        shortage=fitted.shortage,
        suggestions=suggestions,
        device_gib=use.device_total / GIB,
        device_limit_gib=limit.device / GIB,
        host_gib=use.host * node_gib,
        host_limit_gib=limit.host * node_gib,
        host_pool_gib=pool_bytes * node_gib,
        memory=device_memory,
        host_memory={name: size * node_gib for name, size in causes.host.items()},
        sent_bytes=sum((sent.total_bytes for sent in collectives), start=0.0),
        collectives=_sum_collectives(collectives, spec.mesh.shape, timed, node_devices),
        model_flops=model_flops,
        jax_version=jax.__version__,
        plan_s=time.perf_counter() - began,
    )
    if timed is None:
        return plan
    reference_s = timed.step_s * (model_flops / 3 / timed.hardware_flops)
    return dataclasses.replace(
        plan,
        hardware_flops=timed.hardware_flops,
        host_copy_bytes=timed.host_copy_bytes,
        step_s_estimate=timed.step_s,
        tokens_per_s_estimate=config.rows_per_step * config.row_tokens / timed.step_s,
        mfu_estimate=model_flops / timed.step_s / cluster.gpu.ceilings.peak_tflops / 1e12,
        reference_s_estimate=reference_s if spec.objective.needs_reference else None,
        seconds_estimate=timed.seconds,
        time_bottleneck=max(step_time.CAUSES, key=lambda cause: timed.seconds[cause]),
    )


def _has_split_pairs(config: StepConfig, document_tokens: int | None) -> bool:
    """True if the objective needs pairs, and a row does not hold two of the documents."""
    row_tokens = config.row_tokens
    return config.objective.has_pairs and 2 * (document_tokens or row_tokens) > row_tokens


def fits_larger_microbatch(fitted: CompiledStep) -> bool:
    """True if microbatches of twice the rows fit, by formula, and recompute as little."""
    spec = fitted.spec
    has_gathers = device_mesh.num_shards(spec.mesh) > 1
    is_all_kept = spec.remat_policy.remat == "save_attention_and_mlp"
    if spec.num_microbatches % 2 or not (has_gathers and is_all_kept):
        return False
    memory = {"mlp_tile_tokens": "auto", "loss_tile_tokens": "auto"}
    try:
        larger = spec.respec(rows_per_microbatch=2 * spec.config.microbatch_rows, memory=memory)
    except UserError:  # no attention takes that number of rows
        return False
    if larger.attention.library_kernel != spec.attention.library_kernel:
        return False
    first = next(candidates.list_candidates(larger))
    error = fitted.memory_use.device_total / estimate.predict_bytes(spec)
    return max(1.0, error) * estimate.predict_bytes(first) <= fitted.memory_limit.device


def _find_problems(
    config: StepConfig, model: ModelConfig, cluster: Cluster, document_tokens: int | None
) -> list[str]:
    sizes = device_mesh.resolve_axis_sizes(config.mesh, cluster.num_devices)
    found = candidates.find_problems(config, platform="gpu", model=model)
    found += param_groups.find_problems(config.optimizer, decoder.param_table(model))
    layout = None
    try:
        layout = choose_strategy(config.attention, config.rows, model).layout
    except UserError as error:
        found += error.problems
    found += find_division_problems(config, sizes, layout=layout)
    row_tokens = config.row_tokens
    max_segments = config.max_segments
    if document_tokens is not None and -(-row_tokens // document_tokens) > max_segments:
        found.append(
            f"--document-tokens = {document_tokens}: rows of {row_tokens:,} tokens hold at most "
            f"{max_segments} documents (data.max_segments_per_row). "
            f"Use {-(-row_tokens // max_segments)} or more."
        )
    rows_per_step = config.rows_per_step
    if rows_per_step % 2 and _has_split_pairs(config, document_tokens):
        found.append(
            f"batch.rows_per_step = {rows_per_step}: must be even, because pairs of documents as "
            f"long as a row are in two rows. Use {rows_per_step + 1}, or rows that hold pairs: "
            f"--document-tokens {row_tokens // 2}."
        )
    return found


def _sum_collectives(
    collectives: Sequence[Collective],
    sizes: Mapping[str, int],
    timed: TimeEstimate | None,
    node_devices: int,
) -> list[PlannedCollective]:
    """Sums sent bytes by operation; leaves out those that send nothing.

    One operation may run over several sets of axes: all-reduces of gradients span one axis, others
    all axes.
    """
    planned = []
    for operation in sorted({sent.operation for sent in collectives if sent.total_bytes}):
        group = [sent for sent in collectives if sent.operation == operation]
        axes_of_groups = {
            hlo.find_axes(sent.groups[0], sizes) for sent in group if sent.total_bytes
        }
        seconds = waited_s = None
        if timed is not None:
            seconds, waited_s = step_time.sum_transfers(
                timed.transfer_seconds, (sent.begin_line for sent in group)
            )
        node_bytes = (sent.find_load(node_devices).node * sent.total_bytes for sent in group)
        planned.append(
            PlannedCollective(
                kind=operation,
                axes=[" x ".join(names) for names in sorted(axes_of_groups)],
                bytes=sum((sent.total_bytes for sent in group), start=0.0),
                node_bytes=sum(node_bytes, start=0.0),
                num_runs=sum(sent.num_runs for sent in group),
                seconds=seconds,
                waited_s=waited_s,
            )
        )
    return planned
