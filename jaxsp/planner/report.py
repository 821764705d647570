"""Plans as text and tables."""

import textwrap
from collections.abc import Mapping, Sequence

from jaxsp.core import axes, durations
from jaxsp.planner import mesh_sweep
from jaxsp.planner.compile import gpus, memory
from jaxsp.planner.compile.compiled import Cluster
from jaxsp.planner.cost import roofline
from jaxsp.planner.mesh_sweep import MeshPlan
from jaxsp.planner.planning import Plan
from jaxsp.planner.search import LongestRow, TriedLength

_LABEL_WIDTH = 12
"""Width of the first column."""


def format_plan(plan: Plan, *, model: str, tokens: float | None = None) -> str:
    """All of a plan.

    Args: tokens: to train on, for the GPU-hours; None: left out.
    """
    nodes = plan.num_devices // plan.node_devices
    where = f"{plan.num_devices} x {plan.device_type}" + (f" in {nodes} nodes" if nodes > 1 else "")
    rows = f"{plan.rows_per_step} row{'s' * (plan.rows_per_step > 1)} of {plan.row_tokens:,} tokens"
    lines = [
        (
            "plan",
            f"{model} on {where}, compiled in {durations.describe(plan.plan_s)} by jax {plan.jax_version}; nothing was run or measured",
        ),
        (
            "mesh",
            f"{format_mesh(plan.mesh)}; {rows} a step, {plan.rows_per_microbatch} at a time, up to {plan.max_segments_per_row} documents in "
            "each",
        ),
        ("attention", _format_attention(plan)),
        ("options", f"remat {plan.remat}: {plan.memory_options}"),
        ("fits", format_fit(plan)),
        *_memory_lines(plan),
        *_traffic_lines(plan),
        *_time_lines(plan, tokens),
    ]
    return "\n".join(_wrap(label, words) for label, words in lines)


def _format_attention(plan: Plan) -> str:
    kernel = plan.kernel_title
    if plan.fallback_reason:
        kernel += f" (because {plan.fallback_reason})"
    parts = f", heads in {plan.head_chunks} chunks" if plan.head_chunks > 1 else ""
    if not plan.strategy:
        return f"{kernel}{parts}"
    others = ", ".join(
        f"{words} {size / 1e6:,.1f} MB" for words, size in plan.alternative_bytes.items()
    )
    others = f" (alternatives: {others})" if others else ""
    size = f"{plan.attention_bytes / 1e6:,.1f} MB per layer and microbatch"
    sends = f"each device sends {size} if attention is not recomputed{others}"
    return f"{plan.strategy}, {kernel}{parts}; {sends}"


def _memory_lines(plan: Plan) -> list[tuple[str, str]]:
    """Memory by cause, largest first."""
    causes = sorted(plan.memory.items(), key=lambda pair: (pair[0] == memory.RESERVED, -pair[1]))
    lines = [("memory", "GiB on each device at its peak, by cause")]
    lines += [
        ("", f"{size:8.2f}  {name}: {memory.CATEGORIES[name]}")
        for name, size in causes
        if size >= 0.005
    ]
    lines.append(
        (
            "",
            f"{sum(plan.memory.values()):8.2f}  of {gpus.GPUS[plan.device_type].memory_bytes / 2**30:.2f}",
        )
    )
    if plan.host_gib >= 0.005:
        causes = sorted(plan.host_memory.items(), key=lambda pair: -pair[1])
        pool = f"; XLA's pool of pinned memory takes {plan.host_pool_gib:,.0f}"
        lines.append(("host", f"GiB of each node's memory, by cause{pool}"))
        lines += [("", f"{size:8.2f}  {name}") for name, size in causes if size >= 0.005]
    return lines


def _traffic_lines(plan: Plan) -> list[tuple[str, str]]:
    """Bytes sent by collectives and host copies, and their time that nothing overlaps."""
    lines = []
    if plan.collectives:
        lines.append(
            (
                "sent",
                "GB by each device in a step: program, formula, ratio; seconds (estimates): all, not overlapped",
            )
        )
        for one in plan.collectives:
            ratio = f"{one['bytes'] / one['formula']:.2f}" if one["formula"] else "    "
            sizes = f"{one['bytes'] / 1e9:10.3f} {one['formula'] / 1e9:10.3f}  {ratio}"
            times = f"{format_number(one['seconds'], '{:.3f}'):>8} {format_number(one['waited_s'], '{:.3f}'):>7}"
            lines.append(("", f"{sizes} {times}  {one['kind']} along {' and '.join(one['axes'])}"))
    if plan.host_copy_bytes is not None and max(plan.host_copy_bytes) > 0:
        from_host, to_host = plan.host_copy_bytes
        lines.append(
            (
                "",
                f"each device copies {from_host / 1e9:,.1f} GB from host memory and {to_host / 1e9:,.1f} GB to it",
            )
        )
    return lines


def _time_lines(plan: Plan, tokens: float | None) -> list[tuple[str, str]]:
    """Arithmetic, and the estimate by cause."""
    executed = ""
    if plan.hardware_flops is not None:
        executed = f", {plan.hardware_flops / 1e12:,.0f} executed ({plan.hardware_flops / plan.model_flops:.2f} times)"
    words = f"{plan.model_flops / 1e12:,.0f} TFLOP needed of each device in a step{executed}"
    lines = [
        (
            "arithmetic",
            f"{words}, if rows are filled with documents of {plan.document_tokens:,} tokens",
        )
    ]
    lines.append(("time", format_time(plan)))
    lines += [
        ("", f"{size:8.3f}  {name}")
        for name, size in plan.seconds_estimate.items()
        if size >= 0.0005
    ]
    if tokens is not None and plan.tokens_per_s_estimate is not None:
        lines.append(("cost", format_cost(plan, tokens)))
    return lines


def format_fit(plan: Plan) -> str:
    """Verdict on the memory of a plan: yes or no, the limiting resource, and suggestions if it does
    not fit."""
    device = f"{plan.device_gib:.1f} of {plan.device_limit_gib:.1f} GiB on each device"
    host = (
        f", {plan.host_gib:,.0f} of {plan.host_limit_gib:,.0f} GiB of each node's memory"
        if plan.host_gib >= 0.05
        else ""
    )
    if plan.fits:
        return f"yes: {device}{host}; {plan.memory_bottleneck} memory is nearest to full"
    ways = f"{', '.join(plan.suggestions[:-1])}{' or ' * (len(plan.suggestions) > 1)}{plan.suggestions[-1]}"
    return f"NO: {device}{host}; not enough {plan.memory_bottleneck} memory. Try {ways}"


def format_time(plan: Plan) -> str:
    """The estimated time of a step, its range, and what limits it."""
    if (
        plan.step_s_estimate is None
        or plan.tokens_per_s_estimate is None
        or plan.mfu_estimate is None
    ):
        return "no estimate: the published rates are for bfloat16 and cuDNN attention"
    low, high = (
        durations.describe(factor * plan.step_s_estimate) for factor in roofline.LIKELY_RANGE
    )
    return (
        f"about {durations.describe(plan.step_s_estimate)} a step (likely {low} to {high}), "
        f"{plan.tokens_per_s_estimate:,.0f} tokens/s, MFU {100 * plan.mfu_estimate:.0f} %, "
        f"limited by {plan.time_bottleneck}: an ESTIMATE from published rates "
        "(planner/compile/gpus.py); scripts/bench/anchors.py compares such estimates with published runs"
    )


def format_cost(plan: Plan, tokens: float) -> str:
    """GPU-hours and days to train on `tokens` tokens."""
    assert plan.tokens_per_s_estimate is not None, "the caller looked"
    low, high = (factor * tokens / plan.tokens_per_s_estimate for factor in roofline.LIKELY_RANGE)
    hours = [format_amount(seconds * plan.num_devices / 3600) for seconds in (low, high)]
    days = [format_amount(seconds / 86400) for seconds in (low, high)]
    return (
        f"{tokens:,.0f} tokens take {hours[0]} to {hours[1]} GPU-hours, {days[0]} to {days[1]} days"
    )


def format_amount(number: float) -> str:
    """Formats a number. Examples: `1,234`, `12`, `1.2`, `0.012`."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def format_comparison(found: Sequence[Plan], *, tokens: float | None) -> str:
    """Table of plans of one config for several GPUs and row lengths."""
    head = ["device", "row tokens", "fits", "device GiB", "host GiB", "remat", "tile"]
    head += ["step*", "tokens/s*", "MFU* %", "limited by*"] + (
        [] if tokens is None else ["GPU-hours*"]
    )
    rows = []
    for plan in found:
        is_tiled = (
            plan.mlp_tile_tokens * plan.mesh[axes.SEQ] < plan.row_tokens * plan.rows_per_microbatch
        )
        hours = None
        if tokens is not None and plan.tokens_per_s_estimate is not None:
            hours = tokens / plan.tokens_per_s_estimate * plan.num_devices / 3600
        row = [
            plan.device_type,
            f"{plan.row_tokens:,}",
            "yes" if plan.fits else f"no: {plan.memory_bottleneck}",
            f"{plan.device_gib:.1f} of {plan.device_limit_gib:.1f}",
            f"{plan.host_gib:,.0f}",
            plan.remat,
            f"{plan.mlp_tile_tokens:,}" if is_tiled else "-",
            "-" if plan.step_s_estimate is None else durations.describe(plan.step_s_estimate),
            format_number(plan.tokens_per_s_estimate, "{:,.0f}"),
            format_number(None if plan.mfu_estimate is None else 100 * plan.mfu_estimate, "{:.0f}"),
            plan.time_bottleneck or "-",
        ]
        rows.append(
            row + ([] if tokens is None else ["-" if hours is None else format_amount(hours)])
        )
    low, high = roofline.LIKELY_RANGE
    return f"{format_table(head, rows)}\n* estimates; measured times are likely {low:g} to {high:g} times as long. Nothing was measured"


def format_length(one: TriedLength, *, progress: str) -> str:
    """A length that was tried, in a line.

    Args: progress: the count and the time left.
    """
    if one.plan is None:
        return f"  {one.row_tokens:>12,} tokens  {one.problem} [{progress}]"
    plan = one.plan
    verdict = "fits"
    if one.problem:
        verdict = f"too long for the {plan.memory_bottleneck}" if plan.shortage else one.problem
    return f"  {one.row_tokens:>12,} tokens  {_format_memory(plan)}: {verdict} [{progress}]"


def format_mesh_plan(shape: MeshPlan, *, progress: str) -> str:
    """A mesh that was planned, in a line.

    Args: progress: the count and the time left.
    """
    words = f"  [{progress}] {format_mesh(shape.mesh)}, {shape.strategy}"
    if shape.plan is None:
        return f"{words}: {shape.problem}"
    step = ""
    if shape.plan.step_s_estimate is not None:
        step = f", about {durations.describe(shape.plan.step_s_estimate)} a step"
    verdict = "fits" if shape.plan.fits else f"does not fit the {shape.plan.memory_bottleneck}"
    return f"{words}: {verdict}, {_format_memory(shape.plan)}{step}"


def _format_memory(plan: Plan) -> str:
    """The memory that a plan takes."""
    host = ""
    if plan.host_gib >= 0.05:
        host = f", {plan.host_gib:8,.1f} of {plan.host_limit_gib:,.0f} of host"
    device = f"{plan.device_gib:6.1f} of {plan.device_limit_gib:.1f} GiB of device"
    return f"remat {plan.remat:<9}  {device}{host}"


def format_longest(found: LongestRow, *, seconds: float) -> str:
    """The result of a search."""
    plan, beyond = found.plan, found.shortest_failing
    if plan is None:
        ways = f" Try {', '.join(beyond.plan.suggestions)}." if beyond.plan else ""
        return f"no row fits, not even of {beyond.row_tokens:,} tokens: {beyond.problem}.{ways}"
    binds = beyond.plan.memory_bottleneck if beyond.plan and beyond.plan.shortage else None
    why = f"not enough {binds} memory" if binds else beyond.problem
    return (
        f"longest row: {plan.row_tokens:,} tokens, remat {plan.remat}; {beyond.row_tokens:,} do not fit: {why}. "
        f"{len(found.tried)} lengths compiled in {durations.describe(round(seconds))}"
    )


def format_ranking(found: Sequence[MeshPlan]) -> str:
    """Planned meshes as a table, in the order of `shapes.ranked`."""
    ranks = mesh_sweep.compute_ranks(found)
    of_mesh, of_time = (
        ("replica", "data", "seq", "attention"),
        ("step*", "tokens/s*", "MFU* %", "rank"),
    )
    head = (*of_mesh, "fits", "device GiB", "host GiB", "remat", "kernel", *of_time)
    rows = []
    for shape in found:
        sizes = tuple(str(shape.mesh[axis]) for axis in axes.ALL)
        plan = shape.plan
        if plan is None:
            rows.append((*sizes, shape.strategy, shape.problem))
            continue
        rows.append(
            (
                *sizes,
                shape.strategy,
                "yes" if plan.fits else f"no: {plan.memory_bottleneck}",
                f"{plan.device_gib:.1f}",
                f"{plan.host_gib:,.0f}",
                plan.remat,
                plan.kernel,
                "-" if plan.step_s_estimate is None else durations.describe(plan.step_s_estimate),
                format_number(plan.tokens_per_s_estimate, "{:,.0f}"),
                format_number(
                    None if plan.mfu_estimate is None else 100 * plan.mfu_estimate, "{:.0f}"
                ),
                str(ranks.get(id(shape), "-")),
            )
        )
    same = f"within {100 * (mesh_sweep.SAME_TIME_FACTOR - 1):.0f} % have the same rank, the smallest seq first"
    low, high = roofline.LIKELY_RANGE
    return (
        f"{format_table(head, rows)}\n* estimates; measured times are likely {low:g} to {high:g} times as long. Meshes {same}. "
        "Nothing was measured"
    )


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under their heads; a row with fewer cells ends in a sentence."""
    full = [row for row in rows if len(row) == len(head)]
    widths = [max(len(row[place]) for row in [head, *full]) for place in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place < len(row) - 1 or len(row) == len(head) else cell
            for place, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in [head, *rows]
    )


def format_mesh(sizes: Mapping[str, int]) -> str:
    """`replica 1 x data 2 x seq 4`."""
    return " x ".join(f"{axis} {sizes[axis]}" for axis in axes.ALL)


def format_number(value: float | None, form: str) -> str:
    """A number, or a dash."""
    return "-" if value is None else form.format(value)


def format_assumptions(site: Cluster) -> str:
    """Assumptions about the nodes."""
    return f"nodes of {site.node_devices} GPUs with {site.node_host_gib:,.0f} GiB of memory (--node-devices, --host-gib)"


def _wrap(label: str, words: str) -> str:
    """A label and what it says, under each other where that is long; numbers stay in their columns."""
    indent = " " * _LABEL_WIDTH
    if not label:
        return textwrap.fill(
            words,
            130,
            initial_indent=indent,
            subsequent_indent=indent + " " * 10,
            replace_whitespace=False,
        )
    return textwrap.fill(
        words, 130, initial_indent=f"{label:<{_LABEL_WIDTH}}", subsequent_indent=indent
    )
