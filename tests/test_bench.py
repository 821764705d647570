"""scripts/bench/step.py times the train command's step, and records every result."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from jaxsp.hf import model_config
from jaxsp.model import flops
from jaxsp.runtime import hardware
from scripts.bench import cases, isolation, machine, report, step
from scripts.bench.cases import Case
from tests import commands, messages

CASE = Case(shape="tiny", row_tokens=256, documents="one", kernel="auto", steps=1)


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    """Results and output of a benchmark of a model that fits nowhere and of one that fits."""
    out = tmp_path_factory.mktemp("bench") / "new" / "results.json"
    options = "--shapes too-big tiny --lengths 256 --documents packed --steps 3 --remat full"
    done = commands.run_python("-m", step.MODULE, *options.split(), "--out", out)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


@pytest.mark.slow
@pytest.mark.e2e
def test_a_file_records_cases_and_versions(benchmark):
    results, _ = benchmark
    assert results["command"].startswith(
        "python -m scripts.bench.step --shapes too-big tiny --lengths 256 "
    )
    assert results["jax"] == jax.__version__
    assert set(results) == {
        *("date", "commit", "command", "cases"),
        *("device", "runtime", "driver", "cuda", "cudnn", "jax", "jaxlib", "cuda_plugin", "python"),
    }
    names = {field.name for field in dataclasses.fields(Case)}
    names |= {field.name for field in dataclasses.fields(step.Result)} - {"device", "runtime"}
    names |= {"model", "num_documents", "max_segments", "rows_per_step", "num_devices"}
    names |= {"compute_dtype", "optimizer"}
    for case in results["cases"]:
        assert set(case) == names


@pytest.mark.slow
@pytest.mark.e2e
def test_a_case_has_its_figures(benchmark):
    results, printed = benchmark
    case = results["cases"][1]
    assert case["status"] == report.OK
    assert (case["shape"], case["row_tokens"]) == ("tiny", 256)
    assert (case["num_documents"], case["steps"]) == (16, 3)
    assert 0 < case["step_s"] <= case["slowest_step_s"]
    assert case["tokens_per_s"] == pytest.approx(256 / case["step_s"])
    assert case["compile_s"] > 0
    assert case["tflops_per_device"] > 0
    assert case["loss_finite"]
    assert 6 < case["loss"] < 6.5, "ln 512 = 6.24 for random weights"
    assert (case["kernel_used"], case["remat"], case["remat_used"]) == ("blockwise", "full", "full")
    assert (case["offload_activations"], case["offload_optimizer"]) == ("none", "none")
    assert case["host_gib"] == 0
    assert 0 < case["planned_gib"] < 1
    assert re.search(messages.containing("256 tokens"), case["memory_used"])
    assert case["workspace_gib"] is None, "cuDNN needs a GPU"
    assert case["compile_s"] < case["wall_s"]
    assert case["from_cache"] is False
    assert case["fallback_reason"] in printed
    assert report.HEADER in printed
    assert report.format_case(case) in printed
    if results["device"] == "cpu":
        assert (case["mfu"], case["peak_gib"], case["memory_limit_gib"]) == (None, None, None)


@pytest.mark.slow
@pytest.mark.e2e
def test_running_out_of_memory_is_recorded_and_the_other_cases_run(benchmark):
    results, printed = benchmark
    case = results["cases"][0]
    assert (case["status"], case["step_s"]) == (report.OUT_OF_MEMORY, None)
    assert case["message"].startswith("RESOURCE_EXHAUSTED: Out of memory")
    assert re.search(messages.containing(report.OUT_OF_MEMORY, case["message"]), printed)
    assert results["cases"][1]["status"] == report.OK


def run(monkeypatch, tmp_path, results, *words):
    """Exit code and file of a benchmark whose cases have these results."""
    results = iter(results)
    monkeypatch.setattr(step, "run_case", lambda case, *, seconds: next(results))
    out = tmp_path / "results.json"
    code = step.main(["--shapes", "tiny", "--lengths", "256", "--out", str(out), *words])
    return code, json.loads(out.read_text())


GOOD = step.Result(
    status=report.OK,
    step_s=0.5,
    peak_gib=4.0,
    tflops_per_device=1.0,
    kernel_used="blockwise",
    device="cpu",
)

FULL = step.Result(status=report.OUT_OF_MEMORY)


def test_a_case_that_fails_fails_the_benchmark_after_the_others(monkeypatch, tmp_path):
    failed = isolation.explain_exit(-6, "", step.Result)
    assert failed.status == report.FAILED
    assert "-6" in failed.message
    code, results = run(monkeypatch, tmp_path, [failed, GOOD])
    assert code == 1
    assert [case["status"] for case in results["cases"]] == [report.FAILED, report.OK]
    assert results["device"] == "cpu"


def test_a_process_that_xla_ends_for_lack_of_memory_ran_out_of_memory():
    error = "F0000 RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."
    result = isolation.explain_exit(-6, f"I0000 before it\n{error}\nstack", step.Result)
    assert (result.status, result.message) == (report.OUT_OF_MEMORY, error)


def test_a_case_that_takes_too_long_is_ended():
    assert step.run_case(CASE, seconds=0.2).status == report.TIMED_OUT


def test_cases_after_the_time_limit_are_not_run(monkeypatch, tmp_path, capsys):
    code, results = run(monkeypatch, tmp_path, [], "--seconds", "0")
    assert code == 0
    assert [case["status"] for case in results["cases"]] == [report.NOT_RUN] * 2
    assert capsys.readouterr().out.count(report.NOT_RUN) == 2


def test_a_comparison_has_speedup_and_memory_ratio(monkeypatch, tmp_path, capsys):
    old = tmp_path / "old.json"
    run(monkeypatch, tmp_path, [dataclasses.replace(GOOD, step_s=1.0, peak_gib=2.0), GOOD])
    (tmp_path / "results.json").rename(old)
    run(monkeypatch, tmp_path, [GOOD, FULL], "--compare", str(old))
    numbers = ("1.0000 s", "0.5000 s", "2.00", "2.00")
    expected = messages.containing("tiny 256 one auto auto none none", *numbers)
    assert re.match(expected, capsys.readouterr().out.splitlines()[-1])


def test_a_summary_has_the_longest_rows_of_each_model(monkeypatch, tmp_path):
    results = [GOOD, GOOD, dataclasses.replace(GOOD, mfu=0.5), FULL]
    _, actual = run(monkeypatch, tmp_path, results, "--lengths", "256", "512")
    figures = ("0.500 s", "1 TFLOP/s", "50.0 %", "4.0 GiB")
    packed = ("tiny 512 packed", report.OUT_OF_MEMORY)
    expected = messages.containing("tiny 512 one", "blockwise", "auto", *figures, *packed)
    assert re.match(expected, report.summarize(actual))
    assert "256" not in report.summarize(actual)


def test_memory_options_are_compared_case_by_case(monkeypatch, tmp_path, capsys):
    used = [
        dataclasses.replace(GOOD, remat_used=remat, host_gib=1.5)
        for remat in ("save_attention", "full")
        for _ in range(4)
    ]
    options = "--documents one --remat auto full --offload-optimizer state none".split()
    options += ["--offload-activations", "none", "layer_inputs_and_attention"]
    _, actual = run(monkeypatch, tmp_path, used, *options)
    fields = [tuple(case[name] for name in report.MEMORY_OPTIONS) for case in actual["cases"]]
    assert fields == [
        (remat, activations, optimizer)
        for remat in ("auto", "full")
        for activations in ("none", "layer_inputs_and_attention")
        for optimizer in ("state", "none")
    ]
    lines = capsys.readouterr().out.splitlines()
    assert "  save_attention, inputs+attention, optimizer  " in lines[3]
    assert "  full  " in lines[6]
    assert lines[1].split()[-2:] == ["1.50", "-"], "host memory in GiB, and no loss"
    assert "blockwise full, inputs+attention, optimizer 0.500 s" in report.summarize(actual)


@pytest.mark.slow
def test_a_step_from_the_compilation_cache_is_marked(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    first, second = (step.run_case(CASE, seconds=300) for _ in range(2))
    assert (first.from_cache, second.from_cache) == (False, True)
    assert second.compile_s < first.compile_s
    assert (second.loss, second.planned_gib) == (first.loss, first.planned_gib)


def test_tiles_and_xla_options_are_compared_case_by_case(monkeypatch, tmp_path, capsys):
    words = ["--documents", "one", "--mlp-tile-tokens", "auto", "64", "--loss-tile-tokens", "32"]
    words += ["--xla-option", "xla_a=true", "xla_a=4", "--xla-option", "xla_b=text"]
    _, actual = run(monkeypatch, tmp_path, [GOOD] * 4, *words)
    fields = [(case["mlp_tile_tokens"], case["xla_options"]) for case in actual["cases"]]
    options = [{"xla_a": True, "xla_b": "text"}, {"xla_a": 4, "xla_b": "text"}]
    assert fields == [(tile, values) for tile in ("auto", 64) for values in options]
    line = capsys.readouterr().out.splitlines()[1]
    assert "  loss_tile_tokens=32, xla_a=true, xla_b=text" in line
    changed = "mlp_tile_tokens=64, loss_tile_tokens=32, xla_a=4, xla_b=text 0.5"
    assert changed in report.summarize(actual)


def test_the_config_of_a_case_has_its_tiles_and_xla_options(tmp_path):
    case = dataclasses.replace(CASE, mlp_tile_tokens=64, xla_options={"xla_a": True})
    config = cases.make_config(case, source=tmp_path, directory=tmp_path)
    default = type(config.memory)().loss_tile_tokens
    assert (config.memory.mlp_tile_tokens, config.memory.loss_tile_tokens) == (64, default)
    assert config.run.xla_options == {"xla_a": True}


def test_old_files_without_tiles_can_be_compared(monkeypatch, tmp_path):
    _, new = run(monkeypatch, tmp_path, [GOOD, GOOD])
    for case in new["cases"]:
        for name in (*report.TILES, "xla_options"):
            del case[name]
    _, tiled = run(monkeypatch, tmp_path, [GOOD, GOOD], "--mlp-tile-tokens", "64")
    figures = messages.containing("0.5000 s", "0.5000 s", "1.00")
    assert len(re.findall(figures, report.compare_results(new, new))) == 2
    assert not re.search(figures, report.compare_results(new, tiled))


def test_a_resumed_benchmark_keeps_cases_that_ended(monkeypatch, tmp_path):
    words = ["--lengths", "256", "512"]
    first = [dataclasses.replace(GOOD, step_s=0.25), FULL]
    first += [step.Result(status=report.TIMED_OUT), step.Result(status=report.NOT_RUN)]
    run(monkeypatch, tmp_path, first, *words)
    old = tmp_path / "old.json"
    (tmp_path / "results.json").rename(old)
    resumed = ["--resume", str(old), *words]
    _, actual = run(monkeypatch, tmp_path, [GOOD, GOOD], *resumed)
    statuses = [(case["status"], case["step_s"]) for case in actual["cases"]]
    assert statuses == [
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
        model = model_config.parse_model_config(
            cases.SHAPES["llama8b-4layers"] | fields, field="model"
        )
        return flops.step_flops(model, np.array([32768]))

    whole = num_flops(num_hidden_layers=32, vocab_size=128256)
    assert num_flops() == pytest.approx(whole / 8, rel=1e-3), "norms of layers are not counted"
    headless = num_flops(vocab_size=1), num_flops(num_hidden_layers=32, vocab_size=1)
    assert headless[0] / num_flops() == pytest.approx(headless[1] / whole, rel=1e-3)


def test_rows_are_doubled_until_one_does_not_fit(monkeypatch, tmp_path):
    """Each case doubles the longest row of the command line."""
    longest = {"one": 2048, "packed": 512}

    def run_case(case, *, seconds):
        return GOOD if case.row_tokens <= longest[case.documents] else FULL

    monkeypatch.setattr(step, "run_case", run_case)
    out = tmp_path / "results.json"
    options = "--shapes tiny --lengths 256 512 --until-it-fails".split()
    assert step.main([*options, "--out", str(out)]) == 0
    statuses = {"one": {}, "packed": {}}
    for case in json.loads(out.read_text())["cases"]:
        statuses[case["documents"]][case["row_tokens"]] = case["status"]
    fits = dict.fromkeys((256, 512, 1024, 2048), report.OK)
    assert statuses["one"] == {**fits, 4096: report.OUT_OF_MEMORY}
    assert statuses["packed"] == {256: report.OK, 512: report.OK, 1024: report.OUT_OF_MEMORY}


def test_an_impossible_case_is_refused_with_the_reason(tmp_path):
    case = dataclasses.replace(CASE, remat="full", offload_activations="layer_inputs_and_attention")
    result = step.measure(case, tmp_path)
    assert (result.status, result.step_s) == (report.REFUSED, None)
    fields = ("memory.offload_activations = layer_inputs_and_attention", "memory.remat = full")
    assert re.match(messages.containing(*fields), result.message)


def test_the_kernel_is_read_from_the_program():
    calls = 'custom_call_target="__cudnn$fmhaSoftmax"'
    assert step.find_kernel(calls, "cudnn") == "cudnn"
    assert step.find_kernel("fusion", "blockwise") == "blockwise"
    for program, chosen in ((calls, "blockwise"), ("fusion", "cudnn")):
        with pytest.raises(AssertionError, match=chosen):
            step.find_kernel(program, chosen)


def test_documents_of_random_lengths_fill_a_row_and_are_the_same_each_time():
    case = dataclasses.replace(CASE, row_tokens=4096, documents="packed")
    documents = cases.make_documents(case)
    lengths = [len(document) for document in documents]
    assert (len(lengths), sum(lengths)) == (16, 4096)
    assert len(set(lengths)) > 8
    for document, again in zip(documents, cases.make_documents(case), strict=True):
        assert (document == again).all()


def test_a_missing_gpu_or_driver_is_named(monkeypatch):
    monkeypatch.setattr(hardware, "count_gpus", lambda environ: 1)
    if jax.default_backend() == "cpu":
        expected = messages.containing("cpu", "JAX_PLATFORMS = cpu", "JAX_PLATFORMS=cuda")
        assert re.search(expected, machine.find_gpu_problem())

    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda': no driver")

    monkeypatch.setattr(jax, "devices", fail)
    assert re.search(messages.containing("no driver", "jax[cuda13]"), machine.find_gpu_problem())
    monkeypatch.setattr(hardware, "count_gpus", lambda environ: 0)
    assert "/dev/nvidia0" in machine.find_gpu_problem()
