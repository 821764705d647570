"""Compares the workspace of cuDNN's attention on this GPU with the formula that jaxsp uses.

    python -m scripts.bench.workspace --out scripts/bench/results/today-workspace.json

The formula is `cudnn_memory.workspace_bytes`; plans and the memory check before training rely on
it. Each case compiles attention, forward and backward, in bfloat16, and runs nothing: if compiled
on a GPU, the program contains the workspace of each call. Deterministic cases are compiled as with
run.deterministic; on most GPUs their memory grows with the square of the row.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsp import attention
from jaxsp.attention import KernelSettings
from jaxsp.attention.kernels.cudnn import cudnn_calls, cudnn_limits, cudnn_memory
from jaxsp.attention.kernels.cudnn.cudnn_memory import CallSplit
from jaxsp.attention.kernels.kernel import KernelWorkload
from jaxsp.training import compile_options
from jaxsp.training.compile_options import CompileOptions
from scripts.bench import machine, report, results

MODULE = "scripts.bench.workspace"

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row of attention on one device."""

    row_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    max_segments: int
    """Slots for the documents of a row; 1 is a row of one document."""
    deterministic: bool = False

    @property
    def work(self) -> KernelWorkload:
        return KernelWorkload(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            row_tokens=self.row_tokens,
            num_rows=1,
            max_segments=self.max_segments,
            window=None,
            dtype="bfloat16",
            is_deterministic=self.deterministic,
        )


LLAMA_8B = (32, 8)
LLAMA_8B_ON_8 = (4, 1)
QWEN3_06B = (16, 8)
"""Query and K/V heads of a device; LLAMA_8B_ON_8 shares a row among 8 devices with Ulysses."""

_HEADS = (
    (32768, LLAMA_8B),
    (131072, LLAMA_8B),
    (32768, QWEN3_06B),
    (131072, LLAMA_8B_ON_8),
    (8192, LLAMA_8B),
)

CASES = (
    *(
        Case(row_tokens=tokens, num_heads=heads, num_kv_heads=kv_heads, max_segments=segments)
        for tokens, (heads, kv_heads) in _HEADS
        for segments in (1, 64)
    ),
    # without shared K/V heads, the formula is exact: it needs no dk and dv of each query head
    Case(row_tokens=32768, num_heads=8, num_kv_heads=8, max_segments=64),
    Case(row_tokens=32768, num_heads=8, num_kv_heads=2, head_dim=256, max_segments=64),
    Case(row_tokens=8192, num_heads=8, num_kv_heads=2, max_segments=1, deterministic=True),
    Case(row_tokens=16384, num_heads=8, num_kv_heads=2, max_segments=1, deterministic=True),
)
"""The most informative first. Two lengths of the deterministic pass show how fast it grows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Sizes of a compiled case; None if unknown."""

    status: str
    message: str | None = None
    head_chunks: int | None = None
    """Equal parts in which the heads are processed, one after another."""
    workspace_gib: float | None = None
    """Workspace of the largest call."""
    formula_gib: float | None = None
    ratio: float | None = None
    """Workspace over formula."""
    temp_gib: float | None = None
    """Temporary memory of the compiled program, workspace included."""
    compile_s: float | None = None


def main(arguments: list[str]) -> int:
    """Runs the command. Returns: 1 if a case failed, 2 without a GPU."""
    parser = results.make_parser(MODULE, __doc__)
    results.add_limits(parser, case="case")
    args = parser.parse_args(arguments)
    problem = machine.find_gpu_problem()
    if problem is not None:
        print(problem, file=sys.stderr)
        return 2
    device = jax.devices()[0]
    contents = results.open_gpu_results(MODULE, arguments, commit=args.commit)
    contents["device"] = device.device_kind
    began = time.monotonic()
    for case in CASES:
        is_in_time = time.monotonic() - began < args.seconds
        result = measure(case, device) if is_in_time else Result(status=report.NOT_RUN)
        contents["cases"].append(dataclasses.asdict(case) | dataclasses.asdict(result))
        contents["summary"] = summarize(contents["cases"])
        print(format_case(case, result), flush=True)
        results.write(args.out, contents)
    print(contents["summary"])
    return int(any(case["status"] == report.FAILED for case in contents["cases"]))


def measure(case: Case, device: Any) -> Result:
    """Compiles a case for a device and reads its workspace, which is unknown without a GPU."""
    work = cudnn_memory.adapt_to_devices(case.work, [device])
    if obstacles := cudnn_limits.unsupported_reasons(work, devices=[device]):
        return Result(status=report.REFUSED, message=f"cuDNN {obstacles[0].reason}")
    split = cudnn_memory.choose_split(work)
    began = time.monotonic()
    try:
        program = compile_case(case, device, split=split, copies_segments=work.copies_segments)
    except jax.errors.JaxRuntimeError as error:
        return Result(
            status=report.FAILED, message=str(error).splitlines()[0], head_chunks=split.head_chunks
        )
    workspace = cudnn_calls.read_workspace_bytes(program.as_text() or "")
    formula = cudnn_memory.workspace_bytes(work, split)
    return Result(
        status=report.OK,
        head_chunks=split.head_chunks,
        workspace_gib=None if workspace is None else workspace / GIB,
        formula_gib=formula / GIB,
        ratio=None if workspace is None else workspace / formula,
        temp_gib=program.memory_analysis().temp_size_in_bytes / GIB,
        compile_s=time.monotonic() - began,
    )


def compile_case(
    case: Case, device: Any, *, split: CallSplit, copies_segments: bool = False
) -> jax.stages.Compiled:
    """Compiles the attention of a case, forward and backward, for a device."""
    settings = KernelSettings(**split._asdict(), copies_segments=copies_segments)
    attend = attention.make_attend(kernel="cudnn", settings=settings)

    def gradients(q: Any, k: Any, v: Any, dout: Any, starts: Any, lengths: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, starts, lengths), q, k, v)
        return out, pull(dout)

    here = jax.sharding.SingleDeviceSharding(device)
    num_heads = (case.num_heads, case.num_kv_heads)
    shapes = [(1, case.row_tokens, heads, case.head_dim) for heads in num_heads]
    q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=here) for shape in shapes)
    segments = jax.ShapeDtypeStruct((1, case.max_segments), jnp.int32, sharding=here)
    options = CompileOptions(options={}, description="")
    if case.deterministic:
        flags = compile_options.DETERMINISTIC | compile_options.NO_TRITON
        options = CompileOptions(options=flags, description="", is_deterministic=True)
    lowered = jax.jit(gradients).lower(q, k, k, q, segments, segments)
    return compile_options.compile_lowered(lowered, options)


def format_case(case: Case, result: Result) -> str:
    """Formats a case as a line of text."""
    kind = f"up to {case.max_segments} documents" if case.max_segments > 1 else "one document"
    kind += ", deterministic" if case.deterministic else ""
    heads = f"{case.num_heads}/{case.num_kv_heads} heads of {case.head_dim}"
    text = f"{case.row_tokens:>7,} tokens, {heads}, {kind}"
    if result.status != report.OK:
        return ": ".join(filter(None, [text, result.status, result.message]))
    chunks = f" in {result.head_chunks} head chunks" if result.head_chunks != 1 else ""
    figures = (result.workspace_gib, result.formula_gib, result.ratio)
    workspace, formula, ratio = (report.format_number(figure, "{:.3f}") for figure in figures)
    return f"{text}{chunks}: workspace {workspace} GiB, formula {formula} GiB, ratio {ratio}"


def summarize(cases: Sequence[dict[str, Any]]) -> str:
    """Summarizes all cases in one line, deterministic ones separately."""
    words = []
    for kind in (False, True):
        of_kind = [case["ratio"] for case in cases if case["deterministic"] is kind]
        ratios = [ratio for ratio in of_kind if ratio is not None]
        if ratios:
            name = "deterministic" if kind else "cuDNN's workspace over the formula"
            words.append(f"{name} {min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} cases")
    num_unknown = sum(case["ratio"] is None for case in cases)
    if num_unknown:
        words.append(f"{num_unknown} without a size")
    return ", ".join(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
