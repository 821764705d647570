"""Malformed and hostile input: a sample of `python -m tests.faults.fuzz`."""

import pytest

from tests.faults import fuzz


@pytest.fixture
def prepared(tmp_path):
    with fuzz.prepared(tmp_path):
        yield


@pytest.mark.parametrize(("kind", "number"), [("configs", 60), ("models", 25), ("data", 20)])
def test_malformed_input_is_accepted_or_refused(prepared, kind, number):
    counts, failures = fuzz.run_cases(kind, number, seed=0)
    assert not failures
    assert counts[fuzz.ACCEPTED] > 0
    assert counts[fuzz.REFUSED] > 0
