"""The decoder: documents know nothing of each other, tokens nothing of later ones; its table; its embedding's gradient."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxsp import attention
from jaxsp.attention.kernels import blockwise_rows
from jaxsp.core import axes
from jaxsp.core.batch import NO_LABEL, SPECS, Batch
from jaxsp.model import decoder
from jaxsp.model.remat import RematPolicy
from tests import batches, whole

L = 48
MODEL = batches.model(vocab_size=400, hidden_size=32, intermediate_size=40)
WHOLE = whole.Whole()

# Shares of 12 tokens at seq=4: boundaries inside a share and on its edge, a document over three shares, padding
PIECES = [
    [(0, 7), (7, 5), (12, 33), (45, 3)],
    [(0, 12), (12, 12), (24, 7)],
    [(5, 28), (33, 1), (34, 14)],
]


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise_rows, "BLOCK_TOKENS", 8)
        yield


def hidden_states(weights, rows, seq):
    attend = attention.make_attend(seq=seq, kernel="blockwise", window=None)
    return decoder.hidden_states(
        weights,
        rows,
        config=MODEL,
        attend=attend,
        gather=WHOLE,
        dtype=jnp.dtype("float32"),
        policy=RematPolicy(),
        tile_tokens=4096,
    )


@functools.cache
def weights():
    rng = np.random.default_rng(2)
    draw = lambda row: row.mean + (row.std or 0.1) * rng.standard_normal(row.stacked_shape)
    return jax.tree.map(lambda row: jnp.float32(draw(row)), decoder.param_table(MODEL))


@functools.cache
def compiled(seq):
    """Logits, and the gradient of the sum of token losses towards the embedding, on `seq` devices."""

    def local(weights, rows):
        def loss(weights):
            logits = jnp.einsum("BlD,VD->BlV", hidden_states(weights, rows, seq), weights["head"])
            chosen = jax.nn.one_hot(rows.labels_BL, MODEL.vocab_size)  # all zeros at -100
            return -(jax.nn.log_softmax(logits) * chosen).sum(), logits

        gradients, logits = jax.grad(loss, has_aux=True)(weights)
        return logits, jax.lax.psum(gradients["embedding"], axes.SEQ)

    share, same = PartitionSpec(None, axes.SEQ), PartitionSpec()
    split = Batch
    in_specs = (same, (share, share, share, same, same))
    rebuilt = lambda weights, fields: local(weights, split(**dict(zip(SPECS, fields, strict=True))))
    on_mesh = jax.shard_map(
        rebuilt,
        mesh=batches.mesh(1, 1, seq),
        in_specs=in_specs,
        out_specs=(share, same),
        check_vma=False,
    )
    jitted = jax.jit(on_mesh)
    return lambda arrays: [
        np.asarray(x) for x in jitted(weights(), tuple(arrays[name] for name in SPECS))
    ]


def rows():
    """Every token has a number of its own, so that the embedding's gradient is that of each token's input; and its piece."""
    arrays = batches.packed(PIECES, num_tokens=L, vocab_size=MODEL.vocab_size, seed=0)
    tokens = np.arange(1, 1 + len(PIECES) * L, dtype=np.int32).reshape(len(PIECES), L)
    piece = np.full(tokens.shape, -1)
    for row, places in enumerate(PIECES):
        for m, (start, length) in enumerate(places):
            piece[row, start : start + length] = m
    arrays["tokens_BL"] = np.where(piece >= 0, tokens, 0).astype(np.int32)
    return arrays, piece


@pytest.mark.parametrize("seq", [1, 4])
@pytest.mark.parametrize("changed", range(4))
def test_changing_a_document_leaves_the_others_bit_identical(changed, seq):
    """Their logits and the gradients of their loss to their own inputs; towards the changed document they are zero."""
    before, piece = rows()
    others, own = (piece != changed) & (piece >= 0), piece == changed
    before["labels_BL"] = np.where(own, NO_LABEL, before["labels_BL"])
    after = before | {"tokens_BL": np.where(own, before["tokens_BL"] + 200, before["tokens_BL"])}
    (logits, gradient), (new_logits, new_gradient) = compiled(seq)(before), compiled(seq)(after)
    assert batches.same_bits(new_logits[others], logits[others])
    assert (new_logits[own] != logits[own]).any(-1).all()
    to_others = before["tokens_BL"][others]
    assert batches.same_bits(new_gradient[to_others], gradient[to_others])
    # a document of one token has no label
    learned = np.isin(to_others, before["tokens_BL"][before["labels_BL"] != NO_LABEL])
    assert (gradient[to_others[learned]] != 0).any(-1).all()
    assert (gradient[before["tokens_BL"][own]] == 0).all()
    assert (new_gradient[after["tokens_BL"][own]] == 0).all()


@pytest.mark.parametrize("seq", [1, 4])
def test_a_loss_does_not_depend_on_later_tokens(seq):
    arrays = batches.packed([[(0, L)]] * 3, num_tokens=L, vocab_size=MODEL.vocab_size, seed=0)
    arrays["tokens_BL"] = np.arange(1, 1 + 3 * L, dtype=np.int32).reshape(3, L)
    arrays |= {name: np.pad(arrays[name], ((0, 0), (0, 3))) for name in ("starts_BM", "lengths_BM")}
    for t in (0, 11, 12, 13, 30, 46):
        upto = np.where(np.arange(L) <= t, arrays["labels_BL"], NO_LABEL).astype(np.int32)
        _, gradient = compiled(seq)(arrays | {"labels_BL": upto})
        of_token = gradient[arrays["tokens_BL"]]
        assert (of_token[:, t + 1 :] == 0).all()
        assert (of_token[:, : t + 1] != 0).any(-1).all()


def test_attention_is_not_computed_again_in_the_backward_pass():
    """Only attention's forward pass looks for a maximum."""
    arrays, _ = rows()
    whole = Batch(**{name: jnp.asarray(array) for name, array in arrays.items()})
    jaxpr = jax.make_jaxpr(
        jax.value_and_grad(lambda weights: hidden_states(weights, whole, 1).sum())
    )(weights())
    assert (
        sum(equation.primitive.name == "reduce_max" for equation in batches.equations(jaxpr)) == 1
    )


def test_the_gradient_of_an_embedding_is_summed_in_float32():
    """In bfloat16, 1 added 39,643 times gives 256."""
    row = decoder.param_table(MODEL)["embedding"]
    tokens = jnp.int32(np.r_[np.full(39_643, 7), np.arange(5)])[None]
    gather = whole.Whole("bfloat16")

    @jax.jit
    def gradient(table):
        out, pull = jax.vjp(
            lambda table: decoder.embed_tokens(gather, row, table, tokens, jnp.dtype("bfloat16")),
            table,
        )
        return out, pull(jnp.ones_like(out))[0]

    table = weights()["embedding"]
    out, found = gradient(table)
    assert out.dtype == jnp.bfloat16
    assert batches.same_bits(out[0, -5:], table[:5].astype(jnp.bfloat16))
    right = np.zeros(row.shape, np.float32)
    right[:5], right[7] = 1, 39_643
    assert batches.same_bits(found, right)


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
    off = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "qk_norm", "tie_embeddings"), False)
    found = jax.tree.leaves(decoder.param_table(batches.model(**off | {field: True})))
    names = [row.hf_name for row in found]
    missing = {"lm_head.weight"} if field == "tie_embeddings" else set()
    assert len(names) == len(set(names))
    assert set(names) == (LLAMA - missing) | {f"model.layers.{{layer}}.{name}" for name in adds}
    # random weights are drawn by this
    assert len({zlib.crc32(name.encode()) for name in names}) == len(names)
    assert {row.num_layers for row in found if "{layer}" in row.hf_name} == {2}
    assert {row.num_layers for row in found if "{layer}" not in row.hf_name} == {None}
