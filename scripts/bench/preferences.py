"""Trains a small model on preferences about real text, and draws the accuracy on held-out pairs.

    python -m scripts.bench.preferences --work FOLDER

Runs jaxsp's own commands: a byte model is trained on the source of Python's standard library,
exported, and tuned on pairs by several objectives. The prompt of a pair is a part of a file; the
chosen answer is how the file goes on, and the rejected one has its words in reverse order. Held-out
pairs are from other files. Needs matplotlib; about 20 minutes on 2 CPU cores. Finished parts in the
folder of --work are used again.
"""

import json
import pathlib
import re
import subprocess
import sys
import sysconfig
from typing import Any

import numpy as np

from jaxsp.reporting import metrics
from scripts.bench import context_extension, machine, results

MODULE = "scripts.bench.preferences"

PROMPT_CHARS = 160
ANSWER_CHARS = 64
NUM_PAIRS = 2400
NUM_EVAL_PAIRS = 300

MODEL = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "initializer_range": 0.08,
}

OBJECTIVES = {
    "dpo": {"type": "dpo", "beta": 0.1},
    "simpo": {"type": "simpo", "beta": 10.0},
    "reward": {"type": "reward"},
}


def main(arguments: list[str]) -> int:
    """Runs the command."""
    parser = results.make_parser(MODULE, __doc__)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for all files")
    parser.add_argument("--steps", type=int, default=400, help="steps of the base model")
    parser.add_argument("--tuning-steps", type=int, default=150, help="steps on pairs")
    parser.set_defaults(out=pathlib.Path("scripts/bench/results/preferences.json"))
    args = parser.parse_args(arguments)
    work = args.work.resolve()
    write_data(work)
    base = train_base(work, args.steps)
    curves = {
        name: tune(work, name, objective, base, args.tuning_steps)
        for name, objective in OBJECTIVES.items()
    }
    shown = context_extension.shown_arguments(arguments, args.work)
    contents = results.open_results(MODULE, shown, **machine.read_cpu_versions("jax", "jaxlib"))
    contents |= {"pairs": NUM_PAIRS, "held_out_pairs": NUM_EVAL_PAIRS, "evaluations": curves}
    results.write(args.out, contents)
    for name, lines in curves.items():
        first = lines[0]["reward_accuracy"]
        last = lines[-1]["reward_accuracy"]
        print(f"{name:<8} accuracy on held-out pairs {first:.3f} before, {last:.3f} after")
    draw(curves, args.out.with_suffix(".png"))
    print(f"written: {args.out} and {args.out.with_suffix('.png')}")
    return 0


def write_data(work: pathlib.Path) -> None:
    """Writes texts for the base model, and pairs of training and of held-out files."""
    if (work / "eval.jsonl").is_file():
        return
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    texts = [file.read_text(encoding="utf-8", errors="ignore") for file in folder.glob("*.py")]
    texts = sorted(text for text in texts if text.isascii() and len(text) > 4000)
    rng = np.random.default_rng(0)
    texts = [texts[index] for index in rng.permutation(len(texts))]
    num_held_out = len(texts) // 6
    work.mkdir(parents=True, exist_ok=True)
    training = texts[num_held_out:]
    write_jsonl(work / "texts.jsonl", [{"text": text} for text in training])
    write_jsonl(work / "train.jsonl", draw_pairs(training, NUM_PAIRS, rng))
    write_jsonl(work / "eval.jsonl", draw_pairs(texts[:num_held_out], NUM_EVAL_PAIRS, rng))


def write_jsonl(path: pathlib.Path, records: list[dict[str, Any]]) -> None:
    """Writes a file of JSON lines."""
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")


def draw_pairs(texts: list[str], count: int, rng: np.random.Generator) -> list[dict[str, str]]:
    """Draws pairs of answers to random parts of texts."""
    records = []
    while len(records) < count:
        text = texts[rng.integers(len(texts))]
        start = int(rng.integers(len(text) - PROMPT_CHARS - ANSWER_CHARS))
        end = start + PROMPT_CHARS
        chosen = text[end : end + ANSWER_CHARS]
        # white space stays where it is
        words = iter(re.findall(r"\S+", chosen)[::-1])
        rejected = re.sub(r"\S+", lambda _: next(words), chosen)  # noqa: B023 - called at once
        if chosen != rejected:
            records.append({"prompt": text[start:end], "chosen": chosen, "rejected": rejected})
    return records


def train_base(work: pathlib.Path, steps: int) -> pathlib.Path:
    """Trains and exports the base model; returns its folder."""
    out = work / "base-hf"
    if not out.is_dir():
        source = {"source": str(work / "texts.jsonl"), "format": "text"}
        words = [
            f"model.config={json.dumps(MODEL)}",
            "model.tokenizer=bytes",
            f"data.train=[{json.dumps(source)}]",
            "optimizer.learning_rate=0.004",
        ]
        run_jaxsp("train", write_config(work), *words, f"run.directory={work}/base", steps=steps)
        run_jaxsp("export", str(work / "base"), str(out))
    return out


def tune(
    work: pathlib.Path, name: str, objective: dict[str, Any], base: pathlib.Path, steps: int
) -> list[dict[str, Any]]:
    """Tunes the base model; returns the evaluations before, during and after it."""
    run = work / name
    if not (run / "checkpoints").is_dir():
        source = {"source": str(work / "train.jsonl"), "format": "preference"}
        held_out = {"source": str(work / "eval.jsonl"), "format": "preference", "name": "held out"}
        words = [
            f"model.source={base}",
            f"data.train=[{json.dumps(source)}]",
            f"data.eval=[{json.dumps(held_out)}]",
            f"objective={json.dumps(objective)}",
            "optimizer.learning_rate=0.0003",
            "run.eval_at_start=true",
            "run.eval_every=15",
        ]
        run_jaxsp("train", write_config(work), *words, f"run.directory={run}", steps=steps)
    lines = (run / metrics.EVAL_FILE).read_text(encoding="utf-8").splitlines()
    names = ("step", "loss", "reward_accuracy", "reward_margin", "num_pairs")
    return [{name: line[name] for name in names} for line in map(json.loads, lines)]


def write_config(work: pathlib.Path) -> str:
    """Writes what all runs share; returns the file."""
    config = {
        "model": {"compute_dtype": "float32"},
        "mesh": {"data": 2, "seq": 2, "virtual_cpu_devices": 4},
        "data": {"row_tokens": 512},
        "batch": {"rows_per_step": 4},
        "optimizer": {"warmup_steps": 10},
        "logging": {"trackers": []},
    }
    path = work / "config.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    return str(path)


def run_jaxsp(*words: str, steps: int | None = None) -> None:
    """Runs a command of jaxsp."""
    more = [] if steps is None else [f"run.steps={steps}"]
    subprocess.run([sys.executable, "-m", "jaxsp", *words, *more], check=True)


def draw(curves: dict[str, list[dict[str, Any]]], path: pathlib.Path) -> None:
    """Draws accuracy and margin by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (accuracy, margin) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, lines in curves.items():
        steps = [line["step"] for line in lines]
        values = [100 * line["reward_accuracy"] for line in lines]
        accuracy.plot(steps, values, marker=".", label=f"{name} {values[-1]:.0f} %")
        margin.plot(steps, [line["reward_margin"] for line in lines], marker=".", label=name)
    accuracy.set(xlabel="step", ylabel="%", title="Held-out pairs ranked right", ylim=(0, 100))
    margin.set(xlabel="step", title="Margin of the rewards", yscale="symlog")
    for axes in (accuracy, margin):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
