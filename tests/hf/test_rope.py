"""Frequencies of every rope_type equal transformers'; fields of every type are checked."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxsp.blocks import rope as model_rope
from jaxsp.core.errors import UserError
from jaxsp.hf import model_config, rope
from tests import tolerances
from tests.messages import assert_names, assert_refused

pytest.importorskip("torch", reason="transformers computes with it (extra `test`)")
modeling_phi3 = pytest.importorskip(
    "transformers.models.phi3.modeling_phi3", reason="needs torch, as above"
)

HEAD_DIM = 64
LIST_32 = [1.0 + 0.5 * i for i in range(32)]
LIST_24 = [1.0 + i for i in range(24)]

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 32768}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 32}
LONGROPE |= {"long_factor": LIST_32, "original_max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

GROUPS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "default partial": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    "linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8},
    "linear partial": {
        **{"rope_type": "linear", "rope_theta": 1e4, "factor": 3.5},
        "partial_rotary_factor": 0.5,
    },
    "proportional": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
    "proportional, factor": {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "llama3": LLAMA3,
    "llama3.2": LLAMA3 | {"factor": 32.0},
    "llama3, low theta": LLAMA3 | {"rope_theta": 500.0, "original_max_position_embeddings": 64},
    "yarn": YARN,
    "yarn, factor of the range": YARN | {"factor": None},
    "yarn, factor 1": YARN | {"factor": 1.0},
    "yarn partial": YARN | {"partial_rotary_factor": 0.75, "factor": 3.2},
    "yarn, gpt-oss": YARN
    | {"rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    | {"truncate": False, "original_max_position_embeddings": 4096},
    "yarn, OLMo 3": YARN
    | {"attention_factor": 1.2079441541679836, "factor": 8.0, "rope_theta": 5e5},
    "yarn, Ministral 3": YARN
    | {"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    | {"original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0},
    "yarn, two mscales": YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn, one mscale": YARN | {"mscale": 0.5},
    "yarn, mscale 0": YARN | {"mscale": 0.7, "mscale_all_dim": 0.0},
    "yarn, wide ramp": YARN | {"beta_fast": 1000.0, "beta_slow": 0.001, "truncate": False},
    "yarn, ramp of one pair": YARN
    | {"beta_fast": 1e-3, "beta_slow": 9e-4, "original_max_position_embeddings": 8},
    "yarn, low theta": YARN | {"rope_theta": 100.0, "original_max_position_embeddings": 64},
    "longrope": LONGROPE,
    "longrope, factor": LONGROPE | {"factor": 32.0, "short_factor": LIST_32[::-1]},
    "longrope, attention factor": LONGROPE | {"attention_factor": 1.19},
    "longrope, no extension": LONGROPE | {"original_max_position_embeddings": 131072},
    "longrope partial": LONGROPE
    | {"short_factor": LIST_24, "long_factor": LIST_24[::-1], "partial_rotary_factor": 0.75},
}
MAX_POSITIONS = 131072


def parse(group, *, row_tokens=None, head_dim=HEAD_DIM, max_positions=MAX_POSITIONS):
    return rope.parse(
        group, head_dim=head_dim, max_position_embeddings=max_positions, row_tokens=row_tokens
    )


def of_transformers(group: dict[str, Any], row_tokens: int | None) -> tuple[np.ndarray, float]:
    config = transformers.LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=dict(group),
    )
    function = modeling_phi3.Phi3RotaryEmbedding.compute_default_rope_parameters
    if group["rope_type"] != "default":
        function = ROPE_INIT_FUNCTIONS[group["rope_type"]]
    frequencies, scale = function(config, device="cpu", seq_len=row_tokens)
    return frequencies.double().numpy(), scale


@pytest.mark.parametrize("row_tokens", [None, 4096, 100_000])
@pytest.mark.parametrize("name", GROUPS)
def test_frequencies_equal_those_of_transformers(name, row_tokens):
    actual = parse(GROUPS[name], row_tokens=row_tokens)
    frequencies, scale = of_transformers(GROUPS[name], row_tokens)
    assert actual.frequencies == pytest.approx(frequencies, rel=tolerances.FREQUENCIES, abs=0)
    assert actual.scale == pytest.approx(scale, rel=1e-12)


def test_every_type_is_compared():
    assert {group["rope_type"] for group in GROUPS.values()} == {*rope.TYPES}


def test_frequencies_are_computed_in_float64_without_other_roundings():
    plain = 5e5 ** (-np.arange(0, HEAD_DIM, 2, dtype=np.float64) / HEAD_DIM)
    assert parse(GROUPS["default"]).frequencies == tuple(plain.tolist())


def test_longrope_uses_long_factors_if_rows_are_longer_than_the_original_range():
    short = parse(LONGROPE, row_tokens=4096)
    long = parse(LONGROPE, row_tokens=4097)
    assert_names(short.description, "longrope", "short factors", "4,096")
    assert_names(long.description, "longrope", "long factors", "4,096")
    assert parse(LONGROPE) == short
    assert np.array(short.frequencies) / long.frequencies == pytest.approx(LIST_32)
    assert short.scale == long.scale == math.sqrt(1 + math.log(32) / math.log(4096))


@pytest.mark.parametrize("name", GROUPS)
def test_angles_of_every_type_are_exact_at_five_million(name):
    """Absolute error of scaled cosines and sines."""
    parsed = parse(GROUPS[name], row_tokens=100_000)
    positions = np.array([0, 4095, 4096, 131_071, 5_242_879])
    actual = jax.jit(lambda positions: _cos_and_sin(positions, parsed))(jnp.int32(positions[None]))
    angles = positions[:, None].astype(np.float64) * np.array(parsed.frequencies)
    for table, exact in zip(actual, (np.cos(angles), np.sin(angles)), strict=True):
        error = np.abs(np.asarray(table[0], np.float64) - parsed.scale * exact)
        assert error.max() < tolerances.ANGLES


def _cos_and_sin(positions, parsed):
    angles = model_rope.compute_angles(positions, (parsed,))
    return angles.cos, angles.sin


def test_dynamic_is_refused_where_it_depends_on_the_batch():
    group = GROUPS["dynamic"]
    assert parse(group, row_tokens=131_072).frequencies == parse(group).frequencies
    fields = transformers.LlamaConfig(
        max_position_embeddings=MAX_POSITIONS, rope_parameters=dict(group)
    ).to_dict()
    with pytest.raises(UserError) as raised:
        model_config.parse_model_config(fields, row_tokens=200_000)
    (problem,) = raised.value.problems
    start = ".rope_parameters.rope_type = dynamic: "
    assert_names(problem, "batch", "200,000", "131072", "yarn", "1.526", start=start)


SIZES = {"vocab_size": 131, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 56}
SIZES |= {"max_position_embeddings": 131072, "pad_token_id": None}
ALIKE = SIZES | {"model_type": "llama"}
LAYERED = SIZES | {"model_type": "gemma3_text"}
OLMO = SIZES | {"model_type": "olmo3", "head_dim": None}
PHI = SIZES | {"model_type": "phi3", "head_dim": None}
MINISTRAL = SIZES | {"model_type": "ministral3"}

LAYER_GROUPS = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}

PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Yarn-Llama-2": (
        {
            "rope_scaling": {"factor": 16.0, "finetuned": True, "type": "yarn"}
            | {"original_max_position_embeddings": 4096}
        },
        ALIKE,
    ),
    "Gemma 3": (
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
        | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        LAYERED,
    ),
    "Gemma 3, transformers 5": (LAYER_GROUPS, LAYERED),
    "OLMo 3": (
        {"rope_theta": 5e5, "rope_scaling": GROUPS["yarn, OLMo 3"] | {"rope_theta": 5e5}},
        OLMO,
    ),
    "Phi-3": (
        {
            "rope_theta": 1e4,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "su", "short_factor": LIST_32, "long_factor": LIST_32},
        },
        PHI,
    ),
    "Ministral 3": (
        {
            "rope_parameters": GROUPS["yarn, Ministral 3"]
            | {"type": "yarn", "llama_4_scaling_beta": 0.1}
        },
        MINISTRAL,
    ),
    "gpt-oss": ({"rope_theta": 150000.0, "rope_scaling": GROUPS["yarn, gpt-oss"]}, ALIKE),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_accepted(name):
    fields, family = PUBLISHED[name]
    model_config.parse_model_config(family | fields)


def scaling(group: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {**group, **changes}}


def layers(**group: Any) -> dict[str, Any]:
    return {"rope_parameters": {"full_attention": {**YARN, **group}}}


THEIRS = "transformers refuses it: "

REFUSED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    (LAYER_GROUPS | {"rope_local_base_freq": 5e3}, LAYERED, ".rope_local_base_freq = 5", "10000.0"),
    (LAYER_GROUPS | {"rope_theta": 5e3}, LAYERED, ".rope_theta = 5000.0: ", "1000000.0"),
    (
        LAYER_GROUPS | {"rope_scaling": {"type": "linear", "factor": 4.0}},
        LAYERED,
        ".rope_parameters.full_attention.factor = 8.0: ",
        "4.0",
    ),
    (scaling(YARN, llama_4_scaling_beta="a"), MINISTRAL, ".rope_parameters.llama_4_s", "number"),
    (scaling(YARN), MINISTRAL, ".rope_parameters.llama_4_scaling_beta: ", "missing"),
    ({"rope_parameters": {}}, MINISTRAL, ".rope_parameters.rope_type = default: ", "yarn"),
    (scaling(LLAMA3, rope_type="linear"), PHI, THEIRS, "longrope"),
    (scaling(LONGROPE, long_factor=None), PHI, THEIRS, "long_factor"),
    (scaling(LONGROPE, long_factor=[1.0] * 31 + [0]), PHI, ".rope_parameters.long_fact", "list"),
    (scaling(LONGROPE, short_factor=LIST_24), ALIKE, ".rope_parameters.short_factor: ", "32"),
    (scaling(LLAMA3, low_freq_factor=4), ALIKE, ".rope_parameters.low_freq_factor = 4", "4.0"),
    (scaling(LLAMA3, factor="x"), ALIKE, ".rope_parameters.factor = x", "from 1"),
    (scaling(LLAMA3, faktor=1), ALIKE, ".rope_parameters.faktor = 1", "Did you mean factor?"),
    (
        scaling({"rope_theta": 1e4}, partial_rotary_factor=0.3),
        PHI,
        ".rope_parameters.partial_rotary_factor = 0.3: ",
        "19 of 64",
    ),
    ({"partial_rotary_factor": 1.5}, PHI, ".partial_rotary_factor = 1.5: ", "1"),
    ({"partial_rotary_factor": 0.5}, ALIKE, ".partial_rotary_factor = 0.5", "Leave it out"),
    (
        scaling({"rope_type": "linear", "factor": 8.0}),
        LAYERED,
        ".rope_parameters.rope_type = linear: ",
        "does not read it",
    ),
    (
        {"rope_scaling": LAYER_GROUPS["rope_parameters"]},
        LAYERED,
        ".rope_scaling.full_attention = {",
        "is not implemented",
    ),
    ({"rope_local_base_freq": 1e4}, PHI, ".rope_local_base_freq = 10000.0: ", "Leave it out"),
    (
        {"rope_local_base_freq": "x"},
        LAYERED,
        ".rope_parameters.sliding_attention.rope_theta = x: ",
        "1",
    ),
    (
        {"original_max_position_embeddings": 4096},
        LAYERED,
        ".original_max_position_embeddings = 4096: ",
        "does not read it",
    ),
    (
        {"rope_parameters": {"full_attention": YARN, "chunked_attention": YARN}},
        LAYERED,
        ".rope_parameters.chunked_attention",
        "does not read it",
    ),
    (layers(factor=0), LAYERED, ".rope_parameters.full_attention.factor = 0: ", "1"),
    (layers(truncate=False), LAYERED, ".rope_parameters.full_attention.trunc", "transformers"),
    ({"rope_parameters": {"full_attention": 3}}, LAYERED, ".rope_parameters.full_att", "fields"),
    ({"rope_parameters": 3}, ALIKE, ".rope_parameters = 3", "fields"),
    ({"rope_theta": 2e4, "rope_scaling": YARN}, LAYERED, ".rope_theta = 20000.0: ", "1000000.0"),
]


@pytest.mark.parametrize(("fields", "family", "start", "part"), REFUSED)
def test_wrong_fields_are_refused_by_name(fields, family, start, part):
    with pytest.raises(UserError) as raised:
        model_config.parse_model_config(family | fields)
    assert_names(raised.value.problems[0], part, start=start)


def test_a_type_that_needs_the_models_range_needs_it_in_the_config():
    group = {name: YARN[name] for name in ("rope_type", "rope_theta", "factor")}
    fields = ALIKE | {"rope_parameters": group, "max_position_embeddings": None}
    with assert_refused("max_position_embeddings", start=".rope_parameters.rope_type = yarn: "):
        model_config.parse_model_config(fields)
