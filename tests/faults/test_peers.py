"""Two processes, one of which is stopped, fails or hangs: both end, and nothing is lost.

The short form of tests.faults.peers.
"""

import re

import pytest

from jaxsp.core.errors import ExitCode
from tests import messages, two_processes
from tests.faults import peers

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("default_signals")]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Numbers of a run without a fault."""
    return peers.Job(tmp_path_factory.mktemp("expected")).run_to_end()


def stop_one_of_two(folder):
    """Sends SIGTERM to one of two processes, and returns the job."""
    job = peers.Job(folder)
    outcome = peers.cause_fault(job, peers.Case(event="SIGTERM", victim=1))
    assert outcome.codes == [0, 0], outcome.output
    last = outcome.steps[-1]
    assert outcome.checkpoints == [last]
    assert re.search(messages.containing("SIGTERM", "process 1", f"step {last}"), outcome.output)
    # One step was running, and the slow steps of the test allow one more to be dispatched
    assert last <= peers.FAULT_STEP + 3
    return job


def test_both_processes_stop_after_the_same_step_when_one_receives_a_signal(tmp_path):
    stop_one_of_two(tmp_path)


@pytest.mark.slow  # test_resume.py resumes one process
def test_two_processes_that_stopped_resume_with_the_numbers_of_a_run_that_did_not(
    tmp_path, expected
):
    assert stop_one_of_two(tmp_path).run_to_end() == expected


@pytest.mark.slow  # system/test_watchdog.py and test_two_processes.py test the parts
def test_a_process_that_hangs_ends_both_and_the_same_command_resumes(tmp_path, expected):
    job = peers.Job(tmp_path)
    changes = ("run.save_every=4", "run.step_timeout=9s")
    case = peers.Case(event="hang", victim=1, changes=changes)
    outcome = peers.cause_fault(job, case)
    assert outcome.codes == [ExitCode.HUNG] * 2, outcome.output
    assert re.search(messages.containing("step ", "9 s", "run.step_timeout"), outcome.output)
    assert 'faulty.py", line' in outcome.output, "the stack of the thread that hangs"
    assert outcome.checkpoints == [4]
    assert job.run_to_end() == expected


@pytest.mark.slow  # test_two_processes.py and test_one_of_two.py test the parts
def test_an_exception_in_one_process_ends_both(tmp_path):
    case = peers.Case(event="raise", victim=1)
    outcome = peers.cause_fault(peers.Job(tmp_path), case)
    assert outcome.codes == [1, 1], outcome.output
    assert outcome.num_tracebacks == 1
    assert outcome.seconds < two_processes.ENDS_WITHIN_S
    assert "process 1: ZeroDivisionError: requested by the test" in outcome.output
    assert re.search(messages.containing("process 1", "exit code 1"), outcome.output)
