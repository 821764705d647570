"""Extends a small model from 256 to 2,048 tokens by YaRN, and draws its loss by position.

    python -m scripts.bench.context_extension --work FOLDER

Runs jaxsp's own commands: a byte model is trained on documents of 256 tokens of the source of
Python's standard library, exported, and fine-tuned for a few steps on documents of 2,048 tokens,
with YaRN and, to compare, without it. Each eval set has the same held-out documents of 2,048
tokens, with labels in one range of positions only. Needs matplotlib; about half an hour on 2
CPU cores. Finished parts in the folder of --work are used again.
"""

import json
import pathlib
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxsp.data.tokenization import tokenizers
from scripts.bench import machine, results

MODULE = "scripts.bench.context_extension"

SHORT = 256
"""Tokens of a document at first; also max_position_embeddings."""
LONG = 2048
"""Tokens of a document after the extension."""
BUCKET = 128
"""Positions of one eval set."""
NUM_EVAL_DOCUMENTS = 64
NUM_TUNING_DOCUMENTS = 960

MODEL = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 384,
    "max_position_embeddings": SHORT,
    "initializer_range": 0.06,
}

YARN = f"model.rope={{type: yarn, factor: {LONG // SHORT}}}"

BEFORE = "trained on 256 tokens"
UNTRAINED = "the same with YaRN, not trained further"
TUNED = "YaRN, {steps} steps on 2,048 tokens"
TUNED_WITHOUT = "without YaRN, {steps} steps on 2,048 tokens"


def main(arguments: list[str]) -> int:
    """Runs the command."""
    parser = results.make_parser(MODULE, __doc__)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for all files")
    parser.add_argument("--steps", type=int, default=800, help="steps on short documents")
    parser.add_argument("--tuning-steps", type=int, default=60, help="steps on long documents")
    parser.set_defaults(out=pathlib.Path("scripts/bench/results/context-extension.json"))
    args = parser.parse_args(arguments)
    work = args.work.resolve()
    write_documents(work)
    base = train(work, "base", [f"model.config={json.dumps(MODEL)}"], SHORT, steps=args.steps)
    tuned = {
        name: train(work, name, [f"model.source={base}", *extra], LONG, steps=args.tuning_steps)
        for name, extra in (("yarn", [YARN]), ("plain", [f"model.max_position_embeddings={LONG}"]))
    }
    curves = {
        BEFORE: evaluate(work, "before", base),
        UNTRAINED: evaluate(work, "untrained", base, YARN),
        TUNED_WITHOUT.format(steps=args.tuning_steps): evaluate(work, "plain", tuned["plain"]),
        TUNED.format(steps=args.tuning_steps): evaluate(work, "yarn", tuned["yarn"]),
    }
    print(format_table(curves))
    write_curves(args.out, curves, MODULE, shown_arguments(arguments, args.work))
    draw(curves, args.out.with_suffix(".png"))
    print(f"written: {args.out} and {args.out.with_suffix('.png')}")
    return 0


def shown_arguments(arguments: Sequence[str], work: pathlib.Path) -> list[str]:
    """The command's arguments, without the path of the folder of --work."""
    return ["FOLDER" if word == str(work) else word for word in arguments]


def write_curves(
    out: pathlib.Path,
    curves: dict[str, list[float]],
    module: str,
    arguments: Sequence[str],
    **facts: Any,
) -> None:
    """Writes losses by position. Args: facts: further content of the file."""
    contents = results.open_results(module, arguments, **machine.read_cpu_versions("jax", "jaxlib"))
    contents |= facts
    contents["loss_by_position"] = {
        "first_positions": list(range(0, LONG, BUCKET)),
        "documents": NUM_EVAL_DOCUMENTS,
        "losses": curves,
    }
    results.write(out, contents)


def write_documents(work: pathlib.Path) -> None:
    """Writes token ids: short and long training documents, and an eval set for each range.

    A document is a part of one file, so its first token has no context.
    """
    if (work / "eval").is_dir():
        return
    tokenizer = tokenizers.load(tokenizers.BYTE_TOKENIZER)
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    files += sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*/*.py"))
    files = [file for file in files if file.parent.name != "site-packages"]
    texts = [file.read_text(encoding="utf-8", errors="ignore") for file in files]
    order = np.random.default_rng(0).permutation(len(texts))
    parts: dict[str, list[list[int]]] = {"short": [], "long": [], "held-out": []}
    for number, index in enumerate(order.tolist()):
        tokens = tokenizer(texts[index])["input_ids"]
        if number % 10 == 0:
            parts["held-out"] += list(cut(tokens, LONG))[:2]
        else:
            parts["short"] += cut(tokens, SHORT)
            parts["long"] += cut(tokens, LONG)
    work.mkdir(parents=True, exist_ok=True)
    write_jsonl(work / "short.jsonl", [{"input_ids": tokens} for tokens in parts["short"]])
    tuning = parts["long"][:NUM_TUNING_DOCUMENTS]
    write_jsonl(work / "long.jsonl", [{"input_ids": tokens} for tokens in tuning])
    held_out = parts["held-out"][:NUM_EVAL_DOCUMENTS]
    assert len(held_out) == NUM_EVAL_DOCUMENTS, len(held_out)
    (work / "eval").mkdir()
    for start in range(0, LONG, BUCKET):
        records = [label(tokens, start) for tokens in held_out]
        write_jsonl(work / "eval" / f"{start}.jsonl", records)


def cut(tokens: list[int], length: int) -> Iterator[list[int]]:
    """Yields the parts of a file that have exactly `length` tokens."""
    for start in range(0, len(tokens) - length + 1, length):
        yield tokens[start : start + length]


def label(tokens: list[int], start: int) -> dict[str, list[int]]:
    """A record with labels at the positions of one range only."""
    labels = [
        token if start <= position < start + BUCKET else -100
        for position, token in enumerate(tokens)
    ]
    return {"input_ids": tokens, "labels": labels}


def write_jsonl(file: pathlib.Path, records: Sequence[dict[str, list[int]]]) -> None:
    """Writes one record per line."""
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def train(
    work: pathlib.Path, name: str, model: list[str], row_tokens: int, *, steps: int
) -> pathlib.Path:
    """Trains and exports a model. Returns the Hugging Face folder."""
    is_new = row_tokens == SHORT
    return train_model(
        work / f"{name}-{steps}",
        work / ("short.jsonl" if is_new else "long.jsonl"),
        *model,
        f"data.row_tokens={row_tokens}",
        f"batch.rows_per_step={8192 // row_tokens * (1 if is_new else 2)}",
        f"optimizer.learning_rate={0.003 if is_new else 0.0005}",
        steps=steps,
    )


def train_model(
    run: pathlib.Path, documents: pathlib.Path, *changes: str, steps: int
) -> pathlib.Path:
    """Trains and exports a model, unless it is done. Returns the Hugging Face folder."""
    exported = run / "hf"
    if exported.is_dir():
        return exported
    config = documents.parent / "config.yaml"
    config.write_text("{}\n", encoding="utf-8")
    call(
        "train",
        str(config),
        f"run.directory={run}",
        f"run.steps={steps}",
        *changes,
        "model.compute_dtype=float32",
        f"data.train=[{{source: {documents}, format: tokens}}]",
        f"optimizer.warmup_steps={steps // 20}",
        "optimizer.weight_decay=0.1",
    )
    call("export", str(run), str(exported))
    return exported


def evaluate(work: pathlib.Path, name: str, model: pathlib.Path, *changes: str) -> list[float]:
    """Mean loss in each range of positions, in nats per byte."""
    out = work / f"{name}-{model.parent.name}.jsonl"
    starts = range(0, LONG, BUCKET)
    if not out.is_file():
        sets = ", ".join(
            f"{{source: {work}/eval/{start}.jsonl, format: tokens, name: p{start}}}"
            for start in starts
        )
        call(
            "eval",
            str(model),
            *changes,
            f"data.eval=[{sets}]",
            f"data.row_tokens={LONG}",
            "batch.rows_per_microbatch=4",
            "model.compute_dtype=float32",
            "--out",
            str(out),
        )
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    losses = {line["data"]: line["loss"] for line in lines}
    return [losses[f"p{start}"] for start in starts]


def call(command: str, *arguments: str) -> None:
    """Runs a command of jaxsp and prints it. Raises: CalledProcessError if it fails."""
    print("python -m", f"jaxsp.{command}", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", f"jaxsp.{command}", *arguments], check=True)


def format_table(curves: dict[str, list[float]]) -> str:
    """Losses by position, one column for each model."""
    names = list(curves)
    lines = [f"{number}: {name}" for number, name in enumerate(names, 1)]
    lines.append("positions   " + "".join(f"{number:>9}" for number in range(1, len(names) + 1)))
    for index, start in enumerate(range(0, LONG, BUCKET)):
        values = "".join(f"{curves[name][index]:9.3f}" for name in names)
        lines.append(f"{f'{start}-{start + BUCKET - 1}':<12}{values}")
    return "\n".join(lines)


def draw(curves: dict[str, list[float]], file: pathlib.Path) -> None:
    """Draws loss by position, and the end of the first training."""
    drawn, axes = plot(curves, "Loss by position of a 1M-parameter byte model, 256 -> 2,048 tokens")
    axes.axvline(SHORT, color="#555555", linewidth=1, linestyle=":")
    axes.set_xlabel("position in the document (tokens); dotted: end of the first training")
    drawn.savefig(file, dpi=130)


def plot(curves: dict[str, list[float]], title: str) -> tuple[Any, Any]:
    """A figure of losses by position, and its axes."""
    from matplotlib import figure

    drawn = figure.Figure(figsize=(8, 5), layout="constrained")
    axes = drawn.subplots()
    centers = [start + BUCKET / 2 for start in range(0, LONG, BUCKET)]
    colors = ("#c8553d", "#e08e45", "#999999", "#1b3a5c")[-len(curves) :]
    for (name, losses), color in zip(curves.items(), colors, strict=True):
        axes.plot(centers, losses, label=name, color=color, marker="o", markersize=3)
    axes.set_xlabel("position in the document (tokens)")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(title)
    axes.set_xlim(0, LONG)
    axes.grid(alpha=0.3)
    axes.legend()
    return drawn, axes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
