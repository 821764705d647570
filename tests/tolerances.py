"""Tolerances of tests. They are never loosened to make a test pass.

Unless stated otherwise, a tolerance is relative: the norm of the difference over the norm of the
correct result.
"""

KERNEL = 1e-6
"""A kernel against the reference kernel in float32: outputs and gradients."""

STRATEGIES = 1e-5
"""Attention with any strategy on many devices against the reference on one device, in float32:
outputs and gradients."""

ULYSSES = 1e-6
"""Ulysses on many devices against attention on one device, in float32: outputs and gradients."""

MESH = 1e-5
"""Loss, each gradient and each weight on any mesh against a plain program without a mesh, in
float32."""

TILES = 1e-6
"""The tiled loss and its gradients against the loss without tiles, in float32."""

EVAL = 1e-5
"""Loss of a document against that of transformers, in float32."""

OPTIMIZER = 1e-5
"""Updates of the weights against plain optax."""

OPTAX = 1e-6
"""Weights after five updates with the same gradients, on any mesh, against plain optax."""

BF16 = 5e-3
"""Each gradient in bfloat16 against float32."""

ANGLES = 1e-5
"""Cosine and sine of a rotation against float64, absolute."""

LINEAR = 0.05
"""Memory of a doubled length against twice the memory."""

FP32_PARITY = 1e-4
"""Logits, loss and each gradient against transformers, in float32."""

FLOAT64 = 2e-5
"""Loss and each gradient in float32 against transformers in float64."""

FREQUENCIES = 1e-6
"""Each rotation frequency of llama3 against that of transformers in float32."""

GPU_RUN = 1e-5
"""Each loss of the quickstart's first 20 steps on a GPU against the CPU, in float32.

On CPUs, another mesh or compiler setting changes them by 2e-7, and bfloat16 by 1e-3. TF32 has three
more bits than bfloat16, which is an estimated 1e-4.
"""

KERNEL_BF16 = 5e-3
"""A kernel in bfloat16 against the reference in float32: outputs and gradients.

The inputs are exact in bfloat16. The blockwise kernel differs by at most 2.6e-3, where rounding the
results costs 1.7e-3.
"""

LSE_BF16 = 1e-3
"""Log-sum-exp of bfloat16 inputs with float32 products and sums, absolute."""

MERGE = 2e-7
"""A merged matrix of LoRA against that of PEFT, in float32.

Where numpy's and torch's products of B and A have the same bits, so have the merged matrices. They
do on CPUs with AVX-512 for ranks up to 128 and sizes that are multiples of 16: OpenBLAS and MKL add
up the products in order, with fused multiply-adds. With OpenBLAS's kernels for AVX2, and for rank
256, the order differs, and 1.4e-7 was measured.
"""

MERGE_DORA = 1e-6
"""The same with DoRA, where PEFT's norms of rows are sums in float32."""

MEMORY = 0.03
"""Memory of one category in a compiled program against its formula."""


TRL = 3e-5
"""Preference training against TRL 1.16 in float32: metrics of each step, relative to the largest
in the run, and weights, relative to their change.

Measured: at most 5e-6 for metrics, 8e-6 for all weights together and 4e-5 for one of them on one
EPYC processor, and 2e-5 for the gradient norm of orpo on another with wider vectors, where torch
and XLA add in other orders. TRL_ROUNDING allows the rest.
"""

TRL_ROUNDING = 2**-24
"""The same: rounding of each weight, relative to the weight, which counts where a run changes it by
a thousandth."""
