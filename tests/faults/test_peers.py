"""The short form of tests.faults.peers: two processes, one is stopped, fails or hangs; none is left, nothing is lost."""

import re

import pytest

from jaxsp.core import processes
from tests import test_launch
from tests.faults import peers

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("hearing")]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The numbers of a run that nothing happens to."""
    return peers.Job(tmp_path_factory.mktemp("straight")).all_steps()


def stop_one_of_two(folder):
    """A job of two processes of which one received SIGTERM."""
    job = peers.Job(folder)
    outcome = peers.happen(job, peers.Case(event="SIGTERM", victim=1, launched=False))
    assert outcome.codes == [0, 0], outcome.said
    assert outcome.saved == [outcome.steps[-1]]
    assert f"stopped by SIGTERM to process 1 after step {outcome.steps[-1]};" in outcome.said
    # one step that was running, and one that the test's slow steps let be sent behind it
    assert outcome.steps[-1] <= peers.AT + 3
    return job


def test_both_processes_stop_after_the_same_step_when_one_is_asked_to(tmp_path):
    stop_one_of_two(tmp_path)


@pytest.mark.slow  # test_resume.py resumes one process
def test_two_processes_that_stopped_resume_with_the_numbers_of_a_run_that_did_not(tmp_path, straight):
    assert stop_one_of_two(tmp_path).all_steps() == straight


@pytest.mark.slow  # training/test_watchdog.py and test_launch.py have its parts
def test_a_process_that_hangs_is_ended_and_all_start_again(tmp_path, straight):
    job = peers.Job(tmp_path)
    words = ("run.save_every=4", "run.step_timeout=0.15")
    outcome = peers.happen(job, peers.Case(event="hang", victim=1, launched=True, words=words))
    assert outcome.codes == [0], outcome.said
    assert re.search(r"step \d+: no sign of life for \d+ s, and 9 s are too many \(run.step_timeout\)", outcome.said)
    assert 'faulty.py", line' in outcome.said, "the stack of the thread that hangs"
    assert f"exit code {processes.AGAIN}" in outcome.said
    assert "all processes start again, from the checkpoint of step 4" in outcome.said
    assert peers.numbers(job.lines()) == straight


@pytest.mark.slow  # test_launch.py and test_one_of_two.py have its parts
def test_an_exception_in_one_process_ends_both_without_a_launcher(tmp_path):
    outcome = peers.happen(peers.Job(tmp_path), peers.Case(event="raise", victim=1, launched=False))
    assert outcome.codes == [1, 1], outcome.said
    assert outcome.tracebacks == 1
    assert outcome.seconds < test_launch.ENDS_WITHIN_S
    assert "process 1: ZeroDivisionError: as the test asked for" in outcome.said
    assert "ends because process 1 has failed, with exit code 1" in outcome.said
