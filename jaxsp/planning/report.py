"""Plans as text, and tables of plans of several GPUs or meshes."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from jaxsp.core import axes, errors, units
from jaxsp.planning import fit, gpus, searches, step_time
from jaxsp.planning.planner import RESERVED, Plan
from jaxsp.planning.searches import LongestRow, MeshPlan, TriedLength

_MEMORY = dict(fit.CAUSES) | {RESERVED: "for CUDA's context, NCCL's buffers and fragmentation"}
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
            f"{model} on {devices}, compiled in {units.format_seconds(plan.plan_s)} by jax "
            f"{plan.jax_version}; nothing was run or measured",
        ),
        (
            "mesh",
            f"{format_mesh(plan.mesh)}; {rows} of {plan.row_tokens:,} tokens per step, "
            f"{plan.rows_per_microbatch} per microbatch, at most {plan.max_segments_per_row} "
            "documents per row",
        ),
        ("objective", objective),
        ("layers", plan.layers),
        ("attention", _format_attention(plan)),
        ("options", f"remat {plan.remat}: {plan.options}"),
        ("fits", format_fit(plan)),
        *_list_memory(plan),
        *_list_traffic(plan),
        *_list_times(plan, tokens),
    ]
    return "\n".join(_wrap(label, text) for label, text in lines if text)


def _wrap(label: str, text: str) -> str:
    """Wraps text to a column after its label. Without a label, numbers stay in their columns."""
    begin = f"{label:<{_LABEL_WIDTH}}"
    indent = " " * (_LABEL_WIDTH if label else _LABEL_WIDTH + 10)
    return textwrap.fill(
        text, 130, initial_indent=begin, subsequent_indent=indent, replace_whitespace=bool(label)
    )


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


def _list_memory(plan: Plan) -> Iterator[tuple[str, str]]:
    """Labels and texts of memory by cause, largest first."""
    yield "memory", "GiB on each device at its peak, by cause"
    for name, size in sorted(plan.memory.items(), key=lambda pair: (pair[0] == RESERVED, -pair[1])):
        if size >= 0.005:
            yield "", f"{size:8.2f}  {name}: {_MEMORY[name]}"
    device_gib = gpus.GPUS[plan.device_type].memory_bytes / units.GIB
    yield "", f"{sum(plan.memory.values()):8.2f}  of {device_gib:.2f}"
    if plan.host_gib >= 0.005:
        pool = f"; XLA's pool of pinned memory takes {plan.host_pool_gib:,.0f}"
        yield "host", f"GiB of each node's memory, by cause{pool}"
        for name, size in sorted(plan.host_memory.items(), key=lambda pair: -pair[1]):
            if size >= 0.005:
                yield "", f"{size:8.2f}  {name}"


def _list_traffic(plan: Plan) -> Iterator[tuple[str, str]]:
    """Bytes sent and copied, and their time not overlapped."""
    if plan.collectives:
        yield "sent", "GB by each device in a step; seconds (estimates): all, not overlapped"
    for collective in plan.collectives:
        seconds = format_number(collective.seconds, "{:.3f}")
        waited = format_number(collective.waited_s, "{:.3f}")
        text = f"{collective.bytes / 1e9:10.3f} {seconds:>8} {waited:>7}  {collective.kind} along "
        text += " and ".join(collective.axes)
        if collective.node_bytes:
            text += f"; {collective.node_bytes / 1e9:,.3f} GB leave each node"
        yield "", text
    if plan.host_copy_bytes is not None and max(plan.host_copy_bytes) > 0:
        from_host, to_host = plan.host_copy_bytes
        copies = f"{from_host / 1e9:,.1f} GB from host memory and {to_host / 1e9:,.1f} GB to it"
        yield "", f"each device copies {copies}"


def _list_times(plan: Plan, tokens: float | None) -> Iterator[tuple[str, str]]:
    """Arithmetic, and the estimate by cause."""

    def format_tflop(num_flops: float) -> str:
        tflop = num_flops / 1e12
        return f"{tflop:,.0f}" if tflop >= 1 else f"{tflop:.2g}"

    executed = ""
    if plan.hardware_flops is not None:
        ratio = plan.hardware_flops / plan.model_flops
        executed = f", {format_tflop(plan.hardware_flops)} executed ({ratio:.2f} times)"
    needed = f"{format_tflop(plan.model_flops)} TFLOP needed per device and step{executed}"
    documents = f"if documents of {plan.document_tokens:,} tokens fill the rows"
    yield "arithmetic", f"{needed}, {documents}"
    yield "time", format_time(plan)
    for name, size in plan.seconds_estimate.items():
        if size >= 0.0005:
            yield "", f"{size:8.3f}  {name}"
    is_short = (plan.step_s_estimate or 0) < _SHORT_STEP_S
    if tokens is not None and plan.tokens_per_s_estimate is not None and not is_short:
        seconds = tokens / plan.tokens_per_s_estimate
        ranges = [
            " to ".join(format_amount(factor * amount) for factor in step_time.LIKELY_RANGE)
            for amount in (seconds * plan.num_devices / 3600, seconds / 86400)
        ]
        yield "cost", f"{tokens:,.0f} tokens take {ranges[0]} GPU-hours, {ranges[1]} days"


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
    step_s = plan.step_s_estimate
    if step_s is None or plan.tokens_per_s_estimate is None or plan.mfu_estimate is None:
        return "no estimate: the published rates are for bfloat16"
    if step_s < _SHORT_STEP_S:
        return (
            f"more than {units.format_seconds(step_s)} per step: kernel launches, which are not "
            "estimated, limit so short a step"
        )
    low, high = (units.format_seconds(factor * step_s) for factor in step_time.LIKELY_RANGE)
    return (
        f"about {units.format_seconds(step_s)} per step (likely {low} to {high}), "
        f"{plan.tokens_per_s_estimate:,.0f} tokens/s, MFU {100 * plan.mfu_estimate:.0f} %, "
        f"limited by {plan.time_bottleneck}: an ESTIMATE from published rates "
        "(planning/gpus.yaml); scripts/bench/published_runs.py compares such estimates with "
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
        line += f", about {units.format_seconds(plan.step_s_estimate)} per step"
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
        f"longest row: {plan.row_tokens:,} tokens, remat {plan.remat}, with "
        f"{searches.HEADROOM:.0%} of the device left free; {step}. {failing.row_tokens:,} do not "
        f"fit: {reason}. {len(result.tried)} lengths compiled in "
        f"{units.format_seconds(round(seconds))}"
    )


def format_step_time(seconds: float) -> str:
    """Formats the time of a step: `39.2 s`, or `26,708 s (7.4 hours)`."""
    if seconds < 3600:
        return f"{seconds:,.3g} s"
    return f"{seconds:,.0f} s ({seconds / 3600:.1f} hours)"


def format_mesh(sizes: Mapping[str, int]) -> str:
    """Formats a mesh as `replica 1 x data 2 x seq 4`."""
    return " x ".join(f"{axis} {sizes[axis]}" for axis in axes.ALL)


# Tables


_ESTIMATES_NOTE = (
    f"* estimates; measured times are likely {step_time.LIKELY_RANGE[0]:g} to "
    f"{step_time.LIKELY_RANGE[1]:g} times as long"
)


def format_comparison(plans: Sequence[Plan], *, tokens: float | None) -> str:
    """Formats a table of plans of one config for several GPUs."""
    rows = []
    for plan in plans:
        columns = _list_columns(plan)
        device_tokens = plan.row_tokens * plan.rows_per_microbatch / plan.mesh[axes.SEQ]
        is_tiled = plan.mlp_tile_tokens < device_tokens
        row = {"device": plan.device_type, "row tokens": f"{plan.row_tokens:,}"}
        row |= {name: columns.pop(name) for name in ("fits", "device GiB", "host GiB", "remat")}
        row["device GiB"] += f" of {plan.device_limit_gib:.1f}"
        row["tile"] = f"{plan.mlp_tile_tokens:,}" if is_tiled else "-"
        row |= columns | {"limited by*": plan.time_bottleneck or "-"}
        if tokens is not None:
            hours = "-"
            if plan.tokens_per_s_estimate is not None:
                seconds = tokens / plan.tokens_per_s_estimate
                hours = format_amount(seconds * plan.num_devices / 3600)
            row["GPU-hours*"] = hours
        rows.append(row)
    table = format_table([*rows[0]], [[*row.values()] for row in rows])
    return f"{table}\n{_ESTIMATES_NOTE}. Nothing was measured"


def format_ranking(mesh_plans: Sequence[MeshPlan]) -> str:
    """Formats planned meshes as a table, in the order of `searches.sort_by_rank`.

    Rows per microbatch have a column if some mesh has several.
    """
    planned = [(each, each.plan) for each in mesh_plans if each.plan is not None]
    has_rows = not {plan.rows_per_microbatch for _, plan in planned} <= {1}
    head: list[str] = []
    rows = []
    for mesh_plan in mesh_plans:
        row = {axis: str(mesh_plan.mesh[axis]) for axis in axes.ALL}
        row["attention"] = mesh_plan.strategy
        plan = mesh_plan.plan
        if plan is None:
            row["problem"] = mesh_plan.problem
        else:
            row |= {"microbatch rows": str(plan.rows_per_microbatch)} if has_rows else {}
            row |= _list_columns(plan) | {"rank": str(mesh_plan.rank or "-")}
            head = [*row]
        rows.append([*row.values()])
    percent = 100 * (searches.SAME_TIME_FACTOR - 1)
    return (
        f"{format_table(head, rows)}\n{_ESTIMATES_NOTE}. Meshes within {percent:.0f} % have the "
        "same rank, the smallest seq first. Nothing was measured"
    )


def _list_columns(plan: Plan) -> dict[str, str]:
    """Columns of both tables, by their heads."""
    columns = {
        "fits": "yes" if plan.fits else f"no: {plan.memory_bottleneck}",
        "device GiB": f"{plan.device_gib:.1f}",
        "host GiB": f"{plan.host_gib:,.0f}",
        "remat": plan.remat,
        "kernel": plan.kernel,
    }
    times = ["-", "-", "-"]
    if plan.step_s_estimate is not None and plan.mfu_estimate is not None:
        times = [units.format_seconds(plan.step_s_estimate)]
        times += [format_number(plan.tokens_per_s_estimate, "{:,.0f}")]
        times += [f"{100 * plan.mfu_estimate:.0f}"]
    return columns | dict(zip(("step*", "tokens/s*", "MFU* %"), times, strict=True))


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats columns under their heads; a row with fewer cells ends in a sentence."""
    full = [row for row in rows if len(row) == len(head)]
    widths = [max(len(row[place]) for row in [head, *full]) for place in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place < len(row) - 1 or len(row) == len(head) else cell
            for place, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in [head, *rows]
    )


def format_number(value: float | None, form: str) -> str:
    """Formats a number; None is a dash."""
    return "-" if value is None else form.format(value)


def format_amount(number: float) -> str:
    """Formats a number. Examples: `1,234`, `12`, `1.2`, `0.012`."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
