"""Renders records and encodes them as documents of tokens, one or two for each record."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import UserError
from jaxsp.data.chat import chat, chat_template, template_text
from jaxsp.data.chat.chat import ChatOptions, RenderedRecord
from jaxsp.data.data_config import DataConfig
from jaxsp.data.formats.records import BARE_ANSWERS, FIRST_TOKENS, IS_DESIRABLE
from jaxsp.data.formats.source import Source
from jaxsp.data.ingest.sources import Records
from jaxsp.data.tokenization.encoding import TextEncoder

if TYPE_CHECKING:
    import transformers


class EncodedDocument(NamedTuple):
    """A document of a record."""

    rendered: RenderedRecord
    tokens: np.ndarray
    labels: np.ndarray | None
    """None: every token has loss."""


EncodedRecord = tuple[EncodedDocument, ...] | str
"""The documents of a record, or the problem that it has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizeOptions:
    """Options that determine the tokens of a source's records."""

    source: Source
    chat: ChatOptions

    @property
    def columns(self) -> list[str]:
        """Columns of the tokenized dataset with token ids."""
        has_full_loss = not self.source.is_chat or self.chat.has_full_loss
        return ["tokens"] if has_full_loss else ["tokens", "labels"]

    @property
    def count_columns(self) -> list[str]:
        """Columns of the tokenized dataset with a number for each record."""
        bare_answers = [BARE_ANSWERS] if self.source.is_chat else []
        return bare_answers + ([FIRST_TOKENS] if self.source.num_documents > 1 else [])


def resolve_options(
    source: Source, *, data: DataConfig, tokenizer: "transformers.PreTrainedTokenizerBase"
) -> TokenizeOptions:
    """Returns the options for a source.
    Raises: UserError if it needs a chat template, and there is none."""
    template = None
    is_set = data.chat_template is not None or data.chat_template_date is not None
    if source.needs_template or is_set or data.chat_template_kwargs:
        template = chat_template.load_template(data, tokenizer)
    chat_options = ChatOptions(
        tokenizer=tokenizer,
        template=template,
        has_full_loss=data.train_on == "all",
        earlier_reasoning=data.earlier_reasoning,
        date=data.chat_template_date,
    )
    return TokenizeOptions(source=source, chat=chat_options)


def encode_records(records: Sequence[str], options: TokenizeOptions) -> list[EncodedRecord]:
    """Returns the documents of texts, or of records as JSON; or their problem."""
    rendered: dict[int, tuple[RenderedRecord, ...]] = {}
    encoded: list[EncodedRecord] = [""] * len(records)
    for index, record in enumerate(records):
        try:
            rendered[index] = (
                chat.render_record(json.loads(record), options.chat)
                if options.source.is_chat
                else (RenderedRecord(text=record, is_plain=True),)
            )
        except UserError as error:
            encoded[index] = str(error)
    encoder = TextEncoder(options.chat.tokenizer)
    encodings = iter(encoder.tokenize([*itertools.chain.from_iterable(rendered.values())]))
    for index, documents in rendered.items():
        pairs = [*zip(documents, itertools.islice(encodings, len(documents)), strict=True)]
        try:
            encoded_documents = []
            for document, encoding in pairs:
                with chat.at_document(document.name):
                    encoded_documents.append(
                        EncodedDocument(document, *encoder.encode(document, encoding))
                    )
            if options.source.has_common_loss_start:
                _align_loss_starts(encoded_documents)
            encoded[index] = tuple(encoded_documents)
        except UserError as error:
            encoded[index] = str(error)
    return encoded


def _align_loss_starts(documents: list[EncodedDocument]) -> None:
    """Begins the loss of both documents at the same token, after tokens that are the same.

    A token may hold the end of the prompt and the beginning of one of the completions. Their
    log-probabilities can be compared if both are conditional on the same tokens.

    Source: DPOTrainer of TRL 1.16. Differs: a token that both documents have is not given a loss
        because the prompt has another one when nothing follows.
    """
    first, second = documents
    shorter = min(len(first.tokens), len(second.tokens))
    differs = np.append(first.tokens[:shorter] != second.tokens[:shorter], True)
    starts = [int(np.argmax(each.labels != NO_LABEL)) for each in documents]
    begin = min(*starts, int(differs.argmax()))
    for document, start in zip(documents, starts, strict=True):
        assert document.labels is not None, "only completions have a loss"
        document.labels[begin:start] = document.tokens[begin:start]


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
    records: Records,
    *,
    source: Source,
    data: DataConfig,
    tokenizer: "transformers.PreTrainedTokenizerBase | None",
    num_records: int | None = None,
) -> Iterator[Example]:
    """Yields the documents of the first usable records, as `tokenize_dataset` encodes them.

    Args:
        num_records: None: the first one, and among the next ones one of each kind of chat.
    Raises: UserError if there is none, and for a bad record before one, unless `data` skips them.
    """
    options = None
    if source.needs_tokenizer:
        assert tokenizer is not None, "the config requires a tokenizer unless records are tokens"
        options = resolve_options(source, data=data, tokenizer=tokenizer)
    seen: set[str] = set()
    num_examples = 0
    for index, entry in enumerate(records.entries()):
        is_done = num_examples and num_records is None
        if num_examples == num_records or (is_done and index >= _MAX_SEARCHED):
            break
        if entry["problem"] is not None:
            continue
        kinds = list_kinds(json.loads(entry["record"])) if source.is_chat else []
        kinds = [kind for kind in kinds if kind not in seen]
        if is_done and not kinds:
            if source.is_chat:
                continue
            break
        encoded: EncodedRecord
        if options is not None:
            (encoded,) = encode_records([entry[source.column]], options)
        else:
            labels = np.asarray(entry["labels"], np.int32) if "labels" in entry else None
            tokens = np.asarray(entry["input_ids"], np.int32)
            encoded = (EncodedDocument(RenderedRecord(text=""), tokens, labels),)
        if isinstance(encoded, str):
            if data.on_bad_record == "skip":
                continue
            raise UserError(
                f"{entry['place']}: {encoded} Correct it, or leave it out: data.on_bad_record=skip."
            )
        if not len(encoded[0].tokens):
            continue
        num_examples += 1
        seen.update(kinds)
        for rendered, tokens, labels in encoded:
            name = rendered.name
            if name == "completion":
                name += " (desirable)" if entry[IS_DESIRABLE] else " (undesirable)"
            place = f"{entry['place']}: {name}" if name else entry["place"]
            yield Example(place, tokens, labels, kinds)
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
