"""Option names of other systems: each is answered with jaxsp's field, or with why there is none."""

import pathlib
import re

import pytest

from jaxsp.config import foreign_names
from jaxsp.core.errors import UserError
from jaxsp.run import config_file

FOLDER = pathlib.Path(__file__).parent / "foreign"

SOUND = {
    "run": {"directory": "runs/first", "steps": 3},
    "model": {"config": {"model_type": "llama"}},
    "data": {"train": [{"source": "a.txt", "format": "text"}], "row_tokens": 128},
    "batch": {"rows_per_step": 8},
    "optimizer": {"learning_rate": 1e-3},
}

NOT_NEEDED = "not needed: "
NOT_OFFERED = "not offered: "


def problems(fields: dict, *words: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        config_file.parse(SOUND | fields, words)
    return caught.value.problems


def test_the_table_has_no_name_twice_and_every_field_it_names_exists():
    counterparts = dict.fromkeys(foreign_names.read_table()[0].values())
    names = [name for counterpart in counterparts for name in counterpart.names]
    assert len(names) == len(set(names)) >= 250
    dotted = [name for name in names if "." in name]
    assert len(dotted) >= 8
    assert not any(map(is_field, dotted))
    groups = "|".join(config_file.SCHEMA.sections)
    pattern = re.compile(rf"(?<![\w./])(?:{groups})\.[a-z_]\w*(?:\.\d\.\w+)?(?:=[\w\[:\]-]+)?")
    num_fields = 0
    for counterpart in counterparts:
        for name in pattern.findall(f"{counterpart.field or ''} {counterpart.note}"):
            field, _, value = name.partition("=")
            assert is_field(field), field
            num_fields += 1
            known = value and value.replace("FOLDER", "x")
            given = int(value) if value.isdecimal() else known
            assert not value or config_file.SCHEMA.coerce_value(field, given) is not None, name
        if counterpart.field is None:
            assert counterpart.note.startswith((NOT_NEEDED, NOT_OFFERED))
            assert not counterpart.note.endswith(": "), counterpart.names
    assert num_fields > 90


def is_field(name: str) -> bool:
    """True if the config has a dotted field."""
    return bool(config_file.SCHEMA.find_fields(name.split(".")))


@pytest.mark.parametrize("file", ["axolotl.yaml", "training_arguments.json"])
def test_a_whole_file_of_another_system_is_answered_with_the_command_that_converts_it(file):
    with pytest.raises(UserError) as caught:
        config_file.load(FOLDER / file, [])
    (line,) = caught.value.problems
    assert f"jaxsp convert {FOLDER / file} --gpus 8" in line
    assert next(iter(config_file.read(FOLDER / file))) in line
