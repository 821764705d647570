"""Data sets of a config: sources are opened, tokenized and packed, with or without devices."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxsp.core.errors import ProblemCollector, at
from jaxsp.data import chat_template, dataset, sources, tokenize
from jaxsp.data.dataset import PackedDataset
from jaxsp.data.documents import EVAL_SET_NAME, Documents, digest_split, select_records
from jaxsp.data.source import Source
from jaxsp.data.store import DamagedCacheError, TokenizedSource
from jaxsp.run.config_file import Config
from jaxsp.system import distributed


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedSources:
    """Sources of a config and their records, by the field of the config (`data.train.0`)."""

    train: dict[str, Source]
    """Training sources; empty if neither training nor data.eval_fraction needs them."""
    evals: dict[str, Source]
    records: dict[str, Any]
    have_text: bool
    """True if a source needs a tokenizer."""


def inline_chat_template(config: Config) -> Config:
    """Replaces the file name of a chat template by its text: a run contains all it needs."""
    template = config.data.chat_template
    if template is None:
        return config
    return config.with_fields(data={"chat_template": chat_template.resolve_template(template)})


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
    for group in (train, evals):
        names = [source.name or source.source for source in group.values()]
        problems += [
            f"{field}.name = {name}: another source has this name. Give each its own: "
            f"{field}.name={name}-{number}."
            for number, (field, name) in enumerate(zip(group, names, strict=True))
            if name in names[:number]
        ]
    with problems.collect():
        sources.check_no_duplicates({field: records[field] for field in train if field in records})
    have_text = any(source.needs_tokenizer for source in (train | evals).values())
    return OpenedSources(train=train, evals=evals, records=records, have_text=have_text)


def make_data_sets(
    opened: OpenedSources,
    config: Config,
    tokenizer: Any,
    *,
    vocab_size: int,
    for_training: bool,
) -> tuple[PackedDataset | None, tuple[PackedDataset, ...]]:
    """Tokenizes and packs the training set (None unless `for_training`) and the eval sets.

    Records held out by data.eval_fraction are one more eval set. Damaged caches are rebuilt.

    Raises: UserError with the problems of all sources; DamagedCacheError for a file that is damaged
        again.
    """
    suggestion = (
        "If the tokenizer has more tokens than the embedding has rows, add rows with transformers: "
        "model.resize_token_embeddings(len(tokenizer)), then save_pretrained of both into one "
        "folder, and name it as model.source. Or leave the record out."
    )
    if config.model.source is None:
        suggestion = "Set model.config.vocab_size."
    elif config.model.tokenizer is not None:
        suggestion = "Use the model's own tokenizer: model.tokenizer=null."
    rebuilt: set[pathlib.Path] = set()
    while True:
        problems = ProblemCollector()
        tokenized = {}
        try:
            for field, source in (opened.train | opened.evals).items():
                with problems.collect(), at(f"{field}.source", source.source):
                    tokenized[field] = tokenize.tokenize_dataset(
                        opened.records[field],
                        tokenizer=tokenizer,
                        vocab_size=vocab_size,
                        vocab_suggestion=suggestion,
                    )
            problems.raise_if_any()
            return _pack_sources(opened, tokenized, config, for_training=for_training)
        except DamagedCacheError as damage:
            if damage.path in rebuilt:
                raise
            rebuilt.add(damage.path)
            distributed.log(damage.notice)


def _pack_sources(
    opened: OpenedSources,
    tokenized: Mapping[str, TokenizedSource],
    config: Config,
    *,
    for_training: bool,
) -> tuple[PackedDataset | None, tuple[PackedDataset, ...]]:
    """Packs the eval sets, then the training set."""
    names = {
        field: source.name or source.source
        for field, source in (opened.train | opened.evals).items()
    }
    held_out: Any = None  # a mask for each training source
    if config.data.eval_fraction is not None:
        held_out = select_records(
            [tokenized[field] for field in opened.train],
            source_names=[names[field] for field in opened.train],
            fraction=config.data.eval_fraction,
            seed=config.run.seed,
        )
    # Name, field, sources, masks of held-out records, and whether to pack those or the others
    sets: list[tuple[str, str, Mapping[str, Source], Any, bool]] = [
        (names[field], f"{field}.source", {field: source}, None, False)
        for field, source in opened.evals.items()
    ]
    if held_out is not None:
        sets.append((EVAL_SET_NAME, "data.eval_fraction", opened.train, held_out, True))
    if for_training:
        sets.append(("train", "data.train", opened.train, held_out, False))
    packed = []
    for name, field, members, masks, is_held_out in sets:
        parts = [tokenized[member] for member in members]
        with at(field):
            documents = Documents(
                parts,
                source_names=[names[member] for member in members],
                held_out=masks,
                use_held_out=is_held_out,
                row_tokens=config.data.row_tokens,
                long_documents=config.data.long_documents,
                has_scores=config.objective.type == "reward",
                numbers=config.objective.needs,
                equal_numbers=config.objective.needs_equal,
            )
        digests = [part.digest for part in parts]
        if masks is not None:
            digests = [
                digest_split(digest, mask, is_held_out=is_held_out)
                for digest, mask in zip(digests, masks, strict=True)
            ]
        weights = [source.weight for source in members.values() if source.weight is not None]
        has_weights = weights and len(members) > 1 and not is_held_out
        packed.append(
            dataset.pack_documents(
                name,
                documents,
                **config.step.packing,
                digests=digests,
                source_weights=weights if has_weights else None,
            )
        )
    train = packed.pop() if for_training else None
    return train, tuple(packed)
