"""A run that is killed loses nothing but time: the short form of tests.faults.kills."""

import shutil

import pytest

from tests.faults import kills

pytestmark = pytest.mark.e2e

NUM_STEPS = 12


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Folder of an undisturbed and a killed run, and the exit code of their comparison."""
    folder = tmp_path_factory.mktemp("killed")
    arguments = ["--meshes", "1x2", "--steps", str(NUM_STEPS), "--faults", "kill-in-save=1"]
    return folder, kills.main(arguments, folder=folder)


def test_a_run_that_was_killed_is_bitwise_equal_to_an_undisturbed_one(killed):
    assert killed[1] == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--objective", "predictions"],
        pytest.param(["--objective", "distill"], marks=pytest.mark.slow),
        pytest.param(["--objective", "policy"], marks=pytest.mark.slow),
        pytest.param(["--adapter", "dora"], marks=pytest.mark.slow),
        pytest.param(["--hybrid"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_killed_run_of_another_kind_is_bitwise_equal(tmp_path, words):
    arguments = ["--meshes", "1x2", "--steps", str(NUM_STEPS), "--faults", "kill=1"]
    assert kills.main([*arguments, *words], folder=tmp_path) == 0


def test_a_repeated_line_and_different_weights_are_noticed(killed, tmp_path):
    folder = shutil.copytree(killed[0], tmp_path / "copy")
    case = kills.Case(folder, num_steps=NUM_STEPS)
    assert list(kills.differences(case, is_exact=True)) == []
    path = folder / "faulty/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[1:]))
    assert next(kills.differences(case, is_exact=True)).endswith("more than once: [2]")
    path.write_text("".join(lines))
    latest = folder / f"faulty/checkpoints/{NUM_STEPS}"
    shutil.rmtree(latest)
    shutil.copytree(folder / f"undisturbed/checkpoints/{NUM_STEPS - 3}", latest)
    assert "the last checkpoint differs by" in next(kills.differences(case, is_exact=True))
