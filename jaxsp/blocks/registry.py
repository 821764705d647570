"""The blocks that layers are made of, by the names that a `LayerConfig` has."""

from jaxsp.blocks.attention import Attention
from jaxsp.blocks.block import FeedForward, Mixer
from jaxsp.blocks.config import ATTENTION, DELTA_NET, EXPERTS, MLP, MLP_AND_EXPERTS
from jaxsp.blocks.delta_net import DeltaNet
from jaxsp.blocks.experts import Experts, MlpAndExperts
from jaxsp.blocks.mlp import Mlp

MIXERS: dict[str, Mixer] = {
    ATTENTION: Attention(),
    DELTA_NET: DeltaNet(),
}

FEED_FORWARDS: dict[str, type[FeedForward]] = {
    MLP: Mlp,
    EXPERTS: Experts,
    MLP_AND_EXPERTS: MlpAndExperts,
}
