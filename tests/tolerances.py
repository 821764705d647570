"""How far two results may be apart. Never loosened to make a test pass.

Unless it says otherwise, a tolerance is relative: the norm of the difference over the norm of what is right.
"""

KERNEL = 1e-6
"""A kernel against the reference kernel, float32: outputs and gradients."""

KINDS = 1e-5
"""Attention of any kind on many devices against the reference on one, float32: outputs and gradients."""

ULYSSES = 1e-6
"""Attention on many devices against one device, float32: outputs and gradients."""

MESH = 1e-5
"""Loss, each gradient and each weight on any mesh against a plain program without a mesh, float32."""

TILES = 1e-6
"""The tiled loss and its gradients against the loss in one piece, float32."""

EVAL = 1e-5
"""A document's loss against transformers', float32."""

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

GPU_RUN = 1e-5
"""Each loss of the quickstart's first 20 steps on a GPU against the CPU's, float32. On CPUs, other meshes and other compiler
settings move them by 2e-7, and bfloat16 by 1e-3; TF32, with three bits more, by an estimated 1e-4."""

KERNEL_BF16 = 5e-3
"""A kernel in bfloat16 against the reference in float32, on inputs that bfloat16 holds exactly: outputs and gradients. The
blockwise kernel is 2.6e-3 off at most, where rounding the results alone makes 1.7e-3."""

LSE_BF16 = 1e-3
"""The log-sum-exp of bfloat16 inputs, whose products and sums are float32, absolute."""

CAUSE = 0.03
"""Memory that a cause takes of a compiled program, against its formula."""

UNKNOWN = 0.03
"""Share of a step's memory whose cause is not told."""
