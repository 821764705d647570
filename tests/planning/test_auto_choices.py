"""Choices of `auto` in mesh.seq and batch.rows_per_microbatch."""

import functools
import math

import jax
import pytest

from jaxsp.attention.kernels.cudnn import CudnnKernel
from jaxsp.attention.kernels.kernel import UnsupportedReason
from jaxsp.core.errors import UserError
from jaxsp.hf import model_config
from jaxsp.planning import candidates, estimate
from jaxsp.run import config_file
from jaxsp.system import hardware
from jaxsp.system.device_memory import MemoryLimit
from jaxsp.training.specs import make_spec
from tests import batches, messages
from tests.planning import programs

FIELDS = batches.SMALL_LLAMA | {
    "num_hidden_layers": 48,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
}


def settings(*words, row_tokens=8192, seq="auto", rows_per_step=1):
    fields = {
        "run": {"directory": "unused", "steps": 1},
        "model": {"config": FIELDS},
        "mesh": {"seq": seq},
        "data": {
            "train": [{"source": "unused", "format": "tokens"}],
            "row_tokens": row_tokens,
        },
        "batch": {"rows_per_step": rows_per_step},
        "optimizer": {"learning_rate": 0.1},
    }
    return config_file.parse(fields, words).step


@functools.cache
def model():
    return model_config.parse_model_config(FIELDS, row_tokens=8192)


def resolve(config, *, limit=math.inf, host=math.inf):
    return candidates.resolve(
        config, model(), devices=jax.devices(), memory=MemoryLimit(limit, host)
    ).mesh.seq


def spec_of(config):
    return make_spec(config, model(), devices=jax.devices())


def needed(config, seq, remat):
    """Memory of the step with the fewest tokens at a time, by formula."""
    spec = spec_of(config.change(mesh={"seq": seq}))
    return min(
        estimate.predict_bytes(candidate)
        for candidate in candidates.list_candidates(spec, is_memory_known=True)
        if candidate.remat_policy.remat == remat
    )


@pytest.fixture(autouse=True)
def simple_predictions(monkeypatch):
    programs.simplify_predictions(monkeypatch)


@pytest.fixture
def whole_limits(monkeypatch):
    """The step may use all memory of the limits."""
    monkeypatch.setattr(estimate, "subtract_reserves", lambda spec, memory: memory)


@pytest.mark.usefixtures("whole_limits")
def test_auto_takes_the_smallest_groups_that_fit():
    config = settings("memory.remat=full", rows_per_step=8)
    assert resolve(config) == 1
    limit = needed(config, 2, "full")
    assert resolve(config, limit=limit) == 2
    assert resolve(config, limit=limit - 1) == 4
    assert resolve(config, limit=1) == 8


@pytest.mark.usefixtures("whole_limits")
def test_auto_prefers_groups_inside_a_node_that_recompute_less(monkeypatch):
    config = settings(rows_per_step=8)
    limit = needed(config, 4, "save_attention_and_mlp")
    assert needed(config, 2, "save_attention") < limit < needed(config, 2, "save_attention_and_mlp")
    assert resolve(config, limit=limit) == 4
    monkeypatch.setattr(hardware, "DEVICES_PER_NODE", 2)
    assert resolve(config, limit=limit) == 2


@pytest.mark.usefixtures("whole_limits")
def test_auto_recomputes_attention_if_nothing_else_fits():
    config = settings(rows_per_step=8)
    full = needed(config, 4, "full")
    saved = needed(config, 8, "save_attention")
    assert full < saved
    assert resolve(config, limit=(full + saved) // 2) == 4


def test_auto_divides_a_step_of_one_row_among_all_devices():
    assert resolve(settings(rows_per_step=1)) == 8


@pytest.mark.usefixtures("whole_limits")
def test_auto_offloads_no_more_than_the_host_holds():
    """More tokens per device, as with the smallest groups, need more host memory."""
    config = settings("memory.offload_activations=layer_inputs", rows_per_step=8)
    host = estimate.step_offloaded_bytes(spec_of(config.change(mesh={"seq": 4}))).total
    assert resolve(config, host=host) == 4


def test_auto_refuses_rows_that_cannot_be_divided():
    with pytest.raises(UserError, match=messages.containing("mesh.seq = auto", 8)):
        resolve(settings(row_tokens=3, rows_per_step=1))


AUTO_ROWS = "batch.rows_per_microbatch=auto"


def resolve_rows(*words, limit, host=math.inf):
    """Rows per microbatch on 4 groups of 2 devices, each with 4 rows of 8,192 tokens per step."""
    return candidates.resolve(
        settings(AUTO_ROWS, *words, seq=2, rows_per_step=16),
        model(),
        devices=jax.devices(),
        memory=MemoryLimit(limit, host),
    ).microbatch_rows


def needed_rows(number, remat, *words):
    """Memory of the step with a number of rows per microbatch, without tiles, by formula."""
    words = (f"batch.rows_per_microbatch={number}", *words)
    spec = spec_of(settings(*words, seq=2, rows_per_step=16))
    return max(
        estimate.predict_bytes(candidate)
        for candidate in candidates.list_candidates(spec, is_memory_known=True)
        if candidate.remat_policy.remat == remat and candidate.mlp_tile == spec.tokens_per_device
    )


@pytest.mark.usefixtures("whole_limits")
@pytest.mark.parametrize(
    ("words", "remat"),
    [
        ([], "save_attention_and_mlp"),
        (["memory.remat=save_attention"], "save_attention"),
        (["memory.remat=full"], "full"),
    ],
    ids=str,
)
def test_microbatches_have_the_most_rows_that_surely_fit_with_what_one_row_keeps(words, remat):
    limit = needed_rows(2, remat, *words) / candidates.MIN_PREDICTED_RATIO
    assert needed_rows(1, remat, *words) < limit < needed_rows(4, remat, *words)
    assert resolve_rows(*words, limit=limit) == 2
    assert resolve_rows(*words, limit=0.999 * limit) == 1
    assert resolve_rows(*words, limit=4 * limit) == 4
    assert resolve_rows(*words, limit=math.inf) == 1, "unknown memory"


@pytest.mark.usefixtures("whole_limits")
def test_microbatches_have_one_row_if_more_would_recompute_more():
    """The step keeps the MLP's products in some layers, in fewer with more rows."""
    kept = needed_rows(1, "save_attention_and_mlp") / candidates.MAX_PREDICTED_RATIO
    saved = needed_rows(2, "save_attention") / candidates.MIN_PREDICTED_RATIO
    assert saved < 0.999 * kept
    assert resolve_rows(limit=0.999 * kept) == 1
    assert resolve_rows("memory.kept_mlp_layers=0", limit=0.999 * kept) > 1
    tiles = {1024: 4, 2048: 4, 4096: 1}  # 1 row has 4,096 tokens on a device
    for tile, rows in tiles.items():
        words = ["memory.remat=full", f"memory.mlp_tile_tokens={tile}"]
        assert resolve_rows(*words, limit=1e15) == rows


@pytest.mark.usefixtures("whole_limits")
def test_microbatches_have_no_more_rows_than_the_host_holds_and_the_kernel_takes(monkeypatch):
    words = ["memory.offload_activations=layer_inputs", "memory.remat=full"]
    one = settings(*words, "batch.rows_per_microbatch=1", seq=2, rows_per_step=16)
    host = estimate.step_offloaded_bytes(spec_of(one)).total
    assert resolve_rows(*words, limit=1e15, host=2 * host) == 2

    def find_reasons(kernel, workload, **_):
        has_many = workload.num_rows * workload.row_tokens > 2 * 8192
        return [UnsupportedReason("has a limit", "")] if has_many else []

    monkeypatch.setattr(CudnnKernel, "unsupported_reasons", find_reasons)
    assert resolve_rows(limit=1e15) == 2
