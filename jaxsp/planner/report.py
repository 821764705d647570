"""Plans as text."""

import textwrap
from collections.abc import Mapping

from jaxsp.core import axes, durations, errors, units
from jaxsp.memory import memory_causes
from jaxsp.planner import search, tables
from jaxsp.planner.compile import gpus
from jaxsp.planner.cost import roofline
from jaxsp.planner.mesh_sweep import MeshPlan
from jaxsp.planner.planning import RESERVED, Plan
from jaxsp.planner.search import LongestRow, TriedLength

_MEMORY = dict(memory_causes.CAUSES) | {
    RESERVED: "for CUDA's context, NCCL's buffers and fragmentation"
}
"""Causes of device memory, with what belongs to each."""

_LABEL_WIDTH = 12
"""Width of the first column."""

_SHORT_STEP_S = 0.01
"""Estimated time below which kernel launches may take longer: 2,000 kernels at 5 us."""


def format_plan(plan: Plan, *, model: str, tokens: float | None = None) -> str:
    """Formats a plan as text.

    Args: tokens: tokens to train on, for the GPU-hours; None: without the cost.
    """
    devices = f"{plan.num_devices} x {plan.device_type}"
    num_nodes = plan.num_devices // plan.node_devices
    if num_nodes > 1:
        devices += f" in {num_nodes} nodes"
    rows = "1 row" if plan.rows_per_step == 1 else f"{plan.rows_per_step} rows"
    objective = plan.objective
    seconds = plan.reference_s_estimate
    if seconds is not None and plan.step_s_estimate is not None:
        percent = 100 * seconds / plan.step_s_estimate
        objective += (
            "; before training, the reference model reads all documents once: about "
            f"{format_step_time(seconds)} for the tokens of a step, {percent:.0f} % of its time"
        )
    lines = [
        (
            "plan",
            f"{model} on {devices}, compiled in {durations.describe(plan.plan_s)} by jax "
            f"{plan.jax_version}; nothing was run or measured",
        ),
        (
            "mesh",
            f"{format_mesh(plan.mesh)}; {rows} of {plan.row_tokens:,} tokens per step, "
            f"{plan.rows_per_microbatch} per microbatch, at most {plan.max_segments_per_row} "
            "documents per row",
        ),
        *([("objective", objective)] if plan.objective else []),
        *([("layers", plan.layers)] if plan.layers else []),
        ("attention", _format_attention(plan)),
        ("options", f"remat {plan.remat}: {plan.options}"),
        ("fits", format_fit(plan)),
        *_memory_and_traffic_lines(plan),
        *_time_lines(plan, tokens),
    ]
    return "\n".join(_wrap(label, text) for label, text in lines)


def _format_attention(plan: Plan) -> str:
    kernel = plan.kernel_title
    if plan.fallback_reason:
        kernel += f" (because {plan.fallback_reason})"
    if plan.head_chunks > 1:
        kernel += f", heads in {plan.head_chunks} chunks"
    if not plan.strategy:
        return kernel
    size = f"{plan.attention_bytes / 1e6:,.1f} MB per layer and microbatch"
    sends = f"each device sends {size} if attention is not recomputed"
    if plan.alternative_bytes:
        alternatives = ", ".join(
            f"{strategy} {size / 1e6:,.1f} MB" for strategy, size in plan.alternative_bytes.items()
        )
        sends += f" (alternatives: {alternatives})"
    return f"{plan.strategy}, {kernel}; {sends}"


def _memory_and_traffic_lines(plan: Plan) -> list[tuple[str, str]]:
    """Memory by cause, largest first; bytes sent and copied, and their time not overlapped."""
    sizes = sorted(plan.memory.items(), key=lambda pair: (pair[0] == RESERVED, -pair[1]))
    lines = [("memory", f"GiB on each device at its peak, by cause; most in {plan.peak_phase}")]
    lines += [
        ("", f"{size:8.2f}  {name}: {_MEMORY[name]}") for name, size in sizes if size >= 0.005
    ]
    device_gib = gpus.GPUS[plan.device_type].memory_bytes / units.GIB
    lines.append(("", f"{sum(plan.memory.values()):8.2f}  of {device_gib:.2f}"))
    if plan.host_gib >= 0.005:
        sizes = sorted(plan.host_memory.items(), key=lambda pair: -pair[1])
        pool = f"; XLA's pool of pinned memory takes {plan.host_pool_gib:,.0f}"
        lines.append(("host", f"GiB of each node's memory, by cause{pool}"))
        lines += [("", f"{size:8.2f}  {name}") for name, size in sizes if size >= 0.005]
    if plan.collectives:
        lines.append(
            (
                "sent",
                "GB by each device in a step; seconds (estimates): all, not overlapped",
            )
        )
    for collective in plan.collectives:
        seconds = tables.format_number(collective.seconds, "{:.3f}")
        exposed = tables.format_number(collective.waited_s, "{:.3f}")
        edge_text = ""
        if collective.node_bytes:
            edge_text = f"; {collective.node_bytes / 1e9:,.3f} GB leave each node"
        columns = f"{collective.bytes / 1e9:10.3f} {seconds:>8}"
        axes_text = " and ".join(collective.axes)
        kind = f"{collective.kind} along {axes_text}{edge_text}"
        lines.append(("", f"{columns} {exposed:>7}  {kind}"))
    if plan.host_copy_bytes is not None and max(plan.host_copy_bytes) > 0:
        from_host, to_host = plan.host_copy_bytes
        copies = f"{from_host / 1e9:,.1f} GB from host memory and {to_host / 1e9:,.1f} GB to it"
        lines.append(("", f"each device copies {copies}"))
    return lines


def _time_lines(plan: Plan, tokens: float | None) -> list[tuple[str, str]]:
    """Arithmetic, and the estimate by cause."""
    executed = ""
    if plan.hardware_flops is not None:
        ratio = plan.hardware_flops / plan.model_flops
        executed = f", {_format_tflop(plan.hardware_flops)} executed ({ratio:.2f} times)"
    documents = f"if documents of {plan.document_tokens:,} tokens fill the rows"
    lines = [
        (
            "arithmetic",
            f"{_format_tflop(plan.model_flops)} TFLOP needed per device and step{executed}, "
            f"{documents}",
        )
    ]
    lines.append(("time", format_time(plan)))
    lines += [
        ("", f"{size:8.3f}  {name}")
        for name, size in plan.seconds_estimate.items()
        if size >= 0.0005
    ]
    is_short = (plan.step_s_estimate or 0) < _SHORT_STEP_S
    if tokens is not None and plan.tokens_per_s_estimate is not None and not is_short:
        low, high = (
            factor * tokens / plan.tokens_per_s_estimate for factor in roofline.LIKELY_RANGE
        )
        hours = [tables.format_amount(seconds * plan.num_devices / 3600) for seconds in (low, high)]
        days = [tables.format_amount(seconds / 86400) for seconds in (low, high)]
        text = f"{tokens:,.0f} tokens take {hours[0]} to {hours[1]} GPU-hours, "
        lines.append(("cost", f"{text}{days[0]} to {days[1]} days"))
    return lines


def _format_tflop(num_flops: float) -> str:
    tflop = num_flops / 1e12
    return f"{tflop:,.0f}" if tflop >= 1 else f"{tflop:.2g}"


def format_fit(plan: Plan) -> str:
    """Formats whether a plan fits, the fullest memory, and suggestions."""
    sizes = f"{_format_gib(plan.device_gib)} of {plan.device_limit_gib:.1f} GiB on each device"
    if plan.host_gib >= 0.05:
        sizes += f", {plan.host_gib:,.0f} of {plan.host_limit_gib:,.0f} GiB of each node's memory"
    text = f"NO: {sizes}; not enough {plan.memory_bottleneck} memory"
    if plan.fits:
        text = f"yes: {sizes}; {plan.memory_bottleneck} memory is nearest to full"
    return f"{text}. Try {errors.format_choices(plan.suggestions)}" if plan.suggestions else text


def _format_gib(gib: float) -> str:
    """Formats a size in GiB; a smaller one has its own unit."""
    return f"{gib:.1f}" if gib >= 0.05 else units.format_bytes(gib * units.GIB)


def format_time(plan: Plan) -> str:
    """Formats the estimated time of a step, its range, and its bottleneck."""
    if (
        plan.step_s_estimate is None
        or plan.tokens_per_s_estimate is None
        or plan.mfu_estimate is None
    ):
        return "no estimate: the published rates are for bfloat16 and cuDNN attention"
    if plan.step_s_estimate < _SHORT_STEP_S:
        return (
            f"more than {durations.describe(plan.step_s_estimate)} per step: kernel launches, "
            "which are not estimated, limit so short a step"
        )
    low, high = (
        durations.describe(factor * plan.step_s_estimate) for factor in roofline.LIKELY_RANGE
    )
    return (
        f"about {durations.describe(plan.step_s_estimate)} per step (likely {low} to {high}), "
        f"{plan.tokens_per_s_estimate:,.0f} tokens/s, MFU {100 * plan.mfu_estimate:.0f} %, "
        f"limited by {plan.time_bottleneck}: an ESTIMATE from published rates "
        "(planner/compile/gpus.py); scripts/bench/published_runs.py compares such estimates with "
        "published runs"
    )


def format_length(length: TriedLength) -> str:
    """Formats a length that was tried, in a line."""
    plan = length.plan
    label = f"  {length.row_tokens:>12,} tokens  "
    if plan is None:
        return f"{label}{length.problem}"
    verdict = length.problem or "fits"
    if length.problem and plan.shortage:
        verdict = f"too long for the {plan.memory_bottleneck}"
    step = ""
    if plan.step_s_estimate is not None:
        step = f", {format_step_time(plan.step_s_estimate)} per step"
    return f"{label}{_format_memory(plan)}: {verdict}{step}"


def format_mesh_plan(mesh_plan: MeshPlan, *, count: str) -> str:
    """Formats a mesh that was planned, and the count of those so far, in a line."""
    label = f"  [{count}] {format_mesh(mesh_plan.mesh)}, {mesh_plan.strategy}"
    plan = mesh_plan.plan
    if plan is None:
        return f"{label}: {mesh_plan.problem}"
    verdict = "fits" if plan.fits else f"does not fit the {plan.memory_bottleneck}"
    line = f"{label}: {verdict}, {_format_memory(plan)}"
    if plan.step_s_estimate is not None:
        line += f", about {durations.describe(plan.step_s_estimate)} per step"
    return line


def _format_memory(plan: Plan) -> str:
    host = ""
    if plan.host_gib >= 0.05:
        host = f", {plan.host_gib:8,.1f} of {plan.host_limit_gib:,.0f} of host"
    device = f"{_format_gib(plan.device_gib):>6} of {plan.device_limit_gib:.1f} GiB of device"
    return f"remat {plan.remat:<9}  {device}{host}"


def format_longest(result: LongestRow, *, seconds: float) -> str:
    """Formats the result of a search that took `seconds`."""
    plan = result.plan
    failing = result.shortest_failing
    reason = failing.problem.rstrip(".")
    if plan is None:
        text = f"no row fits, not even one of {failing.row_tokens:,} tokens: {reason}."
        if failing.plan and failing.plan.suggestions:
            text += f" Try {', '.join(failing.plan.suggestions)}."
        return text
    if failing.plan and failing.plan.shortage:
        reason = f"not enough {failing.plan.memory_bottleneck} memory"
    step = "a step of unknown time"
    if plan.step_s_estimate is not None:
        step = f"a step takes about {format_step_time(plan.step_s_estimate)} (estimate)"
    return (
        f"longest row: {plan.row_tokens:,} tokens, remat {plan.remat}, with {search.HEADROOM:.0%} "
        f"of the device left free; {step}. {failing.row_tokens:,} do not fit: {reason}. "
        f"{len(result.tried)} lengths compiled in {durations.describe(round(seconds))}"
    )


def format_step_time(seconds: float) -> str:
    """Formats the time of a step: `39.2 s`, or `26,708 s (7.4 hours)`."""
    if seconds < 3600:
        return f"{seconds:,.3g} s"
    return f"{seconds:,.0f} s ({seconds / 3600:.1f} hours)"


def format_mesh(sizes: Mapping[str, int]) -> str:
    """Formats a mesh as `replica 1 x data 2 x seq 4`."""
    return " x ".join(f"{axis} {sizes[axis]}" for axis in axes.ALL)


def _wrap(label: str, text: str) -> str:
    """Wraps text to a column after its label. Without a label, numbers stay in their columns."""
    begin = f"{label:<{_LABEL_WIDTH}}"
    indent = " " * (_LABEL_WIDTH if label else _LABEL_WIDTH + 10)
    return textwrap.fill(
        text, 130, initial_indent=begin, subsequent_indent=indent, replace_whitespace=bool(label)
    )
