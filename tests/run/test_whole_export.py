"""Runs from multimodal checkpoints: the text model is trained and exported, with all other parts of
the checkpoint for families that are exported whole."""

import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy

from jaxsp import export
from jaxsp.core.errors import UserError
from tests import batches, commands, messages, small_runs, tolerances
from tests.hf import multimodal, oracle

pytestmark = pytest.mark.e2e

FIELDS = multimodal.MODELS["muse_glimmer"]
STEPS = 3
DOCUMENTS = list(np.random.default_rng(5).integers(0, 131, (4, 64)))


def make_fields(folder: pathlib.Path, name: str, groups: int = 1, seq: int = 1, **sections):
    own = {
        "run": {"directory": str(folder / name), "steps": STEPS},
        "model": {"source": str(folder / "model")},
        "mesh": {"data": groups, "seq": seq, "virtual_cpu_devices": groups * seq},
        "batch": {"rows_per_step": 4},
        "optimizer": {"schedule": "constant"},
    }
    return small_runs.make_fields(folder, **own | sections)


def train(folder: pathlib.Path, name: str, *words: str, groups: int = 1, seq: int = 1):
    """Runs the command with a run directory of this name. Returns: the loss of each step."""
    config = folder / f"{name}.yaml"
    config.write_text(json.dumps(make_fields(folder, name, groups, seq)))
    result = commands.run_python("-m", "jaxsp.train", config, *words)
    assert result.returncode == 0, result.stderr
    return [line["loss"] for line in commands.read_lines(folder / name / "metrics.jsonl")]


def write_model(folder: pathlib.Path, fields: dict) -> None:
    """Writes a model and four documents of a row each."""
    multimodal.torch_model(fields).save_pretrained(folder / "model")
    lines = [json.dumps({"input_ids": document.tolist()}) + "\n" for document in DOCUMENTS]
    (folder / "train.jsonl").write_text("".join(lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    write_model(folder, FIELDS)
    return folder


@pytest.fixture(scope="module")
def losses(folder):
    """Losses of the run on one device."""
    return train(folder, "1x1")


def load(directory: pathlib.Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(directory / "model.safetensors")


def run_export(*words: object) -> None:
    export.main([str(word) for word in words])


def check_export(folder: pathlib.Path, out: pathlib.Path) -> float:
    """Checks the other parts of an export. Returns: its loss in transformers."""
    before = load(folder / "model")
    after = load(out)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        if "language_model" not in name and name != "lm_head.weight":
            assert batches.is_bitwise_equal(after[name], tensor), name
    loaded, info = oracle.transformers.AutoModelForImageTextToText.from_pretrained(
        out, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    return oracle.gradients(loaded, DOCUMENTS).loss


def test_losses_are_those_of_transformers_and_the_same_on_two_meshes(folder, losses):
    expected = oracle.gradients(oracle.torch_model(FIELDS["text_config"]), DOCUMENTS).loss
    assert losses[0] == pytest.approx(expected, rel=tolerances.EVAL)
    assert losses[0] - losses[-1] > 100 * tolerances.MESH * losses[0]
    others = train(folder, "2x4", "attention.strategy=ring", groups=2, seq=4)
    assert others == pytest.approx(losses, rel=tolerances.MESH)
    banner = messages.read_banner(folder / "2x4")
    messages.assert_names(banner, "muse_glimmer_text", "text model only", "vision_adapter")


def test_an_export_needs_the_checkpoint_that_the_run_started_from(folder, losses, capsys):
    run_export(folder / "1x1", folder / "out", "--dtype", "float32")
    printed = capsys.readouterr().out
    messages.assert_names(printed, "AutoModelForImageTextToText", "other parts")
    assert check_export(folder, folder / "out") < losses[-1]
    (folder / "model").rename(folder / "moved")
    try:
        with pytest.raises(UserError) as raised:
            run_export(folder / "1x1", folder / "lost")
        messages.assert_names(raised.value, "--source", start="model.source = ")
        words = ("--dtype", "float32", "--source", folder / "moved")
        run_export(folder / "1x1", folder / "found", *words)
    finally:
        (folder / "moved").rename(folder / "model")
    assert batches.is_bitwise_equal(load(folder / "out"), load(folder / "found"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT 0.21.2
def test_adapters_are_trained_and_exported_alone_and_merged(folder, capsys):
    peft = pytest.importorskip("peft", reason="peft is not installed (extra `test`)")
    words = ("adapter.type=lora", "adapter.targets=[gate_proj, o_proj]")
    losses = train(folder, "lora", *words, groups=2, seq=2)
    run_export(folder / "lora", folder / "adapter")
    messages.assert_names(capsys.readouterr().out, "AutoModelForImageTextToText", "PeftModel")
    base = oracle.transformers.AutoModelForImageTextToText.from_pretrained(
        folder / "model", attn_implementation="eager"
    )
    model = peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    adapted = {name for name, _ in model.named_parameters() if "lora_A" in name}
    assert len(adapted) == 15  # three in each layer, none in the other parts
    expected = oracle.gradients(model, DOCUMENTS).loss
    run_export(folder / "lora", folder / "merged", "--merge", "--dtype", "float32")
    merged = check_export(folder, folder / "merged")
    assert merged == pytest.approx(expected, rel=tolerances.EVAL)
    assert merged < losses[-1]


@pytest.mark.slow
def test_a_run_from_random_weights_is_exported_with_the_parts_of_source(folder):
    words = ("model.source=null", f"model.config={json.dumps(FIELDS['text_config'])}")
    train(folder, "random", *words, "run.steps=1")
    messages.assert_names(messages.read_banner(folder / "random"), "note", "--source")
    with messages.assert_refused("muse_glimmer_text", "--source", "model.config"):
        run_export(folder / "random", folder / "none")
    run_export(folder / "random", folder / "filled", "--source", folder / "model")
    check_export(folder, folder / "filled")


@pytest.mark.slow
def test_other_families_are_exported_as_the_text_model(tmp_path):
    write_model(tmp_path, multimodal.MODELS["mistral"])
    model = {"source": str(tmp_path / "model"), "rope": {"type": "yarn", "factor": 2}}
    for steps in (1, 2):
        run = {"directory": str(tmp_path / "run"), "steps": steps}
        own = {"run": run, "model": model, "optimizer": {"learning_rate": 0.0}}
        small_runs.train(make_fields(tmp_path, "run", seq=2, **own))
    banner = messages.read_banner(tmp_path / "run")
    messages.assert_names(banner, "mistral", "text model only", "vision_tower", "yarn")
    first, second = commands.read_lines(tmp_path / "run/metrics.jsonl")
    assert second["loss"] == pytest.approx(first["loss"], rel=tolerances.MESH)
    run_export(tmp_path / "run", tmp_path / "out", "--dtype", "float32")
    loaded, info = oracle.transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    assert type(loaded).__name__ == "MistralForCausalLM"
    assert loaded.config.rope_parameters["rope_type"] == "yarn"
    expected = oracle.gradients(loaded, DOCUMENTS).loss
    assert first["loss"] == pytest.approx(expected, rel=tolerances.FP32_PARITY)
