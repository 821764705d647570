"""Bytes that compiled programs send, against the formulas and counts by hand."""

import jax
import pytest

from jaxsp.attention.attend import SCOPE as ATTENTION_SCOPE
from jaxsp.blocks import delta_net
from jaxsp.core import axes
from jaxsp.optimizers import muon
from jaxsp.planning import absent, hlo
from jaxsp.sharding import sharding
from tests.messages import assert_names
from tests.planning import programs, sent_bytes

FEW_BYTES = 1024
"""Bytes of counts, the loss and gradient norms, which are summed over the mesh too."""


def check(step, *, dtype, remat="save_attention"):
    """A step sends the bytes of the formulas, and nothing else."""
    actual = hlo.parse_collectives(step.dump.hlo_text)
    expected = sent_bytes.step_bytes(step.spec)
    assert step.spec.remat_policy.remat == remat
    assert (
        sent_bytes.sum_bytes(actual, operation="all-gather", dtype=dtype)
        == sent_bytes.sum_bytes(actual, operation="all-gather")
        == expected["all-gather"]
    )
    assert (
        sent_bytes.sum_bytes(actual, operation="reduce-scatter", dtype="f32")
        == expected["reduce-scatter"]
    )
    assert (
        0
        <= sent_bytes.sum_bytes(actual, operation="all-reduce") - expected["all-reduce"]
        < FEW_BYTES
    )
    assert (
        sent_bytes.sum_bytes(actual, operation="all-to-all", dtype=dtype) == expected["all-to-all"]
    )
    for kind, scope in (
        ("all-gather", sharding.WEIGHTS_SCOPE),
        ("reduce-scatter", sharding.WEIGHTS_SCOPE),
        ("all-to-all", ATTENTION_SCOPE),
    ):
        assert sent_bytes.sum_bytes(actual, operation=kind, scope=scope) == sent_bytes.sum_bytes(
            actual, operation=kind
        )
    assert sent_bytes.sum_bytes(actual, operation="collective-permute") == 0
    group_axes = {
        kind: {
            hlo.find_axes(sent.groups[0], step.spec.mesh.shape)
            for sent in actual
            if sent.operation == kind
        }
        for kind in hlo.COLLECTIVES
    }
    sizes = step.spec.mesh.shape
    assert group_axes["all-to-all"] == {(axes.SEQ,)}
    assert (
        group_axes["all-gather"]
        == group_axes["reduce-scatter"]
        == {tuple(axis for axis in axes.SHARDS if sizes[axis] > 1)}
    )


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("data", "seq", "num_heads", "microbatches", "is_tied"),
    [
        pytest.param(2, 4, 32, 3, False, marks=pytest.mark.slow),
        (1, 8, 32, 2, True),
        *(
            pytest.param(1, *sizes, 1, False, marks=pytest.mark.slow)
            for sizes in ((32, 32), (8, 64), (32, 64))
        ),
    ],
    ids=str,
)
def test_a_gpu_program_sends_the_bytes_of_the_formulas(data, seq, num_heads, microbatches, is_tied):
    step = programs.gpu_step(
        data=data, seq=seq, num_heads=num_heads, microbatches=microbatches, is_tied=is_tied
    )
    check(step, dtype="bf16")


@pytest.mark.e2e
@pytest.mark.parametrize(
    "window",
    [
        pytest.param(4096, id="2 hops", marks=pytest.mark.slow),
        pytest.param(5000, id="3 hops"),
    ],
)
def test_a_gpu_program_of_a_ring_sends_only_windows(window):
    """Chunks have 2,048 tokens. In bfloat16, gradients of the middle hop are sent in float32."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    words = ["mesh.seq=8", "data.row_tokens=32768", "attention.strategy=ring"]
    config = programs.settings(*words, model_type="mistral", sliding_window=window)
    step = programs.step(config, absent.make_devices("h100-80gb", 8))
    sent = hlo.parse_collectives(step.dump.hlo_text)
    expected = sent_bytes.step_bytes(step.spec)
    assert expected["collective-permute"] > 0
    assert (
        sent_bytes.sum_bytes(sent, operation="collective-permute") == expected["collective-permute"]
    )


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["muon", pytest.param("adafactor", marks=pytest.mark.slow)])
def test_a_gpu_program_sends_the_bytes_of_the_optimizer(name):
    """10 layers on 8 shards: muon's all-to-alls move 16, in bfloat16."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    config = programs.settings(
        "mesh.data=2",
        "mesh.seq=4",
        "batch.rows_per_step=2",
        "data.row_tokens=32768",
        f"optimizer.name={name}",
        hidden_size=1024,
        intermediate_size=2560,
        num_attention_heads=8,
        num_hidden_layers=10,
    )
    step = programs.step(config, absent.make_devices("h100-80gb", 8))
    sent = hlo.parse_collectives(step.dump.hlo_text)
    expected = sent_bytes.step_bytes(step.spec)
    for kind in ("all-gather", "reduce-scatter", "all-to-all"):
        assert sent_bytes.sum_bytes(sent, operation=kind) == expected[kind]
    assert (
        0 <= sent_bytes.sum_bytes(sent, operation="all-reduce") - expected["all-reduce"] < FEW_BYTES
    )
    exchanged = sent_bytes.sum_bytes(sent, scope=muon.SCOPE)
    layer = 4 * 1024 * 1024 + 3 * 1024 * 2560
    assert exchanged == (2 * 2 * 16 * layer / 8 * 7 / 8 if name == "muon" else 0)
    if name == "muon":
        exchanges = sent_bytes.sum_bytes(
            sent, operation="all-to-all", scope=muon.SCOPE, dtype="bf16"
        )
        assert exchanges == exchanged


@pytest.mark.e2e
def test_a_quantized_base_is_sent_quantized_and_only_adapters_have_gradients():
    """On a GPU program; the embedding and the head are sent in bfloat16, 4.5 bits of the rest."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    words = ["mesh.seq=4", "adapter.type=lora", "adapter.quantization=nf4", "adapter.rank=64"]
    config = programs.settings(*words)
    step = programs.step(config, absent.make_devices("h100-80gb", 4))
    sent = hlo.parse_collectives(step.dump.hlo_text)
    expected = sent_bytes.step_bytes(step.spec)
    for operation in ("all-gather", "reduce-scatter"):
        assert sent_bytes.sum_bytes(sent, operation=operation) == expected[operation]
    params = jax.tree.leaves(step.spec.table["layers"])
    base = sum(param.size * param.num_layers for param in params if param.frozen_as == "nf4")
    codes = sent_bytes.sum_bytes(sent, operation="all-gather", dtype="u8")
    assert codes == 2 * base // 2 * 3 // 4, "half a byte of each weight, forward and backward"
    trained = [param for param in params if param.is_trainable and param.size >= 2**16]
    gradients = 4 * sum(param.size * param.num_layers for param in trained) * 3 // 4
    assert sent_bytes.sum_bytes(sent, operation="reduce-scatter") == gradients > 0


@pytest.mark.e2e
@pytest.mark.parametrize(
    "remat",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "save_attention")), "full"],
)
def test_a_cpu_program_sends_the_bytes_of_the_formulas(remat):
    # float32, because XLA's CPU programs send bfloat16 as float32; one microbatch, because they
    # gather embedding and head before the loop over microbatches
    words = [
        "mesh.replica=2",
        "mesh.data=2",
        "mesh.seq=2",
        "batch.rows_per_step=4",
        "data.row_tokens=512",
    ]
    words += ["model.compute_dtype=float32", f"memory.remat={remat}"]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32}
    config = programs.settings(
        *words, hidden_size=256, intermediate_size=512, vocab_size=509, **heads
    )
    check(programs.step(config, jax.devices()), dtype="f32", remat=remat)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("strategy", "operations"),
    [
        ("ulysses", {"collective-permute"}),
        pytest.param("all_gather", {"all-gather", "reduce-scatter"}, marks=pytest.mark.slow),
    ],
)
def test_delta_nets_send_maps_of_states_and_the_tokens_before_a_span(strategy, operations):
    words = ["mesh.seq=4", "data.row_tokens=512", "model.compute_dtype=float32"]
    words += ["memory.remat=save_attention", f"attention.strategy={strategy}"]
    config = programs.settings(
        *words,
        model_type="qwen3_5_text",
        hidden_size=64,
        intermediate_size=64,
        vocab_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
    )
    step = programs.step(config, jax.devices()[:4])
    sent = hlo.parse_collectives(step.dump.hlo_text)
    expected = sent_bytes.delta_net_bytes(step.spec)
    assert expected.keys() == operations
    for operation, size in expected.items():
        actual = sent_bytes.sum_bytes(sent, operation=operation, scope=delta_net.SCOPE)
        assert actual == 3 * size, operation


def program(*lines, more=""):
    """A compiled program for 8 devices with these instructions."""
    body = "\n".join(f"  {line}" for line in lines)
    head = "HloModule small, is_scheduled=true, num_partitions=8"
    return f"{head}\n{more}\nENTRY %main (a: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def computation(name, *lines):
    return (
        f"%{name} (b: f32[8]) -> f32[8] {{\n" + "\n".join(f"  {line}" for line in lines) + "\n}\n"
    )


GROUPS = "replica_groups={{0,1,2,3},{4,5,6,7}}"
GATHER = f"%x = f32[64]{{0}} all-gather(%a), {GROUPS}, dimensions={{0}}"


def loop(body, trips="4"):
    known = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips else ""
    return f"%loop.{body} = (s32[], f32[8]{{0}}) while(%t), condition=%less, body=%{body}{known}"


LESS = computation("less", "ROOT %l = pred[] compare(%i, %n), direction=LT")


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (["%x = f32[64]{0} ragged-all-to-all(%a)"], ["ragged-all-to-all", "x"]),
        (["%x = f32[64]{0} all-gather(%a), replica_groups=@groups"], ["x", "groups", "@groups"]),
        (["%x = f3[64]{0} all-gather(%a), replica_groups={}"], ["f3"]),
        (["%x = (f32[16]{0}, f32[64]{0}) all-gather-start(%a), replica_groups={}"], ["x", "end"]),
        (["%y = f32[64]{0} all-gather-done(%x)"], ["y", "x", "begin"]),
        (["%x = f32[64]{0} collective-permute(%a), pairs={}"], ["x", "source_target_pairs"]),
        ([loop("gathers", "")], ["loop"]),
        (
            ["%x = f32[8]{0} conditional(%p, %a), branch_computations={%gathers, %less}"],
            ["x", "conditional"],
        ),
    ],
)
def test_an_unknown_notation_is_an_error(lines, parts):
    with pytest.raises(ValueError, match=parts[0]) as caught:
        hlo.parse_collectives(program(*lines, more=LESS + computation("gathers", GATHER)))
    assert_names(caught.value, *parts)


def test_groups_are_named_by_axes_and_other_groups_are_an_error():
    sizes = {"replica": 1, "data": 2, "seq": 4}
    assert hlo.find_axes((0, 1, 2, 3), sizes) == ("seq",)
    assert hlo.find_axes((0, 4), sizes) == ("data",)
    assert (
        hlo.find_axes((0, 1), sizes)
        == hlo.find_axes((0, 2), sizes)
        == hlo.find_axes((2, 0), sizes)
        == ("seq",)
    )
    assert hlo.find_axes(range(8), sizes) == ("data", "seq")
    with pytest.raises(ValueError, match=r"\(0, 1, 4\)"):
        hlo.find_axes((0, 1, 4), sizes)
