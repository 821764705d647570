"""Loss of data sets that are not learned from; during training and by itself the same code."""

import dataclasses
import functools
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax

from jaxsp.config.schema import Config
from jaxsp.data.packing.dataset import PackedDataset
from jaxsp.model import layers
from jaxsp.runtime import device_mesh
from jaxsp.training import train_step
from jaxsp.training.train_step import Program, StepTotals


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalResult:
    """One line of eval.jsonl: one eval set at one step. Undefined numbers are null."""

    step: int
    """Training steps of the weights; 0 for the weights of a Hugging Face folder."""
    data: str
    """Name of the eval set."""
    loss: float | None
    """Mean loss over all loss tokens of the eval set. null if it is not finite."""
    perplexity: float | None
    """exp(loss). null if it is not finite."""
    token_accuracy: float
    """Fraction of loss tokens whose top-1 prediction is correct."""
    num_documents: int
    """Number of documents."""
    num_rows: int
    """Number of rows that the documents are packed into."""
    num_tokens: int
    """Number of tokens in all segments."""
    num_loss_tokens: int
    """Number of tokens whose next token is a target."""
    seconds: float
    """Duration in seconds, without compilation."""


def identify_eval_set(data: PackedDataset, config: Config) -> dict[str, str]:
    """Name and digest of a data set.

    The digest covers the tokens, the labels, and how documents longer than a row were cut: with
    the same digest, the same weights have the same loss up to rounding.
    """
    parts = [*data.digests, hashlib.sha256(data.documents.lengths.tobytes()).hexdigest()]
    if any(source.has_long_documents() for source in data.documents.sources):
        parts += [config.data.long_documents, str(config.data.max_row_tokens)]
    return {"name": data.name, "digest": hashlib.sha256(" ".join(parts).encode()).hexdigest()}


class Evaluator:
    """Evaluates data sets, each by itself, as often as it is asked; compiles when it is asked first.

    Rows are packed and as long as in training, the longest where there are several lengths. Every group of devices works on
    `batch.rows_per_microbatch` of them; sums over steps are float64 on the host.
    """

    def __init__(self, program: Program, eval_sets: Sequence[PackedDataset]):
        slots = device_mesh.num_groups(program.mesh) * program.config.batch.rows_per_microbatch
        config = program.config.with_row_tokens(program.config.data.max_row_tokens)
        batch = config.batch.model_copy(update={"rows_per_step": slots})
        evaluated = config.model_copy(update={"batch": batch})
        self._program = dataclasses.replace(program, config=evaluated, has_weights=False)
        self._eval_sets = eval_sets

    def is_due(self, number: int) -> bool:
        """Whether an evaluation is to follow a step."""
        return bool(self._eval_sets) and is_due(self._program.config.run.eval_every, number)

    @functools.cached_property
    def _compiled_totals(self) -> jax.stages.Compiled:
        return train_step.compile_totals(self._program)

    def compile(self) -> None:
        """Compiles now what would be compiled when it is asked first, if there is something to evaluate."""
        _ = self._eval_sets and self._compiled_totals

    def run(
        self, master: layers.Weights, *, num_steps: int, on_batch: Callable[[], None] = lambda: None
    ) -> Iterator[EvalResult]:
        """Results of these weights, one data set after another.

        Args:
            num_steps: what the weights were trained for.
            alive: is called after each batch.
        """
        for data in self._eval_sets:
            totals = self._compiled_totals
            began = time.perf_counter()
            config = self._program.config
            feed = data.make_loader(
                config,
                self._program.mesh,
                data.make_schedule(config, epochs=1),
                layout_degree=self._program.attend.layout_degree,
            )
            parts = []
            for part in _fetch_one_behind(totals(master, rows) for rows, _ in feed.batches()):
                parts.append(part)
                on_batch()
            sums = {
                name: sum(float(getattr(part, name)) for part in parts)
                for name in ("loss", "num_correct")
            }
            counts = {
                name: sum(int(getattr(part, name)) for part in parts)
                for name in ("num_rows", "num_tokens", "num_loss_tokens")
            }
            loss = sums["loss"] / counts["num_loss_tokens"]
            yield EvalResult(
                step=num_steps,
                data=data.name,
                loss=loss if math.isfinite(loss) else None,
                perplexity=math.exp(loss) if loss < 700 else None,
                token_accuracy=sums["num_correct"] / counts["num_loss_tokens"],
                num_documents=len(data.documents.lengths),
                seconds=time.perf_counter() - began,
                **counts,
            )


def is_due(every: int | str | None, number: int) -> bool:
    """True if an action with an interval of `every` steps is due after a step; `epoch` is not counted in steps."""
    return isinstance(every, int) and number % every == 0


def _fetch_one_behind(sent: Iterable[StepTotals]) -> Iterator[StepTotals]:
    """The numbers of each step, fetched when the next is under way."""
    running = None
    for one in sent:
        if running is not None:
            yield jax.device_get(running)
        running = one
    yield jax.device_get(running)
