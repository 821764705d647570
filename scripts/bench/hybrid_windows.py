"""Trains a small hybrid, and the same model with windows in place of delta nets, and compares them.

    python -m scripts.bench.hybrid_windows --work FOLDER

Runs jaxsp's own commands on the documents of scripts/bench/context_extension.py: 2,048 tokens of
the source of Python's standard library. Both models have four layers, the last with attention over
whole documents. The other three have gated delta nets in one model, and attention with a window in
the other; the MLPs are alike. The held-out documents are those of context_extension, with the loss
by position. Needs matplotlib. Finished parts in the folder of --work are used again.
"""

import json
import math
import pathlib
import sys
from typing import Any

import jax

from jaxsp.hf import model_config
from jaxsp.model import decoder
from scripts.bench import context_extension, results
from scripts.bench.context_extension import LONG, MODEL

MODULE = "scripts.bench.hybrid_windows"

WINDOW = 128
"""Tokens that a token attends to in three of four layers of the model with windows."""

ROWS_PER_STEP = 4

_COMMON = {
    **MODEL,
    "max_position_embeddings": LONG,
    "head_dim": 32,
    "num_hidden_layers": 4,
}

HYBRID = {
    **_COMMON,
    "model_type": "qwen3_5_text",
    "layer_types": [*3 * ["linear_attention"], "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
WINDOWED = {
    **_COMMON,
    "model_type": "qwen3",
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": [*3 * ["sliding_attention"], "full_attention"],
}

MODELS: dict[str, dict[str, Any]] = {
    f"windows of {WINDOW} tokens": WINDOWED,
    "gated delta nets": HYBRID,
}
"""Fields of config.json of both models, by the label of their curve."""


def main(arguments: list[str]) -> int:
    """Runs the command."""
    parser = results.make_parser(MODULE, __doc__)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for all files")
    parser.add_argument("--steps", type=int, default=400)
    parser.set_defaults(out=pathlib.Path("scripts/bench/results/hybrid-windows.json"))
    args = parser.parse_args(arguments)
    work = args.work.resolve()
    context_extension.write_documents(work)
    curves = {}
    for label, fields in MODELS.items():
        name = str(fields["model_type"])
        model = context_extension.train_model(
            work / f"{name}-{args.steps}",
            work / "long.jsonl",
            f"model.config={json.dumps(fields)}",
            f"data.row_tokens={LONG}",
            f"batch.rows_per_step={ROWS_PER_STEP}",
            "optimizer.learning_rate=0.003",
            steps=args.steps,
        )
        curves[label] = context_extension.evaluate(work, name, model)
    print(context_extension.format_table(curves))
    shown = context_extension.shown_arguments(arguments, args.work)
    sizes = {label: count_weights(fields) for label, fields in MODELS.items()}
    print(sizes)
    context_extension.write_curves(args.out, curves, MODULE, shown, weights=sizes)
    title = f"Loss by position after {args.steps} steps of {ROWS_PER_STEP * LONG:,} tokens"
    drawn, _ = context_extension.plot(curves, title)
    drawn.savefig(args.out.with_suffix(".png"), dpi=130)
    return 0


def count_weights(fields: dict[str, Any]) -> int:
    """Number of elements of a model's weights."""
    table = decoder.param_table(model_config.parse_model_config(fields, field="model.config"))
    return sum(math.prod(param.stacked_shape) for param in jax.tree.leaves(table))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
