"""Traffic of collectives inside nodes and between them, against counts by hand."""

import pytest

from jaxsp.core import nodes
from jaxsp.core.nodes import Load


def find(operation, groups, node_devices=4, **options):
    groups = tuple(map(tuple, groups))
    return nodes.find_load(operation, groups, node_devices=node_devices, **options)


def test_a_product_keeps_its_all_to_alls_inside_nodes_and_its_ring_between_them():
    """Ulysses of 4 x ring of 2, on two nodes of 4."""
    inner = find("all-to-all", [range(4), range(4, 8)])
    assert inner == Load(link=1.0, link_hops=1)
    ring = find("collective-permute", [(device, device + 4) for device in range(4)])
    assert ring == Load(network=1.0, node=4.0, network_hops=1)


def test_a_ring_over_two_nodes_leaves_each_of_them_once():
    """Devices 3 and 7 send to the other node, and the others wait for them."""
    load = find("collective-permute", [range(8)])
    assert load == Load(link=1.0, network=1.0, node=1.0, link_hops=1, network_hops=1)
    # a chain does not come back: only device 3 sends to the other node
    chain = find("collective-permute", [range(4)], is_ring=False)
    assert chain == Load(link=1.0, link_hops=1)
    # 0 sends to 4 and 5 to 1; in rings, 4 and 1 send back
    pairs = [(0, 4), (5, 1)]
    assert [find("collective-permute", pairs, is_ring=ring).node for ring in (False, True)] == [
        1,
        2,
    ]


def test_an_all_to_all_sends_to_each_device_of_other_nodes():
    load = find("all-to-all", [range(8)])
    assert (load.link, load.network) == (3 / 7, 4 / 7)
    assert load.node == pytest.approx(4 * 4 / 7)


@pytest.mark.parametrize("operation", ["all-gather", "reduce-scatter", "all-reduce"])
def test_rings_of_a_group_share_the_cards_of_its_devices(operation):
    whole_nodes = find(operation, [range(16)])
    assert (whole_nodes.link, whole_nodes.network, whole_nodes.node) == (1.0, 1 / 4, 1.0)
    # replicas: each device of a node is in a group of its own, with its own card
    replicas = find(operation, [range(first, 16, 4) for first in range(4)])
    assert (replicas.link, replicas.network, replicas.node) == (0.0, 1.0, 4.0)


def test_a_group_across_the_edge_counts_even_if_the_first_group_is_inside_a_node():
    """Groups of 6 on nodes of 8: the second one has 2 devices in the first node and 4 in the
    second."""
    groups = [range(6), range(6, 12)]
    load = find("all-gather", groups, 8)
    assert (load.network, load.node) == (1 / 2, 1.0)
    assert find("all-to-all", groups, 8).network == 4 / 5
    assert find("collective-permute", groups, 8).network == 1.0
    assert find("all-gather", groups[:1], 8).network == 0.0


def test_hops_are_those_of_rings_and_of_trees_between_nodes():
    def hops(operation, groups):
        load = find(operation, groups)
        return load.link_hops, load.network_hops

    assert hops("all-gather", [range(4)]) == (3, 0)
    assert hops("all-gather", [range(16)]) == (12, 3)
    assert hops("all-reduce", [range(4)]) == (6, 0)
    assert hops("all-reduce", [range(16)]) == (6, 4)
