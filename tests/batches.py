"""Small models and packed rows that tests train on, laid out for any mesh, and ways to compare and to look into programs."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsp.attention import Attend
from jaxsp.config import config_file
from jaxsp.config.schema import Config
from jaxsp.core import axes, layout
from jaxsp.core.batch import NO_LABEL, PER_TOKEN, SPECS, Batch, num_microbatches, step_row_index
from jaxsp.model.config import ModelConfig
from jaxsp.runtime import device_mesh

Arrays = dict[str, np.ndarray]
"""The fields of a Batch for all rows of a step, [rows, ...], before they are dealt to anybody."""

SMALL_LLAMA = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
"""Of one layer, that reads bytes: a config.json."""

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
"""Of two layers, of which a matrix has 66,660 elements: sharded, and stored with zeros on 8 devices, and fewer on 2."""

Pieces = list[list[tuple[int, int]]]
"""Start and length of each piece of each row."""


def mesh(replica: int, data: int, seq: int) -> Mesh:
    """A mesh of the first devices."""
    sizes = {axes.REPLICA: replica, axes.DATA: data, axes.SEQ: seq}
    return device_mesh.make_mesh(sizes, jax.devices()[: replica * data * seq])


def model(**changes: Any) -> ModelConfig:
    """A small decoder with everything on: biases, norms of q and k, fewer K/V heads than devices, sizes that do not divide."""
    fields = {
        "vocab_size": 131,
        "hidden_size": 60,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 101,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "rope_llama3": None,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "qk_norm": True,
        "sliding_window": None,
        "tie_embeddings": False,
        "initializer_range": 0.08,
    }
    return ModelConfig(**fields | changes)


def settings(
    *, compute_dtype: str = "float32", memory: dict | None = None, **optimizer: Any
) -> Config:
    """A config of float32 and SGD with learning rate 1 without clipping: a step subtracts the gradient."""
    plain = {"name": "sgd", "learning_rate": 1.0, "schedule": "constant", "max_grad_norm": None}
    return config_file.parse(
        {
            "run": {"directory": "nowhere", "steps": 5},
            "model": {"config": {}, "compute_dtype": compute_dtype},
            "data": {"train": [{"source": "nothing.txt", "format": "text"}], "row_tokens": 64},
            "batch": {"rows_per_step": 8},
            "optimizer": plain | optimizer,
            "memory": {"loss_tile_tokens": 7} | (memory or {}),
        }
    )


def packed(pieces: Pieces, *, num_tokens: int, vocab_size: int, seed: int) -> Arrays:
    """Random documents at these places; each piece is a whole document."""
    rng = np.random.default_rng(seed)
    width = 1 + max(len(row) for row in pieces)
    shape, slots = (len(pieces), num_tokens), (len(pieces), width)
    arrays = {
        "tokens_BL": np.zeros(shape, np.int32),
        "labels_BL": np.full(shape, NO_LABEL, np.int32),
        "positions_BL": np.zeros(shape, np.int32),
        "starts_BM": np.zeros(slots, np.int32),
        "lengths_BM": np.zeros(slots, np.int32),
    }
    for row, places in enumerate(pieces):
        for slot, (start, length) in enumerate(places):
            document = rng.integers(0, vocab_size, length)
            arrays["tokens_BL"][row, start : start + length] = document
            arrays["labels_BL"][row, start : start + length - 1] = document[1:]
            arrays["positions_BL"][row, start : start + length] = np.arange(length)
            arrays["starts_BM"][row, slot], arrays["lengths_BM"][row, slot] = start, length
    return arrays


def ragged(*, num_rows: int, num_tokens: int, vocab_size: int, seed: int) -> Arrays:
    """Rows of pieces of many lengths, some padding, a third of the labels masked, and a row with pieces but no label."""
    rng = np.random.default_rng(seed)
    pieces: Pieces = []
    for _ in range(num_rows):
        cuts = np.unique(rng.integers(1, num_tokens, rng.integers(1, 5)))
        pieces.append([(int(a), int(b - a)) for a, b in zip([0, *cuts], cuts, strict=False)])
    arrays = packed(pieces, num_tokens=num_tokens, vocab_size=vocab_size, seed=seed)
    arrays["labels_BL"][rng.random(arrays["labels_BL"].shape) < 0.3] = NO_LABEL
    arrays["labels_BL"][3] = NO_LABEL
    return arrays


def on_shares(attend: Attend) -> Callable[..., jax.Array]:
    """The same on whole rows: each device of a group takes its share of them, in the layout that is asked for."""
    share, same = PartitionSpec(None, axes.SEQ), PartitionSpec()
    specs = {"in_specs": (share, share, share, same, same), "out_specs": share}
    of_shares = jax.shard_map(
        attend, mesh=mesh(1, 1, attend.strategy.seq), **specs, check_vma=False
    )
    if attend.layout_degree == 1:
        return of_shares

    def of_rows(
        q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        order, inverse = (
            of(q.shape[1], attend.layout_degree)
            for of in (layout.token_order, layout.place_of_token)
        )
        return of_shares(*(x[:, order] for x in (q, k, v)), starts, lengths)[:, inverse]

    return of_rows


def on_mesh(arrays: Arrays, on: Mesh, *, rows_per_microbatch: int = 1, degree: int = 1) -> Batch:
    """The rows as a step takes them, each on its devices. Args: degree: of their layout."""
    places = layout.token_order(arrays["tokens_BL"].shape[1], degree)
    specs = {name: SPECS.get(name, PER_TOKEN) for name in arrays}  # weights_BL is not in SPECS
    arrays = {
        name: array[:, places] if specs[name] == PER_TOKEN else array
        for name, array in arrays.items()
    }
    num_groups, num_rows = device_mesh.num_groups(on), len(arrays["tokens_BL"])
    rows_per_turn = num_groups * rows_per_microbatch
    turns = num_microbatches(rows_per_step=num_rows, global_microbatch_rows=rows_per_turn)
    order = [
        [
            step_row_index(
                turn, slot, num_groups=num_groups, rows_per_microbatch=rows_per_microbatch
            )
            for slot in range(rows_per_turn)
        ]
        for turn in range(turns)
    ]
    put = {
        name: jax.device_put(array[np.array(order)], NamedSharding(on, specs[name]))
        for name, array in arrays.items()
    }
    return Batch(**put)


def by_name(tree: Any) -> dict[str, np.ndarray]:
    """Leaves of a nested dict by their path, such as `layers.attention.q.weight`."""
    leaves = jax.tree.leaves_with_path(tree)
    return {".".join(str(key.key) for key in path): np.asarray(leaf) for path, leaf in leaves}


def norm(tree: Any) -> float:
    """Of all leaves together, in float64."""
    return float(
        np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree)))
    )


def difference(found: Any, right: Any) -> float:
    """Norm of the difference over the norm of what is right, in float64; 0 where both are 0."""
    found, right = np.asarray(found, np.float64), np.asarray(right, np.float64)
    assert found.shape == right.shape
    apart = np.linalg.norm(found - right)
    return 0.0 if apart == 0 else float(apart / np.linalg.norm(right))


def same_bits(found: Any, right: Any) -> bool:
    """Whether all leaves are equal bit for bit, NaN included."""
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in leaves)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, those of the jaxprs inside it included."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in jax.tree.leaves(
            equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from equations(inner)
