"""Object stores, with a real S3-compatible server: objects, uploads, outages, locks, copies."""

import json
import shutil
import sys
import time

import pytest

from jaxsp.config.run_schema import RunConfig
from jaxsp.core import exit_codes
from jaxsp.core.errors import NeedsAttentionError, UserError
from jaxsp.processes import distributed
from jaxsp.runtime import run_dir, run_paths
from jaxsp.storage import copies, mirror, object_store, run_storage, session_lock
from jaxsp.storage.mirror import Mirror
from jaxsp.storage.object_store import ObjectStore
from jaxsp.storage.session_lock import SessionLock
from tests.storage import store_server
from tests.storage.store_server import BUCKET


@pytest.fixture(scope="module")
def server():
    with store_server.run_server() as server:
        yield server


@pytest.fixture
def url(server, request):
    return f"s3://{BUCKET}/{request.node.name[:40]}/run"


@pytest.fixture
def store(url):
    return ObjectStore(url, label=f"run.directory = {url}")


@pytest.fixture(autouse=True)
def short_times(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(object_store, "START_PATIENCE_S", 1.0)
    monkeypatch.setattr(object_store, "MAX_WAIT_S", 0.1)
    monkeypatch.setattr(mirror, "POLL_S", 0.05)
    monkeypatch.setattr(mirror, "_MIN_INTERVAL_S", 0.05)
    monkeypatch.setattr(session_lock, "HEARTBEAT_INTERVAL_S", 0.1)
    monkeypatch.setattr(session_lock, "HEARTBEAT_TIMEOUT_S", 1.0)


def make_mirror(store, folder, *, part=0, num_parts=1, session=1):
    folder.mkdir(exist_ok=True)
    return Mirror(
        store, folder, part=part, num_parts=num_parts, session=session, check_lock=lambda: None
    )


def write_checkpoint(folder, step, content="weights", meta="{}"):
    for name, text in {"master/manifest.ocdbt": content, "meta/metadata": meta}.items():
        path = folder / "checkpoints" / str(step) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def read_names(store):
    return sorted(name for name in store.list() if not name.startswith("lock/"))


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_object_is_created_once_and_a_missing_one_is_none(store):
    assert store.create("a", b"1")
    assert not store.create("a", b"2")
    assert store.read("a") == b"1"
    assert store.read("b") is None
    store.delete(["a", "b"])
    assert store.list() == {}


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://missing/run", "bucket"),
        ("gs://bucket/run", "pip install"),
        ("s3://bucket/run", "Access Denied"),
    ],
)
def test_a_store_that_cannot_be_used_is_a_user_error_with_its_reason(
    server, monkeypatch, capfd, url, reason
):
    if url.startswith("gs:"):
        monkeypatch.setitem(sys.modules, "gcsfs", None)

    def use_store():
        store = ObjectStore(url, label=f"run.directory = {url}")
        if reason == "Access Denied":
            monkeypatch.setattr(store._fs, "find", deny)
        store.list()

    with pytest.raises(UserError) as caught:
        use_store()
    assert caught.value.problems[0].startswith(f"run.directory = {url}: ")
    assert reason in caught.value.problems[0]
    assert capfd.readouterr().err == ""


def deny(*_, **__):
    raise PermissionError("Access Denied")


def test_a_store_without_an_answer_is_tried_again_and_then_a_user_error(
    server, store, monkeypatch, capfd
):
    server.stop()
    with pytest.raises(UserError, match="connect"):
        store.list()
    capfd.readouterr()
    monkeypatch.setattr(object_store, "START_PATIENCE_S", 60.0)
    is_transient = object_store.is_transient
    monkeypatch.setattr(
        object_store, "is_transient", lambda error: server.start() or is_transient(error)
    )
    assert store.list() == {}
    assert capfd.readouterr().err.count("Trying again") == 1


def test_the_config_is_first_and_metadata_are_after_the_metrics(store, tmp_path, monkeypatch):
    names = []
    uploads = make_mirror(store, tmp_path / "run")
    upload = uploads._store.upload
    write = uploads._store.write
    monkeypatch.setattr(
        uploads._store, "upload", lambda file, name: names.append(name) or upload(file, name)
    )
    monkeypatch.setattr(
        uploads._store, "write", lambda name, text: names.append(name) or write(name, text)
    )
    write_checkpoint(tmp_path / "run", 3)
    (tmp_path / "run/config.yaml").touch()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 3}\n')
    (tmp_path / "run/lock").touch()
    uploads._try_sync(everything=False)
    assert names == [
        "config.yaml",
        "checkpoints/3-1/master/manifest.ocdbt",
        "metrics.jsonl",
        "checkpoints/3-1/meta/metadata",
    ]


def test_a_checkpoint_is_deleted_after_a_later_one_is_complete(store, tmp_path, monkeypatch):
    uploads = make_mirror(store, tmp_path / "run")
    write_checkpoint(tmp_path / "run", 3)
    assert uploads._try_sync(everything=False)
    write_checkpoint(tmp_path / "run", 6)
    (tmp_path / "run/checkpoints/3").rename(tmp_path / "run/3.deleting")
    with monkeypatch.context() as patch:
        patch.setattr(uploads._store, "write", deny)  # the metadata
        assert uploads._try_sync(everything=False) is None
        assert "checkpoints/3-1/meta/metadata" in store.list()
    assert uploads._try_sync(everything=False)
    assert [name for name in read_names(store) if name.startswith("checkpoints")] == [
        "checkpoints/6-1/master/manifest.ocdbt",
        "checkpoints/6-1/meta/metadata",
    ]
    shutil.rmtree(tmp_path / "run/checkpoints/6")
    assert uploads._try_sync(everything=False)
    assert "checkpoints/6-1/meta/metadata" in store.list()


def test_a_checkpoint_that_is_deleted_during_its_upload_is_completed(store, tmp_path, monkeypatch):
    uploads = make_mirror(store, tmp_path / "run")
    write_checkpoint(tmp_path / "run", 3)
    upload = uploads._store.upload

    def delete_and_upload(file, name):
        shutil.rmtree(tmp_path / "run/checkpoints/3")
        upload(file, name)

    monkeypatch.setattr(uploads._store, "upload", delete_and_upload)
    assert uploads._try_sync(everything=False)
    assert "checkpoints/3-1/meta/metadata" in store.list()


def test_an_evaluated_checkpoint_uploads_only_its_metadata_again(store, tmp_path, monkeypatch):
    uploads = make_mirror(store, tmp_path / "run")
    write_checkpoint(tmp_path / "run", 3, meta='{"arrays": 1}')
    uploads._try_sync(everything=False)
    write_checkpoint(tmp_path / "run", 3, meta='{"arrays": 1, "eval_loss": 2}')
    with monkeypatch.context() as patch:
        patch.setattr(uploads._store, "upload", deny)
        assert uploads._try_sync(everything=False)
    assert store.read("checkpoints/3-1/meta/metadata") == b'{"arrays": 1, "eval_loss": 2}'
    write_checkpoint(tmp_path / "run", 3, content="other", meta='{"arrays": 2}')
    assert uploads._try_sync(everything=False)
    assert store.read("checkpoints/3-1/master/manifest.ocdbt") == b"other"


def test_metadata_waits_for_the_shards_of_all_nodes(store, tmp_path):
    first = make_mirror(store, tmp_path / "first", num_parts=2)
    second = make_mirror(store, tmp_path / "second", part=1, num_parts=2)
    for folder in ("first", "second"):
        write_checkpoint(tmp_path / folder, 3)
    (tmp_path / "second/checkpoints/3/master/shard").write_text("of second")
    assert first._try_sync(everything=True) is False
    assert "checkpoints/3-1/meta/metadata" not in store.list()
    with pytest.raises(NeedsAttentionError, match="other nodes"):
        first.flush(patience_s=0.0)
    assert second._try_sync(everything=True)
    assert first._try_sync(everything=True)
    assert {"checkpoints/3-1/meta/metadata", "checkpoints/3-1/master/shard"} <= {*store.list()}


def test_an_outage_costs_nothing_and_is_printed_once(server, store, tmp_path, capfd):
    folder = tmp_path / "run"
    uploads = make_mirror(store, folder)
    (folder / "metrics.jsonl").write_text("1")
    uploads.start()
    wait_until(lambda: store.read("metrics.jsonl") == b"1")
    server.stop()
    (folder / "metrics.jsonl").write_text("1, 2")
    write_checkpoint(folder, 3)
    wait_until(lambda: uploads._is_broken)
    time.sleep(0.5)
    server.start()
    wait_until(lambda: "checkpoints/3-1/meta/metadata" in store.list())
    (folder / "metrics.jsonl").write_text("1, 2, 3")
    uploads.stop()
    uploads.flush(patience_s=1.0)
    assert store.read("metrics.jsonl") == b"1, 2, 3"
    output = capfd.readouterr().err
    assert output.count("CANNOT BE WRITTEN") == output.count("is written again") == 1


def test_a_store_that_stays_away_at_the_end_needs_attention(server, store, tmp_path):
    uploads = make_mirror(store, tmp_path / "run")
    (tmp_path / "run/metrics.jsonl").write_text("1")
    server.stop()
    with pytest.raises(NeedsAttentionError, match=str(tmp_path / "run")):
        uploads.flush(patience_s=0.3)
    server.start()


def test_incomplete_checkpoints_of_a_killed_run_are_removed_from_the_store(store, tmp_path):
    store.write("checkpoints/3-1/master/a", b"")
    store.write("checkpoints/2-1/meta/metadata", b"{}")
    uploads = make_mirror(store, tmp_path / "run", session=2)
    uploads.start()
    uploads.stop()
    assert read_names(store) == ["checkpoints/2-1/meta/metadata"]


def test_a_replaced_session_changes_no_checkpoint_of_the_next(store, url, tmp_path, monkeypatch):
    class ReplacedError(Exception):
        pass

    def end():
        raise ReplacedError

    monkeypatch.setattr(mirror, "_NUM_THREADS", 1)
    first = make_mirror(store, tmp_path / "a", session=1)
    write_checkpoint(tmp_path / "a", 4, content="of a", meta='{"arrays": "a"}')
    (tmp_path / "a/checkpoints/4/master/shard").write_text("of a")
    upload = first._store.upload

    def upload_and_lose_lock(file, name):
        upload(file, name)
        monkeypatch.setattr(first, "_check_lock", end)
        first._lock_checked_at = -float("inf")  # the process was suspended

    monkeypatch.setattr(first._store, "upload", upload_and_lose_lock)
    assert first._try_sync(everything=False) is None
    late = [name for name in read_names(store) if name.startswith("checkpoints/")]
    assert len(late) == 1

    second = make_mirror(store, tmp_path / "b", session=2)
    (tmp_path / "b/config.yaml").touch()
    second.start()
    write_checkpoint(tmp_path / "b", 4, content="of b", meta='{"arrays": "b"}')
    second.stop()
    assert second._try_sync(everything=True)
    for name in (*late, "checkpoints/4-1/meta/metadata"):  # requests that arrive late
        store.write(name, b"of a")
    checkpoint = run_paths.find_latest(copies.make_local(url, field="RUN"))
    assert checkpoint is not None
    copies.fetch(checkpoint)
    assert (checkpoint / "master/manifest.ocdbt").read_text() == "of b"
    assert not (checkpoint / "master/shard").exists()
    shutil.rmtree(tmp_path / "b/checkpoints/4")
    write_checkpoint(tmp_path / "b", 5)
    assert second._try_sync(everything=True)
    assert not [name for name in store.list() if name.startswith("checkpoints/4-")]


def test_a_store_that_fails_for_a_moment_delays_a_start(store, tmp_path, monkeypatch):
    """Each kind of request fails once, as with an internal error of the store."""
    failed = set()
    for name in ("find", "cat_file", "pipe_file", "rm_file"):
        monkeypatch.setattr(store._fs, name, fail_once(name, getattr(store._fs, name), failed))
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    store.write("lock/000001.json", b"{}")
    store.write("checkpoints/3-1/master/a", b"")
    lock = make_lock(store, tmp_path, "a")
    acquire(lock)
    uploads = make_mirror(store, tmp_path / "run", session=lock.number)
    uploads.start()
    uploads.stop()
    lock.release(is_unused=True)
    assert failed == {"find", "cat_file", "pipe_file", "rm_file"}
    assert lock.number == 2
    assert read_names(store) == []


def fail_once(name, method, failed):
    def call(*args, **kwargs):
        if name not in failed:
            failed.add(name)
            raise OSError(f"500 of {name}")
        return method(*args, **kwargs)

    return call


def make_lock(store, tmp_path, session):
    holder = {"session": session, "pid": 7, "host": "node", "began": "2026"}
    return SessionLock(store, holder, heartbeat=tmp_path / "heartbeat.json")


def acquire(lock):
    lock.acquire(lock.find_holder(), is_dead=False)


def test_a_second_run_is_refused_until_the_first_ends_or_is_dead(store, tmp_path):
    first = make_lock(store, tmp_path, "a")
    acquire(first)
    with pytest.raises(UserError, match="in use by another process: pid 7 on node"):
        acquire(make_lock(store, tmp_path, "b"))
    first.release(is_unused=False)
    second = make_lock(store, tmp_path, "c")
    began = time.monotonic()
    acquire(second)
    assert time.monotonic() - began < session_lock.HEARTBEAT_TIMEOUT_S
    second._closed.set()  # dies without a release
    second._thread.join()
    third = make_lock(store, tmp_path, "d")
    acquire(third)
    assert third.sessions == ("d", "c")
    third.release(is_unused=True)
    assert store.list() == {}


def test_of_two_runs_that_take_over_together_one_is_refused(store, tmp_path):
    locks = [make_lock(store, tmp_path, name) for name in "ab"]
    latest = [lock.find_holder() for lock in locks]
    locks[0].acquire(latest[0], is_dead=False)
    with pytest.raises(UserError, match="in use"):
        locks[1].acquire(latest[1], is_dead=False)
    locks[0].release(is_unused=True)


def test_a_run_that_was_replaced_ends(store, tmp_path, monkeypatch):
    codes = []
    monkeypatch.setattr(distributed, "abort_job", codes.append)
    first = make_lock(store, tmp_path, "a")
    acquire(first)
    store.write("lock/000002.json", json.dumps({"session": "b"}).encode())
    wait_until(lambda: codes)
    first._closed.set()
    assert codes[0] == exit_codes.NEEDS_ATTENTION


def run_session(url, machine, monkeypatch, write=lambda folder: None):
    """Uses a run's directory on a machine, and returns the local copy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(machine))
    config = RunConfig(directory=url, steps=1)
    folder = run_paths.local_dir(config)
    with run_dir.lock(folder), run_storage.open_run(config):
        write(folder)
    return folder


def test_the_machine_of_the_last_session_has_the_files_that_count(url, tmp_path, monkeypatch):
    def start(folder):
        (folder / "config.yaml").write_text("a: 1")
        (folder / "metrics.jsonl").write_text("of a")
        write_checkpoint(folder, 3)

    folder_a = run_session(url, tmp_path / "a", monkeypatch, start)
    # as after a kill: newer than the store
    (folder_a / "metrics.jsonl").write_text("newer")
    run_session(url, tmp_path / "a", monkeypatch)
    assert (folder_a / "metrics.jsonl").read_text() == "newer"
    seen = {}

    def continue_on_b(folder):
        seen["metrics"] = (folder / "metrics.jsonl").read_text()
        seen["weights"] = (folder / "checkpoints/3/master").exists()
        copies.fetch(folder / "checkpoints/3")
        seen["weights after fetch"] = (folder / "checkpoints/3/master/manifest.ocdbt").read_text()
        (folder / "metrics.jsonl").write_text("of b")
        write_checkpoint(folder, 6)

    run_session(url, tmp_path / "b", monkeypatch, continue_on_b)
    assert seen == {"metrics": "newer", "weights": False, "weights after fetch": "weights"}
    (folder_a / "metrics.jsonl").write_text("of a branch that has ended")
    run_session(url, tmp_path / "a", monkeypatch)
    assert (folder_a / "metrics.jsonl").read_text() == "of b"
    assert run_paths.list_steps(folder_a / "checkpoints") == [3, 6]


def test_a_url_with_other_files_is_refused_and_unchanged(url, store, tmp_path, monkeypatch):
    store.write("thesis.pdf", b"")
    with pytest.raises(UserError, match=r"thesis\.pdf"):
        run_session(url, tmp_path / "a", monkeypatch)
    assert [*store.list()] == ["thesis.pdf"]


def test_a_damaged_local_checkpoint_is_downloaded_again_once(url, tmp_path, monkeypatch):
    def damage(folder):
        (folder / "config.yaml").touch()
        write_checkpoint(folder, 3)
        wait_until(lambda: copies.fetch_again(folder / "checkpoints/4") is False)
        store = ObjectStore(url, label="")
        wait_until(lambda: "checkpoints/3-1/meta/metadata" in store.list())
        (folder / "checkpoints/3/master/manifest.ocdbt").write_text("weighta")
        assert copies.fetch_again(folder / "checkpoints/3")
        assert (folder / "checkpoints/3/master/manifest.ocdbt").read_text() == "weights"
        assert not copies.fetch_again(folder / "checkpoints/3")

    run_session(url, tmp_path / "a", monkeypatch, damage)


def test_the_copy_of_an_exported_run_follows_the_store(store, url, tmp_path):
    with pytest.raises(UserError, match="contains no run"):
        copies.make_local(url, field="RUN")
    run = tmp_path / "run"
    uploads = make_mirror(store, run)
    (run / "config.yaml").touch()
    for meta in ("{}", '{"arrays": 1}'):
        write_checkpoint(run, 3, content=meta, meta=meta)
        assert uploads._try_sync(everything=True)
        checkpoint = run_paths.find_latest(copies.make_local(f"{url}/checkpoints/3", field="RUN"))
        assert checkpoint is not None
        copies.fetch(checkpoint)
        assert (checkpoint / "master/manifest.ocdbt").read_text() == meta
        assert copies.show(checkpoint) == f"{url}/checkpoints/3"
