"""Times the training step of Hugging Face Transformers on PyTorch and jaxsp's, case by case.

    python -m scripts.bench.peer_transformers --out scripts/bench/results/today-peer.json
    python -m scripts.bench.peer_transformers --shapes llama3.2-1b --lengths 8192 --until-it-fails

scripts/bench/cases.py describes the cases, and scripts/bench/step.py runs jaxsp's side. The peer
gets the same tokens, AdamW, learning rates and clipping. As in its Trainer with `bf16`, weights and
moments are float32, and autocast computes in bfloat16 (arrays between layers are float32), unless
`--compute-dtype float32` is given. Each layer is recomputed in the backward pass, unless
`--remat none` is given. The loss is that of the model class, which makes float32 logits of the
whole row. AdamW is the fused one; nothing is compiled.

Attention is FlashAttention if its package is installed, otherwise PyTorch's scaled dot product
(sdpa). Packed documents are kept apart: FlashAttention gets their starts. For sdpa, transformers
makes a mask from positions that restart with each document, with a byte for each pair of tokens
(1 GiB for 32,768 tokens); PyTorch's flash kernels do not accept such a mask.

The sides run one after the other, each case in processes of its own. Peaks are those of the
allocators since the start of the process (JAX: bytes in use; PyTorch: bytes allocated). Memory of
the GPU's context and libraries is in neither.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxsp.config.optimizer_schema import OptimizerConfig
from jaxsp.runtime import jax_platform
from scripts.bench import cases, isolation, machine, report, results, step, timing
from scripts.bench.cases import Case
from scripts.bench.timing import TimedResult

MODULE = "scripts.bench.peer_transformers"

DEVICES_OPTION = "--devices"
"""First argument of the process that prints the devices of both sides."""

FLASH = {"flash_attention_3": "flash-attn-3", "flash_attention_2": "flash-attn"}
"""FlashAttention in transformers, and its packages."""

EXHAUSTED = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Parts of PyTorch's messages when memory of the GPU or of the host runs out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result(TimedResult):
    """Result of a case with transformers."""

    attention: str | None = None
    """attn_implementation."""
    reserved_gib: float | None = None
    """Peak memory that PyTorch's allocator held, used or not."""
    torch: str | None = None
    """Version of torch, which contains that of CUDA."""
    torch_device: str | None = None


def main(arguments: list[str]) -> int:
    """Runs the command.

    Returns: 1 if a case failed or took too long on a side, 2 if the sides cannot be compared.
    """
    parser = cases.make_parser(MODULE, __doc__)
    choices = ("auto", *FLASH, "sdpa", "flex_attention")
    parser.add_argument(
        "--attention", choices=choices, default="auto", help="attn_implementation of transformers"
    )
    args = parser.parse_args(arguments)
    problem = find_problem()
    if problem is not None:
        print(problem, file=sys.stderr)
        return 2
    contents = results.open_gpu_results(MODULE, arguments, commit=args.commit)
    contents |= {name: machine.find_version(name) for name in ("transformers", *FLASH.values())}
    contents |= {"torch": None, "torch_device": None}
    print(report.PAIR_HEADER, flush=True)
    run = lambda case, sides: run_case(case, sides, contents, args)
    for record in timing.run_cases(args, contents, run, sides=report.SIDES):
        longest = report.find_longest(contents["cases"])
        contents["longest"] = [dataclasses.asdict(rows) for rows in longest]
        print(report.format_pair(record), flush=True)
    for rows in report.find_longest(contents["cases"]):
        print(report.format_longest(rows))
    statuses = {
        report.get_side(case, side)["status"] for case in contents["cases"] for side in report.SIDES
    }
    return int(not statuses.isdisjoint(report.FAILURES))


def run_case(
    case: Case, sides: Sequence[str], contents: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """Runs a case on these sides and returns its record.

    Adds the devices and versions to `contents`.
    """
    ours = step.Result(status=report.NOT_RUN)
    peer = Result(status=report.NOT_RUN)
    if "jaxsp" in sides:
        ours = step.run_case(case, seconds=args.case_seconds)
    if "transformers" in sides:
        peer = run_peer(case, attention=args.attention, seconds=args.case_seconds)
    for name in ("device", "runtime"):
        contents[name] = contents[name] or getattr(ours, name)
    for name in ("torch", "torch_device"):
        contents[name] = contents[name] or getattr(peer, name)
    return make_record(case, ours, peer)


def run_peer(case: Case, *, attention: str, seconds: float) -> Result:
    """Times the peer's side of a case in a process of its own."""
    case = dataclasses.replace(case, kernel=attention)
    return timing.run_isolated(MODULE, case, Result, seconds=seconds)


def make_record(case: Case, ours: step.Result, peer: Result) -> dict[str, Any]:
    """The record of a case: as in step.py, with the peer's result and ratios to it."""
    fields = dataclasses.asdict(peer)
    del fields["torch"], fields["torch_device"]  # of the whole file
    return {
        **timing.make_record(case, ours),
        "transformers": fields,
        "speed_ratio": report.divide(ours.tokens_per_s, peer.tokens_per_s),
        "memory_ratio": report.divide(ours.peak_gib, peer.peak_gib),
    }


def find_problem() -> str | None:
    """Returns the reason that the sides cannot be compared here; None if they can."""
    if importlib.util.find_spec("torch") is None:
        return "Python has no torch, which transformers needs. Install it: pip install torch."
    # in another process: one that asks JAX for its devices takes the GPU's memory
    words = [MODULE, DEVICES_OPTION]
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=machine.REPO, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.splitlines() or ["no output"])[-1]
        return f"JAX or PyTorch found no device: {last}. Run python -m {' '.join(words)} for more."
    return compare_devices(**json.loads(done.stdout.splitlines()[-1]))


def compare_devices(jaxsp: str, transformers: str) -> str | None:
    """Returns a suggestion if only one side has a GPU."""
    if (jaxsp == "cpu") == (transformers == "cpu"):
        return None
    use_gpu = "Install torch for CUDA"
    if jaxsp == "cpu":
        use_gpu = "Use JAX_PLATFORMS=cuda and jax[cuda13]"
    return (
        f"JAX uses {jaxsp} and PyTorch uses {transformers}, so ratios between them would mean "
        f"nothing. {use_gpu}, or use the CPU for both."
    )


def find_devices() -> dict[str, str]:
    """Names of the devices of both sides, in a process that ends afterwards."""
    import jax
    import torch

    jax_platform.choose_platform(virtual_cpu_devices=None)
    peer = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"jaxsp": jax.devices()[0].device_kind, "transformers": peer}


def measure(case: Case, folder: pathlib.Path) -> Result:
    """Times the peer's steps of a case in this process.

    Args: case: its kernel is the attention to use. folder: not needed.
    """
    import torch

    has_gpu = torch.cuda.is_available()
    attention = choose_attention() if case.kernel == "auto" else case.kernel
    name = torch.cuda.get_device_name() if has_gpu else "cpu"
    about = {"attention": attention, "torch": str(torch.__version__), "torch_device": name}
    device = torch.device("cuda" if has_gpu else "cpu")
    seconds = []
    try:
        take_step = make_step(case, attention=attention, device=device)
        for _ in range(cases.WARM_UP_STEPS + case.steps):
            began = time.perf_counter()
            loss = take_step()
            if has_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    except RuntimeError as error:  # torch.OutOfMemoryError is a RuntimeError
        if not any(words in str(error) for words in EXHAUSTED):
            raise
        message = str(error).splitlines()[0]
        return Result(status=report.OUT_OF_MEMORY, message=message, **about)
    return Result(
        status=report.OK,
        **about,
        **timing.make_figures(case, seconds, loss.item(), name),
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if has_gpu else None,
        reserved_gib=torch.cuda.max_memory_reserved() / 2**30 if has_gpu else None,
    )


def choose_attention() -> str:
    """The fastest installed one: FlashAttention-3 (on Hopper), FlashAttention-2, or sdpa."""
    import torch
    from transformers import utils

    if utils.is_flash_attn_3_available() and torch.cuda.get_device_capability()[0] == 9:
        return "flash_attention_3"
    return "flash_attention_2" if utils.is_flash_attn_2_available() else "sdpa"


def make_step(case: Case, *, attention: str, device: Any) -> Callable[[], Any]:
    """A function that trains one step on the case's row and returns the loss.

    The weights are random at first.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    model = make_model(cases.SHAPES[case.shape], attention=attention, device=device)
    if case.remat != "none":
        recompute_layers(model)
    has_autocast = case.compute_dtype != "float32"
    row = make_inputs(cases.make_documents(case), attention=attention, device=device)
    config = OptimizerConfig(**cases.OPTIMIZER)
    assert (config.name, config.schedule) == ("adamw", "cosine")
    assert config.weight_decay == 0, "AdamW of torch would decay norms too"
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=(config.get_option("beta1"), config.get_option("beta2")),
        eps=config.get_option("eps"),
        weight_decay=config.weight_decay,
        fused=True,
    )
    schedule = transformers.get_cosine_schedule_with_warmup(
        optimizer, config.warmup_steps, cases.WARM_UP_STEPS + case.steps
    )

    def take_step() -> Any:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=has_autocast):
            loss = model(**row).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    return take_step


def make_model(fields: dict[str, Any], *, attention: str, device: Any) -> Any:
    """A model with random float32 weights."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**fields)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32
        )
    return model.train()


def recompute_layers(model: Any) -> None:
    """Recomputes each layer in the backward pass."""
    # newer versions of transformers warn about the second name, older ones have only that
    enable_checkpointing = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable_checkpointing({"use_reentrant": False})


def make_inputs(documents: list[np.ndarray], *, attention: str, device: Any) -> dict[str, Any]:
    """Arguments of the model: documents in one row, as made by transformers' own collator.

    Positions restart with each document, and no document's first token is a label. FlashAttention
    gets the starts of the documents, which it would otherwise search in every layer. With an
    attention_mask or a cache, transformers would ignore the positions, and documents would attend
    to each other.
    """
    import transformers

    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=attention in FLASH)
    row = collate([{"input_ids": document.tolist()} for document in documents])
    inputs: dict[str, Any] = {"use_cache": False}
    for name, value in row.items():
        inputs[name] = value.to(device) if hasattr(value, "to") else value
    return inputs


if __name__ == "__main__":
    # long rows fail without this, because free memory is fragmented
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if sys.argv[1:2] == [DEVICES_OPTION]:
        print(json.dumps(find_devices()))
    else:
        isolation.start(main, Case, measure)
