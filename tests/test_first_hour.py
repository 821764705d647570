"""scripts/bench/first_hour.py checks assumptions on GPUs; its parts that need none."""

import gzip
import json

import jax
import pytest

from jaxsp.processes import hardware
from jaxsp.run import selfcheck
from scripts.bench import first_checks, first_hour, kernel_trace, machine, report
from scripts.bench.first_checks import Number
from scripts.bench.first_hour import Check, Result
from scripts.bench.kernel_trace import Kernel


@pytest.mark.skipif(hardware.count_gpus({}) > 0, reason="needs a machine without an NVIDIA GPU")
def test_without_a_gpu_it_exits_2_and_names_what_is_missing(tmp_path, capsys):
    out = tmp_path / "first.json"
    assert first_hour.main(["--out", str(out)]) == 2
    assert "There is no NVIDIA GPU here" in capsys.readouterr().err
    assert not out.exists()


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the command with invented results of each check on a node with 2 GPUs."""
    monkeypatch.setattr(machine, "find_gpu_problem", lambda: None)
    monkeypatch.setattr(first_checks, "count_gpus", lambda: 2)

    def run(results, *words):
        monkeypatch.setattr(
            first_hour.isolation,
            "run_isolated",
            lambda module, case, result_type, seconds: results[case.check],
        )
        out = tmp_path / "first.json"
        code = first_hour.main(["--out", str(out), "--checks", *results, *words])
        return code, json.loads(out.read_text()), capsys.readouterr().out

    return run


def numbers(*values):
    fields = Number("a ratio", 0.0, "", 0.9, 1.1)._replace
    return [fields(value=value)._asdict() for value in values]


def test_numbers_out_of_their_range_fail_the_stage_and_are_marked(run):
    good = Result(status=report.OK, numbers=numbers(1.0, 1.1))
    bad = Result(status=report.OK, numbers=numbers(1.0, 1.2))
    code, contents, printed = run({"workspace": good, "offload": bad})
    assert code == 1
    assert contents["summary"] == "workspace as assumed, offload NOT as assumed"
    assert [line for line in printed.splitlines() if "NOT AS ASSUMED" in line] == [
        "  a ratio: 1.2 (assumed: 0.9 to 1.1) <- NOT AS ASSUMED"
    ]
    assert run({"workspace": good})[0] == 0


def test_a_check_that_fails_or_has_no_time_left_fails_the_stage(run):
    failed = Result(status=report.FAILED, message="exit code 1: an error")
    code, contents, printed = run({"pinning": failed})
    assert (code, contents["summary"]) == (1, "pinning failed")
    assert "an error" in printed
    code, _, printed = run({"pinning": failed}, "--seconds", "0")
    assert code == 1
    assert "not run: run it with --checks pinning" in printed


def test_a_check_without_a_number_is_not_as_assumed(run):
    assert run({"workspace": Result(status=report.OK)})[0] == 1


def test_numbers_are_printed_when_they_are_measured(monkeypatch, tmp_path, capsys):
    def measure_then_fail(folder):
        yield Number("a ratio", 1.0, "", 0.9, 1.1)
        raise ValueError

    check = Check(topic="a topic", measure=measure_then_fail)
    monkeypatch.setitem(first_hour.CHECKS, "offload", check)
    with pytest.raises(ValueError):  # noqa: PT011 - the check's own, without a text
        first_hour.measure(first_hour.Case(check="offload"), tmp_path)
    assert "a ratio: 1" in capsys.readouterr().out


def test_nan_is_in_no_range():
    assert not Number("error", float("nan"), "", 0, 1).is_in_range


@pytest.mark.e2e
def test_arrays_are_restored_as_they_were_before_the_next_step(tmp_path, monkeypatch):
    monkeypatch.setattr("os.environ", {})
    wrong, seconds = first_checks.measure_checkpoint(tmp_path, mib=1)
    assert wrong.value == 0
    assert seconds.value > 0


@pytest.mark.e2e
def test_gradients_are_compared_with_and_without_prefetch_on_all_devices(tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr(
        selfcheck,
        "measure_offload_error",
        lambda policy, *, devices, options: tried.append((devices, options)) or 0.0,
    )
    assert all(number.is_in_range for number in first_checks.measure_offload(tmp_path))
    assert {len(devices) for devices, _ in tried} == {len(jax.local_devices())}
    assert [next(iter(options.values())) for _, options in tried] == [False, True, False, True]


def test_steps_of_all_gpus_have_a_row_each(tmp_path, monkeypatch):
    """The options of XLA that are tried reach the config."""
    configs = []
    monkeypatch.setattr(first_checks, "count_gpus", lambda: 8)
    monkeypatch.setattr(first_checks.jax_limits, "choose_platform", lambda config: None)
    result = type("Result", (), {"step_s": 2.0, "losses": [3.0]})
    monkeypatch.setattr(
        first_checks.benchmark,
        "benchmark_steps",
        lambda config, num_steps: configs.append(config) or result,
    )
    checked = [*first_checks.measure_options(tmp_path)]
    assert [number.value for number in checked] == [1.0, 0.0, 1.0, 0.0]
    assert [list(config.run.xla_options) for config in configs] == [
        [],
        *([option] for option in first_checks.TRIED_OPTIONS),
    ]
    assert {config.batch.rows_per_step for config in configs} == {8}
    source = tmp_path / "base" / "documents.jsonl"
    assert len(source.read_text().splitlines()) == 8 * (1 + first_checks.NUM_STEPS)


KERNELS = [
    Kernel("gemm_a", 0, 10),
    Kernel("nccl_all_gather", 20, 60),
    Kernel("gemm_a", 30, 42),
    Kernel("softmax", 42, 50),
    Kernel("gemm_b", 70, 80),
]


def test_idle_time_is_that_without_any_kernel():
    assert kernel_trace.idle_fraction(KERNELS) == pytest.approx((10 + 10) / 80)
    assert kernel_trace.idle_fraction(KERNELS[2:4]) == 0


def test_slowdown_compares_kernels_of_one_name_beside_a_collective_and_alone():
    assert kernel_trace.collective_slowdown(KERNELS) == pytest.approx(1.2)
    assert kernel_trace.collective_slowdown(KERNELS[1:]) is None


def test_the_last_step_of_a_trace_is_read_from_the_streams_of_one_gpu(tmp_path):
    def name(pid, text, tid=None):
        kind = "process_name" if tid is None else "thread_name"
        thread = {} if tid is None else {"tid": tid}
        return {"ph": "M", "name": kind, "pid": pid, "args": {"name": text}, **thread}

    def event(pid, tid, text, begin, duration):
        return {"ph": "X", "pid": pid, "tid": tid, "name": text, "ts": begin, "dur": duration}

    events = [
        name(1, "/device:GPU:0"),
        name(1, "Stream #13(Compute)", 7),
        name(1, "XLA Ops", 8),
        name(2, "/device:GPU:1"),
        name(2, "Stream #13(Compute)", 7),
        event(1, 7, "late", 2e6, 1e5),
        event(1, 7, "early", 0, 5),
        event(1, 8, "an operation", 0, 5),
        event(2, 7, "of another GPU", 0, 5),
    ]
    folder = tmp_path / "plugins/profile/2026"
    folder.mkdir(parents=True)
    with gzip.open(folder / "host.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    kernels = kernel_trace.read_kernels(tmp_path)
    assert [kernel.name for kernel in kernels] == ["early", "late"]
    assert [kernel.name for kernel in kernel_trace.last_kernels(kernels, 1.0)] == ["late"]
