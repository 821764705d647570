"""scripts/bench times the train command's step and data path, and writes down whatever comes of it."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import datasets
import jax
import numpy as np
import pytest

from jaxsp.hf import families
from jaxsp.model import flops
from jaxsp.runtime import hardware
from scripts.bench import batches, checkpoints, machine, packing, report, step, tokenise
from tests import messages

REPO = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    """What a benchmark of one model that fits nowhere and one that does wrote, and what it printed."""
    out = tmp_path_factory.mktemp("bench") / "new" / "results.json"
    words = [
        "--shapes",
        "too-big",
        "tiny",
        "--lengths",
        "256",
        "--documents",
        "packed",
        "--steps",
        "3",
        "--remat",
        "full",
    ]
    words += ["--out", str(out)]
    command = [sys.executable, "-m", "scripts.bench.step", *words]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


@pytest.mark.slow
@pytest.mark.e2e
def test_a_file_says_what_was_timed_on_what(benchmark):
    results, _ = benchmark
    assert results["command"].startswith(
        "python -m scripts.bench.step --shapes too-big tiny --lengths 256 "
    )
    assert results["jax"] == jax.__version__
    assert set(results) == {
        *("date", "commit", "command", "cases"),
        *("device", "runtime", "driver", "cuda", "cudnn", "jax", "jaxlib", "cuda_plugin", "python"),
    }
    asked = {field.name for field in dataclasses.fields(step.Case)}
    fixed = {
        "model",
        "num_pieces",
        "max_pieces",
        "rows_per_step",
        "num_devices",
        "compute_dtype",
        "optimizer",
    }
    came = {field.name for field in dataclasses.fields(step.Result)} - {"device", "runtime"}
    for case in results["cases"]:
        assert set(case) == asked | fixed | came


@pytest.mark.slow
@pytest.mark.e2e
def test_a_case_has_its_numbers(benchmark):
    results, printed = benchmark
    case = results["cases"][1]
    assert case["status"] == report.OK
    assert (case["shape"], case["row_tokens"], case["num_pieces"], case["steps"]) == (
        "tiny",
        256,
        16,
        3,
    )
    assert 0 < case["step_s"] <= case["slowest_step_s"]
    assert case["tokens_per_s"] == pytest.approx(256 / case["step_s"])
    assert case["compile_s"] > 0
    assert case["tflops_per_device"] > 0
    assert case["loss_finite"]
    assert 6 < case["loss"] < 6.5, "ln 512 = 6.24 for random weights"
    assert (case["kernel_used"], case["remat"], case["remat_used"]) == ("blockwise", "full", "full")
    assert (case["offload_activations"], case["offload_optimizer"], case["host_gib"]) == (
        "none",
        "none",
        0,
    )
    assert 0 < case["planned_gib"] < 1
    assert re.search(messages.holding("256 tokens"), case["memory_used"])
    assert case["workspace_gib"] is None, "no cuDNN here"
    assert case["compile_s"] < case["wall_s"]
    assert case["from_cache"] is False
    assert case["why_not_cudnn"] in printed
    assert report.HEADER in printed
    assert report.row(case) in printed
    if results["device"] == "cpu":
        assert (case["mfu"], case["peak_gib"], case["memory_limit_gib"]) == (None, None, None)


@pytest.mark.slow
@pytest.mark.e2e
def test_running_out_of_memory_is_written_down_and_the_rest_goes_on(benchmark):
    results, printed = benchmark
    case = results["cases"][0]
    assert (case["status"], case["step_s"]) == (report.OUT_OF_MEMORY, None)
    assert case["message"].startswith("RESOURCE_EXHAUSTED: Out of memory")
    assert re.search(messages.holding(report.OUT_OF_MEMORY, case["message"]), printed)
    assert results["cases"][1]["status"] == report.OK


def run(monkeypatch, tmp_path, results, *words):
    """Exit code and file of a benchmark whose cases come out as given, or end as a given exception says."""
    results = iter(results)
    monkeypatch.setattr(step, "apart", lambda case, *, seconds: next(results))
    code = step.main(
        ["--shapes", "tiny", "--lengths", "256", "--out", str(tmp_path / "results.json"), *words]
    )
    return code, json.loads((tmp_path / "results.json").read_text())


GOOD = step.Result(
    status=report.OK,
    step_s=0.5,
    peak_gib=4.0,
    tflops_per_device=1.0,
    kernel_used="blockwise",
    device="cpu",
)


def test_a_case_that_fails_fails_the_benchmark_after_the_others(monkeypatch, tmp_path):
    failed = step.ended(-6, "")
    assert failed.status == report.FAILED
    assert "-6" in failed.message
    code, results = run(monkeypatch, tmp_path, [failed, GOOD])
    assert code == 1
    assert [case["status"] for case in results["cases"]] == [report.FAILED, report.OK]
    assert results["device"] == "cpu"


def test_a_process_that_dies_of_memory_ran_out_of_memory():
    died = step.ended(
        -6,
        "I0000 a word before\nF0000 RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nstack",
    )
    assert (died.status, died.message[:24]) == (report.OUT_OF_MEMORY, "F0000 RESOURCE_EXHAUSTED")


def test_a_case_that_takes_too_long_is_ended():
    case = step.Case(shape="tiny", row_tokens=256, documents="one", kernel="auto", steps=1)
    assert step.apart(case, seconds=0.2).status == report.TIMED_OUT


def test_cases_beyond_the_time_are_named(monkeypatch, tmp_path, capsys):
    code, results = run(monkeypatch, tmp_path, [], "--seconds", "0")
    assert code == 0
    assert [case["status"] for case in results["cases"]] == [report.NOT_RUN] * 2
    assert capsys.readouterr().out.count(report.NOT_RUN) == 2


def test_a_comparison_says_how_much_faster(monkeypatch, tmp_path, capsys):
    old = tmp_path / "old.json"
    run(monkeypatch, tmp_path, [dataclasses.replace(GOOD, step_s=1.0, peak_gib=2.0), GOOD])
    (tmp_path / "results.json").rename(old)
    run(
        monkeypatch,
        tmp_path,
        [GOOD, step.Result(status=report.OUT_OF_MEMORY)],
        "--compare",
        str(old),
    )
    numbers = ("1.0000 s", "0.5000 s", "2.00", "2.00")
    says = messages.holding("tiny 256 one auto auto none none", *numbers)
    assert re.match(says, capsys.readouterr().out.splitlines()[-1])


def test_a_summary_has_the_longest_rows_of_each_model(monkeypatch, tmp_path):
    results = [
        GOOD,
        GOOD,
        dataclasses.replace(GOOD, mfu=0.5),
        step.Result(status=report.OUT_OF_MEMORY),
    ]
    _, found = run(monkeypatch, tmp_path, results, "--lengths", "256", "512")
    figures = ("0.500 s", "1 TFLOP/s", "50.0 %", "4.0 GiB")
    packed = ("tiny 512 packed", report.OUT_OF_MEMORY)
    says = messages.holding("tiny 512 one", "blockwise", "auto", *figures, *packed)
    assert re.match(says, report.summary(found))
    assert "256" not in report.summary(found)


def test_levers_are_compared_case_by_case(monkeypatch, tmp_path, capsys):
    used = [
        dataclasses.replace(GOOD, remat_used=remat, host_gib=1.5)
        for remat in ("save_attention", "full")
        for _ in range(4)
    ]
    words = [
        "--documents",
        "one",
        "--remat",
        "auto",
        "full",
        "--offload-activations",
        "none",
        "layer_inputs_and_attention",
    ]
    _, found = run(monkeypatch, tmp_path, used, *words, "--offload-optimizer", "state", "none")
    asked = [tuple(case[name] for name in step.LEVERS) for case in found["cases"]]
    assert asked == [
        (remat, activations, optimizer)
        for remat in ("auto", "full")
        for activations in ("none", "layer_inputs_and_attention")
        for optimizer in ("state", "none")
    ]
    lines = capsys.readouterr().out.splitlines()
    assert "  save_attention, inputs+attention, optimizer  " in lines[3]
    assert "  full  " in lines[6]
    assert lines[1].split()[-2:] == ["1.50", "-"], "GiB of the host, and no loss"
    assert "blockwise full, inputs+attention, optimizer 0.500 s" in report.summary(found)


@pytest.mark.slow  # two processes
def test_a_step_from_the_compilation_cache_is_marked(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    case = step.Case(shape="tiny", row_tokens=256, documents="one", kernel="auto", steps=1)
    first, second = (step.apart(case, seconds=300) for _ in range(2))
    assert (first.from_cache, second.from_cache) == (False, True)
    assert second.compile_s < first.compile_s
    assert (second.loss, second.planned_gib) == (first.loss, first.planned_gib)


def test_tiles_and_xla_options_are_compared_case_by_case(monkeypatch, tmp_path, capsys):
    words = ["--documents", "one", "--mlp-tile-tokens", "auto", "64", "--loss-tile-tokens", "32"]
    words += ["--xla-option", "xla_a=true", "xla_a=4", "--xla-option", "xla_b=text"]
    _, found = run(monkeypatch, tmp_path, [GOOD] * 4, *words)
    asked = [(case["mlp_tile_tokens"], case["xla_options"]) for case in found["cases"]]
    options = [{"xla_a": True, "xla_b": "text"}, {"xla_a": 4, "xla_b": "text"}]
    assert asked == [(tile, values) for tile in ("auto", 64) for values in options]
    assert (
        "  loss_tile_tokens=32: xla_a=true: xla_b=text" in capsys.readouterr().out.splitlines()[1]
    )
    assert "mlp_tile_tokens=64, loss_tile_tokens=32, xla_a=4, xla_b=text 0.5" in report.summary(
        found
    )


def test_a_case_s_config_has_its_tiles_and_xla_options(tmp_path):
    case = step.Case(
        shape="tiny",
        row_tokens=256,
        documents="one",
        kernel="auto",
        steps=1,
        mlp_tile_tokens=64,
        xla_options={"xla_a": True},
    )
    config = step.settings_of(case, source=tmp_path, directory=tmp_path)
    default = type(config.memory)().loss_tile_tokens
    assert (config.memory.mlp_tile_tokens, config.memory.loss_tile_tokens) == (64, default)
    assert config.run.xla_options == {"xla_a": True}


def test_files_without_tiles_are_compared_with_new_ones(monkeypatch, tmp_path):
    _, new = run(monkeypatch, tmp_path, [GOOD, GOOD])
    for case in new["cases"]:
        for name in (*report.TILES, "xla_options"):
            del case[name]
    _, tiled = run(monkeypatch, tmp_path, [GOOD, GOOD], "--mlp-tile-tokens", "64")
    numbers = messages.holding("0.5000 s", "0.5000 s", "1.00")
    assert len(re.findall(numbers, report.comparison(new, new))) == 2
    assert not re.search(numbers, report.comparison(new, tiled))


def test_a_resumed_benchmark_keeps_cases_that_ended(monkeypatch, tmp_path):
    words = ["--lengths", "256", "512"]
    first = [dataclasses.replace(GOOD, step_s=0.25), step.Result(status=report.OUT_OF_MEMORY)]
    first += [step.Result(status=report.TIMED_OUT), step.Result(status=report.NOT_RUN)]
    run(monkeypatch, tmp_path, first, *words)
    old = tmp_path / "old.json"
    (tmp_path / "results.json").rename(old)
    resumed = ["--resume", str(old), *words]
    _, found = run(monkeypatch, tmp_path, [GOOD, GOOD], *resumed)
    ends = [(case["status"], case["step_s"]) for case in found["cases"]]
    assert ends == [
        (report.OK, 0.25),
        (report.OUT_OF_MEMORY, None),
        (report.OK, 0.5),
        (report.OK, 0.5),
    ]
    _, other = run(monkeypatch, tmp_path, [GOOD] * 4, *resumed, "--remat", "full")
    assert [case["step_s"] for case in other["cases"]] == [0.5] * 4, "other cases are run"


def test_four_layers_of_llama_8b_have_its_proportions():
    """Arithmetic for each layer and for the head, as in the whole model."""

    def num_flops(**fields):
        model = families.parse_model_config(step.SHAPES["llama8b-4layers"] | fields, field="model")
        return flops.step_flops(model, np.array([32768]))

    whole = num_flops(num_hidden_layers=32, vocab_size=128256)
    assert num_flops() == pytest.approx(whole / 8, rel=1e-3), "norms of layers are not counted"
    headless = num_flops(vocab_size=1), num_flops(num_hidden_layers=32, vocab_size=1)
    assert headless[0] / num_flops() == pytest.approx(headless[1] / whole, rel=1e-3)


def test_rows_are_doubled_until_one_does_not_fit(monkeypatch, tmp_path):
    """Of each case alone, from the longest row that was asked for."""
    most = {"one": 2048, "packed": 512}

    def apart(case, *, seconds):
        return (
            GOOD
            if case.row_tokens <= most[case.documents]
            else step.Result(status=report.OUT_OF_MEMORY, message="too long")
        )

    monkeypatch.setattr(step, "apart", apart)
    out = tmp_path / "results.json"
    assert (
        step.main(
            ["--shapes", "tiny", "--lengths", "256", "512", "--until-it-fails", "--out", str(out)]
        )
        == 0
    )
    found = [
        (case["documents"], case["row_tokens"], case["status"])
        for case in json.loads(out.read_text())["cases"]
    ]
    lengths = {"one": [256, 512, 1024, 2048, 4096], "packed": [256, 512, 1024]}
    for documents, tried in lengths.items():
        statuses = [report.OK] * (len(tried) - 1) + [report.OUT_OF_MEMORY]
        assert [case[1:] for case in found if case[0] == documents] == list(
            zip(tried, statuses, strict=True)
        )


def test_what_cannot_be_done_is_refused_with_the_reason(tmp_path):
    case = step.Case(shape="tiny", row_tokens=256, documents="one", kernel="auto", steps=1)
    never = dataclasses.replace(
        case, remat="full", offload_activations="layer_inputs_and_attention"
    )
    found = step.measure(never, tmp_path)
    assert (found.status, found.step_s) == (report.REFUSED, None)
    fields = ("memory.offload_activations = layer_inputs_and_attention", "memory.remat = full")
    assert re.match(messages.holding(*fields), found.message)


def test_the_kernel_is_read_from_the_program():
    calls = 'custom_call_target="__cudnn$fmhaSoftmax"'
    assert step.kernel_used(calls, "cudnn") == "cudnn"
    assert step.kernel_used("fusion", "blockwise") == "blockwise"
    for program, chosen in ((calls, "blockwise"), ("fusion", "cudnn")):
        with pytest.raises(AssertionError, match=chosen):
            step.kernel_used(program, chosen)


def test_documents_are_ragged_fill_a_row_and_are_the_same_each_time():
    case = step.Case(shape="tiny", row_tokens=4096, documents="packed", kernel="auto", steps=1)
    lengths = [len(document) for document in step.random_documents(case)]
    assert (len(set(lengths)) > 8, len(lengths), sum(lengths)) == (True, 16, 4096)
    again = step.random_documents(case)
    assert all(
        (one == other).all() for one, other in zip(step.random_documents(case), again, strict=True)
    )


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(hardware, "count_gpus", lambda environ: 1)
    if jax.default_backend() == "cpu":
        says = messages.holding("cpu", "JAX_PLATFORMS = cpu", "JAX_PLATFORMS=cuda")
        assert re.search(says, machine.missing())

    def broken():
        raise RuntimeError("Unable to initialize backend 'cuda': no driver")

    monkeypatch.setattr(jax, "devices", broken)
    assert re.search(messages.holding("no driver", "jax[cuda13]"), machine.missing())
    monkeypatch.setattr(hardware, "count_gpus", lambda environ: 0)
    assert "/dev/nvidia0" in machine.missing()


def test_packers_are_compared_on_the_same_lengths(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(packing, "_trl", lambda: False)
    out = tmp_path / "packing.json"
    words = [
        "--documents",
        "2000",
        "--grain-documents",
        "500",
        "--harder-documents",
        "300",
        "--repeats",
        "1",
        "--out",
        str(out),
    ]
    assert packing.main(words) == 0
    found = json.loads(out.read_text())
    assert {case["lengths"] for case in found["cases"]} == {
        kind.name for kind in (packing.MANY, *packing.HARDER)
    }
    ours = [case for case in found["cases"] if case["packer"].startswith("jaxsp")]
    assert all(case["most"] <= int(case["packer"].split()[1]) for case in ours)
    assert all(case["bound"] <= case["rows"] for case in found["cases"])
    assert all(0.5 < case["fullness"] <= 1 for case in found["cases"])
    assert [case["documents"] for case in found["cases"][:4]] == [2000, 2000, 500, 500]
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == packing.HEADER
    assert "trl" in printed
    assert not [case for case in found["cases"] if "trl" in case["packer"]]


def test_trl_packs_every_document(monkeypatch):
    pytest.importorskip("trl", reason="needs trl: pip install 'jaxsp[test]' on Python 3.11")
    lengths = np.array([5, 3, 2, 9, 20])
    for batch_size in (2, None):
        _, counts = packing.trls(lengths, 10, batch_size)
        assert counts.sum() == len(packing.pieces(lengths, 10)) == 6


def test_no_packer_can_do_with_fewer_rows():
    assert packing.bound(np.array([6, 6, 6]), 10, 9) == 3, "no two fit"
    assert packing.bound(np.array([6, 6, 4, 4]), 10, 9) == 2
    assert packing.bound(np.array([6, 6, 5, 5]), 10, 9) == 3, "fives do not go with sixes"
    assert packing.bound(np.array([1, 1, 1, 1]), 10, 2) == 2, "two at most"
    assert sorted(packing.pieces(np.array([20, 4, 13]), 10).tolist()) == [3, 4, 10, 10, 10]


@pytest.mark.e2e
def test_tokenising_is_timed_beside_the_tokenizer_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    out = tmp_path / "tokenise.json"
    assert tokenise.main(["--megabytes", "0.05", "--runs", "2", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["command"].startswith("python -m scripts.bench.tokenise --megabytes 0.05")
    assert [case["format"] for case in found["cases"]] == ["text", "messages"]
    for case in found["cases"]:
        assert case["tokens"] > 1000
        assert len(case["ratios"]) == 2
        assert min(case["ratios"]) > 0
    assert capsys.readouterr().out.startswith("format text  documents ")


def test_batches_are_timed_over_a_whole_epoch(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(batches, "ROW_TOKENS", 8192)
    out = tmp_path / "batches.json"
    assert batches.main(["--tokens", "500000", "--seconds", "0", "--out", str(out)]) == 0
    cases = json.loads(out.read_text())["cases"]
    assert [case["name"].split(": ")[1] for case in cases[:4]] == [
        "1 device",
        "2 x 4 devices",
        "dataset[i], plain",
        "dataset[i], numpy",
    ]
    for case in (*cases[:2], *cases[4:6]):
        assert case["num_tokens"] >= 500_000
        assert len(case["anonymous_mib"]) == 3
    assert cases[0]["num_tokens"] == cases[1]["num_tokens"], "the same epoch on either mesh"
    assert capsys.readouterr().out.splitlines()[0] == batches.HEADER


@pytest.mark.slow
@pytest.mark.e2e
def test_checkpoints_are_timed_and_removed(tmp_path, monkeypatch, capsys):
    for name in ("HIDDEN", "VOCABULARY"):
        monkeypatch.setattr(checkpoints, name, 64)
    out = tmp_path / "checkpoints.json"
    assert (
        checkpoints.main(
            ["--gigabytes", "0.001", "--saves", "2", "--folder", str(tmp_path), "--out", str(out)]
        )
        == 0
    )
    cases = json.loads(out.read_text())["cases"]
    names = ["save, which compiles", "save", "restore", "weights, as for export"]
    assert [case["name"] for case in cases] == names
    assert all(0 < case["blocked_s"] <= case["seconds"] for case in cases)
    assert cases[0]["num_bytes"] == cases[2]["num_bytes"]
    assert cases[0]["num_bytes"] == pytest.approx(3 * cases[3]["num_bytes"], rel=1e-3), (
        "weights, two averages and counts"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints.json"]
    assert capsys.readouterr().out.splitlines()[0] == checkpoints.HEADER
