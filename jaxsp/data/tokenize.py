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
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa

from jaxsp.core import errors
from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import UserError, at
from jaxsp.data import chat, chat_template, sources, store, tokenizers
from jaxsp.data.chat import ChatOptions, RenderedRecord
from jaxsp.data.data_config import DataConfig
from jaxsp.data.source import (
    BARE_ANSWERS,
    FIRST_TOKENS,
    IS_DESIRABLE,
    RecordEntry,
    Source,
)
from jaxsp.data.sources import Records
from jaxsp.data.store import NUM_TOKENS, EncodedBatch, TokenizedSource
from jaxsp.data.tokenizers import TextEncoder

if TYPE_CHECKING:
    import transformers

_CACHE_VERSION = 11
"""Part of the cache's name. Increase it when the same file would give another cache."""

_BATCH_SIZE = 2**22
"""Characters of records, or tokens, to encode together. A record has 1 KB to 100 MB, and takes
about 40 times its size in memory while it is tokenized."""


class Encoder(NamedTuple):
    """Everything that decides the tokens of a record."""

    source: Source
    options: ChatOptions | None
    """None if the records are tokens."""
    vocab_size: int = sys.maxsize
    """A record with another token id is bad."""
    vocab_suggestion: str = ""


def tokenize_dataset(
    records: Records,
    *,
    tokenizer: "transformers.PreTrainedTokenizerBase | None",
    vocab_size: int,
    vocab_suggestion: str = "Use the model's own tokenizer.",
) -> TokenizedSource:
    """Tokenizes the records of a source; labels are not shifted.
    Args: vocab_suggestion: what to do about a token id that is not below `vocab_size`.
    Raises: UserError for bad records, unless they are skipped, and without a chat template;
    DamagedCacheError if the cached tokens must be made again."""
    import datasets

    source = records.source
    data = records.data
    options = resolve_options(source, data=data, tokenizer=tokenizer)
    key: list[Any] = [_CACHE_VERSION, records.fingerprint, vocab_size]
    if options is not None:
        versions = [*map(importlib.metadata.version, ("transformers", "tokenizers", "jinja2"))]
        key += [options.has_full_loss, versions, tokenizers.serialize_files(options.tokenizer)]
        if source.is_chat:
            # the same for a run that keeps the config's template as its tokenizer's own
            template = options.template or options.tokenizer.chat_template
            key += [template, options.earlier_reasoning, options.date]
    folder = pathlib.Path(datasets.config.HF_DATASETS_CACHE) / "jaxsp"
    tokenized = store.open_or_build(
        folder / datasets.fingerprint.Hasher.hash(key),
        functools.partial(
            _encode_all, records, Encoder(source, options, vocab_size, vocab_suggestion)
        ),
    )
    bad = store.list_bad_records(tokenized.records)
    sources.check_bad_records(bad, data=data)
    if not tokenized.num_tokens.any():
        _raise_nothing_to_use(source, bad)
    return tokenized


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


def _encode_all(records: Records, encoder: Encoder) -> Iterator[EncodedBatch]:
    """Yields the tokens of all records. Raises: UserError for bad ones, as soon as possible."""
    bad: list[str] = []
    is_empty = True
    for table, arrays in _encode_batches(records, encoder):
        bad += store.list_bad_records(table)
        sources.check_bad_records(bad, data=records.data)
        is_empty = False
        yield table, arrays
    if is_empty:
        _raise_nothing_to_use(records.source, [])


def _raise_nothing_to_use(source: Source, bad: Sequence[str]) -> NoReturn:
    needed = errors.format_choices(source.required)
    raise UserError([*bad[:1], f"no record contains {needed}. Give at least one."])


def _encode_batches(records: Records, encoder: Encoder) -> Iterator[EncodedBatch]:
    """Encodes records in batches, which worker processes do if there are many."""
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
    enough = min(num_cores, -(-records.num_bytes // source.bytes_per_worker))
    num_workers = records.data.num_workers or enough
    if num_workers <= 1 or encoder.options is None:
        for batch in batches:
            yield encode_batch(batch, encoder)
        return
    try:
        with (
            _hide_main(),
            concurrent.futures.ProcessPoolExecutor(
                num_workers,
                # a fork of a process in which JAX has threads can hang
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(encoder, max(num_cores // num_workers, 1)),
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
        if size > _BATCH_SIZE or entry["problem"] is not None:  # bad ones are reported early
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


_worker_encoder: Encoder


def _start_worker(encoder: Encoder, num_threads: int) -> None:
    global _worker_encoder
    _worker_encoder = encoder
    if num_threads > 1:
        os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(num_threads)}


def _encode_in_worker(entries: list[RecordEntry]) -> EncodedBatch:
    return encode_batch(entries, _worker_encoder)


def encode_batch(entries: list[RecordEntry], encoder: Encoder) -> EncodedBatch:
    """Returns the tokens of records, or their problems."""
    source = encoder.source
    types = {"place": pa.string(), "problem": pa.string(), NUM_TOKENS: pa.int64()}
    if source.is_chat:
        types[BARE_ANSWERS] = pa.int32()
    if source.num_documents > 1:
        types[FIRST_TOKENS] = pa.int32()
    types |= {name: pa.scalar(value).type for name, value in source.values.items()}
    parts: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    usable = [entry for entry in entries if entry["problem"] is None]
    encoded = zip(usable, encode_records(usable, encoder), strict=True)
    for entry, record in encoded:
        if isinstance(record, str):
            entry["problem"] = record
            continue
        entry[NUM_TOKENS] = sum(len(document.tokens) for document in record)
        entry[BARE_ANSWERS] = sum(document.rendered.num_bare_answers for document in record)
        entry[FIRST_TOKENS] = len(record[0].tokens)
        parts["tokens"] += [document.tokens for document in record]
        parts["labels"] += [document.labels for document in record if document.labels is not None]
        for name in source.numbers:
            parts[name].append(entry[name])
    defaults = {**dict.fromkeys(types, 0), **source.values}
    columns = {
        name: pa.array([entry.get(name, defaults[name]) for entry in entries], kind)
        for name, kind in types.items()
    }
    return pa.table(columns), {name: np.concatenate(part) for name, part in parts.items() if part}


class EncodedDocument(NamedTuple):
    """A document of a record."""

    rendered: RenderedRecord
    tokens: np.ndarray
    labels: np.ndarray | None
    """None: every token has loss."""


EncodedRecord = tuple[EncodedDocument, ...] | str
"""The documents of a record, or the problem that it has."""


def encode_records(entries: Sequence[RecordEntry], encoder: Encoder) -> Iterator[EncodedRecord]:
    """Yields the documents of each record, or its problem; the entries have none yet."""
    source, options, *_ = encoder
    if options is None:
        for entry in entries:
            ids = (entry["input_ids"], entry.get("labels"))
            unrendered = EncodedDocument(RenderedRecord(text=""), *ids)
            with at(entry["place"]):
                _check_ids(unrendered, encoder)
            yield (unrendered,)
        return
    rendered: list[tuple[RenderedRecord, ...] | str] = []
    for entry in entries:
        record = entry[source.column]
        try:
            rendered.append(
                chat.render_record(json.loads(record), options)
                if source.is_chat
                else (RenderedRecord(text=record, is_plain=True),)
            )
        except UserError as error:
            rendered.append(str(error))
    text_encoder = TextEncoder(options.tokenizer)
    texts = [document for each in rendered if not isinstance(each, str) for document in each]
    encodings = iter(text_encoder.tokenize(texts))
    for entry, documents in zip(entries, rendered, strict=True):
        if isinstance(documents, str):
            yield documents
            continue
        own = [*itertools.islice(encodings, len(documents))]
        encoded = []
        try:
            for document, encoding in zip(documents, own, strict=True):
                with chat.at_document(document.name):
                    ids = text_encoder.encode(document, encoding)
                encoded.append(EncodedDocument(document, *ids))
            if source.has_common_loss_start:
                _align_loss_starts(encoded)
        except UserError as error:
            yield str(error)
            continue
        with at(entry["place"]):
            for each in encoded:
                _check_ids(each, encoder)
        yield tuple(encoded)


def _check_ids(document: EncodedDocument, encoder: Encoder) -> None:
    """Raises: UserError for an id that the model's vocabulary does not have: the tokenizer is that
    of another model, and leaving records out would hide it."""
    labels = document.tokens[:0] if document.labels is None else document.labels
    for name, ids in (("tokens", document.tokens), ("labels", labels[labels != NO_LABEL])):
        if len(ids) and not 0 <= ids.min() <= ids.max() < encoder.vocab_size:
            wrong = ids[(ids < 0) | (ids >= encoder.vocab_size)][0]
            raise UserError(
                f"{name} contain the id {wrong}, but the model's vocab_size is "
                f"{encoder.vocab_size}: ids must be 0 to {encoder.vocab_size - 1}. "
                f"{encoder.vocab_suggestion}"
            )


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


class Example(NamedTuple):
    """An encoded document of a record."""

    place: str
    """Place of the record, and the document's name if it has several."""
    tokens: np.ndarray
    labels: np.ndarray | None


def encode_examples(
    records: Records,
    *,
    tokenizer: "transformers.PreTrainedTokenizerBase | None",
    num_records: int = 1,
) -> Iterator[Example]:
    """Yields the documents of the first usable records, as `tokenize_dataset` encodes them.
    Raises: UserError if there is none, and for a bad record before one, unless they are skipped."""
    source = records.source
    encoder = Encoder(source, resolve_options(source, data=records.data, tokenizer=tokenizer))
    num_examples = 0
    bad: list[str] = []
    for entry in records.entries():
        if num_examples == num_records:
            break
        encoded: EncodedRecord = str(entry["problem"])
        if entry["problem"] is None:
            (encoded,) = encode_records([entry], encoder)
        if isinstance(encoded, str):
            bad.append(f"{entry['place']}: {encoded}")
            sources.check_bad_records(bad, data=records.data)
            continue
        if not len(encoded[0].tokens):
            continue
        num_examples += 1
        for rendered, tokens, labels in encoded:
            name = rendered.name
            if name == "completion":
                name += " (desirable)" if entry[IS_DESIRABLE] else " (undesirable)"
            yield Example(f"{entry['place']}: {name}" if name else entry["place"], tokens, labels)
    if not num_examples:
        raise UserError("no record has a token. Give at least one that has.")
