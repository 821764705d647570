"""Rules that involve several fields of a config.

They check the raw fields and not the validated config, which exists only if each field is valid.
So one error lists their problems together with those that pydantic finds.
"""

from collections.abc import Iterator
from typing import Any

from jaxsp.config import eval_checks, objective_checks, optimizer_checks, yaml_io
from jaxsp.config.adapter_schema import AdapterConfig
from jaxsp.config.data_schema import PAIR_FORMATS, DataConfig
from jaxsp.config.schema import Config, MemoryConfig
from jaxsp.core import errors

Sections = dict[str, dict[str, Any]]
"""The fields that a config sets, by section. Pydantic reports a section that is not a mapping."""

_EVAL_SUGGESTION = (
    "Name a data set: data.eval='[{source: held-out/*.txt, format: text}]', "
    "or hold out training documents: data.eval_fraction=0.05."
)


def check(fields: dict[str, Any]) -> list[str]:
    """Returns a message for each rule that the nested fields of a config break."""
    sections: Sections = {name: {} for name in Config.model_fields}
    sections |= {name: value for name, value in fields.items() if isinstance(value, dict)}
    sources = {
        f"data.{name}.{number}": source
        for name in ("train", "eval")
        for number, source in enumerate(_list_sources(sections, name))
    }
    return [
        *_check_exactly_one(
            fields, "run.steps", "run.epochs", "the length of training, for example run.epochs=1"
        ),
        *_check_exactly_one(
            fields,
            "model.source",
            "model.config",
            "the model, for example model.source=Qwen/Qwen3-0.6B",
        ),
        *_check_data(sections, [*sources.values()]),
        *_check_adapter(sections),
        *_check_memory(sections),
        *_check_nul(fields, ""),
        *_check_best(sections),
        *optimizer_checks.check(sections["optimizer"]),
        *objective_checks.check(
            sections["objective"], sections["data"], sources, sections["adapter"]
        ),
        *_check_eval_sets(sections),
        *eval_checks.check(sections["eval"]),
        *_check_early_stopping(sections),
    ]


def _check_exactly_one(fields: dict[str, Any], first: str, second: str, role: str) -> Iterator[str]:
    """Checks that exactly one of two fields of a section is set."""
    section, _, _ = first.partition(".")
    if not isinstance(fields.get(section), dict):
        return
    values = [fields[section].get(name.partition(".")[2]) for name in (first, second)]
    if values == [None, None]:
        yield f"{first}, {second}: missing. Set one of them for {role}."
    elif None not in values:
        yield (
            f"{first} = {yaml_io.format_value(values[0])}, "
            f"{second} = {yaml_io.format_value(values[1])}: only one of them may be set. "
            f"Write {first}=null or {second}=null."
        )


def _list_sources(sections: Sections, name: str) -> list[dict[str, Any]]:
    """The entries of data.train or data.eval that are mappings."""
    entries = sections["data"].get(name)
    if not isinstance(entries, list | tuple):
        return []
    return [entry for entry in entries if isinstance(entry, dict)]


def _check_data(sections: Sections, sources: list[dict[str, Any]]) -> Iterator[str]:
    """Checks weights, chat templates, labels and segments. Args: sources: for training and eval."""
    has_weight, has_eval_weight = (
        [source.get("weight") is not None for source in _list_sources(sections, name)]
        for name in ("train", "eval")
    )
    if any(has_eval_weight):
        yield (
            f"data.eval.{has_eval_weight.index(True)}.weight: must not be set, because each eval "
            "set is evaluated separately, as a whole. Leave it out."
        )
    if any(has_weight) and not all(has_weight):
        index = has_weight.index(False)
        yield (
            f"data.train.{index}.weight: missing. Set it for all sources or for none: "
            f"data.train.{index}.weight=1."
        )
    if any(has_weight) and sections["run"].get("epochs") is not None:
        yield (
            "data.train.0.weight: must not be set with run.epochs, because weighted sources end at "
            "different times and are repeated. Set run.steps, or leave the weights out."
        )

    data = sections["data"]
    has_messages = any(source.get("format") not in ("text", "tokens") for source in sources)
    for name in ("chat_template", "chat_template_kwargs"):
        value = data.get(name)
        if value and not has_messages:
            yield (
                f"data.{name} = {yaml_io.format_value(value)}: has no effect, because all "
                "sources have the format text or tokens. Leave it out."
            )

    formats = [source.get("format") for source in sources if source.get("format") in PAIR_FORMATS]
    if data.get("train_on") == "all" and formats:
        yield (
            f"data.train_on = all: only completions of records with format: {formats[0]} have a "
            "loss. Use data.train_on=assistant."
        )
    default = DataConfig.model_fields["max_segments_per_row"].default
    max_segments: Any = data.get("max_segments_per_row")
    row_tokens: Any = data.get("row_tokens")
    is_known = isinstance(row_tokens, int) and isinstance(max_segments, int)
    # A run saves its config with all defaults, so this default must be valid for short rows too
    if is_known and default != max_segments > row_tokens > 0:
        yield (
            f"data.max_segments_per_row = {max_segments}: must be at most {row_tokens}, the tokens "
            f"of a row. Use {min(default, row_tokens)}, or the number your documents need."
        )


def _check_adapter(sections: Sections) -> Iterator[str]:
    """Checks that fields of the adapter are set only if it has them."""
    adapter = sections["adapter"]
    if adapter.get("type") == "dora" and adapter.get("dropout"):
        yield (
            f"adapter.dropout = {yaml_io.format_value(adapter['dropout'])}: must be 0 with "
            "adapter.type = dora. Set adapter.type=lora, or adapter.dropout=0."
        )
    if adapter.get("type", "none") != "none":
        return
    default = AdapterConfig()
    for name, value in adapter.items():
        is_set = value is not None and value != [] and value != getattr(default, name, value)
        if is_set:
            yield (
                f"adapter.{name} = {yaml_io.format_value(value)}: has no effect, because "
                "adapter.type is none. Set adapter.type=lora, or leave it out."
            )


def _check_memory(sections: Sections) -> Iterator[str]:
    """Checks the mesh, and that memory.remat agrees with what is to be offloaded."""
    if sections["mesh"].get("seq") == "auto" and sections["mesh"].get("data", -1) != -1:
        yield "mesh.seq = auto: needs a mesh.data that follows from it. Use mesh.data=-1."

    offloaded = sections["memory"].get("offload_activations")
    is_full = sections["memory"].get("remat") == "full"
    if is_full and offloaded == "layer_inputs_and_attention":
        yield (
            f"memory.offload_activations = {offloaded}: memory.remat = full keeps no results of "
            "attention. Use memory.offload_activations=layer_inputs, or "
            "memory.remat=save_attention."
        )
    default = MemoryConfig()
    for name in ("offload_every", "offload_during_attention"):
        value = sections["memory"].get(name)
        if value in (None, "never", getattr(default, name)):
            continue
        remat = sections["memory"].get("remat", default.remat)
        written = f"memory.{name} = {yaml_io.format_value(value)}"
        if offloaded != "layer_inputs":
            yield (
                f"{written}: needs layer inputs in host memory. Use "
                f"memory.offload_activations=layer_inputs, or memory.{name}="
                f"{yaml_io.format_value(getattr(default, name))}."
            )
        if remat not in ("auto", "full"):
            yield (
                f"{written}: memory.remat = {remat} keeps more than layer inputs. Use "
                "memory.remat=full."
            )


def _check_nul(value: Any, name: str) -> Iterator[str]:
    """Checks that no text contains NUL, which file names cannot contain."""
    if isinstance(value, str) and "\0" in value:
        text = yaml_io.format_value(value)
        yield f"{name} = {text}: must not contain a NUL character. Remove it."
    entries: Any = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list | tuple):
        entries = enumerate(value)
    for key, entry in entries:
        yield from _check_nul(entry, f"{name}.{key}" if name else str(key))


def _list_eval_names(sections: Sections) -> list[Any]:
    sources = _list_sources(sections, "eval")
    names = [source.get("name") or source.get("source") for source in sources]
    if sections["data"].get("eval_fraction") is not None:
        names.append("held_out")
    return names


def _check_best(sections: Sections) -> Iterator[str]:
    """Checks that keep_best has an eval set to rank checkpoints by, and best_eval names one."""
    keep_best = sections["checkpoint"].get("keep_best", 0)
    best_eval = sections["checkpoint"].get("best_eval")
    names = _list_eval_names(sections)
    stops_early = sections["run"].get("early_stopping_patience") is not None
    if best_eval is not None and not keep_best and not stops_early:
        yield (
            f"checkpoint.best_eval = {best_eval}: has no effect, because checkpoint.keep_best is 0 "
            "and run.early_stopping_patience is null. "
            "Set checkpoint.keep_best=1, or checkpoint.best_eval=null."
        )
    elif isinstance(keep_best, int) and keep_best > 0 and not names:
        yield (
            f"checkpoint.keep_best = {keep_best}: needs an eval set, whose loss ranks the "
            f"checkpoints. {_EVAL_SUGGESTION}"
        )
    elif best_eval is not None and best_eval not in names:
        yield (
            f"checkpoint.best_eval = {best_eval}: must be the name of an eval set. "
            f"Use {errors.format_choices([*names, 'null'])}."
        )


def _check_eval_sets(sections: Sections) -> Iterator[str]:
    """Checks the names of the eval sets, and that there is one to evaluate at the start."""
    names = _list_eval_names(sections)
    holds_out = sections["data"].get("eval_fraction") is not None
    if holds_out and "held_out" in names[:-1]:
        name = f"data.eval.{names.index('held_out')}.name"
        yield (
            f"{name} = held_out: is also the name of the documents that data.eval_fraction holds "
            f"out. Use another name: {name}=held_out-{names.index('held_out')}."
        )
    has_any = names or sections["eval"].get("tasks")
    if not has_any and sections["run"].get("eval_at_start") is True:
        yield f"run.eval_at_start = true: needs an eval set. {_EVAL_SUGGESTION}"
    if sections["eval"].get("long_ppl") is True:
        if not names:
            yield f"eval.long_ppl = true: needs an eval set. {_EVAL_SUGGESTION}"
        if sections["objective"].get("type", "sft") != "sft":
            yield (
                "eval.long_ppl = true: is the perplexity of texts, and objective.type = "
                f"{sections['objective']['type']} compares answers. Use eval.long_ppl=false."
            )
    count = sections["run"].get("generate_samples")
    if not isinstance(count, int) or count < 1:
        return
    if not names:
        yield f"run.generate_samples = {count}: needs an eval set. {_EVAL_SUGGESTION}"
    if sections["objective"].get("type") == "reward":
        yield (
            f"run.generate_samples = {count}: objective.type = reward trains a model that "
            "generates no text. Use run.generate_samples=0."
        )


def _check_early_stopping(sections: Sections) -> Iterator[str]:
    """Checks that a run with early stopping evaluates before its last step, and `epoch`."""
    run = sections["run"]
    for name in ("save_every", "eval_every"):
        if run.get("epochs") is None and run.get(name) == "epoch":
            yield (
                f"run.{name} = epoch: needs run.epochs. "
                f"Use run.epochs=1 instead of run.steps, or run.{name}=100."
            )
    patience = run.get("early_stopping_patience")
    if patience is None:
        for name, default in (("early_stopping_min_delta", 0), ("early_stopping_metric", "loss")):
            if run.get(name, default) not in (default, None):
                yield (
                    f"run.{name} = {yaml_io.format_value(run[name])}: has no effect without "
                    f"run.early_stopping_patience. Set run.early_stopping_patience=3, or "
                    f"run.{name}={default}."
                )
        return
    metric = str(run.get("early_stopping_metric", "loss"))
    objective = sections["objective"].get("type", "sft")
    without = {
        "reward_accuracy": ("sft", "kto"),
        "reward_margin": ("sft",),
        "token_accuracy": ("reward",),
    }
    if objective in without.get(metric, ()):
        yield (
            f"run.early_stopping_metric = {metric}: objective.type = {objective} does not have it. "
            "Use run.early_stopping_metric=loss."
        )
    setting = f"run.early_stopping_patience = {yaml_io.format_value(patience)}"
    if not _list_eval_names(sections):
        yield f"{setting}: needs an eval set. {_EVAL_SUGGESTION}"
        return
    saves_before_end = "save_every" not in run or run["save_every"] is not None
    keeps_best = bool(sections["checkpoint"].get("keep_best"))
    evaluates_checkpoints = keeps_best and saves_before_end
    if run.get("eval_every") is None and not evaluates_checkpoints:
        yield f"{setting}: needs an evaluation before the last step. Set run.eval_every=100."
