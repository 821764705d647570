"""The banner: what the terminal shows of it, and what banner.txt adds."""

import jax
import pytest

from jaxsp.run import banner, build, config_file
from tests import commands


@pytest.fixture(scope="module")
def banners(tmp_path_factory):
    folder = tmp_path_factory.mktemp("banner")
    commands.write_documents(folder / "train.jsonl", [100, 60, 40])
    quickstart = config_file.read(commands.REPO / "configs/quickstart.yaml")
    source = {"source": str(folder / "train.jsonl"), "format": "tokens"}
    fields = quickstart | {
        "run": {"directory": str(folder / "run"), "epochs": 2},
        "data": {"train": [source], "row_tokens": 64},
    }
    inputs = build.build_training(config_file.parse(fields), devices=jax.devices())
    return banner.describe_run(inputs)


def test_the_first_lines_have_tokens_of_a_step_steps_epochs_and_learning_rate(banners):
    training, batch, *_ = banners[1]
    assert training == (
        "training",
        "4 steps of 128 tokens; 2 epochs of 2 steps; learning rate 0.004",
    )
    assert batch[1].startswith("2 rows of 64 tokens per step")


def test_details_are_for_experts(banners):
    full, short = banners
    assert {"weights", "memory"} <= dict(full).keys() - dict(short).keys()
    (attention,) = [text for label, text in short if label == "attention"]
    assert attention.startswith("Ulysses of 4, blockwise kernel (blockwise because cuDNN")
    for detail in ("alternatives", "gradients clipped", "metrics.jsonl"):
        assert detail in str(full)
        assert detail not in str(short)
