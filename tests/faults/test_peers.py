"""The short form of tests.faults.peers: two processes, one is stopped, fails or hangs; none is left, nothing is lost."""

import re

import pytest

from jaxsp.core import exit_codes
from tests import messages, test_launch
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
    assert re.search(
        messages.holding("SIGTERM", "process 1", f"step {outcome.steps[-1]}"), outcome.said
    )
    # one step that was running, and one that the test's slow steps let be sent behind it
    assert outcome.steps[-1] <= peers.AT + 3
    return job


def test_both_processes_stop_after_the_same_step_when_one_is_asked_to(tmp_path):
    stop_one_of_two(tmp_path)


@pytest.mark.slow  # test_resume.py resumes one process
def test_two_processes_that_stopped_resume_with_the_numbers_of_a_run_that_did_not(
    tmp_path, straight
):
    assert stop_one_of_two(tmp_path).all_steps() == straight


@pytest.mark.slow  # runtime/test_watchdog.py and test_launch.py have its parts
def test_a_process_that_hangs_is_ended_and_all_start_again(tmp_path, straight):
    job = peers.Job(tmp_path)
    words = ("run.save_every=4", "run.step_timeout=9s")
    outcome = peers.happen(job, peers.Case(event="hang", victim=1, launched=True, words=words))
    assert outcome.codes == [0], outcome.said
    assert re.search(messages.holding("step ", "9 s", "run.step_timeout"), outcome.said)
    assert 'faulty.py", line' in outcome.said, "the stack of the thread that hangs"
    assert f"exit code {exit_codes.HUNG}" in outcome.said
    assert re.search(messages.holding("checkpoint", "step 4"), outcome.said)
    assert peers.numbers(job.lines()) == straight


@pytest.mark.slow  # test_launch.py and test_one_of_two.py have its parts
def test_an_exception_in_one_process_ends_both_without_a_launcher(tmp_path):
    outcome = peers.happen(peers.Job(tmp_path), peers.Case(event="raise", victim=1, launched=False))
    assert outcome.codes == [1, 1], outcome.said
    assert outcome.tracebacks == 1
    assert outcome.seconds < test_launch.ENDS_WITHIN_S
    assert "process 1: ZeroDivisionError: as the test asked for" in outcome.said
    assert re.search(messages.holding("process 1", "exit code 1"), outcome.said)
