"""Runs with objectives for pairs: the same on every mesh, after a stop."""

import json
import pathlib
import shutil

import datasets
import jax
import numpy as np
import pytest
import rich.console

from jaxsp import eval as evaluation
from jaxsp import export
from jaxsp.core.errors import UserError
from jaxsp.hf import peft
from jaxsp.run import build, config_file, references, trainer
from jaxsp.training import train_state
from tests import batches, commands, small_runs

pytestmark = pytest.mark.e2e

METRICS = (
    *("loss", "grad_norm", "reward_accuracy", "reward_margin", "chosen_reward"),
    *("rejected_reward", "chosen_logp", "rejected_logp"),
)

COUNTS = ("num_pairs", "num_rows", "num_tokens", "num_loss_tokens")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preferences")
    rng = np.random.default_rng(3)
    words = "red green blue cat dog bird runs eats sees".split()
    for name, num_records, most in (("train", 24, 12), ("other", 8, 11), ("eval", 6, 10)):
        records = []
        for _ in range(num_records):
            prompt, *answers = (" ".join(rng.choice(words, rng.integers(1, most))) for _ in "pcr")
            chosen, rejected = (f" {answer}!" for answer in answers)
            records.append({"prompt": prompt, "chosen": chosen, "rejected": f"{rejected}?"})
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


@pytest.fixture(autouse=True)
def _own_cache(folder, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")


def settings(folder, name, *words, sources=("train",), sizes=(1, 1), **sections):
    train = [
        {"source": str(folder / f"{source}.jsonl"), "format": "preference"} for source in sources
    ]
    if len(train) > 1:
        for source, weight in zip(train, (2.0, 1.0), strict=True):
            source["weight"] = weight
    own = {
        "run": {"directory": str(folder / name), "steps": 4},
        "model": {"config": batches.SMALL_LLAMA, "tokenizer": "bytes"},
        "mesh": {"data": sizes[0], "seq": sizes[1]},
        "data": {"train": train, "row_tokens": 256},
        "batch": {"rows_per_step": 8},
        "objective": {"type": "dpo"},
        "optimizer": {"schedule": "constant"},
    }
    fields = small_runs.make_fields(folder, **own)
    for section, values in sections.items():
        fields[section] = fields.get(section, {}) | values
    return config_file.parse(fields, words)


def run(config, num_devices=1, quiet=True):
    """Trains. Returns: lines of metrics.jsonl, and the text on the console."""
    console = rich.console.Console(record=True, width=200, quiet=quiet, file=None)
    inputs = build.build_training(config, devices=jax.devices()[:num_devices])
    with console.capture() as capture:
        trainer.train(inputs, console)
    lines = commands.read_lines(pathlib.Path(config.run.directory) / "metrics.jsonl")
    return lines, capture.get()


def assert_equal(lines, expected_lines):
    for line, expected in zip(lines, expected_lines, strict=True):
        for name in COUNTS:
            assert line[name] == expected[name], name
        for name in METRICS:
            assert line[name] == pytest.approx(expected[name], rel=1e-4, abs=2e-5), name


def test_metrics_do_not_depend_on_the_mesh(folder):
    """With a mixture of two sources, some of whose pairs are in two rows."""
    case = {"sources": ("train", "other"), "data": {"row_tokens": 128}}
    first, _ = run(settings(folder, "mixture 1x1", **case))
    second, _ = run(settings(folder, "mixture 2x2", sizes=(2, 2), **case), 4)
    assert_equal(second, first)
    assert first[0]["loss"] == pytest.approx(np.log(2), rel=1e-5), "the reference is the model"
    assert first[-1]["loss"] < first[0]["loss"]


def test_a_stopped_run_goes_on_bit_for_bit_and_reads_its_references(folder):
    words = ["run.save_every=2", "checkpoint.keep_latest=9", "data.eval_fraction=0.2"]
    straight, text = run(settings(folder, "straight", *words), quiet=False)
    assert text.count("by the reference model") == 2, "of training and held-out documents"
    shutil.rmtree(folder / "cache/jaxsp/references")
    stopped = settings(folder, "stopped", *words)
    shutil.copytree(folder / "straight", folder / "stopped")
    shutil.rmtree(folder / "stopped/checkpoints/4")
    resumed, text = run(stopped, quiet=False)
    assert "by the reference model" not in text, "they are in the run's directory"
    times = ("step_s", "tokens_per_s", "tokens_per_s_per_device", "tflops_per_device")
    ignored = (*times, "data_wait_s", "checkpoint_wait_s")
    without_times = lambda line: {key: line[key] for key in line if key not in ignored}
    assert list(map(without_times, resumed)) == list(map(without_times, straight))


@pytest.mark.slow
def test_a_damaged_file_of_references_is_computed_again(folder):
    config = settings(folder, "damaged", "run.steps=1")
    first, _ = run(config)
    for path in folder.glob("cache/jaxsp/references/*.npy"):
        content = bytearray(path.read_bytes())
        content[-3] ^= 4
        path.write_bytes(content)
    again, text = run(settings(folder, "damaged again", "run.steps=1"), quiet=False)
    assert "by the reference model" in text
    assert again[0]["loss"] == first[0]["loss"]


@pytest.mark.slow
def test_another_model_has_other_references(folder):
    """Also in a directory in which a run was stopped before its first checkpoint."""
    config = settings(folder, "seeds", "run.steps=1")
    run(config)
    shutil.rmtree(folder / "seeds/checkpoints")
    (folder / "seeds/last_checkpoint.json").unlink()
    (line,), text = run(settings(folder, "seeds", "run.steps=1", "run.seed=1"), quiet=False)
    assert "by the reference model" in text
    assert line["loss"] == pytest.approx(np.log(2), rel=1e-5)
    resumed, text = run(settings(folder, "seeds", "run.steps=2", "run.seed=1"), quiet=False)
    assert "by the reference model" not in text
    straight, _ = run(settings(folder, "other seed", "run.steps=2", "run.seed=1"))
    assert_equal(resumed, straight)


@pytest.mark.slow
def test_a_lost_reference_of_a_resumed_run_is_model_source_and_not_random(folder):
    run(settings(folder, "base", "run.steps=1"))
    export.main([str(folder / "base"), str(folder / "base hf")])
    model = {"source": str(folder / "base hf"), "config": None, "tokenizer": None}
    run(settings(folder, "tuned", "run.steps=1", "run.save_every=1", model=model))
    shutil.rmtree(folder / "tuned" / references.FOLDER)
    shutil.rmtree(folder / "cache/jaxsp/references")
    resumed, text = run(settings(folder, "tuned", model=model), quiet=False)
    assert "by the reference model" in text
    straight, _ = run(settings(folder, "tuned straight", model=model))
    assert_equal(resumed, straight)


def write_adapter(folder, kind):
    """Writes a PEFT adapter that changes the model, with random weights. Returns: its folder."""
    directory = folder / f"adapter {kind}"
    if not directory.exists():
        config = settings(folder, "unused", adapter={"type": kind, "rank": 4})
        spec = build.build_training(config, devices=jax.devices()[:1]).spec
        table = train_state.select_trained(spec.table, spec.table)
        rng = np.random.default_rng(5)
        draw = lambda param: rng.uniform(0.05, 0.2, param.stacked_shape).astype(np.float32)
        peft.save_adapter(
            jax.tree.map(draw, table),
            table=table,
            adapter=spec.config.adapter,
            model=spec.model,
            base=None,
            directory=directory,
        )
    return str(directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "expected", "adapter"),
    [
        ("ipo", (1 / (2 * 0.1)) ** 2, {"type": "lora", "quantization": "nf4"}),
        ("kto", 0.5, {"type": "dora"}),
    ],
)
def test_the_reference_is_the_model_as_training_begins(folder, objective, expected, adapter):
    """Also with the adapter that training continues, and in an evaluation of the run on a mesh."""
    name = f"continued {objective}"
    format = "unpaired" if objective == "kto" else "preference"
    records = commands.read_lines(folder / "train.jsonl")
    if objective == "kto":
        records = [
            {"prompt": x["prompt"], "completion": x[key], "label": key == "chosen"}
            for x in records
            for key in ("chosen", "rejected")
        ]
    path = folder / f"train {format}.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    sections = {
        "objective": {"type": objective},
        "data": {"train": [{"source": str(path), "format": format}]},
        "adapter": adapter | {"source": write_adapter(folder, adapter["type"])},
    }
    words = ["run.steps=1", "optimizer.learning_rate=1e-12"]
    (line,), text = run(settings(folder, name, *words, **sections), quiet=False)
    assert line["loss"] == pytest.approx(expected, rel=1e-4)
    assert f"step 0 with the adapter {folder}/adapter" in " ".join(text.split())
    held_out = [{"source": str(path), "format": format}]
    out = folder / f"{name}.jsonl"
    words = [f"data.eval={json.dumps(held_out)}", "mesh.data=2", "mesh.seq=4", "--out", str(out)]
    evaluation.main([str(folder / name), *words])
    (line,) = commands.read_lines(out)
    assert line["loss"] == pytest.approx(expected, rel=1e-4)


def test_the_files_of_references_belong_to_the_adapter_that_training_continues(folder):
    source = pathlib.Path(write_adapter(folder, "lora"))
    adapter = {"type": "lora", "source": str(source)}
    config = settings(folder, "identity", adapter=adapter)
    inputs = build.build_training(config, devices=jax.devices()[:1])
    weights, reference = map(
        batches.name_leaves, (inputs.weights.make(), inputs.reference.open().make())
    )
    for path in weights:
        assert batches.is_bitwise_equal(reference[path], weights[path]), path
    identity = inputs.reference.identify()
    assert identity == inputs.reference.identify()
    file = source / peft.WEIGHTS_FILE
    shutil.copy(file, folder / "copy")
    (folder / "copy").replace(file)
    assert inputs.reference.identify() != identity


def test_given_references_are_used(folder):
    records = commands.read_lines(folder / "train.jsonl")
    for record in records:
        record |= {"ref_chosen_logps": -10.0, "ref_rejected_logps": -10.0}
    (folder / "given.jsonl").write_text("\n".join(map(json.dumps, records)))
    lines, text = run(settings(folder, "given", "run.steps=1", sources=("given",)), quiet=False)
    assert "by the reference model" not in text
    (line,) = lines
    margin = 0.1 * (line["chosen_logp"] - line["rejected_logp"])
    assert line["reward_margin"] == pytest.approx(margin, rel=1e-4)


def test_an_odd_number_of_rows_is_refused_if_pairs_are_in_two(folder):
    odd = settings(folder, "odd", "data.row_tokens=128", "batch.rows_per_step=3")
    with pytest.raises(UserError, match=r"rows_per_step = 3: must be even, because .* Use 4"):
        build.build_training(odd, devices=jax.devices()[:1])
