"""Records become tokens, once: the result is cached on disk under the fingerprint of all that it is made of."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from jaxsp.config.data_schema import DataConfig, SourceConfig
from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import UserError
from jaxsp.data.chat import chat
from jaxsp.data.chat.chat import RenderedRecord
from jaxsp.data.chat.template_text import RecordError
from jaxsp.data.ingest import sources
from jaxsp.data.tokenization import encoding, tokenizers

if TYPE_CHECKING:
    import datasets
    import transformers

_CACHE_VERSION = 4
"""Part of the cache's name: count up when the same record would become other tokens."""

_BATCH_BYTES = 2**22
"""Records given to the tokenizer at a time: they can be 1 KB or 100 MB, and take about 40 times as much memory meanwhile."""

_BYTES_PER_WORKER = {"text": 2**27, "messages": 2**25, "prompt_completion": 2**25}
"""As many records are worth a worker. It takes 3 to 8 s to start; without, the tokenizer's threads use the cores too, but for
a tenth of the time with text, and more with templates, which Python renders. (40 MB of text on 2 cores: 10 s without, 17 with.)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizedSource:
    """A source's documents, as tokens."""

    dataset: "datasets.Dataset"
    """`place`, `problem`, `tokens`, and `labels` where not every token is learned; a record with a problem has no tokens."""
    digest: str
    """Of all tokens and labels in order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizeOptions:
    """How the records of a source become tokens."""

    tokenizer: Any
    template: str | None
    """The one of the config, instead of the tokenizer's own."""
    format: str
    train_on: str

    @property
    def has_labels(self) -> bool:
        """Whether there are tokens that are not learned."""
        return self.format != "text" and self.train_on != "all"


def resolve_options(
    source: SourceConfig, *, data: DataConfig, tokenizer: "transformers.PreTrainedTokenizerBase"
) -> TokenizeOptions:
    """How a source's records become tokens. Raises: UserError where they need a chat template, and there is none."""
    template = (
        chat.load_template(data, tokenizer)
        if source.format == "messages" or data.chat_template is not None
        else None
    )
    return TokenizeOptions(
        tokenizer=tokenizer, template=template, format=source.format, train_on=data.train_on
    )


def encode_records(
    records: Sequence[str], options: TokenizeOptions
) -> list[encoding.EncodedRecord]:
    """Tokens and labels of texts, or of records as JSON; or what is wrong with them."""
    return encoding.encode_texts(
        [_render_record(record, options) for record in records], options.tokenizer
    )


def _render_record(record: str, how: TokenizeOptions) -> RenderedRecord | RecordError:
    if how.format == "text":
        return RenderedRecord(text=record, is_plain=True)
    try:
        return chat.render_record(
            json.loads(record),
            tokenizer=how.tokenizer,
            template=how.template,
            train_on=how.train_on,
        )
    except RecordError as problem:
        return problem


def tokenize_dataset(
    dataset: "datasets.Dataset",
    *,
    source: SourceConfig,
    data: DataConfig,
    tokenizer: "transformers.PreTrainedTokenizerBase | None",
    vocab_size: int,
    field: str,
) -> TokenizedSource:
    """The records of `sources.read` as tokens and, where not every token is learned, labels (not shifted yet).

    Raises: UserError for records with problems as data.on_bad_record says, for a token id that the model has no embedding
        for, and where there is no chat template.
    """
    import datasets

    asked = f"{field} = {source.source}"
    folder = pathlib.Path(dataset.cache_files[0]["filename"]).parent
    if source.format == "tokens":
        fingerprint = datasets.fingerprint.Hasher.hash((_CACHE_VERSION, dataset._fingerprint))
        tokenized = dataset.rename_column("input_ids", "tokens")
    else:
        assert tokenizer is not None, "the config asks for a tokenizer where a source is not tokens"
        made_by = resolve_options(source, data=data, tokenizer=tokenizer)
        fingerprint = datasets.fingerprint.Hasher.hash(
            (_CACHE_VERSION, dataset._fingerprint, _cache_key(made_by))
        )
        with sources.build_once(folder / f"cache-{fingerprint}.arrow"):
            tokenized = _map_dataset(
                dataset,
                made_by,
                workers=data.num_workers,
                fingerprint=fingerprint,
                title=source.source,
            )
    counted = _cached_token_stats(tokenized, folder / f"counted-{fingerprint}.json")
    sources.check_bad_records(tokenized, data=data, error_prefix=asked)
    for column, (lowest, highest) in counted["ids"].items():
        for value, number in (lowest, highest):
            if not 0 <= value < vocab_size:
                raise UserError(
                    f"{asked}: {tokenized[number]['place']}: {column} hold the id {value}, but the model's vocab_size is "
                    f"{vocab_size}: ids go from 0 to {vocab_size - 1}. Use the model's own tokenizer, or set "
                    "model.config.vocab_size."
                )
    return TokenizedSource(dataset=tokenized, digest=counted["digest"])


def encode_first_record(
    dataset: "datasets.Dataset",
    *,
    source: SourceConfig,
    data: DataConfig,
    tokenizer: "transformers.PreTrainedTokenizerBase | None",
    field: str,
) -> tuple[str, np.ndarray, np.ndarray | None]:
    """Place, tokens and labels of the first of the records of `sources.read` that can be used, as `tokenize` makes them.

    Raises: UserError for a record before it with a problem, where data.on_bad_record is error, and where there is none.
    """
    asked = f"{field} = {source.source}"
    made_by = None
    if source.format != "tokens":
        assert tokenizer is not None, "the config asks for a tokenizer where a source is not tokens"
        made_by = resolve_options(source, data=data, tokenizer=tokenizer)
    for entry in dataset:
        if entry["problem"] is not None:
            continue
        if made_by is None:
            ids = {
                name: np.asarray(entry[name], np.int32)
                for name in ("input_ids", "labels")
                if name in entry
            }
            made: encoding.EncodedRecord = (ids["input_ids"], ids.get("labels"))
        else:
            (made,) = encode_records(
                [entry["text" if source.format == "text" else "record"]], made_by
            )
        if not isinstance(made, RecordError):
            if len(made[0]):
                return entry["place"], *made
        elif data.on_bad_record == "error":
            raise UserError(
                f"{asked}: {entry['place']}: {made}. Mend it, or leave it out: data.on_bad_record=skip."
            )
    raise UserError(f"{asked}: no record makes a token. Give files with at least one that does.")


def _cache_key(how: TokenizeOptions) -> tuple[Any, ...]:
    """All that decides which tokens a record becomes."""
    versions = [
        importlib.metadata.version(name) for name in ("transformers", "tokenizers", "jinja2")
    ]
    # one of the config, which a run keeps as its tokenizer's own, is the same there
    template = None if how.format == "text" else how.template or how.tokenizer.chat_template
    return (how.format, how.train_on, template, versions, tokenizers.serialize_files(how.tokenizer))


def _map_dataset(
    dataset: "datasets.Dataset",
    how: TokenizeOptions,
    *,
    workers: int | None,
    fingerprint: str,
    title: str,
) -> "datasets.Dataset":
    import datasets
    import multiprocess

    cores = len(os.sched_getaffinity(0))
    num_bytes = dataset.data.nbytes
    num_workers = min(
        workers or min(cores, -(-num_bytes // _BYTES_PER_WORKER[how.format])), len(dataset)
    )
    if num_workers > 1:
        # the workers of `datasets`: forking a process in which JAX has threads can hang
        multiprocess.set_start_method("spawn", force=True)
    batch_size = min(max(_BATCH_BYTES * len(dataset) // max(num_bytes, 1), 1), 1000)
    types = {name: datasets.Value("string") for name in ("place", "problem")}
    types |= {name: datasets.LargeList(datasets.Value("int32")) for name in _token_columns(how)}
    return (
        dataset.with_format("arrow")
        .map(
            functools.partial(
                _encode_table,
                options=how,
                num_threads=max(cores // num_workers, 1) if num_workers > 1 else None,
            ),
            batched=True,
            batch_size=batch_size,
            writer_batch_size=batch_size,
            remove_columns=dataset.column_names,
            features=datasets.Features(types),
            num_proc=num_workers if num_workers > 1 else None,  # one worker is this process
            new_fingerprint=fingerprint,
            desc=f"Tokenising {title}",
        )
        .with_format(None)
    )


def _token_columns(how: TokenizeOptions) -> list[str]:
    return ["tokens", "labels"] if how.has_labels else ["tokens"]


def _encode_table(
    records: pa.Table, *, options: TokenizeOptions, num_threads: int | None
) -> pa.Table:
    """The tokens of some records. Args: num_threads: that a worker tokenises with; None: this process is no worker."""
    if num_threads is not None and num_threads > 1:
        # `datasets` forbids its workers threads of their own, for fear of forks; the cores would idle
        os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(num_threads)}
    places, problems = records["place"], records["problem"].to_pylist()
    column = records["text" if options.format == "text" else "record"].to_pylist()
    usable = [number for number, problem in enumerate(problems) if problem is None]
    empty = np.zeros(0, np.int32)
    made = [(empty, empty)] * len(problems)
    for number, one in zip(
        usable, encode_records([column[number] for number in usable], options), strict=True
    ):
        if isinstance(one, RecordError):
            problems[number] = str(one)
        else:
            tokens, labels = one
            made[number] = (tokens, tokens if labels is None else labels)
    lists = {}
    for place, name in enumerate(_token_columns(options)):
        arrays = [one[place] for one in made]
        offsets = np.cumsum([0, *map(len, arrays)])
        lists[name] = pa.LargeListArray.from_arrays(offsets, np.concatenate(arrays))
    return pa.table({"place": places, "problem": pa.array(problems, pa.string()), **lists})


def _cached_token_stats(dataset: "datasets.Dataset", cached: pathlib.Path) -> dict[str, Any]:
    """A digest of all tokens and labels, and the lowest and the highest id of each with its record; kept in a file.

    All tokens are read for it, about 1 GB in a second, so that it is done once.
    """
    with sources.build_once(cached):
        if not cached.exists():
            found = _compute_token_stats(dataset)
            if not os.access(cached.parent, os.W_OK):
                return found
            # NamedTemporaryFile makes files with mode 0600, and other users may share the cache
            with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
                partial = pathlib.Path(folder) / cached.name
                partial.write_text(json.dumps(found), encoding="utf-8")
                partial.replace(cached)
        return json.loads(cached.read_text(encoding="utf-8"))


def _compute_token_stats(dataset: "datasets.Dataset") -> dict[str, Any]:
    digests, extremes = [], {}
    for column in (name for name in ("tokens", "labels") if name in dataset.column_names):
        # as two streams, in which chunks leave no trace
        lengths, values = hashlib.sha256(), hashlib.sha256()
        ends: list[tuple[int, int]] = []
        before = 0
        for offsets, ids in sources.read_lists(dataset, column):
            lengths.update(np.diff(offsets).astype("<i8").data)
            values.update(np.ascontiguousarray(ids, "<i4").data)
            learned = np.flatnonzero(ids != NO_LABEL) if column == "labels" else None
            known = ids if learned is None else ids[learned]
            for at in (known.argmin(), known.argmax()) if len(known) else ():
                place = at if learned is None else learned[at]
                ends.append(
                    (
                        int(known[at]),
                        before + int(np.searchsorted(offsets, place, side="right")) - 1,
                    )
                )
            before += len(offsets) - 1
        digests += [column, lengths.hexdigest(), values.hexdigest()]
        if ends:
            extremes[column] = [min(ends), max(ends, key=lambda end: (end[0], -end[1]))]
    return {"digest": hashlib.sha256(" ".join(digests).encode()).hexdigest(), "ids": extremes}
