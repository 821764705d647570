"""All optimizers: optax transforms of one layer of one weight."""

import dataclasses
from collections.abc import Callable, Mapping

import optax
from jaxtyping import Array

from jaxsp.blocks.layers import Parameter
from jaxsp.config.optimizer_schema import OptimizerConfig
from jaxsp.optimizers import adamw8bit, muon

MakeTransform = Callable[[OptimizerConfig], optax.GradientTransformation]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer: transforms of gradients, without weight decay and learning rate.

    A transform gets one layer of one weight, or one expert of it, whole and without padding, as a
    global array: means and maxima over it need no collective. Its state starts at zero.
    """

    make_transform: MakeTransform
    make_matrix_transform: MakeTransform | None = None
    """Transform of the layers' matrices, if theirs differs."""
    finish_matrices: Callable[[Parameter, Array], Array] | None = None
    """Last part of the update of the layers' matrices, if it needs whole matrices on a device:
    `(param, updates_nOI) -> updates_nOI`, in the compute dtype. It keeps zero rows and columns."""
    is_elementwise: bool = False
    """True if an element's update depends on its own weight, gradient and state only, so that the
    update of all layers at once needs no temporaries."""


def _adam(config: OptimizerConfig) -> optax.GradientTransformation:
    b1, b2, eps = map(config.get_option, ("beta1", "beta2", "eps"))
    return optax.scale_by_adam(b1, b2, eps)


def _adam8bit(config: OptimizerConfig) -> optax.GradientTransformation:
    b1, b2, eps = map(config.get_option, ("beta1", "beta2", "eps"))
    return adamw8bit.scale_by_adam(b1, b2, eps)


def _sgd(config: OptimizerConfig) -> optax.GradientTransformation:
    momentum = config.get_option("momentum")
    if not momentum:
        return optax.identity()
    return optax.trace(momentum, nesterov=bool(config.nesterov))


def _lion(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_lion(config.get_option("beta1"), config.get_option("beta2"))


def _adafactor(config: OptimizerConfig) -> optax.GradientTransformation:
    """Adafactor of transformers (`--optim adafactor`): its learning rate is that of the config.

    Parts of a fused tensor (q, k and v, or gate and up, of Phi-3 and GLM-4) are matrices of their
    own, while transformers takes the statistics of the whole tensor. So are the matrices of
    experts, of which transformers clips all updates of a layer together.

    Averages of squared gradients are by row and column in matrices of at least 128 x 128. Updates
    are clipped at a root mean square of 1. Source: arXiv:1804.04235, sections 3, 6 and 7.2.
    """
    return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))


def _momentum(config: OptimizerConfig) -> optax.GradientTransformation:
    return muon.scale_by_momentum(config.get_option("momentum"))


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(make_transform=_adam, is_elementwise=True),
    "sgd": Optimizer(make_transform=_sgd, is_elementwise=True),
    "lion": Optimizer(make_transform=_lion, is_elementwise=True),
    "adafactor": Optimizer(make_transform=_adafactor),
    "muon": Optimizer(
        make_transform=_adam,
        make_matrix_transform=_momentum,
        finish_matrices=muon.orthogonalize,
    ),
    "adamw8bit": Optimizer(make_transform=_adam, make_matrix_transform=_adam8bit),
}


def is_layer_matrix(param: Parameter) -> bool:
    """True for matrices of the layers; not for the embedding, the head, norms and biases."""
    return param.num_layers is not None and len(param.matrix_shape) == 2
