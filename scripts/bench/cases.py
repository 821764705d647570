"""Cases of the benchmarks of a training step: models, row lengths, documents and memory options.

A case is one row, forward, backward and AdamW, in bfloat16 from random weights.

The models are published ones, except llama8b-4layers, qwen3.5-9b-4layers and
qwen3-30b-a3b-4layers: Llama-3.1-8B, Qwen3.5-9B and Qwen3-30B-A3B with 4 of their 32 or 48 layers
and as small a part of their vocabulary (Llama: 16,032 of 128,256).
Embedding and head shrink with the layers, so layers, head and optimizer have the same proportions
as in the whole model, and the MFU is comparable. With the whole vocabulary, Llama's head would take
38 % of the arithmetic in matrix products instead of 7 %. Qwen's 4 layers are one period: three with
a gated delta net, one with attention.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from jaxsp.hf import published
from jaxsp.run.config_file import Config
from scripts.bench import configs, report, results

SHAPES: dict[str, dict[str, Any]] = {
    "llama8b-4layers": {
        **configs.LLAMA_8B,
        "vocab_size": 128256 * 4 // 32,
        "num_hidden_layers": 4,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "qwen3.5-9b-4layers": {
        **published.read_models()["Qwen/Qwen3.5-9B"].fields,
        "vocab_size": 248320 * 4 // 32,
        "num_hidden_layers": 4,
    },
    "qwen3-30b-a3b-4layers": {
        **published.read_models()["Qwen/Qwen3-30B-A3B"].fields,
        "vocab_size": 151936 * 4 // 48,
        "num_hidden_layers": 4,
    },
    "llama3.2-1b": {
        **configs.LLAMA_8B,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
"""Models by name, as fields of their config.json."""

SHAPES["too-big"] = {**SHAPES["tiny"], "intermediate_size": 10**9 + 7}
"""MLPs of 3.8e11 weights fit on no device: shows how running out of memory is recorded."""

GPU_SHAPES = ("llama8b-4layers", "qwen3-0.6b", "llama3.2-1b")

NUM_DOCUMENTS = {"one": 1, "packed": 16}
"""Documents in a row: one that fills it, or several of random lengths that fill it together."""

MAX_SEGMENTS = {"one": 1, "packed": 64}
"""data.max_segments_per_row: with 1, kernels need not separate documents; 64 is the default."""

OPTIMIZER = {"name": "adamw", "learning_rate": 1e-5}
"""Fields of the config's section `optimizer`; the others have their defaults."""

WARM_UP_STEPS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A training step to time."""

    shape: str
    """Name of the model, from SHAPES."""
    row_tokens: int
    documents: str
    """Key of NUM_DOCUMENTS."""
    kernel: str
    """attention.kernel of the config."""
    experts_kernel: str = "auto"
    """model.experts_kernel of the config."""
    compute_dtype: str = "bfloat16"
    """model.compute_dtype of the config."""
    steps: int
    """Number of timed steps, after WARM_UP_STEPS."""
    remat: str = "auto"
    """This and the next four are fields of the config's section `memory`."""
    offload_activations: str = "none"
    offload_optimizer: str = "none"
    mlp_tile_tokens: int | str = report.AUTO
    loss_tile_tokens: int | str = report.AUTO
    xla_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """run.xla_options of the config."""


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark of steps: its cases, their time limits, and files."""
    parser = results.make_parser(module, description)
    add = parser.add_argument
    names = ", ".join(SHAPES)
    add("--shapes", nargs="+", choices=SHAPES, default=GPU_SHAPES, help=names, metavar="NAME")
    add("--lengths", nargs="+", type=int, default=(8192, 32768), help="of rows", metavar="TOKENS")
    add("--documents", nargs="+", choices=NUM_DOCUMENTS, default=tuple(NUM_DOCUMENTS))
    add("--until-it-fails", action="store_true", help="doubles the longest row until it fails")
    add("--kernel", choices=_choices("attention", "kernel"), default="auto")
    add("--experts-kernel", choices=_choices("model", "experts_kernel"), default="auto")
    add("--compute-dtype", choices=_choices("model", "compute_dtype"), default="bfloat16")
    for name in (*report.MEMORY_OPTIONS, *report.TILES):
        option = f"--{name.replace('_', '-')}"
        default = [getattr(Case, name)]
        if name in report.TILES:
            add(option, nargs="+", type=_tile, default=default, metavar="TOKENS")
        else:
            add(option, nargs="+", choices=_choices("memory", name), default=default)
    add(
        "--xla-option",
        nargs="+",
        action="extend",
        type=_xla_option,
        default=[],
        metavar="NAME=VALUE",
        help="run.xla_options; several values of one name are separate cases",
    )
    add("--steps", type=int, default=10, help="timed steps, after warm-up")
    add("--case-seconds", type=float, default=300, help="a case that takes longer is ended")
    add("--resume", type=pathlib.Path, metavar="OLD.json", help="reuses its finished cases")
    results.add_limits(parser, case="case")
    return parser


def expand_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Every combination of a command line's values, in their order, model by model."""
    memory = {name: getattr(args, name) for name in (*report.MEMORY_OPTIONS, *report.TILES)}
    xla_values: dict[str, list[Any]] = {}
    for name, value in args.xla_option:
        xla_values.setdefault(name, []).append(value)
    for shape, length, documents in itertools.product(args.shapes, args.lengths, args.documents):
        for memory_fields, xla_options in itertools.product(
            _combinations(memory), _combinations(xla_values)
        ):
            yield Case(
                shape=shape,
                row_tokens=length,
                documents=documents,
                kernel=args.kernel,
                experts_kernel=args.experts_kernel,
                compute_dtype=args.compute_dtype,
                steps=args.steps,
                xla_options=xla_options,
                **memory_fields,
            )


def _combinations(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every choice of one value for each name."""
    return [
        dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
    ]


def _choices(section: str, field: str) -> tuple[str, ...]:
    """Values that the config allows for a field."""
    return get_args(Config.model_fields[section].annotation.model_fields[field].annotation)


def _tile(text: str) -> int | str:
    return text if text == report.AUTO else int(text)


def _xla_option(text: str) -> tuple[str, Any]:
    """Splits NAME=VALUE. The value may be a JSON number, true or false; otherwise it is text."""
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text}: must be NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def make_config(case: Case, *, source: pathlib.Path, directory: pathlib.Path) -> Config:
    """The config of a case."""
    return configs.make_config(
        SHAPES[case.shape],
        run={
            "directory": str(directory),
            "steps": WARM_UP_STEPS + case.steps,
            "xla_options": case.xla_options,
        },
        model={"compute_dtype": case.compute_dtype, "experts_kernel": case.experts_kernel},
        attention={"kernel": case.kernel},
        memory={name: getattr(case, name) for name in (*report.MEMORY_OPTIONS, *report.TILES)},
        data={
            "train": [{"source": str(source), "format": "tokens"}],
            "row_tokens": case.row_tokens,
            "max_segments_per_row": MAX_SEGMENTS[case.documents],
        },
        batch={"rows_per_step": 1},
        optimizer=OPTIMIZER,
    )


def make_documents(case: Case) -> list[np.ndarray]:
    """Random token ids of documents that fill a row together, the same in every run.

    They have at least two tokens: jaxsp leaves out documents without a label.
    """
    rng = np.random.default_rng(0)
    positions = np.arange(2, case.row_tokens, 2)
    cuts = np.sort(rng.choice(positions, NUM_DOCUMENTS[case.documents] - 1, replace=False))
    return np.split(rng.integers(0, SHAPES[case.shape]["vocab_size"], case.row_tokens), cuts)


def write_documents(case: Case, source: pathlib.Path, *, num_rows: int = 1) -> None:
    """Writes the documents of a case to a JSONL file, once for each row."""
    lines = [json.dumps({"input_ids": ids.tolist()}) + "\n" for ids in make_documents(case)]
    source.write_text("".join(num_rows * lines), encoding="utf-8")
