"""Tokenizes records once, and caches the result on disk under a fingerprint of all its inputs."""

import functools
import importlib.metadata
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from jaxsp.core.errors import UserError
from jaxsp.data.data_config import DataConfig
from jaxsp.data.formats.records import BARE_ANSWERS, FIRST_TOKENS
from jaxsp.data.formats.source import Source
from jaxsp.data.ingest import columnar, record_cache, token_stats
from jaxsp.data.ingest.token_stats import TokenStats
from jaxsp.data.tokenization import documents, tokenizers
from jaxsp.data.tokenization.documents import TokenizeOptions

if TYPE_CHECKING:
    import datasets
    import transformers

_CACHE_VERSION = 8
"""Part of the cache's name. Increase it when the same record would give other tokens."""

_BATCH_BYTES = 2**22
"""Bytes of records to tokenize together. A record has 1 KB to 100 MB, and takes about 40 times its
size in memory while it is tokenized."""


class TokenizedSource(NamedTuple):
    """Tokenized documents of a source."""

    dataset: "datasets.Dataset"
    """Columns `place`, `problem`, `tokens`, and `labels` unless every token has loss; of chats also
    BARE_ANSWERS. A record with a problem has no tokens. A record of two documents has their tokens
    one after the other, and the columns FIRST_TOKENS and Source.values."""
    stats: TokenStats


@record_cache.hide_progress_without_terminal()
def tokenize_dataset(
    dataset: "datasets.Dataset",
    *,
    source: Source,
    data: DataConfig,
    tokenizer: "transformers.PreTrainedTokenizerBase | None",
    vocab_size: int,
    vocab_suggestion: str = "Use the model's own tokenizer.",
) -> TokenizedSource:
    """Tokenizes the records of `sources.read`; labels are not shifted.
    Args: vocab_suggestion: what to do about a token id that is not below `vocab_size`.
    Raises: UserError for bad records, unless `data` skips them, for an id without an embedding, and
    without a chat template; DamagedCacheError if the cached records must be read again."""
    import datasets

    key: tuple[Any, ...] = (_CACHE_VERSION, dataset._fingerprint)
    options = None
    if source.needs_tokenizer:
        assert tokenizer is not None, "the config requires a tokenizer unless records are tokens"
        options = documents.resolve_options(source, data=data, tokenizer=tokenizer)
        key += (_cache_key(options),)
    fingerprint = datasets.fingerprint.Hasher.hash(key)
    make = None
    if options is not None:
        make = functools.partial(_map_dataset, dataset, options, data.num_workers, fingerprint)
    tokenized, stats = token_stats.open_or_make(dataset, fingerprint, make)
    record_cache.check_bad_records(tokenized, data=data)
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
    return (options.source.format, chat.has_full_loss, chat_options, versions, files)


def _map_dataset(
    dataset: "datasets.Dataset", options: TokenizeOptions, max_workers: int | None, fingerprint: str
) -> "datasets.Dataset":
    """Tokenizes a dataset, in worker processes if it is large."""
    import datasets
    import multiprocess

    # macOS does not restrict the cores of a process
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    num_bytes = dataset.data.nbytes
    worth = -(-num_bytes // options.source.bytes_per_worker)
    num_workers = min(max_workers or min(num_cores, worth), len(dataset))
    num_threads = None
    if num_workers > 1:
        # `datasets` uses multiprocess; a fork of a process in which JAX has threads can hang
        multiprocess.set_start_method("spawn", force=True)
        num_threads = max(num_cores // num_workers, 1)
    batch_size = columnar.rows_per_batch(len(dataset), num_bytes, _BATCH_BYTES)
    types = {name: datasets.Value("string") for name in ("place", "problem")}
    types |= {name: datasets.LargeList(datasets.Value("int32")) for name in options.columns}
    types |= {name: datasets.Value("int32") for name in options.count_columns}
    types |= {name: dataset.features[name] for name in options.source.values}
    try:
        tokenized = dataset.with_format("arrow").map(
            functools.partial(_encode_table, options=options, num_threads=num_threads),
            batched=True,
            batch_size=batch_size,
            writer_batch_size=batch_size,
            remove_columns=dataset.column_names,
            features=datasets.Features(types),
            num_proc=num_workers if num_workers > 1 else None,  # None: in this process
            new_fingerprint=fingerprint,
            desc=f"Tokenizing {options.source.source}",
        )
    except RuntimeError as error:
        if num_workers == 1 or "abruptly died" not in str(error):
            raise
        raise UserError(
            "a tokenization worker was killed. If no line above has the reason, memory ran out: "
            f"set data.num_workers={max(num_workers // 2, 1)}."
        ) from None
    return tokenized.with_format(None)


def _encode_table(
    records: pa.Table, *, options: TokenizeOptions, num_threads: int | None
) -> pa.Table:
    """Tokenizes records. Args: num_threads: threads of a worker; None: not a worker."""
    if num_threads is not None and num_threads > 1:
        # `datasets` disables threads in workers, in case they fork; cores would be idle
        os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(num_threads)}
    problems = records["problem"].to_pylist()
    contents = records[options.source.column].to_pylist()
    usable = [index for index, problem in enumerate(problems) if problem is None]
    empty = np.zeros(0, np.int32)
    arrays = {name: [empty] * len(problems) for name in options.columns}
    counts = {name: np.zeros(len(problems), np.int32) for name in (BARE_ANSWERS, FIRST_TOKENS)}
    encoded = documents.encode_records([contents[index] for index in usable], options)
    for index, record in zip(usable, encoded, strict=True):
        if isinstance(record, str):
            problems[index] = record
            continue
        counts[BARE_ANSWERS][index] = sum(each.rendered.num_bare_answers for each in record)
        counts[FIRST_TOKENS][index] = len(record[0].tokens)
        arrays["tokens"][index] = np.concatenate([each.tokens for each in record])
        if "labels" in arrays:
            labels = [each.tokens if each.labels is None else each.labels for each in record]
            arrays["labels"][index] = np.concatenate(labels)
    columns: dict[str, Any] = {name: columnar.make_lists(values) for name, values in arrays.items()}
    columns |= {name: counts[name] for name in options.count_columns}
    columns |= {name: records[name] for name in options.source.values}
    return pa.table(
        {"place": records["place"], "problem": pa.array(problems, pa.string()), **columns}
    )
