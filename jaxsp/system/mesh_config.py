"""Config of the device mesh."""

from collections.abc import Iterator
from typing import Annotated

import pydantic

from jaxsp.config.fields import (
    HERE,
    MAX_COUNT,
    ConfigSection,
    CountOrAuto,
    PositiveCount,
    with_examples,
)


class MeshConfig(ConfigSection):
    """Device mesh of replica x data x seq devices."""

    replica: PositiveCount = 1
    """Number of replicas. Weights are sharded over data x seq and repeated over replica."""
    data: Annotated[int, pydantic.Field(ge=-1, le=MAX_COUNT)] = -1
    """Number of sequence-parallel groups in a replica, each with its own rows. -1: as many as the
    devices allow."""
    seq: Annotated[CountOrAuto, with_examples(4)] = 1
    """Number of devices that share each row (degree of sequence parallelism). auto: the number with
    which a step recomputes least (memory.remat) by the memory formula, of several the smallest;
    groups larger than a node of 8 only to save attention. It requires mesh.data=-1."""
    virtual_cpu_devices: Annotated[PositiveCount | None, with_examples(8)] = None
    """Number of devices to split the CPU into, for trying a mesh without GPUs. It has no effect
    with an accelerator."""

    def find_problems(self) -> Iterator[str]:
        if self.data == 0:
            yield f"{HERE}.data = 0: must be -1 or at least 1. Use {HERE}.data=-1."
        if self.seq == "auto" and self.data != -1:
            yield f"{HERE}.seq = auto: {HERE}.data follows from it. Use {HERE}.data=-1."

    @property
    def degree(self) -> int:
        """Number of devices that share each row, after `auto` is resolved."""
        assert isinstance(self.seq, int), "planning/candidates.py resolves it"
        return self.seq
