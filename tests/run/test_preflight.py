"""Before the first step: limits of memory, free space, agreement of processes, old checkpoints."""

import collections
import dataclasses
import json
import shutil
import types

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from jaxsp.checkpoint import reader, run_paths
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.core import files
from jaxsp.core.errors import UserError
from jaxsp.core.units import GIB
from jaxsp.planning import estimate
from jaxsp.run import build, preflight, resume
from jaxsp.run.config_file import RunConfig
from jaxsp.sharding import host_offload
from jaxsp.system import hardware
from jaxsp.system.device_memory import MemoryLimit
from tests import commands, messages
from tests.run import test_trainer
from tests.training import runs

MIB = 2**20
Usage = collections.namedtuple("Usage", "total used free")


@pytest.fixture
def environ(monkeypatch, small_shards):
    """An environment without limits."""
    environ = {}
    monkeypatch.setattr("os.environ", environ)
    monkeypatch.setattr(hardware, "host_memory_bytes", lambda: 2000 * GIB)
    return environ


def set_gpus(monkeypatch, spec, *, count, memory_gib=79.1):
    """Simulates a node with these GPUs, and a folder with the step's model."""
    monkeypatch.setattr(hardware, "count_gpus", lambda environ: count)
    monkeypatch.setattr(hardware, "gpu_memory_bytes", lambda: int(memory_gib * GIB))
    monkeypatch.setattr(preflight.model_config, "read_fields", lambda config: ({}, "config.json"))
    monkeypatch.setattr(preflight.model_config, "parse_model_config", lambda *_, **__: spec.model)


def choose_platform(spec):
    """Chooses the limits with the parts of a whole config that they depend on."""
    step = spec.config
    data = types.SimpleNamespace(row_tokens=step.row_tokens)
    sections = {"adapter": step.adapter, "mesh": step.mesh}
    preflight.choose_platform(types.SimpleNamespace(model=None, data=data, step=step, **sections))


def test_the_pool_is_sized_by_the_config_before_jax_sees_its_devices(monkeypatch, environ):
    """The size equals that of the step, which needs devices: 4 GPUs of one process."""
    monkeypatch.setattr(host_offload, "MIN_OFFLOAD_SIZE", 100)
    spec = runs.make_spec(
        {"offload_activations": "layer_inputs", "offload_optimizer": "state"}, sizes=(1, 2, 2)
    )
    needed = estimate.pool_bytes(estimate.step_offloaded_bytes(spec))
    model = spec.model
    assert preflight.estimate_pool_bytes(spec.config, model, 4) == needed > 2 * GIB
    assert preflight.estimate_pool_bytes(runs.make_spec({}).config, model, 4) is None
    assert preflight.estimate_pool_bytes(spec.config, None, 4) is None
    automatic = spec.config.change(rows_per_microbatch="auto")
    assert preflight.estimate_pool_bytes(automatic, model, 4) is None
    set_gpus(monkeypatch, spec, count=4)
    choose_platform(spec)
    assert hardware.pinned_pool_limit(environ) == 3 * GIB


@pytest.mark.parametrize("memory_gib", [23.5, 79.1])
@pytest.mark.parametrize("sizes", [(1, 1, 8), (2, 2, 2)])
def test_jaxs_part_of_a_gpu_leaves_what_cuda_and_nccl_need_and_the_step_gets_that_part(
    monkeypatch, environ, sizes, memory_gib
):
    spec = runs.make_spec({}, sizes=sizes)
    memory = int(memory_gib * GIB)
    set_gpus(monkeypatch, spec, count=8, memory_gib=memory_gib)
    planned = MemoryLimit(hardware.gpu_memory_fraction({}) * memory, 200 * GIB)
    room = estimate.subtract_reserves(spec, planned)
    choose_platform(spec)
    part = hardware.gpu_memory_fraction(environ) * memory
    outside = estimate.outside_bytes(spec)
    assert memory - part >= outside - 1
    assert part == pytest.approx(min(0.92 * memory, memory - outside))
    in_run = estimate.subtract_reserves(spec, MemoryLimit(part, 200 * GIB))
    assert in_run.device == pytest.approx(room.device) == pytest.approx(0.978 * part)


def test_a_run_is_refused_if_no_checkpoint_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 99 * MIB))
    parts = (f"run.directory = {tmp_path}/run", "100.0 MiB", "99.0 MiB")
    with pytest.raises(UserError, match=messages.containing(*parts)):
        preflight.check_space(tmp_path / "run", 100 * MIB)
    unfinished = tmp_path / "run/checkpoints/8.partial/master/a"
    unfinished.parent.mkdir(parents=True)
    unfinished.write_bytes(bytes(2 * MIB))
    preflight.check_space(tmp_path / "run", 100 * MIB)


def test_processes_with_different_data_or_configs_do_not_train_together(tmp_path, monkeypatch):
    """Two nodes with different files of equal lengths would mix halves of their rows, and the
    losses would look normal."""
    commands.write_documents(tmp_path / "data.jsonl", [64] * 8)
    source = {"source": f"{tmp_path}/data.jsonl", "format": "tokens"}
    words = [
        f"data.train={json.dumps([{**source, 'name': 'books'}])}",
        f"data.eval={json.dumps([{**source, 'name': 'held out'}])}",
    ]
    config = test_trainer.settings(tmp_path, *words)
    run = build.build_training(config, devices=jax.devices()[:1])
    hashes = []
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda own: np.stack([own, own]))
    preflight.check_agreement(run)
    monkeypatch.setattr(
        multihost_utils,
        "process_allgather",
        lambda own: hashes.append(own) or np.stack([hashes[0], own]),
    )
    preflight.check_agreement(run)
    for part, changes in (
        ("data: books", {"train_set": dataclasses.replace(run.train_set, digests=("z",))}),
        (
            "data: held out",
            {"eval_sets": (dataclasses.replace(run.eval_sets[0], digests=("z",)),)},
        ),
        ("the checkpoint", {"start": dataclasses.replace(run.start, step=4)}),
        ("the config", {"config": test_trainer.settings(tmp_path, *words, "run.seed=1")}),
    ):
        with pytest.raises(UserError, match=part):
            preflight.check_agreement(dataclasses.replace(run, **changes))


def write_checkpoints(run, *steps):
    for step in steps:
        path = run / "checkpoints" / str(step)
        (path / run_paths.META).mkdir(parents=True)
        (path / run_paths.MASTER).mkdir()
        meta = CheckpointMeta(
            config={}, model={}, data={}, step=step, rows_consumed=0, num_tokens_total=0
        )
        reader.write_meta(path, meta)


def test_a_run_that_is_done_deletes_what_a_kill_has_left(tmp_path):
    config = test_trainer.settings(tmp_path, "checkpoint.keep_latest=2")
    write_checkpoints(tmp_path, 8, 10, 11)
    (tmp_path / "checkpoints/9.deleting/master").mkdir(parents=True)

    def finish(*, is_resume):
        own = {"config": config, "directory": tmp_path, "ranking_eval_set": None}
        preflight.finish_run(types.SimpleNamespace(**own, is_resume=is_resume))
        return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())

    assert finish(is_resume=False) == ["10", "11", "8", "9.deleting"]
    assert finish(is_resume=True) == ["10", "11"]


@pytest.mark.parametrize("damage", ["removed", "a file", "partial"])
def test_a_run_whose_checkpoints_have_vanished_stops(tmp_path, damage):
    run = tmp_path / "run"
    config = RunConfig(directory=str(run), steps=9)
    checkpoints = run / "checkpoints"
    (checkpoints / "8.partial").mkdir(parents=True)
    (run / run_paths.CONFIG_FILE).touch()
    assert resume.find_checkpoint(config) is None, "a run that was killed before the first"
    write_checkpoints(run, 8)
    files.write_json(run / run_paths.LAST_CHECKPOINT_FILE, {"step": 8})
    assert resume.find_checkpoint(config) == checkpoints / "8"
    shutil.rmtree(checkpoints / "8" if damage == "partial" else checkpoints)
    if damage == "a file":
        checkpoints.touch()
    parts = ("step 8", checkpoints, f"run.directory={run}-2")
    with pytest.raises(UserError, match=messages.containing(*parts)):
        resume.find_checkpoint(config)
