"""SLURM script and Kubernetes manifest: their commands are valid, exit codes are handled."""

import os
import pathlib
import signal
import subprocess
import time

import pytest
import yaml

from jaxsp.core.errors import ExitCode

REPO = pathlib.Path(__file__).parent.parent
SLURM = REPO / "scripts/launch/slurm.sh"
RESTART = REPO / "scripts/launch/restart.sh"
JOBSET = yaml.safe_load((REPO / "scripts/launch/jobset.yaml").read_text())
JOB = JOBSET["spec"]["replicatedJobs"][0]
POD = JOB["template"]["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]


SRUN = """
while [[ $1 == --* ]]; do shift; done
"$@" & child=$!
echo $child > {folder}/task
trap "kill -KILL $child; exit 137" TERM
wait $child
"""
"""Fake srun, which responds to SIGTERM by killing its tasks."""

PYTHON = """
codes=($(cat {folder}/codes))
echo "${{codes[@]:1}}" > {folder}/codes
stop_code=${{codes[0]#stops}}
if [ "$stop_code" != "${{codes[0]}}" ]; then
    trap "exit $stop_code" TERM
    touch {folder}/ready
    while :; do sleep 0.1; done
fi
exit "${{codes[0]}}"
"""
"""Fake python, which ends with the next exit code; with `stops0`, it waits for SIGTERM first."""


@pytest.fixture
def run_command(tmp_path):
    """Function that runs a command with fake programs of the cluster in its PATH.

    Returns: exit code, stderr, and the command lines of the fake programs.
    """
    programs = {
        "srun": SRUN,
        "scancel": "kill -${{1#--signal=}} $(cat {folder}/task)",
        "scontrol": "",
        "python": PYTHON,
    }
    for name, text in programs.items():
        log = f'echo "{name} $*" >> {tmp_path}/called'
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{log}\n{text.format(folder=tmp_path)}")
        path.chmod(0o755)

    def run(*words, codes, signal_number=None, **environ):
        (tmp_path / "codes").write_text(codes)
        environ = {
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            **environ,
        }
        process = subprocess.Popen(words, env=environ, stderr=subprocess.PIPE, text=True)
        if signal_number is not None:
            while not (tmp_path / "ready").exists():
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal_number)
        try:
            stderr = process.communicate(timeout=20)[1]
        finally:
            process.kill()
        called = tmp_path / "called"
        lines = called.read_text().splitlines() if called.exists() else []
        return process.returncode, stderr, lines

    return run


def python_calls(called):
    return [line for line in called if line.startswith("python")]


@pytest.mark.parametrize(
    ("codes", "code", "starts"),
    [
        ("0", 0, 1),
        ("2", 2, 1),
        ("75 134 0", 0, 3),
        ("75 75 75 75 0", 75, 4),
    ],
)
def test_slurm_starts_only_a_run_that_hangs_or_is_killed_again(run_command, codes, code, starts):
    exit_code, _, called = run_command(SLURM, "a.yaml", "run.steps=3", codes=codes)
    assert exit_code == code
    train = "python -m jaxsp.train a.yaml run.shutdown_grace=270s run.steps=3"
    assert python_calls(called) == [train] * starts
    assert not any(line.startswith("scontrol") for line in called)


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"), [(0, "0", True), (0, "20", False), (1, "0", False)]
)
def test_slurm_requeues_the_job_when_its_time_is_up(run_command, code, restarts, requeued):
    options = {"codes": f"stops{code}", "signal_number": signal.SIGUSR1}
    exit_code, _, called = run_command(SLURM, "a.yaml", **options, SLURM_RESTART_COUNT=restarts)
    assert exit_code == code
    assert len(python_calls(called)) == 1
    assert ("scontrol requeue 7" in called) == requeued


@pytest.mark.parametrize(
    ("codes", "code", "starts"), [("0", 0, 1), ("3", 3, 1), ("75 134 137 0", 0, 4), ("75 2", 2, 2)]
)
def test_the_loop_starts_only_a_run_that_hangs_or_is_killed_again(run_command, codes, code, starts):
    exit_code, _, called = run_command(RESTART, "python", "a.yaml", codes=codes)
    assert exit_code == code
    assert python_calls(called) == ["python a.yaml"] * starts


def test_a_failure_that_needs_attention_ends_the_jobset_and_any_other_restarts_it():
    job = JOB["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {
        "containerName": CONTAINER["name"],
        "operator": "In",
        "values": [ExitCode.USER_ERROR, ExitCode.NEEDS_ATTENTION],
    }
    policy = JOBSET["spec"]["failurePolicy"]
    (rule,) = policy["rules"]
    assert rule["action"] == "FailJobSet"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert policy["maxRestarts"] > 0
    assert POD["restartPolicy"] == "Never"
    assert job["backoffLimit"] == 0


@pytest.mark.parametrize(("codes", "code"), [("2", 2), ("75", 75)])
def test_a_pod_ends_with_the_exit_code_of_the_launcher(run_command, codes, code):
    words = (*CONTAINER["command"], *CONTAINER["args"])
    assert run_command(*words, codes=codes, NODE="0")[0] == code
