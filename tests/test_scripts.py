"""Scripts without a GPU: every one can be imported, and those that make published tables work."""

import importlib
import pathlib
import re

import pytest

from jaxsp.planning import gpus
from scripts.bench import published_runs

REPO = pathlib.Path(__file__).parent.parent

NAMES = [
    ".".join(file.relative_to(REPO).with_suffix("").parts) for file in REPO.glob("scripts/**/*.py")
]


@pytest.mark.parametrize("name", NAMES)
def test_every_script_can_be_imported(name):
    importlib.import_module(name)


@pytest.mark.parametrize("run", published_runs.read_runs(), ids=lambda run: run.name)
def test_a_published_run_names_its_source_and_fills_its_mesh(run):
    assert re.fullmatch(r"https://(github\.com/[^/]+/[^/]+/\S+|arxiv\.org/abs/\S+)", run.source)
    assert run.device in gpus.GPUS
    assert run.data * run.seq == run.num_devices
    assert run.rows_per_step % (run.data * run.rows_per_microbatch) == 0
