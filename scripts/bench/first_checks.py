"""Checks an assumption that no CPU test covers, on the GPUs of this node.

    python -m scripts.bench.first_checks checkpoint
    python -m scripts.bench.first_checks profile --out scripts/bench/results/today-profile.json

Prints each number when it is measured, beside the range that jaxsp assumes. A process runs one
check, and sets the limits of its memory before JAX finds its devices.
"""

import concurrent.futures
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import datasets
import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from jaxsp.attention.attend import make_attend
from jaxsp.attention.kernels import cudnn_calls, cudnn_limits
from jaxsp.attention.kernels.cudnn_limits import CallSplit
from jaxsp.attention.kernels.kernel import AttentionWorkload, KernelSettings
from jaxsp.checkpoint import reader, run_paths, writer
from jaxsp.core.units import GIB
from jaxsp.planning import estimate
from jaxsp.run import benchmark, preflight
from jaxsp.sharding import host_offload
from jaxsp.system import device_memory, hardware
from jaxsp.training import compile_options
from jaxsp.training.compile_options import CompileOptions
from scripts.bench import cases, kernel_trace, machine, results
from scripts.bench.cases import Case

MODULE = "scripts.bench.first_checks"

LONGEST_POOL_GIB = 206
"""Pool of each process for the longest rows of 8B on eight H100s."""

NUM_STEPS = 5
"""Timed steps of a run."""

PIN_SECONDS = 140
"""Time limit for a process that pins memory."""

_POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


class Number(NamedTuple):
    """A measured number, and the range that is assumed."""

    name: str
    value: float
    unit: str
    low: float
    high: float

    @property
    def is_in_range(self) -> bool:
        return self.low <= self.value <= self.high

    def describe(self) -> str:
        verdict = "" if self.is_in_range else " <- NOT AS ASSUMED"
        unit = f" {self.unit}" if self.unit else ""
        return (
            f"{self.name}: {self.value:.4g}{unit} (assumed: {self.low:.4g} to {self.high:.4g})"
            f"{verdict}"
        )


def count_gpus() -> int:
    """Number of GPUs of this node."""
    return hardware.count_gpus(os.environ)


def measure_checkpoint(folder: pathlib.Path, *, mib: int = 512) -> list[Number]:
    """Saves arrays on the device and in host memory, overwrites them at once, and restores them.

    The arrays on the device are four times the pool for offloaded arrays.
    """
    os.environ.update({_POOL_VARIABLE: "1", "XLA_CLIENT_MEM_FRACTION": "0.5"})
    device = jax.devices()[0]
    kinds = {"device": 8, device_memory.MEMORY_KIND: 1}
    if jax.__version_info__ < host_offload.MIN_RELEASE and device.platform == "cpu":
        del kinds[device_memory.MEMORY_KIND]
    num_rows = mib * 2**20 // (4 * 1024)
    state = {}
    for kind, count in kinds.items():
        sharding = SingleDeviceSharding(device, memory_kind=kind)
        for index in range(count):
            values = np.arange(num_rows * 1024, dtype=np.float32).reshape(num_rows, 1024) + index
            state[f"{kind}-{index}"] = jax.device_put(values, sharding)
    expected = {name: np.array(array) for name, array in state.items()}
    shardings = {name: array.sharding for name, array in state.items()}

    def update(arrays: Any) -> Any:
        def add(x: Any) -> Any:
            is_on_host = device_memory.is_on_host(x)
            x = device_memory.to_device(x) + 1
            return device_memory.to_host(x) if is_on_host else x

        return jax.tree.map(add, arrays)

    step = jax.jit(update, donate_argnums=0, out_shardings=shardings).lower(state).compile()
    handler = writer.make_handler(has_separate_folders=False)
    began = time.perf_counter()
    commits = writer.start_writes(handler, folder, {run_paths.MASTER: state})
    copy_s = time.perf_counter() - began
    jax.block_until_ready(step(state))  # as the next training step does
    writer.wait_for_commits(commits)
    handler.finalize(folder / run_paths.MASTER)
    handler.close()
    restore_args = {
        name: ocp.ArrayRestoreArgs(sharding=place, global_shape=(num_rows, 1024), dtype=np.float32)
        for name, place in shardings.items()
    }
    args = ocp.args.PyTreeRestore(item=expected, restore_args=restore_args)
    restored = reader._read_item(folder, run_paths.MASTER, args)
    num_wrong = sum(int((np.asarray(restored[name]) != expected[name]).sum()) for name in expected)
    num_gib = len(expected) * mib / 1024
    return [
        Number("elements that differ after a save, a step and a restore", num_wrong, "", 0, 0),
        Number("time of the copy", copy_s / num_gib, "s per GiB", 0, 1),
    ]


_WORKSPACES = ((32, 8, 1), (32, 8, 64), (8, 8, 64))
"""Query heads, K/V heads and slots for documents. The formula is exact without shared K/V heads."""


def measure_workspace(folder: pathlib.Path) -> Iterator[Number]:
    """Compiles attention and compares cuDNN's workspace with `cudnn_limits.workspace_bytes`."""
    device = jax.devices()[0]
    for num_heads, num_kv_heads, max_segments in _WORKSPACES:
        work = make_workload(num_heads, num_kv_heads, max_segments)
        work = cudnn_limits.adapt_to_devices(work, [device])
        split = cudnn_limits.choose_split(work)
        program = compile_attention(work, split, device).as_text() or ""
        workspace = cudnn_calls.read_workspace_bytes(program)
        if workspace is not None:
            ratio = workspace / cudnn_limits.workspace_bytes(work, split)
            kind = f"{num_heads}/{num_kv_heads} heads, up to {max_segments} documents"
            yield Number(f"workspace over formula, {kind}", ratio, "", 0.9, 1.03)


def make_workload(
    num_heads: int, num_kv_heads: int, max_segments: int, *, row_tokens: int = 32768
) -> AttentionWorkload:
    """Attention over one row in bfloat16."""
    return AttentionWorkload(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        row_tokens=row_tokens,
        num_rows=1,
        max_segments=max_segments,
        window=None,
        dtype="bfloat16",
    )


def compile_attention(
    work: AttentionWorkload, split: CallSplit, device: Any
) -> jax.stages.Compiled:
    """Compiles cuDNN's attention, forward and backward, for a device."""
    settings = KernelSettings(**split._asdict(), copies_segments=work.copies_segments)
    attend = make_attend(kernel="cudnn", settings=settings)

    def gradients(q: Any, k: Any, v: Any, dout: Any, starts: Any, lengths: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, starts, lengths), q, k, v)
        return out, pull(dout)

    place = SingleDeviceSharding(device)
    q, k = (
        jax.ShapeDtypeStruct((1, work.row_tokens, heads, work.head_dim), work.dtype, sharding=place)
        for heads in (work.num_heads, work.num_kv_heads)
    )
    segments = jax.ShapeDtypeStruct((1, work.max_segments), np.int32, sharding=place)
    lowered = jax.jit(gradients).lower(q, k, k, q, segments, segments)
    return compile_options.compile_lowered(lowered, CompileOptions(options={}, description=""))


def measure_outside(folder: pathlib.Path) -> list[Number]:
    """Memory of a GPU outside of JAX's part after all-to-alls and all-reduces among all GPUs."""
    os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.8"
    devices = jax.local_devices()
    mesh = Mesh(np.array(devices), ("devices",))
    shape = (len(devices) * len(devices), 2**20)
    x = jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, jax.P("devices")))

    def exchange(x: Any) -> Any:
        x = jax.lax.all_to_all(x, "devices", 0, 0, tiled=True)
        return jax.lax.psum(x, "devices")

    specs = {"in_specs": jax.P("devices"), "out_specs": jax.P()}
    jax.block_until_ready(jax.jit(jax.shard_map(exchange, mesh=mesh, **specs, check_vma=False))(x))
    pool = devices[0].memory_stats()["bytes_limit"]
    outside = _read_used_bytes() - pool
    expected = estimate.CUDA_BYTES
    if len(devices) > 1:
        peers = min(len(devices), hardware.DEVICES_PER_NODE) - 1
        expected += estimate.COMMUNICATOR_BYTES
        expected += estimate.ALL_TO_ALL_BYTES * peers / (hardware.DEVICES_PER_NODE - 1)
    name = f"memory outside of JAX's part, {len(devices)} GPUs"
    return [Number(name, outside / GIB, "GiB", 0.2 * expected / GIB, expected / GIB)]


def _read_used_bytes() -> int:
    """Memory in use on the fullest GPU, by the driver."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return 2**20 * max(map(int, text.split()))


_PIN = """
import sys, time, jax
from jaxsp.sharding import host_offload
device = jax.devices()[0]
began = time.perf_counter()
host_offload.reserve_pool([device], int(sys.argv[1]))
print(time.perf_counter() - began)
"""


def measure_pinning(folder: pathlib.Path) -> Iterator[Number]:
    """Pins host memory in one process, then the same amount in each of several."""
    num_processes = max(2, count_gpus())
    usable = hardware.host_bytes_per_device(num_processes=num_processes, num_devices=1)
    gib = max(1, min(32, int(usable / GIB / 2)))
    for count in (1, num_processes):
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            seconds = list(pool.map(lambda index: _pin(index, gib), range(count)))
        each = max(seconds) / gib
        name = f"pinning {gib} GiB in each of {count} processes"
        yield Number(name, each, "s per GiB", 0.05, 0.6)
    name = f"the longest row's pools of {LONGEST_POOL_GIB} GiB, extrapolated"
    yield Number(name, each * LONGEST_POOL_GIB, "s", 10, 600)


def _pin(index: int, gib: int) -> float:
    """Seconds to pin this amount in a new process."""
    environ = os.environ | {
        "CUDA_VISIBLE_DEVICES": str(index % count_gpus()),
        "XLA_CLIENT_MEM_FRACTION": "0.1",
        _POOL_VARIABLE: str(gib + 1),
    }
    # A check that takes too long is killed, but not what it has started
    limit = ["timeout", "--signal=KILL", f"{PIN_SECONDS}"]
    command = [*limit, sys.executable, "-c", _PIN, str(gib * 2**30)]
    done = subprocess.run(
        command, env=environ, cwd=machine.REPO, capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def measure_offload(folder: pathlib.Path) -> Iterator[Number]:
    """Errors of losses of steps on all GPUs with offloaded activations, in float32."""
    settings = {"model": {"compute_dtype": "float32"}, "memory": {"remat": "save_attention"}}
    expected = np.array(_run_steps(folder / "none", settings).losses)
    for activations in ("layer_inputs", "layer_inputs_and_attention"):
        settings["memory"]["offload_activations"] = activations
        for is_prefetched in (False, True):
            options = dict.fromkeys(compile_options.PREFETCH_FROM_HOST, is_prefetched)
            kind = "prefetched" if is_prefetched else "not prefetched"
            name = f"{activations}, {kind}"
            losses = _run_steps(folder / name, settings | {"run": {"xla_options": options}}).losses
            error = float(np.max(np.abs(losses / expected - 1)))
            yield Number(f"error of losses, {name}", error, "", 0, 1e-4)


def measure_profile(folder: pathlib.Path) -> list[Number]:
    """Profiles steps of 8,192 tokens per GPU, compiled before."""
    _run_steps(folder / "before")
    with jax.profiler.trace(str(folder / "trace")):
        result = _run_steps(folder / "profiled")
    kernels = kernel_trace.read_kernels(folder / "trace")
    last = kernel_trace.last_kernels(kernels, result.step_s)
    numbers = [
        Number("part of a step without a kernel", kernel_trace.idle_fraction(last), "", 0, 0.05)
    ]
    slowdown = kernel_trace.collective_slowdown(last)
    if slowdown is not None:
        name = "matrix products beside NCCL, over those without"
        numbers.append(Number(name, slowdown, "", 1, 1.1))
    if result.step_s_estimate is not None:
        ratio = result.step_s / result.step_s_estimate
        numbers.append(Number("step over its estimate", ratio, "", 1, 1.3))
    return numbers


def _run_steps(
    folder: pathlib.Path, settings: Mapping[str, Mapping[str, Any]] = types.MappingProxyType({})
) -> benchmark.BenchmarkResult:
    """Times steps of 4 layers of Llama-3.1-8B, with a row of 8,192 tokens for each GPU.

    Args: settings: fields to change, by their section of the config.
    """
    folder.mkdir(parents=True)
    case = Case(
        shape="llama8b-4layers", row_tokens=8192, documents="one", kernel="auto", steps=NUM_STEPS
    )
    source = folder / "documents.jsonl"
    cases.write_documents(case, source, num_rows=(1 + NUM_STEPS) * count_gpus())
    config = cases.make_config(case, source=source, directory=folder / "run")
    sections = {
        name: getattr(config, name).model_copy(update=fields)
        for name, fields in {"batch": {"rows_per_step": count_gpus()}, **settings}.items()
    }
    config = config.model_copy(update=sections)
    preflight.choose_platform(config)
    return benchmark.benchmark_steps(config, num_steps=NUM_STEPS)


CHECKS: dict[str, tuple[str, Callable[[pathlib.Path], Iterable[Number]]]] = {
    "checkpoint": ("a checkpoint while the pool for offloaded arrays is small", measure_checkpoint),
    "offload": ("steps with offloaded activations, prefetched and not", measure_offload),
    "outside": ("memory of CUDA and NCCL outside of JAX's part", measure_outside),
    "pinning": ("pinning host memory in one process, and in one per GPU", measure_pinning),
    "workspace": ("cuDNN's workspace over the formula", measure_workspace),
    "profile": ("a step: gaps, slowdown beside NCCL, error of the plan", measure_profile),
}
"""Topic and function of each check, most harmful first."""


def main(arguments: list[str]) -> int:
    """Runs the command. Returns: 1 for numbers out of range or none, 2 without a GPU."""
    parser = results.make_parser(MODULE, __doc__)
    topics = "; ".join(f"{name}: {topic}" for name, (topic, _) in CHECKS.items())
    parser.add_argument("check", choices=CHECKS, help=topics)
    results.add_limits(parser, case="check")
    args = parser.parse_args(arguments)
    # asking JAX for its devices would take the GPU's memory
    if not count_gpus():
        print("There is no NVIDIA GPU here. Use a machine with one.", file=sys.stderr)
        return 2
    versions = machine.read_gpu_versions()
    contents = results.open_results(MODULE, arguments, commit=args.commit, **versions)
    topic, measure = CHECKS[args.check]
    print(f"{args.check}: {topic}", flush=True)
    numbers: list[Number] = []
    with tempfile.TemporaryDirectory(prefix="jaxsp-check-") as folder:
        datasets.config.HF_DATASETS_CACHE = pathlib.Path(folder, "cache")
        for number in measure(pathlib.Path(folder)):
            print(f"  {number.describe()}", flush=True)
            numbers.append(number)
            contents["cases"].append(number._asdict())
            contents["summary"] = "; ".join(number.describe() for number in numbers)
            results.write(args.out, contents)
    return int(not numbers or not all(number.is_in_range for number in numbers))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
