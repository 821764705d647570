"""The decoder: documents are isolated, attention is causal; parameter table; embedding gradient."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxsp.attention.attend import make_attend
from jaxsp.core import axes
from jaxsp.core.batch import NO_LABEL, SPECS, Batch
from jaxsp.model import decoder
from jaxsp.model.remat import RematPolicy
from tests import batches, unsharded

L = 48
MODEL = batches.model(vocab_size=400, hidden_size=32, intermediate_size=40)
UNSHARDED_GATHER = unsharded.UnshardedGather()

# Shards of 12 tokens at seq=4: boundaries inside a shard and at its end, a document in three
# shards, padding
SEGMENTS = [
    [(0, 7), (7, 5), (12, 33), (45, 3)],
    [(0, 12), (12, 12), (24, 7)],
    [(5, 28), (33, 1), (34, 14)],
]


pytestmark = pytest.mark.usefixtures("small_blocks")


def hidden_states(weights, batch, seq):
    attend = make_attend(seq=seq, kernel="blockwise")
    hidden, _ = decoder.hidden_states(
        weights,
        batch,
        config=MODEL,
        attend=attend,
        gather=UNSHARDED_GATHER,
        dtype=jnp.dtype("float32"),
        policy=RematPolicy(),
        tile_tokens=4096,
    )
    return hidden


@functools.cache
def weights():
    rng = np.random.default_rng(2)

    def draw(param):
        std = param.std or 0.1
        return jnp.float32(param.mean + std * rng.standard_normal(param.stacked_shape))

    return jax.tree.map(draw, decoder.param_table(MODEL))


@functools.cache
def compiled(seq):
    """A function of the batch's arrays, on `seq` devices.

    It returns the logits, and the embedding's gradient of the sum of token losses.
    """

    def local(weights, fields):
        batch = Batch(**dict(zip(SPECS, fields, strict=True)))

        def loss(weights):
            logits = jnp.einsum("BlD,VD->BlV", hidden_states(weights, batch, seq), weights["head"])
            labels = jax.nn.one_hot(batch.labels_BL, MODEL.vocab_size)  # all zeros at -100
            return -(jax.nn.log_softmax(logits) * labels).sum(), logits

        gradients, logits = jax.grad(loss, has_aux=True)(weights)
        return logits, jax.lax.psum(gradients["embedding"], axes.SEQ)

    shard = PartitionSpec(None, axes.SEQ)
    whole = PartitionSpec()
    on_mesh = jax.shard_map(
        local,
        mesh=batches.mesh(1, 1, seq),
        in_specs=(whole, (shard, shard, shard, whole, whole)),
        out_specs=(shard, whole),
        check_vma=False,
    )
    jitted = jax.jit(on_mesh)
    return lambda arrays: [
        np.asarray(x) for x in jitted(weights(), tuple(arrays[name] for name in SPECS))
    ]


def distinct_tokens():
    """A batch's arrays, and the segment of each token.

    No token occurs twice, so each row of the embedding's gradient belongs to one token's input.
    """
    arrays = batches.make_rows(SEGMENTS, num_tokens=L, vocab_size=MODEL.vocab_size, seed=0)
    tokens = np.arange(1, 1 + len(SEGMENTS) * L, dtype=np.int32).reshape(len(SEGMENTS), L)
    segment_BL = np.full(tokens.shape, -1)
    for row, row_segments in enumerate(SEGMENTS):
        for segment, (start, length) in enumerate(row_segments):
            segment_BL[row, start : start + length] = segment
    arrays["tokens_BL"] = np.where(segment_BL >= 0, tokens, 0).astype(np.int32)
    return arrays, segment_BL


@pytest.mark.parametrize("seq", [1, 4])
@pytest.mark.parametrize("changed", range(4))
def test_changing_a_document_leaves_the_others_bit_identical(changed, seq):
    """Same logits, and same gradients of their loss by their inputs; by the changed document, 0."""
    before, segment_BL = distinct_tokens()
    own = segment_BL == changed
    others = ~own & (segment_BL >= 0)
    before["labels_BL"] = np.where(own, NO_LABEL, before["labels_BL"])
    after = before | {"tokens_BL": np.where(own, before["tokens_BL"] + 200, before["tokens_BL"])}
    logits, gradient = compiled(seq)(before)
    new_logits, new_gradient = compiled(seq)(after)
    assert batches.is_bitwise_equal(new_logits[others], logits[others])
    assert (new_logits[own] != logits[own]).any(-1).all()
    other_tokens = before["tokens_BL"][others]
    assert batches.is_bitwise_equal(new_gradient[other_tokens], gradient[other_tokens])
    # A document of one token has no label.
    has_label = np.isin(other_tokens, before["tokens_BL"][before["labels_BL"] != NO_LABEL])
    assert (gradient[other_tokens[has_label]] != 0).any(-1).all()
    assert (gradient[before["tokens_BL"][own]] == 0).all()
    assert (new_gradient[after["tokens_BL"][own]] == 0).all()


@pytest.mark.parametrize("seq", [1, 4])
def test_a_loss_does_not_depend_on_later_tokens(seq):
    arrays = batches.make_rows([[(0, L)]] * 3, num_tokens=L, vocab_size=MODEL.vocab_size, seed=0)
    arrays["tokens_BL"] = np.arange(1, 1 + 3 * L, dtype=np.int32).reshape(3, L)
    arrays |= {name: np.pad(arrays[name], ((0, 0), (0, 3))) for name in ("starts_BM", "lengths_BM")}
    for t in (0, 11, 12, 13, 30, 46):
        labels = np.where(np.arange(L) <= t, arrays["labels_BL"], NO_LABEL).astype(np.int32)
        _, gradient = compiled(seq)(arrays | {"labels_BL": labels})
        token_gradient = gradient[arrays["tokens_BL"]]
        assert (token_gradient[:, t + 1 :] == 0).all()
        assert (token_gradient[:, : t + 1] != 0).any(-1).all()


def test_the_backward_pass_does_not_recompute_attention():
    """Only attention's forward pass computes a maximum."""
    arrays, _ = distinct_tokens()
    batch = Batch(**{name: jnp.asarray(array) for name, array in arrays.items()})
    loss = lambda weights: hidden_states(weights, batch, 1).sum()
    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(weights())
    names = [equation.primitive.name for equation in batches.equations(jaxpr)]
    assert names.count("reduce_max") == 1


def test_the_gradient_of_an_embedding_is_summed_in_float32():
    """In bfloat16, the sum of 39,643 ones is 256."""
    param = decoder.param_table(MODEL)["embedding"]
    tokens = jnp.int32(np.r_[np.full(39_643, 7), np.arange(5)])[None]
    gather = unsharded.UnshardedGather("bfloat16")

    embed = functools.partial(decoder.embed_tokens, gather, param, dtype=jnp.dtype("bfloat16"))

    @jax.jit
    def gradient(table):
        out, pull = jax.vjp(lambda table: embed(table, tokens, padding_id=None), table)
        return out, pull(jnp.ones_like(out))[0]

    table = weights()["embedding"]
    out, actual = gradient(table)
    assert out.dtype == jnp.bfloat16
    assert batches.is_bitwise_equal(out[0, -5:], table[:5].astype(jnp.bfloat16))
    expected = np.zeros(param.shape, np.float32)
    expected[:5] = 1
    expected[7] = 39_643
    assert batches.is_bitwise_equal(actual, expected)


LLAMA = {
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    *(
        f"model.layers.{{layer}}.{norm}.weight"
        for norm in ("input_layernorm", "post_attention_layernorm")
    ),
    *(f"model.layers.{{layer}}.self_attn.{x}_proj.weight" for x in "qkvo"),
    *(f"model.layers.{{layer}}.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
}


@pytest.mark.parametrize(
    ("field", "adds"),
    [
        ("qkv_bias", [f"self_attn.{x}_proj.bias" for x in "qkv"]),
        ("output_bias", ["self_attn.o_proj.bias"]),
        ("mlp_bias", [f"mlp.{x}_proj.bias" for x in ("gate", "up", "down")]),
        ("qk_norm", ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]),
        ("tie_embeddings", []),
    ],
)
def test_the_table_has_every_tensor_of_the_family_once(field, adds):
    off = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "tie_embeddings"), False)
    on = {"qk_norm": "head"} if field == "qk_norm" else {"qk_norm": "none", field: True}
    params = jax.tree.leaves(decoder.param_table(batches.model(**off | on)))
    names = [param.hf_name for param in params]
    missing = {"lm_head.weight"} if field == "tie_embeddings" else set()
    assert len(names) == len(set(names))
    assert set(names) == (LLAMA - missing) | {f"model.layers.{{layer}}.{name}" for name in adds}
    # Seeds of the random weights are computed from this.
    assert len({zlib.crc32(name.encode()) for name in names}) == len(names)
    assert {param.num_layers for param in params if "{layer}" in param.hf_name} == {2}
    assert {param.num_layers for param in params if "{layer}" not in param.hf_name} == {None}
