"""Retention of checkpoints, checksums of the first write, recording of evaluations, heartbeats."""

import threading
import types

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxsp.blocks.layers import Parameter
from jaxsp.checkpoint import checksums, reader, retention, run_paths
from jaxsp.checkpoint.reader import CheckpointMeta, EarlyStoppingState
from jaxsp.checkpoint.retention import CheckpointConfig
from jaxsp.checkpoint.writer import CheckpointWriter
from jaxsp.system.watchdog import RunStatus
from jaxsp.training.train_state import TrainState
from tests import batches

HELD_OUT = {"name": "held out", "digest": "digest of held out"}
CHAT = {"name": "chat", "digest": "digest of chat"}
STATE = EarlyStoppingState(data="held out", digest="digest of held out", num_since_best=2)


def make_meta(step, loss=None, eval_set=None, **fields):
    required = {"config": {}, "model": {}, "data": {}, "rows_consumed": step, "num_tokens_total": 9}
    return CheckpointMeta(step=step, eval_loss=loss, eval_set=eval_set, **required, **fields)


def write_metas(folder, *metas):
    for meta in metas:
        (folder / str(meta.step) / run_paths.META).mkdir(parents=True)
        reader.write_meta(folder / str(meta.step), meta)


def open_writer(folder, table=None, **options):
    return CheckpointWriter(folder, table=table or {}, config=CheckpointConfig(), **options)


@pytest.mark.parametrize(
    ("losses", "keep", "deleted"),
    [
        ([1.0, 2.0, 3.0, 4.0], {"keep_latest": 2}, [1, 2]),
        ([1.0, 2.0, 3.0, 4.0], {"keep_latest": 1, "keep_best": 1}, [2, 3]),
        ([4.0, 3.0, 2.0, 1.0], {"keep_latest": 2, "keep_best": 2}, [1, 2]),
        ([2.0, 1.0, 1.0, 3.0], {"keep_latest": 1, "keep_best": 1}, [1, 2]),  # a tie: the later
        ([None, 2.0, None, 3.0], {"keep_latest": 1, "keep_best": 3}, [1, 3]),
        # losses of other sets, or of other documents of the set, do not count
        (
            [
                (0.1, CHAT),
                2.5,
                (2.0, HELD_OUT | {"name": "renamed"}),
                (0.3, None),
                (0.2, HELD_OUT | {"digest": "other documents"}),
                None,
            ],
            {"keep_latest": 1, "keep_best": 1},
            [1, 2, 4, 5],
        ),
    ],
)
def test_latest_and_best_checkpoints_are_kept(tmp_path, losses, keep, deleted):
    results = [each if isinstance(each, tuple) else (each, HELD_OUT) for each in losses]
    write_metas(tmp_path, *(make_meta(step, *each) for step, each in enumerate(results, 1)))
    (tmp_path / "2000").mkdir()  # without metadata: not a checkpoint
    retention.delete_superseded(tmp_path, CheckpointConfig(**keep), HELD_OUT)
    kept = {*range(1, len(losses) + 1), 2000} - {*deleted}
    assert run_paths.list_steps(tmp_path) == sorted(kept)


def test_recorded_loss_and_early_stopping_are_all_that_change_in_a_checkpoint(tmp_path):
    arrays = {"master/a": {"digest": "00", "dtype": "float32", "shape": [2]}}
    write_metas(tmp_path, make_meta(3, has_pending_evaluation=True, arrays=arrays))
    open_writer(tmp_path, eval_set=HELD_OUT).record_eval(3, 1.25, early_stopping=STATE)
    after = reader.read_meta(tmp_path / "3")
    assert after == make_meta(3, 1.25, HELD_OUT, arrays=arrays, early_stopping=STATE)
    assert [path.name for path in (tmp_path / "3/meta").iterdir()] == ["metadata"]


def test_checkpoint_is_unchanged_if_its_loss_cannot_be_recorded(tmp_path, monkeypatch, capfd):
    before = make_meta(3, has_pending_evaluation=True)
    write_metas(tmp_path, before)
    store = open_writer(tmp_path, eval_set=HELD_OUT)

    def fail(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    store.record_eval(3, 1.25, early_stopping=None)
    assert reader.read_meta(tmp_path / "3") == before
    assert "No space left on device" in capfd.readouterr().err


def test_arrays_of_one_shape_share_a_program_and_have_their_checksums(tmp_path):
    """A small weight and its moments, replicated on 8 devices."""
    place = NamedSharding(batches.mesh(1, 2, 4), PartitionSpec())
    weight = jax.device_put(np.arange(48, dtype=np.float32).reshape(16, 3), place)
    opt = {"a": {"mu": weight + 1, "nu": weight + 2}}
    state = TrainState(master={"a": weight}, opt_state=opt, step=np.int32(1))
    before = checksums._compile.cache_info().misses
    with open_writer(tmp_path, {"a": Parameter(shape=(16, 3), hf_name="a")}) as store:
        store.save(state, make_meta(1))
    assert checksums._compile.cache_info().misses == before + 1
    arrays = {"master/a": weight, "opt/a/mu": opt["a"]["mu"], "opt/a/nu": opt["a"]["nu"]}
    written = reader.read_meta(tmp_path / "1").arrays
    assert {name: leaf["digest"] for name, leaf in written.items()} == {
        name: checksums.compute_on_host(np.asarray(array)) for name, array in arrays.items()
    }


def test_an_upload_without_progress_is_no_heartbeat(tmp_path):
    place = NamedSharding(batches.mesh(1, 1, 1), PartitionSpec())
    weight = {"a": jax.device_put(np.zeros((4, 4), np.float32), place)}
    state = TrainState(master=weight, opt_state={}, step=np.int32(1))
    status = RunStatus()
    event = threading.Event()  # which the upload waits for
    progress = types.SimpleNamespace(progress=0)
    uploads = types.SimpleNamespace(complete=(), store=progress, claim=event.wait)
    uploads.upload_shards = uploads.finish = lambda step: None
    table = {"a": Parameter(shape=(4, 4), hf_name="a")}
    with open_writer(tmp_path, table, status=status, uploads=uploads) as store:
        store.save(state, make_meta(1))
        while not store.is_uploading:
            assert store.poll() is None
        before = status.activity.last_progress
        store.poll()
        assert status.activity.last_progress == before
        progress.progress += 1
        store.poll()
        assert status.activity.last_progress > before
        event.set()
