"""jaxsp convert FILE... --gpus N: prints a config with the options of another system's YAML."""

import copy
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from jaxsp import cli
from jaxsp.config import foreign_names, yaml_io
from jaxsp.config.fields import is_count
from jaxsp.config.foreign_names import Counterpart
from jaxsp.core import errors
from jaxsp.core.errors import UserError
from jaxsp.objectives.policy import Policy
from jaxsp.objectives.registry import OBJECTIVES
from jaxsp.run import config_file
from jaxsp.system import output

_REQUIRED: dict[str, dict[str, Any]] = {
    "run": {"directory": "runs/converted", "epochs": 1},
    "model": {"source": "FILL-IN"},
    "data": {"row_tokens": 8192},
    "batch": {"rows_per_step": 8},
    "optimizer": {"learning_rate": 1e-5},
}
"""Values of required fields that the input does not set; data.train is beside them."""

_POLICY_NAMES = ("num_generations", "reward_funcs", "epsilon_high", "importance_sampling_level")
"""Names of options that only RL has."""

_POLICY_LOSSES = (
    *("grpo", "gspo", "gdpo", "ppo", "rloo"),
    *get_args(Policy.model_fields["loss_type"].annotation),
)
_TRAINER_NAMES = ("trainer", "trainer_type", "algorithm")
"""Names of options that choose a trainer; those that choose a loss stand for objective.type."""

_DIVERGENCE_FIELDS = ("objective.beta", "objective.divergence")
_DIVERGENCES = {0: ["objective.divergence=forward_kl"], 1: ["objective.divergence=reverse_kl"]}
"""Meaning of beta of TRL's GKD; between 0 and 1 it is that of jsd."""

_HEAD = (
    "# Options that the input does not have are jaxsp's defaults, not those of the other system:",
    "# see configs/guide/coming_from.md. Check: jaxsp plan CONFIG; jaxsp train CONFIG --preview",
)


@dataclasses.dataclass(kw_only=True)
class _Option:
    """An option of the input, and what becomes of it."""

    name: str  # dotted, in the input
    value: Any
    field: str | None = None  # that replaces it, or field=value
    note: str = ""
    words: Sequence[str] = ()
    """`key.path=value` that set its value; none if it cannot be kept."""
    is_set: bool = False  # the config has its value

    def describe(self) -> tuple[str, str]:
        """Heading and line of the comment about it."""
        value = yaml_io.format_value(self.value)
        if output.is_secret_name(self.name.rpartition(".")[2]):
            value = "(a secret)"
        is_off = self.value in (None, "", [], {}) or foreign_names.is_off(self.value)
        field = self.field.partition("=")[0] if self.field and is_off else self.field
        kept = ", ".join(self.words) if self.is_set else field
        answer = "; ".join(filter(None, [kept, self.note])) or "unknown"
        line = output.redact(f"{self.name} = {value}: {answer}")
        if self.is_set:
            return "Set:", line
        if is_off:
            return "Empty or off in the input:", line
        if self.field is not None:
            return "Set the field by hand:", line
        return f"{self.note.partition(':')[0] or 'unknown'}:".capitalize(), line


def main(arguments: list[str]) -> None:
    """Runs the command. Raises: UserError"""
    parser = cli.make_parser(
        "convert",
        "Converts a YAML file of Axolotl, TRL or LLaMA-Factory to a config. Every option of the\n"
        "file is in the output: as a field, or in a comment.\n\n"
        "  jaxsp convert axolotl.yaml --gpus 8 > my.yaml",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", type=pathlib.Path)
    parser.add_argument("--gpus", metavar="N", type=int, required=True, help="GPUs of the run")
    args = parser.parse_args(arguments)
    print(convert(args.files, num_gpus=args.gpus), end="")


def convert(paths: Sequence[pathlib.Path], *, num_gpus: int) -> str:
    """Converts YAML files of one run to the text of a config that loads. Raises: UserError"""
    options = [
        option
        for path in paths
        for name, value in config_file.read(path).items()
        for option in _read_options(str(name), value)
    ]
    options += _count_rows(options, num_gpus)
    fields, set_fields = _make_fields(options)
    missing = [
        f"{name} = {yaml_io.format_value(value)}"
        for name, value in yaml_io.flatten({name: fields[name] for name in _REQUIRED})
        if name not in set_fields
    ]
    groups = {"Missing from the input; fill in or check:": missing, "Set the field by hand:": []}
    for option in options:
        heading, line = option.describe()
        groups.setdefault(heading, []).append(line)
    names = errors.escape(", ".join(path.name for path in paths))
    lines = [f"# Converted from {names}, for {num_gpus} GPUs.", *_HEAD, "#"]
    for heading, entries in groups.items():
        if entries:
            lines += [f"# {heading}", *(f"#   {errors.escape(entry)}" for entry in entries)]
    sections = {name: fields[name] for name in config_file.SCHEMA.sections if name in fields}
    return "\n".join(lines) + "\n" + yaml_io.dump(sections)


def _read_options(name: str, value: Any) -> Iterator[_Option]:
    """Yields the options in a value. Those of a data set are looked up as in data.train."""
    counterpart = config_file.SCHEMA.find_counterpart(name)
    field = counterpart.field if counterpart is not None else None
    if field not in ("data.train", "data.eval") or not value:
        for inner, inner_value in yaml_io.flatten(value, name, keeps_empty=True):
            yield _make_option(inner, inner_value, inner)
        return
    entries = value.split(",") if isinstance(value, str) else value
    for index, entry in enumerate(entries if isinstance(entries, list) else [entries]):
        prefix = f"{field}.{index}"
        if not isinstance(entry, dict):
            yield _make_option(name, str(entry).strip(), f"{prefix}.source")
            continue
        # with `path: json`, data_files are the source
        for key in sorted(map(str, entry), key=lambda key: key != "data_files"):
            for inner, inner_value in yaml_io.flatten(entry[key], key, keeps_empty=True):
                own = "subset" if inner == "name" else inner
                yield _make_option(f"{name}.{index}.{inner}", inner_value, f"{prefix}.{own}")


def _make_option(name: str, value: Any, known_name: str) -> _Option:
    """Looks an option up, or the section that it is in, whose fields do not take its value."""
    found = config_file.SCHEMA.find_counterpart(known_name)
    kept = config_file.SCHEMA.coerce_value(known_name, value)
    if found is None and kept is not None:
        found = Counterpart(names=(), field=known_name, takes_value=True)
    is_section = False
    while found is None and "." in known_name:
        known_name = known_name.rpartition(".")[0]
        found = config_file.SCHEMA.find_counterpart(known_name)
        is_section = True
    if found is None:
        return _Option(name=name, value=value)
    words = []
    if found.field is not None and value is not None and not is_section:
        new = foreign_names.translate_value(found.field, value)
        if not found.takes_value:
            # a number has a meaning of its own, such as max_samples: 500
            is_on = isinstance(value, bool | str) and not foreign_names.is_off(value)
            words = [found.field] if "=" in found.field and is_on else []
        elif isinstance(new, str) and " and " in new:
            words = f"{found.field}={new}".split(" and ")
        elif (new := config_file.SCHEMA.coerce_value(found.field, new)) is not None:
            words = [f"{found.field}={json.dumps(new)}"]
    return _Option(name=name, value=value, field=found.field, note=found.note, words=words)


def _count_rows(options: list[_Option], num_gpus: int) -> list[_Option]:
    """The option for the rows of a step, if the input has a micro batch and the GPUs fit."""
    values = {name: option.value for option in options for name in (option.field, option.name)}
    sizes = {name: value for name, value in values.items() if is_count(value)}
    micro = sizes.get("batch.rows_per_microbatch")
    accumulation = sizes.get("gradient_accumulation_steps", 1)
    sharing = sizes.get("mesh.seq", 1) * sizes.get("tensor_parallel_size", 1)
    if micro is None or num_gpus < 1 or num_gpus % sharing:
        return []
    rows = micro * accumulation * num_gpus // sharing
    for option in options:
        if option.name == "gradient_accumulation_steps":
            option.field = None
            option.note = "part of batch.rows_per_step"
    name = f"micro batch {micro} x accumulation {accumulation} x {num_gpus} GPUs / {sharing}"
    return [_Option(name=name, value=rows, words=[f"batch.rows_per_step={rows}"])]


def _make_fields(options: list[_Option]) -> tuple[dict[str, Any], set[str]]:
    """Fields of a config that loads, and the dotted names of those that options set."""
    # a positive number of steps takes precedence over epochs, and the loss over its stage
    order = {"max_steps": 0, "stage": 2}
    left = sorted(options, key=lambda option: order.get(option.name, 1))
    words = [word for option in left for word in option.words]
    kinds = [yaml_io.load(word[15:]) for word in words if word.startswith("objective.type=")]
    if any(option.field == "objective.teacher" and option.value for option in options):
        kinds.append("distill")
    kind = kinds[0] if kinds else "sft"
    for option in options:
        name = option.name.rpartition(".")[2]
        field = str(option.field).partition("=")[0]
        chosen = []
        if name in _TRAINER_NAMES or field == "objective.type":
            chosen = option.value if isinstance(option.value, list) else [option.value]
        if name in _POLICY_NAMES or any(x in _POLICY_LOSSES for x in chosen):
            raise UserError(
                f"{option.name} = {yaml_io.format_value(option.value)}: belongs to RL that samples "
                "while it trains. jaxsp has its losses on given trajectories: write a config as in "
                "configs/guide/policy.md."
            )
        is_divergence = field in _DIVERGENCE_FIELDS and type(option.value) in (int, float)
        if kind == "distill" and is_divergence:
            option.words = _DIVERGENCES.get(option.value) or [
                "objective.divergence=jsd",
                f"objective.beta={option.value}",
            ]
    forms = {own.model_fields["type"].default: own.format for own in OBJECTIVES}
    source = {"source": "FILL-IN.jsonl", "format": forms.get(kind) or "messages"}
    fields = copy.deepcopy(_REQUIRED) | {"objective": {"type": kind}}
    for part in ("train", "eval"):
        parts = [str(option.field).split(".") for option in options]
        numbers = [int(names[2]) for names in parts if names[:2] == ["data", part] and names[2:]]
        if numbers or part == "train":
            fields["data"][part] = [dict(source) for _ in range(max(numbers, default=0) + 1)]
    origins: dict[str, _Option] = {}
    while True:  # a value may need another one: adapter.rank needs adapter.type
        for option in left:
            fields = _apply(option, fields, origins)
        refused = [option for option in left if not option.is_set]
        if len(refused) == len(left):
            return fields, set(origins)
        left = refused


def _apply(option: _Option, fields: dict[str, Any], origins: dict[str, _Option]) -> dict[str, Any]:
    """Returns the fields with an option's value, or without if the config would not load."""
    changed = copy.deepcopy(fields)
    for word in option.words:
        key = word.partition("=")[0]
        config_file.apply_override(changed, word)
        if key == "run.steps":
            changed["run"].pop("epochs", None)
        if key in origins and changed != fields:
            option.note = f"it is set by {origins[key].name}"
            return fields
    try:
        config_file.parse(changed)
    except UserError as error:
        option.note = error.problems[0]
        return fields
    option.is_set = bool(option.words)
    origins.update(dict.fromkeys((word.partition("=")[0] for word in option.words), option))
    return changed


if __name__ == "__main__":
    cli.run_command(main)
