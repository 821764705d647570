"""Traffic of collectives inside nodes and between them, against counts by hand."""

from jaxsp.attention import nodes
from jaxsp.attention.nodes import Load


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
