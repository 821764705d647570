"""Distillation: loss, gradients and counts on every mesh are those of torch and TRL.

Each mesh has a student, a teacher of another family or vocabulary, and a divergence.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsp.blocks.config import Lora
from jaxsp.core.errors import UserError
from jaxsp.hf import model_config
from jaxsp.model.adapter_config import AdapterConfig
from jaxsp.objectives.distill import Distill
from jaxsp.objectives.objective import TileTokens
from jaxsp.training import specs, step_gradients
from tests import batches, tolerances
from tests.hf import oracle
from tests.training import runs

ROW_TOKENS = 48
SEGMENTS = [
    [(0, 40), (40, 2), (42, 6)],
    [(0, 2), (2, 3), (5, 17), (22, 26)],
    [(0, 7), (7, 41)],
    [(6, 13), (19, 29)],
    [(0, 48)],
    [],
    [(1, 47)],
    [(0, 24), (24, 23)],
]
"""Start and length of each document, with padding between some of them."""
VOCABULARY = 131
ROWS = batches.make_rows(SEGMENTS, num_tokens=ROW_TOKENS, vocab_size=VOCABULARY - 5, seed=3)


class Case(NamedTuple):
    sizes: tuple[int, int, int]
    objective: dict[str, Any]
    teacher: str = "llama"
    more_tokens: int = 0
    """Tokens of the teacher beyond those of the student."""
    attention: dict[str, Any] = {}  # noqa: RUF012
    rows_per_microbatch: int = 1


CASES = {
    "2x4, a teacher with experts": Case((1, 2, 4), {}, "qwen3_moe"),
    "1x8, too many devices for the heads, a larger vocabulary": Case(
        (1, 1, 8), {"divergence": "reverse_kl", "temperature": 1.7}, "qwen2", more_tokens=9
    ),
    "8x1, a teacher with delta nets, a smaller vocabulary": Case(
        (1, 8, 1), {"divergence": "jsd", "beta": 0.3}, "qwen3_5", more_tokens=-5
    ),
    "1x3 ring, a teacher with windows": Case(
        (1, 1, 3), {"temperature": 0.7, "sft_weight": 0.4}, "gemma2", attention={"strategy": "ring"}
    ),
    "2x4 Ulysses of 2 x ring of 2": Case(
        (1, 2, 4),
        {"divergence": "jsd", "temperature": 2.0, "sft_weight": 1.5},
        "gpt_oss",
        attention={"strategy": "ring", "ulysses_degree": 2},
        rows_per_microbatch=2,
    ),
}


def make_fields(name: str, more_tokens: int = 0) -> dict[str, Any]:
    return oracle.MODELS[name] | {"vocab_size": VOCABULARY + more_tokens}


def make_spec(case: Case, student: Any, teacher: Any, **changes: Any) -> specs.StepSpec:
    base = runs.SGD.step.change(
        row_tokens=ROW_TOKENS,
        max_segments=4,
        rows_per_step=len(SEGMENTS),
        rows_per_microbatch=case.rows_per_microbatch,
        mesh=dict(zip(("replica", "data", "seq"), case.sizes, strict=True)),
        attention=case.attention,
    )
    objective = Distill(**{"teacher": "teacher"} | case.objective)
    config = dataclasses.replace(base, objective=objective, **changes)
    model = dataclasses.replace(student, teacher=teacher)
    return specs.make_spec(config, model, devices=jax.devices()[: int(np.prod(case.sizes))])


def distill_in_torch(student: Any, teacher: Any, objective: Distill) -> tuple[float, int, Any]:
    """Mean loss, number of loss tokens, and gradients of the student, in float64; each document in
    a row of its own."""
    gkd = pytest.importorskip("trl.experimental.gkd")
    torch = oracle.torch
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": objective.beta}[objective.divergence]
    total = torch.zeros((), dtype=torch.float64)
    num_tokens = 0
    for row, segments in enumerate(SEGMENTS):
        for start, length in segments:
            tokens = torch.from_numpy(
                ROWS["tokens_BL"][row, start : start + length].astype("int64")
            )
            if length < 2:
                continue
            logits = student(tokens[None]).logits[0, :-1]
            with torch.no_grad():
                teacher_logits = teacher(tokens[None]).logits[0, :-1]
            size = min(logits.shape[-1], teacher_logits.shape[-1])
            total = total + gkd.GKDTrainer.generalized_jsd_loss(
                logits[:, :size],
                teacher_logits[:, :size],
                beta=beta,
                temperature=objective.temperature,
                reduction="sum",
            )
            entropy = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum")
            total = total + objective.sft_weight * entropy
            num_tokens += length - 1
    mean = total / num_tokens
    mean.backward()
    return mean.item(), num_tokens, {n: x.grad for n, x in student.named_parameters()}


IN_DEFAULT_TIER = "1x8, too many devices for the heads, a larger vocabulary"


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x == IN_DEFAULT_TIER else pytest.mark.e2e) for x in CASES],
)
def test_loss_gradients_and_counts_are_those_of_torch_and_trl(name, small_shards):
    case = CASES[name]
    fields = make_fields("qwen3")
    teacher_fields = make_fields(case.teacher, case.more_tokens)
    models = [oracle.torch_model(each) for each in (fields, teacher_fields)]
    spec = make_spec(case, *map(model_config.parse_model_config, (fields, teacher_fields)))
    with oracle.float64():
        loss, num_loss_tokens, right = distill_in_torch(*map(oracle.widen, models), spec.objective)
    weights = oracle.stacked(oracle.named_weights(models[0]), spec.table)
    teacher = oracle.stacked(oracle.named_weights(models[1]), spec.teacher.table)
    master = runs.put_weights(spec.state_table, weights | {"teacher": teacher}, spec.mesh)
    run = runs.Run(
        spec,
        case.rows_per_microbatch,
        jax.jit(functools.partial(step_gradients.compute_gradients, spec)),
        None,
    )
    gradients, actual = run.gradients(master, run.rows(ROWS))
    assert batches.relative_error(actual["loss"], loss) < tolerances.TILES
    assert int(actual["num_loss_tokens"]) == num_loss_tokens
    assert jax.tree.leaves(gradients["teacher"]) == []
    own = run.unpad(spec.select_own(gradients))
    expected = batches.name_leaves(oracle.stacked(right, spec.table))
    differences = {key: batches.relative_error(own[key], expected[key]) for key in expected}
    assert max(differences.values()) < tolerances.MESH, differences


def test_a_model_with_an_adapter_learns_from_its_base_without_a_copy(small_shards):
    """Another model with the base's weights gives the same numbers. At first, with B = 0, there is
    nothing to learn."""
    plain = model_config.parse_model_config(make_fields("qwen2"))
    lora = Lora(rank=4, scale=2.0, targets=("self_attn.q_proj", "mlp.down_proj"))
    student = dataclasses.replace(plain, lora=lora)
    results = []
    for teacher in (None, "teacher"):
        case = Case((1, 1, 2), {"teacher": teacher})
        spec = make_spec(
            case,
            student,
            plain if teacher else None,
            adapter=AdapterConfig(type="lora"),
        )
        weights = runs.draw_weights(student)
        base = specs.select(spec.table, weights, lambda param: not param.is_adapter)
        copy = {"teacher": base} if teacher else {}
        master = runs.put_weights(spec.state_table, weights | copy, spec.mesh)
        compute = jax.jit(functools.partial(step_gradients.compute_gradients, spec))
        run = runs.Run(spec, 1, compute, None)
        gradients, actual = run.gradients(master, run.rows(ROWS))
        results.append((actual["loss"], run.unpad(spec.select_own(gradients))))
        new = jax.tree.map(
            lambda param, weight: weight * 0 if param.hf_name.endswith("lora_B.weight") else weight,
            spec.state_table,
            master,
        )
        assert float(compute(new, run.rows(ROWS))[1]["loss"]) == pytest.approx(0, abs=1e-7)
    (own_loss, own), (loss, expected) = results
    assert float(own_loss) > 1e-5
    assert batches.relative_error(own_loss, loss) < tolerances.MESH
    for name, gradient in expected.items():
        assert batches.relative_error(own[name], gradient) < tolerances.MESH, name


@pytest.mark.parametrize(
    ("case", "adapter", "problem"),
    [
        (Case((1, 1, 1), {"teacher": None}), {}, "adapter.type is none"),
        (
            Case((1, 1, 1), {"teacher": None}),
            {"type": "lora", "modules_to_save": ("lm_head",)},
            "adapter.modules_to_save",
        ),
        # Ulysses of the student keeps the order of tokens, and a ring of its teacher does not
        (
            Case((1, 1, 4), {}, attention={"strategy": "ulysses"}),
            {},
            r"objective\.teacher = teacher: .*mesh\.seq = 4",
        ),
    ],
)
def test_an_impossible_teacher_is_refused(case, adapter, problem):
    teacher = batches.model(num_heads=3, num_kv_heads=3) if case.attention else None
    with pytest.raises(UserError, match=problem):
        make_spec(case, runs.MODEL, teacher, adapter=AdapterConfig(**adapter))


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_probabilities_of_0_give_finite_losses_and_gradients(divergence):
    tokens = TileTokens(
        logits_XV=jnp.array([[0.0, -1e9, 300.0], [0.0, 1.0, -300.0]]),
        labels_X=jnp.zeros(2, jnp.int32),
        teacher_logits_XV=jnp.array([[0.0, -1e9, -300.0], [0.0, 1.0, 300.0]]),
    )
    objective = Distill(teacher="x", divergence=divergence)
    compute = lambda x: objective.losses(dataclasses.replace(tokens, logits_XV=x))[0].sum()
    value, gradient = jax.value_and_grad(compute)(tokens.logits_XV)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


STORED = {"predictions": "predictions", "top_k": 29}


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_stored_predictions_have_the_classes_of_a_smaller_vocabulary(divergence):
    """All tokens of the teacher but one, and the class of all others, which is that one."""
    rng = np.random.default_rng(4)
    student_XV, teacher_XV = (jnp.asarray(rng.normal(size=(3, n)), jnp.float32) for n in (40, 30))
    objective = Distill(teacher="x", divergence=divergence, temperature=1.4, **STORED)
    tokens = TileTokens(
        logits_XV=student_XV,
        labels_X=jnp.zeros(3, jnp.int32),
        vocab_size=30,
        teacher_logits_XV=teacher_XV,
    )
    logps_XV = jax.nn.log_softmax(teacher_XV / 1.4)
    order_XV = jnp.argsort(-logps_XV, axis=-1)
    bits_XV = jnp.take_along_axis(logps_XV, order_XV, axis=-1).view(jnp.int32)
    predictions = jnp.concatenate([order_XV[:, :-1], bits_XV], axis=-1)
    numbers = {"predictions": predictions}
    stored = dataclasses.replace(tokens, teacher_logits_XV=None, numbers=numbers)
    expected, actual = (objective.losses(each)[0] for each in (tokens, stored))
    assert batches.relative_error(actual, expected) < tolerances.TILES
    made = objective.predict(dataclasses.replace(tokens, logits_XV=teacher_XV))["predictions"]
    assert (made[:, :29] == order_XV[:, :-1]).all()
    assert batches.relative_error(made[:, 29:].view(jnp.float32), bits_XV.view(jnp.float32)) < 1e-6


@pytest.mark.parametrize(("heads", "teacher_heads", "seq"), [(4, 6, 8), (4, 3, 4), (8, 8, 8)])
def test_auto_finds_a_strategy_for_both_models(heads, teacher_heads, seq):
    student = batches.model(num_heads=heads, num_kv_heads=heads)
    teacher = batches.model(num_heads=teacher_heads, num_kv_heads=teacher_heads)
    spec = make_spec(Case((1, 1, seq), {}), student, teacher)
    assert spec.attention.strategy.layout == spec.teacher.attention.strategy.layout
    assert spec.attention.strategy.seq == seq
