"""Names of the device mesh's axes, and the groups of axes that arrays are split over."""

REPLICA = "replica"
DATA = "data"
SEQ = "seq"

ALL = (REPLICA, DATA, SEQ)

GROUPS = (REPLICA, DATA)
"""Rows are dealt over these: one group of devices for each index."""

SHARDS = (DATA, SEQ)
"""Weights, gradients and optimizer state are sharded over this product; replicas repeat them."""
