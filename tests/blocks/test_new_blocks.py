"""A new mixer and a new feed-forward need a class and a line of the registry each.

Both are defined here. The decoder, every mesh, memory, costs, adapters, files and the backward pass
of offloaded layers then have them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxsp.blocks import registry
from jaxsp.blocks.block import FeedForward, Mixer, MixerInput
from jaxsp.blocks.config import LayerConfig
from jaxsp.blocks.layers import Parameter, declare_param
from jaxsp.blocks.linear import Linear
from jaxsp.delta_rule.spans import RowSpans, find_segments
from jaxsp.hf import weights
from jaxsp.model import adapters, decoder
from jaxsp.model.adapter_config import AdapterConfig
from jaxsp.planning import hlo
from jaxsp.sharding import host_offload
from tests import batches
from tests.planning import sent_bytes
from tests.training import runs

pytestmark = pytest.mark.usefixtures("small_shards")

X = 20
"""Elements that a token's mixer has."""

T = 44
"""Elements inside the feed-forward."""

SCOPE = "first_token"


class FirstTokenInput(MixerInput):
    """Norm and one projection."""

    def __init__(self, config):
        super().__init__(config)
        self.value = Linear(
            config.hidden_size, X, hf_name="first_token.in_proj", bias=False, config=config
        )

    def __call__(self, x_BlD, positions_Bl, keys, rope_index=0):
        x_BlD, mlp_input = self.normalize(x_BlD)
        return (self.value(x_BlD, keys),), (mlp_input,)


class FirstTokenWeights(nnx.Module):
    def __init__(self, config):
        self.factor = declare_param(
            Parameter(shape=(X,), hf_name="first_token.factor", mean=1.0, std=0.1)
        )


class FirstTokenOutput(Linear):
    def __call__(self, mixed, *carried, keys=None):
        assert not carried
        return super().__call__(mixed, keys)


class FirstToken(Mixer):
    """Adds the first token of its segment to each token, times a factor for each element."""

    checkpoint_names = ("first_token_out",)

    def declare_input(self, config):
        return FirstTokenInput(config)

    def declare_weights(self, config):
        return FirstTokenWeights(config)

    def declare_output(self, config):
        return FirstTokenOutput(
            X, config.hidden_size, hf_name="first_token.out_proj", bias=False, config=config
        )

    def prefill(self, *_):
        raise NotImplementedError("this test trains only")

    def decode(self, *_):
        raise NotImplementedError("this test trains only")

    def mix(self, config, weights, inputs, rows):
        (value_BlX,) = inputs
        B, l, _ = value_BlX.shape
        strategy = rows.attend.strategy
        spans = RowSpans(seq=strategy.seq, layout=rows.attend.layout, tokens_per_device=l)
        tokens = spans.own_tokens()
        segments = find_segments(rows.batch.starts_BM, rows.batch.lengths_BM, tokens)
        first = jnp.where(segments.inside_Bl, tokens[None] - segments.age_Bl, 0)
        with jax.named_scope(SCOPE):
            split = value_BlX.reshape(B, spans.count, spans.span_tokens, X)
            row = spans.gather_in_order(jnp.moveaxis(split, 1, 0))
            row_BLX = jnp.moveaxis(row, 0, 1).reshape(B, -1, X)
            first_BlX = jnp.take_along_axis(row_BLX, first[..., None], axis=1)
        factor = jnp.broadcast_to(weights["factor"], value_BlX.shape)
        return checkpoint_name(value_BlX + factor * first_BlX, *self.checkpoint_names)

    def output_bytes(self, config, itemsize):
        return X * itemsize

    def sent_bytes(self, spec):
        """Tokens are gathered twice, for the gradient of the factor too."""
        others = spec.attention.strategy.seq - 1
        sent = others * spec.tokens_per_device * X * spec.dtype.itemsize
        return {"all-gather": 2.0 * sent, "reduce-scatter": 1.0 * sent} if others else {}

    def forward_flops(self, config, layer, segment_lengths):
        return 2 * X * float(segment_lengths.sum())


class SquaredMlp(FeedForward):
    """down(relu(up(x)) ** 2)."""

    checkpoint_names = ("squared_up",)

    def __init__(self, config):
        D = config.hidden_size
        self.up = Linear(D, T, hf_name="squared.up_proj", bias=True, config=config)
        self.down = Linear(T, D, hf_name="squared.down_proj", bias=False, config=config)

    def __call__(self, x, keys=None):
        up = checkpoint_name(self.up(x, keys), *self.checkpoint_names)
        return self.down(jnp.square(jax.nn.relu(up)), keys), {}

    @staticmethod
    def describe(config, tokens_per_device):
        return "a squared MLP"

    @staticmethod
    def tile_width(config):
        return 2 * T

    @staticmethod
    def active_fraction(config, param):
        return 0.25 if "up_proj" in param.hf_name else 1.0


ATTENTION = LayerConfig(rope=batches.make_rope(8))
NEW = LayerConfig(rope=None, mixer="first_token", feed_forward="squared")
PLAIN = batches.model(qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm="none")
MODEL = dataclasses.replace(PLAIN, layers=(ATTENTION, NEW, ATTENTION, NEW))
NUM_NEW = 2
D = MODEL.hidden_size


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(registry.MIXERS, "first_token", FirstToken())
    monkeypatch.setitem(registry.FEED_FORWARDS, "squared", SquaredMlp)


def make_spec(**options):
    return runs.make_spec({"remat": "save_attention_and_mlp"}, model=MODEL, **options)


@pytest.mark.e2e
def test_gradients_on_a_mesh_are_those_of_one_device_and_bytes_those_of_the_formula(
    record_property,
):
    run = runs.compile_in_thread((1, 2, 4), model=MODEL, functions=("gradients",)).result()
    runs.check_gradients(run, runs.draw_weights(MODEL), runs.ROWS, record_property)
    collectives = hlo.parse_collectives(run.gradients.as_text())
    num_microbatches = len(runs.ROWS["tokens_BL"]) // 2
    for operation, size in FirstToken().sent_bytes(run.spec).items():
        expected = num_microbatches * NUM_NEW * size
        assert sent_bytes.sum_bytes(collectives, operation=operation, scope=SCOPE) == expected


def test_adapters_find_its_projections():
    names = {"first_token.in_proj", "first_token.out_proj", "squared.up_proj", "squared.down_proj"}
    assert names < set(adapters.list_projections(MODEL))
    with_adapter = adapters.add_adapter(MODEL, AdapterConfig(type="lora", rank=3))
    shapes = weights.tensor_shapes(decoder.param_table(with_adapter))
    assert shapes["model.layers.3.first_token.in_proj.lora_A.weight"] == (3, D)
    assert shapes["model.layers.3.squared.down_proj.lora_B.weight"] == (D, 3)


@pytest.mark.e2e
@runs.NEEDS_HOST
def test_offloaded_layers_have_the_same_gradients(monkeypatch, record_property):
    """Two periods of two layers, each with its input in host memory."""
    monkeypatch.setattr(host_offload, "MIN_OFFLOAD_SIZE", 100)
    memory = {
        "remat": "full",
        "offload_activations": "layer_inputs",
        "offload_every": 2,
        "offload_during_attention": "always",
    }
    run = runs.compile_in_thread(
        (1, 2, 4),
        config=batches.make_config(memory=memory),
        model=MODEL,
        functions=("gradients",),
    ).result()
    assert run.spec.remat_policy.has_own_backward_pass
    runs.check_gradients(run, runs.draw_weights(MODEL), runs.ROWS, record_property)
