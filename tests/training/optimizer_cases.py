"""A parameter table of every placement, and the optimizers of optax that ours are compared with."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from jaxsp.blocks.layers import Parameter
from jaxsp.optimizers import adamw8bit, optimizer
from jaxsp.run.config_file import Config
from jaxsp.sharding import host_offload
from tests import batches
from tests.training import runs

NUM_LAYERS = 3
NUM_STEPS = 5


def _param(name, *shape, layers=tuple(range(NUM_LAYERS)), **options):
    prefix = "model.layers.{layer}." if layers else "model."
    return Parameter(shape=shape, hf_name=f"{prefix}{name}", layers=layers, std=0.05, **options)


TABLE = {
    "embedding": _param("embed_tokens.weight", 131, 129, layers=None),
    "norm": _param("norm.weight", 129, layers=None, mean=1.0),
    "layers": {
        "down": _param("mlp.down_proj.weight", 129, 136),
        "gate": _param("mlp.gate_proj.weight", 136, 129),
        "up": _param("mlp.up_proj.weight", 133, 129),
        "wide": _param("mlp.wide_proj.weight", 129, 300),
        "small": _param("mlp.small_proj.weight", 9, 11),
        "bias": _param("mlp.up_proj.bias", 301),
        "norm": _param("input_layernorm.weight", 129, mean=1.0),
        "expert_down": _param("experts.{expert}.down_proj.weight", 3, 129, 136, num_experts=3),
        "expert_up": _param("experts.{expert}.up_proj.weight", 8, 133, 129, num_experts=8),
    },
}
"""On 8 shards: padded rows, rows, columns, padded columns, whole matrices, and vectors; of experts,
columns and whole matrices. Matrices but the smallest have factored averages in adafactor."""

OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"beta2": 0.99},
    "sgd": {"momentum": 0.9, "nesterov": True},
    "lion": {},
    "adafactor": {},
    "muon": {},
    "adamw8bit": {},
}
"""Other than default values by optimizer."""


def make_config(name: str, **changes: Any) -> Config:
    options = {"learning_rate": 1e-2, "schedule": "linear", "weight_decay": 0.1}
    return batches.make_config(name=name, **{**options, **OPTIONS[name], **changes})


@functools.cache
def draw(seed: int, std: float = 0.0) -> Any:
    """Arrays for the table. Args: std: of all arrays; 0: initial weights."""
    rng = np.random.default_rng(seed)

    def draw_param(param):
        values = rng.standard_normal(param.stacked_shape)
        return np.float32(std * values if std else param.mean + param.std * values)

    return jax.tree.map(draw_param, TABLE)


def draw_gradients() -> list[Any]:
    """Gradients of each step."""
    return [draw(10 + step, 0.01 * (step + 1)) for step in range(NUM_STEPS)]


def run_on_mesh(config: Config, sizes: tuple[int, int, int], *, offload: bool = False):
    """Weights and optimizer state, as stored, after NUM_STEPS updates."""
    mesh = batches.mesh(*sizes)
    state = jax.tree.map(
        lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding),
        describe_state(config, mesh, offload=offload),
    )
    is_on_host = host_offload.should_offload if offload else lambda param: False
    master = runs.put_weights(TABLE, draw(1), mesh, is_on_host=is_on_host)
    schedule = config.optimizer.make_rate(NUM_STEPS)

    def update(gradients, state, master, step):
        return optimizer.update(
            config.optimizer,
            TABLE,
            gradients,
            state,
            master,
            mesh=mesh,
            dtype=jnp.dtype(config.model.compute_dtype),
            learning_rate=schedule(step),
            grad_scale=jnp.float32(0.5),
            accept=jnp.bool_(True),
        )

    jitted = jax.jit(update, out_shardings=jax.tree.map(lambda x: x.sharding, (master, state)))
    for step, gradients in enumerate(draw_gradients()):
        stored = runs.put_weights(TABLE, gradients, mesh)
        master, state = jitted(stored, state, master, jnp.int32(step))
    return master, state


def describe_state(config: Config, mesh: jax.sharding.Mesh, *, offload: bool = False) -> Any:
    """Shapes and shardings of the optimizer state."""

    def describe(param):
        is_on_host = offload and host_offload.should_offload(param)
        place = functools.partial(optimizer.describe_array, param, mesh=mesh, is_on_host=is_on_host)
        return jax.tree.map(place, optimizer.describe_state(config.optimizer, param))

    return jax.tree.map(describe, TABLE)


def unpad(master: Any) -> dict[str, np.ndarray]:
    """Weights by name, without padding."""
    return batches.name_leaves(jax.tree.map(runs.remove_padding, TABLE, master))


def unpad_state(master: Any, state: Any) -> list[np.ndarray]:
    """Arrays of the optimizer state without padding."""

    def unpad_param(param, weight, own):
        def cut(x):
            shape = optimizer.unpadded_shape(param, weight.shape, x.shape)
            return np.asarray(x)[tuple(slice(size) for size in shape)]

        return jax.tree.map(cut, own)

    return jax.tree.leaves(jax.tree.map(unpad_param, TABLE, master, state))


def run_optax(config: Config) -> dict[str, np.ndarray]:
    """Weights after NUM_STEPS steps of plain optax on unstacked weights on one device."""
    weights = _unstack(draw(1))
    transform = make_optax(config)
    with jax.numpy_dtype_promotion("standard"):
        state = transform.init(weights)
        update = jax.jit(transform.update)
        for gradients in draw_gradients():
            halves = jax.tree.map(lambda g: 0.5 * g, _unstack(gradients))
            moves, state = update(halves, state, weights)
            weights = optax.apply_updates(weights, moves)
    stacked: dict[str, list] = {}
    for (name, *_), weight in weights.items():
        stacked.setdefault(name, []).append(np.asarray(weight))
    shapes = {name: x.shape for name, x in batches.name_leaves(draw(1)).items()}
    return {name: np.stack(parts).reshape(shapes[name]) for name, parts in stacked.items()}


def _unstack(tree: Any) -> dict[tuple[str, int], jax.Array]:
    """Each matrix, of a layer or an expert, for itself."""
    unstacked = {}
    params = name_params()
    for name, array in batches.name_leaves(tree).items():
        matrices = array.reshape(-1, *params[name].matrix_shape)
        unstacked |= {(name, index): jnp.asarray(matrix) for index, matrix in enumerate(matrices)}
    return unstacked


def name_params() -> dict[str, Parameter]:
    """Parameters by name."""
    leaves = jax.tree.leaves_with_path(TABLE)
    return {".".join(str(key.key) for key in path): param for path, param in leaves}


def make_optax(config: Config) -> optax.GradientTransformation:
    """The optimizer of optax, with the learning rates of the config; only matrices decay."""
    own = config.optimizer
    rate = optax.linear_schedule(own.learning_rate, 0.0, NUM_STEPS)
    params = name_params()
    names = [
        (name, index)
        for name, param in params.items()
        for index in range((param.num_layers or 1) * (param.num_experts or 1))
    ]
    decays = {key: params[key[0]].is_matrix for key in names}
    is_layer_matrix = {key: optimizer.is_layer_matrix(params[key[0]]) for key in names}
    decay = {"weight_decay": own.weight_decay, "mask": decays}
    scale = optax.scale_by_learning_rate(rate)
    adamw = optax.adamw(rate, b1=0.9, b2=getattr(own, "beta2", 0.95), eps=1e-8, **decay)
    if own.name == "adamw":
        return adamw
    if own.name == "lion":
        return optax.lion(rate, b1=0.9, b2=0.99, **decay)
    if own.name == "sgd":
        trace = optax.trace(0.9, nesterov=True)
        return optax.chain(trace, optax.add_decayed_weights(own.weight_decay, decays), scale)
    if own.name == "adafactor":
        scaled = optax.adafactor(None, multiply_by_parameter_scale=False)
        return optax.chain(
            scaled, optax.scale(-1), optax.add_decayed_weights(own.weight_decay, decays), scale
        )
    if own.name == "adamw8bit":  # not in optax
        matrices = optax.chain(
            _each_matrix(adamw8bit.scale_by_adam(0.9, 0.95, 1e-8)),
            optax.add_decayed_weights(own.weight_decay),
            scale,
        )
    else:
        assert own.name == "muon"
        matrices = optax.contrib.muon(
            rate,
            beta=0.95,
            weight_decay=own.weight_decay,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=lambda tree: jax.tree.map(
                lambda _: optax.contrib.MuonDimensionNumbers(), tree
            ),
        )
    labels = {
        key: "matrices" if is_matrix else "adamw" for key, is_matrix in is_layer_matrix.items()
    }
    others = optax.adamw(
        rate,
        b1=0.9,
        b2=0.95,
        weight_decay=own.weight_decay,
        mask=lambda tree: jax.tree.map_with_path(lambda path, _: decays[path[0].key], tree),
    )
    return optax.partition({"matrices": matrices, "adamw": others}, labels)


def _each_matrix(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """A transform of trees, of one that transforms a matrix."""

    def update(gradients: Any, states: Any, params: Any = None) -> tuple[Any, Any]:
        pairs = jax.tree.map(transform.update, gradients, states)
        first, second = (
            jax.tree.map(lambda _, pair, part=part: pair[part], gradients, pairs) for part in (0, 1)
        )
        return first, second

    return optax.GradientTransformation(lambda tree: jax.tree.map(transform.init, tree), update)
