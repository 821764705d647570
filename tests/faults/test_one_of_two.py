"""A disk that fails for one of two processes fails for both, and neither waits for the other."""

import re

import pytest

from tests import messages, two_processes

pytestmark = pytest.mark.e2e

SCRIPT = """
import os, pathlib, sys
import jax
from jaxsp.checkpoint import reader, writer
from jaxsp.checkpoint.writer import CheckpointWriter
from jaxsp.system import cluster, device_mesh, distributed, jax_platform
from jaxsp.checkpoint import run_paths
from jaxsp.checkpoint.retention import CheckpointConfig
from jaxsp.run import resume
from jaxsp.sharding import sharding
from jaxsp.training import train_state
from jaxsp.training.specs import StepSpec
from tests import batches

fault, folder_name = sys.argv[1:]
folder = pathlib.Path(folder_name)
process = cluster.detect_process(os.environ)
index = process.index
jax_platform.choose_platform(virtual_cpu_devices=8, num_processes=2, num_local_processes=2)
distributed.initialize(process)
sharding.MIN_SHARDED_SIZE = 100
spec = StepSpec(
    config=batches.make_config(name="adamw").step, model=batches.model(), num_steps=9,
    attention=batches.attention_choice(),
    mesh=device_mesh.make_mesh({"replica": 1, "data": 8, "seq": 1}),
)
master = train_state.random_weights(
    spec.table, seed=0, mesh=spec.mesh, is_on_host=spec.is_on_host
)
state = train_state.init_state(spec, master)
meta = lambda number: reader.CheckpointMeta(
    config={}, model={}, data={}, step=number, rows_consumed=0, num_tokens_total=0
)
is_broken = True


def break_method(owner, name, process):
    method = getattr(owner, name)

    def fail(self, *arguments):
        if is_broken and index == process:
            raise OSError(28, "No space left on device")
        return method(self, *arguments)

    setattr(owner, name, fail)


if fault == "copy":
    break_method(writer, "start_writes", 1)
elif fault == "_finalize":
    break_method(CheckpointWriter, "_finalize", 0)
with CheckpointWriter(folder, table=spec.table, config=CheckpointConfig()) as store:
    if fault != "read":
        outcome = store.save(state, meta(2)) or store.poll(wait=True)
        print("RESULT first:", outcome.failure, flush=True)
        is_broken = False
    assert store.save(state, meta(4)) is None
    while (outcome := store.poll()) is None:
        pass
    print("RESULT then:", outcome, sorted(path.name for path in folder.iterdir()), flush=True)
shapes = train_state.abstract_inputs(spec)[0]


def fail_to_read(path, *_):
    raise reader.DamagedCheckpointError(path, "bad block")


if fault == "read" and index == 1:
    reader._read_item = fail_to_read
try:
    reader.restore(folder / "4", shapes, table=spec.table, num_steps=4)
    print("RESULT restored", flush=True)
except reader.DamagedCheckpointError as damage:
    print("RESULT damaged:", damage.reason, flush=True)
    moved = resume.set_aside(damage.path, is_writer=jax.process_index() == 0).name
    print("RESULT moved:", moved, run_paths.find_latest(folder), flush=True)
distributed.shutdown()
"""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("copy", marks=pytest.mark.slow),
        "_finalize",
        pytest.param("read", marks=pytest.mark.slow),
    ],
)
def test_a_failure_of_one_process_fails_both_and_the_next_save_succeeds(fault, tmp_path):
    folder = tmp_path / "checkpoints"
    processes = two_processes.start("-c", SCRIPT, fault, folder)
    outputs = two_processes.wait(processes, timeout=120)
    assert [process.returncode for process in processes] == [0, 0], outputs
    # Gloo prints in the middle of lines
    results = [re.findall("RESULT (.*)", stdout) for stdout, _ in outputs]
    if fault == "read":
        assert "process 1" in results[0][1]
        assert "bad block" in results[1][1]
        assert [lines[2] for lines in results] == ["moved: 4 None"] * 2
        return
    failed = int(fault == "copy")
    assert "[Errno 28]" in results[failed][0]
    assert f"process {failed}" in results[1 - failed][0]
    assert all("step=4, failure=None" in lines[1] and "['4']" in lines[1] for lines in results)
    assert [lines[2] for lines in results] == ["restored"] * 2
    if fault == "copy":
        message = messages.containing("process 1", "checkpoint 2", "[Errno 28]")
        assert re.search(message, outputs[1][1])
