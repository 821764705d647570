"""Plans in words and tables, for people."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from jaxsp.core import axes
from jaxsp.planner import budget, compiled, gpus, plans, search, shapes

_LABEL = 12
"""Width of the first column."""


def text(plan: plans.Plan, *, model: str) -> str:
    """All of a plan."""
    nodes = plan.num_devices // plan.node_devices
    where = f"{plan.num_devices} x {plan.device}" + (f" in {nodes} nodes" if nodes > 1 else "")
    why = f" (because {plan.why_not_cudnn})" if plan.why_not_cudnn else ""
    kernel = "cuDNN" if plan.kernel == "cudnn" else f"{plan.kernel}{why}"
    parts = f", heads in {plan.head_chunks} parts" if plan.head_chunks > 1 else ""
    shared = ""
    if plan.attention:
        others = ", ".join(f"{words}: {size / 1e6:,.1f}" for words, size in plan.attention_others.items())
        others = f" (others: {others})" if others else ""
        shared = (
            f"{plan.attention}: {plan.attention_bytes / 1e6:,.1f} MB for a layer in a turn where attention is kept{others}; "
        )
    rows = f"{plan.rows_per_step} row{'s' * (plan.rows_per_step > 1)} of {plan.row_tokens:,} tokens"
    lines = [
        ("plan", f"{model} on {where}, compiled in {plan.plan_s:.1f} s by jax {plan.jax}; nothing was run or measured"),
        (
            "mesh",
            f"{mesh(plan.mesh)}; {rows} a step, {plan.rows_at_once} at a time, up to {plan.max_documents_per_row} documents in "
            "each",
        ),
        ("attention", f"{shared}{kernel}{parts}"),
        (
            "levers",
            f"remat {plan.remat}, offload_activations {plan.offload_activations}, offload_optimizer {plan.offload_optimizer}: "
            f"{plan.levers}",
        ),
        ("fits", fits(plan)),
    ]
    parts_of = sorted(plan.memory.items(), key=lambda pair: (pair[0] == budget.RESERVED, -pair[1]))
    shown = [(name, size) for name, size in parts_of if size >= 0.005]
    lines.append(("memory", "GiB of each device at the fullest moment, by cause"))
    lines += [("", f"{size:8.2f}  {name}: {budget.CAUSES[name]}") for name, size in shown]
    total = sum(plan.memory.values())
    lines.append(("", f"{total:8.2f}  of {gpus.KINDS[plan.device].memory_bytes / 2**30:.2f}"))
    if plan.host_gib >= 0.005:
        host = sorted(plan.host_memory.items(), key=lambda pair: -pair[1])
        lines.append(("host", "GiB of each node's memory, by cause"))
        lines += [("", f"{size:8.2f}  {name}") for name, size in host if size >= 0.005]
    if plan.host_bytes is not None and max(plan.host_bytes) > 0:
        from_host, to_host = plan.host_bytes
        lines.append(("", f"each device gets {from_host / 1e9:,.1f} GB from there in a step, and sends {to_host / 1e9:,.1f}"))
    if plan.moved:
        lines.append(("sent", "GB by each device in a step: by the program, by the formula, their ratio"))
        lines += [("", _sent(one)) for one in plan.moved]
    executed = ""
    if plan.flops_executed is not None:
        executed = f", {plan.flops_executed / 1e12:,.0f} executed ({plan.flops_executed / plan.flops_needed:.2f} times)"
    words = f"{plan.flops_needed / 1e12:,.0f} TFLOP needed of each device in a step{executed}"
    lines.append(("arithmetic", f"{words}, if rows are filled with documents of {plan.document_tokens:,} tokens"))
    lines.append(("time", speed(plan)))
    if plan.step_s_estimate is not None:
        lines += [("", f"{size:8.3f}  {name}") for name, size in plan.seconds_estimate.items() if size >= 0.0005]
    return "\n".join(_wrapped(label, words) for label, words in lines)


def fits(plan: plans.Plan) -> str:
    """Whether a plan fits, what binds it, and what else there is to do."""
    device = f"{plan.device_gib:.1f} of {plan.room_gib:.1f} GiB on each device"
    host = f", {plan.host_gib:,.0f} of {plan.host_room_gib:,.0f} GiB of each node's memory" if plan.host_gib >= 0.05 else ""
    if plan.fits:
        return f"yes: {device}{host}; the {plan.binds} is what binds"
    ways = f"{', '.join(plan.ways_out[:-1])}{' or ' * (len(plan.ways_out) > 1)}{plan.ways_out[-1]}"
    return f"NO: {device}{host}; the {plan.binds} is what binds. Not turned yet: {ways}"


def speed(plan: plans.Plan) -> str:
    """How fast a step is expected to be."""
    if plan.step_s_estimate is None or plan.tokens_per_s_estimate is None or plan.mfu_estimate is None:
        return "no estimate: the ceilings are for bfloat16 and cuDNN's attention"
    return (
        f"about {plan.step_s_estimate:.3g} s a step, {plan.tokens_per_s_estimate:,.0f} tokens/s, MFU "
        f"{100 * plan.mfu_estimate:.0f} %: an ESTIMATE, from ceilings that others measured (planner/gpus.py)"
    )


def tried(one: search.Tried) -> str:
    """A length that was tried, in a line."""
    if one.plan is None:
        return f"  {one.row_tokens:>12,} tokens  {one.why}"
    plan = one.plan
    host = f", {plan.host_gib:8,.1f} of {plan.host_room_gib:,.0f} of host" if plan.host_gib >= 0.05 else ""
    verdict = "fits" if not one.why else f"too long for the {plan.binds}" if plan.short else one.why
    return (
        f"  {one.row_tokens:>12,} tokens  remat {plan.remat:<9}  {plan.device_gib:6.1f} of {plan.room_gib:.1f} GiB of device"
        f"{host}: {verdict} ({plan.plan_s:.0f} s)"
    )


def longest(found: search.Longest, *, seconds: float) -> str:
    """What a search came to."""
    plan, beyond = found.plan, found.beyond
    if plan is None:
        ways = f" Not turned yet: {', '.join(beyond.plan.ways_out)}." if beyond.plan else ""
        return f"no row fits, not even of {beyond.row_tokens:,} tokens: {beyond.why}.{ways}"
    binds = beyond.plan.binds if beyond.plan and beyond.plan.short else None
    why = f"the {binds} is full" if binds else beyond.why
    return (
        f"longest row: {plan.row_tokens:,} tokens, remat {plan.remat}; {beyond.row_tokens:,} do not fit: {why}. "
        f"{len(found.tried)} lengths compiled in {seconds:.0f} s"
    )


def ranked(found: Sequence[shapes.Shape]) -> str:
    """Meshes that were planned, as a table; the first fits and is fastest by estimate."""
    of_mesh, of_time = ("replica", "data", "seq", "attention"), ("step s*", "tokens/s*", "MFU* %")
    head = (*of_mesh, "fits", "device GiB", "host GiB", "remat", "kernel", *of_time)
    rows = []
    for shape in found:
        sizes = tuple(str(shape.mesh[axis]) for axis in axes.ALL)
        plan = shape.plan
        if plan is None:
            rows.append((*sizes, shapes.name(shape.kind), shape.why))
            continue
        rows.append(
            (
                *sizes,
                shapes.name(shape.kind),
                "yes" if plan.fits else f"no: {plan.binds}",
                f"{plan.device_gib:.1f}",
                f"{plan.host_gib:,.0f}",
                plan.remat,
                plan.kernel,
                number(plan.step_s_estimate, "{:.3g}"),
                number(plan.tokens_per_s_estimate, "{:,.0f}"),
                number(None if plan.mfu_estimate is None else 100 * plan.mfu_estimate, "{:.0f}"),
            )
        )
    return f"{table(head, rows)}\n* estimates from a roofline; nothing was measured"


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
    """What nobody has said of the nodes that are planned for."""
    return f"nodes of {site.node_devices} GPUs with {site.node_host_gib:,.0f} GiB of memory (--node-devices, --host-gib)"


def _sent(one: Mapping[str, Any]) -> str:
    ratio = f"{one['bytes'] / one['formula']:.2f}" if one["formula"] else "    "
    return f"{one['bytes'] / 1e9:10.3f} {one['formula'] / 1e9:10.3f}  {ratio}  {one['kind']} along {' and '.join(one['axes'])}"


def _wrapped(label: str, words: str) -> str:
    """A label and what it says, under each other where that is long; numbers stay in their columns."""
    indent = " " * _LABEL
    if not label:
        return textwrap.fill(words, 130, initial_indent=indent, subsequent_indent=indent + " " * 10, replace_whitespace=False)
    return textwrap.fill(words, 130, initial_indent=f"{label:<{_LABEL}}", subsequent_indent=indent)
