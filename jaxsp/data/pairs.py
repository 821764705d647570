"""Formats of records with two documents, of which only completions have a loss.

Source: as in chats.py. Differs: KTOTrainer pairs completions with other prompts inside each batch,
    so that the pairs depend on the batch size. Here a record takes the completion of the next one.
"""

import contextlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from jaxsp.core.errors import UserError
from jaxsp.data import chats, records
from jaxsp.data.chats import Chat
from jaxsp.data.records import (
    FIRST_REFERENCE,
    IS_DESIRABLE,
    SECOND_REFERENCE,
    Record,
    RecordEntry,
    parse_if_string,
    type_name,
)
from jaxsp.data.source import SYSTEM_FIELDS, Source, SourceRecord, suggest_ignoring

_REFERENCE_FIELDS = {"ref_chosen_logps": FIRST_REFERENCE, "ref_rejected_logps": SECOND_REFERENCE}

_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Labels as text, as csv has them."""

_OWN_PAIRS = "jaxsp computes it, because it pairs completions with other prompts in its own way"


class Preference(Chat):
    """`chosen` and `rejected`, and `prompt` unless both begin with it."""

    format: Literal["preference"] = "preference"
    required = ("chosen", "rejected")
    optional = ("prompt", *_REFERENCE_FIELDS, *Chat.optional)
    other_fields = ("prompt", *_REFERENCE_FIELDS, *SYSTEM_FIELDS)
    refused: ClassVar[Mapping[str, str]] = {
        "margin": "no objective reads a margin of each record. Remove it",
        **Chat.refused,
    }
    stand_ins = ("preferred_output", "non_preferred_output")  # OpenAI
    num_documents = 2
    values: ClassVar[Mapping[str, Any]] = {FIRST_REFERENCE: math.nan, SECOND_REFERENCE: math.nan}
    has_common_loss_start = True

    def adapt(self, record: Record) -> tuple[Record, Source]:
        prompt = parse_if_string(record.get("input"), "input") or {}
        if not isinstance(prompt, dict):
            raise UserError(f"input is {type_name(prompt)}, not an object.")
        names = dict(zip(self.stand_ins, self.required, strict=True))
        others = {names.get(name, name): value for name, value in record.items() if name != "input"}
        return others | {"prompt": prompt.get("messages"), "tools": prompt.get("tools")}, self

    def read_content(self, record: SourceRecord) -> Record:
        fields: tuple[str, ...] = self.required
        suggestion = ""
        # an empty prompt is a prompt
        if record.name("prompt") in record.values:
            fields = ("prompt", *fields)
            ignoring = suggest_ignoring("prompt")
            suggestion = f". If chosen and rejected begin with the prompt, set {ignoring}"
        content = chats.read_contents(record, fields, suggestion=suggestion)
        chosen = content["chosen"]
        rejected = content["rejected"]
        if chosen == rejected:
            raise UserError("chosen and rejected are identical. Leave the record out.")
        prompt = content.get("prompt")
        if prompt is None:
            return _extract_prompt(chosen, rejected)
        has_messages = isinstance(prompt, list)
        if has_messages and chosen[: len(prompt)] == prompt == rejected[: len(prompt)]:
            raise UserError(f"the prompt would be there twice{suggestion}.")
        return content

    def read_values(self, record: SourceRecord) -> Record:
        """Returns the log-probabilities of the reference model; NaN if there are none."""
        given = [field for field in _REFERENCE_FIELDS if record.find(field) is not None]
        if len(given) == 1:
            (missing,) = _REFERENCE_FIELDS.keys() - given
            raise UserError(
                f"has {record.name(given[0])}, and no {record.name(missing)}. Give both, or set "
                f"{suggest_ignoring(given[0])}."
            )
        references = {**self.values}
        for field in given:
            value = record.find(field)
            number = math.nan
            with contextlib.suppress(TypeError, ValueError):
                number = float(value)
            if isinstance(value, bool) or not math.isfinite(number):
                shown = records.show(value)
                raise UserError(f"{record.name(field)} is {shown}, not a finite number.")
            references[_REFERENCE_FIELDS[field]] = number
        return references


def _extract_prompt(chosen: Any, rejected: Any) -> Record:
    """Takes the beginning that two texts, or two conversations, have in common as their prompt.

    Each completion keeps at least one character or message. A space at the end of a text prompt
    becomes the first character of the completions, because most tokens of words begin with one.

    Source: `extract_prompt` of TRL.
    """
    shorter = min(len(chosen), len(rejected))
    if not shorter:
        raise UserError("chosen or rejected is empty, and without prompt both must begin with it.")
    pairs = enumerate(zip(chosen, rejected, strict=False))
    length = next((index for index, (left, right) in pairs if left != right), None)
    if length is None:
        length = shorter - 1
    elif chosen[length - 1 : length] == " ":
        length -= 1
    if not length and isinstance(chosen, list):
        raise UserError(
            "chosen and rejected have no message in common before their last one, to be the "
            "prompt. Give it as prompt."
        )
    return {"prompt": chosen[:length], "chosen": chosen[length:], "rejected": rejected[length:]}


class Unpaired(Chat):
    """`prompt`, `completion` and `label` (true: a desirable completion)."""

    format: Literal["unpaired"] = "unpaired"
    required = ("prompt", "completion", "label")
    refused: ClassVar[Mapping[str, str]] = {
        "ref_logps": _OWN_PAIRS,  # of TRL's data sets for KTO
        "ref_KL_logps": _OWN_PAIRS,
        **Chat.refused,
    }
    num_documents = 2
    values: ClassVar[Mapping[str, Any]] = {IS_DESIRABLE: False}

    def read_values(self, record: SourceRecord) -> Record:
        value = record.get("label")
        is_desirable = _LABELS.get(str(value).strip().lower())
        if is_desirable is None:
            raise UserError(
                f"{record.name('label')} is {records.show(value)}: it must be true (a desirable "
                "completion) or false."
            )
        return {IS_DESIRABLE: is_desirable}

    def connect(self, entries: Iterator[RecordEntry]) -> Iterator[RecordEntry]:
        """Adds to each usable record the completion of the next one, and to the last that of the
        first: KTO estimates its reference point from prompts with completions of other prompts."""
        entries, later = itertools.tee(entries)
        usable = (entry for entry in later if entry["problem"] is None)
        first = next(usable)
        following = itertools.chain(usable, [first])
        bad: list[RecordEntry] = []
        for entry in entries:
            if entry["problem"] is not None:
                bad.append(entry)
            elif (next_entry := next(following)) is not entry:
                _add_mismatched(entry, next_entry)
            else:
                problem = (
                    f"only one record can be used, {first['place']}: KTO pairs the prompt of a "
                    "record with the completion of another. Give at least two."
                )
                bad += [each for each in entries if each["problem"] is not None]
                raise UserError([*records.list_examples(bad), problem])
            yield entry


def _add_mismatched(entry: RecordEntry, next_entry: RecordEntry) -> None:
    record = json.loads(entry["record"])
    completion = json.loads(next_entry["record"])["completion"]
    if type(record["prompt"]) is not type(completion):
        raise UserError(
            f"{entry['place']}, {next_entry['place']}: one record is text, the other messages, and "
            "KTO pairs the prompt of a record with the completion of another. Make two sources."
        )
    entry["record"] = json.dumps(record | {"mismatched_completion": completion}, ensure_ascii=False)
