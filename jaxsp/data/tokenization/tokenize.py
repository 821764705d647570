"""Tokenizes records once, and caches the result on disk under a fingerprint of all its inputs."""

import collections
import concurrent.futures
import functools
import importlib.metadata
import multiprocessing
import os
import pathlib
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from jaxsp.core.errors import UserError
from jaxsp.data.data_config import DataConfig
from jaxsp.data.formats.records import BARE_ANSWERS, FIRST_TOKENS, MAX_NAMED_RECORDS, RecordEntry
from jaxsp.data.formats.source import Source
from jaxsp.data.ingest import cache, sources
from jaxsp.data.ingest.cache import TokenStats
from jaxsp.data.ingest.sources import Records
from jaxsp.data.tokenization import documents, tokenizers
from jaxsp.data.tokenization.documents import TokenizeOptions

if TYPE_CHECKING:
    import datasets
    import transformers

_CACHE_VERSION = 9
"""Part of the cache's name. Increase it when the same file would give other tokens."""

_BATCH_SIZE = 2**22
"""Characters of records, or tokens, to encode together. A record has 1 KB to 100 MB, and takes
about 40 times its size in memory while it is tokenized."""


class TokenizedSource(NamedTuple):
    """Tokenized documents of a source."""

    dataset: "datasets.Dataset"
    """Columns `place`, `problem`, `tokens`, and `labels` unless every token has loss; of chats also
    BARE_ANSWERS. A record with a problem has no tokens. A record of two documents has their tokens
    one after the other, and the columns FIRST_TOKENS and Source.values."""
    stats: TokenStats


def tokenize_dataset(
    records: Records,
    *,
    source: Source,
    data: DataConfig,
    tokenizer: "transformers.PreTrainedTokenizerBase | None",
    vocab_size: int,
    vocab_suggestion: str = "Use the model's own tokenizer.",
) -> TokenizedSource:
    """Tokenizes the records of a source; labels are not shifted.
    Args: vocab_suggestion: what to do about a token id that is not below `vocab_size`.
    Raises: UserError for bad records, unless `data` skips them, for an id without an embedding, and
    without a chat template; DamagedCacheError if the cached tokens must be made again."""
    import datasets

    options = None
    key: tuple[Any, ...] = (_CACHE_VERSION, records.fingerprint)
    if source.needs_tokenizer:
        assert tokenizer is not None, "the config requires a tokenizer unless records are tokens"
        options = documents.resolve_options(source, data=data, tokenizer=tokenizer)
        key += (_cache_key(options),)
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


def _cache_key(options: TokenizeOptions) -> tuple[Any, ...]:
    chat = options.chat
    chat_options: tuple[Any, ...] = ()
    if options.source.is_chat:
        # the same for a run that keeps the config's template as its tokenizer's own
        template = chat.template or chat.tokenizer.chat_template
        chat_options = (template, chat.earlier_reasoning, chat.date)
    versions = [*map(importlib.metadata.version, ("transformers", "tokenizers", "jinja2"))]
    files = tokenizers.serialize_files(chat.tokenizer)
    return (chat.has_full_loss, chat_options, versions, files)


def _make_tables(
    records: Records, options: TokenizeOptions | None, max_workers: int | None
) -> Iterator[pa.Table]:
    """Yields the tokens of all records, which worker processes make if there are many.
    Args: options: None if the records are tokens."""
    from datasets.utils import tqdm

    source = records.source
    # disable=None: not in a log
    entries = tqdm(
        records.entries(), desc=f"Reading {source.source}", unit=" records", delay=3.0, disable=None
    )
    batches = _divide(entries, next(iter(records.columns)))
    if options is None:
        columns = {
            "tokens" if name == "input_ids" else name: records.columns[name]
            for name in records.columns
        }
        for batch in batches:
            yield _build_table([entry | {"tokens": entry["input_ids"]} for entry in batch], columns)
        return
    # macOS does not restrict the cores of a process
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    num_workers = max_workers or min(num_cores, -(-records.num_bytes // source.bytes_per_worker))
    if num_workers <= 1:
        for batch in batches:
            yield encode_batch(batch, options)
        return
    try:
        with concurrent.futures.ProcessPoolExecutor(
            num_workers,
            # a fork of a process in which JAX has threads can hang
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(options, max(num_cores // num_workers, 1)),
        ) as pool:
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


def _divide(entries: Iterable[RecordEntry], column: str) -> Iterator[list[RecordEntry]]:
    """Divides entries into batches of about the same size. Args: column: the content of each."""
    batch: list[RecordEntry] = []
    size = 0
    for entry in entries:
        batch.append(entry)
        size += len(entry[column]) + 100  # a source may have a million empty ones
        if size > _BATCH_SIZE:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


_worker_options: TokenizeOptions


def _start_worker(options: TokenizeOptions, num_threads: int) -> None:
    """Prepares a worker process. Args: num_threads: its threads."""
    global _worker_options
    _worker_options = options
    if num_threads > 1:
        os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(num_threads)}


def _encode_in_worker(entries: list[RecordEntry]) -> pa.Table:
    return encode_batch(entries, _worker_options)


def encode_batch(entries: list[RecordEntry], options: TokenizeOptions) -> pa.Table:
    """Returns the tokens of records, or their problems: see TokenizedSource.dataset."""
    usable = [entry for entry in entries if entry["problem"] is None]
    encoded = documents.encode_records([entry[options.source.column] for entry in usable], options)
    for entry, record in zip(usable, encoded, strict=True):
        if isinstance(record, str):
            entry["problem"] = record
            continue
        entry["tokens"] = np.concatenate([each.tokens for each in record])
        labels = [each.tokens if each.labels is None else each.labels for each in record]
        entry["labels"] = np.concatenate(labels)
        entry[BARE_ANSWERS] = sum(each.rendered.num_bare_answers for each in record)
        entry[FIRST_TOKENS] = len(record[0].tokens)
    columns = dict.fromkeys(options.columns, np.zeros(0, np.int32))
    values = dict.fromkeys(options.count_columns, 0) | dict(options.source.values)
    return _build_table(entries, columns | values)


_TYPES = {int: pa.int32(), float: pa.float64(), bool: pa.bool_()}
"""Arrow types of columns with one value for each record, by the Python type of the values."""


def _build_table(entries: list[RecordEntry], columns: RecordEntry) -> pa.Table:
    """Returns place and problem of entries, and these columns, with the value of a bad record."""
    arrays = {
        name: pa.array([entry[name] for entry in entries], pa.string())
        for name in ("place", "problem")
    }
    for name, default in columns.items():
        values: list[Any] = [entry.get(name, default) for entry in entries]
        has_lists = isinstance(default, np.ndarray)
        array = cache.make_lists(values) if has_lists else pa.array(values, _TYPES[type(default)])
        arrays[name] = array
    return pa.table(arrays)
