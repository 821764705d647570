"""What a fault at any moment costs: time. The long form is `python -m tests.faults.kills`."""

from tests.faults import kills


def test_a_run_that_was_killed_is_the_straight_one_bit_for_bit(tmp_path):
    assert kills.main(["--steps", "16", "--faults", "kill=2", "kill-in-save=1", "flip=1"], folder=tmp_path) == 0


def test_a_lost_line_and_another_weight_are_noticed(tmp_path):
    case = kills.Case(tmp_path, num_steps=4)
    for name in ("straight", "torn"):
        child = case.start(name, "1x2")
        assert child.wait() == 0, case.said(name)
    assert list(kills.differences(case, exactly=True)) == []
    path = tmp_path / "torn/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[1:]))
    assert next(kills.differences(case, exactly=True)).endswith("more than once: [2]")
