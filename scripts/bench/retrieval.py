"""Trains a small model to copy from its context, and one that sees a window of it only.

    python -m scripts.bench.retrieval --work FOLDER

Runs `jaxsp train` on documents that repeat themselves and on samples of the task `needle` with
other keys and codes, and evaluates loss by position and retrieval. The first model must learn both,
and the second one, whose layers together reach fewer tokens than lie between a needle and its
question, must not: then the evaluation can tell them apart. Needs matplotlib; about 30 minutes on 2
CPU cores. Finished runs in the folder of --work are used again.
"""

import json
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np

from jaxsp.core.batch import NO_LABEL
from jaxsp.reporting import metrics, task_plots
from jaxsp.tasks import samples
from scripts.bench import context_extension, machine, results

MODULE = "scripts.bench.retrieval"

ROW_TOKENS = 256
PERIODS = (30, 120)
"""Fewest and most tokens after which a document repeats itself. With one number, a model would
learn to look that number of tokens back, whatever is there."""
NUM_NEEDLES = 6000
NUM_REPEATED = 9000
NUM_EVAL = 64
TRAINING_SEED = 10**6

MODEL = {
    "model_type": "qwen3",
    "vocab_size": 257,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 256,
    "initializer_range": 0.08,
    "use_sliding_window": True,
    "sliding_window": 8,
}

LAYERS = {
    "whole context": ["sliding_attention", "full_attention"],
    "windows of 8": ["sliding_attention", "sliding_attention"],
}
"""Layers of the two models. The first layer of both collects the tokens before each token, which
the second one of the first model finds again."""


def main(arguments: list[str]) -> int:
    """Runs the command."""
    parser = results.make_parser(MODULE, __doc__)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for all files")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--learning-rate", type=float, default=0.003)
    parser.set_defaults(out=pathlib.Path("scripts/bench/results/retrieval.json"))
    args = parser.parse_args(arguments)
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    write_data(work)
    runs = {}
    for name, layer_types in LAYERS.items():
        run = train(work, name, layer_types, args.steps, args.learning_rate)
        runs[name] = {
            file: read_lines(run / file) for file in (metrics.EVAL_FILE, metrics.TASKS_FILE)
        }
    shown = context_extension.shown_arguments(arguments, args.work)
    contents = results.open_results(MODULE, shown, **machine.read_cpu_versions("jax", "jaxlib"))
    results.write(args.out, contents | {"runs": runs})
    for name, files in runs.items():
        last = [line for line in files[metrics.TASKS_FILE] if line["step"] == args.steps]
        rates = {f"{line['length']}": line["exact_rate"] for line in last}
        print(f"{name}: exact answers by length {rates}")
        print(f"  loss by position {files[metrics.EVAL_FILE][-1]['loss_by_position']}")
    draw(runs, args.out.with_suffix(".png"))
    return 0


def draw(runs: dict[str, Any], path: pathlib.Path) -> None:
    """Draws the loss by position and the rates of exact answers of both models."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, *maps) = pyplot.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    for (name, files), panel in zip(runs.items(), maps, strict=True):
        by_position = files[metrics.EVAL_FILE][-1]["loss_by_position"]
        losses.plot([*by_position], [*by_position.values()], marker="o", label=name)
        tasks = files[metrics.TASKS_FILE]
        needles = [line for line in tasks if line["step"] == tasks[-1]["step"]]
        image = task_plots.draw_heatmap(panel, needles)
        panel.set_title(f"{name}: exact answers", fontsize=10)
    losses.set(xlabel="from position", ylabel="loss", title="Text that repeats itself")
    losses.set_ylim(bottom=0)
    losses.grid(alpha=0.3)
    losses.legend(frameon=False)
    figure.colorbar(image, ax=maps)
    figure.savefig(path, dpi=120)


def write_data(work: pathlib.Path) -> None:
    """Writes documents that repeat themselves, for training and evaluation, and needles."""
    rng = np.random.default_rng(0)
    draw = lambda count: [repeat_letters(rng) for _ in range(count)]
    needles = []
    for length in (210, 232, ROW_TOKENS):
        needles += samples.make_samples(
            "needle",
            lambda text: list(text.encode()),
            length=length,
            depths=10,
            samples=NUM_NEEDLES // 30,
            seed=TRAINING_SEED,
        )
    records = [label_answer([*sample.prompt_ids, *sample.answer_ids]) for sample in needles]
    write_jsonl(work / "train.jsonl", records + draw(NUM_REPEATED))
    held_out = [{"input_ids": record["input_ids"]} for record in draw(NUM_EVAL)]
    write_jsonl(work / "eval.jsonl", held_out)


def label_answer(ids: list[int]) -> dict[str, list[int]]:
    """Tokens of a sample; those of its last line, which repeats the key and has the code, are
    labels."""
    start = bytes(ids).rindex(b"\n") + 1
    ids = [int(token) for token in ids]
    return {"input_ids": ids, "labels": [NO_LABEL] * start + ids[start:]}


def repeat_letters(rng: np.random.Generator) -> dict[str, list[int]]:
    """Random letters, again and again; those after the first time are labels."""
    letters = rng.integers(97, 123, rng.integers(*PERIODS))
    ids = np.resize(letters, ROW_TOKENS).tolist()
    return {"input_ids": ids, "labels": [NO_LABEL] * len(letters) + ids[len(letters) :]}


def write_jsonl(path: pathlib.Path, records: list[dict[str, Any]]) -> None:
    """Writes a file of JSON lines."""
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train(
    work: pathlib.Path, name: str, layer_types: list[str], steps: int, learning_rate: float
) -> pathlib.Path:
    """Trains a model, and returns its run's folder."""
    run = work / name.replace(" ", "-")
    if (run / "checkpoints").is_dir():
        return run
    tasks = [{"task": "needle", "lengths": [256, 512], "depths": 5, "samples": 20}]
    config = {
        "run": {
            "directory": str(run),
            "steps": steps,
            "eval_every": max(1, steps // 5),
            "eval_at_start": True,
        },
        "model": {
            "tokenizer": "bytes",
            "compute_dtype": "float32",
            "config": MODEL | {"layer_types": layer_types},
        },
        "data": {
            "train": [{"source": str(work / "train.jsonl"), "format": "tokens"}],
            "eval": [{"source": str(work / "eval.jsonl"), "format": "tokens", "name": "repeated"}],
            "row_tokens": ROW_TOKENS,
        },
        "eval": {"tasks": tasks},
        "batch": {"rows_per_step": 32, "rows_per_microbatch": 32},
        "optimizer": {"learning_rate": learning_rate, "warmup_steps": 50, "weight_decay": 0.01},
        "memory": {"remat": "none"},
    }
    path = work / f"{run.name}.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "jaxsp", "train", str(path)], check=True)
    return run


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
