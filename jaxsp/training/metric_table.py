"""Metrics of a step and of an eval set, and how each is made from sums.

To add a metric, add its sum where it is computed, for example in `loss._sum_tile`, and its row
to METRICS. It is then among the results of the step, in metrics.jsonl and eval.jsonl, in the
trackers and the report; `python -m scripts.config_reference` documents it.
"""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Sums = dict[str, Any]
"""Sums over a step or an eval set, by name: arrays on devices, or numbers on the host."""

Line = dict[str, Any]
"""A line of metrics.jsonl or eval.jsonl."""


class Metric(NamedTuple):
    """A number that is made from sums."""

    meaning: str
    compute: Callable[[Sums], Any]
    """Arithmetic on sums, in float32 on devices and in float64 on the host."""
    needs: str
    """Name of a sum without which there is no such number."""
    counted: str = "num_loss_tokens"
    """Name of the count that the number is a mean over; without one it is undefined."""


def make_divisor(total: Any) -> Any:
    """Sum to divide by: 1 in place of 0; float32 on devices."""
    if isinstance(total, jax.Array):
        return jnp.where(total > 0, total, 1).astype(jnp.float32)
    return np.where(total > 0, total, 1)


def divide(numerator: Any, denominator: Any) -> Any:
    """Quotient of two sums; 0 if both are 0."""
    if isinstance(numerator, jax.Array):
        numerator = numerator.astype(jnp.float32)
    return numerator / make_divisor(denominator)


def _means(counted: str, **meanings: str) -> dict[str, Metric]:
    """Metrics that are means over what `counted` counts."""

    def make(name: str, meaning: str) -> Metric:
        compute = lambda sums: divide(sums[f"{name}_sum"], sums[counted])
        return Metric(meaning, compute, needs=f"{name}_sum", counted=counted)

    return {name: make(name, meaning) for name, meaning in meanings.items()}


def _counts(**meanings: str) -> dict[str, Metric]:
    """Metrics that are sums themselves."""
    return {
        name: Metric(meaning, operator.itemgetter(name), needs=name)
        for name, meaning in meanings.items()
    }


METRICS = {
    "loss": Metric(
        "Sum of the losses of all tokens, divided by the loss tokens of the step (not a mean of "
        "means over rows or devices); with an objective of pairs, the mean over all pairs; with "
        "some of policy, divided by the trajectories. null if there are none or the loss is not "
        "finite.",
        lambda sums: divide(sums["loss_sum"], sums["loss_weight"]),
        needs="loss_sum",
    ),
    "token_accuracy": Metric(
        "Fraction of loss tokens whose top-1 prediction is correct. null if there are no loss "
        "tokens or the step is not finite. Reward models do not have it.",
        lambda sums: divide(sums["num_correct"], sums["num_loss_tokens"]),
        needs="num_correct",
    ),
    **_means(
        "num_loss_tokens",
        cross_entropy="Mean cross entropy of the loss tokens, if the objective has another loss "
        "for them.",
        divergence="Mean divergence from the teacher's predictions, without the term of "
        "sft_weight. Of the objective distill, like teacher_agreement.",
        teacher_agreement="Fraction of loss tokens for which model and teacher have the same "
        "top-1 prediction.",
    ),
    **_counts(
        num_rows="Number of rows with at least one segment.",
        num_tokens="Number of tokens in all segments, each counted once over the whole mesh, "
        "whether or not it has a loss.",
        num_loss_tokens="Number of tokens whose next token is a target. A document of n tokens "
        "has at most n - 1, however it is cut.",
        num_pairs="Number of pairs of chosen and rejected, or of unpaired records. Only objectives "
        "of preferences have metrics of pairs.",
    ),
    "reward_accuracy": Metric(
        "Fraction of pairs whose chosen answer has the higher reward. Rewards are those of the "
        "objective: beta times the log-ratio of the answer's probabilities by the trained and the "
        "reference model; for simpo and orpo beta times the mean log-probability of a token; for "
        "reward the score. Rewards that differ by rounding only are equal, as before step 1.",
        lambda sums: divide(sums["num_pairs_right"], sums["num_pairs"]),
        needs="num_pairs_right",
    ),
    "reward_margin": Metric(
        "chosen_reward minus rejected_reward.",
        lambda sums: (
            divide(sums["chosen_reward_sum"], sums["num_chosen"])
            - divide(sums["rejected_reward_sum"], sums["num_rejected"])
        ),
        needs="num_chosen",
        counted="num_both",
    ),
    **_means(
        "num_chosen",
        chosen_reward="Mean reward of chosen answers, or of desirable ones.",
        chosen_logp="Mean log-probability of chosen answers, or of desirable ones: the sum over an "
        "answer's tokens. For reward the score.",
    ),
    **_means(
        "num_rejected",
        rejected_reward="Mean reward of rejected answers, or of undesirable ones.",
        rejected_logp="Mean log-probability of rejected answers, or of undesirable ones. For "
        "reward the score.",
    ),
    "kl": Metric(
        "Reference point of kto: mean log-ratio of mismatched answers over the step, at least 0.",
        lambda sums: divide(sums["kl_sum"], sums["num_pairs"]),
        needs="kl_sum",
    ),
    **_counts(
        num_trajectories="Number of trajectories. It and the next five are metrics of the "
        "objective policy.",
    ),
    **_means(
        "num_loss_tokens",
        ratio="Mean ratio of a loss token's probabilities by the model and by the one that sampled "
        "it; with importance_sampling_level sequence, of its trajectory.",
        clip_low="Fraction of loss tokens with a negative advantage and a ratio below the lower "
        "bound.",
        clip_high="Fraction of loss tokens with a positive advantage and a ratio above the upper "
        "bound.",
        reference_kl="Mean KL divergence from the reference model, as in the loss, before beta.",
        entropy="Mean entropy of the predictions at loss tokens, at the objective's temperature.",
    ),
    "router_max_load": Metric(
        "Tokens of the busiest expert relative to the mean over experts, in the layer where that "
        "is most. 1: all experts have equally many. Metrics of routers are those of models with "
        "experts; other models do not have these fields. They are null if there are no rows or the "
        "step is not finite.",
        lambda sums: (
            (counts_NE := sums["router_counts_NE"]).shape[-1]
            * divide(counts_NE.max(-1), counts_NE.sum(-1)).max()
        ),
        needs="router_counts_NE",
        counted="num_rows",
    ),
    **_means(
        "num_rows",
        router_entropy="Mean entropy of the softmax of routers' logits over tokens and layers, "
        "divided by that of equal logits: from 0, always the same expert, to 1.",
        router_aux_loss="Load-balancing loss of the routers, before model.router_aux_loss_coef: "
        "mean over rows. With equal loads it is the number of experts of a token.",
        router_z_loss="Mean squared log-sum-exp of the routers' logits, before "
        "model.router_z_loss_coef: mean over rows.",
    ),
}
"""Metrics by name. Each is a field of every line of metrics.jsonl and eval.jsonl, if the model has
its sums."""


def compute_metrics(sums: Sums) -> dict[str, Any]:
    """Value of each metric."""
    return {name: metric.compute(sums) for name, metric in METRICS.items() if metric.needs in sums}


def make_line(
    fields: "DataclassInstance", values: dict[str, Any], *, is_finite: bool = True
) -> Line:
    """Line with the metrics among `values` and with other fields, `step` first.

    Args:
        values: metrics, and the sums that they are made from.
        is_finite: False for a step that was skipped: of its means only the loss is defined.
    """
    line = {"step": vars(fields)["step"]}
    for name in filter(values.__contains__, METRICS):
        number = np.asarray(values[name]).item()
        has_mean = values[METRICS[name].counted] > 0 and (is_finite or name == "loss")
        is_defined = isinstance(number, int) or (has_mean and math.isfinite(number))
        line[name] = number if is_defined else None
    return line | dataclasses.asdict(fields)


def add(sums: Sums, others: Sums) -> Sums:
    """Adds sums over two parts."""
    return {name: jax.tree.map(operator.add, value, others[name]) for name, value in sums.items()}


def make_zeros(compute_sums: Callable[[Any], Sums], inputs: Any) -> Sums:
    """Zeros of the sums that `compute_sums` makes of each element of the stacked `inputs`."""
    element = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), inputs)
    shapes = jax.eval_shape(compute_sums, element)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def scan_sums(compute_sums: Callable[[Any], tuple[Sums, Any]], inputs: Any) -> tuple[Sums, Any]:
    """Adds the sums of each element of the stacked `inputs`, and stacks the second results."""

    def add_element(sums: Sums, element: Any) -> tuple[Sums, Any]:
        element_sums, output = compute_sums(element)
        return add(sums, element_sums), output

    zeros = make_zeros(lambda element: compute_sums(element)[0], inputs)
    return jax.lax.scan(add_element, zeros, inputs)
