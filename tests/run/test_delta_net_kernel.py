"""A wrong kernel of delta nets is replaced in all processes, and a resumed run keeps its kernel."""

import jax
import pytest
import rich.console

from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.delta_rule import kernels
from jaxsp.run import build, config_file, preflight, resume, selfcheck
from jaxsp.run.resume import RunCheckpoint, StartPoint
from tests import small_runs
from tests.hf import oracle


@pytest.fixture
def fields(tmp_path, monkeypatch):
    """Fields of a config, on devices where the kernel would run."""
    (tmp_path / "train.jsonl").write_text('{"input_ids": [1, 2, 3, 4]}\n' * 40)
    monkeypatch.setattr(kernels, "_find_problems", lambda *_: iter(()))
    model = {"config": oracle.MODELS["qwen3_5"], "compute_dtype": "bfloat16"}
    return small_runs.make_fields(tmp_path, model=model)


def make_config(fields, kernel):
    return config_file.parse(fields).with_fields(model={"delta_net_kernel": kernel})


def build_run(fields, kernel="auto"):
    return build.build_training(make_config(fields, kernel), devices=jax.devices()[:1])


def test_a_wrong_kernel_is_replaced_unless_the_config_names_it(fields, monkeypatch):
    def check_device(spec, *, may_replace=False):
        is_wrong = spec.model.delta_net.kernel == "jla"
        if is_wrong and not may_replace:
            raise UserError("wrong")
        return [], "wrong" if is_wrong else ""

    monkeypatch.setattr(selfcheck, "check_device", check_device)
    report_checks = lambda run: preflight.report_checks(run, rich.console.Console(quiet=True))
    run = build_run(fields)
    assert run.spec.model.delta_net.kernel == run.config.model.delta_net_kernel == "jla"
    replaced = report_checks(run)
    assert replaced.spec.model.delta_net.kernel == "xla"
    assert replaced.spec.config.delta_net_kernel == replaced.config.model.delta_net_kernel == "xla"
    with pytest.raises(UserError, match="wrong"):
        report_checks(build_run(fields, "jla"))


@pytest.mark.parametrize(("requested", "kernel"), [("auto", "xla"), ("jla", "jla")])
def test_evaluations_use_xla_unless_the_config_names_a_kernel(fields, requested, kernel):
    prepared = build.prepare_model(
        make_config(fields, requested),
        devices=jax.devices()[:1],
        problems=ProblemCollector(),
        for_training=False,
    )
    assert prepared.spec.model.delta_net.kernel == kernel


@pytest.mark.parametrize("kernel", ["xla", "jla"])
def test_a_resumed_run_keeps_its_kernel(fields, monkeypatch, tmp_path, kernel):
    saved = RunCheckpoint(path=tmp_path, meta=None, config=make_config(fields, kernel))
    monkeypatch.setattr(resume, "open_checkpoint", lambda *_: saved)
    monkeypatch.setattr(resume, "find_model_dir", lambda path: None)
    monkeypatch.setattr(resume, "make_start_point", lambda *_, **__: StartPoint())
    assert build_run(fields).spec.model.delta_net.kernel == kernel
