"""A new mixer and a new feed-forward need a class and a line of the registry each.

Both are defined here. The decoder, every mesh, memory, costs, adapters, files and the backward pass
of offloaded layers then have them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxsp.blocks import registry
from jaxsp.blocks.block import FeedForward, Mixer, MixerInput
from jaxsp.blocks.config import LayerConfig
from jaxsp.blocks.layers import Parameter, declare_param
from jaxsp.blocks.linear import Linear
from jaxsp.config.adapter_schema import AdapterConfig
from jaxsp.delta_rule.spans import RowSpans, find_segments
from jaxsp.hf import weights
from jaxsp.memory import memory_formula
from jaxsp.model import adapters, decoder, flops
from jaxsp.planner.cost import comms
from jaxsp.sharding import host_offload
from tests import batches
from tests.training import runs
from tests.training.test_memory_options import NEEDS_HOST

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

    def project(self, x_BlD, tokens):
        return (self.value(x_BlD, tokens.keys),), ()


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

    def __init__(self, backward_elements=0):
        self.backward_elements = backward_elements

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

    def product_widths(self, config, workload):
        return [X, config.hidden_size]

    def output_bytes(self, config, itemsize):
        return X * itemsize

    def backward_bytes(self, config, workload):
        return self.backward_elements * workload.itemsize

    def sent_bytes(self, config, workload):
        """Tokens are gathered twice, for the gradient of the factor too."""
        others = workload.attention.strategy.seq - 1
        sent = others * workload.tokens_per_device * X * workload.itemsize
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
    def saved_widths(config):
        return [T]

    @staticmethod
    def backward_width(config):
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
    collectives = comms.parse_collectives(run.gradients.as_text())
    num_microbatches = len(runs.ROWS["tokens_BL"]) // 2
    for operation, size in FirstToken().sent_bytes(MODEL, run.spec.workload).items():
        expected = num_microbatches * NUM_NEW * size
        assert comms.sum_bytes(collectives, operation=operation, scope=SCOPE) == expected


def test_the_formula_of_sent_bytes_counts_it(monkeypatch):
    spec = make_spec()
    sent = comms.compute_formula_bytes(spec)
    mixer_bytes = FirstToken().sent_bytes(MODEL, spec.workload)
    monkeypatch.setattr(FirstToken, "sent_bytes", Mixer.sent_bytes)
    others = comms.compute_formula_bytes(spec)
    assert {name: sent[name] - others.get(name, 0) for name in mixer_bytes} == {
        name: spec.num_microbatches * NUM_NEW * size for name, size in mixer_bytes.items()
    }


def test_memory_counts_what_it_saves_and_its_backward_pass(monkeypatch):
    spec = make_spec()
    plain = dataclasses.replace(spec, model=dataclasses.replace(MODEL, layers=2 * (ATTENTION,)))
    activations = [memory_formula.resident_bytes(x).activations for x in (spec, plain)]
    saved = NUM_NEW * spec.tokens_per_device * (D + X + T) * spec.dtype.itemsize
    assert activations[0] - activations[1] == saved
    predicted = []
    for size in (2**24, 2**25):
        monkeypatch.setitem(registry.MIXERS, "first_token", FirstToken(size))
        predicted.append(memory_formula.predict_bytes(spec))
    assert predicted[1] - predicted[0] == 2**24 * spec.dtype.itemsize
    phase = "the backward pass of an MLP"
    phases = []
    for width in (2**14, 2**15):
        monkeypatch.setattr(SquaredMlp, "backward_width", lambda config, width=width: width)
        phases.append(memory_formula.find_phases(spec)[phase])
    assert phases[1] - phases[0] == 2**14 * spec.tokens_per_device * spec.dtype.itemsize


def test_flops_count_its_matrices_and_its_mixing():
    lengths = np.array([40, 3, 21])
    plain = dataclasses.replace(MODEL, layers=2 * (ATTENTION,))
    matrices = 6 * (2 * D * X + 0.25 * D * T + D * T)
    mixing = 3 * 2 * X
    actual = flops.step_flops(MODEL, lengths) - flops.step_flops(plain, lengths)
    assert actual == pytest.approx(NUM_NEW * lengths.sum() * (matrices + mixing))


def test_adapters_find_its_projections():
    names = {"first_token.in_proj", "first_token.out_proj", "squared.up_proj", "squared.down_proj"}
    assert names < set(adapters.list_projections(MODEL))
    with_adapter = adapters.add_adapter(MODEL, AdapterConfig(type="lora", rank=3))
    shapes = weights.tensor_shapes(decoder.param_table(with_adapter))
    assert shapes["model.layers.3.first_token.in_proj.lora_A.weight"] == (3, D)
    assert shapes["model.layers.3.squared.down_proj.lora_B.weight"] == (D, 3)


def test_its_tensors_have_the_numbers_of_its_layers():
    shapes = weights.tensor_shapes(decoder.param_table(MODEL))
    of_new = {name: shape for name, shape in shapes.items() if "first" in name or "squared" in name}
    of_layer = {
        "first_token.in_proj.weight": (X, D),
        "first_token.factor": (X,),
        "first_token.out_proj.weight": (D, X),
        "squared.up_proj.weight": (T, D),
        "squared.up_proj.bias": (T,),
        "squared.down_proj.weight": (D, T),
    }
    assert of_new == {
        f"model.layers.{number}.{name}": shape
        for number in (1, 3)
        for name, shape in of_layer.items()
    }
    norms = {name for name in shapes if name.endswith("input_layernorm.weight")}
    assert norms == {f"model.layers.{number}.input_layernorm.weight" for number in range(4)}


@pytest.mark.e2e
@NEEDS_HOST
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
