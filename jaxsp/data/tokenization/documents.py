"""Renders records and encodes them as documents of tokens, one or two for each record."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxsp.config.data_schema import DataConfig, SourceConfig
from jaxsp.core.batch import NO_LABEL
from jaxsp.data.chat import chat, chat_template
from jaxsp.data.chat.chat import ChatOptions, RenderedRecord
from jaxsp.data.chat.template_text import RecordError
from jaxsp.data.ingest import formats
from jaxsp.data.ingest.formats import Format
from jaxsp.data.tokenization import encoding
from jaxsp.data.tokenization.encoding import EncodedText

if TYPE_CHECKING:
    import transformers


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedDocument:
    """A document of a record."""

    rendered: RenderedRecord
    tokens: np.ndarray
    labels: np.ndarray | None
    """None: every token has loss."""


EncodedRecord = tuple[EncodedDocument, ...] | RecordError
"""The documents of a record, or the reason why it cannot be used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizeOptions:
    """Options that determine the tokens of a source's records."""

    format: Format
    chat: ChatOptions

    @property
    def columns(self) -> list[str]:
        """Columns of the tokenized dataset with token ids."""
        has_full_loss = self.format.is_text or self.chat.has_full_loss
        return ["tokens"] if has_full_loss else ["tokens", "labels"]


def resolve_options(
    source: SourceConfig, *, data: DataConfig, tokenizer: "transformers.PreTrainedTokenizerBase"
) -> TokenizeOptions:
    """Returns the options for a source.

    Raises: UserError if it needs a chat template, and there is none.
    """
    record_format = formats.FORMATS[source.format]
    template = None
    is_set = data.chat_template is not None or data.chat_template_date is not None
    if record_format.needs_template or is_set or data.chat_template_kwargs:
        template = chat_template.load_template(data, tokenizer)
    chat_options = ChatOptions(
        tokenizer=tokenizer,
        template=template,
        has_full_loss=data.train_on == "all",
        earlier_reasoning=data.earlier_reasoning,
        date=data.chat_template_date,
    )
    return TokenizeOptions(format=record_format, chat=chat_options)


def render_and_encode(records: Sequence[str], options: TokenizeOptions) -> list[EncodedRecord]:
    """Returns the documents of texts, or of records as JSON; or their problem."""
    rendered = [_render_record(record, options) for record in records]
    texts = [each for record in rendered if isinstance(record, tuple) for each in record]
    encoded = iter(encoding.encode_texts(texts, options.chat.tokenizer))
    return [
        record
        if isinstance(record, RecordError)
        else _join_documents(record, list(itertools.islice(encoded, len(record))), options.format)
        for record in rendered
    ]


def _join_documents(
    rendered: tuple[RenderedRecord, ...],
    encoded: list[EncodedText],
    record_format: Format,
) -> EncodedRecord:
    documents = []
    for document, result in zip(rendered, encoded, strict=True):
        if isinstance(result, RecordError):
            return RecordError(f"{document.name}: {result}") if document.name else result
        documents.append(EncodedDocument(rendered=document, tokens=result[0], labels=result[1]))
    if record_format.has_common_loss_start:
        _align_loss_starts(documents)
    return tuple(documents)


def _align_loss_starts(documents: list[EncodedDocument]) -> None:
    """Begins the loss of both documents at the same token, after tokens that are the same.

    A token may hold the end of the prompt and the beginning of one of the completions. Their
    log-probabilities can be compared if both are conditional on the same tokens.

    Source: DPOTrainer of TRL 1.16. Differs: a token that both documents have is not given a loss
        because the prompt has another one when nothing follows.
    """
    first, second = documents
    assert first.labels is not None, "only completions have a loss"
    assert second.labels is not None, "only completions have a loss"
    shorter = min(len(first.tokens), len(second.tokens))
    differs = np.append(first.tokens[:shorter] != second.tokens[:shorter], True)
    starts = [int((labels != NO_LABEL).argmax()) for labels in (first.labels, second.labels)]
    start = min(*starts, int(differs.argmax()))
    first.labels[start : starts[0]] = first.tokens[start : starts[0]]
    second.labels[start : starts[1]] = second.tokens[start : starts[1]]


def _render_record(
    record: str, options: TokenizeOptions
) -> tuple[RenderedRecord, ...] | RecordError:
    if options.format.is_text:
        return (RenderedRecord(text=record, is_plain=True),)
    try:
        return chat.render_record(json.loads(record), options.chat)
    except RecordError as problem:
        return problem
