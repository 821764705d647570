"""Place of a process in its job, from the variables of its launcher."""

import pytest

from jaxsp.system import distributed
from jaxsp.system.distributed import Process
from tests.messages import assert_refused

ADDRESS = {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
TORCHRUN = ADDRESS | {"WORLD_SIZE": "8", "RANK": "5"}
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in {"SIZE": "8", "RANK": "5", "LOCAL_SIZE": "4", "LOCAL_RANK": "1"}.items()
}
SBATCH = {"SLURM_JOB_ID": "70001", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
"""The shell of a batch script, whose eight tasks were never started."""
SRUN = SBATCH | {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
SINGLE = Process()


def job(coordinator="node-0:29500", local_index=None, num_local=None, launcher="deactivate"):
    """Process 5 of 8."""
    return Process(
        index=5,
        num_processes=8,
        coordinator=coordinator,
        launcher=launcher,
        local_index=local_index,
        num_local_processes=num_local,
    )


@pytest.mark.parametrize(
    ("environ", "process"),
    [
        ({}, SINGLE),
        ({"RANK": "0", "WORLD_SIZE": "1"}, SINGLE),
        (TORCHRUN, job()),
        (TORCHRUN | {"MASTER_ADDR": "fd00::1"}, job("[fd00::1]:29500")),
        (TORCHRUN | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, job("node-0:29500", 1, 4)),
        # torchrun in srun
        (TORCHRUN | SRUN | {"SLURM_STEP_NUM_TASKS": "2"}, job()),
        (OPEN_MPI | ADDRESS, job("node-0:29500", 1, 4)),
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.9.0.1:3"}, job(None, 1, 4, "ompi")),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, SINGLE),
        (SBATCH, SINGLE),
        # the shell of salloc, as a step
        (SBATCH | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"}, SINGLE),
        (SRUN, job(None, 1, 4, "slurm")),
        (SRUN | ADDRESS, job("node-0:29500", 1, 4)),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "7,1"}, job(None, 1, 1, "slurm")),
        (SRUN | {"SLURM_GPUS_PER_TASK": "2"}, job(None, None, 4, "slurm")),
        (SRUN | {"RANK": ""}, job(None, 1, 4, "slurm")),
    ],
)
def test_a_process_is_detected_from_the_variables_of_its_launcher(environ, process):
    assert distributed.detect_process(environ) == process


def test_arguments_take_precedence_over_variables():
    process = distributed.detect_process(
        TORCHRUN | SRUN, coordinator="[::1]:80", num_processes=2, process_index=0
    )
    assert process == Process(index=0, num_processes=2, coordinator="[::1]:80")


PORTS = ["1", "65535", "node-0:29500"]


@pytest.mark.parametrize(
    ("environ", "start", "parts"),
    [
        ({"RANK": "3"}, "RANK = 3: ", ["WORLD_SIZE"]),
        ({"WORLD_SIZE": "3"} | SRUN, "WORLD_SIZE = 3: ", ["RANK"]),
        ({"MASTER_ADDR": "node-0"}, "MASTER_ADDR = node-0: ", ["MASTER_PORT", "WORLD_SIZE"]),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "WORLD_SIZE = 2, RANK = 1: ", ["MASTER_ADDR"]),
        (TORCHRUN | {"RANK": "8"}, "RANK = 8, WORLD_SIZE = 8: ", ["0"]),
        (TORCHRUN | {"RANK": "-1"}, "RANK = -1, WORLD_SIZE = 8: ", ["0"]),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_ADDR:MASTER_PORT = node-0:http: ", PORTS),
        (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_ADDR:MASTER_PORT = node-0:65536: ", PORTS),
        ({"PMI_SIZE": "8"}, "PMI_SIZE = 8: ", ["torchrun"]),
        (TORCHRUN | {"LOCAL_RANK": "a"}, "LOCAL_RANK = a: ", ["number"]),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE = 8, ", ["MASTER_ADDR", "MASTER_PORT"]),
        ({"OMPI_COMM_WORLD_SIZE": "8"}, "OMPI_COMM_WORLD_SIZE = 8: ", ["OMPI_COMM_WORLD_RANK"]),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS = 8: ", ["SLURM_PROCID"]),
        (SRUN | {"MASTER_PORT": "1"}, "MASTER_PORT = 1: ", ["MASTER_ADDR"]),
    ],
)
def test_missing_and_invalid_values_are_refused(environ, start, parts):
    with assert_refused(*parts, start=start):
        distributed.detect_process(environ)


@pytest.mark.parametrize(
    ("arguments", "start", "parts"),
    [
        ((None, None, 0), "--process-id = 0: ", ["--coordinator", "--num-processes"]),
        (("node-0", 2, 0), "--coordinator = node-0: ", PORTS),
        (("a:1", 2, 2), "--process-id = 2, --num-processes = 2: ", ["0"]),
    ],
)
def test_missing_and_invalid_arguments_are_refused(arguments, start, parts):
    names = ("coordinator", "num_processes", "process_index")
    with assert_refused(*parts, start=start):
        distributed.detect_process({}, **dict(zip(names, arguments, strict=True)))


@pytest.mark.parametrize(
    ("process", "num_gpus", "gpus"),
    [
        (job(), 8, None),  # started by hand: uses all that it sees
        (job("a:1", 3, 8), 8, [3]),
        (job("a:1", 3), 8, [3]),
        (job("a:1", 0, 1), 8, None),  # the only process of a node uses all its GPUs
        (job(None, 0, 1, "slurm"), 8, [*range(8)]),
        (job("a:1", 3, 8), 1, None),  # the scheduler left it only one
        (job(None, 3, 8, "ompi"), 0, []),
    ],
)
def test_processes_on_the_same_node_use_one_gpu_each(process, num_gpus, gpus):
    assert distributed.choose_local_gpus(process, num_gpus) == gpus


@pytest.mark.parametrize("port", ["29500", "61440", "65535"])
def test_the_port_that_torchrun_uses_is_not_taken(port):
    variables = TORCHRUN | {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    addresses = {distributed.detect_process(variables | {"RANK": x}).coordinator for x in "01"}
    assert len(addresses) == 1
    assert addresses != {f"node-0:{port}"}
