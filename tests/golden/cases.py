"""Short runs whose numbers no rewrite may change: three steps each, of many kinds of models.

This file needs only the command line of jaxsp, so that it also runs other commits:

    PYTHONPATH=CHECKOUT python tests/golden/cases.py RESULTS.json [CASE ...]

Each case writes its losses, gradient norms and exported weights.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LLAMA = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 1111,
    "initializer_range": 0.1,
}
"""Matrices of 66,660 elements are sharded, with padding."""

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}

GEMMA = {**LLAMA, "sliding_window": 24, "query_pre_attn_scalar": 20}

DELTA_NET = {
    **LLAMA,
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}

RING = {"strategy": "ring", "ulysses_degree": 1}

OFFLOAD = {"remat": "full", "offload_activations": "layer_inputs", "offload_optimizer": "state"}

CASES: Mapping[str, Mapping[str, Any]] = {
    "dense": {"memory": {"remat": "none", "loss_tile_tokens": 16}},
    "two ropes, windows, all_gather": {
        "model": {
            **GEMMA,
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "sliding_window_pattern": 2,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        "attention": {"strategy": "all_gather"},
    },
    "q/k norm, ring": {"model": {**LLAMA, "model_type": "qwen3"}, "attention": RING},
    "window, ring, yarn": {
        "model": {**LLAMA, "model_type": "mistral", "sliding_window": 24},
        "model.rope": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "attention": RING,
    },
    "sinks, experts": {
        "model": {
            **{**LLAMA, "model_type": "gpt_oss", "intermediate_size": 40, "sliding_window": 24},
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
        },
        "attention": {"strategy": "ring", "ulysses_degree": 2},
    },
    "softcap": {
        "model": {
            **{**GEMMA, "model_type": "gemma2", "attn_logit_softcapping": 2.0},
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
        "memory": {"remat": "full", "mlp_tile_tokens": 16},
    },
    "delta net": {"model": DELTA_NET},
    "experts with router losses": {
        "model": {**LLAMA, **EXPERTS, "model_type": "qwen3_moe", "mlp_only_layers": [1]},
        "model.router_aux_loss_coef": 0.01,
        "model.router_z_loss_coef": 0.001,
    },
    "LoRA": {"adapter": {"type": "lora", "rank": 4, "dropout": 0.1}},
    "QLoRA": {"adapter": {"type": "lora", "rank": 4, "quantization": "nf4"}},
    "DoRA": {"adapter": {"type": "dora", "rank": 4}, "mesh": {"data": 8, "seq": 1}},
    "FP8": {
        "model": {**LLAMA, "hidden_size": 64, "head_dim": 16, "intermediate_size": 1040},
        "model.compute_dtype": "bfloat16",
        "model.linear_dtype": "float8",
    },
    "DPO": {"objective": {"type": "dpo", "sft_weight": 0.1}},
    "KTO": {"objective": {"type": "kto"}, "batch": {"rows_per_step": 16}},
    "offload": {"memory": OFFLOAD},
    "Ulysses x ring": {"attention": {"strategy": "ring", "ulysses_degree": 2}},
    "replicas, muon": {
        "mesh": {"replica": 2, "data": 2, "seq": 2},
        "batch": {"rows_per_step": 16},
        "optimizer": {"name": "muon"},
        "model.compute_dtype": "bfloat16",
    },
}
"""Changes of the config by case. `model` is its config.json."""

NEEDS_JAX = {"offload": (0, 11, 1)}
"""First release of JAX that can run a case."""


def list_cases() -> list[str]:
    """Names of the cases that the installed JAX can run."""
    import jax

    return [name for name in CASES if jax.__version_info__ >= NEEDS_JAX.get(name, (0,))]


def make_config(name: str, folder: pathlib.Path) -> dict[str, Any]:
    """The config of a case that reads and writes files in a folder."""
    changes = dict(CASES[name])
    objective = changes.get("objective", {"type": "sft"})
    record_format = {"sft": "tokens", "dpo": "preference", "kto": "unpaired"}[objective["type"]]
    model = {name[6:]: changes.pop(name) for name in [*changes] if name.startswith("model.")}
    return {
        "run": {"directory": str(folder / "run"), "steps": 3},
        "model": {
            "config": changes.pop("model", LLAMA),
            "tokenizer": "bytes",
            "compute_dtype": "float32",
            **model,
        },
        "mesh": {"virtual_cpu_devices": 8, **changes.pop("mesh", {"data": 2, "seq": 4})},
        "data": {
            "train": [{"source": f"{folder}/{record_format}.jsonl", "format": record_format}],
            "row_tokens": 192,
            "max_segments_per_row": 12,
        },
        "batch": {"rows_per_step": 8} | changes.pop("batch", {}),
        "optimizer": {"learning_rate": 0.01, "weight_decay": 0.1}
        | changes.pop("optimizer", {"name": "adamw"}),
        "logging": {"trackers": []},
        **changes,
    }


def write_records(folder: pathlib.Path) -> None:
    """Writes 96 documents of 2 to 190 tokens, and as many pairs and judged answers."""
    rng = random.Random(7)

    def text(least: int, most: int) -> str:
        return "".join(rng.choices("abcdefgh .", k=rng.randint(least, most)))

    lengths = [rng.choice([2, 5, 17, 64, 130, 190]) for _ in range(96)]
    records = {
        "tokens": [{"input_ids": rng.choices(range(256), k=length)} for length in lengths],
        "preference": [
            {"prompt": text(1, 60), "chosen": f" {text(2, 30)}!", "rejected": f" {text(2, 30)}?"}
            for _ in lengths
        ],
        "unpaired": [
            {"prompt": text(1, 60), "completion": f" {text(2, 90)}", "label": index % 3 > 0}
            for index, _ in enumerate(lengths)
        ],
    }
    for record_format, lines in records.items():
        path = folder / f"{record_format}.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")


def run_case(name: str, folder: pathlib.Path) -> dict[str, Any]:
    """Trains a case, and returns its numbers.

    Returns:
        loss, grad_norm: of each step.
        weights: Euclidean norm of each exported tensor.
        digest: of the bytes of all exported tensors.
    """
    import numpy as np
    import safetensors.numpy

    write_records(folder)
    config = folder / "config.yaml"
    config.write_text(json.dumps(make_config(name, folder)), encoding="utf-8")
    run_jaxsp("train", str(config))
    run_jaxsp("export", str(folder / "run"), str(folder / "hf"), *export_options(name))
    metrics = (folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    lines = [json.loads(line) for line in metrics]
    tensors = {
        path: tensor
        for file in sorted((folder / "hf").glob("*.safetensors"))
        for path, tensor in safetensors.numpy.load_file(file).items()
    }
    digest = hashlib.sha256()
    for path in sorted(tensors):
        digest.update(path.encode() + tensors[path].tobytes())
    return {
        "loss": [line["loss"] for line in lines],
        "grad_norm": [line["grad_norm"] for line in lines],
        "weights": {
            path: float(np.linalg.norm(tensor.astype(np.float64)))
            for path, tensor in sorted(tensors.items())
        },
        "digest": digest.hexdigest(),
    }


def export_options(name: str) -> list[str]:
    """Options that export all bits of a case's weights."""
    return [] if "adapter" in CASES[name] else ["--dtype", "float32"]


def run_jaxsp(*words: str) -> None:
    """Runs a command of jaxsp in this process. Raises: RuntimeError with its output if it fails."""
    from jaxsp.__main__ import main

    with tempfile.TemporaryFile("w+") as output, _redirected(output):
        arguments = sys.argv
        sys.argv = ["jaxsp", *words]
        try:
            main()
        except SystemExit as exit_:
            if exit_.code:
                output.seek(0)
                raise RuntimeError(f"jaxsp {' '.join(words)}:\n{output.read()}") from None
        finally:
            sys.argv = arguments


@contextlib.contextmanager
def _redirected(output: Any) -> Iterator[None]:
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        yield


def run_cases(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Numbers of each case."""
    results = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = run_case(name, pathlib.Path(folder))
    return results


if __name__ == "__main__":
    # compile in a quarter of the time; the flags of tests/conftest.py
    flags = ["--xla_backend_optimization_level=0"]
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))
    numbers = run_cases(sys.argv[2:] or list_cases())
    pathlib.Path(sys.argv[1]).write_text(json.dumps(numbers), encoding="utf-8")
