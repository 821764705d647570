"""Place of a process in its job, from the variables of its launcher."""

import pytest

from jaxsp.system import cluster
from jaxsp.system.cluster import Process
from tests.messages import assert_refused

TORCHRUN = {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500", "WORLD_SIZE": "8", "RANK": "5"}

OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}

SBATCH = {"SLURM_JOB_ID": "70001", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
"""The shell of a batch script, whose eight tasks were never started."""

SRUN = SBATCH | {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}

SINGLE = Process()


def job(coordinator, local_index=None, num_local=None):
    """Process 5 of 8."""
    return Process(
        index=5,
        num_processes=8,
        coordinator=coordinator,
        local_index=local_index,
        num_local_processes=num_local,
    )


DETECTED = [
    ({}, SINGLE),
    ({"RANK": "0", "WORLD_SIZE": "1"}, SINGLE),
    (TORCHRUN, job("node-0:29500")),
    (TORCHRUN | {"MASTER_ADDR": "fd00::1"}, job("[fd00::1]:29500")),
    (TORCHRUN | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, job("node-0:29500", 1, 4)),
    # torchrun in srun
    (TORCHRUN | SRUN | {"SLURM_STEP_NUM_TASKS": "2"}, job("node-0:29500")),
    (OPEN_MPI | {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}, job("node-0:29500", 1, 4)),
    (
        OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"},
        job("10.96.0.1:62624", 1, 4),
    ),
    (
        OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp6://[fe80::b9b,2620::2]:43370"},
        job("[fe80::b9b]:62624", 1, 4),
    ),
    (
        {
            "OMPI_COMM_WORLD_SIZE": "1",
            "OMPI_COMM_WORLD_RANK": "0",
            **dict(list(OPEN_MPI.items())[2:]),
        },
        SINGLE,
    ),
    (SBATCH, SINGLE),
    # the shell of salloc, as a step
    (SBATCH | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"}, SINGLE),
    (SRUN, job("node001:61809", 1, 4)),
    # a step that runs at the same time has its own port
    (SRUN | {"SLURM_STEP_ID": "1"}, job("node001:61816", 1, 4)),
    (SRUN | {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}, job("node-0:29500", 1, 4)),
    (SRUN | {"SLURM_STEP_NODELIST": "node001,other"}, job("node001:61809", 1, 4)),
    (SRUN | {"SLURM_STEP_NODELIST": "node[3,007-015],other"}, job("node3:61809", 1, 4)),
    (SRUN | {"SLURM_STEP_NODELIST": "rack[0-1]n[2-3].site"}, job("rack0n2.site:61809", 1, 4)),
    (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "7,1"}, job("node001:61809", 1, 1)),
    (SRUN | {"RANK": ""}, job("node001:61809", 1, 4)),
]


@pytest.mark.parametrize(("environ", "process"), DETECTED)
def test_a_process_is_detected_from_the_variables_of_its_launcher(environ, process):
    assert cluster.detect_process(environ) == process


def test_arguments_take_precedence_over_variables():
    process = cluster.detect_process(
        TORCHRUN | SRUN, coordinator="[::1]:80", num_processes=2, process_index=0
    )
    assert process == Process(index=0, num_processes=2, coordinator="[::1]:80")


ADDRESS = "MASTER_ADDR:MASTER_PORT"

INVALID = [
    ({"RANK": "3"}, {}, "RANK = 3: ", ["WORLD_SIZE", "missing"]),
    ({"WORLD_SIZE": "3"} | SRUN, {}, "WORLD_SIZE = 3: ", ["RANK", "missing"]),
    (
        {"MASTER_ADDR": "node-0"},
        {},
        "MASTER_ADDR = node-0: ",
        ["MASTER_PORT", "WORLD_SIZE", "RANK", "missing"],
    ),
    (
        {"RANK": "1", "WORLD_SIZE": "2"},
        {},
        "WORLD_SIZE = 2, RANK = 1: ",
        ["MASTER_ADDR", "MASTER_PORT", "missing"],
    ),
    (TORCHRUN | {"RANK": "8"}, {}, "RANK = 8: ", ["WORLD_SIZE = 8", "0", "7"]),
    (TORCHRUN | {"RANK": "-1"}, {}, "RANK = -1: ", ["0", "RANK=1"]),
    (TORCHRUN | {"WORLD_SIZE": "0"}, {}, "WORLD_SIZE = 0: ", ["1", "WORLD_SIZE=2"]),
    (TORCHRUN | {"LOCAL_RANK": "one"}, {}, "LOCAL_RANK = one: ", ["0", "LOCAL_RANK=1"]),
    (TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}, {}, "LOCAL_WORLD_SIZE = 0: ", ["LOCAL_WORLD_SIZE=2"]),
    (
        TORCHRUN | {"MASTER_PORT": "http"},
        {},
        f"{ADDRESS} = node-0:http: ",
        ["1", "65535", "node-0:29500"],
    ),
    (
        TORCHRUN | {"MASTER_PORT": "65536"},
        {},
        f"{ADDRESS} = node-0:65536: ",
        ["1", "65535", "node-0:29500"],
    ),
    (OPEN_MPI, {}, "OMPI_COMM_WORLD_SIZE = 8: ", ["process 0", "MASTER_ADDR=HOST"]),
    (
        {"OMPI_COMM_WORLD_SIZE": "8"},
        {},
        "OMPI_COMM_WORLD_SIZE = 8: ",
        ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "missing"],
    ),
    (
        {"SLURM_STEP_NUM_TASKS": "8"},
        {},
        "SLURM_STEP_NUM_TASKS = 8: ",
        ["SLURM_PROCID", "SLURM_LOCALID", "missing"],
    ),
    (SRUN | {"MASTER_PORT": "1"}, {}, "MASTER_PORT = 1: ", ["MASTER_ADDR", "missing"]),
    (
        {},
        {"process_index": 0},
        "--process-id = 0: ",
        ["--coordinator", "--num-processes", "missing"],
    ),
    (
        {},
        {"coordinator": "node-0", "num_processes": 2, "process_index": 0},
        "--coordinator = node-0: ",
        ["1", "65535", "node-0:29500"],
    ),
    (
        {},
        {"coordinator": "a:1", "num_processes": 2, "process_index": 2},
        "--process-id = 2: ",
        ["--num-processes = 2", "0", "1"],
    ),
]


@pytest.mark.parametrize(("environ", "arguments", "start", "parts"), INVALID)
def test_missing_and_invalid_values_are_refused(environ, arguments, start, parts):
    with assert_refused(*parts, start=start):
        cluster.detect_process(environ, **arguments)


@pytest.mark.parametrize(
    ("local_index", "num_local", "num_gpus", "gpus"),
    [
        (None, None, 8, None),  # started by hand: uses all that it sees
        (3, 8, 8, [3]),
        (3, None, 8, [3]),
        (0, 1, 8, None),  # the only process of a node uses all its GPUs
        (3, 8, 1, None),  # the scheduler left it only one
        (3, 8, 0, None),
    ],
)
def test_processes_on_the_same_node_use_one_gpu_each(local_index, num_local, num_gpus, gpus):
    assert cluster.choose_local_gpus(job("a:1", local_index, num_local), num_gpus) == gpus


def test_a_slurm_task_with_its_own_gpus_uses_all_of_them():
    variables = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "n0",
    }
    process = cluster.detect_process(
        {
            **variables,
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_TASKS_PER_NODE": "4",
            "SLURM_GPUS_PER_TASK": "2",
        }
    )
    assert cluster.choose_local_gpus(process, 2) is None


def test_the_port_that_torchrun_uses_is_not_taken():
    variables = {
        "MASTER_ADDR": "a",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for port in ("29500", "61440", "65535"):
        addresses = [
            cluster.detect_process({**variables, "MASTER_PORT": port, "RANK": rank}).coordinator
            for rank in ("0", "1")
        ]
        assert addresses[0] == addresses[1] != f"a:{port}"
    assert cluster.detect_process(
        {**variables, "MASTER_PORT": "29500", "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    )
