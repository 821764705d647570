"""The simulator of schedules, on programs short enough to follow by hand."""

import pytest

from jaxsp.planning import hlo
from jaxsp.planning.step_time import ScheduledTransfer, Timeline

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
    program = hlo.parse(f"{HEAD}{more}\nENTRY %main (a: f32[8]) -> f32[8] {{\n{body}\n}}\n")
    number = {
        line.name: line.line_number
        for lines in program.computations.values()
        for line in lines.values()
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
    kernel_seconds = {number[name]: seconds for name, seconds in kernels.items()}
    simulated = Timeline(program, kernel_seconds, scheduled)
    simulated.run(program.entry, runs=1)
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
