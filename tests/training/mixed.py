"""A model whose layers differ, with most of what a family may have."""

import dataclasses

from jaxsp.blocks.config import LayerConfig, NormNames, QueryScale
from tests import batches

ROPES = [batches.make_rope(8), batches.make_rope(8, rope_theta=50.0)]

MIXED = dataclasses.replace(
    batches.model(
        num_kv_heads=4,
        norm="layer",
        norm_names=NormNames(pre_mlp=None, post_attention="after", post_mlp="last"),
        qk_norm="projection",
        activation="gelu_tanh",
        is_parallel=True,
        has_sinks=True,
        query_scale=QueryScale(beta=0.3, original_max_position_embeddings=20),
        attention_scale=0.5,
        attention_softcap=3.0,
        embedding_scale=2.0,
        residual_scale=0.7,
        logit_scale=0.8,
        logit_softcap=4.0,
        tie_embeddings=True,
    ),
    layers=tuple(
        LayerConfig(window=window, rope=rope)
        for window, rope in [(9, ROPES[0]), (100, ROPES[0]), (None, ROPES[1]), (9, ROPES[1])]
    ),
)
"""Three kinds of layers in an irregular order, sinks, and each scale and limit."""
