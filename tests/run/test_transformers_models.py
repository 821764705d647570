"""Runs of the train command from checkpoints made by transformers: delta nets, and experts.

The losses do not depend on the mesh, a stopped run goes on bit for bit, and losses, exported
weights and adapters are those of transformers and PEFT.
"""

import json
import pathlib
import shutil

import numpy as np
import pytest

from jaxsp import eval as evaluation
from jaxsp import export
from jaxsp.checkpoint import reader
from jaxsp.hf import model_config
from jaxsp.model import decoder
from tests import batches, commands, small_runs, tolerances
from tests.hf import oracle

safetensors_torch = pytest.importorskip("safetensors.torch", reason="torch is not installed")

pytestmark = pytest.mark.e2e

EXPERTS = oracle.MODELS["qwen3_moe"] | {"num_hidden_layers": 2, "moe_intermediate_size": 228}
"""A layer with experts, whose matrices have 65,664 elements and are sharded, and one without."""

MODELS = {"delta nets": oracle.MODELS["qwen3_5"], "experts": EXPERTS}
WORDS = {
    "delta nets": (),
    "experts": ("model.router_aux_loss_coef=0.01", "model.router_z_loss_coef=0.001"),
}
STEPS = 4
STOPPED = 2


def write_documents(path: pathlib.Path, lengths: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    documents = [rng.integers(0, EXPERTS["vocab_size"], length) for length in lengths]
    path.write_text("".join(json.dumps({"input_ids": x.tolist()}) + "\n" for x in documents))
    return documents


def train(
    folder: pathlib.Path, name: str, *words: str, mesh: str, data: str = "train"
) -> list[dict]:
    """Runs the command with a run directory of this name. Returns: lines of metrics.jsonl."""
    groups, seq = map(int, mesh.split("x"))
    sections = {
        "run": {"directory": str(folder / name), "steps": STEPS, "save_every": 1},
        "model": {"source": str(folder / "model")},
        "mesh": {"data": groups, "seq": seq, "virtual_cpu_devices": groups * seq},
        "data": {"row_tokens": 128},
        "batch": {"rows_per_step": 2},
        "optimizer": {"schedule": "constant"},
        "checkpoint": {"keep_latest": STEPS},
    }
    config = folder / f"{name}.yaml"
    config.write_text(json.dumps(small_runs.make_fields(folder, f"{data}.jsonl", **sections)))
    result = commands.run_python("-m", "jaxsp.train", config, *words)
    assert result.returncode == 0, result.stderr
    return commands.read_lines(folder / name / "metrics.jsonl")


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, name):
    """Folder with the model and documents: over several devices, of few tokens, of a row."""
    folder = tmp_path_factory.mktemp("model")
    oracle.torch_model(MODELS[name]).save_pretrained(folder / "model")
    config = json.loads((folder / "model/config.json").read_text())
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")  # as in published files
        (folder / "model/config.json").write_text(json.dumps(config))
    write_documents(folder / "train.jsonl", [100, 27, 60, 68, 128, 5, 3, 90, 29, 128, 70, 2, 56])
    return folder


@pytest.fixture(scope="module")
def straight(folder, name):
    """Lines of metrics.jsonl of the run on 2x4, which is not stopped."""
    return train(folder, "2x4", *WORDS[name], mesh="2x4")


@pytest.mark.slow
def test_losses_are_the_same_on_two_meshes(folder, straight, name):
    lines = train(folder, "1x8", *WORDS[name], "attention.strategy=ring", mesh="1x8")
    expected = [line["loss"] for line in straight]
    assert [line["loss"] for line in lines] == pytest.approx(expected, rel=tolerances.MESH)
    assert expected[0] - expected[-1] > 100 * tolerances.MESH * expected[0]


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(folder, straight, name):
    """Resumes a copy without the checkpoints after step 2, as if the run had been killed then."""
    shutil.copytree(folder / "2x4", folder / "stopped")
    for step in range(STOPPED + 1, STEPS + 1):
        shutil.rmtree(folder / f"stopped/checkpoints/{step}")
    lines = train(folder, "stopped", *WORDS[name], mesh="2x4")
    assert [line["loss"] for line in lines] == [line["loss"] for line in straight]
    table = decoder.param_table(model_config.parse_model_config(MODELS[name]))
    actual, expected = (
        batches.name_leaves(reader.read_weights(folder / f"{run}/checkpoints/{STEPS}", table))
        for run in ("stopped", "2x4")
    )
    assert batches.is_bitwise_equal(actual, expected)


def load(directory: pathlib.Path) -> dict:
    return safetensors_torch.load_file(directory / "model.safetensors")


@pytest.mark.slow
def test_the_loss_is_that_of_transformers_and_untrained_weights_are_exported_unchanged(
    folder, name
):
    documents = write_documents(folder / "two.jsonl", [100, 27])
    words = ("optimizer.learning_rate=0", "run.steps=1", "batch.rows_per_step=1")
    (line,) = train(folder, "same", *words, mesh="1x1", data="two")
    expected = oracle.gradients(oracle.torch_model(MODELS[name]), documents).loss
    assert line["loss"] == pytest.approx(expected, rel=tolerances.EVAL)
    before = load(folder / "model")
    for dtype in ("float32", "bfloat16"):
        out = folder / f"out in {dtype}"
        export.main([str(folder / "same"), str(out), "--dtype", dtype])
        after = load(out)
        assert after.keys() == before.keys()
        for key, tensor in before.items():
            stored = tensor.to(getattr(oracle.torch, dtype)) if dtype == "bfloat16" else tensor
            assert oracle.torch.equal(after[key].to(stored.dtype), stored), key


@pytest.mark.parametrize("name", ["experts"], indirect=True, scope="module")
def test_with_the_loss_of_routers_loss_and_gradient_norm_are_those_of_transformers(folder):
    (document,) = write_documents(folder / "one.jsonl", [100])
    words = ("optimizer.learning_rate=0", "run.steps=1", "batch.rows_per_step=1")
    words = (*words, "model.router_aux_loss_coef=0.3")
    (line,) = train(folder, "routers", *words, mesh="1x4", data="one")
    model = oracle.torch_model(EXPERTS)
    model.router_aux_loss_coef = 0.3
    tokens = oracle.torch.from_numpy(document.astype("int64"))[None]
    results = model(tokens, labels=tokens, output_router_logits=True)
    results.loss.backward()
    squares = [weight.grad.square().sum().item() for weight in model.parameters()]
    assert line["router_aux_loss"] == pytest.approx(results.aux_loss.item(), rel=tolerances.EVAL)
    total = line["loss"] + 0.3 * line["router_aux_loss"]
    assert total == pytest.approx(results.loss.item(), rel=tolerances.EVAL)
    assert line["grad_norm"] == pytest.approx(sum(squares) ** 0.5, rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT 0.21.2
@pytest.mark.parametrize("name", ["experts"], indirect=True, scope="module")
def test_an_adapter_of_experts_loads_in_peft_with_our_loss_and_is_merged(folder):
    import peft

    documents = write_documents(folder / "two.jsonl", [100, 27])
    tensors = "[mlp.experts.gate_up_proj, mlp.experts.down_proj]"
    words = ("adapter.type=lora", "adapter.rank=4", f"adapter.target_parameters={tensors}")
    words = (*words, "run.steps=2", "optimizer.learning_rate=0.02")
    train(folder, "lora", *words, mesh="2x4")
    sets = [{"source": f"{folder}/two.jsonl", "format": "tokens", "name": "two"}]
    out = folder / "eval.jsonl"
    words = (f"data.eval={json.dumps(sets)}", "--out", str(out))
    evaluation.main([str(folder / "lora"), *words])
    (line,) = commands.read_lines(out)
    for kind, option in (("adapter", ()), ("merged", ("--merge", "--dtype", "float32"))):
        export.main([str(folder / "lora"), str(folder / kind), *option])
    load_model = oracle.transformers.AutoModelForCausalLM.from_pretrained
    adapted = peft.PeftModel.from_pretrained(
        load_model(folder / "model"), folder / "adapter", is_trainable=True
    )
    for model in (adapted, load_model(folder / "merged")):
        actual = oracle.gradients(model, documents).loss
        assert actual == pytest.approx(line["loss"], rel=tolerances.EVAL)
    before, after = (load(folder / kind) for kind in ("model", "merged"))
    changed = {key for key in before if not oracle.torch.equal(before[key], after[key])}
    parts = ("self_attn", "mlp.experts")
    projections = {key for key in before if "_proj.weight" in key}
    assert changed == {key for key in projections if any(part in key for part in parts)}
