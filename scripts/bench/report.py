"""Text of benchmark results: lines of tables, ratios to earlier results, and summaries.

`python -m scripts.bench.report RESULTS.json` prints one line for LOG.md. Results of
peer_transformers.py are those of step.py, with the result of the peer under "transformers".
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
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

SIDES = ("jaxsp", "transformers")
"""The two programs that peer_transformers.py compares."""

_COLUMNS = (
    *("{:<16}", "{:>9}", "{:<9}", "{:<9}", "{:<18}"),
    *("{:>9}", "{:>9}", "{:>10}", "{:>8}", "{:>7}", "{:>9}", "{:>9}", "{:>9}"),
)
_LINE = "  ".join(_COLUMNS)

HEADER = _LINE.format(
    *("shape", "row", "documents", "kernel", "remat, on host"),
    *("compile s", "step s", "tokens/s", "TFLOP/s", "MFU %", "peak GiB", "host GiB", "loss"),
)

_SIDE = "{:>14}  {:>5}  {:>8}  {:>8}"
_PAIR = f"{{:<16}}  {{:>9}}  {{:<9}}  {_SIDE}  {_SIDE}  {{:>7}}  {{:>8}}  {{}}"

PAIR_HEADER = _PAIR.format(
    *("shape", "row", "documents"),
    *("jaxsp tokens/s", "MFU %", "peak GiB", "loss"),
    *("HF tokens/s", "MFU %", "peak GiB", "loss"),
    *("speed x", "memory x", "HF attention"),
)
"""speed x, memory x: jaxsp's figure over that of transformers."""

_ON_HOST = {
    "layer_inputs": "inputs",
    "layer_inputs_and_attention": "inputs+attention",
    "state": "optimizer",
    "state_and_gradients": "optimizer+gradients",
}
"""Short names for values of memory.offload_activations and memory.offload_optimizer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Longest:
    """The longest rows of a model that each side could train, of those that were tried."""

    shape: str
    documents: str
    jaxsp: int | None
    """Tokens; None if no row succeeded."""
    jaxsp_is_limit: bool
    """True if a longer row ran out of memory; otherwise longer rows may work."""
    transformers: int | None
    transformers_is_limit: bool
    ratio: float | None


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


def format_pair(case: dict[str, Any]) -> str:
    """Formats a case of both sides as a line under PAIR_HEADER, with its problems at the end."""
    formats = {"tokens_per_s": "{:,.0f}", "mfu": "{:.1%}", "peak_gib": "{:.2f}", "loss": "{:.4f}"}
    figures = [
        format_number(get_side(case, side)[name], text).rstrip("%")
        for side in SIDES
        for name, text in formats.items()
    ]
    ratios = [format_number(case[name], "{:.2f}") for name in ("speed_ratio", "memory_ratio")]
    attention = case["transformers"]["attention"] or "-"
    line = _PAIR.format(
        case["shape"], case["row_tokens"], case["documents"], *figures, *ratios, attention
    )
    for side in SIDES:
        problems = _problems(get_side(case, side))
        if problems:
            line += f"  {', '.join([side, *problems])}"
    return line


def _problems(result: dict[str, Any]) -> list[str]:
    """Status and message of a side that did not succeed, and a loss that is not finite."""
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
    """Figures of each model's longest rows in one line; of all cases if they have two sides."""
    cases = results["cases"]
    if all("transformers" in case for case in cases):
        return "; ".join(_figures(case) for case in cases if case["status"] != NOT_RUN)
    longest: dict[str, int] = {}
    for case in cases:
        longest[case["shape"]] = max(case["row_tokens"], longest.get(case["shape"], 0))
    return "; ".join(
        _figures(case) for case in cases if case["row_tokens"] == longest[case["shape"]]
    )


def get_side(case: dict[str, Any], side: str) -> dict[str, Any]:
    """Result of a case on a side."""
    return case if side == "jaxsp" else case[side]


def find_longest(cases: Sequence[dict[str, Any]]) -> list[Longest]:
    """The longest rows of both sides, for each model, with one and with several documents."""
    longest = []
    for shape, documents in dict.fromkeys((case["shape"], case["documents"]) for case in cases):
        rows: dict[str, int | None] = {}
        limits = {}
        for side in SIDES:
            statuses = [
                (get_side(case, side)["status"], case["row_tokens"])
                for case in cases
                if (case["shape"], case["documents"]) == (shape, documents)
            ]
            rows[side] = max((tokens for status, tokens in statuses if status == OK), default=None)
            limits[f"{side}_is_limit"] = any(
                status == OUT_OF_MEMORY and tokens > (rows[side] or 0)
                for status, tokens in statuses
            )
        ratio = divide(rows["jaxsp"], rows["transformers"])
        longest.append(Longest(shape=shape, documents=documents, **rows, **limits, ratio=ratio))
    return longest


def format_longest(longest: Longest) -> str:
    """Formats the longest rows of a model as a line."""
    jaxsp = _format_row(longest.jaxsp, longest.jaxsp_is_limit)
    peer = _format_row(longest.transformers, longest.transformers_is_limit)
    times = f", {longest.ratio:.2f} times as long" if longest.ratio else ""
    case = f"{longest.shape} {longest.documents}"
    return f"longest row, {case}: jaxsp {jaxsp}, transformers {peer}{times}"


def _format_row(tokens: int | None, is_limit: bool) -> str:
    if not tokens:
        return "none"
    return f"{tokens:,} tokens" if is_limit else f"{tokens:,} tokens or more"


def divide(ours: float | None, peers: float | None) -> float | None:
    """Ratio of two figures; None if one is missing."""
    return ours / peers if ours and peers else None


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
    if "transformers" in case:
        figures += f", {_format_ratios(case)}"
    return figures


def _format_ratios(case: dict[str, Any]) -> str:
    if case["transformers"]["status"] != OK:
        return f"transformers {case['transformers']['status']}"
    memory = f", {case['memory_ratio']:.2f} times the memory" if case["memory_ratio"] else ""
    return f"{case['speed_ratio']:.2f} times as fast as transformers{memory}"


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
