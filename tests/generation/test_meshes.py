"""Logits of prefill and decoding are those of the whole text at once, on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.blocks.config import Lora
from jaxsp.core.batch import Batch
from jaxsp.generation.generator import Generator, Sampling
from jaxsp.hf import model_config
from jaxsp.model import decoder
from jaxsp.model.remat import RematPolicy
from jaxsp.sharding.sharding import Gather
from jaxsp.system import device_memory
from tests import batches, tolerances, unsharded
from tests.generation import models
from tests.training import runs
from tests.training.mixed import MIXED

MESHES = {
    "1x1": ((1, 1, 1), {}),
    "2x4 Ulysses": ((1, 2, 4), {"strategy": "ulysses"}),
    "1x8 ring": ((1, 1, 8), {"strategy": "ring", "ulysses_degree": 1}),
    "2x2x2 all-gather": ((2, 2, 2), {"strategy": "all_gather", "ulysses_degree": 1}),
}

PROMPTS = models.draw_texts([3, 33, 64 - 9, 2, 17], MIXED.vocab_size)
ANSWERS = models.draw_texts([9] * len(PROMPTS), MIXED.vocab_size)
"""Longer than the number of devices of a group, so that slots of all of them are used."""

TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")

HYBRID = model_config.parse_model_config(
    batches.UNEVEN_HYBRID | {"hidden_size": 20, "intermediate_size": 30}
)


@functools.cache
def expect_logits(model):
    """Logits after each token of the answers except the last, from a forward pass of the texts in a
    program without a mesh."""
    rows = batches.make_rows(
        [[(0, len(prompt) + len(answer))] for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)],
        num_tokens=models.ROW_TOKENS,
        vocab_size=2,
        seed=0,
    )
    for row, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        rows["tokens_BL"][row, : len(prompt) + len(answer)] = prompt + answer

    @jax.jit
    def run(weights, batch):
        hidden, _ = decoder.hidden_states(
            weights,
            batch,
            config=model,
            attend=runs.make_oracle_attend(model),
            gather=unsharded.UnshardedGather(),
            dtype=jnp.dtype("float32"),
            policy=RematPolicy(),
            tile_tokens=4096,
        )
        return decoder.transform_logits(model, hidden @ decoder.lm_head(weights).T)

    logits = run(runs.draw_weights(model), Batch(**jax.tree.map(jnp.asarray, rows)))
    return [
        np.asarray(logits[row, len(prompt) - 1 : len(prompt) + len(answer) - 1])
        for row, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True))
    ]


def check_logits(model, mesh):
    sizes, fields = MESHES[mesh]
    spec = models.make_spec(model, sizes, **fields)
    master = runs.put_weights(spec.table, runs.draw_weights(model), spec.mesh)
    actual = models.compute_logits(Generator(spec), master, PROMPTS, ANSWERS)
    errors = [
        batches.relative_error(a, b) for a, b in zip(actual, expect_logits(model), strict=True)
    ]
    assert max(errors) < tolerances.MESH, errors


@pytest.mark.parametrize(
    "mesh",
    [pytest.param(mesh, marks=[] if mesh == "2x4 Ulysses" else pytest.mark.e2e) for mesh in MESHES],
)
def test_logits_of_each_token_are_those_of_the_whole_text(mesh):
    check_logits(MIXED, mesh)


@pytest.mark.e2e
def test_delta_nets_too():
    check_logits(HYBRID, "1x8 ring")


@pytest.mark.usefixtures("small_shards")
def test_adapters_of_a_quantized_model_answer_token_by_token_as_at_once():
    adapter = {"type": "lora", "rank": 4, "quantization": "nf4"}
    model = batches.model(hidden_size=64, lora=Lora(rank=4, scale=2.0, targets=TARGETS))
    spec = models.make_spec(model, (2, 2, 2), adapter=adapter)
    master = runs.put_weights(spec.table, runs.draw_weights(model), spec.mesh)
    generator = Generator(spec)
    prompt = PROMPTS[0]
    answer = ANSWERS[0]
    (steps,) = models.compute_logits(generator, master, [prompt], [answer])
    (last,) = models.compute_logits(generator, master, [prompt + answer[:-1]], [answer[-1:]])
    assert batches.relative_error(steps[-1:], last) < tolerances.MESH


@pytest.mark.slow
@pytest.mark.usefixtures("small_shards")
def test_weights_that_are_cast_or_gathered_once_give_the_same_bits(monkeypatch):
    spec = models.make_spec(HYBRID, (1, 2, 1), compute_dtype="bfloat16")
    master = runs.put_weights(spec.table, runs.draw_weights(HYBRID), spec.mesh)
    generator = Generator(spec)
    weights = spec.gather.cast_once(spec.table, master)
    for value, cast in zip(*map(jax.tree.leaves, (master, weights)), strict=True):
        assert cast.sharding.is_equivalent_to(value.sharding, value.ndim)
        assert cast is value if cast.dtype == jnp.float32 else cast.dtype == jnp.bfloat16
    assert {cast.dtype.name for cast in jax.tree.leaves(weights)} == {"float32", "bfloat16"}
    prompts = PROMPTS[:1]
    answers = [ANSWERS[0][:2]]
    whole = spec.gather.gather_once(spec.table, master, spec.mesh)
    for param, value in zip(*map(jax.tree.leaves, (spec.table, whole)), strict=True):
        assert value.shape == param.stacked_shape
        assert value.is_fully_replicated
    assert spec.gather.whole_bytes(spec.table) >= sum(x.nbytes for x in jax.tree.leaves(whole))
    compute = functools.partial(models.compute_logits, generator, prompts=prompts, answers=answers)
    (logits,) = compute(master)
    np.testing.assert_array_equal(compute(weights)[0], logits)
    np.testing.assert_array_equal(compute(whole, gather=spec.gather.for_whole())[0], logits)


@pytest.mark.slow
@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(("free", "is_whole"), [(2.0, True), (1.9, False)])
def test_weights_are_whole_where_they_fit_into_half_of_the_free_memory(monkeypatch, free, is_whole):
    spec = models.make_spec(MIXED, (1, 2, 1), compute_dtype="bfloat16")
    master = runs.put_weights(spec.table, runs.draw_weights(MIXED), spec.mesh)
    free_bytes = free * spec.gather.whole_bytes(spec.table)
    monkeypatch.setattr(device_memory, "find_free_bytes", lambda devices: free_bytes)
    other = "cast_once" if is_whole else "gather_once"
    monkeypatch.setattr(Gather, other, lambda *_: pytest.fail("the other form of the weights"))
    answers = Generator(spec).generate(master, PROMPTS[:1], max_new_tokens=9)
    monkeypatch.undo()
    assert answers == make_generator(compute_dtype="bfloat16")(PROMPTS[:1], max_new_tokens=9)


def make_generator(sizes=(1, 1, 1), row_tokens=models.ROW_TOKENS, **fields):
    spec = models.make_spec(MIXED, sizes, row_tokens, **fields)
    master = runs.put_weights(spec.table, runs.draw_weights(MIXED), spec.mesh)
    return functools.partial(Generator(spec).generate, master)


@pytest.mark.e2e
def test_samples_do_not_depend_on_the_mesh_and_stop_at_stop_tokens(monkeypatch):
    monkeypatch.setattr(device_memory, "find_free_bytes", lambda devices: 2**40)
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=5)
    generate = make_generator()
    prompts = PROMPTS[:3]
    expected = generate(prompts, max_new_tokens=9, sampling=sampling)
    assert [len(answer) for answer in expected] == [9] * 3
    on_mesh = make_generator((1, 2, 4))
    assert on_mesh(prompts, max_new_tokens=9, sampling=sampling) == expected
    stop = expected[1][4]
    seen = [[] for _ in prompts]
    stopped = on_mesh(
        prompts,
        max_new_tokens=9,
        sampling=sampling,
        stop_ids=[stop],
        on_token=lambda number, token: seen[number].append(token),
    )
    assert seen == stopped
    for answer, whole in zip(stopped, expected, strict=True):
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert answer == whole[:end]
    assert len(stopped[1]) <= 5
    same, another = generate(prompts[:1] * 2, max_new_tokens=9, sampling=sampling)
    assert same == expected[0] != another, "equal prompts have different samples"
    other = Sampling(temperature=0.9, top_p=0.95, seed=6)
    assert generate(prompts, max_new_tokens=9, sampling=other) != expected


def test_answers_do_not_depend_on_the_other_prompts():
    generate = make_generator(row_tokens=512)
    prompts = models.draw_texts([3, 200, 129, 40], MIXED.vocab_size)
    together = generate(prompts, max_new_tokens=5)
    assert together == [
        *generate(prompts[:3], max_new_tokens=5),
        *generate(prompts[3:], max_new_tokens=5),
    ]
    assert len(set(map(tuple, together))) == len(prompts)
