"""Security: no code of a model, data set or config runs; a user's files and secrets are safe."""

import ast
import json
import os
import pathlib
import re
import sys

import datasets
import jax
import pytest

from jaxsp import cli, export, train
from jaxsp.config import yaml_io
from jaxsp.core.errors import ExitCode, UserError
from jaxsp.data import chat, tokenizers
from jaxsp.data.chat import ChatOptions
from jaxsp.run import build, config_file
from tests import batches, commands, messages, small_runs

REPO = pathlib.Path(__file__).parent.parent

FORBIDDEN = {
    "pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "torch",
    "runpy",
    "imp",
}
"""Modules that can run code from the files that they read."""


def find_calls(tree):
    """Every call of a file: the name as written, and the keyword arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield (
                ast.unparse(node.func),
                {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords},
            )


def find_unsafe(text):
    """Uses in a source file that can run foreign code."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (f"imports {name}" for name in names if name.split(".")[0] in FORBIDDEN)
    for name, keywords in find_calls(tree):
        if name in ("eval", "exec", "compile", "__import__") or name in ("os.system", "os.popen"):
            yield f"calls {name}"
        for option in ("shell", "allow_pickle", "trust_remote_code"):
            if keywords.get(option, "False") != "False":
                yield f"{name}: {option}"
        is_auto_class = re.match(r"transformers\.Auto\w+\.from_pretrained$", name)
        if is_auto_class and "trust_remote_code" not in keywords:
            yield f"{name}: needs trust_remote_code=False"
        if name == "yaml.load" and "Safe" not in text:
            yield f"{name}: needs a safe loader"


def test_no_module_can_run_code_that_it_reads():
    for path in (REPO / "jaxsp").rglob("*.py"):
        assert not list(find_unsafe(path.read_text(encoding="utf-8"))), path


CHAT = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]}


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ (messages | attr('__class__')).__base__ }}",
        "{{ cycler.__init__.__globals__.os.system('touch broken-out') }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/hostname' %}",
        "{% for i in range(1000000000) %}{{ i }}{% endfor %}",
        "{{ '%s' | format(messages.__init__.__globals__) }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
    ],
)
def test_a_chat_template_stays_in_its_sandbox(template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenizers.make_byte_tokenizer()
    options = ChatOptions(tokenizer=tokenizer, template=template, has_full_loss=True)
    with pytest.raises(UserError, match="chat template"):
        chat.render_record(CHAT, options)
    assert not any(tmp_path.iterdir())


def test_the_record_of_a_chat_template_that_leaves_its_sandbox_is_named(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(json.dumps(CHAT))
    (tmp_path / "t.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    fields = settings(
        tmp_path, "data.chat_template=t.jinja", "data.train=[{source: a.jsonl, format: messages}]"
    )
    with pytest.raises(UserError) as error:
        build.build_training(fields, devices=jax.devices()[:1])
    first, _ = error.value.problems
    assert re.search(messages.containing("a.jsonl, line 1", "__class__"), first)


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system [echo]",
        "!!python/name:os.system",
        "!!python/module:os",
        "!x 1",
    ],
)
def test_yaml_tags_cannot_make_python_objects(tag):
    with pytest.raises(yaml_io.yaml.YAMLError, match="could not determine a constructor"):
        yaml_io.load(f"a: {tag}")


def test_aliases_are_values_and_not_bombs():
    assert yaml_io.load("a: &a {b: 1}\nc: [*a, *a]") == {"a": {"b": 1}, "c": [{"b": 1}, {"b": 1}]}
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    with pytest.raises(yaml_io.yaml.YAMLError, match="100,000"):
        yaml_io.load("\n".join(lines))
    assert len(yaml_io.load("\n".join(lines[:3]))) == 3
    with pytest.raises(yaml_io.yaml.YAMLError, match="alias"):
        yaml_io.load("a: &a [*a]")


@pytest.mark.parametrize(
    "name", ["../other/data-00000-of-00001.arrow", "/etc/hostname", "a/b.arrow", 3]
)
def test_a_saved_data_set_stays_in_its_folder(tmp_path, name):
    for folder in ("other", "one", "several/train"):
        datasets.Dataset.from_dict({"text": [f"this is {folder}"]}).save_to_disk(tmp_path / folder)
    (tmp_path / "several/dataset_dict.json").write_text('{"splits": ["train"]}')
    for folder in ("one", "several/train"):
        state = json.loads((tmp_path / folder / "state.json").read_text())
        state["_data_files"] = [{"filename": name}]
        (tmp_path / folder / "state.json").write_text(json.dumps(state))
        assert_refused(tmp_path, folder.split("/")[0], name)
    (tmp_path / "several/dataset_dict.json").write_text('{"splits": ["../other"]}')
    assert_refused(tmp_path, "several", "../other")


def assert_refused(folder, source, name):
    """Asserts that a source is refused because of a name in it."""
    fields = settings(folder, f"data.train=[{{source: {folder}/{source}, format: text}}]")
    expected = messages.containing(f"data.train.0.source = {folder}/{source}", name)
    with pytest.raises(UserError, match=expected):
        build.build_training(fields, devices=jax.devices()[:1])


def settings(folder, *words):
    sections = {
        "run": {"steps": 4, "save_every": 1},
        "model": {"config": batches.SMALL_LLAMA, "tokenizer": "bytes"},
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
        "checkpoint": {"keep_latest": 1},
    }
    return config_file.parse(small_runs.make_fields(folder, "data.jsonl", **sections), words)


FOREIGN = [
    "notes.txt",
    "data/a.jsonl",
    "tensorboard/mine",
    "model/mine.json",
    "checkpoints/mine",
    "checkpoints/best/weights.safetensors",
    "checkpoints/1/notes.txt",
    "checkpoints/0003/notes.txt",
    "checkpoints/2.backup/notes.txt",
    "checkpoints/2.orbax-checkpoint-tmp-of-mine/notes.txt",
]
"""A user's files in the directory of a run; some have names like those of checkpoints."""


@pytest.mark.e2e
def test_a_run_deletes_nothing_that_it_did_not_write(tmp_path, monkeypatch):
    commands.write_documents(tmp_path / "data.jsonl", [64] * 8)
    monkeypatch.setattr(jax, "devices", lambda *_: [jax.local_devices()[0]])
    run = tmp_path / "run"
    config_file.save(settings(tmp_path, "mesh.data=1"), tmp_path / "c.yaml")
    write_files(run, ["config.yaml", *(name for name in FOREIGN if "/1/" not in name)])
    train.main([str(tmp_path / "c.yaml")])
    write_files(run, ["checkpoints/1/notes.txt"])
    train.main([str(tmp_path / "c.yaml"), "run.steps=6"])
    assert [name for name in FOREIGN if not (run / name).is_file()] == []
    assert (run / "checkpoints/6").is_dir()
    assert not (run / "checkpoints/5").exists(), "of its own checkpoints, only the latest is kept"
    # a folder named like a later step is moved away, as a damaged checkpoint is
    write_files(run, ["checkpoints/7/notes.txt"])
    train.main([str(tmp_path / "c.yaml"), "run.steps=8"])
    assert [path.read_text() for path in run.rglob("7/notes.txt")] == ["checkpoints/7/notes.txt"]
    assert [name for name in FOREIGN if not (run / name).is_file()] == []


def write_files(run, names):
    for name in names:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("" if name == "config.yaml" else name)


CANARIES = {
    "HF_TOKEN": "hf_canaryAAAA",
    "WANDB_API_KEY": "canaryBBBB",
    "AWS_SECRET_ACCESS_KEY": "canaryCCCC",
    "SOME_PASSWORD": "canaryDDDD",
    "HTTPS_PROXY": "http://user:canaryEEEE@127.0.0.1:9",
    "HTTP_PROXY": "http://user:canaryFFFF@127.0.0.1:9",
}
SECRET = re.compile("canary[A-F]{4}")


@pytest.mark.e2e
def test_secrets_of_the_environment_are_written_nowhere(tmp_path, monkeypatch, capfd):
    """Training, an invalid config, an internal error with its traceback, and an export."""
    monkeypatch.chdir(tmp_path)
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    commands.write_documents(tmp_path / "data.jsonl", [64] * 8)
    config_file.save(settings(tmp_path, "mesh.data=1"), tmp_path / "c.yaml")
    monkeypatch.setattr(jax, "devices", lambda *_: [jax.local_devices()[0]])
    for main, arguments, code in [
        (train.main, ["c.yaml", "--verbose"], ExitCode.OK),
        (train.main, ["c.yaml", "run.steps=5", "optimizer.learning_rate=1e30"], ExitCode.OK),
        (train.main, ["c.yaml", "data.train.0.source=nothing.jsonl"], ExitCode.USER_ERROR),
        (lambda _: dict(os.environ)["nothing"], [], ExitCode.INTERNAL_ERROR),
        (export.main, ["run", "out"], ExitCode.OK),
    ]:
        monkeypatch.setattr(sys, "argv", ["command", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.run_command(main)
        output = capfd.readouterr()
        assert end.value.code == code, output.err
        assert not SECRET.search(output.out + output.err)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if SECRET.search(path.read_text(errors="replace"))] == []


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(
    "proxy", ["http://user:canaryEEEE@127.0.0.1:9", "what://user:canaryEEEE@proxy"]
)
def test_the_password_of_a_proxy_that_fails_is_not_printed(tmp_path, proxy):
    commands.write_documents(tmp_path / "data.jsonl", [64] * 8)
    config = settings(tmp_path, "model.config=null", "model.source=no-user/no-model")
    config_file.save(config, tmp_path / "c.yaml")
    env = {**CANARIES, "HTTPS_PROXY": proxy, "HF_HUB_OFFLINE": "0"}
    done = commands.run_python("-m", "jaxsp.train", tmp_path / "c.yaml", env=env)
    assert done.returncode in (ExitCode.USER_ERROR, ExitCode.INTERNAL_ERROR)
    assert "no-user/no-model: " in done.stderr or "proxy" in done.stderr
    assert not SECRET.search(done.stdout + done.stderr), done.stderr
