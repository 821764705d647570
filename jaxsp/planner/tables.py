"""Tables of plans of several GPUs or meshes."""

from collections.abc import Sequence

from jaxsp.core import axes, durations
from jaxsp.planner import mesh_sweep
from jaxsp.planner.cost import roofline
from jaxsp.planner.mesh_sweep import MeshPlan
from jaxsp.planner.planning import Plan


def format_amount(number: float) -> str:
    """Formats a number. Examples: `1,234`, `12`, `1.2`, `0.012`."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def format_comparison(plans: Sequence[Plan], *, tokens: float | None) -> str:
    """Formats a table of plans of one config for several GPUs."""
    head = ["device", "row tokens", "fits", "device GiB", "host GiB", "remat", "tile"]
    head += ["step*", "tokens/s*", "MFU* %", "limited by*"]
    if tokens is not None:
        head.append("GPU-hours*")
    rows = []
    for plan in plans:
        row = [
            plan.device_type,
            f"{plan.row_tokens:,}",
            "yes" if plan.fits else f"no: {plan.memory_bottleneck}",
            f"{plan.device_gib:.1f} of {plan.device_limit_gib:.1f}",
            f"{plan.host_gib:,.0f}",
            plan.remat,
            f"{plan.mlp_tile_tokens:,}" if plan.is_mlp_tiled else "-",
            *_format_time_columns(plan),
            plan.time_bottleneck or "-",
        ]
        if tokens is not None:
            hours = "-"
            if plan.tokens_per_s_estimate is not None:
                seconds = tokens / plan.tokens_per_s_estimate
                hours = format_amount(seconds * plan.num_devices / 3600)
            row.append(hours)
        rows.append(row)
    return f"{format_table(head, rows)}\n{_ESTIMATES_NOTE}. Nothing was measured"


_ESTIMATES_NOTE = (
    f"* estimates; measured times are likely {roofline.LIKELY_RANGE[0]:g} to "
    f"{roofline.LIKELY_RANGE[1]:g} times as long"
)


def _format_time_columns(plan: Plan) -> list[str]:
    """Seconds of a step, tokens per second, and MFU; dashes without an estimate."""
    if plan.step_s_estimate is None:
        return ["-", "-", "-"]
    assert plan.mfu_estimate is not None
    return [
        durations.describe(plan.step_s_estimate),
        format_number(plan.tokens_per_s_estimate, "{:,.0f}"),
        f"{100 * plan.mfu_estimate:.0f}",
    ]


def format_ranking(mesh_plans: Sequence[MeshPlan]) -> str:
    """Formats planned meshes as a table, in the order of `mesh_sweep.sort_by_rank`.

    Rows per microbatch have a column if some mesh has several.
    """
    ranks = mesh_sweep.compute_ranks(mesh_plans)
    numbers = {each.plan.rows_per_microbatch for each in mesh_plans if each.plan is not None}
    has_rows = not numbers <= {1}
    head = ["replica", "data", "seq", "attention"]
    if has_rows:
        head.append("microbatch rows")
    head.append("fits")
    head += ["device GiB", "host GiB", "remat", "kernel", "step*", "tokens/s*", "MFU* %", "rank"]
    rows = []
    for mesh_plan in mesh_plans:
        sizes = tuple(str(mesh_plan.mesh[axis]) for axis in axes.ALL)
        plan = mesh_plan.plan
        if plan is None:
            rows.append((*sizes, mesh_plan.strategy, mesh_plan.problem))
            continue
        rows.append(
            (
                *sizes,
                mesh_plan.strategy,
                *([str(plan.rows_per_microbatch)] if has_rows else []),
                "yes" if plan.fits else f"no: {plan.memory_bottleneck}",
                f"{plan.device_gib:.1f}",
                f"{plan.host_gib:,.0f}",
                plan.remat,
                plan.kernel,
                *_format_time_columns(plan),
                str(ranks.get(id(mesh_plan), "-")),
            )
        )
    percent = 100 * (mesh_sweep.SAME_TIME_FACTOR - 1)
    return (
        f"{format_table(head, rows)}\n{_ESTIMATES_NOTE}. Meshes within {percent:.0f} % have the "
        "same rank, the smallest seq first. Nothing was measured"
    )


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
