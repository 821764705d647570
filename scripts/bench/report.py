"""Results of step.py as text: a table's rows, ratios to earlier results, and, as a command, one line for LOG.md.

Results of peer_transformers.py are step.py's, in each case with "transformers": what came of the peer.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

OK, OUT_OF_MEMORY, REFUSED, FAILED, TIMED_OUT, NOT_RUN = (
    "ok",
    "out of memory",
    "refused",
    "failed",
    "timed out",
    "not run",
)
"""What can come of a case. Refused: jaxsp says that it cannot be done."""

FINAL = (OK, OUT_OF_MEMORY, REFUSED)
"""Results that another run of the same case would not change."""

AUTO = "auto"
"""Default tile size of the config."""

TILES = ("mlp_tile_tokens", "loss_tile_tokens")
"""Tile sizes, fields of the config's group `memory`."""

_COLUMNS = (
    *("{:<16}", "{:>9}", "{:<9}", "{:<9}", "{:<18}"),
    *("{:>9}", "{:>9}", "{:>10}", "{:>8}", "{:>7}", "{:>9}", "{:>9}", "{:>9}"),
)
_LINE = "  ".join(_COLUMNS)

HEADER = _LINE.format(
    *("shape", "row", "documents", "kernel", "remat, on host"),
    *("compile s", "step s", "tokens/s", "TFLOP/s", "MFU %", "peak GiB", "host GiB", "loss"),
)

SIDES = ("jaxsp", "transformers")
"""Of a case of peer_transformers.py."""

_SIDE = "{:>14}  {:>5}  {:>8}  {:>8}"

_BOTH = f"{{:<16}}  {{:>9}}  {{:<9}}  {_SIDE}  {_SIDE}  {{:>7}}  {{:>8}}  {{}}"

BOTH = _BOTH.format(
    *("shape", "row", "documents"),
    *("jaxsp tokens/s", "MFU %", "peak GiB", "loss"),
    *("HF tokens/s", "MFU %", "peak GiB", "loss"),
    *("speed x", "memory x", "HF attention"),
)
"""speed x, memory x: jaxsp's number over that of transformers."""

_ON_HOST = {
    "layer_inputs": "inputs",
    "layer_inputs_and_attention": "inputs+attention",
    "state": "optimizer",
    "state_and_gradients": "optimizer+gradients",
}
"""Short for what memory.offload_activations and memory.offload_optimizer say."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Longest:
    """The longest rows of a shape that had numbers, of those that were tried."""

    shape: str
    documents: str
    jaxsp: int | None
    """Tokens; null where no row had numbers."""
    jaxsp_is_limit: bool
    """Whether a longer one ran out of memory; otherwise it can do this at least."""
    transformers: int | None
    transformers_is_limit: bool
    ratio: float | None


def row(case: dict[str, Any]) -> str:
    """A case as a line under HEADER, with what went wrong behind it."""
    numbers = (
        number(case["compile_s"], "{:.1f}"),
        number(case["step_s"], "{:.4f}"),
        number(case["tokens_per_s"], "{:,.0f}"),
        number(case["tflops_per_device"], "{:.4g}"),
        number(case["mfu"], "{:.1f}", times=100),
        number(case["peak_gib"], "{:.2f}"),
        number(case["host_gib"], "{:.2f}"),
        number(case["loss"], "{:.4f}"),
    )
    kernel = case["kernel_used"] or case["kernel"]
    line = _LINE.format(
        case["shape"], case["row_tokens"], case["documents"], kernel, _levers(case), *numbers
    )
    not_finite = "loss is not finite" * (case["loss_finite"] is False)
    status = case["status"] * (case["status"] != OK)
    words = [
        word
        for word in (*_settings(case), status, case["message"], not_finite, case["why_not_cudnn"])
        if word
    ]
    return f"{line}  {': '.join(words)}".rstrip()


def comparison(old: dict[str, Any], new: dict[str, Any]) -> str:
    """For each case with numbers in both files, how many times faster it became, and the ratio of memory."""
    before = {_key(case): case for case in old["cases"] if case["status"] == OK}
    lines = [f"against {old['commit']} of {old['date']} on {old['device']}:"]
    for case in new["cases"]:
        was = before.get(_key(case))
        if was is None or case["status"] != OK:
            continue
        faster = f"{was['step_s']:.4f} s -> {case['step_s']:.4f} s, {was['step_s'] / case['step_s']:.2f} times as fast"
        memory = (
            f", {case['peak_gib'] / was['peak_gib']:.2f} times the memory"
            if case["peak_gib"] and was["peak_gib"]
            else ""
        )
        lines.append(f"{' '.join(_key(case))}: {faster}{memory}")
    return "\n".join(lines if len(lines) > 1 else [*lines, "no case has numbers in both"])


def summary(results: dict[str, Any]) -> str:
    """Figures of each shape's longest rows, in one line; of all cases if both sides were run."""
    if all("transformers" in case for case in results["cases"]):
        return "; ".join(_figures(case) for case in results["cases"] if case["status"] != NOT_RUN)
    longest = {
        case["shape"]: max(c["row_tokens"] for c in results["cases"] if c["shape"] == case["shape"])
        for case in results["cases"]
    }
    return "; ".join(
        _figures(case) for case in results["cases"] if case["row_tokens"] == longest[case["shape"]]
    )


def both(case: dict[str, Any]) -> str:
    """A case of both sides as a line under BOTH, with what went wrong behind it."""
    forms = {"tokens_per_s": "{:,.0f}", "mfu": "{:.1%}", "peak_gib": "{:.2f}", "loss": "{:.4f}"}
    numbers = [
        number(of(case, side)[name], form).rstrip("%")
        for side in SIDES
        for name, form in forms.items()
    ]
    ratios = [number(case[name], "{:.2f}") for name in ("speed_ratio", "memory_ratio")]
    used = case["transformers"]["attention"] or "-"
    line = _BOTH.format(
        case["shape"], case["row_tokens"], case["documents"], *numbers, *ratios, used
    )
    for side in SIDES:
        came = of(case, side)
        wrong = (
            came["status"]
            if came["status"] != OK
            else "loss is not finite" * (came["loss_finite"] is False)
        )
        line += f"  {': '.join(filter(None, (side, wrong, came['message'])))}" * bool(wrong)
    return line


def of(case: dict[str, Any], side: str) -> dict[str, Any]:
    """What came of a case on a side."""
    return case if side == "jaxsp" else case[side]


def longest(cases: Sequence[dict[str, Any]]) -> list[Longest]:
    """The longest rows of both sides, of each shape and kind of documents."""
    found = []
    for shape, documents in dict.fromkeys((case["shape"], case["documents"]) for case in cases):
        did: dict[str, int | None] = {}
        limits = {}
        for side in SIDES:
            own = [
                case for case in cases if (case["shape"], case["documents"]) == (shape, documents)
            ]
            ends = [(of(case, side)["status"], case["row_tokens"]) for case in own]
            did[side] = max((tokens for end, tokens in ends if end == OK), default=None)
            limits[f"{side}_is_limit"] = any(
                end == OUT_OF_MEMORY and tokens > (did[side] or 0) for end, tokens in ends
            )
        found.append(
            Longest(shape=shape, documents=documents, **did, **limits, ratio=ratio(*did.values()))
        )
    return found


def words(one: Longest) -> str:
    """The longest rows of a shape as a line."""
    sides = ((one.jaxsp, one.jaxsp_is_limit), (one.transformers, one.transformers_is_limit))
    ours, peers = (
        f"{tokens:,} tokens{'' if limit else ' or more'}" if tokens else "none"
        for tokens, limit in sides
    )
    times = f", {one.ratio:.2f} times as long" if one.ratio else ""
    return f"longest row, {one.shape} {one.documents}: jaxsp {ours}, transformers {peers}{times}"


def ratio(ours: float | None, peers: float | None) -> float | None:
    """None where one of them is missing."""
    return ours / peers if ours and peers else None


def _figures(case: dict[str, Any]) -> str:
    asked = f"{case['shape']} {case['row_tokens']} {case['documents']}"
    if case["status"] != OK:
        return f"{asked} {case['status']}"
    mfu = "" if case["mfu"] is None else f" (MFU {100 * case['mfu']:.1f} %)"
    peak = "" if case["peak_gib"] is None else f", {case['peak_gib']:.1f} GiB"
    how = f"{case['kernel_used']} {', '.join([_levers(case), *_settings(case)])}"
    figures = (
        f"{asked} {how} {case['step_s']:.3f} s, {case['tflops_per_device']:.4g} TFLOP/s{mfu}{peak}"
    )
    return f"{figures}, {_against_peer(case)}" if "transformers" in case else figures


def _against_peer(case: dict[str, Any]) -> str:
    if case["transformers"]["status"] != OK:
        return f"transformers {case['transformers']['status']}"
    memory = f", {case['memory_ratio']:.2f} times the memory" if case["memory_ratio"] else ""
    return f"{case['speed_ratio']:.2f} times as fast as transformers{memory}"


def _levers(case: dict[str, Any]) -> str:
    """What is computed again, and what lies on the host."""
    pulled = (_ON_HOST.get(case[name]) for name in ("offload_activations", "offload_optimizer"))
    return ", ".join([case["remat_used"] or case["remat"], *filter(None, pulled)])


def _settings(case: dict[str, Any]) -> list[str]:
    """Tile sizes and XLA options that differ from the defaults, as field=value; files before 2026-11-23 have none."""
    tiles = {name: case.get(name, AUTO) for name in TILES}
    config = {name: value for name, value in tiles.items() if value != AUTO} | case.get(
        "xla_options", {}
    )
    return [f"{name}={str(value).lower()}" for name, value in config.items()]


def _key(case: dict[str, Any]) -> tuple[str, ...]:
    levers = (case[name] for name in ("remat", "offload_activations", "offload_optimizer"))
    return (
        case["shape"],
        str(case["row_tokens"]),
        case["documents"],
        case["kernel"],
        *levers,
        *_settings(case),
    )


def number(value: float | None, form: str, *, times: int = 1) -> str:
    """A number as text, and a dash for one that is missing."""
    return "-" if value is None else form.format(times * value)


if __name__ == "__main__":
    print(summary(json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))))
