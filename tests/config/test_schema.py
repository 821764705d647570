"""Valid configs, and the messages for invalid ones."""

import pathlib
from datetime import timedelta

import pytest

from jaxsp.config import yaml_io
from jaxsp.core.errors import UserError
from jaxsp.data.formats.chats import Messages
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


@pytest.mark.parametrize("number", ["3e-4", "3.e-4", "0.3e-3", "3E-4", "+3e-04", "0.0003", "30e-5"])
def test_numbers_with_exponents_are_numbers(file, number):
    """PyYAML reads 3e-4 as text."""
    assert config_file.load(
        file, [f"optimizer.learning_rate={number}"]
    ).optimizer.learning_rate == pytest.approx(3e-4)
    file.write_text(VALID.replace("1.0e-3", number))
    assert config_file.load(file, []).optimizer.learning_rate == pytest.approx(3e-4)


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


def test_the_example_of_every_field_is_valid():
    inner = [f"data.train.0.{name}" for name in Messages.model_fields]
    for key in [*(f"{group}.{name}" for group, name, _ in fields()), *inner]:
        name, _, text = config_file.SCHEMA.suggest_override(key).partition("=")
        assert name == key
        assert config_file.SCHEMA.coerce_value(key, yaml_io.load(text)) is not None, key


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
