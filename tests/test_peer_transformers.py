"""scripts/bench/peer_transformers.py times transformers beside jaxsp, on the same documents, and compares."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from jaxsp.hf import families
from jaxsp.model import flops
from scripts.bench import peer_transformers as peer
from scripts.bench import report, step
from tests import messages

torch = pytest.importorskip(
    "torch", reason="torch is not installed: it is what transformers computes with (extra `test`)"
)

from transformers import utils  # noqa: E402 - says unasked that there is no torch, where there is none

REPO = pathlib.Path(__file__).parent.parent

CPU = torch.device("cpu")

CASE = step.Case(shape="tiny", row_tokens=64, documents="packed", kernel="auto", steps=1)

NUMBERS = {"status": report.OK, "loss": 6.0, "loss_finite": True}
OURS = step.Result(
    **NUMBERS,
    tokens_per_s=300.0,
    mfu=0.456,
    peak_gib=1.0,
    device="cpu",
    step_s=2.0,
    tflops_per_device=1.0,
)
PEERS = peer.Result(**NUMBERS, tokens_per_s=200.0, mfu=0.304, peak_gib=4.0, attention="sdpa")


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    """The file that a run on the CPU wrote, and what it printed."""
    out = tmp_path_factory.mktemp("peer") / "new" / "results.json"
    words = [
        "--shapes",
        "tiny",
        "--lengths",
        "64",
        "--documents",
        "one",
        "packed",
        "--steps",
        "1",
        "--out",
        str(out),
    ]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "scripts.bench.peer_transformers", *words]
    done = subprocess.run(
        command, cwd=REPO, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


@pytest.mark.slow  # two processes of each side
def test_both_sides_have_numbers_and_ratios(benchmark):
    results, _ = benchmark
    assert [(case["documents"], case["row_tokens"]) for case in results["cases"]] == [
        ("one", 64),
        ("packed", 64),
    ]
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
        assert (case["peak_gib"], theirs["peak_gib"], case["memory_ratio"]) == (None, None, None), (
            "a CPU tells no peak"
        )
    assert (results["device"], results["torch_device"]) == ("cpu", "cpu")
    assert (results["torch"], results["transformers"]) == (
        torch.__version__,
        importlib.metadata.version("transformers"),
    )
    rows = [
        {
            "jaxsp": 64,
            "jaxsp_is_limit": False,
            "transformers": 64,
            "transformers_is_limit": False,
            "ratio": 1.0,
        }
    ] * 2
    asked = [{"shape": "tiny", "documents": documents} for documents in ("one", "packed")]
    assert results["longest"] == [one | tokens for one, tokens in zip(asked, rows, strict=True)]


@pytest.mark.slow  # two processes of each side
def test_the_table_shows_both_sides(benchmark):
    results, printed = benchmark
    header, *rows, first, second = printed.splitlines()
    assert header == report.BOTH
    assert rows == [report.both(case) for case in results["cases"]]
    assert f"{results['cases'][0]['transformers']['tokens_per_s']:,.0f}" in rows[0]
    assert re.search(messages.holding("tiny one", 64, 64, "1.00"), first)
    assert "tiny packed" in second


@pytest.fixture(scope="module")
def model():
    return peer.random_model(step.SHAPES["tiny"], attention="sdpa", device=CPU)


def logits(model, documents):
    with torch.no_grad():
        return model(**peer.inputs(documents, attention="sdpa", device=CPU)).logits[0]


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_the_peer_keeps_packed_documents_apart(model, changed):
    """With other tokens in a document, it alone has other logits."""
    documents = np.split(np.random.default_rng(3).integers(0, 512, 40), [9, 26])
    others = [
        (document + 1) % 512 if at == changed else document for at, document in enumerate(documents)
    ]
    lengths = [len(document) for document in documents]
    before, after = (logits(model, rows).split(lengths) for rows in (documents, others))
    same = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    assert same == [at != changed for at in range(3)]


def test_the_peer_learns_of_each_document_what_it_would_learn_of_it_alone(model):
    """The row's loss is the mean over all tokens that have a next one in their document."""
    documents = step.random_documents(CASE)
    with torch.no_grad():
        row = model(**peer.inputs(documents, attention="sdpa", device=CPU)).loss
        alone = [document for document in documents if len(document) > 1]
        sums = [
            (len(ids) - 1) * model(**peer.inputs([ids], attention="sdpa", device=CPU)).loss
            for ids in alone
        ]
    torch.testing.assert_close(row, sum(sums) / (64 - 16), rtol=1e-6, atol=0)


def test_flash_attention_is_told_where_documents_begin():
    documents = [np.arange(3), np.arange(5), np.arange(2)]
    row = peer.inputs(documents, attention="flash_attention_2", device=CPU)
    assert row["cu_seq_lens_q"].tolist() == row["cu_seq_lens_k"].tolist() == [0, 3, 8, 10]
    assert (row["max_length_q"], row["max_length_k"]) == (5, 5)
    assert row["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0, 1]]
    assert set(peer.inputs(documents, attention="sdpa", device=CPU)) == {
        "input_ids",
        "labels",
        "position_ids",
        "use_cache",
    }


def test_a_step_computes_layers_twice_and_moves_float32_weights(monkeypatch):
    """By the learning rate, which is what AdamW's first step is, and then by less, as the schedule says."""
    made = []
    random_model = peer.random_model
    monkeypatch.setattr(
        peer,
        "random_model",
        lambda *words, **how: made.append(random_model(*words, **how)) or made[0],
    )
    take_step = peer.prepared(CASE, attention="sdpa", device=CPU)
    (model,) = made
    calls = []
    model.model.layers[1].mlp.up_proj.register_forward_hook(
        lambda module, given, came: calls.append(came.dtype)
    )
    weight = model.model.layers[1].mlp.up_proj.weight
    moves = []
    for _ in range(3):
        before = weight.detach().clone()
        loss = take_step()
        moves.append((weight.detach() - before).abs().max().item())
    assert weight.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(512), abs=0.3)
    assert calls == [torch.bfloat16] * 6, "forward, and once more in the backward pass"
    assert moves[0] == pytest.approx(1e-5, rel=0.01)
    assert moves[2] < 0.5 * moves[0], "cosine of 3 steps: 1, 0.75, 0.25"


def test_running_out_of_memory_is_told_by_the_peer_too(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = peer.measure(dataclasses.replace(CASE, shape="too-big", kernel="sdpa"), tmp_path)
    assert (found.status, found.step_s, found.attention) == (report.OUT_OF_MEMORY, None, "sdpa")
    assert "can't allocate memory" in found.message


def test_another_error_is_no_lack_of_memory(monkeypatch, tmp_path):
    said = iter(
        [
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nStack"),
            RuntimeError("illegal address"),
        ]
    )

    def fail(case, **how):
        raise next(said)

    monkeypatch.setattr(peer, "prepared", fail)
    found = peer.measure(CASE, tmp_path)
    assert (found.status, found.message) == (
        report.OUT_OF_MEMORY,
        "CUDA out of memory. Tried to allocate 2 GiB.",
    )
    with pytest.raises(RuntimeError, match="illegal address"):
        peer.measure(CASE, tmp_path)


def test_the_best_attention_is_what_is_installed(monkeypatch):
    installed, capability = set(), (9, 0)
    for number in (2, 3):
        monkeypatch.setattr(
            utils, f"is_flash_attn_{number}_available", lambda number=number: number in installed
        )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert peer.best_attention() == "sdpa"
    installed.add(2)
    assert peer.best_attention() == "flash_attention_2"
    installed.add(3)
    assert peer.best_attention() == "flash_attention_3"
    capability = (8, 0)
    assert peer.best_attention() == "flash_attention_2", "version 3 is for Hopper"


def run(monkeypatch, tmp_path, apart, *words):
    """Exit code and file of a benchmark whose cases come out as a function of case and side says."""

    def measured(case, *, seconds, module=step.MODULE, kind=step.Result):
        return apart(case, "jaxsp" if module == step.MODULE else "transformers")

    monkeypatch.setattr(step, "apart", measured)
    monkeypatch.setattr(peer, "missing", lambda: None)
    code = peer.main(
        ["--shapes", "tiny", "--lengths", "64", "--out", str(tmp_path / "results.json"), *words]
    )
    return code, json.loads((tmp_path / "results.json").read_text())


def test_rows_are_doubled_for_the_side_that_can(monkeypatch, tmp_path, capsys):
    most = {
        ("jaxsp", "one"): 512,
        ("transformers", "one"): 128,
        ("jaxsp", "packed"): 64,
        ("transformers", "packed"): 0,
    }
    tried = []

    def apart(case, side):
        tried.append((side, case.documents, case.row_tokens))
        good, kind = (OURS, step.Result) if side == "jaxsp" else (PEERS, peer.Result)
        full = kind(status=report.OUT_OF_MEMORY, message="too long")
        return good if case.row_tokens <= most[side, case.documents] else full

    code, found = run(monkeypatch, tmp_path, apart, "--until-it-fails")
    assert code == 0, "what does not fit has told what it was asked"
    lengths = {asked: [tokens for *same, tokens in tried if tuple(same) == asked] for asked in most}
    assert lengths == {
        ("jaxsp", "one"): [64, 128, 256, 512, 1024],
        ("transformers", "one"): [64, 128, 256],
        ("jaxsp", "packed"): [64, 128],
        ("transformers", "packed"): [64],
    }
    last = found["cases"][-1]
    assert (last["row_tokens"], last["status"], last["transformers"]["status"]) == (
        1024,
        report.OUT_OF_MEMORY,
        report.NOT_RUN,
    )
    printed = capsys.readouterr().out.splitlines()
    ends = (report.OUT_OF_MEMORY, "too long", "transformers", report.NOT_RUN)
    assert re.search(messages.holding("jaxsp", *ends), printed[-3])
    assert re.search(messages.holding("tiny one", 512, 128, "4.00"), printed[-2])
    assert re.search(messages.holding("tiny packed", 64), printed[-1])
    assert [one["ratio"] for one in found["longest"]] == [4.0, None]


def test_ratios_are_of_ours_over_the_peers(monkeypatch, tmp_path, capsys):
    _, found = run(
        monkeypatch,
        tmp_path,
        lambda case, side: OURS if side == "jaxsp" else PEERS,
        "--documents",
        "one",
    )
    assert [found["cases"][0][name] for name in ("speed_ratio", "memory_ratio")] == [1.5, 0.25]
    line = capsys.readouterr().out.splitlines()[1]
    assert (
        line.split()
        == "tiny 64 one 300 45.6 1.00 6.0000 200 30.4 4.00 6.0000 1.50 0.25 sdpa".split()
    )
    assert re.search(messages.holding("1.50", "0.25"), report.summary(found))


@pytest.mark.parametrize("failing", report.SIDES)
def test_a_side_that_fails_fails_the_benchmark_after_the_other(monkeypatch, tmp_path, failing):
    def apart(case, side):
        kind = step.Result if side == "jaxsp" else peer.Result
        return step.ended(-6, "", kind) if side == failing else OURS if side == "jaxsp" else PEERS

    code, found = run(monkeypatch, tmp_path, apart, "--documents", "one")
    assert code == 1
    ends = {side: report.of(found["cases"][0], side)["status"] for side in report.SIDES}
    assert ends == {side: report.FAILED if side == failing else report.OK for side in report.SIDES}
    assert found["cases"][0]["speed_ratio"] is None


def test_cases_beyond_the_time_are_named(monkeypatch, tmp_path):
    code, found = run(monkeypatch, tmp_path, None, "--seconds", "0")
    assert code == 0
    assert [
        report.of(case, side)["status"] for case in found["cases"] for side in report.SIDES
    ] == [report.NOT_RUN] * 4


def test_without_torch_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert peer.main(["--shapes", "tiny"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert re.search(messages.holding("torch", "pip install torch"), printed.err)


def test_a_resumed_comparison_runs_cases_that_a_side_did_not_end(monkeypatch, tmp_path):
    late = peer.Result(status=report.TIMED_OUT)

    def apart(case, side):
        return OURS if side == "jaxsp" else late if case.documents == "packed" else PEERS

    run(monkeypatch, tmp_path, apart)
    (tmp_path / "results.json").rename(tmp_path / "old.json")
    again = []

    def run_again(case, side):
        again.append((side, case.documents))
        return OURS if side == "jaxsp" else PEERS

    _, found = run(monkeypatch, tmp_path, run_again, "--resume", str(tmp_path / "old.json"))
    assert again == [("jaxsp", "packed"), ("transformers", "packed")]
    ends = [report.of(case, side)["status"] for case in found["cases"] for side in report.SIDES]
    assert ends == [report.OK] * 4


def test_the_peer_s_arithmetic_is_counted_as_jaxsp_s(tmp_path):
    found = peer.measure(dataclasses.replace(CASE, kernel="sdpa"), tmp_path)
    num_flops = found.tflops_per_device * found.step_s * 1e12
    lengths = np.array([len(document) for document in step.random_documents(CASE)])
    model = families.parse_model_config(step.SHAPES["tiny"], field="tiny")
    assert num_flops == pytest.approx(flops.step_flops(model, lengths))


def test_a_side_that_finds_no_device_is_told_in_its_words(monkeypatch, capsys):
    def run(command, **how):
        return subprocess.CompletedProcess(
            command, 1, stdout="", stderr="Traceback\nRuntimeError: no driver\n"
        )

    monkeypatch.setattr(subprocess, "run", run)
    assert peer.main(["--shapes", "tiny"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    says = messages.holding("RuntimeError: no driver", f"python -m {peer.MODULE}")
    assert re.search(says, said.err)


def test_a_gpu_for_one_side_alone_is_refused():
    assert peer.differing("cpu", "cpu") is None
    assert peer.differing("NVIDIA H100", "NVIDIA H100") is None
    ours, peers = peer.differing("cpu", "NVIDIA H100"), peer.differing("NVIDIA H100", "cpu")
    assert re.search(messages.holding("cpu", "NVIDIA H100", "JAX_PLATFORMS=cuda"), ours)
    assert re.search(messages.holding("NVIDIA H100", "cpu", "torch", "CUDA"), peers)
