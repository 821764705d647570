"""Checks of records with two completions of a prompt, which become two documents.

Source: the data sets of DPOTrainer and KTOTrainer in TRL 1.16, and its `extract_prompt`. Differs:
    KTOTrainer pairs completions with other prompts inside each batch, so that the pairs depend on
    the batch size. Here a record takes the completion of the next one.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

from jaxsp.config.data_schema import SourceConfig
from jaxsp.core.errors import UserError
from jaxsp.data.chat.template_text import RecordError
from jaxsp.data.ingest import known_fields, record_cache, record_checks
from jaxsp.data.ingest.known_fields import Record
from jaxsp.data.ingest.record_cache import RecordEntry

FIRST_REFERENCE = "first_reference"
SECOND_REFERENCE = "second_reference"
"""Columns of preferences: log-probability of each document under the reference model, float64; NaN
if the record has none."""

IS_DESIRABLE = "is_desirable"
"""Column of unpaired records: True if the first document's completion is a good one."""

_REFERENCE_FIELDS = {
    "ref_chosen_logps": FIRST_REFERENCE,
    "ref_rejected_logps": SECOND_REFERENCE,
}

PREFERENCE_OPTIONAL = ("prompt", *_REFERENCE_FIELDS)
"""Optional fields of preferences, which `ignore_fields` may list."""

_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Labels as text, as csv has them."""

_MAX_SHOWN_CHARS = 20


def check_preference(record: Record, source: SourceConfig, has_labels: bool) -> Record:
    known_fields.refuse_fields(record, known_fields.REFUSED_IN_PREFERENCES, source)
    fields = ["chosen", "rejected"]
    suggestion = ""
    # an empty prompt is a prompt
    if source.names.get("prompt", "prompt") in record:
        fields.insert(0, "prompt")
        ignoring = known_fields.suggest_ignoring("prompt")
        suggestion = f". If chosen and rejected begin with the prompt, set {ignoring}"
    content = record_checks.read_contents(record, fields, source, suggestion=suggestion)
    if content["chosen"] == content["rejected"]:
        raise RecordError("chosen and rejected are identical. Leave the record out")
    if "prompt" not in content:
        content = _extract_prompt(content["chosen"], content["rejected"])
    elif _contain_prompt(**content):
        raise RecordError(f"the prompt would be there twice{suggestion}")
    content = record_checks.add_system(content, record, source)
    references = _read_references(record, source)
    return record_checks.serialize(content, record, source) | references


def _contain_prompt(prompt: Any, chosen: Any, rejected: Any) -> bool:
    """True if both completions are conversations that begin with the prompt."""
    if isinstance(prompt, str):
        return False
    return chosen[: len(prompt)] == prompt == rejected[: len(prompt)]


def _extract_prompt(chosen: Any, rejected: Any) -> Record:
    """Takes the beginning that two texts, or two conversations, have in common as their prompt.

    Each completion keeps at least one character or message. A space at the end of a text prompt
    becomes the first character of the completions, because most tokens of words begin with one.
    """
    shorter = min(len(chosen), len(rejected))
    if not shorter:
        raise RecordError("chosen or rejected is empty, and without prompt both must begin with it")
    pairs = enumerate(zip(chosen, rejected, strict=False))
    length = next((index for index, (left, right) in pairs if left != right), None)
    if length is None:
        length = shorter - 1
    elif chosen[length - 1 : length] == " ":
        length -= 1
    if not length and isinstance(chosen, list):
        raise RecordError(
            "chosen and rejected have no message in common before their last one, to be the "
            "prompt. Give it as prompt"
        )
    return {"prompt": chosen[:length], "chosen": chosen[length:], "rejected": rejected[length:]}


def _read_references(record: Record, source: SourceConfig) -> Record:
    """Returns the log-probabilities of the reference model; NaN if there are none."""
    names = {field: source.names.get(field, field) for field in _REFERENCE_FIELDS}
    given = {
        field: record[name]
        for field, name in names.items()
        if record_checks.has_field(record, name)
    }
    if len(given) == 1:
        (missing,) = names.keys() - given
        raise RecordError(
            f"has {names[next(iter(given))]}, and no {names[missing]}. Give both, or set "
            f"{known_fields.suggest_ignoring(next(iter(given)))}"
        )
    return {
        column: _parse_finite(given[field], names[field]) if given else math.nan
        for field, column in _REFERENCE_FIELDS.items()
    }


def _parse_finite(value: Any, name: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RecordError(f"{name} is {_show(value)}, not a finite number")
    return number


def check_unpaired(record: Record, source: SourceConfig, has_labels: bool) -> Record:
    known_fields.refuse_fields(record, known_fields.REFUSED_IN_UNPAIRED, source)
    content = record_checks.read_contents(record, ("prompt", "completion"), source)
    name, value = record_checks.get_field(record, "label", source)
    is_desirable = _LABELS.get(str(value).strip().lower())
    if is_desirable is None:
        raise RecordError(
            f"{name} is {_show(value)}: it must be true (a desirable completion) or false"
        )
    content = record_checks.add_system(content, record, source)
    return record_checks.serialize(content, record, source) | {IS_DESIRABLE: is_desirable}


def _show(value: Any) -> str:
    shown = repr(value)
    is_short = isinstance(value, bool | int | float | str) and len(shown) <= _MAX_SHOWN_CHARS
    return shown if is_short else record_checks.type_name(value)


def add_mismatched_completions(entries: Iterator[RecordEntry]) -> Iterator[RecordEntry]:
    """Adds to each usable record the completion of the next one, and to the last that of the first.

    KTO estimates its reference point from prompts with completions of other prompts.

    Raises: UserError if only one record can be used, with the problems of others, and if text and
        messages are mixed.
    """
    bad: list[tuple[str, str]] = []
    # a usable entry, and the bad ones after it
    waiting: list[RecordEntry] = []
    first: RecordEntry | None = None
    for entry in entries:
        if entry["problem"] is not None and len(bad) < record_cache.MAX_NAMED_RECORDS:
            bad.append((entry["place"], entry["problem"]))
        if entry["problem"] is None and waiting:
            yield _add_mismatched(waiting[0], entry)
            yield from waiting[1:]
            waiting = []
        if entry["problem"] is None and first is None:
            first = entry
        if entry["problem"] is None or waiting:
            waiting.append(entry)
        else:
            yield entry
    assert first is not None, "a source has a usable record"
    if waiting[0] is first:
        raise UserError(
            [
                *record_cache.list_examples(bad),
                f"only one record can be used, {first['place']}: KTO pairs the prompt of a record "
                "with the completion of another. Give at least two.",
            ]
        )
    yield _add_mismatched(waiting[0], first)
    yield from waiting[1:]


def _add_mismatched(entry: RecordEntry, next_entry: RecordEntry) -> RecordEntry:
    record = json.loads(entry["record"])
    completion = json.loads(next_entry["record"])["completion"]
    if type(record["prompt"]) is not type(completion):
        raise UserError(
            f"{entry['place']}, {next_entry['place']}: one record is text, the other messages, and "
            "KTO pairs the prompt of a record with the completion of another. Make two sources."
        )
    record["mismatched_completion"] = completion
    return entry | {"record": json.dumps(record, ensure_ascii=False)}
