"""A run that starts from a multimodal checkpoint: its banner, its loss, resuming and exporting."""

import json

import numpy as np
import pytest

from jaxsp import export
from tests import commands, messages, small_runs, tolerances
from tests.hf import multimodal, oracle
from tests.messages import assert_names


def train(folder, *, steps):
    rope = {"type": "yarn", "factor": 2}
    sections = {
        "run": {"steps": steps},
        "model": {"source": str(folder / "model"), "rope": rope},
        "mesh": {"data": 1, "seq": 2},
        "data": {"row_tokens": 32},
        "batch": {"rows_per_step": 4},
        "optimizer": {"learning_rate": 0.0},
    }
    small_runs.train(small_runs.make_fields(folder, **sections))


@pytest.mark.slow
@pytest.mark.e2e
def test_a_run_trains_resumes_and_exports_the_text_model(tmp_path):
    model = multimodal.torch_model(multimodal.MODELS["mistral"])
    model.save_pretrained(tmp_path / "model")
    tokens = np.random.default_rng(0).integers(0, 131, (4, 32))
    lines = [json.dumps({"input_ids": document}) + "\n" for document in tokens.tolist()]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    train(tmp_path, steps=1)
    banner = messages.read_banner(tmp_path / "run")
    assert_names(banner, "mistral", "text model only", "vision_tower", "yarn")
    train(tmp_path, steps=2)
    first, second = commands.read_lines(tmp_path / "run/metrics.jsonl")
    assert second["loss"] == pytest.approx(first["loss"], rel=tolerances.MESH)

    export.main([str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "float32"])
    loaded, info = oracle.transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    assert type(loaded).__name__ == "MistralForCausalLM"
    assert loaded.config.rope_parameters["rope_type"] == "yarn"
    expected = oracle.gradients(loaded, list(tokens)).loss
    assert first["loss"] == pytest.approx(expected, rel=tolerances.FP32_PARITY)
