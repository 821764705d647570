"""Runs of the train command from a checkpoint with experts, made by transformers.

The losses do not depend on the mesh, a stopped run goes on bit for bit, and losses, exported
weights and adapters are those of transformers and PEFT.
"""

import json
import pathlib
import shutil

import pytest

from jaxsp import eval as evaluation
from jaxsp import export
from jaxsp.checkpoint import reader
from jaxsp.hf import model_config
from jaxsp.model import decoder
from tests import batches, commands, tolerances
from tests.hf import oracle
from tests.run import test_hybrid

safetensors_torch = pytest.importorskip("safetensors.torch", reason="torch is not installed")

pytestmark = pytest.mark.e2e

FIELDS = oracle.MODELS["qwen3_moe"] | {"num_hidden_layers": 2, "moe_intermediate_size": 228}
"""A layer with experts, whose matrices have 65,664 elements and are sharded, and one without."""

STEPS = test_hybrid.STEPS

ROUTER_LOSSES = ("model.router_aux_loss_coef=0.01", "model.router_z_loss_coef=0.001")


def train(folder, name, *words, mesh, data="train"):
    return test_hybrid.train(folder, name, *words, mesh=mesh, data=folder / f"{data}.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with the model and its documents."""
    folder = tmp_path_factory.mktemp("experts")
    oracle.torch_model(FIELDS).save_pretrained(folder / "model")
    config = json.loads((folder / "model/config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts")  # as in published files
    (folder / "model/config.json").write_text(json.dumps(config))
    lengths = [100, 27, 60, 68, 128, 5, 3, 90, 29, 128, 70, 2, 56]
    test_hybrid.write_documents(folder / "train.jsonl", lengths)
    return folder


@pytest.fixture(scope="module")
def documents(folder):
    return test_hybrid.write_documents(folder / "two.jsonl", [100, 27])


@pytest.fixture(scope="module")
def straight(folder):
    """Lines of metrics.jsonl of the run on 2x4, which is not stopped."""
    return train(folder, "2x4", *ROUTER_LOSSES, mesh="2x4")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x8", pytest.param("1x1", marks=pytest.mark.slow)])
def test_losses_are_the_same_on_every_mesh(folder, straight, mesh):
    words = (*ROUTER_LOSSES, *(["attention.strategy=ring"] if mesh == "1x8" else []))
    lines = train(folder, mesh, *words, mesh=mesh)
    expected = [line["loss"] for line in straight]
    assert [line["loss"] for line in lines] == pytest.approx(expected, rel=tolerances.MESH)
    assert expected[0] - expected[-1] > 100 * tolerances.MESH * expected[0]


def read_weights(run: pathlib.Path) -> dict[str, bytes]:
    """Weights of the last checkpoint, by path."""
    table = decoder.param_table(model_config.parse_model_config(FIELDS))
    arrays = batches.name_leaves(reader.read_weights(run / f"checkpoints/{STEPS}", table))
    return {path: array.tobytes() for path, array in arrays.items()}


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(folder, straight):
    shutil.copytree(folder / "2x4", folder / "stopped")
    for step in range(test_hybrid.STOPPED + 1, STEPS + 1):
        shutil.rmtree(folder / f"stopped/checkpoints/{step}")
    lines = train(folder, "stopped", *ROUTER_LOSSES, mesh="2x4")
    assert [line["loss"] for line in lines] == [line["loss"] for line in straight]
    assert read_weights(folder / "stopped") == read_weights(folder / "2x4")


def evaluate(what: pathlib.Path, folder: pathlib.Path, *words: str) -> float:
    """Mean loss of the two documents by `jaxsp eval`."""
    sets = [{"source": f"{folder}/two.jsonl", "format": "tokens", "name": "two"}]
    words = ("data.row_tokens=128", f"data.eval={json.dumps(sets)}", *words)
    evaluation.main([str(what), *words, "--out", str(folder / "eval.jsonl")])
    return commands.read_lines(folder / "eval.jsonl")[-1]["loss"]


@pytest.mark.slow
def test_the_loss_is_that_of_transformers_and_untrained_weights_are_exported_unchanged(
    folder, documents
):
    words = ("optimizer.learning_rate=0", "run.steps=1", "batch.rows_per_step=1")
    (line,) = train(folder, "same", *words, mesh="1x1", data="two")
    model = oracle.torch_model(FIELDS)
    expected = oracle.gradients(model, documents).loss
    assert line["loss"] == pytest.approx(expected, rel=tolerances.EVAL)
    mesh = ("mesh.data=2", "mesh.seq=4", "mesh.virtual_cpu_devices=8")
    assert evaluate(folder / "same", folder, *mesh) == pytest.approx(expected, rel=tolerances.EVAL)
    before = safetensors_torch.load_file(folder / "model/model.safetensors")
    for dtype in ("float32", "bfloat16"):
        out = folder / f"out in {dtype}"
        export.main([str(folder / "same"), str(out), "--dtype", dtype])
        after = safetensors_torch.load_file(out / "model.safetensors")
        assert after.keys() == before.keys()
        for name, tensor in before.items():
            assert oracle.torch.equal(after[name], tensor.to(getattr(oracle.torch, dtype))), name
            assert after[name].dtype == getattr(oracle.torch, dtype), name


def test_with_the_loss_of_routers_loss_and_gradient_norm_are_those_of_transformers(folder):
    (document,) = test_hybrid.write_documents(folder / "one.jsonl", [100])
    words = ("optimizer.learning_rate=0", "run.steps=1", "batch.rows_per_step=1")
    words = (*words, "data.row_tokens=128", "model.router_aux_loss_coef=0.3")
    (line,) = train(folder, "routers", *words, mesh="1x4", data="one")
    model = oracle.torch_model(FIELDS)
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
def test_an_adapter_loads_in_peft_with_our_loss_and_is_merged(folder, documents):
    import peft

    tensors = "[mlp.experts.gate_up_proj, mlp.experts.down_proj]"
    words = ("adapter.type=lora", "adapter.rank=4", f"adapter.target_parameters={tensors}")
    words = (*words, "run.steps=2", "optimizer.learning_rate=0.02")
    lines = train(folder, "lora", *words, mesh="2x4")
    shutil.copytree(folder / "lora", folder / "stopped lora")
    shutil.rmtree(folder / "stopped lora/checkpoints/2")
    resumed = train(folder, "stopped lora", *words, mesh="2x4")
    assert resumed[-1]["loss"] == lines[-1]["loss"]
    loss = evaluate(folder / "lora", folder)
    for name, option in (("adapter", ()), ("merged", ("--merge", "--dtype", "float32"))):
        export.main([str(folder / "lora"), str(folder / name), *option])
    base = oracle.transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    adapted = peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    merged = oracle.transformers.AutoModelForCausalLM.from_pretrained(folder / "merged")
    for model in (adapted, merged):
        actual = oracle.gradients(model, documents).loss
        assert actual == pytest.approx(loss, rel=tolerances.EVAL)
    before, after = (
        safetensors_torch.load_file(folder / f"{name}/model.safetensors")
        for name in ("model", "merged")
    )
    changed = {name for name in before if not oracle.torch.equal(before[name], after[name])}
    parts = ("self_attn", "mlp.experts")
    projections = {name for name in before if "_proj.weight" in name}
    assert changed == {name for name in projections if any(part in name for part in parts)}
