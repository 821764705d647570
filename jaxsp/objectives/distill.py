"""Distillation: a student learns the predictions of a teacher that runs in the same step.

Definitions are those of TRL 1.16 (`GKDTrainer`, `DistillationTrainer`), over the vocabulary v that
both models have, with p the student's and q the teacher's softmax of logits / temperature:

    forward_kl  KL(q || p) = sum_v q (log q - log p)      TRL's beta = 0
    reverse_kl  KL(p || q) = sum_v p (log p - log q)      TRL's beta = 1
    jsd         beta KL(q || m) + (1 - beta) KL(p || m), with m = beta q + (1 - beta) p

The loss is not multiplied by temperature^2.
Source: GKD, arXiv:2306.13649, equation 1.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeGuard

import pydantic

from jaxsp.config import fields
from jaxsp.config.fields import (
    HERE,
    NonNegativeFloat,
    PositiveCount,
    PositiveFloat,
    with_examples,
)
from jaxsp.objectives.objective import Objective, TileTokens, TokenObjective


class Distill(TokenObjective):
    """Distillation: mean divergence from a teacher's predictions over the loss tokens.

    The teacher runs on the same rows, forward only. Its logits exist for one tile of tokens at a
    time, over the whole vocabulary.
    """

    type: Literal["distill"] = "distill"
    teacher: Annotated[str | None, with_examples("Qwen/Qwen3-32B", min_length=1)] = None
    """Folder or hub name of the teacher, with the same token ids as the model. null: the model
    without its adapter, for adapter.type lora and dora."""
    predictions: Annotated[str | None, with_examples("predictions/qwen3-32b", min_length=1)] = None
    """Folder of the teacher's predictions for the data, which `jaxsp score` writes; training then
    reads them instead of running the teacher. null: the teacher runs in every step."""
    top_k: PositiveCount = 64
    """Number of the likeliest tokens whose probabilities are in `predictions`, at most 256. All
    others together are one class of the divergence."""
    teacher_quantization: Literal["none", "int8", "nf4"] = "none"
    """Format of the teacher's weights: as adapter.quantization."""
    teacher_linear_dtype: Annotated[Literal["float8"] | None, with_examples("float8")] = None
    """float8: the teacher's matrices are multiplied in 8 bits: see model.linear_dtype."""
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """Divergence of a token's predictions. forward_kl: of the student's from the teacher's, KL of
    teacher and student. reverse_kl: KL of student and teacher. jsd: generalized Jensen-Shannon
    divergence."""
    beta: Annotated[float, with_examples(0.5, gt=0, lt=1, allow_inf_nan=False)] = 0.5
    """Weight of the teacher in the mixture of jsd."""
    temperature: Annotated[PositiveFloat, with_examples(1.0)] = 1.0
    """Divisor of both models' logits. The loss is not multiplied by its square."""
    sft_weight: Annotated[NonNegativeFloat, with_examples(0.5)] = 0.0
    """Factor of the cross entropy of the labels, which is added to the divergence."""

    _expand_home = pydantic.field_validator("teacher", "predictions")(fields.expand_home)

    def find_problems(self) -> Iterator[str]:
        if self.divergence != "jsd":
            reason = f"with {HERE}.divergence = {self.divergence}."
            yield from self._find_unused(["beta"], reason)
        if self.predictions is None:
            reason = f"without {HERE}.predictions: the whole vocabulary is used."
            yield from self._find_unused(["top_k"], reason)
        if self.top_k > 256:
            yield f"{self.show('top_k')}: must be at most 256. Use 256."
        if self.teacher is None:
            names = ("teacher_quantization", "teacher_linear_dtype", "predictions")
            reason = f"without {HERE}.teacher: the model itself is the teacher."
            yield from self._find_unused(names, reason)

    def losses(self, tokens: TileTokens) -> tuple[Any, dict[str, Any]]:
        import jax
        import jax.numpy as jnp

        from jaxsp.core.batch import PREDICTIONS

        student_XV = self._find_logps(tokens.logits_XV, tokens)
        if (stored := tokens.numbers.get(PREDICTIONS)) is not None:
            ids_XK, bits_XK = jnp.split(stored, [self.top_k], axis=-1)
            is_same_X = tokens.logits_XV.argmax(-1) == ids_XK[:, 0]
            student_XV = _select(student_XV, ids_XK)
            teacher_XV = jax.lax.bitcast_convert_type(bits_XK, jnp.float32)
        else:
            teacher_XV = self._find_logps(tokens.teacher_logits_XV, tokens)
            is_same_X = student_XV.argmax(-1) == teacher_XV.argmax(-1)
        if self.divergence == "forward_kl":
            divergences_X = _kl(teacher_XV, student_XV)
        elif self.divergence == "reverse_kl":
            divergences_X = _kl(student_XV, teacher_XV)
        else:
            own = jnp.log1p(-self.beta) + student_XV
            mixture_XV = jnp.logaddexp(own, jnp.log(self.beta) + teacher_XV)
            divergences_X = self.beta * _kl(teacher_XV, mixture_XV)
            divergences_X += (1 - self.beta) * _kl(student_XV, mixture_XV)
        losses_X = divergences_X
        if self.sft_weight:
            losses_X = losses_X - self.sft_weight * tokens.logps_X
        same_X = is_same_X.astype(jnp.float32)
        return losses_X, {"divergence": divergences_X, "teacher_agreement": same_X}

    def _find_logps(self, logits_XV: Any, tokens: TileTokens) -> Any:
        """Log-probabilities of the ids that both models have."""
        import jax

        return jax.nn.log_softmax(logits_XV[:, : tokens.vocab_size] / self.temperature)

    @property
    def predictions_width(self) -> int:
        """Number of values that are stored for each token: see `core.batch.PREDICTIONS`."""
        return 2 * self.top_k + 1

    def predict(self, tokens: TileTokens) -> dict[str, Any]:
        """Predictions to store, if the tokens have the logits of the teacher."""
        import jax
        import jax.numpy as jnp

        from jaxsp.core.batch import PREDICTIONS

        logps_XV = self._find_logps(tokens.logits_XV, tokens)
        _, ids_XK = jax.lax.top_k(logps_XV, self.top_k)
        bits_XK = jax.lax.bitcast_convert_type(_select(logps_XV, ids_XK), jnp.int32)
        return {PREDICTIONS: jnp.concatenate([ids_XK, bits_XK], axis=-1)}


def _select(logps_XV: Any, ids_XK: Any) -> Any:
    """Log-probabilities of some tokens and, as the last class, of all others together."""
    import jax
    import jax.numpy as jnp

    chosen_XK = jnp.take_along_axis(logps_XV, ids_XK, axis=-1)
    rows_X1 = jnp.arange(len(ids_XK))[:, None]
    # a mask of one byte for each logit, because XLA fuses it into the sum, unlike a copy of logits
    is_left_out_XV = jnp.zeros(logps_XV.shape, bool).at[rows_X1, ids_XK].set(True)
    lowest = jnp.finfo(jnp.float32).min  # -inf would make gradients NaN
    others_X = jax.nn.logsumexp(jnp.where(is_left_out_XV, lowest, logps_XV), axis=-1)
    return jnp.concatenate([chosen_XK, others_X[:, None]], axis=-1)


def find_teacher(objective: Objective) -> str | None:
    """Folder or hub name of the teacher that runs in a step; None without one that is another
    model."""
    return objective.teacher if has_teacher(objective) else None


def has_teacher(objective: Objective) -> TypeGuard[Distill]:
    """True if a teacher runs in a step."""
    return isinstance(objective, Distill) and objective.predictions is None


def _kl(logps_XV: Any, other_XV: Any) -> Any:
    """KL(first || second) of distributions that are given as log-probabilities.

    Terms of probability 0 are 0, also where the other log-probability is -inf.
    """
    import jax.numpy as jnp

    probabilities_XV = jnp.exp(logps_XV)
    is_possible_XV = probabilities_XV > 0
    safe_XV = jnp.where(is_possible_XV, logps_XV - other_XV, 0)
    return (probabilities_XV * safe_XV).sum(-1)
