"""Runs in object stores, with a real S3-compatible server: uploads, kills and outages."""

import shutil
import sys
import threading
import time

import pytest

from jaxsp.checkpoint import run_paths, run_storage
from jaxsp.checkpoint.run_storage import Uploads
from jaxsp.core.errors import NeedsAttentionError, UserError
from jaxsp.run.config_file import RunConfig
from jaxsp.system import object_store, run_lock
from jaxsp.system.object_store import ObjectStore
from tests.checkpoint import store_server
from tests.checkpoint.store_server import BUCKET


@pytest.fixture(scope="module")
def server():
    with store_server.run_server() as server:
        yield server


@pytest.fixture
def url(server, tmp_path):
    return f"s3://{BUCKET}/{tmp_path.name}/run"


@pytest.fixture
def store(url):
    return ObjectStore(url)


@pytest.fixture(autouse=True)
def short_times(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(object_store, "WAIT_S", 0.1)


def write_checkpoint(folder, step, content="weights", meta='{"arrays": 1}'):
    for name, text in {"master/manifest.ocdbt": content, "meta/metadata": meta}.items():
        path = folder / "checkpoints" / str(step) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def upload(uploads, step):
    uploads.claim()
    uploads.upload_shards(step)
    uploads.finish(step)


def make_run(folder, store=None, steps=()):
    """Makes a local run. Returns its uploads, with checkpoints of these steps."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").touch()
    uploads = Uploads(store, folder, set())
    for step in steps:
        write_checkpoint(folder, step)
        upload(uploads, step)
    return uploads


def put(store, folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    store.upload(folder, [name])


def deny(*_, **__):
    raise PermissionError("Access Denied for secret-of-the-test")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://missing/run", "bucket"),
        ("gs://bucket/run", "pip install"),
        ("s3://bucket/run", "Access Denied for ***"),
    ],
)
def test_a_store_that_cannot_be_used_is_a_user_error_with_its_reason(
    server, monkeypatch, capfd, url, reason
):
    if url.startswith("gs:"):
        monkeypatch.setitem(sys.modules, "gcsfs", None)

    def use_store():
        store = ObjectStore(url)
        if url == "s3://bucket/run":
            monkeypatch.setattr(store._fs, "find", deny)
        store.list()

    with pytest.raises(UserError) as caught:
        use_store()
    assert reason in caught.value.problems[0]
    assert capfd.readouterr().err == ""


def test_an_outage_is_reported_once_and_ends_in_an_error_or_a_result(server, store, capfd):
    server.stop()
    store.patience_s = 0.3
    with pytest.raises(UserError, match="connect"):
        store.list()
    assert store.progress > 1, "of several attempts"
    capfd.readouterr()
    store.patience_s = 60.0
    timer = threading.Timer(0.5, server.start)
    timer.start()
    assert store.list() == {}
    timer.join()
    assert capfd.readouterr().err.count("Trying again") == 1


@pytest.mark.parametrize("num_requests", range(11))
def test_a_kill_between_two_requests_leaves_no_checkpoint_that_looks_complete(
    store, tmp_path, monkeypatch, num_requests
):
    """The second upload replaces step 3, adds step 6 and deletes step 2."""

    class KilledError(BaseException):
        pass

    folder = tmp_path / "run"
    uploads = make_run(folder, store, [2, 3])
    shutil.rmtree(folder / "checkpoints/2")
    count = 0
    is_killed = False

    def kill(method):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count > num_requests:
                raise KilledError
            return method(*args, **kwargs)

        return call

    def put_one_by_one(sources, names, **_):
        for source, name in zip(sources, names, strict=True):
            put_file(source, name)

    put_file = kill(store._fs.put_file)
    with monkeypatch.context() as patch:
        patch.setattr(store._fs, "put", put_one_by_one)
        patch.setattr(store._fs, "rm", kill(store._fs.rm))
        try:
            uploads.delete(3)
            for step in (3, 6):
                write_checkpoint(folder, step, content="new", meta='{"arrays": 2}')
                (folder / "metrics.jsonl").write_text(f"of step {step}")
                upload(uploads, step)
        except KilledError:
            is_killed = True
    assert is_killed == (num_requests < 10)
    assert is_killed or run_storage.find_steps(store.list()) == {3, 6}
    copy = tmp_path / "copy"
    run_storage.download(store, copy)
    for step in run_paths.list_steps(copy / "checkpoints"):
        contents = {"new": '{"arrays": 2}', "weights": '{"arrays": 1}'}
        checkpoint = copy / "checkpoints" / str(step)
        array = (checkpoint / "master/manifest.ocdbt").read_text()
        assert contents[array] == (checkpoint / "meta/metadata").read_text()
        assert step < 6 or (copy / "metrics.jsonl").read_text() == "of step 6"
    assert run_paths.find_latest(copy) is not None


def test_only_files_that_have_changed_are_uploaded_again(store, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    for name in ("metrics.jsonl", "model/tokenizer.json"):
        (tmp_path / name).write_text("1")
    uploads = make_run(tmp_path, store, [3])
    names = []
    put = ObjectStore.upload
    monkeypatch.setattr(
        ObjectStore, "upload", lambda self, *args: (names.extend(args[1]), put(self, *args))
    )
    write_checkpoint(tmp_path, 6)
    (tmp_path / "metrics.jsonl").write_text("2")
    evaluated = tmp_path / "checkpoints/3/meta/metadata"
    evaluated.write_text('{"arrays": 1, "eval_loss": 2}')
    before = store.progress
    (tmp_path / "large.txt").write_bytes(bytes(1000))
    upload(uploads, 6)
    assert store.progress > before + 1000
    assert sorted(names) == [
        "checkpoints/3/meta/metadata",
        "checkpoints/6/master/manifest.ocdbt",
        "checkpoints/6/meta/metadata",
        "large.txt",
        "metrics.jsonl",
    ]
    assert store.read("metrics.jsonl") == b"2"


def run_session(url, machine, monkeypatch, write=lambda folder: None):
    """Uses a run's directory on a machine, and returns the local copy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(machine))
    config = RunConfig(directory=url, steps=1)
    folder = config.local_dir
    with run_lock.lock(folder), run_storage.open_run(url, folder):
        write(folder)
    return folder


def test_the_later_checkpoint_counts_on_every_machine(url, store, tmp_path, monkeypatch):
    def start(folder):
        (folder / "config.yaml").write_text("a: 1")
        (folder / "metrics.jsonl").write_text("of a")
        write_checkpoint(folder, 3)
        upload(run_storage.uploads[folder], 3)

    folder_a = run_session(url, tmp_path / "a", monkeypatch, start)
    # as after a kill or an outage: newer than the store
    (folder_a / "metrics.jsonl").write_text("newer")
    write_checkpoint(folder_a, 4)
    put(store, tmp_path / "killed", "checkpoints/9/master/shard", "incomplete")
    run_session(url, tmp_path / "a", monkeypatch)
    assert not [name for name in store.list() if name.startswith("checkpoints/9")]
    assert (folder_a / "metrics.jsonl").read_text() == "newer"
    assert run_storage.find_steps(store.list()) == {3, 4}

    def continue_on_b(folder):
        assert (folder / "metrics.jsonl").read_text() == "newer"
        assert (folder / "checkpoints/3/master/manifest.ocdbt").read_text() == "weights"
        (folder / "metrics.jsonl").write_text("of b")
        write_checkpoint(folder, 6)
        upload(run_storage.uploads[folder], 6)

    run_session(url, tmp_path / "b", monkeypatch, continue_on_b)
    write_checkpoint(folder_a, 5, meta="of a branch that has ended")
    run_session(url, tmp_path / "a", monkeypatch)
    assert (folder_a / "metrics.jsonl").read_text() == "of b"
    assert run_paths.list_steps(folder_a / "checkpoints") == [3, 4, 6]


def test_a_run_that_ends_in_an_outage_needs_attention_and_is_uploaded_later(
    server, url, store, tmp_path, monkeypatch
):
    monkeypatch.setattr(run_storage, "PATIENCE_S", 0.3)

    def lose_store(folder):
        (folder / "config.yaml").touch()
        write_checkpoint(folder, 3)
        server.stop()

    with pytest.raises(NeedsAttentionError, match=f"{tmp_path}/a/.*/checkpoints"):
        run_session(url, tmp_path / "a", monkeypatch, lose_store)
    server.start()
    assert store.list() == {}
    run_session(url, tmp_path / "a", monkeypatch)
    assert run_storage.find_steps(store.list()) == {3}


def test_the_error_of_a_run_is_raised_at_once_in_an_outage(server, url, tmp_path, monkeypatch):
    def fail(_):
        server.stop()
        raise ZeroDivisionError

    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        run_session(url, tmp_path / "a", monkeypatch, fail)
    assert time.monotonic() - began < 30
    server.start()


def test_a_url_with_other_files_is_refused_and_unchanged(url, store, tmp_path, monkeypatch):
    put(store, tmp_path, "thesis.pdf", "")
    with pytest.raises(UserError, match=r"thesis\.pdf"):
        run_session(url, tmp_path / "a", monkeypatch)
    assert [*store.list()] == ["thesis.pdf"]


def test_a_job_that_died_before_its_first_checkpoint_was_complete_can_start_again(
    url, store, tmp_path, monkeypatch
):
    """Process 1 uploads a shard only after process 0 has claimed the store."""
    uploads = make_run(tmp_path / "killed", store)
    write_checkpoint(tmp_path / "killed", 3)
    uploads.claim()
    uploads.upload_shards(3)
    run_session(url, tmp_path / "a", monkeypatch)
    assert sorted(store.list()) == ["config.yaml", "run_id"]


def test_another_run_at_the_url_than_in_the_local_copy_is_refused(
    url, store, tmp_path, monkeypatch
):
    def start(folder):
        (folder / "config.yaml").touch()
        write_checkpoint(folder, 1)
        upload(run_storage.uploads[folder], 1)

    run_session(url, tmp_path / "a", monkeypatch, start)
    for name in store.list():
        store.delete(name)
    run_session(url, tmp_path / "b", monkeypatch, start)
    before = store.list()
    with pytest.raises(UserError, match=f"another run than the local copy {tmp_path}/a"):
        run_session(url, tmp_path / "a", monkeypatch)
    assert store.list().keys() == before.keys()


def test_the_copy_of_an_exported_run_follows_the_store(store, url, tmp_path):
    with pytest.raises(UserError, match="contains no run"):
        run_storage.make_local(url)
    run = tmp_path / "run"
    for meta in ('{"arrays": 1}', '{"arrays": 2}'):
        uploads = make_run(run, store)
        for step in (2, 3):
            write_checkpoint(run, step, content=meta, meta=meta)
            upload(uploads, step)
        local = run_storage.make_local(f"{url}/checkpoints/2")
        assert run_paths.find_latest(local).name == "2"
        checkpoint = run_paths.find_latest(run_storage.make_local(url))
        assert checkpoint.name == "3"
        assert (checkpoint / "master/manifest.ocdbt").read_text() == meta
