"""The SLURM script and the Kubernetes manifest: what they start the commands take, and its exit code is answered."""

import os
import pathlib
import re
import signal
import subprocess
import time

import pytest
import yaml

from jaxsp import launch
from jaxsp.config import config_file
from jaxsp.core import exit_codes
from jaxsp.runtime import hardware

REPO = pathlib.Path(__file__).parent.parent
SLURM = REPO / "scripts/launch/slurm.sh"
JOBSET = yaml.safe_load((REPO / "scripts/launch/jobset.yaml").read_text())
JOB = JOBSET["spec"]["replicatedJobs"][0]
POD = JOB["template"]["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]


@pytest.fixture
def commands(tmp_path):
    """A folder of programs that stand for the cluster's; each notes how it was called, and `python` ends as it is told."""

    def program(name, text):
        (tmp_path / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {tmp_path}/called\n{text}')
        (tmp_path / name).chmod(0o755)

    # srun answers SIGTERM by killing its tasks
    srun = f'shift; "$@" & child=$!; echo $child > {tmp_path}/task; trap "kill -KILL $child; exit 137" TERM; wait $child'
    program("srun", srun)
    program("scancel", f"kill -${{1#--signal=}} $(cat {tmp_path}/task)")
    program("scontrol", "")
    program(
        "python",
        f"""
codes=($(cat {tmp_path}/codes)); echo "${{codes[@]:1}}" > {tmp_path}/codes
stops=${{codes[0]#stops}}
if [ "$stops" != "${{codes[0]}}" ]; then trap "exit $stops" TERM; touch {tmp_path}/ready; while :; do sleep 0.1; done; fi
exit "${{codes[0]}}"
""",
    )

    def run(*words, codes, tell=None, **environ):
        (tmp_path / "codes").write_text(codes)
        environ = {
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            **environ,
        }
        running = subprocess.Popen(words, env=environ, stderr=subprocess.PIPE, text=True)
        while tell is not None and not (tmp_path / "ready").exists():
            assert running.poll() is None
            time.sleep(0.05)
        if tell is not None:
            running.send_signal(tell)
        try:
            said = running.communicate(timeout=20)[1]
        finally:
            running.kill()
        called = (
            (tmp_path / "called").read_text().splitlines() if (tmp_path / "called").exists() else []
        )
        return running.returncode, said, called

    return run


def trains(called):
    return [line for line in called if line.startswith("python")]


@pytest.mark.parametrize(
    ("codes", "code", "starts"),
    [
        ("0", 0, 1),
        ("2", 2, 1),
        ("1", 1, 1),
        ("75 134 0", 0, 3),
        ("137 0", 0, 2),
        ("75 2", 2, 2),
        ("75 75 75 75 0", 75, 4),
    ],
)
def test_slurm_starts_again_what_hangs_and_nothing_else(commands, codes, code, starts):
    ended, _, called = commands(SLURM, "a.yaml", "run.steps=3", codes=codes)
    assert ended == code
    assert (
        trains(called)
        == ["python -m jaxsp.train a.yaml run.shutdown_grace=270s run.steps=3"] * starts
    )
    assert not any(line.startswith("scontrol") for line in called)


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"), [(0, "0", True), (0, "20", False), (1, "0", False)]
)
def test_slurm_queues_again_when_the_time_is_up(commands, code, restarts, requeued):
    ended, _, called = commands(
        SLURM, "a.yaml", codes=f"stops{code}", tell=signal.SIGUSR1, SLURM_RESTART_COUNT=restarts
    )
    assert ended == code
    assert len(trains(called)) == 1
    assert ("scontrol requeue 7" in called) == requeued


def test_slurm_asks_for_a_config(commands):
    code, said, called = commands(SLURM, codes="0")
    assert (code, called) == (2, [])
    assert said.startswith("usage: sbatch")


def test_slurm_warns_earlier_than_a_run_may_take_to_stop():
    text = SLURM.read_text()
    warned = int(re.search(r"--signal=B:USR1@(\d+)", text)[1])
    assert float(re.search(r"run.shutdown_grace=(\d+)s", text)[1]) < warned
    subprocess.run(["bash", "-n", SLURM], check=True)
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", text, re.MULTILINE))
    assert options["ntasks-per-node"] == options["gpus-per-node"], "one task for each GPU"


def test_a_pod_runs_the_launcher_as_it_wants_to_be_run(commands, monkeypatch):
    code, _, called = commands(*CONTAINER["command"], *CONTAINER["args"], codes="0", NODE="1")
    assert code == 0
    (words,) = [line.split() for line in trains(called)]
    assert words[:3] == ["python", "-m", "jaxsp.launch"]
    started = []
    monkeypatch.chdir(REPO)
    monkeypatch.setattr(
        hardware, "count_gpus", lambda _: CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    )
    monkeypatch.setattr(
        launch, "run_processes", lambda command, job, orders: started.append((command, job))
    )
    launch.main(words[3:])
    ((command, job),) = started
    assert [process.index for process in job] == list(range(8, 16))
    assert {process.num_processes for process in job} == {16}
    config = config_file.load(command[3], command[4:])
    shutdown_grace_s = config.run.shutdown_grace.total_seconds()
    assert shutdown_grace_s < POD["terminationGracePeriodSeconds"]
    mount = next(one["mountPath"] for one in CONTAINER["volumeMounts"] if one["name"] == "shared")
    assert config.run.directory.startswith(f"{mount}/")


def test_the_pods_meet_at_the_first_of_them():
    job = JOB["template"]["spec"]
    name, port = re.search(r"--coordinator (\S+):(\d+)", CONTAINER["args"][0]).groups()
    assert (
        name
        == f"{JOBSET['metadata']['name']}-{JOB['name']}-0-0.{JOBSET['spec']['network']['subdomain']}"
    )
    assert int(port) in [one["containerPort"] for one in CONTAINER["ports"]]
    nodes = int(re.search(r"--nodes (\d+)", CONTAINER["args"][0])[1])
    assert job["parallelism"] == job["completions"] == nodes
    assert job["completionMode"] == "Indexed"
    assert {one["name"] for one in CONTAINER["volumeMounts"]} == {
        one["name"] for one in POD["volumes"]
    }


def test_what_needs_a_person_ends_the_jobset_and_anything_else_starts_it_again():
    job, policy = JOB["template"]["spec"], JOBSET["spec"]["failurePolicy"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    codes = [exit_codes.USER_ERROR, exit_codes.NEEDS_ATTENTION]
    assert rule["onExitCodes"] == {
        "containerName": CONTAINER["name"],
        "operator": "In",
        "values": codes,
    }
    assert [(one["action"], one["onJobFailureReasons"]) for one in policy["rules"]] == [
        ("FailJobSet", ["PodFailurePolicy"])
    ]
    assert policy["maxRestarts"] > 0
    assert POD["restartPolicy"] == "Never"
    assert job["backoffLimit"] == 0


@pytest.mark.parametrize(("codes", "code"), [("2", 2), ("75", 75), ("1", 1)])
def test_a_pod_ends_as_the_launcher_does(commands, codes, code):
    assert commands(*CONTAINER["command"], *CONTAINER["args"], codes=codes, NODE="0")[0] == code


def test_a_pod_that_is_evicted_has_not_done_its_work(commands):
    words = (*CONTAINER["command"], *CONTAINER["args"])
    assert commands(*words, codes="stops0", tell=signal.SIGTERM, NODE="0")[0] == exit_codes.HUNG
