"""With two processes, a disk that fails under one of them fails for both, and nobody waits for the other."""

import os
import re
import socket
import subprocess
import sys

import pytest

from tests import messages

pytestmark = pytest.mark.e2e

SCRIPT = """
import os, pathlib, sys
import jax
from jaxsp.checkpoint import files, reader
from jaxsp.config import run_schema
from jaxsp.checkpoint.writer import CheckpointWriter
from jaxsp.runtime import cluster, device_mesh, distributed, jax_platform, run_paths
from jaxsp.training import sharding, train_step
from tests import batches
from jaxsp import attention

fault, folder, port, index = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
jax_platform.choose_platform(virtual_cpu_devices=8, num_processes=2, num_local_processes=2)
distributed.initialize(cluster.Process(index=index, num_processes=2, coordinator=f"127.0.0.1:{port}"))
sharding.MIN_SHARDED_SIZE = 100
attend = attention.make_attend(seq=1, kernel="blockwise", window=None)
program = train_step.Program(
    config=batches.settings(name="adamw"), model=batches.model(), attend=attend, num_steps=9,
    mesh=device_mesh.make_mesh({"replica": 1, "data": 8, "seq": 1}),
)
state = train_step.random_state(program, seed=0)
meta = lambda number: reader.CheckpointMeta(
    config={}, model={}, data={}, step=number, rows_consumed={}, num_tokens_total=0
)
broken = {"on": True}


def breaks(name, who):
    plain = getattr(CheckpointWriter, name)

    def failing(self, *given):
        if broken["on"] and index == who:
            raise OSError(28, "No space left on device")
        return plain(self, *given)

    setattr(CheckpointWriter, name, failing)


if fault in ("_copy", "_finalize"):
    breaks(fault, {"_copy": 1, "_finalize": 0}[fault])
with CheckpointWriter(folder, table=program.table, retention=run_schema.CheckpointConfig()) as store:
    if fault != "read":
        outcome = store.save(state, meta(2)) or store.poll(wait=True)
        print("SAID first:", outcome.failure, flush=True)
        broken["on"] = False
    assert store.save(state, meta(4)) is None
    while (outcome := store.poll()) is None:
        pass
    print("SAID then:", outcome, sorted(path.name for path in folder.iterdir()), flush=True)
like = train_step.abstract_inputs(program)[0]


def bad_block(path, *_):
    raise reader.DamagedCheckpointError(path, "bad block")


if fault == "read" and index == 1:
    reader._read_item = bad_block
try:
    reader.restore(folder / "4", like, table=program.table, num_steps=4)
    print("SAID restored", flush=True)
except reader.DamagedCheckpointError as damage:
    print("SAID damaged:", damage.reason, flush=True)
    print("SAID moved:", files.set_aside(damage.path).name, run_paths.find_latest(folder), flush=True)
distributed.shutdown()
"""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("_copy", marks=pytest.mark.slow),
        "_finalize",
        pytest.param("read", marks=pytest.mark.slow),
    ],
)
def test_what_fails_in_one_process_fails_in_both_and_is_made_good(fault, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path / "checkpoints"
    command = [sys.executable, "-c", SCRIPT, fault, str(folder), str(port)]
    both = [
        subprocess.Popen(
            [*command, str(index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        for index in (0, 1)
    ]
    said = [one.communicate(timeout=120) for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    found = [re.findall("SAID (.*)", out) for out, _ in said]  # Gloo prints in the middle of lines
    if fault == "read":
        assert "process 1" in found[0][1]
        assert "bad block" in found[1][1]
        assert [lines[2] for lines in found] == ["moved: 4 None"] * 2
        return
    failed = int(fault == "_copy")
    assert "[Errno 28]" in found[failed][0]
    assert f"process {failed}" in found[1 - failed][0]
    assert [lines[1] for lines in found] == ["then: WriteOutcome(step=4, failure=None) ['4']"] * 2
    assert [lines[2] for lines in found] == ["restored"] * 2
    if fault == "_copy":
        assert re.search(messages.holding("process 1", "checkpoint 2", "[Errno 28]"), said[1][1])
