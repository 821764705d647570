"""Retrieval tasks: an answer is right if greedy decoding would write it, in rows of any length."""

import dataclasses

import numpy as np
import pytest

from jaxsp.evaluation.evaluator import Evaluator
from jaxsp.evaluation.retrieval import RetrievalEvaluator
from jaxsp.objectives.registry import OBJECTIVE
from jaxsp.tasks.task import Sample
from tests.evaluation import plain
from tests.evaluation.test_token_losses import ROW_TOKENS, make_spec
from tests.training import runs

LENGTHS = {"short": ROW_TOKENS // 4, "long": 2 * ROW_TOKENS - 20}
"""The second one needs longer rows than those of the step."""


def write_greedily(prompt, count):
    """The likeliest tokens after a prompt."""
    ids = [*prompt]
    for _ in range(count):
        ids.append(int(plain.compute_log_probs(ids)[-1].argmax()))
    return np.array(ids[len(prompt) :], np.int32)


def make_samples(length, depth):
    """Two right answers, and two with one wrong token: the last, and the first."""
    rng = np.random.default_rng(length + int(10 * depth))
    samples = []
    for wrong in (None, None, -1, 0):
        prompt = rng.integers(0, runs.MODEL.vocab_size, length - 3).astype(np.int32)
        answer = write_greedily(prompt, 3)
        if wrong is not None:
            answer[wrong] = (answer[wrong] + 1) % runs.MODEL.vocab_size
        samples.append(Sample(prompt_ids=prompt, answer_ids=answer, length=length, depth=depth))
    return samples


def sum_losses(samples):
    total = 0
    for sample in samples:
        ids = [*sample.prompt_ids, *sample.answer_ids]
        log_probs_LV = plain.compute_log_probs(ids)
        places = range(len(sample.prompt_ids) - 1, len(ids) - 1)
        total -= sum(log_probs_LV[place, ids[place + 1]] for place in places)
    return total


@pytest.mark.slow
def test_models_that_are_trained_on_pairs_answer_too():
    spec = make_spec()
    expected, actual = (
        [
            *RetrievalEvaluator(evaluator, {"multi_key": make_samples(40, 0.0)}).run(
                master, num_steps=0
            )
        ]
        for evaluator, master in (
            (Evaluator(changed, []), runs.put_weights(spec.table, plain.WEIGHTS, spec.mesh))
            for changed in (spec, with_objective(spec, "dpo"))
        )
    )
    assert actual == expected


def with_objective(spec, name):
    objective = OBJECTIVE.by_name()[name]()
    return spec.respec(objective=objective)


@pytest.mark.parametrize("sizes", [(1, 2, 4)])
def test_exact_answers_are_those_of_greedy_decoding(sizes):
    short = make_samples(LENGTHS["short"], 0.0) + make_samples(LENGTHS["short"], 1.0)[:2]
    long = [
        dataclasses.replace(sample, depth=None) for sample in make_samples(LENGTHS["long"], 0.5)
    ]
    spec = make_spec(sizes)
    evaluator = RetrievalEvaluator(Evaluator(spec, []), {"needle": short, "multi_key": long})
    master = runs.put_weights(spec.table, plain.WEIGHTS, spec.mesh)
    needle, multi_key = evaluator.run(master, num_steps=7)
    assert (needle["step"], needle["task"], needle["length"]) == (7, "needle", LENGTHS["short"])
    assert (needle["num_samples"], needle["num_answer_tokens"]) == (6, 18)
    assert needle["exact_rate"] == pytest.approx(4 / 6)
    assert needle["exact_rate_by_depth"] == {"0": 0.5, "1": 1.0}
    assert needle["answer_loss"] == pytest.approx(sum_losses(short) / 18, rel=1e-6)
    assert needle["answer_loss_by_depth"]["1"] == pytest.approx(sum_losses(short[4:]) / 6, rel=1e-6)
    assert (multi_key["exact_rate"], multi_key["exact_rate_by_depth"]) == (0.5, {})
    assert multi_key["answer_loss"] == pytest.approx(sum_losses(long) / 12, rel=1e-6)
