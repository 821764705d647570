"""Runs of the train command on a model that is exported with all its parts.

The losses do not depend on the mesh, the first loss is that of transformers, and exports have the
other parts of the checkpoint that the run started from.
"""

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


def train(folder: pathlib.Path, name: str, *words: str, groups: int, seq: int) -> list[float]:
    """Runs the command with a run directory of this name. Returns: the loss of each step."""
    sections = {
        "run": {"directory": str(folder / name), "steps": STEPS},
        "model": {"source": str(folder / "model")},
        "mesh": {"data": groups, "seq": seq, "virtual_cpu_devices": groups * seq},
        "batch": {"rows_per_step": 2},
        "optimizer": {"schedule": "constant"},
    }
    config = folder / f"{name}.yaml"
    config.write_text(json.dumps(small_runs.make_fields(folder, **sections)))
    result = commands.run_python("-m", "jaxsp.train", config, *words)
    assert result.returncode == 0, result.stderr
    return [line["loss"] for line in commands.read_lines(folder / name / "metrics.jsonl")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with the model and four documents of a row each."""
    folder = tmp_path_factory.mktemp("whole")
    multimodal.torch_model(FIELDS).save_pretrained(folder / "model")
    lines = [json.dumps({"input_ids": document.tolist()}) + "\n" for document in documents()]
    (folder / "train.jsonl").write_text("".join(lines))
    return folder


def documents() -> list[np.ndarray]:
    return list(np.random.default_rng(5).integers(0, 131, (4, 64)))


@pytest.fixture(scope="module")
def losses(folder):
    """Losses of the run on one device, with all rows in each step."""
    return train(folder, "1x1", "batch.rows_per_step=4", groups=1, seq=1)


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
        is_text = "language_model" in name or name == "lm_head.weight"
        if not is_text:
            assert batches.is_bitwise_equal(after[name], tensor), name
    loaded, info = oracle.transformers.AutoModelForImageTextToText.from_pretrained(
        out, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    return oracle.gradients(loaded, documents()).loss


def test_losses_are_those_of_transformers_and_the_same_on_two_meshes(folder, losses):
    model = oracle.torch_model(FIELDS["text_config"])
    expected = oracle.gradients(model, documents()).loss
    assert losses[0] == pytest.approx(expected, rel=tolerances.EVAL)
    assert losses[0] - losses[-1] > 100 * tolerances.MESH * losses[0]
    words = ("batch.rows_per_step=4", "attention.strategy=ring")
    others = train(folder, "2x4", *words, groups=2, seq=4)
    print(losses, others)
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
        (problem,) = raised.value.problems
        messages.assert_names(problem, "--source", start="model.source = ")
        words = ("--dtype", "float32", "--source", folder / "moved")
        run_export(folder / "1x1", folder / "found", *words)
    finally:
        (folder / "moved").rename(folder / "model")
    first, second = (load(folder / name) for name in ("out", "found"))
    assert first.keys() == second.keys()
    assert all(batches.is_bitwise_equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT 0.21.2
def test_adapters_are_trained_and_exported_alone_and_merged(folder, capsys):
    peft = pytest.importorskip("peft", reason="peft is not installed (extra `test`)")
    words = ("adapter.type=lora", "adapter.targets=[gate_proj, o_proj]", "batch.rows_per_step=4")
    losses = train(folder, "lora", *words, groups=2, seq=2)
    assert losses[0] - losses[-1] > 100 * tolerances.MESH * losses[0]
    run_export(folder / "lora", folder / "adapter")
    messages.assert_names(capsys.readouterr().out, "AutoModelForImageTextToText", "PeftModel")
    base = oracle.transformers.AutoModelForImageTextToText.from_pretrained(
        folder / "model", attn_implementation="eager"
    )
    model = peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    adapted = {name for name, _ in model.named_parameters() if "lora_A" in name}
    assert len(adapted) == 15  # three in each layer, none in the other parts
    expected = oracle.gradients(model, documents()).loss
    run_export(folder / "lora", folder / "merged", "--merge", "--dtype", "float32")
    merged = check_export(folder, folder / "merged")
    assert merged == pytest.approx(expected, rel=tolerances.EVAL)
    assert merged < losses[-1]


@pytest.mark.slow
def test_a_run_from_random_weights_is_exported_with_the_parts_of_source(folder):
    words = ("model.source=null", f"model.config={json.dumps(FIELDS['text_config'])}")
    train(folder, "random", *words, "run.steps=1", groups=1, seq=1)
    messages.assert_names(messages.read_banner(folder / "random"), "note", "--source")
    with messages.assert_refused("muse_glimmer_text", "--source", "model.config"):
        run_export(folder / "random", folder / "none")
    run_export(folder / "random", folder / "filled", "--source", folder / "model")
    check_export(folder, folder / "filled")
