"""Runs of adapters: checkpoints of trained weights only, resuming, evaluation, export and merging.

The base is a small model in a folder, whose shards are padded.
"""

import contextlib
import json
import pathlib
import shutil

import numpy as np
import pytest
import safetensors.numpy

from jaxsp import eval as evaluation
from jaxsp import export
from jaxsp.checkpoint import reader
from jaxsp.core.errors import UserError
from jaxsp.hf import model_config
from jaxsp.model import adapters
from jaxsp.run import config_file
from tests import batches, commands, small_runs, tolerances
from tests.messages import assert_refused
from tests.small_runs import make_fields, train

pytestmark = pytest.mark.e2e

STEPS = 4
ADAPTER = {"type": "lora", "rank": 4}


def settings(folder: pathlib.Path, *words: str):
    sections = {
        "run": {"steps": STEPS, "save_every": 1},
        "model": {"source": str(folder / "base")},
        "mesh": {"data": 2, "seq": 4},
        "data": {"max_segments_per_row": 8},
        "batch": {"rows_per_step": 8},
        "optimizer": {"weight_decay": 0.1},
        "adapter": ADAPTER,
        "checkpoint": {"keep_latest": STEPS},
    }
    return config_file.parse(make_fields(folder, **sections), words)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Folder of the base, and of an uninterrupted run with checkpoints of each step."""
    folder = tmp_path_factory.mktemp("straight")
    small_runs.write_model(folder / "base", batches.UNEVEN_LLAMA, std=0.1)
    commands.write_documents(folder / "train.jsonl", [*range(20, 60)])
    train(settings(folder))
    return folder


def read_trained(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Weights of the last checkpoint, by path."""
    config = settings(folder)
    plain = model_config.parse_model_config(batches.UNEVEN_LLAMA)
    table = specs.build_table(adapters.add_adapter(plain, config.adapter), config.step)
    weights = reader.read_weights(folder / f"run/checkpoints/{STEPS}", table)
    return batches.name_leaves(weights)


def test_a_checkpoint_has_the_trained_weights_only(straight):
    checkpoint = straight / f"run/checkpoints/{STEPS}"
    meta = reader.read_meta(checkpoint)
    assert {path.split("/")[0] for path in meta.base} == {"base"}
    assert len(meta.base) == 12
    masters = [path for path in meta.arrays if path.startswith("master/")]
    assert len(masters) == 14
    assert all("/adapter/" in path for path in masters)
    num_trained = sum(array.size for array in read_trained(straight).values())
    num_stored = sum(np.prod(array["shape"]) for array in meta.arrays.values())
    assert 3 * num_trained <= num_stored <= 3 * num_trained + 30  # two moments, and counts
    num_bytes = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    base_bytes = (straight / "base/model.safetensors").stat().st_size
    assert num_bytes < 0.35 * base_bytes


def test_a_resumed_run_is_the_same_bit_for_bit(straight, tmp_path):
    """A copy of the run as if it had been killed after the checkpoint of step 2."""
    stopped = tmp_path / "copy"
    shutil.copytree(straight, stopped)
    for step in (3, 4):
        shutil.rmtree(stopped / f"run/checkpoints/{step}")
    words = [f"data.train.0.source={straight}/train.jsonl", f"model.source={straight}/base"]
    train(settings(stopped, *words))
    assert batches.is_bitwise_equal(read_trained(stopped), read_trained(straight))


@contextlib.contextmanager
def changed_base(folder: pathlib.Path):
    """Context in which one number of the base is another one."""
    path = folder / "base/model.safetensors"
    whole = path.read_bytes()
    tensors = safetensors.numpy.load(whole)
    tensors["model.layers.1.self_attn.v_proj.weight"][2, 3] += np.float32(1e-3)
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    yield
    path.write_bytes(whole)


def eval_set(folder: pathlib.Path) -> str:
    return f"data.eval=[{{source: {folder}/train.jsonl, format: tokens, name: all}}]"


def test_another_base_is_refused_at_resume_evaluation_and_merge(straight, tmp_path):
    with changed_base(straight):
        for run in (
            lambda: train(settings(straight, f"run.steps={STEPS + 1}")),
            lambda: evaluation.main([str(straight / "run"), eval_set(straight)]),
            lambda: export.main([str(straight / "run"), str(tmp_path / "merged"), "--merge"]),
        ):
            with assert_refused("another base", "v/weight", "model"):
                run()
    assert not (tmp_path / "merged").exists()


def test_the_base_may_be_read_in_another_dtype_for_an_evaluation(straight):
    """The run was in float32. In bfloat16, the same base is accepted, and another one refused."""
    losses = []
    for dtype in ("float32", "bfloat16"):
        losses.append(evaluate(straight / "run", straight, f"model.compute_dtype={dtype}"))
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.02)
    with changed_base(straight), pytest.raises(UserError, match="v/weight differs"):
        evaluate(straight / "run", straight, "model.compute_dtype=bfloat16")


def evaluate(what: pathlib.Path, folder: pathlib.Path, *words: str) -> float:
    out = folder / "losses.jsonl"
    evaluation.main([str(what), eval_set(folder), *words, "--out", str(out)])
    return commands.read_lines(out)[-1]["loss"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT 0.21.2
def test_a_run_its_adapter_and_its_merged_model_have_the_same_loss(straight, tmp_path):
    export.main([str(straight / "run"), str(tmp_path / "adapter")])
    export.main([str(straight / "run"), str(tmp_path / "merged"), "--merge"])
    words = ["data.row_tokens=64", "mesh.data=2", "mesh.seq=4", "model.compute_dtype=float32"]
    base_loss = evaluate(straight / "base", straight, *words)
    loss = evaluate(straight / "run", straight)
    assert abs(loss - base_loss) > 1e-3 * base_loss
    source = ["adapter.type=lora", f"adapter.source={tmp_path}/adapter"]
    losses = [
        evaluate(straight / "base", straight, *words, *source),
        evaluate(tmp_path / "merged", straight, *words),
    ]
    assert losses[0] == loss
    assert losses[1] == pytest.approx(loss, rel=tolerances.EVAL)
    fields = settings(straight).model_dump(mode="json") | {"adapter": {}}
    (tmp_path / "other.yaml").write_text(json.dumps(fields))  # the adapter is that of the run
    assert evaluate(straight / "run", straight, "--config", str(tmp_path / "other.yaml")) == loss
    check_merged_by_peft(straight / "base", tmp_path)


def check_merged_by_peft(base: pathlib.Path, folder: pathlib.Path) -> None:
    """Compares a merged model with what PEFT makes of the adapter, where PEFT is installed."""
    with contextlib.suppress(ImportError):
        import peft
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        model = peft.PeftModel.from_pretrained(model, folder / "adapter").merge_and_unload()
        expected = {name: x.detach().numpy() for name, x in model.named_parameters()}
        merged = safetensors.numpy.load_file(folder / "merged/model.safetensors")
        assert merged.keys() == expected.keys()
        errors = {name: batches.relative_error(merged[name], expected[name]) for name in expected}
        print("merged", errors)
        assert max(errors.values()) < tolerances.MERGE, errors
