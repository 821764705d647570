"""Names of a kernel's residuals, with which a remat policy keeps or offloads them."""

OUT = "attention_out"
LSE = "attention_lse"

CHECKPOINT_NAMES = (OUT, LSE)
"""Names to keep so that the backward pass does not recompute attention."""
