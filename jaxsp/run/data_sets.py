"""Data sets of a config: sources are opened, tokenized and packed."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxsp.core.errors import ProblemCollector, UserError, at
from jaxsp.data.chat import chat_template
from jaxsp.data.formats.source import Source
from jaxsp.data.ingest import sources
from jaxsp.data.ingest.cache import DamagedCacheError
from jaxsp.data.packing import dataset, row_reader
from jaxsp.data.packing.dataset import PackedDataset
from jaxsp.data.packing.row_reader import Documents
from jaxsp.data.tokenization import tokenize
from jaxsp.data.tokenization.tokenize import TokenizedSource
from jaxsp.run.config_file import Config
from jaxsp.system import distributed


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedSources:
    """Sources of a config and their records, by the field of the config (`data.train.0`)."""

    train: dict[str, Source]
    """Training sources; empty if neither training nor data.eval_fraction needs them."""
    evals: dict[str, Source]
    records: dict[str, Any]

    @property
    def all(self) -> dict[str, Source]:
        return self.train | self.evals

    @property
    def have_text(self) -> bool:
        """True if a source needs a tokenizer."""
        return any(source.needs_tokenizer for source in self.all.values())


def inline_chat_template(config: Config) -> Config:
    """Replaces the file name of a chat template by its text, so that a run contains all it needs.

    Raises: UserError if the template cannot be read.
    """
    if config.data.chat_template is None:
        return config
    template = chat_template.resolve_template(config.data.chat_template)
    data = config.data.model_copy(update={"chat_template": template})
    return config.model_copy(update={"data": data})


def open_sources(
    config: Config, *, for_training: bool, problems: ProblemCollector
) -> OpenedSources:
    """Opens the sources of a config; what is wrong with them goes to `problems`."""
    data = config.data
    train: dict[str, Source] = {}
    if for_training or data.eval_fraction is not None:
        train = {f"data.train.{number}": source for number, source in enumerate(data.train)}
    evals = {f"data.eval.{number}": source for number, source in enumerate(data.eval)}
    records = {}
    for field, source in (train | evals).items():
        with problems.collect(), at(f"{field}.source", source.source):
            records[field] = sources.read(source, data=data)
    with problems.collect():
        _check_unique_names(train)
        _check_unique_names(evals)
    with problems.collect():
        sources.check_no_duplicates(
            {field: source for field, source in train.items() if field in records}
        )
    return OpenedSources(train=train, evals=evals, records=records)


def make_data_sets(
    opened: OpenedSources,
    config: Config,
    tokenizer: Any,
    *,
    vocab_size: int,
    for_training: bool,
) -> tuple[PackedDataset | None, tuple[PackedDataset, ...]]:
    """Tokenizes and packs the training set (None unless `for_training`) and the eval sets.

    Each eval source is one eval set. Records held out by data.eval_fraction are one more. Damaged
    caches are rebuilt.

    Raises: UserError with the problems of all sources; DamagedCacheError for a file that is damaged
        again.
    """
    rebuilt: set[pathlib.Path] = set()
    while True:
        try:
            tokenized = {}
            problems = ProblemCollector()
            for field, source in opened.all.items():
                with problems.collect(), at(f"{field}.source", source.source):
                    tokenized[field] = tokenize.tokenize_dataset(
                        opened.records[field],
                        source=source,
                        data=config.data,
                        tokenizer=tokenizer,
                        vocab_size=vocab_size,
                        vocab_suggestion=_suggest_vocabulary(config),
                    )
            problems.raise_if_any()
            return _pack_sources(opened, tokenized, config, for_training=for_training)
        except DamagedCacheError as damage:
            if damage.path in rebuilt:
                raise
            rebuilt.add(damage.path)
            distributed.log(damage.notice)


def _suggest_vocabulary(config: Config) -> str:
    """Returns what to do about a token id without a row of the model's embedding."""
    if config.model.source is None:
        return "Set model.config.vocab_size."
    if config.model.tokenizer is not None:
        return "Use the model's own tokenizer: model.tokenizer=null."
    return (
        "If the tokenizer has more tokens than the embedding has rows, add rows with transformers: "
        "model.resize_token_embeddings(len(tokenizer)), then save_pretrained of both into one "
        "folder, and name it as model.source. Or leave the record out."
    )


def _pack_sources(
    opened: OpenedSources,
    tokenized: Mapping[str, TokenizedSource],
    config: Config,
    *,
    for_training: bool,
) -> tuple[PackedDataset | None, tuple[PackedDataset, ...]]:
    """Packs the training set (None unless `for_training`) and the eval sets."""
    evals = [
        _pack({field: source}, tokenized, config, name=_name(source), field=f"{field}.source")
        for field, source in opened.evals.items()
    ]
    masks = None
    if config.data.eval_fraction is not None:
        masks = row_reader.select_records(
            [tokenized[field].dataset for field in opened.train],
            source_names=[_name(source) for source in opened.train.values()],
            fraction=config.data.eval_fraction,
            seed=config.run.seed,
        )
        held_out_set = _pack(
            opened.train,
            tokenized,
            config,
            name=row_reader.EVAL_SET_NAME,
            field="data.eval_fraction",
            masks=masks,
            use_held_out=True,
        )
        evals.append(held_out_set)
    train = None
    if for_training:
        train = _pack(
            opened.train, tokenized, config, name="train", field="data.train", masks=masks
        )
    return train, tuple(evals)


def _pack(
    members: Mapping[str, Source],
    tokenized: Mapping[str, TokenizedSource],
    config: Config,
    *,
    name: str,
    field: str,
    masks: Sequence[np.ndarray] | None = None,
    use_held_out: bool = False,
) -> PackedDataset:
    """Packs one data set.

    Args:
        members: its sources, by the field of the config.
        masks: for each source, which records are held out.
        use_held_out: use the held-out records instead of the others.
    """
    with at(field):
        documents = Documents(
            [tokenized[member].dataset for member in members],
            source_names=[_name(source) for source in members.values()],
            held_out=masks,
            use_held_out=use_held_out,
            row_tokens=config.data.row_tokens,
            long_documents=config.data.long_documents,
            stats=[tokenized[member].stats for member in members],
            has_scores=config.objective.type == "reward",
        )
    weights = [source.weight for source in members.values() if source.weight is not None]
    if len(members) == 1 or use_held_out:
        weights = []
    digests = [tokenized[member].stats.digest for member in members]
    if masks is not None:
        digests = [
            row_reader.digest_split(digest, mask, is_held_out=use_held_out)
            for digest, mask in zip(digests, masks, strict=True)
        ]
    return dataset.pack_documents(
        name,
        documents,
        **config.step.packing,
        digests=digests,
        source_weights=weights or None,
    )


def _name(source: Source) -> str:
    return source.name or source.source


def _check_unique_names(group: Mapping[str, Source]) -> None:
    """Raises: UserError if two sources of a group have one name."""
    names = [_name(source) for source in group.values()]
    for number, (field, name) in enumerate(zip(group, names, strict=True)):
        if name in names[:number]:
            raise UserError(
                f"{field}.name = {name}: another source has this name. Give each its own: "
                f"{field}.name={name}-{number}."
            )
