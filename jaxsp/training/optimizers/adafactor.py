"""Adafactor: averages of squared gradients by row and by column, instead of by element.

Source: Shazeer and Stern 2018, arXiv:1804.04235, sections 3, 5 and 7.2 (decay rate 1 - t^-0.8).
As with `--optim adafactor` of transformers, the learning rate is that of the config, and not
multiplied by the norm of the weights. Updates are clipped at a root mean square of 1.
"""

import optax

from jaxsp.model.layers import Parameter
from jaxsp.training import sharding

_MIN_FACTORED_SIZE = 128
"""Minimum of both dims of a matrix for averages by row and column; others have one by element."""


def make_transform() -> optax.GradientTransformation:
    """Optax's transform, without momentum."""
    return optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=_MIN_FACTORED_SIZE),
        optax.clip_by_block_rms(1.0),
    )


def sent_bytes(param: Parameter, num_shards: int, itemsize: int) -> dict[str, float]:
    """Bytes that a device sends in a step for a weight's averages.

    Averages along the sharded dim are summed over the shards (all-reduce), and the others are made
    the same on all devices (all-gather). A few bytes for clipping are left out.
    """
    placement = sharding.choose_placement(param, num_shards)
    if placement.dim is None or len(param.shape) != 2 or min(param.shape) < _MIN_FACTORED_SIZE:
        return {}
    moved = 4 * (param.num_layers or 1) * (1 - 1 / num_shards)
    return {
        "all-gather": moved * placement.stored_shape[placement.dim],
        "all-reduce": 2 * moved * param.shape[1 - placement.dim],
    }
