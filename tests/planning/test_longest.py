"""Search for the longest row that fits, with invented plans whose memory is linear in the row."""

import dataclasses

import pytest

from jaxsp.hf import model_config
from jaxsp.planning import absent, fit, planner, searches
from tests.planning import example_plans, programs

MODEL = model_config.parse_model_config(programs.LLAMA)
CLUSTER = absent.make_cluster("h100-80gb", 8)


def search_row(monkeypatch, make, *words, has_splits=False):
    """Result of a search whose plans `make(row_tokens)` makes, and the planned lengths in order.

    Args: has_splits: uses the lengths where cuDNN splits its work, which needs the plan extra.
    """
    lengths = []
    if not has_splits:
        monkeypatch.setattr(searches, "_find_next_split", lambda *given, **named: None)

    def plan_step(config, *, model, cluster):
        # Products of the MLP would fill the memory that tells how much longer rows need
        is_free = "memory.remat=save_attention_and_mlp" not in words
        assert config.memory.kept_mlp_layers == (0 if is_free else "auto")
        assert config.rows_per_microbatch == 1, "the longest row has the device for itself"
        lengths.append(config.row_tokens)
        return make(config.row_tokens)

    monkeypatch.setattr(planner, "plan_step", plan_step)
    words = ("mesh.seq=8", "data.row_tokens=131072", "batch.rows_per_microbatch=auto", *words)
    config = programs.settings(*words).step
    return searches.find_longest_row(config, model=MODEL, cluster=CLUSTER), lengths


def line(row_tokens, *, longest=3_000_000, longest_of_host=10**9, fixed=15.0):
    """A plan whose device is full at one length, and whose host at another."""
    device = fixed + (72.8 - fixed) * row_tokens / longest
    host = 1960.0 * row_tokens / longest_of_host
    short = "too much" if device > 72.8 or host > 1960 else ""
    return example_plans.make_plan(
        row_tokens=row_tokens,
        fits=not short,
        shortage=short,
        memory_bottleneck="device" if device / 72.8 > host / 1960 else "host",
        device_gib=device,
        host_gib=host,
        memory={
            fit.WEIGHTS: fixed,
            fit.OTHER: device - fixed,
            planner.RESERVED: 6.3,
        },
    )


def test_products_of_the_mlp_are_kept_where_the_config_says_so(monkeypatch):
    result, _ = search_row(monkeypatch, line, "memory.remat=save_attention_and_mlp")
    assert result.plan is not None


@pytest.mark.parametrize("limit", [9_000, 200_000, 3_000_000, 40_000_000])
def test_the_longest_row_is_found_to_1_percent_in_at_most_6_plans(monkeypatch, limit):
    result, lengths = search_row(monkeypatch, lambda n: line(n, longest=limit))
    best = result.plan.row_tokens
    assert best <= limit < result.shortest_failing.row_tokens
    assert result.shortest_failing.row_tokens - best <= max(
        searches.PRECISION * best, searches.LENGTH_UNIT * 8
    )
    assert best % (searches.LENGTH_UNIT * 8) == 0
    assert len(lengths) <= 6
    assert [length.row_tokens for length in result.tried] == sorted(set(lengths))


def test_three_percent_of_the_device_stays_free(monkeypatch):
    """The program is chosen for less memory, so that a smaller one is used near the limit."""
    clusters = []

    def plan_step(config, *, model, cluster):
        clusters.append(cluster)
        return line(config.row_tokens)

    monkeypatch.setattr(searches, "_find_next_split", lambda *given, **named: None)
    monkeypatch.setattr(planner, "plan_step", plan_step)
    config = programs.settings("mesh.seq=8", "data.row_tokens=131072").step
    searches.find_longest_row(config, model=MODEL, cluster=CLUSTER)
    assert {cluster.headroom for cluster in clusters} == {0.03}
    assert CLUSTER.headroom == 0.0, "other plans use all of it"


def test_a_plan_chooses_memory_options_for_what_the_headroom_leaves(monkeypatch):
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs needs the plan extra")
    limits = []

    class Planned(Exception):
        pass

    def fit(program, *, limit, **_):
        limits.append(limit)
        raise Planned

    monkeypatch.setattr(planner.fit, "fit", fit)
    config = programs.settings("mesh.seq=8").step
    for headroom in (0.0, 0.03):
        cluster = dataclasses.replace(CLUSTER, headroom=headroom)
        with pytest.raises(Planned):
            planner.plan_step(config, model=MODEL, cluster=cluster)
    without, kept = limits
    assert kept.device == pytest.approx(0.97 * without.device)
    assert kept.host == without.host


@pytest.mark.parametrize(
    ("split_at", "before", "after"),
    [(786_432, 750_000, 1_000_000), (196_608, 185_000, 250_000)],
    ids=["more chunks of heads", "slots with less room"],
)
def test_a_row_that_fits_is_found_although_shorter_ones_do_not_fit(
    monkeypatch, split_at, before, after
):
    """At a workspace of 6 GiB, cuDNN's work is split into twice as many calls, and needs half."""
    pytest.importorskip("jax_cuda12_plugin", reason="the choice of kernel needs absent devices")
    plan = lambda n: line(n, longest=before if n < split_at else after)
    result, lengths = search_row(monkeypatch, plan, "data.max_segments_per_row=64", has_splits=True)
    assert result.plan.row_tokens == pytest.approx(after, rel=0.02)
    assert result.shortest_failing.row_tokens > result.plan.row_tokens
    assert len(lengths) <= 12


def test_a_search_may_find_no_row_that_fits(monkeypatch):
    result, _ = search_row(monkeypatch, lambda n: line(n, fixed=80.0))
    assert result.plan is None
    assert result.shortest_failing.row_tokens == searches.LENGTH_UNIT * 8


def test_a_row_for_which_the_kernel_falls_back_is_too_long(monkeypatch):
    def fall_back(n):
        return (
            line(n)
            if n < 2_000_000
            else example_plans.make_plan(
                row_tokens=n, kernel="blockwise", fallback_reason="counts to 2**31"
            )
        )

    result, lengths = search_row(monkeypatch, fall_back)
    assert result.plan.row_tokens == pytest.approx(2_000_000, rel=0.01)
    assert result.shortest_failing.problem == "counts to 2**31"
    assert len(lengths) <= 12
