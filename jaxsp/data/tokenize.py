"""Tokenizes records once, and caches the result on disk under a fingerprint of all its inputs."""

import collections
import concurrent.futures
import contextlib
import functools
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import pathlib
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import UserError
from jaxsp.data import cache, chat, chat_template, sources, template_text, tokenizers
from jaxsp.data.cache import TokenStats
from jaxsp.data.chat import ChatOptions, RenderedRecord
from jaxsp.data.data_config import DataConfig
from jaxsp.data.encoding import TextEncoder
from jaxsp.data.records import (
    BARE_ANSWERS,
    FIRST_TOKENS,
    IS_DESIRABLE,
    MAX_NAMED_RECORDS,
    RecordEntry,
)
from jaxsp.data.source import Source
from jaxsp.data.sources import Records

if TYPE_CHECKING:
    import datasets
    import transformers

_CACHE_VERSION = 10
"""Part of the cache's name. Increase it when the same file would give another cache."""

_BATCH_SIZE = 2**22
"""Characters of records, or tokens, to encode together. A record has 1 KB to 100 MB, and takes
about 40 times its size in memory while it is tokenized."""


class TokenizedSource(NamedTuple):
    """Tokenized documents of a source."""

    dataset: "datasets.Dataset"
    """Columns `place`, `problem`, `tokens`, and `labels` unless every token has loss; of chats also
    BARE_ANSWERS, and Source.numbers. A record with a problem has no tokens. A record of two
    documents has their tokens one after the other, and the columns FIRST_TOKENS and Source.values.
    """
    stats: TokenStats


def tokenize_dataset(
    records: Records,
    *,
    tokenizer: "transformers.PreTrainedTokenizerBase | None",
    vocab_size: int,
    vocab_suggestion: str = "Use the model's own tokenizer.",
) -> TokenizedSource:
    """Tokenizes the records of a source; labels are not shifted.
    Args: vocab_suggestion: what to do about a token id that is not below `vocab_size`.
    Raises: UserError for bad records, unless they are skipped, for an id without an embedding, and
    without a chat template; DamagedCacheError if the cached tokens must be made again."""
    import datasets

    source = records.source
    data = records.data
    try:
        options = resolve_options(source, data=data, tokenizer=tokenizer)
    except UserError:
        collections.deque(records.entries(), maxlen=0)  # raises what is wrong with the records
        raise
    key: list[Any] = [_CACHE_VERSION, records.fingerprint]
    if options is not None:
        versions = [*map(importlib.metadata.version, ("transformers", "tokenizers", "jinja2"))]
        key += [options.has_full_loss, versions, tokenizers.serialize_files(options.tokenizer)]
        if source.is_chat:
            # the same for a run that keeps the config's template as its tokenizer's own
            template = options.template or options.tokenizer.chat_template
            key += [template, options.earlier_reasoning, options.date]
    folder = pathlib.Path(datasets.config.HF_DATASETS_CACHE) / "jaxsp"
    tokenized, stats = cache.open_or_build(
        folder / f"{datasets.fingerprint.Hasher.hash(key)}.arrow",
        functools.partial(_make_tables, records, options, data.num_workers),
    )
    num_bad, examples = cache.find_bad_records(tokenized, max_examples=MAX_NAMED_RECORDS)
    sources.check_bad_records(num_bad, len(tokenized), examples, data=data)
    for column, extremes in stats.extreme_ids.items():
        for token_id, document in extremes:
            if not 0 <= token_id < vocab_size:
                raise UserError(
                    f"{tokenized[document]['place']}: {column} contain the id {token_id}, but the "
                    f"model's vocab_size is {vocab_size}: ids must be 0 to {vocab_size - 1}. "
                    f"{vocab_suggestion}"
                )
    return TokenizedSource(dataset=tokenized, stats=stats)


def resolve_options(
    source: Source, *, data: DataConfig, tokenizer: "transformers.PreTrainedTokenizerBase | None"
) -> ChatOptions | None:
    """Returns the options for the records of a source; None if they are tokens.
    Raises: UserError if it needs a chat template, and there is none."""
    if not source.needs_tokenizer:
        return None
    assert tokenizer is not None, "the config requires a tokenizer unless records are tokens"
    template = None
    is_set = data.chat_template is not None or data.chat_template_date is not None
    if source.needs_template or is_set or data.chat_template_kwargs:
        template = chat_template.load_template(data, tokenizer)
    return ChatOptions(
        tokenizer=tokenizer,
        template=template,
        has_full_loss=data.train_on == "all",
        earlier_reasoning=data.earlier_reasoning,
        date=data.chat_template_date,
    )


def _make_tables(
    records: Records, options: ChatOptions | None, max_workers: int | None
) -> Iterator[pa.Table]:
    """Yields the tokens of all records, which worker processes make if there are many."""
    from datasets.utils import tqdm

    source = records.source
    # disable=None: not in a log
    entries = tqdm(
        records.entries(), desc=f"Reading {source.source}", unit=" records", delay=3.0, disable=None
    )
    batches = _divide(entries, source.column)
    # macOS does not restrict the cores of a process
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    num_workers = max_workers or min(num_cores, -(-records.num_bytes // source.bytes_per_worker))
    if num_workers <= 1 or options is None:
        for batch in batches:
            yield encode_batch(batch, source, options, has_labels=records.has_labels)
        return
    try:
        with (
            _hide_main(),
            concurrent.futures.ProcessPoolExecutor(
                num_workers,
                # a fork of a process in which JAX has threads can hang
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(source, options, max(num_cores // num_workers, 1)),
            ) as pool,
        ):
            pending: collections.deque[concurrent.futures.Future] = collections.deque()
            for batch in batches:
                pending.append(pool.submit(_encode_in_worker, batch))
                if len(pending) > 2 * num_workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a tokenization worker was killed. If no line above has the reason, memory ran out: "
            f"set data.num_workers={max(num_workers // 2, 1)}."
        ) from None


@contextlib.contextmanager
def _hide_main() -> Iterator[None]:
    """Context in which new processes do not run the user's script again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _divide(entries: Iterable[RecordEntry], column: str) -> Iterator[list[RecordEntry]]:
    """Divides entries into batches of about the same size. Args: column: the content of each."""
    batch: list[RecordEntry] = []
    size = 0
    for entry in entries:
        batch.append(entry)
        size += len(entry.get(column, "")) + 100  # a source may have a million empty ones
        if size > _BATCH_SIZE:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


_worker_options: tuple[Source, ChatOptions]


def _start_worker(source: Source, options: ChatOptions, num_threads: int) -> None:
    global _worker_options
    _worker_options = (source, options)
    if num_threads > 1:
        os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(num_threads)}


def _encode_in_worker(entries: list[RecordEntry]) -> pa.Table:
    return encode_batch(entries, *_worker_options)


def encode_batch(
    entries: list[RecordEntry],
    source: Source,
    options: ChatOptions | None,
    *,
    has_labels: bool = False,
) -> pa.Table:
    """Returns the tokens of records, or their problems: see TokenizedSource.dataset.
    Args: options: None if the records are tokens; has_labels: these tokens have labels."""
    columns: RecordEntry = {"tokens": np.zeros(0, np.int32)}
    if has_labels or (source.is_chat and options is not None and not options.has_full_loss):
        columns["labels"] = columns["tokens"]
    if source.is_chat:
        columns[BARE_ANSWERS] = np.int32(0)
    if source.num_documents > 1:
        columns[FIRST_TOKENS] = np.int32(0)
    columns |= source.values
    columns |= dict.fromkeys(source.numbers, np.zeros(0, np.float32))
    usable = [entry for entry in entries if entry["problem"] is None]
    for entry, record in zip(usable, encode_records(usable, source, options), strict=True):
        if isinstance(record, str):
            entry["problem"] = record
            continue
        entry["tokens"] = np.concatenate([each.tokens for each in record])
        labels = [each.tokens if each.labels is None else each.labels for each in record]
        entry["labels"] = np.concatenate(labels)
        entry[BARE_ANSWERS] = sum(each.rendered.num_bare_answers for each in record)
        entry[FIRST_TOKENS] = len(record[0].tokens)
    arrays = {
        name: pa.array([entry[name] for entry in entries], pa.string())
        for name in ("place", "problem")
    }
    for name, default in columns.items():
        values: list[Any] = [entry.get(name, default) for entry in entries]
        arrays[name] = (
            cache.make_lists(values)
            if isinstance(default, np.ndarray)
            else pa.array(np.array(values, np.asarray(default).dtype))
        )
    return pa.table(arrays)


class EncodedDocument(NamedTuple):
    """A document of a record."""

    rendered: RenderedRecord
    tokens: np.ndarray
    labels: np.ndarray | None
    """None: every token has loss."""


EncodedRecord = tuple[EncodedDocument, ...] | str
"""The documents of a record, or the problem that it has."""


def encode_records(
    entries: Sequence[RecordEntry], source: Source, options: ChatOptions | None
) -> list[EncodedRecord]:
    """Returns the documents of each record, or its problem; the entries have none yet."""
    if options is None:
        nothing = RenderedRecord(text="")
        return [
            (EncodedDocument(nothing, entry["input_ids"], entry.get("labels")),)
            for entry in entries
        ]
    rendered: dict[int, tuple[RenderedRecord, ...]] = {}
    encoded: list[EncodedRecord] = [""] * len(entries)
    for index, entry in enumerate(entries):
        record = entry[source.column]
        try:
            rendered[index] = (
                chat.render_record(json.loads(record), options)
                if source.is_chat
                else (RenderedRecord(text=record, is_plain=True),)
            )
        except UserError as error:
            encoded[index] = str(error)
    encoder = TextEncoder(options.tokenizer)
    encodings = iter(encoder.tokenize([*itertools.chain.from_iterable(rendered.values())]))
    for index, documents in rendered.items():
        own = [next(encodings) for _ in documents]
        encoded_documents = []
        try:
            for document, encoding in zip(documents, own, strict=True):
                with chat.at_document(document.name):
                    ids = encoder.encode(document, encoding)
                encoded_documents.append(EncodedDocument(document, *ids))
            if source.has_common_loss_start:
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
    tokenizer: "transformers.PreTrainedTokenizerBase | None",
    num_records: int | None = None,
) -> Iterator[Example]:
    """Yields the documents of the first usable records, as `tokenize_dataset` encodes them.

    Args:
        num_records: None: the first one, and among the next ones one of each kind of chat.
    Raises: UserError if there is none, and for a bad record before one, unless they are skipped.
    """
    source = records.source
    data = records.data
    options = resolve_options(source, data=data, tokenizer=tokenizer)
    seen: set[str] = set()
    num_examples = 0
    for index, entry in enumerate(records.entries()):
        is_searching = num_records is None and num_examples
        if num_examples == num_records or (
            is_searching and (index >= _MAX_SEARCHED or not source.is_chat)
        ):
            break
        if entry["problem"] is not None:
            continue
        kinds = list_kinds(json.loads(entry["record"])) if source.is_chat else []
        kinds = [kind for kind in kinds if kind not in seen]
        if is_searching and not kinds:
            continue
        (encoded,) = encode_records([entry], source, options)
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
