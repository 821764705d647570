"""Examples of a source's records, encoded as training encodes them."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxsp.config.data_schema import DataConfig, SourceConfig
from jaxsp.core.errors import UserError
from jaxsp.data.chat import template_text
from jaxsp.data.chat.chat import RenderedRecord
from jaxsp.data.ingest import formats
from jaxsp.data.ingest.formats import IS_DESIRABLE
from jaxsp.data.tokenization import documents
from jaxsp.data.tokenization.documents import EncodedDocument, EncodedRecord

if TYPE_CHECKING:
    import datasets
    import transformers

_MAX_SEARCHED = 10_000
"""Number of records that are searched for one of each kind."""


class Example(NamedTuple):
    """An encoded document of a record."""

    place: str
    """Place of the record, and the document's name if it has several."""
    tokens: np.ndarray
    labels: np.ndarray | None
    kinds: list[str]
    """Properties of a chat that the examples before it do not have."""


def encode_examples(
    dataset: "datasets.Dataset",
    *,
    source: SourceConfig,
    data: DataConfig,
    tokenizer: "transformers.PreTrainedTokenizerBase | None",
    num_records: int | None = None,
) -> Iterator[Example]:
    """Yields the documents of the first usable records, as `tokenize_dataset` encodes them.

    Args:
        dataset: the records of `sources.read`.
        num_records: None: the first one, and among the next ones one of each kind of chat.
    Raises: UserError if there is none, and for a bad record before one, unless `data` skips them.
    """
    record_format = formats.FORMATS[source.format]
    options = None
    if not record_format.is_tokenized:
        assert tokenizer is not None, "the config requires a tokenizer unless records are tokens"
        options = documents.resolve_options(source, data=data, tokenizer=tokenizer)
    num_examples = 0
    seen: set[str] = set()
    for index, entry in enumerate(dataset):
        if num_examples == num_records:
            break
        if num_examples and num_records is None and index >= _MAX_SEARCHED:
            break
        if entry["problem"] is not None:
            continue
        kinds = list_kinds(json.loads(entry["record"])) if record_format.is_chat else []
        kinds = [kind for kind in kinds if kind not in seen]
        if num_examples and num_records is None and not kinds:
            if record_format.is_chat:
                continue
            break
        encoded: EncodedRecord
        if options is not None:
            (encoded,) = documents.encode_records([entry[record_format.column]], options)
        else:
            labels = np.asarray(entry["labels"], np.int32) if "labels" in entry else None
            tokens = np.asarray(entry["input_ids"], np.int32)
            rendered = RenderedRecord(text="")
            encoded = (EncodedDocument(rendered=rendered, tokens=tokens, labels=labels),)
        if isinstance(encoded, str):
            if data.on_bad_record == "skip":
                continue
            raise UserError(
                f"{entry['place']}: {encoded} Correct it, or leave it out: data.on_bad_record=skip."
            )
        if len(encoded[0].tokens):
            num_examples += 1
            seen.update(kinds)
            for document in encoded:
                name = document.rendered.name
                if name == "completion":
                    name += " (desirable)" if entry[IS_DESIRABLE] else " (undesirable)"
                place = f"{entry['place']}: {name}" if name else entry["place"]
                yield Example(place, document.tokens, document.labels, kinds)
    if not num_examples:
        raise UserError("no record has a token. Give at least one that has.")


def list_kinds(record: dict[str, Any]) -> list[str]:
    """Returns the properties of a chat that a template may write in ways of its own."""
    messages = template_text.list_messages(record)
    answers = [message for message in messages if message["role"] == template_text.ASSISTANT]
    kinds = {
        "tools": bool(record.get("tools")),
        "tool calls": any(map(template_text.list_tool_calls, answers)),
        "reasoning": any(map(template_text.get_reasoning, answers)),
        "reasoning in several turns": sum(map(bool, map(template_text.get_reasoning, answers))) > 1,
        "several turns": len(answers) > 1,
        "a system message": any(message["role"] == "system" for message in messages),
        "messages without loss": not all(map(template_text.has_loss, messages)),
        "template arguments": bool(record.get("chat_template_kwargs")),
    }
    return [kind for kind, is_present in kinds.items() if is_present]
