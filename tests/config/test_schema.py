"""Valid configs, and the messages for invalid ones."""

import pathlib
from datetime import timedelta

import pytest

from jaxsp.config import config_file as loading
from jaxsp.config import yaml_io
from jaxsp.core.errors import UserError
from jaxsp.data.chat_formats import Messages
from jaxsp.run import config_file

VALID = """
run: {directory: runs/first, steps: 3}
model: {config: {model_type: llama}}
data: {train: [{source: a.txt, format: text}, {source: b.txt, format: text}], row_tokens: 128}
batch: {rows_per_step: 8}
optimizer: {learning_rate: 1.0e-3}
"""


@pytest.fixture
def file(tmp_path) -> pathlib.Path:
    path = tmp_path / "config.yaml"
    path.write_text(VALID)
    return path


def problems(file: pathlib.Path, *words: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        config_file.load(file, list(words))
    assert not any("\n" in problem for problem in caught.value.problems)
    return caught.value.problems


def test_overrides_change_the_file(file):
    words = [
        "mesh.seq=4",
        "data.train.1.source=c/*.txt",
        "run.steps=null",
        "run.epochs=2",
        "model.config.hidden_size=64",
    ]
    config = config_file.load(file, words)
    assert config.mesh.seq == 4
    assert [source.source for source in config.data.train] == ["a.txt", "c/*.txt"]
    assert (config.run.steps, config.run.epochs) == (None, 2)
    assert config.model.config == {"model_type": "llama", "hidden_size": 64}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *((text, 3e-4) for text in ("3e-4", "0.3e-3", "3E-4", "+3e-04", "0.0003", "30e-5")),
        *(("0", 0), ("-7", -7), ("1_000", 1000), ("0x1f", 31), (".5e3", 500.0), ("2.", 2.0)),
    ],
)
def test_numbers_of_yaml_with_or_without_an_exponent_are_numbers(text, number):
    """PyYAML reads 3e-4 as text."""
    assert yaml_io.load(text) == pytest.approx(number)
    assert type(yaml_io.load(text)) is type(number)


@pytest.mark.parametrize(
    "directory", ["runs/first", "3e-4", "1.5", "null", "on", "läufe", "a: b", "two\nlines", " "]
)
def test_a_saved_config_is_read_back(file, tmp_path, directory):
    first = config_file.load(file, ["mesh.seq=2"])
    first = first.model_copy(update={"run": first.run.model_copy(update={"directory": directory})})
    config_file.save(first, tmp_path / "saved.yaml")
    assert config_file.load(tmp_path / "saved.yaml", []) == first


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("1h", timedelta(hours=1)),
        ("30m", timedelta(minutes=30)),
        ("100", 100),
        ("epoch", "epoch"),
        ("null", None),
    ],
)
def test_checkpoints_follow_after_steps_or_a_duration(file, tmp_path, text, every):
    config = config_file.load(file, [f"run.save_every={text}", "run.steps=null", "run.epochs=1"])
    assert config.run.save_every == every
    config_file.save(config, tmp_path / "saved.yaml")
    assert config_file.load(tmp_path / "saved.yaml", []) == config


def test_missing_fields_are_reported_with_their_meaning_and_a_value(file):
    file.write_text("data: {}\nrun: {}\n")
    messages = problems(file)
    names = ["data.row_tokens", "data.train", "run.directory"]
    for name in names:
        (line,) = [line for line in messages if line.startswith(f"{name}: ")]
        assert "missing" in line
        assert f" {name}=" in line
    (line,) = [line for line in messages if line.startswith("model: ")]
    assert "source, config, tokenizer, compute_dtype, rope, max_position_embeddings" in line
    assert len(messages) == len(names) + 4, messages  # steps or epochs; model, batch, optimizer


def test_counts_are_32_bit_integers():
    """Counts on the devices are 32-bit integers; larger ones would raise OverflowError."""
    counts = [
        f"{group}.{name}"
        for group, name, _ in fields()
        if config_file.SCHEMA.coerce_value(f"{group}.{name}", 7) == 7
    ]
    whole = [key for key in counts if config_file.SCHEMA.coerce_value(key, 7.5) is None]
    assert len(whole) >= 20
    for key in whole:
        largest = 2**32 - 1 if key == "run.seed" else 2**31 - 1
        assert config_file.SCHEMA.coerce_value(key, largest) == largest, key
        for value in (largest + 1, 10**30, 1e30):
            assert config_file.SCHEMA.coerce_value(key, value) is None, (key, value)


def test_the_example_of_every_field_is_valid():
    inner = [f"data.train.0.{name}" for name in Messages.model_fields]
    for key in [*(f"{group}.{name}" for group, name, _ in fields()), *inner]:
        name, _, text = config_file.SCHEMA.suggest_override(key).partition("=")
        assert name == key
        assert config_file.SCHEMA.coerce_value(key, yaml_io.load(text)) is not None, key


@pytest.mark.parametrize("text", [None, "- 1\n"])
def test_without_the_repository_a_config_to_start_from_is_printed(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        loading, "__file__", str(tmp_path / "site-packages/jaxsp/config/config_file.py")
    )
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    first, *lines = problems(path)
    assert "quickstart" not in first
    path.write_text("\n".join(lines))
    assert config_file.load(path, []).run.directory


@pytest.mark.parametrize(
    "field", ["run.directory", "run.resume", "model.source", "model.tokenizer"]
)
def test_a_tilde_in_a_path_is_a_home_folder(file, monkeypatch, tmp_path, field):
    monkeypatch.setenv("HOME", "/home/me")
    group, name = field.split(".")
    words = ["model.config=null"] if field == "model.source" else []
    config = config_file.load(file, [f"{field}=~/x", *words])
    assert getattr(getattr(config, group), name) == "/home/me/x"
    for value in ("runs/a/", "./~x", "Qwen/Qwen3-0.6B"):
        config = config_file.load(file, [f"{field}={value}", *words])
        assert getattr(getattr(config, group), name) == value, "as it was written"
    for value in ("~nosuchuser/x", f"a/{'b' * 256}"):
        (line,) = problems(file, f"{field}={value}", *words)
        assert line.startswith(f"{field} = ")


def fields() -> list:
    return [
        (group, name, field)
        for group, section in config_file.SCHEMA.sections.items()
        for name, field in {
            name: field for kind in section.sections for name, field in kind.model_fields.items()
        }.items()
    ]


SELECTORS = [("optimizer", "name"), ("objective", "type"), ("data", "train[].format")]
"""Fields whose meaning is that of the classes they select."""


def test_every_field_has_a_docstring_and_is_in_the_help():
    text = config_file.SCHEMA.describe_fields()
    inner = [("data", f"train[].{name}", field) for name, field in Messages.model_fields.items()]
    for group, name, field in [*fields(), *inner]:
        assert f"  {group}.{name}  (" in text
        meaning = " ".join((field.description or "").split())
        assert meaning or (group, name) in SELECTORS, f"{group}.{name} has no docstring"
        assert meaning in text
    for name, outer in config_file.Config.model_fields.items():
        assert f"{name}: {outer.annotation.__doc__.partition(chr(10))[0]}" in text
