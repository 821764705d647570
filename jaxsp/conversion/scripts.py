"""Options in scripts, which are parsed and never executed: Python by `ast`, shell by `shlex`."""

import ast
import re
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from jaxsp.config import yaml_io
from jaxsp.conversion import objective_rules
from jaxsp.core.errors import UserError

MAX_CHARS = 10_000
"""Maximum length of a text that a script composes: `b = f"{a}{a}"` doubles it with every line."""

_TRAINERS = {"DPO": "dpo", "KTO": "kto", "ORPO": "orpo", "CPO": "cpo", "Reward": "reward"}
"""Trainers on preferences by the first part of the names of their classes."""

_TRAINER_CONFIGS = ("SFTConfig", "TrainingArguments", *(f"{name}Config" for name in _TRAINERS))

_CONFIGS = (*_TRAINER_CONFIGS, "ScriptArguments", "ModelConfig", "DatasetConfig")
"""Calls whose keywords are options."""

_OFFERED = "jaxsp trains with SFT, DPO, KTO, ORPO, CPO's SimPO and reward models"

_LORA_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Defaults of PEFT's LoraConfig; TRL's own options have others."""

_RECORD_CHANGES = ("map", "filter", "train_test_split", "remove_columns", "rename_column", "select")
"""Methods of a data set that change its records."""

_COMMANDS = ("swift", "trl", "accelerate", "torchrun", "python", "python3", "deepspeed", "axolotl")

_NUM_GPUS = ("nproc_per_node", "num_processes")


class _Unknown(Exception):
    """A value that is computed when the script runs."""


def read_python(text: str, *, path: str) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Reads the options of a Python script.

    Returns: options; expressions by option; remarks about what the script does in addition.
    Raises: UserError
    """
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{path}: cannot be read as Python: {error}.") from None
    calls = [(_name_of(node.func), node) for node in nodes if isinstance(node, ast.Call)]
    for name, _ in calls:
        is_known = name.removesuffix("Trainer") in ("SFT", "", *_TRAINERS)
        if name.endswith("Trainer") and not is_known:
            raise UserError(f"{path}: uses {name}. {_OFFERED}.")
    constants = _find_constants(nodes)
    options: dict[str, Any] = _find_trainer(name for name, _ in calls)
    expressions: dict[str, str] = {}
    remarks = []
    for name, call in calls:
        for option, node in _list_arguments(name, call):
            try:
                options.setdefault(option, _evaluate(node, constants))
            except (_Unknown, RecursionError):
                expressions[option] = " ".join(ast.unparse(node).split())[:200]
        if name == "LoraConfig":
            options |= {"use_peft": True, **_LORA_DEFAULTS, **options}
        if name in _RECORD_CHANGES and isinstance(call.func, ast.Attribute):
            remarks.append(
                f"data.train: {name}() changes records; write the changed records to a file, and "
                "name it"
            )
        if name.endswith("Trainer"):
            keywords = {word.arg: ast.unparse(word.value) for word in call.keywords}
            if "eval_dataset" in keywords:
                remarks.append("data.eval: the script has an eval_dataset; name it")
            if keywords.get("ref_model", "None") != "None":
                remarks.append(
                    "model.source: is the reference too; the script has a ref_model, which must be "
                    "the same model"
                )
    if not any(name in _TRAINER_CONFIGS and call.keywords for name, call in calls):
        raise UserError(
            f"{path}: has no SFTConfig(...) with options; they may come from its command line. "
            "Write the command into a file that ends with .sh, and convert that."
        )
    return options, expressions, list(dict.fromkeys(remarks))


def _find_trainer(names: Iterable[str]) -> dict[str, Any]:
    """Option of the trainer on preferences, if one of the called names belongs to it."""
    for name in names:
        if match := re.fullmatch(r"(\w+?)(Config|Trainer)", name):
            if match[1] in _TRAINERS:
                return {objective_rules.TRAINER: _TRAINERS[match[1]]}
    return {}


def _name_of(function: ast.expr) -> str:
    """Last word of the name of a function."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _list_arguments(name: str, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Yields the options among the arguments of a call, and the nodes of their values."""
    keywords = {word.arg: word.value for word in call.keywords if word.arg is not None}
    if name in (*_CONFIGS, "BitsAndBytesConfig"):
        yield from keywords.items()
    elif name == "LoraConfig":
        for option, node in keywords.items():
            yield {"r": "lora_r", "target_modules": "lora_target_modules"}.get(option, option), node
    elif name == "load_dataset":
        names = ("dataset_name", "dataset_config")
        yield from zip(names, call.args, strict=False)
        renamed = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
        for option, node in keywords.items():
            yield renamed.get(option, f"dataset_{option}"), node
    elif name == "from_pretrained" and isinstance(call.func, ast.Attribute):
        if not re.match(r"Auto(Model|Tokenizer)", ast.unparse(call.func)):
            return
        yield from (("model_name_or_path", node) for node in call.args[:1])
        if "Tokenizer" not in ast.unparse(call.func):
            yield from ((key, node) for key, node in keywords.items() if key[:5] != "quant")
    elif name.endswith("Trainer") and isinstance(keywords.get("model"), ast.Constant):
        yield "model_name_or_path", keywords["model"]


def _find_constants(nodes: Iterable[ast.AST]) -> dict[str, ast.expr]:
    """Returns the values of names that are assigned once."""
    values: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                values.setdefault(target.id, []).append(node.value)
    return {name: assigned[0] for name, assigned in values.items() if len(assigned) == 1}


def _evaluate(node: ast.expr, constants: dict[str, ast.expr], depth: int = 0) -> Any:
    """Returns the value of a literal, of a name of one, or of text composed of them.

    Raises: _Unknown for everything else.
    """
    if depth > yaml_io.MAX_DEPTH:
        raise _Unknown
    if isinstance(node, ast.Name) and node.id in constants:
        return _evaluate(constants[node.id], constants, depth + 1)
    if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
        return node.attr
    if isinstance(node, ast.JoinedStr):
        text = ""
        for part in node.values:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            text += str(_evaluate(inner, constants, depth + 1))
            if len(text) > MAX_CHARS:
                raise _Unknown
        return text
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError):
        raise _Unknown from None


def read_shell(text: str, *, path: str) -> dict[str, Any]:
    """Reads the options of the training command in a shell script.

    The number of GPUs is `num_processes`. Raises: UserError
    """
    variables: dict[str, str] = {}
    command: list[str] = []
    try:
        for words in _list_commands(text):
            words = [_expand(word, variables) for word in words]
            while words and re.fullmatch(r"\w+=.*", words[0], re.DOTALL):
                name, _, value = words.pop(0).partition("=")
                variables[name] = value
            if words and words[0] in ("export", "set"):
                pairs = (word.partition("=") for word in words if "=" in word)
                variables |= {name: value for name, _, value in pairs}
            elif words and words[0] in _COMMANDS and not command:
                command = words
    except ValueError as error:
        raise UserError(f"{path}: cannot be read as a shell script: {error}.") from None
    if not command:
        raise UserError(f"{path}: has no training command, such as `swift sft` or `trl sft`.")
    options = _find_command_trainer(command, path=path) | dict(_parse_options(command))
    devices = variables.get("CUDA_VISIBLE_DEVICES", "").split(",")
    counts = [variables.get("NPROC_PER_NODE"), *(options.pop(name, None) for name in _NUM_GPUS)]
    counts.append(len(devices) if devices != [""] else None)
    numbers = [int(str(count)) for count in counts if str(count).isdecimal()]
    return options | {"num_processes": numbers[0] if numbers else None}


def _list_commands(text: str) -> Iterator[list[str]]:
    """Yields the words of each command."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars="\n;&|")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if word.strip("\n;&|"):
            words.append(word)
        else:
            yield words
            words = []
    yield words


def _expand(word: str, variables: dict[str, str]) -> str:
    """Replaces variables that the script sets."""
    expanded = re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match[1], match[0]), word)
    if len(expanded) > MAX_CHARS:
        raise ValueError("a word is too long")
    return expanded


def _find_command_trainer(words: list[str], *, path: str) -> dict[str, Any]:
    """Option of the trainer on preferences that a command runs, if it does.

    Raises: UserError for a command that does not train, or not with what is offered.
    """
    if words[0] == "axolotl":
        raise UserError(f"{path}: runs Axolotl. Convert the YAML file that it names.")
    command = " ".join(words[:2])
    if words[0] in ("swift", "trl"):
        if command == "swift rlhf":
            return {objective_rules.SWIFT_TRAINER: "dpo"}  # the default
        if command in ("swift sft", "swift pt", "trl sft"):
            return {}
        if words[0] == "trl" and words[1:2] and words[1] in _TRAINERS.values():
            return {objective_rules.TRAINER: words[1]}
        raise UserError(f"{path}: runs {command}. {_OFFERED}.")
    for word in words:
        if match := re.search(r"\b(dpo|grpo|kto|ppo|orpo|cpo|rloo|reward)\w*\.py$", word):
            if match[1] not in _TRAINERS.values():
                raise UserError(f"{path}: runs {word}. {_OFFERED}.")
            return {objective_rules.TRAINER: match[1]}
    return {}


def _parse_options(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yields name and value of `--name value`, `--name=value`, `--name a b` and `--name`."""
    name = None
    values: list[str] = []
    for word in [*words, "--"]:
        if not re.match(r"--(\w|$)", word):
            values.append(word)
            continue
        if name is not None:
            yield name, _parse_values(values)
        name, equals, value = word.removeprefix("--").partition("=")
        values = [value] if equals else []


def _parse_values(words: list[str]) -> Any:
    """Value of an option: True without words, a list of several."""
    values = [_parse_value(word) for word in words if word[-3:] not in (".py", ".sh")]
    return (values or [True])[0] if len(values) < 2 else values


def _parse_value(word: str) -> Any:
    try:
        return {"True": True, "False": False, "None": None}.get(word, yaml_io.load(word))
    except yaml.YAMLError:
        return word
