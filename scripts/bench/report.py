"""Text of the results of scripts/bench/step.py: lines, ratios to earlier results, and a summary.

`python -m scripts.bench.report RESULTS.json` prints one line for LOG.md.
"""

import json
import pathlib
import sys
from typing import Any

OK = "ok"
OUT_OF_MEMORY = "out of memory"
REFUSED = "refused"
FAILED = "failed"
TIMED_OUT = "timed out"
NOT_RUN = "not run"
"""Statuses of a case. Refused: jaxsp printed the reason that it cannot run the case."""

FINAL = (OK, OUT_OF_MEMORY, REFUSED)
"""Statuses that another run of the same case would not change."""

FAILURES = (FAILED, TIMED_OUT)

AUTO = "auto"
"""Default tile size of the config."""

TILES = ("mlp_tile_tokens", "loss_tile_tokens")
"""Tile sizes, fields of the config's section `memory`."""

MEMORY_OPTIONS = ("remat", "offload_activations", "offload_optimizer")
"""Other fields of the config's section `memory` in which cases differ."""

_COLUMNS = (
    *("{:<16}", "{:>9}", "{:<9}", "{:<9}", "{:<18}"),
    *("{:>9}", "{:>9}", "{:>10}", "{:>8}", "{:>7}", "{:>9}", "{:>9}", "{:>9}"),
)
_LINE = "  ".join(_COLUMNS)

HEADER = _LINE.format(
    *("shape", "row", "documents", "kernel", "remat, on host"),
    *("compile s", "step s", "tokens/s", "TFLOP/s", "MFU %", "peak GiB", "host GiB", "loss"),
)

_ON_HOST = {
    "layer_inputs": "inputs",
    "layer_inputs_and_attention": "inputs+attention",
    "state": "optimizer",
    "state_and_gradients": "optimizer+gradients",
}
"""Short names for values of memory.offload_activations and memory.offload_optimizer."""


def format_case(case: dict[str, Any]) -> str:
    """Formats a case as a line under HEADER, with its problems at the end."""
    figures = (
        format_number(case["compile_s"], "{:.1f}"),
        format_number(case["step_s"], "{:.4f}"),
        format_number(case["tokens_per_s"], "{:,.0f}"),
        format_number(case["tflops_per_device"], "{:.4g}"),
        format_number(case["mfu"], "{:.1f}", scale=100),
        format_number(case["peak_gib"], "{:.2f}"),
        format_number(case["host_gib"], "{:.2f}"),
        format_number(case["loss"], "{:.4f}"),
    )
    line = _LINE.format(
        *(case["shape"], case["row_tokens"], case["documents"]),
        *(case["kernel_used"] or case["kernel"], _format_memory(case)),
        *figures,
    )
    notes = [*_changed_fields(case), *_problems(case), case["fallback_reason"]]
    return f"{line}  {', '.join(filter(None, notes))}".rstrip()


def _problems(result: dict[str, Any]) -> list[str]:
    """Status and message of a case that did not succeed, and a loss that is not finite."""
    problems = []
    if result["status"] != OK:
        problems.append(result["status"])
    if result["message"]:
        problems.append(result["message"])
    if result["loss_finite"] is False:
        problems.append("loss is not finite")
    return problems


def compare_results(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Formats speedup and memory ratio of each case that succeeded in both files."""
    before = {_key(case): case for case in old["cases"] if case["status"] == OK}
    lines = []
    for case in new["cases"]:
        earlier = before.get(_key(case))
        if earlier is None or case["status"] != OK:
            continue
        speedup = earlier["step_s"] / case["step_s"]
        line = f"{' '.join(_key(case))}: {earlier['step_s']:.4f} s -> {case['step_s']:.4f} s"
        line += f", {speedup:.2f} times as fast"
        memory = divide(case["peak_gib"], earlier["peak_gib"])
        if memory:
            line += f", {memory:.2f} times the memory"
        lines.append(line)
    head = f"against {old['commit']} of {old['date']} on {old['device']}:"
    return "\n".join([head, *(lines or ["no case has figures in both files"])])


def summarize(results: dict[str, Any]) -> str:
    """Figures of each model's longest rows in one line."""
    cases = results["cases"]
    longest: dict[str, int] = {}
    for case in cases:
        longest[case["shape"]] = max(case["row_tokens"], longest.get(case["shape"], 0))
    return "; ".join(
        _figures(case) for case in cases if case["row_tokens"] == longest[case["shape"]]
    )


def divide(figure: float | None, base: float | None) -> float | None:
    """Ratio of two figures; None if one is missing."""
    return figure / base if figure and base else None


def format_number(value: float | None, text: str, *, scale: int = 1) -> str:
    """Formats a number, or a dash if it is missing."""
    return "-" if value is None else text.format(scale * value)


def _figures(case: dict[str, Any]) -> str:
    name = f"{case['shape']} {case['row_tokens']} {case['documents']}"
    if case["status"] != OK:
        return f"{name} {case['status']}"
    options = ", ".join([_format_memory(case), *_changed_fields(case)])
    figures = f"{name} {case['kernel_used']} {options} {case['step_s']:.3f} s"
    figures += f", {case['tflops_per_device']:.4g} TFLOP/s"
    if case["mfu"] is not None:
        figures += f" (MFU {100 * case['mfu']:.1f} %)"
    if case["peak_gib"] is not None:
        figures += f", {case['peak_gib']:.1f} GiB"
    if over_plan := divide(case["peak_gib"], case["planned_gib"]):
        figures += f", {over_plan:.3f} times the plan"
    return figures


def _format_memory(case: dict[str, Any]) -> str:
    """Rematerialization, and what is in host memory."""
    offloaded = (_ON_HOST.get(case[name]) for name in ("offload_activations", "offload_optimizer"))
    return ", ".join([case["remat_used"] or case["remat"], *filter(None, offloaded)])


def _changed_fields(case: dict[str, Any]) -> list[str]:
    """Tile sizes and XLA options that differ from the defaults, as field=value.

    Files before 2026-11-23 have neither.
    """
    tiles = {name: case[name] for name in TILES if case.get(name, AUTO) != AUTO}
    fields = tiles | case.get("xla_options", {})
    return [f"{name}={str(value).lower()}" for name, value in fields.items()]


def _key(case: dict[str, Any]) -> tuple[str, ...]:
    names = ("shape", "row_tokens", "documents", "kernel", *MEMORY_OPTIONS)
    return (*(str(case[name]) for name in names), *_changed_fields(case))


if __name__ == "__main__":
    print(summarize(json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))))
