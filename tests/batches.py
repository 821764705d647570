"""Small models and packed rows for tests, on any mesh, and comparisons of results."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsp.attention.attend import Attend
from jaxsp.attention.kernels.kernel import KernelSettings, ScoreConfig
from jaxsp.attention.selection import KERNELS, AttentionChoice, KernelChoice
from jaxsp.attention.strategy import Strategy, combine
from jaxsp.blocks.config import EXPERTS, ExpertsConfig, LayerConfig, ModelConfig, Rope
from jaxsp.core import axes
from jaxsp.core.batch import NO_LABEL, PER_TOKEN, SPECS, Batch, step_row_index
from jaxsp.core.layout import KEPT_ORDER, Layout
from jaxsp.hf import rope
from jaxsp.run import config_file
from jaxsp.run.config_file import Config
from jaxsp.system import device_mesh

Arrays = dict[str, np.ndarray]
"""Fields of a Batch for all rows of a step, [rows, ...], before they are assigned to devices."""

SMALL_LLAMA = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
"""A config.json with one layer, for a tokenizer of bytes."""

UNEVEN_LLAMA = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 1111,
}
"""A config.json with two layers and a matrix of 66,660 elements, which is sharded.

Its shards are padded with zeros on 8 devices, and with fewer on 2.
"""

UNEVEN_HYBRID = {
    **UNEVEN_LLAMA,
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
"""The same with a gated delta net in the first layer."""

Segments = list[list[tuple[int, int]]]
"""Start and length of each segment of each row."""


def mesh(replica: int, data: int, seq: int) -> Mesh:
    """A mesh of the first devices."""
    sizes = {axes.REPLICA: replica, axes.DATA: data, axes.SEQ: seq}
    return device_mesh.make_mesh(sizes, jax.devices()[: replica * data * seq])


def model(
    *, num_layers: int = 2, window: int | None = None, rope: Rope | None = None, **changes: Any
) -> ModelConfig:
    """A small decoder with biases, q and k norms, 2 K/V heads, and sizes that do not divide."""
    fields: dict[str, Any] = {
        "vocab_size": 131,
        "hidden_size": 60,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 101,
        "norm_eps": 1e-5,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "qk_norm": "head",
        "tie_embeddings": False,
        "initializer_range": 0.08,
    }
    fields |= changes
    layer = LayerConfig(window=window, rope=rope or make_rope(fields["head_dim"]))
    return ModelConfig(**{"layers": (layer,) * num_layers, **fields})


def expert_model(*, num_layers: int = 2) -> ModelConfig:
    """The same with experts, and one that all tokens share, whose sizes do not divide either."""
    sizes = ExpertsConfig(num_experts=6, num_chosen=2, size=20, shared_size=27)
    layer = LayerConfig(rope=make_rope(8), feed_forward=EXPERTS)
    return model(layers=(layer,) * num_layers, experts=sizes)


def make_rope(head_dim: int, **group: Any) -> Rope:
    """RoPE of a group of rope_parameters."""
    return rope.parse({"rope_type": "default", "rope_theta": 1e4, **group}, head_dim=head_dim)


def make_config(
    *,
    compute_dtype: str = "float32",
    memory: dict | None = None,
    adapter: dict | None = None,
    **optimizer: Any,
) -> Config:
    """A config with SGD, learning rate 1 and no clipping: a step subtracts the gradient."""
    plain = {"name": "sgd", "learning_rate": 1.0, "schedule": "constant", "max_grad_norm": None}
    return config_file.parse(
        {
            "run": {"directory": "nowhere", "steps": 5},
            "model": {"config": {}, "compute_dtype": compute_dtype},
            "data": {"train": [{"source": "nothing.txt", "format": "text"}], "row_tokens": 64},
            "batch": {"rows_per_step": 8},
            "optimizer": plain | optimizer,
            "memory": {"loss_tile_tokens": 7} | (memory or {}),
            "adapter": adapter or {},
        }
    )


def attention_choice(
    *,
    seq: int = 1,
    strategy: Strategy | None = None,
    layer_scores: Sequence[ScoreConfig] | None = None,
) -> AttentionChoice:
    """The blockwise kernel, by default with Ulysses among `seq` devices."""
    return AttentionChoice(
        strategy=strategy or combine(seq),
        kernels=(KernelChoice(kernel=KERNELS["blockwise"], settings=KernelSettings()),),
        layer_scores=tuple(layer_scores or [ScoreConfig()]),
    )


def make_rows(segments: Segments, *, num_tokens: int, vocab_size: int, seed: int) -> Arrays:
    """Rows of random documents; each segment is a whole document."""
    rng = np.random.default_rng(seed)
    shape = (len(segments), num_tokens)
    slots = (len(segments), 1 + max(len(row) for row in segments))
    arrays = {
        "tokens_BL": np.zeros(shape, np.int32),
        "labels_BL": np.full(shape, NO_LABEL, np.int32),
        "positions_BL": np.zeros(shape, np.int32),
        "starts_BM": np.zeros(slots, np.int32),
        "lengths_BM": np.zeros(slots, np.int32),
    }
    for row, row_segments in enumerate(segments):
        for slot, (start, length) in enumerate(row_segments):
            document = rng.integers(0, vocab_size, length)
            arrays["tokens_BL"][row, start : start + length] = document
            arrays["labels_BL"][row, start : start + length - 1] = document[1:]
            arrays["positions_BL"][row, start : start + length] = np.arange(length)
            arrays["starts_BM"][row, slot] = start
            arrays["lengths_BM"][row, slot] = length
    return arrays


def make_ragged_rows(*, num_rows: int, num_tokens: int, vocab_size: int, seed: int) -> Arrays:
    """Rows of segments of many lengths, with padding and a third of the labels masked.

    Row 3 has no labels.
    """
    rng = np.random.default_rng(seed)
    segments: Segments = []
    for _ in range(num_rows):
        cuts = np.unique(rng.integers(1, num_tokens, rng.integers(1, 5)))
        starts = [0, *cuts]
        segments.append([(int(a), int(b - a)) for a, b in zip(starts, cuts, strict=False)])
    arrays = make_rows(segments, num_tokens=num_tokens, vocab_size=vocab_size, seed=seed)
    arrays["labels_BL"][rng.random(arrays["labels_BL"].shape) < 0.3] = NO_LABEL
    arrays["labels_BL"][3] = NO_LABEL
    return arrays


def attend_on_shards(attend: Attend) -> Callable[..., jax.Array]:
    """The same attention on whole rows: each device of a group gets its shard, in attend's
    layout. The sinks' gradient is summed over the group."""
    shard = PartitionSpec(None, axes.SEQ)
    whole = PartitionSpec()

    def attend_shard(q, k, v, starts, lengths, options):  # type: ignore[no-untyped-def]
        tables = attend.make_segment_tables(starts, lengths, tokens_per_device=q.shape[1])
        return attend(q, k, v, starts, lengths, tables, **options)

    sharded_attend = jax.shard_map(
        attend_shard,
        mesh=mesh(1, 1, attend.strategy.seq),
        in_specs=(shard, shard, shard, whole, whole, whole),
        out_specs=shard,
        check_vma=False,
    )

    def attend_in_layout(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        starts: jax.Array,
        lengths: jax.Array,
        **options: jax.Array,
    ) -> jax.Array:
        if attend.layout.keeps_order:
            return sharded_attend(q, k, v, starts, lengths, options)
        order = attend.layout.token_order(q.shape[1])
        inverse = attend.layout.place_of_token(q.shape[1])
        inputs = [x[:, order] for x in (q, k, v)]
        return sharded_attend(*inputs, starts, lengths, options)[:, inverse]

    return attend_in_layout


def put_on_mesh(
    arrays: Arrays, on: Mesh, *, rows_per_microbatch: int = 1, layout: Layout = KEPT_ORDER
) -> Batch:
    """The rows as a step gets them, each on its devices."""
    token_order = layout.token_order(arrays["tokens_BL"].shape[1])
    specs = {name: SPECS.get(name, PER_TOKEN) for name in arrays}  # weights_BL is not in SPECS
    arrays = {
        name: array[:, token_order] if specs[name] == PER_TOKEN else array
        for name, array in arrays.items()
    }
    num_groups = device_mesh.num_groups(on)
    global_rows = num_groups * rows_per_microbatch
    row_index = functools.partial(
        step_row_index, num_groups=num_groups, rows_per_microbatch=rows_per_microbatch
    )
    microbatches = range(len(arrays["tokens_BL"]) // global_rows)
    order = np.array([[row_index(x, slot) for slot in range(global_rows)] for x in microbatches])
    fields = {
        name: jax.device_put(array[order], NamedSharding(on, specs[name]))
        for name, array in arrays.items()
    }
    return Batch(**fields)


def name_leaves(tree: Any) -> dict[str, np.ndarray]:
    """Returns the leaves of a nested dict by their path, such as `layers.attention.q.weight`."""
    leaves = jax.tree.leaves_with_path(tree)
    return {".".join(str(key.key) for key in path): np.asarray(leaf) for path, leaf in leaves}


def norm(tree: Any) -> float:
    """Euclidean norm of all leaves together, in float64."""
    squares = [np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree)]
    return float(np.sqrt(sum(squares)))


def relative_error(actual: Any, expected: Any) -> float:
    """Relative error: norm of the difference over the norm of `expected`, in float64.

    0 if both are equal.
    """
    actual = np.asarray(actual, np.float64)
    expected = np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    error = np.linalg.norm(actual - expected)
    return 0.0 if error == 0 else float(error / np.linalg.norm(expected))


def is_bitwise_equal(actual: Any, expected: Any) -> bool:
    """Compares all leaves bit by bit, including NaN."""
    leaves = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in leaves)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, including those of the jaxprs inside it."""
    is_jaxpr = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                yield from equations(inner)
