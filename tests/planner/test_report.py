"""Plans in words."""

from jaxsp.planner import budget, report, search, shapes
from tests.planner import made


def test_all_of_a_plan_is_said():
    said = report.text(made.plan(), model="a model")
    assert "a model on 8 x h100-80gb" in said
    assert "replica 1 x data 1 x seq 8; 8 rows of 131,072 tokens a step" in said
    assert "yes: 30.0 of 72.8 GiB on each device; the device is what binds" in said
    assert f"20.00 attention: {budget.CAUSES[budget.ATTENTION]}" in " ".join(said.split())
    assert "2.000 2.000 1.00 all-to-all along seq" in " ".join(said.split())
    assert "2,000 TFLOP needed of each device in a step, 2,500 executed (1.25 times)" in " ".join(said.split())
    assert "about 5 s a step, 209,715 tokens/s, MFU 40 %: an ESTIMATE" in said
    assert "GiB of each node's memory" not in said


def test_one_row_is_a_row_and_one_way_to_share_is_not_compared():
    said = report.text(made.plan(rows_per_step=1, attention="ring of 8", attention_others={}), model="a model")
    assert "; 1 row of 131,072 tokens a step" in said
    assert "MB for a layer in a turn where attention is kept; cuDNN" in " ".join(said.split())


def test_what_does_not_fit_names_what_binds_and_what_is_not_turned():
    plan = made.plan(
        fits=False, short="much", binds="host", host_gib=2100.0, ways_out=["memory.remat=full", "memory.x=y", "shorter rows"]
    )
    assert report.fits(plan) == (
        "NO: 30.0 of 72.8 GiB on each device, 2,100 of 1,960 GiB of each node's memory; the host is what binds. "
        "Not turned yet: memory.remat=full, memory.x=y or shorter rows"
    )


def test_another_kernel_than_cudnn_says_why():
    said = report.text(made.plan(kernel="blockwise", why_not_cudnn="cuDNN needs what is not there"), model="a model")
    assert "blockwise (because cuDNN needs what is not there)" in " ".join(said.split())
    assert "blockwise\n" in report.text(made.plan(kernel="blockwise"), model="a model"), "as it was asked for"


def test_without_ceilings_there_is_no_estimate():
    plan = made.plan(step_s_estimate=None, tokens_per_s_estimate=None, mfu_estimate=None)
    assert report.speed(plan) == "no estimate: the ceilings are for bfloat16 and cuDNN's attention"


def test_the_longest_row_says_what_was_full_beyond_it():
    fits = search.Tried(row_tokens=1000, plan=made.plan(row_tokens=1000), why="")
    beyond = search.Tried(row_tokens=1010, plan=made.plan(row_tokens=1010, short="x", binds="host"), why="x")
    said = report.longest(search.Longest(tried=[fits, beyond]), seconds=12.3)
    assert said == (
        "longest row: 1,000 tokens, remat attention; 1,010 do not fit: the host is full. 2 lengths compiled in 12 s"
    )
    none = search.Longest(tried=[search.Tried(row_tokens=1024, plan=made.plan(ways_out=["memory.a=b"]), why="it is full")])
    assert report.longest(none, seconds=1.0) == (
        "no row fits, not even of 1,024 tokens: it is full. Not turned yet: memory.a=b."
    )


def test_meshes_are_a_table_and_those_that_were_refused_say_why():
    mesh = {"replica": 1, "data": 1, "seq": 8}
    found = [
        shapes.Shape(mesh=mesh, kind={"kind": "ulysses"}, plan=made.plan(), why=""),
        shapes.Shape(mesh=mesh, kind={"kind": "ring"}, plan=made.plan(fits=False, binds="host"), why=""),
        shapes.Shape(mesh=mesh, kind={"kind": "hybrid", "inner_degree": 4}, plan=None, why="28 query heads cannot be shared"),
    ]
    lines = report.ranked(found).splitlines()
    assert lines[1].split() == ["1", "1", "8", "ulysses", "yes", "30.0", "0", "attention", "cudnn", "5", "209,715", "40"]
    assert "no: host" in lines[2]
    assert lines[3].split(maxsplit=3) == ["1", "1", "8", "hybrid 4  28 query heads cannot be shared"]
    assert lines[1].index("yes") + 3 == lines[0].index("fits") + 4, "columns end under their heads"
    assert "estimates" in lines[-1]
