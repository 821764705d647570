"""Memory available to a step on each device and on the host."""

import math
import os
from collections.abc import Iterable, Mapping

import numpy as np

from jaxsp.attention import nodes
from jaxsp.attention.strategy import Strategy
from jaxsp.attention.workload import AttentionWorkload, count_workloads
from jaxsp.core import axes
from jaxsp.core.units import GIB
from jaxsp.planning import estimate, gpus
from jaxsp.system import hardware
from jaxsp.system.device_memory import MemoryLimit
from jaxsp.training.specs import StepSpec

FRAGMENTATION_FRACTION = 0.022
"""Fraction of JAX's part of a device that is left free: 2 % of the device. The step's temporaries
need one contiguous block, and loading weights leaves holes."""

CUDA_BYTES = GIB
"""Memory of a device for CUDA's context, kernels, cuBLAS and cuDNN, outside of JAX's part."""

COMMUNICATOR_BYTES = 1.2 * GIB
"""NCCL's buffers for each communicator. Source: NVIDIA/nccl issue 864: 1.6 GB for one, 6 GB for
three or more; issue 1685: 1.06 GB on 8 H100s."""

ALL_TO_ALL_BYTES = 3.3 * GIB
"""NCCL's additional buffers for all-to-alls among the 8 GPUs of a node, with 7 peers each. Source:
NVIDIA/nccl issue 1685: 4.34 GB after the first all-to-all, 1.06 before."""

REMOTE_PEER_BYTES = gpus.ASSUMED["all"]["remote_peer_gib"][0] * GIB
"""NCCL's additional buffers for all-to-alls with each peer on another node."""


def subtract_reserves(spec: StepSpec, limits: MemoryLimit) -> MemoryLimit:
    """Memory available to a step, after fragmentation, CUDA, NCCL and checkpoints.

    Args: limits: JAX's fraction of a device (`hardware.gpu_memory_fraction`), and a device's
        part of its node's memory.
    """
    if math.isinf(limits.device):  # CPUs
        return limits
    fraction = hardware.gpu_memory_fraction(os.environ)
    memory = limits.device / fraction
    # In a run, `raise_limits` has already reduced JAX's fraction; in a plan, nothing has
    fraction = min(fraction, hardware.choose_fraction(memory, outside_bytes(spec)))
    device = memory * fraction * (1 - FRAGMENTATION_FRACTION)
    return MemoryLimit(device, limits.host - estimate.checkpoint_bytes(spec), limits.pool)


def outside_bytes(spec: StepSpec) -> float:
    """Estimate of a device's memory that a step needs outside of JAX's part, for CUDA and NCCL."""
    workloads = count_workloads(spec.config.rows, spec.model)
    return CUDA_BYTES + nccl_bytes(spec.mesh.shape, spec.attention.strategy, workloads)


def nccl_bytes(
    sizes: Mapping[str, int], strategy: Strategy, workloads: Iterable[AttentionWorkload] = ()
) -> float:
    """Estimate of NCCL's buffers on each device, with hardware.DEVICES_PER_NODE devices per node.

    Args: sizes: of the mesh's axes. workloads: attention of the layers, if it is known.
    """
    node_size = hardware.DEVICES_PER_NODE
    all_to_all_size = strategy.heads.degree
    peers = min(all_to_all_size, node_size) - 1
    remote_peers = max(0, all_to_all_size - node_size)
    # Groups of devices in which the first device communicates
    numbers = np.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in axes.ALL])
    along = [
        numbers[tuple(slice(None) if axis in names else 0 for axis in axes.ALL)]
        for names in ((axes.SEQ,), axes.ALL, axes.SHARDS, axes.GROUPS, (axes.REPLICA,))
    ]
    groups = [*along[1:], *(along[0][positions] for positions in strategy.communicators())]
    communicators = {frozenset(group.ravel().tolist()) for group in groups if group.size > 1}
    # XLA's permutes have one of their own, of all devices. Source: GpuCliqueKey's is_p2p, and
    # GetP2PConfigForCollectivePermute, openxla/xla xla/backends/gpu/runtime
    has_permutes = any(nodes.PERMUTE in strategy.sent_bytes(each) for each in workloads)
    buffers = (len(communicators) + has_permutes) * COMMUNICATOR_BYTES
    return buffers + ALL_TO_ALL_BYTES * peers / (node_size - 1) + REMOTE_PEER_BYTES * remote_peers
