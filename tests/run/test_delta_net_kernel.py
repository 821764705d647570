"""A wrong kernel of delta nets is replaced in all processes, and a resumed run keeps its kernel."""

import dataclasses
import types

import jax
import pytest
import rich.console

from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.delta_rule import kernels
from jaxsp.run import build, config_file, preflight, resume, selfcheck
from tests import small_runs
from tests.hf import oracle

FIELD = selfcheck.DELTA_NET_FIELD


@pytest.fixture
def fields(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"input_ids": [1, 2, 3, 4]}\n' * 40)
    model = {"config": oracle.MODELS["qwen3_5"], "compute_dtype": "bfloat16"}
    return small_runs.make_fields(tmp_path, model=model)


def make_run(fields, kernel="auto"):
    """A run, as it would be on devices where the kernel runs."""
    fields = fields | {"model": fields["model"] | {"delta_net_kernel": kernel}}
    return build.build_training(config_file.parse(fields), devices=jax.devices()[:1])


def test_a_wrong_kernel_is_replaced_unless_the_config_names_it(fields, monkeypatch):
    def check_device(spec, *, may_replace=False):
        is_wrong = spec.model.delta_net.kernel == "jla"
        if is_wrong and not may_replace:
            raise UserError("wrong")
        return [], "wrong" if is_wrong else ""

    monkeypatch.setattr(kernels, "_find_problems", lambda *_: iter(()))
    monkeypatch.setattr(selfcheck, "check_device", check_device)
    report_checks = lambda run: preflight.report_checks(run, rich.console.Console(quiet=True))
    run = make_run(fields)
    assert run.spec.model.delta_net.kernel == run.config.model.delta_net_kernel == "jla"
    replaced = report_checks(run)
    assert replaced.spec.model.delta_net.kernel == "xla"
    assert replaced.spec.config.delta_net_kernel == replaced.config.model.delta_net_kernel == "xla"
    with pytest.raises(UserError, match="wrong"):
        report_checks(make_run(fields, "jla"))


def test_evaluations_use_xla_unless_the_config_names_a_kernel(fields, monkeypatch):
    monkeypatch.setattr(kernels, "_find_problems", lambda *_: iter(()))
    for requested, kernel in (("auto", "xla"), ("jla", "jla")):
        config = config_file.parse(fields).with_fields(model={"delta_net_kernel": requested})
        prepared = build.prepare_model(
            config, devices=jax.devices()[:1], problems=ProblemCollector(), for_training=False
        )
        assert prepared.spec.model.delta_net.kernel == kernel


def test_a_resumed_run_keeps_its_kernel(fields, monkeypatch):
    config = config_file.parse(fields)
    saved = types.SimpleNamespace(
        path=None,
        meta=types.SimpleNamespace(model=None),
        config=config.with_fields(model={"delta_net_kernel": "xla"}),
        add_adapter=lambda config: config,
    )
    monkeypatch.setattr(kernels, "_find_problems", lambda *_: iter(()))
    monkeypatch.setattr(resume, "open_checkpoint", lambda *_: saved)
    monkeypatch.setattr(resume, "find_model_dir", lambda path: None)
    monkeypatch.setattr(resume, "make_start_point", lambda *_, **__: resume.StartPoint())
    run = build.build_training(config, devices=jax.devices()[:1])
    assert run.spec.model.delta_net.kernel == "xla"
    saved.config = config.with_fields(model={"delta_net_kernel": "jla"})
    run = build.build_training(config, devices=jax.devices()[:1])
    assert run.spec.model.delta_net.kernel == "jla"
    now = dataclasses.replace(run, config=run.config.with_fields(model={"delta_net_kernel": "xla"}))
    (change,) = resume._list_changes(run.config, now.config)
    assert change.startswith(f"{FIELD} jla -> xla")
