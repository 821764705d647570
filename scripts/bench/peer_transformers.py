"""Times the training step of Hugging Face Transformers on PyTorch beside jaxsp's, case by case in the same run.

    python -m scripts.bench.peer_transformers --out scripts/bench/results/today-peer.json
    python -m scripts.bench.peer_transformers --shapes llama3.2-1b --lengths 8192 --documents one --until-it-fails

The cases, and jaxsp's side of them, are those of scripts/bench/step.py. The peer gets the same tokens, and the same AdamW,
learning rates and clipping. As its Trainer does with `bf16`, it keeps weights and averages in float32 and computes under
autocast to bfloat16 (what goes from layer to layer is float32 there); each layer is computed again in the backward pass. Its
loss is the one that it comes with, which makes float32 logits of the whole row. AdamW is the fused one; nothing is compiled.

Attention is flash attention where its package is installed, else PyTorch's scaled dot product (sdpa). Packed documents are kept
apart: flash attention is told where they begin, and for sdpa transformers makes a mask of a byte for each pair of tokens of the
row (1 GiB for 32,768), from positions that begin anew with each document; PyTorch's flash kernels take no such mask.

Both sides run one after the other, each case in processes of its own. Peaks are what the allocators say (bytes in use of JAX's,
bytes allocated of PyTorch's), from the process's begin: what the GPU's context and libraries take beside them is in neither.
"""

import argparse
import collections
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxsp.config.schema import OptimizerConfig
from jaxsp.model import flops
from jaxsp.runtime import jax_platform
from scripts.bench import machine, report, step

MODULE = "scripts.bench.peer_transformers"

DEVICES = "--devices"
"""Word for the process that asks both sides for their device."""

FLASH = {"flash_attention_3": "flash-attn-3", "flash_attention_2": "flash-attn"}
"""What transformers calls them, and the packages they are in."""

EXHAUSTED = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""How PyTorch says that memory of the GPU, or of the host, ran out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a case on transformers' side; numbers are null where it did not get so far, and memory on a CPU."""

    status: str
    """A word of report.py."""
    message: str | None = None
    """The first line of what went wrong."""
    attention: str | None = None
    """The attn_implementation that was used."""
    step_s: float | None = None
    """Median."""
    slowest_step_s: float | None = None
    tokens_per_s: float | None = None
    tflops_per_device: float | None = None
    """With the arithmetic counted as for jaxsp: causal, per document, without recomputation."""
    mfu: float | None = None
    peak_gib: float | None = None
    reserved_gib: float | None = None
    """The most that PyTorch's allocator took of the device, with what it kept unused."""
    loss: float | None = None
    """Of the last step."""
    loss_finite: bool | None = None
    torch: str | None = None
    """Its version, which names CUDA's."""
    torch_device: str | None = None
    wall_s: float | None = None
    """Time of the case's process, from its start to its end."""


def main(arguments: list[str]) -> int:
    """The command; 1 if a case failed or took too long on either side, 2 where the two cannot be compared."""
    parser = step.options(MODULE, __doc__)
    choices = ("auto", *FLASH, "sdpa", "flex_attention")
    parser.add_argument(
        "--attention", choices=choices, default="auto", help="attn_implementation of transformers"
    )
    given = parser.parse_args(arguments)
    problem = missing()
    if problem is not None:
        print(problem, file=sys.stderr)
        return 2
    installed = {one.name.lower(): one.version for one in importlib.metadata.distributions()}
    versions = {name: installed.get(name) for name in ("transformers", *FLASH.values())}
    found = (
        versions
        | {"torch": None, "torch_device": None}
        | step.opened(MODULE, arguments, given.commit)
    )
    earlier = step.resumed(given.resume, found)
    print(report.BOTH, flush=True)
    began = time.monotonic()
    cases = collections.deque((case, report.SIDES) for case in step.asked(given))
    while cases:
        case, sides = cases.popleft()
        came = step.finished(case, earlier)
        if came is None:
            in_time = time.monotonic() - began < given.seconds
            came = compared(case, sides if in_time else (), found, given)
        found["cases"].append(came)
        found["longest"] = [dataclasses.asdict(one) for one in report.longest(found["cases"])]
        print(report.both(came), flush=True)
        step.write(given.out, found)
        able = tuple(side for side in report.SIDES if report.of(came, side)["status"] == report.OK)
        if given.until_it_fails and case.row_tokens >= max(given.lengths) and able:
            cases.append((dataclasses.replace(case, row_tokens=2 * case.row_tokens), able))
    print("\n".join(report.words(one) for one in report.longest(found["cases"])))
    ends = {report.of(case, side)["status"] for case in found["cases"] for side in report.SIDES}
    return int(bool(ends & {report.FAILED, report.TIMED_OUT}))


def compared(
    case: step.Case, sides: Sequence[str], found: dict[str, Any], given: argparse.Namespace
) -> dict[str, Any]:
    """Runs a case on these sides and returns its record; `found` gets the devices and versions."""
    ours, peers = step.Result(status=report.NOT_RUN), Result(status=report.NOT_RUN)
    if "jaxsp" in sides:
        ours = step.apart(case, seconds=given.case_seconds)
    if "transformers" in sides:
        same = dataclasses.replace(case, kernel=given.attention)
        peers = step.apart(same, seconds=given.case_seconds, module=MODULE, kind=Result)
    for name, result in (
        ("device", ours),
        ("runtime", ours),
        ("torch", peers),
        ("torch_device", peers),
    ):
        found[name] = found[name] or getattr(result, name)
    return record(case, ours, peers)


def missing() -> str | None:
    """Why the two cannot be compared here; None if they can."""
    if importlib.util.find_spec("torch") is None:
        return (
            "Python has no torch, which transformers computes with. Install it: pip install torch."
        )
    command = [sys.executable, "-m", MODULE, DEVICES]
    done = subprocess.run(command, cwd=machine.REPO, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.splitlines() or ["without a word"])[-1]
        return f"JAX or PyTorch does not tell its device: {last}. Look at what python -m {MODULE} {DEVICES} prints."
    return differing(**json.loads(done.stdout.splitlines()[-1]))


def differing(ours: str, peers: str) -> str | None:
    """What to do where one side has a GPU and the other has none; None where they have the same."""
    if (ours == "cpu") == (peers == "cpu"):
        return None
    way_out = (
        "Use JAX_PLATFORMS=cuda and jax[cuda13]" if ours == "cpu" else "Install torch for CUDA"
    )
    return f"JAX uses {ours} and PyTorch {peers}: ratios between them would mean nothing. {way_out}, or the CPU for both."


def record(case: step.Case, ours: step.Result, peers: Result) -> dict[str, Any]:
    """A case of the file: as in step.py's, and beside it what came of the peer, and jaxsp's numbers over the peer's."""
    found = dataclasses.asdict(peers)
    del found["torch"], found["torch_device"]
    ratios = {
        "speed_ratio": report.ratio(ours.tokens_per_s, peers.tokens_per_s),
        "memory_ratio": report.ratio(ours.peak_gib, peers.peak_gib),
    }
    return {**step.record(case, ours), "transformers": found, **ratios}


# What the peer's own processes do


def devices() -> dict[str, str]:
    """What each side would run on. Not in the process of the benchmark: whoever asks JAX holds the GPU's memory."""
    import jax
    import torch

    jax_platform.choose_platform(virtual_cpu_devices=None)
    peers = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"ours": jax.devices()[0].device_kind, "peers": peers}


def measure(case: step.Case, folder: pathlib.Path) -> Result:
    """Times the peer's steps of a case, whose `kernel` is the attention that is asked for; `folder` is not needed."""
    import torch

    gpu = torch.cuda.is_available()
    attention = best_attention() if case.kernel == "auto" else case.kernel
    name = torch.cuda.get_device_name() if gpu else "cpu"
    found = Result(
        status=report.OK, attention=attention, torch=str(torch.__version__), torch_device=name
    )
    seconds = []
    try:
        take_step = prepared(
            case, attention=attention, device=torch.device("cuda" if gpu else "cpu")
        )
        for _ in range(step.WARM_UP_STEPS + case.steps):
            began = time.perf_counter()
            loss = take_step()
            if gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not any(words in str(error) for words in EXHAUSTED):
            raise
        return dataclasses.replace(
            found, status=report.OUT_OF_MEMORY, message=str(error).splitlines()[0]
        )
    timed = seconds[step.WARM_UP_STEPS :]
    last = loss.item()
    step_s = statistics.median(timed)
    tflops = step.case_flops(case) / step_s / 1e12
    peak = flops.peak_tflops(name)
    return dataclasses.replace(
        found,
        step_s=step_s,
        slowest_step_s=max(timed),
        tokens_per_s=case.row_tokens / step_s,
        tflops_per_device=tflops,
        mfu=None if peak is None else tflops / peak,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if gpu else None,
        reserved_gib=torch.cuda.max_memory_reserved() / 2**30 if gpu else None,
        loss=last if np.isfinite(last) else None,
        loss_finite=bool(np.isfinite(last)),
    )


def best_attention() -> str:
    """The fastest that is installed: flash attention 3 (on Hopper), flash attention 2, or sdpa."""
    import torch
    from transformers import utils

    if utils.is_flash_attn_3_available() and torch.cuda.get_device_capability()[0] == 9:
        return "flash_attention_3"
    return "flash_attention_2" if utils.is_flash_attn_2_available() else "sdpa"


def prepared(case: step.Case, *, attention: str, device: Any) -> Callable[[], Any]:
    """A function that takes a training step on the case's row, from random weights, and returns its loss."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = random_model(step.SHAPES[case.shape], attention=attention, device=device)
    row = inputs(step.random_documents(case), attention=attention, device=device)
    how = OptimizerConfig(**step.OPTIMIZER)
    assert (how.name, how.schedule, how.weight_decay) == ("adamw", "cosine", 0), (
        "with decay, norms would decay too"
    )
    betas = (how.beta1, how.beta2)
    optimizer = torch.optim.AdamW(
        model.parameters(), how.learning_rate, betas, how.eps, how.weight_decay, fused=True
    )
    num_steps = step.WARM_UP_STEPS + case.steps
    rates = transformers.get_cosine_schedule_with_warmup(optimizer, how.warmup_steps, num_steps)

    def take_step() -> Any:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(**row).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), how.max_grad_norm)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        return loss.detach()

    return take_step


def random_model(fields: dict[str, Any], *, attention: str, device: Any) -> Any:
    """A model with random float32 weights that computes each layer again in the backward pass."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**fields)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32
        )
    # the second is its older name, of which newer versions warn
    checkpoint = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    checkpoint({"use_reentrant": False})
    return model.train()


def inputs(documents: list[np.ndarray], *, attention: str, device: Any) -> dict[str, Any]:
    """What the model is called with: documents in a row, as transformers' own collator puts them there.

    Positions begin anew with each document, no document's first token is a label, and flash attention gets the documents'
    starts, which it would look for in every layer. With an attention_mask, or a cache, transformers would not look at the
    positions, and documents would see each other.
    """
    import transformers

    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=attention in FLASH)
    row = collate([{"input_ids": document.tolist()} for document in documents])
    return {
        name: value.to(device) if hasattr(value, "to") else value for name, value in row.items()
    } | {"use_cache": False}


if __name__ == "__main__":
    if sys.argv[1:2] == [step.ALONE]:
        # so that long rows do not fail for holes between blocks of memory
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        step.alone(*sys.argv[2:], measure=measure)
    elif sys.argv[1:2] == [DEVICES]:
        print(json.dumps(devices()))
    else:
        sys.exit(main(sys.argv[1:]))
