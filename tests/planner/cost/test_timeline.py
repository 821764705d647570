"""The simulator of schedules, on programs short enough to follow by hand."""

import pytest

from jaxsp.planner.compile import hlo
from jaxsp.planner.cost import timeline
from jaxsp.planner.cost.timeline import ExposedTime, ScheduledTransfer

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
    known = f'{{"known_trip_count":{{"n":"{trips}"}}}}'
    return f"%loop.{body} = f32[8]{{0}} while(%a), condition=%less, body=%{body}, backend_config={known}"


def simulate(*lines, more="", kernels, transfers=None):
    """Simulates an entry computation of these instructions.

    Args:
        kernels: seconds by name.
        transfers: stream and seconds by the name of the instruction that begins it.
    Returns: the timeline, and the seconds that each transfer is waited for, by name.
    """
    body = "\n".join(f"  {line}" for line in lines)
    program = hlo.parse_module(f"{HEAD}{more}\nENTRY %main (a: f32[8]) -> f32[8] {{\n{body}\n}}\n")
    number = {
        line.name: line.line_number for lines in program.computations.values() for line in lines
    }
    found = {
        number[name]: ScheduledTransfer(
            stream=stream,
            seconds=seconds,
            begin_line=number[name],
            end_line=number.get(f"{name}.end", number[name]),
        )
        for name, (stream, seconds) in (transfers or {}).items()
    }
    simulated = timeline.simulate(
        program, {number[name]: seconds for name, seconds in kernels.items()}, found
    )
    never = ExposedTime(num_runs=0, seconds=0.0)
    return simulated, {name: simulated.exposed.get(number[name], never) for name in transfers or {}}


@pytest.mark.parametrize(
    ("seconds", "waited"),
    [(2.0, 0.0), (3.0, 0.0), (5.0, 2.0)],
    ids=["shorter", "as long", "longer"],
)
def test_a_collective_is_hidden_as_far_as_kernels_run_beside_it(seconds, waited):
    found, waits = simulate(
        begin("x"), kernel("product"), end("x"), kernel("next"),
        kernels={"product": 3.0, "next": 1.0}, transfers={"x": (LINKS, seconds)},
    )  # fmt: skip
    assert waits["x"] == ExposedTime(num_runs=1, seconds=waited)
    assert found.seconds == 4.0 + waited


@pytest.mark.parametrize(
    "lines", [(begin("x"), end("x")), ("%x = f32[64]{0} all-gather(%a)",)], ids=["pair", "blocking"]
)
def test_a_collective_that_nothing_hides_is_waited_for(lines):
    found, waits = simulate(
        kernel("before"),
        *lines,
        kernel("after"),
        kernels={"before": 3.0, "after": 1.0},
        transfers={"x": (LINKS, 2.0)},
    )
    assert waits["x"].seconds == 2.0
    assert found.seconds == 6.0


def test_transfers_of_one_stream_queue_and_each_is_waited_for_while_it_runs():
    """x runs until 5 and y until 6. At 3 the kernel is done, and y is waited for: 2 s while x runs, 1 s while y does."""
    found, waits = simulate(
        begin("x"), begin("y"), kernel("product"), end("y"), end("x"),
        kernels={"product": 3.0}, transfers={"x": (LINKS, 5.0), "y": (LINKS, 1.0)},
    )  # fmt: skip
    assert found.seconds == 6.0
    assert [waits["x"].seconds, waits["y"].seconds] == [2.0, 1.0]


def test_transfers_of_two_streams_overlap():
    found, waits = simulate(
        begin("x"), begin("y"), kernel("product"), end("x"), end("y"),
        kernels={"product": 3.0}, transfers={"x": (LINKS, 2.0), "y": ("from host", 3.0)},
    )  # fmt: skip
    assert found.seconds == 3.0
    assert [waits["x"].seconds, waits["y"].seconds] == [0.0, 0.0]


def test_copies_in_both_directions_and_collectives_run_at_once():
    streams = {"x": (LINKS, 3.0), "y": ("from host", 3.0), "z": ("to host", 3.0)}
    lines = [*map(begin, streams), kernel("product"), *map(end, streams)]
    assert simulate(*lines, kernels={"product": 3.0}, transfers=streams)[0].seconds == 3.0


@pytest.mark.parametrize("trips", [0, 1, 2, 7])
def test_a_loop_counts_as_often_as_it_runs(trips):
    found, waits = simulate(
        kernel("before"), loop("body", trips), more=computation("body", begin("x"), kernel("product"), end("x")),
        kernels={"before": 1.0, "product": 3.0}, transfers={"x": (LINKS, 5.0)},
    )  # fmt: skip
    assert found.seconds == 1.0 + trips * 5.0
    assert waits["x"] == ExposedTime(num_runs=trips, seconds=2.0 * trips)
    assert sum(found.kernel_seconds.values()) == 1.0 + trips * 3.0


def test_loops_in_loops_multiply():
    inner = computation("inner", kernel("product"))
    outer = computation("outer", loop("inner", 3), begin("x"), end("x"))
    found, waits = simulate(
        loop("outer", 4),
        more=inner + outer,
        kernels={"product": 1.0},
        transfers={"x": (LINKS, 0.5)},
    )
    assert found.seconds == 4 * (3 + 0.5)
    assert waits["x"] == ExposedTime(num_runs=4, seconds=2.0)


@pytest.mark.parametrize(("seconds", "waited"), [(3.0, 0.0), (6.0, 1.0)])
def test_a_collective_beside_a_loop_has_all_its_trips_to_be_done(seconds, waited):
    """As a layer's gathers have beside the loop over its tiles."""
    found, waits = simulate(
        begin("x"), loop("body", 5), end("x"), more=computation("body", kernel("tile")),
        kernels={"tile": 1.0}, transfers={"x": (LINKS, seconds)},
    )  # fmt: skip
    assert waits["x"].seconds == waited
    assert found.seconds == 5.0 + waited


def test_collectives_in_a_loop_queue_after_one_beside_it():
    """x has the links until 4 and y until 5, while the first trip's kernel takes 1 s. Later, y takes as long as the kernel."""
    found, waits = simulate(
        begin("x"), loop("body", 3), end("x"), more=computation("body", begin("y"), kernel("tile"), end("y")),
        kernels={"tile": 1.0}, transfers={"x": (LINKS, 4.0), "y": (LINKS, 1.0)},
    )  # fmt: skip
    assert [waits["x"].seconds, waits["y"].seconds] == [3.0, 1.0]
    assert found.seconds == 5.0 + 2.0


def test_of_a_conditional_the_slowest_branch_counts():
    more = computation("short", kernel("one")) + computation("long", kernel("two"), kernel("three"))
    line = "%c = f32[8]{0} conditional(%p, %a, %a), branch_computations={%short, %long}"
    found, _ = simulate(line, more=more, kernels={"one": 1.5, "two": 1.0, "three": 1.0})
    assert found.seconds == 2.0
    assert sorted(found.kernel_seconds.values()) == [1.0, 1.0]


def test_kernels_of_called_computations_run_in_their_place():
    more = computation("called", kernel("inside"))
    for line in (
        "%c = f32[8]{0} call(%a), to_apply=%called",
        "%c = (f32[8]{0}) async-start(%a), calls=%called",
    ):
        found, waits = simulate(
            begin("x"),
            line,
            end("x"),
            more=more,
            kernels={"inside": 2.0},
            transfers={"x": (LINKS, 3.0)},
        )
        assert waits["x"].seconds == 1.0
        assert found.seconds == 3.0
