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
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

Groups = tuple[tuple[int, ...], ...]
"""Groups of devices that communicate with each other, all at the same time."""

PERMUTE = "collective-permute"
ALL_TO_ALL = "all-to-all"
ALL_REDUCE = "all-reduce"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
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

    def join(self, other: "Load") -> "Load":
        """The load of two collectives at the same time on other devices."""
        return Load(
            link=max(self.link, other.link),
            network=max(self.network, other.network),
            node=max(self.node, other.node),
            link_hops=max(self.link_hops, other.link_hops),
            network_hops=max(self.network_hops, other.network_hops),
        )


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
    load = Load()
    leaving: dict[int, float] = {}
    for group in groups:
        group_nodes = [device // node_devices for device in group]
        if operation == PERMUTE:
            of_group, leaves = _find_permute_load(group_nodes, is_ring=is_ring)
        elif operation == ALL_TO_ALL:
            of_group, leaves = _find_all_to_all_load(group_nodes)
        else:
            of_group, leaves = _find_ring_load(operation, group_nodes)
        load = load.join(of_group)
        for node, size in leaves.items():
            leaving[node] = leaving.get(node, 0.0) + size
    return dataclasses.replace(load, node=max(leaving.values(), default=0.0))


_Leaving = Mapping[int, float | int]
"""Bytes that leave each node."""


def _find_permute_load(nodes: Sequence[int], *, is_ring: bool) -> tuple[Load, _Leaving]:
    """Load of a group in which each device sends to the next one."""
    targets = [*nodes[1:], *nodes[: int(is_ring)]]
    leaves = collections.Counter(
        node for node, target in zip(nodes, targets, strict=False) if node != target
    )
    is_inside = len(targets) > sum(leaves.values())
    is_between = bool(leaves)
    load = Load(
        link=float(is_inside),
        network=float(is_between),
        link_hops=int(is_inside),
        network_hops=int(is_between),
    )
    return load, leaves


def _find_all_to_all_load(nodes: Sequence[int]) -> tuple[Load, _Leaving]:
    """Load of a group in which each device sends to each other one."""
    sizes = collections.Counter(nodes)
    others = max(1, len(nodes) - 1)
    load = Load(
        link=(max(sizes.values()) - 1) / others,
        network=(len(nodes) - min(sizes.values())) / others,
        link_hops=int(max(sizes.values()) > 1),
        network_hops=int(len(sizes) > 1),
    )
    return load, {node: size * (len(nodes) - size) / others for node, size in sizes.items()}


def _find_ring_load(operation: str, nodes: Sequence[int]) -> tuple[Load, _Leaving]:
    """Load of a group whose rings leave each of its nodes once."""
    sizes = collections.Counter(nodes)
    is_between = len(sizes) > 1
    link_hops, network_hops = _count_ring_hops(operation, len(nodes), num_nodes=len(sizes))
    load = Load(
        link=float(max(sizes.values()) > 1),
        network=is_between / min(sizes.values()),
        link_hops=link_hops,
        network_hops=network_hops,
    )
    return load, dict.fromkeys(sizes, float(is_between))


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
