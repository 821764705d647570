"""A plain program for predictions of the small model: no packing, no mesh, reference attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxsp.core.batch import Batch
from jaxsp.model import decoder
from jaxsp.model.remat import RematPolicy
from tests import unsharded
from tests.training import runs

WEIGHTS = runs.draw_weights(runs.MODEL)
MAX_TOKENS = 512


@functools.cache
def _compile():
    attend = runs.make_oracle_attend(runs.MODEL)

    @jax.jit
    def compute(tokens_BL, positions_BL):
        zeros_B1 = jnp.zeros((1, 1), jnp.int32)
        hidden_BLD, _ = decoder.hidden_states(
            WEIGHTS,
            Batch(
                tokens_BL=tokens_BL,
                labels_BL=tokens_BL,
                positions_BL=positions_BL,
                starts_BM=zeros_B1,
                lengths_BM=zeros_B1 + MAX_TOKENS,
            ),
            config=runs.MODEL,
            attend=attend,
            gather=unsharded.UnshardedGather(),
            dtype=jnp.dtype("float32"),
            policy=RematPolicy(),
            tile_tokens=4096,
        )
        logits_BLV = jnp.einsum("BLD,VD->BLV", hidden_BLD, decoder.lm_head(WEIGHTS))
        return jax.nn.log_softmax(logits_BLV)[0]

    return compute


def compute_log_probs(ids, first_position=0):
    """Log-probabilities of the next token after each token of a text: [T, V], float64."""
    tokens = np.zeros((1, MAX_TOKENS), np.int32)
    tokens[0, : len(ids)] = ids
    positions = np.arange(first_position, first_position + MAX_TOKENS, dtype=np.int32)[None]
    return np.asarray(_compile()(tokens, positions), np.float64)[: len(ids)]
