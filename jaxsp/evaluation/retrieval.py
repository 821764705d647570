"""Retrieval tasks, scored by likelihood: one forward pass over prompts and their answers.

A sample is right if every token of its answer is the likeliest one, given the prompt and the tokens
before it: greedy decoding would write exactly this answer. RULER's score also accepts other words
around the answer, so it is higher, and the two are not to be compared.
"""

import dataclasses
import importlib.util
import io
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxsp.blocks import layers
from jaxsp.core import files
from jaxsp.core.batch import NO_LABEL
from jaxsp.core.units import format_count
from jaxsp.data import dataset
from jaxsp.data.dataset import PackedDataset
from jaxsp.evaluation.evaluator import Evaluator, SettingFields, describe_settings
from jaxsp.tasks.task import Sample
from jaxsp.training.metric_table import Line


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskFields(SettingFields):
    """One line of tasks.jsonl: the samples of one length of a task, at one step."""

    step: int
    """Training steps of the weights; 0 for the weights of a Hugging Face folder."""
    task: str
    """Name of the task: see eval.tasks."""
    length: int
    """Maximum number of tokens of prompt and answer, which samples approach."""
    exact_rate: float
    """Fraction of samples whose answer greedy decoding would write exactly. It is not RULER's
    score, which accepts other words around the answer."""
    answer_loss: float | None
    """Mean loss of the tokens of the answers. null if it is not finite."""
    exact_rate_by_depth: dict[str, float]
    """exact_rate by the place of the needle, from 0 (start) to 1 (end). Empty for other tasks."""
    answer_loss_by_depth: dict[str, float | None]
    """answer_loss by the place of the needle."""
    num_samples: int
    """Number of samples."""
    num_answer_tokens: int
    """Number of tokens of their answers."""


Samples = Mapping[str, Sequence[Sample]]
"""Samples by the name of their task."""


class _Group(NamedTuple):
    """Samples that are evaluated in rows of one length."""

    evaluator: Evaluator
    samples: Sequence[tuple[str, Sample]]
    data: PackedDataset


class RetrievalEvaluator:
    """Evaluates retrieval tasks, any number of times. Compiles at the first evaluation.

    Samples that are longer than the rows of the step are evaluated in longer rows, with the same
    weights and RoPE, on the same mesh.
    """

    def __init__(self, evaluator: Evaluator, samples: Samples):
        """Args: evaluator: that of the eval sets, whose program is shared."""
        self._groups: list[_Group] = []
        row_tokens = evaluator.spec.config.row_tokens
        for is_long in (False, True):
            chosen = [
                (task, sample)
                for task, of_task in samples.items()
                for sample in of_task
                if (sample.length > row_tokens) == is_long
            ]
            if not chosen:
                continue
            own = evaluator.for_texts()
            if is_long:  # rows as long as several of the run's
                longest = max(sample.length for _, sample in chosen)
                longer = -(-longest // row_tokens) * row_tokens
                own = Evaluator(own.spec.respec(row_tokens=longer, rows_per_microbatch=1), [])
            documents = []
            labels = []
            for _, sample in chosen:
                documents.append(np.concatenate([sample.prompt_ids, sample.answer_ids]))
                no_labels = np.full(len(sample.prompt_ids), NO_LABEL, np.int32)
                labels.append(np.append(no_labels, sample.answer_ids))
            packing = own.spec.config.packing
            data = dataset.pack_arrays("tasks", documents, labels, **packing)
            self._groups.append(_Group(own, chosen, data))

    def __bool__(self) -> bool:
        return bool(self._groups)

    def compile(self) -> None:
        """Compiles now instead of at the first evaluation."""
        for group in self._groups:
            group.evaluator.compile()

    def run(
        self, master: layers.Weights, *, num_steps: int, on_batch: Callable[[], None] = lambda: None
    ) -> Iterator[Line]:
        """Yields the lines of these weights: see `TaskFields`."""
        for group in self._groups:
            # of each sample: its loss, its number of tokens, and of correct ones
            cells: dict[tuple[str, int], list[np.ndarray]] = {}
            depths: dict[tuple[str, int], dict[str, list[np.ndarray]]] = {}
            sums = group.evaluator.score(group.data, master, on_batch=on_batch)
            scores = np.stack([sums.losses_D, sums.num_tokens_D, sums.num_correct_D])
            for (task, sample), score in zip(group.samples, scores.T, strict=True):
                cell = (task, sample.length)
                cells.setdefault(cell, []).append(score)
                by_depth = depths.setdefault(cell, {})
                if sample.depth is not None:
                    by_depth.setdefault(f"{sample.depth:.3g}", []).append(score)
            for (task, length), of_cell in cells.items():
                by_depth = depths[task, length]
                fields = TaskFields(
                    step=num_steps,
                    task=task,
                    length=length,
                    exact_rate=_compute_exact_rate(of_cell),
                    answer_loss=_compute_loss(of_cell),
                    exact_rate_by_depth={x: _compute_exact_rate(y) for x, y in by_depth.items()},
                    answer_loss_by_depth={x: _compute_loss(y) for x, y in by_depth.items()},
                    num_samples=len(of_cell),
                    num_answer_tokens=int(sum(score[1] for score in of_cell)),
                    **describe_settings(group.evaluator.spec),
                )
                yield dataclasses.asdict(fields)


def _compute_exact_rate(scores: Sequence[np.ndarray]) -> float:
    return float(np.mean([num_correct == num_tokens for _, num_tokens, num_correct in scores]))


def _compute_loss(scores: Sequence[np.ndarray]) -> float | None:
    loss, num_tokens, _ = np.sum(scores, axis=0)
    return float(loss / num_tokens) if np.isfinite(loss) else None


def describe(samples: Samples) -> str:
    """Describes samples: `needle (660 samples of 4,096, 32,768 and 131,072 tokens)`."""
    parts = []
    for task, of_task in samples.items():
        lengths = [f"{length:,}" for length in sorted({sample.length for sample in of_task})]
        text = " and ".join(filter(None, (", ".join(lengths[:-1]), lengths[-1])))
        parts.append(f"{task} ({format_count(len(of_task), 'sample')} of {text} tokens)")
    return ", ".join(parts)


def draw_if_possible(path: pathlib.Path, lines: Sequence[Line]) -> str:
    """Draws needles, if lines have some, beside the file of results or in a run's directory.

    Returns: the file, or why there is none; empty without needles.
    """
    needles = [line for line in lines if line.get("task") == "needle"]
    if not needles:
        return ""
    plot = path.with_name(f"{path.stem}-needle.png")
    if path.is_dir():
        plot = path / "needle.png"
    if importlib.util.find_spec("matplotlib") is None:
        return f"no {plot.name}, which needs matplotlib (pip install 'jaxsp[plan]')"
    write_heatmap(plot, needles)
    return str(plot)


def write_heatmap(path: pathlib.Path, needles: Sequence[Line]) -> None:
    """Draws the rate of exact answers by length and depth, as PNG, of needles of one step."""
    from matplotlib import figure

    by_length = {line["length"]: line["exact_rate_by_depth"] for line in needles}
    lengths = sorted(by_length)
    depths = sorted({depth for rates in by_length.values() for depth in rates}, key=float)
    rates = np.array([[by_length[x].get(y, np.nan) for x in lengths] for y in depths], float)
    size = (max(6.5, 2.5 + 0.8 * len(lengths)), 2.2 + 0.32 * len(depths))
    drawn = figure.Figure(figsize=size, layout="constrained")
    panel = drawn.subplots()
    panel.set_facecolor("#dddddd")
    # From dark blue to yellow, which do not depend on telling red from green
    image = panel.imshow(rates, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for (row, column), rate in np.ndenumerate(rates):
        text = "none" if np.isnan(rate) else f"{rate:.2f}"
        # each color where it has more contrast to the cell
        color = "white" if rate < 0.47 else "black"
        panel.text(column, row, text, ha="center", va="center", color=color, fontsize=9)
    panel.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    panel.set_yticks(range(len(depths)), [f"{100 * float(depth):.3g}%" for depth in depths])
    panel.set_xlabel("length in tokens")
    panel.set_ylabel("depth of the needle\n(0% is the start)")
    panel.set_title("exact greedy answers by likelihood, not RULER's score", fontsize=9)
    drawn.suptitle(f"Needle at step {needles[0]['step']:,}", fontsize=11)
    drawn.colorbar(image, label="fraction of exact answers")
    content = io.BytesIO()
    drawn.savefig(content, dpi=120, format="png")
    files.write_atomic(path, content.getvalue())
