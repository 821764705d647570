"""scripts/bench/peer_transformers.py compares transformers with jaxsp on the same documents."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import re

import numpy as np
import pytest

from jaxsp.hf import model_config
from jaxsp.model import flops
from scripts.bench import cases, report, step
from scripts.bench import peer_transformers as peer
from tests import commands, messages

torch = pytest.importorskip(
    "torch", reason="torch is not installed: it is what transformers computes with (extra `test`)"
)


CPU = torch.device("cpu")

CASE = cases.Case(shape="tiny", row_tokens=64, documents="packed", kernel="auto", steps=1)

FIGURES = {"status": report.OK, "loss": 6.0, "loss_finite": True}
OURS = step.Result(
    **FIGURES,
    tokens_per_s=300.0,
    mfu=0.456,
    peak_gib=1.0,
    device="cpu",
    step_s=2.0,
    tflops_per_device=1.0,
)
PEER = peer.Result(**FIGURES, tokens_per_s=200.0, mfu=0.304, peak_gib=4.0, attention="sdpa")


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    """Results and output of a run on the CPU."""
    out = tmp_path_factory.mktemp("peer") / "new" / "results.json"
    options = "--shapes tiny --lengths 64 --documents one packed --steps 1".split()
    environment = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = ""  # conftest.py hides torch there
    words = ("-m", peer.MODULE, *options, "--out", out)
    done = commands.run_python(*words, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


@pytest.mark.slow
def test_both_sides_have_figures_and_ratios(benchmark):
    results, _ = benchmark
    names = [(case["documents"], case["row_tokens"]) for case in results["cases"]]
    assert names == [("one", 64), ("packed", 64)]
    for case in results["cases"]:
        theirs = case["transformers"]
        assert (case["status"], theirs["status"]) == (report.OK, report.OK)
        assert theirs["attention"] == "sdpa"
        assert case["speed_ratio"] == pytest.approx(case["tokens_per_s"] / theirs["tokens_per_s"])
        tflops = [side["tflops_per_device"] * side["step_s"] for side in (case, theirs)]
        assert tflops[0] == pytest.approx(tflops[1]), "the same count of arithmetic"
        for side in (case, theirs):
            assert side["tokens_per_s"] == pytest.approx(64 / side["step_s"])
            assert 0 < side["step_s"] <= side["slowest_step_s"]
            assert side["loss"] == pytest.approx(math.log(512), abs=0.3), "random weights"
        peaks = (case["peak_gib"], theirs["peak_gib"], case["memory_ratio"])
        assert peaks == (None, None, None), "a CPU reports no peak"
    assert (results["device"], results["torch_device"]) == ("cpu", "cpu")
    assert results["torch"] == torch.__version__
    assert results["transformers"] == importlib.metadata.version("transformers")
    rows = {"jaxsp": 64, "transformers": 64, "ratio": 1.0}
    rows |= {"jaxsp_is_limit": False, "transformers_is_limit": False}
    assert results["longest"] == [
        {"shape": "tiny", "documents": documents, **rows} for documents in ("one", "packed")
    ]


@pytest.fixture(scope="module")
def model():
    return peer.make_model(cases.SHAPES["tiny"], attention="sdpa", device=CPU)


def logits(model, documents):
    with torch.no_grad():
        return model(**peer.make_inputs(documents, attention="sdpa", device=CPU)).logits[0]


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_the_peer_keeps_packed_documents_apart(model, changed):
    """Other tokens in a document change only its own logits."""
    documents = np.split(np.random.default_rng(3).integers(0, 512, 40), [9, 26])
    others = [
        (document + 1) % 512 if index == changed else document
        for index, document in enumerate(documents)
    ]
    lengths = [len(document) for document in documents]
    before, after = (logits(model, rows).split(lengths) for rows in (documents, others))
    is_same = list(map(torch.equal, before, after))
    assert is_same == [index != changed for index in range(3)]


def test_the_peers_loss_of_a_row_is_that_of_its_documents(model):
    """The mean over all tokens that have a next one in their document."""
    documents = cases.make_documents(CASE)
    with torch.no_grad():
        row = model(**peer.make_inputs(documents, attention="sdpa", device=CPU)).loss
        sums = [
            (len(ids) - 1) * model(**peer.make_inputs([ids], attention="sdpa", device=CPU)).loss
            for ids in documents
            if len(ids) > 1
        ]
    torch.testing.assert_close(row, sum(sums) / (64 - 16), rtol=1e-6, atol=0)


def test_a_step_recomputes_layers_and_updates_float32_weights(monkeypatch):
    """AdamW's first update is the learning rate; the schedule makes later ones smaller."""
    model = peer.make_model(cases.SHAPES["tiny"], attention="sdpa", device=CPU)
    monkeypatch.setattr(peer, "make_model", lambda fields, *, attention, device: model)
    take_step = peer.make_step(CASE, attention="sdpa", device=CPU)
    calls = []
    model.model.layers[1].mlp.up_proj.register_forward_hook(
        lambda module, inputs, output: calls.append(output.dtype)
    )
    weight = model.model.layers[1].mlp.up_proj.weight
    updates = []
    for _ in range(3):
        before = weight.detach().clone()
        loss = take_step()
        updates.append((weight.detach() - before).abs().max().item())
    assert weight.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(512), abs=0.3)
    assert calls == [torch.bfloat16] * 6, "forward, and once more in the backward pass"
    assert updates[0] == pytest.approx(1e-5, rel=0.01)
    assert updates[2] < 0.5 * updates[0], "cosine of 3 steps: 1, 0.75, 0.25"


def run(monkeypatch, tmp_path, run_side, *options):
    """Exit code and file of a benchmark. Args: run_side: makes the result of a case and side."""
    monkeypatch.setattr(step, "run_case", lambda case, *, seconds: run_side(case, "jaxsp"))
    monkeypatch.setattr(
        peer, "run_peer", lambda case, *, attention, seconds: run_side(case, "transformers")
    )
    monkeypatch.setattr(peer, "find_problem", lambda: None)
    out = tmp_path / "results.json"
    code = peer.main(["--shapes", "tiny", "--lengths", "64", "--out", str(out), *options])
    return code, json.loads(out.read_text())


def succeed(case, side):
    """Result of a side that works."""
    return OURS if side == "jaxsp" else PEER


def test_rows_are_doubled_for_the_sides_that_fit(monkeypatch, tmp_path, capsys):
    longest = {
        ("jaxsp", "one"): 512,
        ("transformers", "one"): 128,
        ("jaxsp", "packed"): 64,
        ("transformers", "packed"): 0,
    }
    tried = {key: [] for key in longest}

    def run_side(case, side):
        tried[side, case.documents].append(case.row_tokens)
        if case.row_tokens <= longest[side, case.documents]:
            return succeed(case, side)
        return type(succeed(case, side))(status=report.OUT_OF_MEMORY, message="too long")

    code, actual = run(monkeypatch, tmp_path, run_side, "--until-it-fails")
    assert code == 0, "running out of memory is an answer"
    assert tried == {
        ("jaxsp", "one"): [64, 128, 256, 512, 1024],
        ("transformers", "one"): [64, 128, 256],
        ("jaxsp", "packed"): [64, 128],
        ("transformers", "packed"): [64],
    }
    last = actual["cases"][-1]
    statuses = (last["status"], last["transformers"]["status"])
    assert (last["row_tokens"], *statuses) == (1024, report.OUT_OF_MEMORY, report.NOT_RUN)
    *_, case_line, one_line, packed_line = capsys.readouterr().out.splitlines()
    problems = (report.OUT_OF_MEMORY, "too long", "transformers", report.NOT_RUN)
    assert re.search(messages.containing("jaxsp", *problems), case_line)
    assert re.search(messages.containing("tiny one", 512, 128, "4.00"), one_line)
    assert re.search(messages.containing("tiny packed", 64), packed_line)
    assert [rows["ratio"] for rows in actual["longest"]] == [4.0, None]


def test_ratios_are_figures_of_jaxsp_over_the_peers(monkeypatch, tmp_path, capsys):
    _, actual = run(monkeypatch, tmp_path, succeed, "--documents", "one")
    assert [actual["cases"][0][name] for name in ("speed_ratio", "memory_ratio")] == [1.5, 0.25]
    line = capsys.readouterr().out.splitlines()[1]
    expected = "tiny 64 one 300 45.6 1.00 6.0000 200 30.4 4.00 6.0000 1.50 0.25 sdpa"
    assert line.split() == expected.split()
    assert re.search(messages.containing("1.50", "0.25"), report.summarize(actual))


def test_flops_of_the_peer_are_counted_as_those_of_jaxsp(tmp_path):
    actual = peer.measure(dataclasses.replace(CASE, kernel="sdpa"), tmp_path)
    num_flops = actual.tflops_per_device * actual.step_s * 1e12
    lengths = np.array([len(document) for document in cases.make_documents(CASE)])
    model = model_config.parse_model_config(cases.SHAPES["tiny"], field="tiny")
    assert num_flops == pytest.approx(flops.step_flops(model, lengths))
