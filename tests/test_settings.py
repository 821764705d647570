"""conftest.py and pyproject.toml hold what they promise."""

import os
import warnings

import datasets
import huggingface_hub.constants
import jax.numpy as jnp
import jaxtyping
import pytest

from jaxsp.attention.kernels import segments


def test_a_warning_is_an_error():
    with pytest.raises(DeprecationWarning, match="old"):
        warnings.warn("old", DeprecationWarning, stacklevel=1)


def test_ranks_and_dtypes_are_not_mixed_silently():
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 3)) + jnp.ones(3)
    with pytest.raises(ValueError, match="dtype promotion path"):
        jnp.ones(3, jnp.float32) + jnp.ones(3, jnp.bfloat16)


def test_nothing_is_downloaded_or_kept():
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    for folder in (huggingface_hub.constants.HF_HUB_CACHE, datasets.config.HF_DATASETS_CACHE):
        assert str(folder).startswith(os.environ["HF_HOME"])


def test_a_wrong_shape_or_dtype_raises():
    """Proves that the import hook of conftest.py checks the annotations of jaxsp."""
    slots = jnp.zeros((2, 3), jnp.int32)
    assert segments.segment_ids(slots, slots, 8).shape == (2, 8)
    for wrong in (slots.astype(jnp.int16), slots[:, :-1], slots[0]):
        with pytest.raises(jaxtyping.TypeCheckError):
            segments.segment_ids(slots, wrong, 8)
