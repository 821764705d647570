"""Evaluation of eval sets, for training and for jaxsp eval."""

import dataclasses
import functools
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsp.blocks import layers, rope
from jaxsp.core.errors import UserError
from jaxsp.data import dataset
from jaxsp.data.dataset import PackedDataset
from jaxsp.data.documents import Documents
from jaxsp.data.loader import StepCounts
from jaxsp.evaluation import long_ppl, token_losses
from jaxsp.evaluation.long_ppl import LongPPL
from jaxsp.evaluation.token_losses import (
    AddTokens,
    DocumentLosses,
    DocumentSums,
    PositionFields,
    PositionSums,
)
from jaxsp.objectives.objective import Sft, TokenObjective
from jaxsp.objectives.pairs import PairObjective, PairSums
from jaxsp.training import metric_table, step_gradients, train_step
from jaxsp.training.metric_table import Line, Sums
from jaxsp.training.specs import StepSpec
from jaxsp.training.step_gradients import BatchLosses


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingFields:
    """Settings of an evaluation, in lines of eval.jsonl, tasks.jsonl and lm_eval.jsonl."""

    row_tokens: int
    """Row length of the evaluation, in tokens."""
    compute_dtype: str
    """model.compute_dtype."""
    rope: str | None
    """Rotary embeddings, as the banner describes changed ones. null without any."""


def describe_settings(spec: StepSpec) -> dict[str, Any]:
    """Returns the settings of a step that evaluates: see `SettingFields`."""
    text = rope.describe(spec.model, is_changed=True) or None
    config = spec.config
    return {"row_tokens": config.row_tokens, "compute_dtype": config.compute_dtype, "rope": text}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalFields(PositionFields, SettingFields):
    """One line of eval.jsonl: one eval set at one step. Undefined numbers are null.

    jaxsp eval appends lines too, which may have other settings or documents.
    """

    step: int
    """Training steps of the weights; 0 for the weights of a Hugging Face folder."""
    data: str
    """Name of the eval set."""
    data_digest: str | None
    """Digest of its tokens, labels and cuts. null for documents in memory."""
    perplexity: float | None
    """exp(loss), or exp(cross_entropy) if the objective has another loss. null if it is not finite,
    and for preferences."""
    num_documents: int
    """Number of documents."""
    long_ppl: float | None
    """LongPPL, the perplexity of tokens that depend on far context. null if there are none, and
    unless eval.long_ppl is true."""
    num_key_tokens: int | None
    """Number of these tokens. null unless eval.long_ppl is true."""
    seconds: float
    """Duration in seconds, without compilation."""


def identify_eval_set(data: PackedDataset) -> dict[str, str]:
    """Returns the name and the digest of an eval set: of tokens, labels, and cuts of documents
    longer than a row. With the same digest, the same weights have the same loss up to rounding."""
    parts = [*data.digests, hashlib.sha256(data.documents.lengths.tobytes()).hexdigest()]
    if any(source.num_long for source in data.documents.sources):
        parts += [data.documents.long_documents, str(data.stream.row_tokens)]
    return {"name": data.name, "digest": hashlib.sha256(" ".join(parts).encode()).hexdigest()}


class Evaluator:
    """Evaluates eval sets, any number of times. Compiles at the first evaluation.

    Rows are packed as in training, with the row length of the step. One batch is one microbatch.
    Losses of single tokens are summed in float64, on the host.
    """

    def __init__(
        self, spec: StepSpec, eval_sets: Sequence[PackedDataset], *, has_long_ppl: bool = False
    ):
        one_microbatch = spec.respec(rows_per_step=spec.global_microbatch_rows)
        self.spec = dataclasses.replace(one_microbatch, has_weights=False)
        self._eval_sets = eval_sets
        self._has_long_ppl = has_long_ppl

    def __bool__(self) -> bool:
        return bool(self._eval_sets)

    @functools.cached_property
    def _compute_losses(self) -> jax.stages.Compiled:
        compute = functools.partial(step_gradients.compute_token_losses, self.spec)
        return train_step.compile_forward(self.spec, compute)

    def compile(self) -> None:
        """Compiles now instead of at the first evaluation."""
        _ = self._compute_losses

    def for_texts(self) -> "Evaluator":
        """Evaluator for texts: itself if its batches have nothing else; otherwise one with
        objective sft and no eval sets. Raises: UserError for a reward model."""
        if isinstance(self.spec.objective, Sft):
            return self
        if self.spec.model.has_scores:
            raise UserError(
                "objective.type = reward: a reward model predicts no tokens, so it has no answers. "
                "Leave out eval.tasks and --lm-eval."
            )
        spec = self.spec.respec(objective=Sft())
        return Evaluator(dataclasses.replace(spec, has_split_pairs=False, teacher=None), [])

    def run(
        self, master: layers.Weights, *, num_steps: int, on_batch: Callable[[], None] = lambda: None
    ) -> Iterator[Line]:
        """Yields the line of these weights for each eval set. Calls `on_batch` after each batch."""
        for data in self._eval_sets:
            yield self.evaluate(data, master, num_steps=num_steps, on_batch=on_batch)

    def evaluate(
        self,
        data: PackedDataset,
        master: layers.Weights,
        *,
        num_steps: int,
        on_batch: Callable[[], None] = lambda: None,
    ) -> Line:
        """Returns the line of these weights for one eval set."""
        _ = self._compute_losses
        began = time.perf_counter()
        documents = DocumentSums(len(data.documents.lengths))
        positions = PositionSums(data.documents.lengths, row_tokens=self.spec.config.row_tokens)
        has_texts = not self.spec.objective.has_pairs
        has_long_ppl = has_texts and self._has_long_ppl
        takers = [documents.add, positions.add] if has_texts else [documents.add]
        if has_long_ppl:
            all_losses = DocumentLosses(data.documents.lengths)
            takers.append(all_losses.add)
        sums = self._run_batches(data, master, on_batch, takers)
        if self.spec.model.has_scores:  # a score predicts no token
            del sums["num_correct"]
        if has_texts:
            is_own = isinstance(self.spec.objective, TokenObjective)
            sums["cross_entropy_sum" if is_own else "loss_sum"] = documents.losses_D.sum()
        else:
            sums |= _sum_pairs(self.spec, data.documents, documents)
        values = metric_table.compute_metrics(sums)
        cross_entropy = values.get("cross_entropy", values["loss"])
        has_perplexity = has_texts and cross_entropy < 700
        digest = identify_eval_set(data)["digest"] if all(data.digests) else None
        long_ppl_result = LongPPL(None, None)
        if has_long_ppl:
            texts = long_ppl.cut(data)
            short_losses = DocumentLosses(np.array([len(text.tokens) for text in texts], np.int64))
            if texts:
                arrays = [text.tokens for text in texts], [text.labels for text in texts]
                short_data = dataset.pack_arrays("short texts", *arrays, **self.spec.config.packing)
                self.for_texts()._run_batches(short_data, master, on_batch, [short_losses.add])
            long_ppl_result = long_ppl.compute(texts, all_losses, short_losses)
        fields = EvalFields(
            step=num_steps,
            data=data.name,
            data_digest=digest,
            perplexity=math.exp(cross_entropy) if has_perplexity else None,
            num_documents=len(data.documents.lengths),
            seconds=time.perf_counter() - began,
            **long_ppl_result._asdict(),
            **vars(positions.make_fields()),
            **describe_settings(self.spec),
        )
        return metric_table.make_line(fields, sums | values)

    def score(
        self,
        data: PackedDataset,
        master: layers.Weights,
        *,
        on_batch: Callable[[], None] = lambda: None,
    ) -> DocumentSums:
        """Sums over the loss tokens of each document."""
        documents = DocumentSums(len(data.documents.lengths))
        self._run_batches(data, master, on_batch, [documents.add])
        return documents

    def compute_losses(self, data: PackedDataset, master: layers.Weights) -> list[np.ndarray]:
        """Loss of each token of each document, NaN without a label, float64."""
        lengths = data.documents.lengths
        losses = DocumentLosses(lengths)
        self._run_batches(data, master, lambda: None, [losses.add])
        return [losses.read(number, 0, length) for number, length in enumerate(lengths)]

    def _run_batches(
        self,
        data: PackedDataset,
        master: layers.Weights,
        on_batch: Callable[[], None],
        takers: Sequence[AddTokens],
    ) -> Sums:
        """Gives the losses of tokens to `takers`, and returns counts and statistics."""
        compute_losses = self._compute_losses
        master = {name: master[name] for name in self.spec.state_table}
        schedule = data.make_schedule(self.spec.config.rows_per_step, epochs=1)
        placement = self.spec.placement
        loader = data.make_loader(schedule, placement)
        sums: Sums = {}

        def fetch(dispatched: BatchLosses, counts: StepCounts) -> None:
            losses = jax.device_get(dispatched)
            tokens = token_losses.find_tokens(losses, counts, placement.layout)
            for take in takers:
                take(tokens)
            batch_sums = {name: _widen(value) for name, value in losses.sums.items()}
            sums.update(metric_table.add(batch_sums, sums) if sums else batch_sums)
            on_batch()

        running: tuple[BatchLosses, StepCounts] | None = None
        for batch, counts in loader.batches():
            following = compute_losses(master, batch), counts
            if running is not None:
                fetch(*running)
            running = following
        if running is not None:
            fetch(*running)
        return sums


def _sum_pairs(spec: StepSpec, documents: Documents, sums: DocumentSums) -> Sums:
    """Sums over the pairs of a whole data set, of which an objective may need all."""
    assert isinstance(spec.objective, PairObjective)
    num_pairs = len(documents.lengths) // 2
    references_D = documents.references
    if references_D is None:
        assert not spec.objective.needs_reference, "run/references.py computes them before"
        references_D = np.zeros_like(sums.losses_D)
    is_desirable_P = documents.is_desirable
    if is_desirable_P is None:
        is_desirable_P = np.zeros(num_pairs, bool)
    as_pairs = lambda values_D: jnp.asarray(values_D.reshape(-1, 2), jnp.float32)
    pairs = PairSums(
        logps_P2=as_pairs(-sums.losses_D),
        references_P2=as_pairs(references_D),
        counts_P2=as_pairs(sums.num_tokens_D),
        is_real_P=jnp.ones(num_pairs, bool),
        is_desirable_P=jnp.asarray(is_desirable_P),
        num_pairs=jnp.float32(num_pairs),
        num_first_tokens=jnp.float32(sums.num_tokens_D[::2].sum()),
    )
    measured = spec.objective.sum_metrics(pairs, spec.objective.compute_losses(pairs))
    counts = {"num_pairs": np.int64(num_pairs), "loss_weight": np.int64(num_pairs)}
    return jax.tree.map(lambda x: _widen(np.asarray(x)), measured) | counts


def _widen(sums: np.ndarray) -> np.ndarray:
    """Sums in 64 bits."""
    return sums.astype(np.int64 if np.issubdtype(sums.dtype, np.integer) else np.float64)
