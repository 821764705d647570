"""What every kernel calls the residuals of its backward pass, so that a remat policy can keep or offload them."""

OUT = "attention_out"
LSE = "attention_lse"

CHECKPOINT_NAMES = (OUT, LSE)
"""Where all of them are kept, attention is not computed again in the backward pass."""
