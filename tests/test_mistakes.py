"""Mistakes of users, and what jaxsp answers: exit code and lines, in tests/mistakes.yaml.

`python -m tests.test_mistakes` writes the answers anew; read them as a diff.
"""

import contextlib
import io
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

import pytest
import yaml

from tests import batches
from tests.data import chats

TABLE = pathlib.Path(__file__).parent / "mistakes.yaml"

REPO = TABLE.parent.parent

BASE = {
    "run": {"directory": "run", "steps": 3},
    "model": {"config": batches.SMALL_LLAMA, "tokenizer": "bytes"},
    "mesh": {"data": 2, "seq": 4, "virtual_cpu_devices": 8},
    "data": {"train": [{"source": "texts.jsonl", "format": "text"}], "row_tokens": 64},
    "batch": {"rows_per_step": 4},
    "optimizer": {"learning_rate": 0.01},
    "logging": {"trackers": []},
}

FILES = {
    "base.yaml": json.dumps(BASE),
    "texts.jsonl": "\n".join(json.dumps({"text": "word " * count}) for count in range(1, 30)),
    "broken.yaml": "run: {steps: 3",
    "list.yaml": "[run, model]",
    "empty.yaml": "",
    "twice.yaml": "run: {}\nmesh: {}\nrun: {}\n",
    "month.yaml": "run: 2026-13-01\n",
    "chat.jinja": chats.CHATML,
}
"""Files that every case finds in its folder."""

PUBLISHED = {
    "qwen3_5.yaml": "Qwen/Qwen3.5-27B",
    "olmo_hybrid.yaml": "allenai/Olmo-Hybrid-7B",
    "muse_glimmer.yaml": "meta-models/Muse-Glimmer-30B",
    "qwen3_moe.yaml": "Qwen/Qwen3-30B-A3B",
    "qwen3_5_moe.yaml": "Qwen/Qwen3.5-35B-A3B",
    "glm4_moe.yaml": "zai-org/GLM-4.5-Air",
    "gpt_oss.yaml": "openai/gpt-oss-20b",
}
"""Files with the config.json of a published model."""


def answer(case: dict[str, Any], folder: pathlib.Path) -> tuple[int, list[str]]:
    """Runs the command of a case, and returns its exit code and the lines of stderr."""
    from jaxsp.__main__ import main
    from jaxsp.hf import published

    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name in PUBLISHED.keys() & {*case["words"]}:
        fields = published.read_models()[PUBLISHED[name]].fields
        model = {"config": fields, "tokenizer": "bytes"}
        (folder / name).write_text(json.dumps(BASE | {"model": model}), encoding="utf-8")
    (folder / "data.jsonl").write_text("\n".join(case.get("records", [])), encoding="utf-8")
    errors = io.StringIO()
    arguments = sys.argv
    directory = os.getcwd()
    sys.argv = ["jaxsp", *case["words"]]
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            main()
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    finally:
        sys.argv = arguments
        os.chdir(directory)
    text = errors.getvalue().replace(str(folder), "FOLDER").replace(str(REPO), "REPO")
    lines = text.splitlines()
    return code, [line for line in lines if not line.startswith(("usage:", " "))]


def read_table() -> list[dict[str, Any]]:
    return yaml.safe_load(TABLE.read_text(encoding="utf-8"))


def name_case(case: dict[str, Any]) -> str:
    return " ".join([*case["words"], *case.get("records", [])])


@pytest.mark.parametrize("case", read_table(), ids=name_case)
def test_each_mistake_has_its_exit_code_and_lines(case, tmp_path: pathlib.Path):
    assert answer(case, tmp_path) == (case["exit"], case["lines"])
    assert not (tmp_path / "run").exists(), "a refused run leaves no folder"


def test_most_mistakes_are_answered_in_one_line():
    """Records have a line each, and one for all."""
    table = [case for case in read_table() if "records" not in case]
    assert len(table) >= 150
    assert sum(len(case["lines"]) == 1 for case in table) > 0.9 * len(table)


def record() -> None:
    """Writes the answers of today into the table."""
    table = read_table()
    for case in table:
        with tempfile.TemporaryDirectory() as folder:
            case["exit"], case["lines"] = answer(case, pathlib.Path(folder))
    text = yaml.safe_dump(table, sort_keys=False, width=96, allow_unicode=True)
    TABLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    record()
