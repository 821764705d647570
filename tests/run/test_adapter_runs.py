"""Runs of adapters: checkpoints of trained weights only, resuming, evaluation, export and merging.

The base is a small model in a folder, whose shards are padded.
"""

import contextlib
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import rich.console
import safetensors.numpy

import jaxsp
from jaxsp import eval as evaluation
from jaxsp import export
from jaxsp.checkpoint import reader
from jaxsp.core.errors import UserError
from jaxsp.hf import model_config, weights
from jaxsp.model import adapters, decoder
from jaxsp.run import build, config_file, preflight
from jaxsp.training import specs, train_state
from tests import batches, commands, tolerances
from tests.messages import assert_refused
from tests.small_runs import make_fields, train

pytestmark = pytest.mark.e2e

STEPS = 4
STOPPED = 2
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


def write_base(directory: pathlib.Path) -> None:
    table = decoder.param_table(model_config.parse_model_config(batches.UNEVEN_LLAMA))
    rng = np.random.default_rng(3)
    weights.export_model(
        jax.tree.map(lambda p: rng.normal(p.mean, 0.1, p.stacked_shape).astype(np.float32), table),
        table=table,
        fields=batches.UNEVEN_LLAMA,
        tokenizer=None,
        directory=directory,
        dtype="float32",
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Folder of the base, and of an uninterrupted run with checkpoints of each step."""
    folder = tmp_path_factory.mktemp("straight")
    write_base(folder / "base")
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


def test_the_disk_needs_space_for_the_trained_weights_only(straight, monkeypatch):
    needed = []
    check = lambda *_, checkpoint_bytes, **others: needed.append(checkpoint_bytes)
    monkeypatch.setattr(preflight, "check_space", check)
    inputs = build.build_training(settings(straight), devices=jax.devices())
    preflight.report_checks(inputs, rich.console.Console(quiet=True))
    arrays = reader.read_meta(straight / f"run/checkpoints/{STEPS}").arrays
    num_stored = sum(np.prod(array["shape"]) for array in arrays.values())
    assert 4 * num_stored <= needed[0] <= 1.2 * 4 * num_stored  # shards are padded


@pytest.fixture
def stopped(straight, tmp_path):
    """A copy of the run as if it had been killed after the checkpoint of step 2."""
    shutil.copytree(straight, tmp_path / "copy")
    folder = tmp_path / "copy"
    for step in range(STOPPED + 1, STEPS + 1):
        shutil.rmtree(folder / f"run/checkpoints/{step}")
    return folder


@pytest.mark.parametrize("mesh", ["2x4", pytest.param("1x2", marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_same_on_its_mesh_bit_for_bit(straight, stopped, mesh):
    data, seq = mesh.split("x")
    words = [f"mesh.data={data}", f"mesh.seq={seq}", f"data.train.0.source={straight}/train.jsonl"]
    train(settings(stopped, *words, f"model.source={straight}/base"))
    expected = read_trained(straight)
    actual = read_trained(stopped)
    assert actual.keys() == expected.keys()
    for path in expected:
        if mesh == "2x4":
            assert batches.is_bitwise_equal(actual[path], expected[path]), path
        else:
            assert batches.relative_error(actual[path], expected[path]) < tolerances.MESH, path


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


@pytest.mark.slow  # test_api.py saves models
def test_the_library_trains_adapters_and_saves_them_alone_and_merged(straight, tmp_path):
    fields = settings(straight).model_dump(exclude_unset=True)
    adapter = {"type": "dora", "rank": 4, "modules_to_save": ["lm_head"]}
    config = {name: fields[name] for name in ("mesh", "batch", "optimizer")} | {
        "run": {"steps": 1},
        "data": {"row_tokens": 64},
        "model": {"compute_dtype": "float32", "source": str(straight / "base")},
    }
    trained_model = jaxsp.Trainer(config | {"adapter": adapter})
    before = jax.tree.map(np.asarray, batches.name_leaves(trained_model.state.master))
    documents = [record["input_ids"] for record in commands.read_lines(straight / "train.jsonl")]
    for batch in trained_model.pack(documents):
        trained_model.step(batch)
    master = trained_model.state.master
    after = batches.name_leaves(master)
    trained = batches.name_leaves(train_state.select_trained(trained_model.spec.table, master))
    for path in after:
        is_same = batches.is_bitwise_equal(after[path], before[path])
        assert is_same == (path not in trained), path

    trained_model.save_adapter(tmp_path / "adapter")
    source = {"type": "dora", "source": str(tmp_path / "adapter")}
    loaded = jaxsp.Trainer(config | {"adapter": source})
    for path, array in batches.name_leaves(loaded.state.master).items():
        assert batches.is_bitwise_equal(array, after[path]), path

    trained_model.save(tmp_path / "merged")
    merged = safetensors.numpy.load_file(tmp_path / "merged/model.safetensors")
    base = safetensors.numpy.load_file(straight / "base/model.safetensors")
    assert merged.keys() == base.keys()
    changed = {name for name in base if not np.array_equal(merged[name], base[name])}
    assert changed == {name for name in base if "proj" in name or "lm_head" in name}
    np.testing.assert_array_equal(merged["lm_head.weight"], after["head"])
    layer = {name: x[1] for name, x in after.items() if name.startswith("layers.pre_attention.q.")}
    weight, a, b, magnitude = (
        layer[f"layers.pre_attention.q.{name}"].astype(np.float64)
        for name in ("weight", "adapter.a", "adapter.b", "adapter.magnitude")
    )
    whole = weight + 2.0 * b @ a
    whole *= (magnitude / np.linalg.norm(whole, axis=1))[:, None]
    actual = merged["model.layers.1.self_attn.q_proj.weight"]
    assert batches.relative_error(actual, whole) < tolerances.MERGE_DORA


@pytest.mark.slow
def test_adapters_of_random_weights_resume_and_are_not_merged(straight, tmp_path):
    words = [
        f"run.directory={tmp_path}/run",
        "model.source=null",
        f"model.config={batches.UNEVEN_LLAMA}".replace("'", '"'),
        "mesh.data=1",
        "mesh.seq=1",
    ]
    train(settings(straight, *words, "run.steps=1"))
    train(settings(straight, *words, "run.steps=2"))
    assert reader.read_meta(tmp_path / "run/checkpoints/2").step == 2
    with pytest.raises(UserError, match="another base"):
        train(
            settings(straight, *words, "run.steps=3", "run.seed=5", "run.on_data_change=continue")
        )
    with pytest.raises(UserError, match="leave out --merge"):
        export.main([str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"])
    export.main([str(tmp_path / "run"), str(tmp_path / "adapter")])
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
