"""The simulator of schedules, on programs short enough to follow by hand."""

import pytest

from jaxsp.planner.compile import hlo
from jaxsp.planner.cost import timeline
from jaxsp.planner.cost.timeline import ScheduledTransfer

HEAD = "HloModule small, is_scheduled=true, num_partitions=8\n"
LINKS = "collectives"


def computation(name, *lines):
    return (
        f"%{name} (b: f32[8]) -> f32[8] {{\n" + "\n".join(f"  {line}" for line in lines) + "\n}\n"
    )


def kernel(name):
    return f"%{name} = f32[8]{{0}} negate(%a)"


def begin(name):
    return f"%{name} = (f32[8]{{0}}, f32[64]{{0}}) all-gather-start(%a), replica_groups={{}}"


def end(name):
    return f"%{name}.end = f32[64]{{0}} all-gather-done(%{name})"


def loop(body, trips):
    config = f'{{"known_trip_count":{{"n":"{trips}"}}}}'
    while_ = f"while(%a), condition=%less, body=%{body}, backend_config={config}"
    return f"%loop.{body} = f32[8]{{0}} {while_}"


def simulate(*lines, more="", kernels, transfers=None):
    """Simulates an entry computation of these instructions.

    Args:
        kernels: seconds by name.
        transfers: stream and seconds by the name of the instruction that begins it.
    Returns: the timeline, and the number of runs and the exposed seconds of each transfer, by name.
    """
    body = "\n".join(f"  {line}" for line in lines)
    program = hlo.parse_module(f"{HEAD}{more}\nENTRY %main (a: f32[8]) -> f32[8] {{\n{body}\n}}\n")
    number = {
        line.name: line.line_number for lines in program.computations.values() for line in lines
    }
    scheduled = {
        number[name]: ScheduledTransfer(
            stream=stream,
            seconds=seconds,
            begin_line=number[name],
            end_line=number.get(f"{name}.end", number[name]),
        )
        for name, (stream, seconds) in (transfers or {}).items()
    }
    simulated = timeline.simulate(
        program, {number[name]: seconds for name, seconds in kernels.items()}, scheduled
    )
    return simulated, {
        name: (simulated.num_runs[number[name]], simulated.exposed_s[number[name]])
        for name in transfers or {}
    }


@pytest.mark.parametrize(
    ("seconds", "waited"),
    [(2.0, 0.0), (3.0, 0.0), (5.0, 2.0)],
    ids=["shorter", "as long", "longer"],
)
def test_a_collective_is_exposed_only_after_the_kernels_beside_it(seconds, waited):
    simulated, waits = simulate(
        begin("x"), kernel("product"), end("x"), kernel("next"),
        kernels={"product": 3.0, "next": 1.0}, transfers={"x": (LINKS, seconds)},
    )  # fmt: skip
    assert waits["x"] == (1, waited)
    assert simulated.seconds == 4.0 + waited


@pytest.mark.parametrize(
    "lines", [(begin("x"), end("x")), ("%x = f32[64]{0} all-gather(%a)",)], ids=["pair", "blocking"]
)
def test_a_collective_without_a_kernel_beside_it_is_exposed(lines):
    simulated, waits = simulate(
        kernel("before"),
        *lines,
        kernel("after"),
        kernels={"before": 3.0, "after": 1.0},
        transfers={"x": (LINKS, 2.0)},
    )
    assert waits["x"][1] == 2.0
    assert simulated.seconds == 6.0


def test_transfers_of_one_stream_queue_and_each_is_waited_for_while_it_runs():
    """x runs until 5 and y until 6. The kernel ends at 3 and y is waited for: 2 s while x runs, 1 s
    while y runs."""
    simulated, waits = simulate(
        begin("x"), begin("y"), kernel("product"), end("y"), end("x"),
        kernels={"product": 3.0}, transfers={"x": (LINKS, 5.0), "y": (LINKS, 1.0)},
    )  # fmt: skip
    assert simulated.seconds == 6.0
    assert [waits["x"][1], waits["y"][1]] == [2.0, 1.0]


def test_transfers_of_two_streams_overlap():
    simulated, waits = simulate(
        begin("x"), begin("y"), kernel("product"), end("x"), end("y"),
        kernels={"product": 3.0}, transfers={"x": (LINKS, 2.0), "y": ("from host", 3.0)},
    )  # fmt: skip
    assert simulated.seconds == 3.0
    assert [waits["x"][1], waits["y"][1]] == [0.0, 0.0]


def test_copies_in_both_directions_and_collectives_run_at_once():
    streams = {"x": (LINKS, 3.0), "y": ("from host", 3.0), "z": ("to host", 3.0)}
    lines = [*map(begin, streams), kernel("product"), *map(end, streams)]
    assert simulate(*lines, kernels={"product": 3.0}, transfers=streams)[0].seconds == 3.0


@pytest.mark.parametrize("trips", [0, 1, 2, 7])
def test_a_loop_counts_once_per_iteration(trips):
    simulated, waits = simulate(
        kernel("before"),
        loop("body", trips),
        more=computation("body", begin("x"), kernel("product"), end("x")),
        kernels={"before": 1.0, "product": 3.0},
        transfers={"x": (LINKS, 5.0)},
    )
    assert simulated.seconds == 1.0 + trips * 5.0
    assert waits["x"] == (trips, 2.0 * trips)
    assert sum(simulated.kernel_seconds.values()) == 1.0 + trips * 3.0


def test_loops_in_loops_multiply():
    inner = computation("inner", kernel("product"))
    outer = computation("outer", loop("inner", 3), begin("x"), end("x"))
    simulated, waits = simulate(
        loop("outer", 4),
        more=inner + outer,
        kernels={"product": 1.0},
        transfers={"x": (LINKS, 0.5)},
    )
    assert simulated.seconds == 4 * (3 + 0.5)
    assert waits["x"] == (4, 2.0)


@pytest.mark.parametrize(("seconds", "waited"), [(3.0, 0.0), (6.0, 1.0)])
def test_all_iterations_of_a_loop_overlap_a_collective_beside_it(seconds, waited):
    """Example: the gathers of a layer beside the loop over its tiles."""
    simulated, waits = simulate(
        begin("x"), loop("body", 5), end("x"), more=computation("body", kernel("tile")),
        kernels={"tile": 1.0}, transfers={"x": (LINKS, seconds)},
    )  # fmt: skip
    assert waits["x"][1] == waited
    assert simulated.seconds == 5.0 + waited


def test_collectives_in_a_loop_queue_after_one_beside_it():
    """x uses the links until 4 and y until 5, while the kernel of the first iteration takes 1 s.
    Later, y takes as long as the kernel."""
    simulated, waits = simulate(
        begin("x"),
        loop("body", 3),
        end("x"),
        more=computation("body", begin("y"), kernel("tile"), end("y")),
        kernels={"tile": 1.0},
        transfers={"x": (LINKS, 4.0), "y": (LINKS, 1.0)},
    )
    assert [waits["x"][1], waits["y"][1]] == [3.0, 1.0]
    assert simulated.seconds == 5.0 + 2.0


def test_the_slowest_branch_of_a_conditional_counts():
    more = computation("short", kernel("one")) + computation("long", kernel("two"), kernel("three"))
    line = "%c = f32[8]{0} conditional(%p, %a, %a), branch_computations={%short, %long}"
    simulated, _ = simulate(line, more=more, kernels={"one": 1.5, "two": 1.0, "three": 1.0})
    assert simulated.seconds == 2.0
    assert sorted(simulated.kernel_seconds.values()) == [1.0, 1.0]


def test_kernels_of_called_computations_run_in_their_place():
    more = computation("called", kernel("inside"))
    for line in (
        "%c = f32[8]{0} call(%a), to_apply=%called",
        "%c = (f32[8]{0}) async-start(%a), calls=%called",
    ):
        simulated, waits = simulate(
            begin("x"),
            line,
            end("x"),
            more=more,
            kernels={"inside": 2.0},
            transfers={"x": (LINKS, 3.0)},
        )
        assert waits["x"][1] == 1.0
        assert simulated.seconds == 3.0


def test_each_kind_of_layer_takes_its_fraction_of_the_time():
    """Three of 4 layers take the first branch, of 3 s and a wait of 2 s; one the second, of 7 s."""
    switch = (
        "%switch = f32[8]{0} conditional(%i, %a, %a), branch_computations={%near, %far}, "
        'metadata={op_name="jit(f)/attend/layers_of_kinds_3_1/cond"}'
    )
    branches = computation("near", kernel("short"), begin("x"), end("x"))
    branches += computation("far", kernel("long"))
    simulated, waits = simulate(
        loop("layers", 4),
        more=branches + computation("layers", switch),
        kernels={"short": 3.0, "long": 7.0},
        transfers={"x": (LINKS, 2.0)},
    )
    assert simulated.seconds == 3 * (3.0 + 2.0) + 7.0
    assert waits["x"] == (3, 3 * 2.0)
