"""How far two results may be apart. Never loosened to make a test pass.

Unless it says otherwise, a tolerance is relative: the norm of the difference over the norm of what is right.
"""

KERNEL = 1e-6
"""A kernel against the reference kernel, float32: outputs and gradients."""

ULYSSES = 1e-6
"""Attention on many devices against one device, float32: outputs and gradients."""

MESH = 1e-5
"""Loss, each gradient and each weight on any mesh against a plain program without a mesh, float32."""

TILES = 1e-6
"""The tiled loss and its gradients against the loss in one piece, float32."""

OPTIMIZER = 1e-5
"""How the weights moved, against plain optax."""

BF16 = 5e-3
"""Each gradient computed in bfloat16 against float32."""

BF16_CANCELLING = 1.5e-2
"""The same for the bias of k and the norms of q and k, whose gradients at a random start are the small rest of sums that nearly
cancel (adding the same vector to all keys hardly changes a softmax). 9.8e-3 seen for the bias and 9.3e-3 for a norm, where each
rounding to bfloat16 alone makes 1.7e-3 of an array; a float32 kernel would not change that (8.9e-3 and 9.0e-3)."""

ANGLES = 1e-5
"""Cosine and sine of a rotation against float64, absolute."""

LINEAR = 0.05
"""How far memory may be from doubling when the length doubles."""

FP32_PARITY = 1e-4
"""Logits, loss and each gradient against transformers, float32."""

FREQUENCIES = 1e-6
"""Each of llama3's rotation frequencies against transformers' float32 ones."""
