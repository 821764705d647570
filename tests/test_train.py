"""The train command from a config to its run directory: metrics on every mesh, and errors."""

import pathlib
import re

import jax
import numpy as np
import pytest
import rich.console
import transformers

from jaxsp import export
from jaxsp.checkpoint import reader
from jaxsp.core.errors import NeedsAttentionError, UserError
from jaxsp.run import build, config_file, trainer
from tests import batches, commands, markdown, messages, small_runs

MODEL = {**batches.SMALL_LLAMA, "num_hidden_layers": 2}


def settings(folder, **changes):
    """Config of a small run. Args: changes: fields by name, with __ for the dot."""
    fields = small_runs.make_fields(
        folder,
        "data.jsonl",
        run={"steps": 2},
        model={"config": MODEL},
        data={"row_tokens": 128},
        optimizer={"name": "sgd", "learning_rate": 0.5, "schedule": "constant"},
    )
    for name, value in changes.items():
        section, field = name.split("__")
        fields.setdefault(section, {})[field] = value
    return config_file.parse(fields)


def write_documents(folder, lengths, *, has_labels=False):
    """Writes random documents of these lengths."""
    commands.write_documents(folder / "data.jsonl", lengths, has_labels=has_labels)


def run(config, num_devices):
    """Trains. Returns: lines of metrics.jsonl."""
    console = rich.console.Console(record=True, width=200, quiet=True)
    inputs = build.build_training(config, devices=jax.devices()[:num_devices])
    trainer.train(inputs, console)
    return commands.read_lines(pathlib.Path(config.run.directory) / "metrics.jsonl")


@pytest.mark.e2e
def test_metrics_do_not_depend_on_the_mesh(tmp_path):
    """Two epochs of ragged documents, of which one is longer than two rows.

    A step contains rows of both epochs, and the last step has empty rows.
    """
    lengths = [*np.random.default_rng(1).integers(1, 90, 40), 300]
    write_documents(tmp_path, lengths, has_labels=True)
    lines_by_mesh = {}
    for data, seq in [(1, 1), (8, 1), (2, 4)]:
        config = settings(
            tmp_path,
            run__directory=str(tmp_path / f"{data}x{seq}"),
            run__steps=None,
            run__epochs=2,
            mesh__data=data,
            mesh__seq=seq,
            batch__rows_per_step=8,
        )
        lines_by_mesh[data, seq] = run(config, data * seq)
    expected = lines_by_mesh.pop((1, 1))
    assert expected[-1]["num_rows"] < 8, "the last step has empty rows"
    documents = commands.read_lines(tmp_path / "data.jsonl")
    used = [d["input_ids"] for d in documents if set(d["labels"][1:]) != {-100}]
    assert len(used) == len(documents) - 1, "one has no loss token"
    assert expected[-1]["num_tokens_total"] == 2 * sum(map(len, used))
    for lines in lines_by_mesh.values():
        for line, expected_line in zip(lines, expected, strict=True):
            assert_equal(line, expected_line, "token_accuracy", "learning_rate")


def assert_equal(line, expected, *names):
    """Asserts equal counts, and equal losses, gradient norms and `names` to rounding."""
    for name in commands.COUNTS:
        assert line[name] == expected[name], name
    for name in ("loss", "grad_norm", *names):
        assert line[name] == pytest.approx(expected[name], rel=1e-5), name


@pytest.mark.slow
def test_the_two_meshes_of_the_guide_give_the_same_numbers(tmp_path):
    """With XLA's optimizations, which other tests switch off."""
    guide = (commands.REPO / "configs/guide/gpus.md").read_text(encoding="utf-8")
    matches = [
        re.match(r"(jaxsp train .* run\.directory=(\S+) .*)", line)
        for line in markdown.commands(guide)
    ]
    runs = [match.groups() for match in matches if match]
    assert len(runs) == 2
    lines = []
    for words, directory in runs:
        words = words.replace(directory, str(tmp_path / directory))
        words = words.replace("run.steps=20", "run.steps=4")
        done = commands.run_python("-m", *words.split(), env={"XLA_FLAGS": ""})
        assert done.returncode == 0, done.stderr
        lines.append(commands.read_lines(tmp_path / directory / "metrics.jsonl"))
    for first, second in zip(*lines, strict=True):
        assert_equal(first, second)


@pytest.mark.e2e
def test_a_nan_loss_stops_the_run_and_saves_finite_weights(tmp_path):
    write_documents(tmp_path, [128] * 8)
    config = settings(
        tmp_path,
        run__steps=8,
        run__log_every=5,
        optimizer__learning_rate=1e30,
        optimizer__max_grad_norm=None,
    )
    suggestion = messages.containing("run.on_nonfinite=skip")
    with pytest.raises(NeedsAttentionError, match=suggestion) as stopped:
        run(config, 1)
    lines = commands.read_lines(tmp_path / "run/metrics.jsonl")
    nan_step = next(line["step"] for line in lines if line["loss"] is None)
    assert re.search(messages.containing(f"step {nan_step}"), str(stopped.value))
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    last_step = lines[-1]["step"]
    assert int(checkpoint.name) == last_step == nan_step + 1, "one more step was dispatched"
    assert re.search(messages.containing(f"checkpoints/{checkpoint.name}"), str(stopped.value))
    config = settings(tmp_path, run__directory=str(tmp_path / "other"))
    spec = build.build_training(config, devices=jax.devices()[:1]).spec
    weights = reader.read_weights(checkpoint, spec.table)
    assert all(np.isfinite(weight).all() for weight in jax.tree.leaves(weights))


@pytest.mark.parametrize(("resume", "suggestion"), [("auto", ""), ("never", "run.resume=auto")])
def test_a_directory_with_other_files_is_refused_and_not_changed(tmp_path, resume, suggestion):
    write_documents(tmp_path, [128])
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("precious")
    expected = messages.containing(f"run.directory = {tmp_path}/run") + f".*{suggestion}"
    with pytest.raises(UserError, match=expected):
        build.build_training(settings(tmp_path, run__resume=resume), devices=jax.devices()[:1])
    assert (tmp_path / "run/metrics.jsonl").read_text() == "precious"


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["jaxsp.train", "configs/quickstart.yaml", "--lr", "1e-5"], 2, "optimizer.learning_rate="),
        (["jaxsp.export", "no-such-run", "out"], 2, "no-such-run"),
    ],
)
def test_commands_print_errors_and_set_exit_codes(arguments, code, part):
    done = commands.run_python("-m", *arguments)
    assert done.returncode == code, done.stderr
    assert part in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_export_refuses_a_folder_that_is_not_empty(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/file").write_text("precious")
    with pytest.raises(UserError, match=messages.containing(tmp_path / "out")):
        export.main([str(tmp_path), str(tmp_path / "out")])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [pytest.param("llama", marks=pytest.mark.slow), "qwen2"])
def test_an_export_warns_if_transformers_would_load_another_tokenizer(tmp_path, capsys, model_type):
    """With model_type qwen2, AutoTokenizer always makes a Qwen2Tokenizer."""
    (tmp_path / "a.txt").write_text("some text " * 100)
    config = settings(
        tmp_path,
        model__config={**MODEL, "model_type": model_type},
        model__tokenizer="bytes",
        data__train=[{"source": str(tmp_path / "a.txt"), "format": "text"}],
    )
    run(config, 1)
    export.main([str(tmp_path / "run"), str(tmp_path / "hf")])
    is_warned = "PreTrainedTokenizerFast.from_pretrained" in capsys.readouterr().out
    assert is_warned == (model_type == "qwen2")
    tokenizer_class = transformers.AutoTokenizer
    if is_warned:
        tokenizer_class = transformers.PreTrainedTokenizerFast
    assert tokenizer_class.from_pretrained(tmp_path / "hf")("e\u0301").input_ids == [101, 204, 129]
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "hf").iterdir()}
    assert len(modes) == 1, "all files have the same permissions"
