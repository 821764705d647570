"""Plans as text and tables."""

import textwrap
from collections.abc import Mapping, Sequence

from jaxsp.core import axes, durations
from jaxsp.planner import mesh_sweep, planning, search
from jaxsp.planner.compile import budget, compiled, gpus
from jaxsp.planner.cost import roofline

_LABEL = 12
"""Width of the first column."""


def text(plan: planning.Plan, *, model: str, tokens: float | None = None) -> str:
    """All of a plan.

    Args: tokens: to train on, for the GPU-hours; None: left out.
    """
    nodes = plan.num_devices // plan.node_devices
    where = f"{plan.num_devices} x {plan.device}" + (f" in {nodes} nodes" if nodes > 1 else "")
    rows = f"{plan.rows_per_step} row{'s' * (plan.rows_per_step > 1)} of {plan.row_tokens:,} tokens"
    lines = [
        (
            "plan",
            f"{model} on {where}, compiled in {durations.describe(plan.plan_s)} by jax {plan.jax}; nothing was run or measured",
        ),
        (
            "mesh",
            f"{mesh(plan.mesh)}; {rows} a step, {plan.rows_at_once} at a time, up to {plan.max_documents_per_row} documents in "
            "each",
        ),
        ("attention", _attention(plan)),
        ("options", f"remat {plan.remat}: {plan.levers}"),
        ("fits", fits(plan)),
        *_memory(plan),
        *_sent(plan),
        *_time(plan, tokens),
    ]
    return "\n".join(_wrapped(label, words) for label, words in lines)


def _attention(plan: planning.Plan) -> str:
    why = f" (because {plan.why_not_cudnn})" if plan.why_not_cudnn else ""
    kernel = "cuDNN" if plan.kernel == "cudnn" else f"{plan.kernel}{why}"
    parts = f", heads in {plan.head_chunks} chunks" if plan.head_chunks > 1 else ""
    if not plan.attention:
        return f"{kernel}{parts}"
    others = ", ".join(f"{words} {size / 1e6:,.1f} MB" for words, size in plan.attention_others.items())
    others = f" (alternatives: {others})" if others else ""
    size = f"{plan.attention_bytes / 1e6:,.1f} MB per layer and microbatch"
    sends = f"each device sends {size} if attention is not recomputed{others}"
    return f"{plan.attention}, {kernel}{parts}; {sends}"


def _memory(plan: planning.Plan) -> list[tuple[str, str]]:
    """Memory by cause, largest first."""
    causes = sorted(plan.memory.items(), key=lambda pair: (pair[0] == budget.RESERVED, -pair[1]))
    lines = [("memory", "GiB on each device at its peak, by cause")]
    lines += [("", f"{size:8.2f}  {name}: {budget.CAUSES[name]}") for name, size in causes if size >= 0.005]
    lines.append(("", f"{sum(plan.memory.values()):8.2f}  of {gpus.KINDS[plan.device].memory_bytes / 2**30:.2f}"))
    if plan.host_gib >= 0.005:
        causes = sorted(plan.host_memory.items(), key=lambda pair: -pair[1])
        pool = f"; XLA's pool of pinned memory takes {plan.host_pool_gib:,.0f}"
        lines.append(("host", f"GiB of each node's memory, by cause{pool}"))
        lines += [("", f"{size:8.2f}  {name}") for name, size in causes if size >= 0.005]
    return lines


def _sent(plan: planning.Plan) -> list[tuple[str, str]]:
    """Bytes sent by collectives and host copies, and their time that nothing overlaps."""
    lines = []
    if plan.moved:
        lines.append(("sent", "GB by each device in a step: program, formula, ratio; seconds (estimates): all, not overlapped"))
        for one in plan.moved:
            ratio = f"{one['bytes'] / one['formula']:.2f}" if one["formula"] else "    "
            sizes = f"{one['bytes'] / 1e9:10.3f} {one['formula'] / 1e9:10.3f}  {ratio}"
            times = f"{number(one['seconds'], '{:.3f}'):>8} {number(one['waited_s'], '{:.3f}'):>7}"
            lines.append(("", f"{sizes} {times}  {one['kind']} along {' and '.join(one['axes'])}"))
    if plan.host_bytes is not None and max(plan.host_bytes) > 0:
        from_host, to_host = plan.host_bytes
        lines.append(("", f"each device copies {from_host / 1e9:,.1f} GB from host memory and {to_host / 1e9:,.1f} GB to it"))
    return lines


def _time(plan: planning.Plan, tokens: float | None) -> list[tuple[str, str]]:
    """Arithmetic, and the estimate by cause."""
    executed = ""
    if plan.flops_executed is not None:
        executed = f", {plan.flops_executed / 1e12:,.0f} executed ({plan.flops_executed / plan.flops_needed:.2f} times)"
    words = f"{plan.flops_needed / 1e12:,.0f} TFLOP needed of each device in a step{executed}"
    lines = [("arithmetic", f"{words}, if rows are filled with documents of {plan.document_tokens:,} tokens")]
    lines.append(("time", speed(plan)))
    lines += [("", f"{size:8.3f}  {name}") for name, size in plan.seconds_estimate.items() if size >= 0.0005]
    if tokens is not None and plan.tokens_per_s_estimate is not None:
        lines.append(("cost", cost(plan, tokens)))
    return lines


def fits(plan: planning.Plan) -> str:
    """Verdict on the memory of a plan: yes or no, the limiting resource, and suggestions if it does
    not fit."""
    device = f"{plan.device_gib:.1f} of {plan.room_gib:.1f} GiB on each device"
    host = f", {plan.host_gib:,.0f} of {plan.host_room_gib:,.0f} GiB of each node's memory" if plan.host_gib >= 0.05 else ""
    if plan.fits:
        return f"yes: {device}{host}; {plan.binds} memory is nearest to full"
    ways = f"{', '.join(plan.ways_out[:-1])}{' or ' * (len(plan.ways_out) > 1)}{plan.ways_out[-1]}"
    return f"NO: {device}{host}; not enough {plan.binds} memory. Try {ways}"


def speed(plan: planning.Plan) -> str:
    """The estimated time of a step, its range, and what limits it."""
    if plan.step_s_estimate is None or plan.tokens_per_s_estimate is None or plan.mfu_estimate is None:
        return "no estimate: the published rates are for bfloat16 and cuDNN attention"
    low, high = (durations.describe(factor * plan.step_s_estimate) for factor in roofline.LIKELY)
    return (
        f"about {durations.describe(plan.step_s_estimate)} a step (likely {low} to {high}), "
        f"{plan.tokens_per_s_estimate:,.0f} tokens/s, MFU {100 * plan.mfu_estimate:.0f} %, "
        f"limited by {plan.limited_by}: an ESTIMATE from published rates "
        "(planner/compile/gpus.py); scripts/bench/anchors.py compares such estimates with published runs"
    )


def cost(plan: planning.Plan, tokens: float) -> str:
    """GPU-hours and days to train on `tokens` tokens."""
    assert plan.tokens_per_s_estimate is not None, "the caller looked"
    low, high = (factor * tokens / plan.tokens_per_s_estimate for factor in roofline.LIKELY)
    hours = [amount(seconds * plan.num_devices / 3600) for seconds in (low, high)]
    days = [amount(seconds / 86400) for seconds in (low, high)]
    return f"{tokens:,.0f} tokens take {hours[0]} to {hours[1]} GPU-hours, {days[0]} to {days[1]} days"


def amount(number: float) -> str:
    """Formats a number. Examples: `1,234`, `12`, `1.2`, `0.012`."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def several(found: Sequence[planning.Plan], *, tokens: float | None) -> str:
    """Table of plans of one config for several GPUs and row lengths."""
    head = ["device", "row tokens", "fits", "device GiB", "host GiB", "remat", "tile"]
    head += ["step*", "tokens/s*", "MFU* %", "limited by*"] + ([] if tokens is None else ["GPU-hours*"])
    rows = []
    for plan in found:
        is_tiled = plan.mlp_tile_tokens * plan.mesh[axes.SEQ] < plan.row_tokens * plan.rows_at_once
        hours = None
        if tokens is not None and plan.tokens_per_s_estimate is not None:
            hours = tokens / plan.tokens_per_s_estimate * plan.num_devices / 3600
        row = [
            plan.device,
            f"{plan.row_tokens:,}",
            "yes" if plan.fits else f"no: {plan.binds}",
            f"{plan.device_gib:.1f} of {plan.room_gib:.1f}",
            f"{plan.host_gib:,.0f}",
            plan.remat,
            f"{plan.mlp_tile_tokens:,}" if is_tiled else "-",
            "-" if plan.step_s_estimate is None else durations.describe(plan.step_s_estimate),
            number(plan.tokens_per_s_estimate, "{:,.0f}"),
            number(None if plan.mfu_estimate is None else 100 * plan.mfu_estimate, "{:.0f}"),
            plan.limited_by or "-",
        ]
        rows.append(row + ([] if tokens is None else ["-" if hours is None else amount(hours)]))
    low, high = roofline.LIKELY
    return (
        f"{table(head, rows)}\n* estimates; measured times are likely {low:g} to {high:g} times as long. Nothing was measured"
    )


def tried(one: search.Tried, *, progress: str) -> str:
    """A length that was tried, in a line.

    Args: progress: the count and the time left.
    """
    if one.plan is None:
        return f"  {one.row_tokens:>12,} tokens  {one.why} [{progress}]"
    plan = one.plan
    verdict = "fits"
    if one.why:
        verdict = f"too long for the {plan.binds}" if plan.short else one.why
    return f"  {one.row_tokens:>12,} tokens  {_taken(plan)}: {verdict} [{progress}]"


def planned(shape: mesh_sweep.Shape, *, progress: str) -> str:
    """A mesh that was planned, in a line.

    Args: progress: the count and the time left.
    """
    words = f"  [{progress}] {mesh(shape.mesh)}, {mesh_sweep.name(shape.kind)}"
    if shape.plan is None:
        return f"{words}: {shape.why}"
    step = ""
    if shape.plan.step_s_estimate is not None:
        step = f", about {durations.describe(shape.plan.step_s_estimate)} a step"
    verdict = "fits" if shape.plan.fits else f"does not fit the {shape.plan.binds}"
    return f"{words}: {verdict}, {_taken(shape.plan)}{step}"


def _taken(plan: planning.Plan) -> str:
    """The memory that a plan takes."""
    host = ""
    if plan.host_gib >= 0.05:
        host = f", {plan.host_gib:8,.1f} of {plan.host_room_gib:,.0f} of host"
    device = f"{plan.device_gib:6.1f} of {plan.room_gib:.1f} GiB of device"
    return f"remat {plan.remat:<9}  {device}{host}"


def longest(found: search.Longest, *, seconds: float) -> str:
    """The result of a search."""
    plan, beyond = found.plan, found.beyond
    if plan is None:
        ways = f" Try {', '.join(beyond.plan.ways_out)}." if beyond.plan else ""
        return f"no row fits, not even of {beyond.row_tokens:,} tokens: {beyond.why}.{ways}"
    binds = beyond.plan.binds if beyond.plan and beyond.plan.short else None
    why = f"not enough {binds} memory" if binds else beyond.why
    return (
        f"longest row: {plan.row_tokens:,} tokens, remat {plan.remat}; {beyond.row_tokens:,} do not fit: {why}. "
        f"{len(found.tried)} lengths compiled in {durations.describe(round(seconds))}"
    )


def ranked(found: Sequence[mesh_sweep.Shape]) -> str:
    """Planned meshes as a table, in the order of `shapes.ranked`."""
    ranks = mesh_sweep.ranks(found)
    of_mesh, of_time = ("replica", "data", "seq", "attention"), ("step*", "tokens/s*", "MFU* %", "rank")
    head = (*of_mesh, "fits", "device GiB", "host GiB", "remat", "kernel", *of_time)
    rows = []
    for shape in found:
        sizes = tuple(str(shape.mesh[axis]) for axis in axes.ALL)
        plan = shape.plan
        if plan is None:
            rows.append((*sizes, mesh_sweep.name(shape.kind), shape.why))
            continue
        rows.append(
            (
                *sizes,
                mesh_sweep.name(shape.kind),
                "yes" if plan.fits else f"no: {plan.binds}",
                f"{plan.device_gib:.1f}",
                f"{plan.host_gib:,.0f}",
                plan.remat,
                plan.kernel,
                "-" if plan.step_s_estimate is None else durations.describe(plan.step_s_estimate),
                number(plan.tokens_per_s_estimate, "{:,.0f}"),
                number(None if plan.mfu_estimate is None else 100 * plan.mfu_estimate, "{:.0f}"),
                str(ranks.get(id(shape), "-")),
            )
        )
    same = f"within {100 * (mesh_sweep.SAME_TIME - 1):.0f} % have the same rank, the smallest seq first"
    low, high = roofline.LIKELY
    return (
        f"{table(head, rows)}\n* estimates; measured times are likely {low:g} to {high:g} times as long. Meshes {same}. "
        "Nothing was measured"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
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


def mesh(sizes: Mapping[str, int]) -> str:
    """`replica 1 x data 2 x seq 4`."""
    return " x ".join(f"{axis} {sizes[axis]}" for axis in axes.ALL)


def number(value: float | None, form: str) -> str:
    """A number, or a dash."""
    return "-" if value is None else form.format(value)


def assumed(site: compiled.Site) -> str:
    """Assumptions about the nodes."""
    return f"nodes of {site.node_devices} GPUs with {site.node_host_gib:,.0f} GiB of memory (--node-devices, --host-gib)"


def _wrapped(label: str, words: str) -> str:
    """A label and what it says, under each other where that is long; numbers stay in their columns."""
    indent = " " * _LABEL
    if not label:
        return textwrap.fill(words, 130, initial_indent=indent, subsequent_indent=indent + " " * 10, replace_whitespace=False)
    return textwrap.fill(words, 130, initial_indent=f"{label:<{_LABEL}}", subsequent_indent=indent)
