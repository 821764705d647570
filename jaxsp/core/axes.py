"""Names of the device mesh's axes, and the axes that arrays are split over."""

REPLICA = "replica"
DATA = "data"
SEQ = "seq"
ALL = (REPLICA, DATA, SEQ)
GROUPS = (REPLICA, DATA)  # axes that rows are split over; each index is one sequence-parallel group

SHARDS = (DATA, SEQ)
"""Axes that weights, gradients and optimizer state are sharded over; replicas repeat them."""
