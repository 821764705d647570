"""What a fault at any moment costs: time. The long form, with every kind of fault, is `python -m tests.faults.kills`."""

import shutil

import pytest

from tests.faults import kills

pytestmark = pytest.mark.e2e

STEPS = 12


@pytest.fixture(scope="module")
def torn(tmp_path_factory):
    """The folder of a straight run and of one that was killed again and again, and whether anything was lost."""
    folder = tmp_path_factory.mktemp("torn")
    words = ["--meshes", "1x2", "--steps", str(STEPS), "--faults", "kill-in-save=1"]
    return folder, kills.main(words, folder=folder)


def test_a_run_that_was_killed_is_the_straight_one_bit_for_bit(torn):
    assert torn[1] == 0


def test_a_lost_line_and_another_weight_are_noticed(torn, tmp_path):
    folder = shutil.copytree(torn[0], tmp_path / "copy")
    case = kills.Case(folder, num_steps=STEPS)
    assert list(kills.differences(case, exactly=True)) == []
    path = folder / "torn/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[1:]))
    assert next(kills.differences(case, exactly=True)).endswith("more than once: [2]")
    path.write_text("".join(lines))
    newest = folder / f"torn/checkpoints/{STEPS}"
    shutil.rmtree(newest)
    shutil.copytree(folder / f"straight/checkpoints/{STEPS - 3}", newest)
    assert "the last checkpoint differs by" in next(kills.differences(case, exactly=True))
