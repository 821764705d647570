"""A config's fields as they were given: changed by `key.path=value`, and looked at together before each by itself."""

from collections.abc import Iterator
from typing import Any

import yaml

from jaxsp.config import yaml_io
from jaxsp.core import errors


def apply(
    fields: dict[str, Any], override: str, *, example_override: str = "mesh.seq=4"
) -> str | None:
    """Sets one `key.path=value` in `fields`, or returns the problem with it.

    Args: example: of a word that works, for a word that is none.
    """
    key, equals, text = override.partition("=")
    *groups, name = key.split(".")
    if not equals or not all([*groups, name]):
        return f"{override}: is not key.path=value, for example {example_override}."
    try:
        value = yaml_io.load(text)
    except (yaml.YAMLError, ValueError):
        return f"{key} = {yaml_io.shorten(text)}: is not a YAML value. Quote it: '{key}=\"...\"'."
    place: Any = fields
    for depth, part in enumerate([*groups, name]):
        above = ".".join(groups[:depth])
        index: Any = part
        if isinstance(place, list):
            if not part.isdecimal() or int(part) >= len(place):
                entries = (
                    errors.format_choices(f"{above}.{number}" for number in range(len(place)))
                    or f"{above}=[...]"
                )
                return f"{key} = {text}: {above} is a list of {len(place)}. Use {entries}."
            index = int(part)
        elif not isinstance(place, dict):
            return f"{key} = {text}: {above} = {yaml_io.format_value(place)} is a value, not a group of fields."
        if depth == len(groups):
            place[index] = value
        else:
            if isinstance(place, dict) and place.get(index) is None:
                place[index] = {}
            place = place[index]
    return None


def check_fields_together(fields: dict[str, Any]) -> list[str]:
    """Problems of several fields together, seen in the raw fields, so that another problem does not hide them."""
    return [
        *_check_exactly_one(
            fields, "run", ("steps", "epochs"), "says how long to train", "run.epochs=1"
        ),
        *_check_exactly_one(
            fields,
            "model",
            ("source", "config"),
            "says what the model is",
            "model.source=Qwen/Qwen3-0.6B",
        ),
        *_check_sources(fields),
        *_check_memory(fields.get("memory")),
        *_check_rows(fields.get("data")),
        *_check_nul(fields, ""),
        *_check_best(fields.get("checkpoint"), fields.get("data"), fields.get("run")),
        *_check_warmup(fields.get("optimizer")),
        *_check_evaluation(fields.get("run"), fields.get("data")),
        *_check_epochs(fields.get("run")),
        *_check_early_stopping(fields.get("run"), fields.get("checkpoint"), fields.get("data")),
    ]


def _check_early_stopping(run: Any, checkpoint: Any, data: Any) -> list[str]:
    """Problems of early stopping in a run that evaluates nothing before its last step."""
    if not isinstance(run, dict):
        return []
    patience, min_delta = run.get("early_stopping_patience"), run.get("early_stopping_min_delta")
    if patience is None:
        return [
            f"run.early_stopping_min_delta = {yaml_io.format_value(min_delta)}: has no effect without "
            "run.early_stopping_patience. Set run.early_stopping_patience=3, or early_stopping_min_delta=0."
        ] * bool(min_delta)
    asked = f"run.early_stopping_patience = {yaml_io.format_value(patience)}"
    if not _list_eval_names(data):
        return [f"{asked}: there is no data set to evaluate on. {_EVAL_SUGGESTION}"]
    keeps_best = isinstance(checkpoint, dict) and checkpoint.get("keep_best")
    with_checkpoints = keeps_best and run.get("save_every", "default") is not None
    if run.get("eval_every") is None and not with_checkpoints:
        return [f"{asked}: nothing is evaluated before the last step. Set run.eval_every=100."]
    return []


def _check_epochs(run: Any) -> list[str]:
    """Problems of what is done at the end of an epoch in a run that is measured in steps."""
    if not isinstance(run, dict) or run.get("epochs") is not None:
        return []
    return [
        f"run.{name} = epoch: needs run.epochs. Use run.epochs=1 in place of run.steps, or run.{name}=100."
        for name in ("save_every", "eval_every")
        if run.get(name) == "epoch"
    ]


def _list_eval_names(data: Any) -> list[Any]:
    """Names of the data sets to evaluate on."""
    if not isinstance(data, dict):
        return []
    sets = data.get("eval")
    names = [
        source.get("name") or source.get("source")
        for source in (sets if isinstance(sets, list | tuple) else [])
        if isinstance(source, dict)
    ]
    return names if data.get("eval_fraction") is None else [*names, "held_out"]


def _check_evaluation(run: Any, data: Any) -> list[str]:
    """Problems of options that need something to evaluate."""
    names = _list_eval_names(data)
    holds_out = isinstance(data, dict) and data.get("eval_fraction") is not None
    if holds_out and "held_out" in names[:-1]:
        number = names.index("held_out")
        return [
            f"data.eval.{number}.name = held_out: is the name of the documents that data.eval_fraction holds out. Use "
            f"another: data.eval.{number}.name=held_out-{number}."
        ]
    if not isinstance(run, dict) or names:
        return []
    if run.get("eval_at_start") is True:
        return [
            f"run.eval_at_start = true: there is no data set to evaluate on. {_EVAL_SUGGESTION}"
        ]
    return []


_EVAL_SUGGESTION = (
    "Name a data set: data.eval='[{source: held-out/*.txt, format: text}]', or hold out training documents: "
    "data.eval_fraction=0.05."
)
"""Suggestion where an option needs an evaluation."""


def _check_warmup(optimizer: Any) -> list[str]:
    """The problem of a warm-up given both in steps and as a fraction."""
    if not isinstance(optimizer, dict):
        return []
    steps, fraction = optimizer.get("warmup_steps"), optimizer.get("warmup_fraction")
    if not steps or fraction is None:
        return []
    return [
        f"optimizer.warmup_steps = {yaml_io.format_value(steps)}, optimizer.warmup_fraction = {yaml_io.format_value(fraction)}: only one "
        "of them may be set. Use optimizer.warmup_steps=0 or optimizer.warmup_fraction=null."
    ]


def _check_best(checkpoint: Any, data: Any, run: Any) -> list[str]:
    """What is best is told by an evaluation."""
    if not isinstance(checkpoint, dict):
        return []
    keep_best, best_eval = checkpoint.get("keep_best", 0), checkpoint.get("best_eval")
    names = _list_eval_names(data)
    stops_early = isinstance(run, dict) and run.get("early_stopping_patience") is not None
    if best_eval is not None and not keep_best and not stops_early:
        return [
            f"checkpoint.best_eval = {best_eval}: has no effect without checkpoint.keep_best. "
            "Set checkpoint.keep_best=1, or best_eval=null."
        ]
    if isinstance(keep_best, int) and keep_best > 0 and not names:
        return [
            f"checkpoint.keep_best = {keep_best}: checkpoints are ranked by an eval loss, "
            f"and there is no eval set. {_EVAL_SUGGESTION}"
        ]
    if best_eval is not None and best_eval not in names:
        return [
            f"checkpoint.best_eval = {best_eval}: is no data set of data.eval. Use {errors.format_choices(names)}, or null."
        ]
    return []


def _check_nul(value: Any, field: str) -> Iterator[str]:
    """Texts that hold a character which no name of a file may have, and no text needs."""
    if isinstance(value, dict | list | tuple):
        for name, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _check_nul(one, f"{field}.{name}" if field else str(name))
    elif isinstance(value, str) and "\0" in value:
        yield f"{field} = {yaml_io.format_value(value)}: holds a NUL character. Write it without."


_DEFAULT_MAX_SEGMENTS = 64
"""Default of data.max_segments_per_row."""


def _check_rows(data: Any) -> list[str]:
    """More pieces than a row has tokens: memory is made for them all."""
    if not isinstance(data, dict):
        return []
    most, length = data.get("max_segments_per_row"), data.get("row_tokens")
    lengths = length if isinstance(length, list | tuple) else [length]
    known = [one for one in lengths if isinstance(one, int)]
    # the default is saved with a run's config, also of rows shorter than it
    if isinstance(most, int) and most != _DEFAULT_MAX_SEGMENTS and known and most > max(known) > 0:
        return [
            f"data.max_segments_per_row = {most}: a row of {max(known)} tokens holds {max(known)} pieces at most. Use "
            f"{min(_DEFAULT_MAX_SEGMENTS, max(known))}, or as many as your documents need."
        ]
    return []


def _check_memory(memory: Any) -> list[str]:
    """Levers that contradict each other."""
    if not isinstance(memory, dict):
        return []
    offloaded = memory.get("offload_activations")
    if memory.get("remat") == "full" and offloaded == "layer_inputs_and_attention":
        return [
            f"memory.offload_activations = {offloaded}: with memory.remat = full nothing that attention gives is kept. Use "
            "memory.offload_activations=layer_inputs, or memory.remat=save_attention."
        ]
    return []


def _check_sources(fields: dict[str, Any]) -> list[str]:
    """Problems of what the sources say together: their weights, which are shares of a number of steps; and their formats."""
    run, data = fields.get("run"), fields.get("data")
    if not isinstance(data, dict):
        return []
    sources = {
        name: [one for one in group if isinstance(one, dict)]
        for name in ("train", "eval")
        if isinstance(group := data.get(name), list)
    }
    weighted = {
        name: [one.get("weight") is not None for one in group] for name, group in sources.items()
    }
    found = []
    if any(weighted.get("eval", [])):
        number = weighted["eval"].index(True)
        found.append(
            f"data.eval.{number}.weight: every data set is evaluated by itself, as a whole. Leave it out."
        )
    if any(weighted.get("train", [])):
        if not all(weighted["train"]):
            number = weighted["train"].index(False)
            found.append(
                f"data.train.{number}.weight: missing. All sources have a weight, or none: data.train.{number}.weight=1."
            )
        if isinstance(run, dict) and run.get("epochs") is not None:
            found.append(
                "data.train.0.weight: with weights, sources end at different times and are repeated, so that there are no "
                "epochs. Give run.steps, or leave the weights out."
            )
    formats = [one.get("format") for group in sources.values() for one in group]
    has_messages = any(name not in ("text", "tokens") for name in formats)
    if data.get("chat_template") is not None and not has_messages:
        found.append(
            f"data.chat_template = {yaml_io.format_value(data['chat_template'])}: no source has messages or prompt_completion to "
            "write with it. Leave it out."
        )
    return found


def _check_exactly_one(
    fields: dict[str, Any], group: str, names: tuple[str, str], role: str, example: str
) -> list[str]:
    """The problem of two fields of a group of which exactly one has to be given."""
    fields_of = fields.get(group)
    if not isinstance(fields_of, dict):
        return []
    there = [name for name in names if fields_of.get(name) is not None]
    if not there:
        return [
            f"{group}.{names[0]}, {group}.{names[1]}: both missing. One of them {role}, for example {example}."
        ]
    if len(there) == 2:
        said = ", ".join(
            f"{group}.{name} = {yaml_io.format_value(fields_of[name])}" for name in names
        )
        return [
            f"{said}: only one of them {role}. Leave one out, or write {group}.{names[0]}=null or {group}.{names[1]}=null."
        ]
    return []
