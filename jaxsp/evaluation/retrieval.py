"""Retrieval tasks, scored by likelihood: one forward pass over prompts and their answers.

A sample is right if every token of its answer is the likeliest one, given the prompt and the tokens
before it: greedy decoding would write exactly this answer. RULER's score also accepts other words
around the answer, so it is higher, and the two are not to be compared.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jaxsp.blocks import layers
from jaxsp.core.batch import NO_LABEL
from jaxsp.core.units import format_count
from jaxsp.data.packing import dataset
from jaxsp.evaluation import setting_fields
from jaxsp.evaluation.evaluator import Evaluator
from jaxsp.evaluation.setting_fields import SettingFields
from jaxsp.tasks.task import Sample
from jaxsp.training.metric_table import Line
from jaxsp.training.specs import StepSpec


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


class _Group:
    """Samples that are evaluated in rows of one length."""

    def __init__(self, evaluator: Evaluator, samples: Sequence[tuple[str, Sample]]):
        self.samples = samples
        documents = [
            np.concatenate([sample.prompt_ids, sample.answer_ids]) for _, sample in samples
        ]
        labels = [
            np.append(np.full(len(sample.prompt_ids), NO_LABEL, np.int32), sample.answer_ids)
            for _, sample in samples
        ]
        packing = evaluator.spec.config.packing
        self.data = dataset.pack_arrays("tasks", documents, labels, **packing)
        self.evaluator = evaluator
        self.settings = setting_fields.describe(evaluator.spec)


class RetrievalEvaluator:
    """Evaluates retrieval tasks, any number of times. Compiles at the first evaluation.

    Samples that are longer than the rows of the step are evaluated in longer rows, with the same
    weights and RoPE, on the same mesh.
    """

    def __init__(self, evaluator: Evaluator, samples: Samples):
        """Prepares the rows. Args: evaluator: that of the eval sets, whose program is shared."""
        self._groups: list[_Group] = []
        if not samples:
            return
        of_texts = evaluator.for_texts()
        row_tokens = evaluator.spec.config.row_tokens
        flat = [(task, sample) for task, of_task in samples.items() for sample in of_task]
        short = [pair for pair in flat if pair[1].length <= row_tokens]
        long = [pair for pair in flat if pair[1].length > row_tokens]
        if short:
            self._groups.append(_Group(of_texts, short))
        if long:
            spec = lengthen_rows(of_texts.spec, max(sample.length for _, sample in long))
            self._groups.append(_Group(Evaluator(spec, []), long))

    def __bool__(self) -> bool:
        return bool(self._groups)

    def compile(self) -> None:
        """Compiles now instead of at the first evaluation."""
        for group in self._groups:
            group.evaluator.compile(needs_eval_sets=False)

    def run(
        self, master: layers.Weights, *, num_steps: int, on_batch: Callable[[], None] = lambda: None
    ) -> Iterator[Line]:
        """Yields the lines of these weights: see `TaskFields`. Args: see `Evaluator.run`."""
        for group in self._groups:
            # of each sample: its loss, its number of tokens, and of correct ones
            cells: dict[tuple[str, int], list[tuple[Sample, np.ndarray]]] = {}
            sums = group.evaluator.score(group.data, master, on_batch=on_batch)
            scores = np.stack([sums.losses_D, sums.num_tokens_D, sums.num_correct_D])
            for (task, sample), score in zip(group.samples, scores.T, strict=True):
                cells.setdefault((task, sample.length), []).append((sample, score))
            for (task, length), cell in cells.items():
                by_depth: dict[str, list[np.ndarray]] = {}
                for sample, score in cell:
                    if sample.depth is not None:
                        by_depth.setdefault(f"{sample.depth:.3g}", []).append(score)
                of_cell = [score for _, score in cell]
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
                    **vars(group.settings),
                )
                yield dataclasses.asdict(fields)


def _compute_exact_rate(scores: Sequence[np.ndarray]) -> float:
    return float(np.mean([num_correct == num_tokens for _, num_tokens, num_correct in scores]))


def _compute_loss(scores: Sequence[np.ndarray]) -> float | None:
    loss, num_tokens, _ = np.sum(scores, axis=0)
    return float(loss / num_tokens) if np.isfinite(loss) else None


def lengthen_rows(spec: StepSpec, length: int) -> StepSpec:
    """The step with rows that hold `length` tokens, if its own do not: as many whole rows in one.

    Raises: UserError if no attention can take such rows.
    """
    row_tokens = spec.config.row_tokens
    if length <= row_tokens:
        return spec
    longer = -(-length // row_tokens) * row_tokens
    return spec.respec(row_tokens=longer, rows_per_microbatch=1)


def describe(samples: Samples) -> str:
    """Describes the samples of each task for the banner; empty without tasks.

    Example: `needle (660 samples of 4,096, 32,768 and 131,072 tokens)`.
    """
    parts = []
    for task, of_task in samples.items():
        lengths = [f"{length:,}" for length in sorted({sample.length for sample in of_task})]
        text = " and ".join(filter(None, (", ".join(lengths[:-1]), lengths[-1])))
        parts.append(f"{task} ({format_count(len(of_task), 'sample')} of {text} tokens)")
    return ", ".join(parts)
