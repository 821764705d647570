"""Traffic of collectives inside nodes (NVLink) and between them (network cards).

Devices are numbered along the mesh, and each `node_devices` of them are a node. With nodes of 4 and
Ulysses of 4 x ring of 2, the all-to-alls stay inside nodes, and each device of the ring sends to
another node:

    node             0           |           1
    device      0   1   2   3    |    4   5   6   7
    all-to-all  [ 0   1   2   3 ]    [ 4   5   6   7 ]
    ring        [ 0 -> 4 -> 0 ]  [ 1 -> 5 -> 1 ]  [ 2 -> 6 -> 2 ]  [ 3 -> 7 -> 3 ]
"""

import collections
import functools
import math
from typing import NamedTuple

Groups = tuple[tuple[int, ...], ...]
"""Groups of devices that communicate with each other, all at the same time."""

PERMUTE = "collective-permute"
ALL_TO_ALL = "all-to-all"
ALL_REDUCE = "all-reduce"


class Load(NamedTuple):
    """Load of a collective on links and network cards, in multiples of the bytes that each device
    sends."""

    link: float = 0.0
    """Bytes that the busiest device sends inside its node."""
    network: float = 0.0
    """Bytes that the busiest network card sends."""
    node: float = 0.0
    """Bytes that leave the busiest node."""
    link_hops: int = 0
    """Consecutive messages inside nodes, for the latency."""
    network_hops: int = 0
    """Consecutive messages between nodes."""


@functools.lru_cache(maxsize=1024)
def find_load(operation: str, groups: Groups, *, node_devices: int, is_ring: bool = True) -> Load:
    """Finds the load of a collective on nodes of this size.

    In an all-to-all, each device sends to each other one, through its own card if that is in
    another node. In a collective-permute, each device sends to the next one of its group, through
    its own card if that is in another node; the others wait for it. Other collectives use rings.
    Each ring leaves a node once, and the rings of a group share the cards of its devices in the
    node.

    Args: is_ring: False: in a collective-permute, the last device of a group sends nothing.
    """
    loads = [Load()]
    leaving: dict[int, float] = collections.defaultdict(float)  # bytes that leave each node
    for group in groups:
        nodes = [device // node_devices for device in group]
        sizes = collections.Counter(nodes)
        is_inside = max(sizes.values()) > 1
        is_between = len(sizes) > 1
        leaves = dict.fromkeys(sizes, float(is_between))
        link = float(is_inside)
        network = float(is_between)
        hops = (int(is_inside), int(is_between))
        if operation == PERMUTE:
            targets = [*nodes[1:], *nodes[: int(is_ring)]]
            senders = [x for x, target in zip(nodes, targets, strict=False) if x != target]
            leaves = {node: float(senders.count(node)) for node in senders}
            link = float(len(targets) > len(senders))
            hops = (int(link), int(is_between))
        elif operation == ALL_TO_ALL:
            others = max(1, len(nodes) - 1)
            leaves = {node: size * (len(nodes) - size) / others for node, size in sizes.items()}
            link = (max(sizes.values()) - 1) / others
            network = (len(nodes) - min(sizes.values())) / others
        else:
            network /= min(sizes.values())
            hops = _count_ring_hops(operation, len(nodes), num_nodes=len(sizes))
        loads.append(Load(link, network, 0.0, *hops))
        for node, size in leaves.items():
            leaving[node] += size
    busiest = Load(*map(max, zip(*loads, strict=True)))
    return busiest._replace(node=max(leaving.values(), default=0.0))


def _count_ring_hops(operation: str, num_devices: int, *, num_nodes: int) -> tuple[int, int]:
    """Consecutive hops inside and between nodes, as NCCL's tuning counts them: a ring has a hop for
    each device, and an all-reduce between nodes uses trees.

    Source: NVIDIA/nccl, src/graph/tuning.cc.
    """
    if operation != ALL_REDUCE:
        return num_devices - num_nodes, num_nodes - 1
    if num_nodes == 1:
        return 2 * (num_devices - 1), 0
    return 2 * (num_devices // num_nodes - 1), 2 * math.ceil(math.log2(num_nodes))
