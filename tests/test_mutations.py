"""The texts of tests/mutations.yaml are still in jaxsp's source, each once."""

import pytest
import yaml

from tests import mutations
from tests.golden import __main__ as golden

MUTATIONS = yaml.safe_load(mutations.TABLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation["old"][:40])
def test_each_mutation_changes_one_place(mutation):
    mutations.find_file(golden.REPO, mutation["old"])
    for test in mutation["by"]:
        assert test.startswith("case: ") or (golden.REPO / test).exists()
