"""Documents and the rows they are packed into: what a run learns from, or is evaluated on."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxsp.config import yaml_io
from jaxsp.config.data_schema import DataConfig
from jaxsp.config.run_schema import RunConfig
from jaxsp.config.schema import Config
from jaxsp.core.errors import UserError
from jaxsp.data.packing import mixing
from jaxsp.data.packing.mixing import RowSchedule, RowStream
from jaxsp.data.packing.packing import PackedEpochs
from jaxsp.data.packing.pipeline import BatchLoader
from jaxsp.data.packing.row_reader import Documents, SourceCounts

_LONG_DOCUMENTS = "data.long_documents"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedDataset:
    """Documents and the streams of rows they are packed into, one for each length that documents need, the shortest first."""

    name: str
    documents: Documents
    streams: tuple[RowStream, ...]
    step_fractions: tuple[float, ...]
    """Of all steps, those with rows of each stream."""
    digests: tuple[str, ...]
    """Of each source's tokens."""
    source_weights: tuple[float, ...] | None
    """Of each source, adding up to 1; None where all documents are packed together."""

    @property
    def digested_sources(self) -> list[tuple[SourceCounts, str]]:
        """Each source, with the digest of its tokens."""
        return list(zip(self.documents.sources, self.digests, strict=True))

    def make_schedule(
        self,
        config: Config,
        *,
        consumed: Mapping[int, int] | None = None,
        num_steps: int | None = None,
        epochs: int | None = None,
    ) -> RowSchedule:
        """The steps to come: so many, or to the end of so many epochs.

        Args: consumed: rows consumed before, by their length.
        """
        begin = [(consumed or {}).get(stream.row_tokens, 0) for stream in self.streams]
        return mixing.build_schedule(
            begin_rows=begin,
            rows_per_step=[
                config.with_row_tokens(stream.row_tokens).batch.rows_per_step
                for stream in self.streams
            ],
            fractions=self.step_fractions,
            seed=config.run.seed,
            num_steps=num_steps,
            end_rows=None
            if epochs is None
            else [max(s.count_rows(epochs), b) for s, b in zip(self.streams, begin, strict=True)],
        )

    def is_epoch_end(self, schedule: RowSchedule, num_steps: int) -> bool:
        """True if an epoch ends with a step of a schedule.

        With rows of several lengths: a pass over all of them.
        """
        before, after = (
            min(map(_count_epochs, self.streams, schedule.rows_consumed(steps)))
            for steps in (num_steps - 1, num_steps)
        )
        return after > before

    def make_loader(
        self, config: Config, mesh: jax.sharding.Mesh, schedule: RowSchedule, *, layout_degree: int
    ) -> BatchLoader:
        """The steps of a schedule, for a mesh. Args: layout: the degree of the rows' layout, core/layout.py."""
        return BatchLoader(
            self.documents,
            self.streams,
            schedule,
            mesh=mesh,
            config=config,
            layout_degree=layout_degree,
        )

    def fingerprint(self, config: Config) -> dict[str, Any]:
        """All that decides which documents lie in which row, and in which order the rows come; in JSON's types."""
        data = config.data
        return {
            "run.seed": config.run.seed,
            "data.eval_fraction": data.eval_fraction,
            "data.row_tokens": list(data.row_lengths)
            if len(data.row_lengths) > 1
            else data.max_row_tokens,
            "data.max_segments_per_row": data.max_segments_per_row,
            # where no document is too long, they are the same rows
            _LONG_DOCUMENTS: data.long_documents
            if any(map(SourceCounts.has_long_documents, self.documents.sources))
            else None,
            "weights": None if self.source_weights is None else list(self.source_weights),
            "sources": [
                {
                    "name": one.name,
                    "documents": one.num_documents,
                    "tokens": one.num_tokens,
                    "digest": digest,
                }
                for one, digest in self.digested_sources
            ],
        }


def _count_epochs(stream: RowStream, num_rows: int) -> int:
    """Complete passes in the first rows of a stream. Plans no epoch that they do not reach."""
    epoch = stream.find_epoch(num_rows - 1) if num_rows else 0
    assert epoch is not None, "sources mixed by weight have no epochs"
    return epoch + (num_rows == stream.count_rows(epoch + 1))


def _default_value(name: str) -> Any:
    """Default of a field of the config."""
    _, field = name.split(".")
    group = RunConfig if name.startswith("run.") else DataConfig
    return group.model_fields[field].get_default()


def describe_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What makes other rows than before, in words; nothing where the rows are the same."""
    said = []
    for name in (name for name in now if "." in name):
        # an earlier version, which had no such field, did what its default does
        was = before[name] if name in before else _default_value(name)
        # null: no document was too long, and then the field decides nothing
        is_idle = name == _LONG_DOCUMENTS and None in (was, now[name])
        if now[name] != was and not is_idle:
            said.append(
                f"{name} = {yaml_io.format_value(now[name])}, and was {yaml_io.format_value(was)}"
            )
    if before["weights"] != now["weights"]:
        said.append(f"weights of data.train = {now['weights']}, and were {before['weights']}")
    if len(before["sources"]) != len(now["sources"]):
        said.append(
            f"data.train has {len(now['sources'])} sources, and had {len(before['sources'])}"
        )
        return said
    for number, (was, one) in enumerate(zip(before["sources"], now["sources"], strict=True)):
        if was["digest"] == one["digest"] and was["tokens"] == one["tokens"]:
            continue  # under another name they are the same documents
        counts = "; ".join(
            f"{one[what]:,} {what}, and had {was[what]:,}" for what in ("documents", "tokens")
        )
        said.append(f"data.train.{number} ({one['name']}) has other tokens than before: {counts}")
    return said


def pack_documents(
    name: str,
    documents: Documents,
    config: Config,
    *,
    digests: Sequence[str],
    source_weights: Sequence[float] | None = None,
) -> PackedDataset:
    """Documents packed: each in rows of the shortest length that holds it, all together or, with weights, source by source."""
    lengths, row_lengths = documents.lengths, config.data.row_lengths
    wanted = np.minimum(np.searchsorted(row_lengths, lengths), len(row_lengths) - 1)
    source_of = (
        documents.find_sources(np.arange(len(lengths)))
        if source_weights is not None
        else np.zeros(len(lengths), np.int64)
    )
    if source_weights is not None:
        scaled = np.divide(
            source_weights, max(source_weights)
        )  # the sum of very large weights would be infinite
        source_weights = tuple((scaled / scaled.sum()).tolist())
    # tokens that the rows of one length and source should have, of all tokens: as many as the source has in this length
    pools = (1.0,) if source_weights is None else source_weights
    tokens = np.bincount(source_of, lengths, minlength=len(pools))
    if not tokens.all():
        empty = int(np.argmin(tokens))
        source = documents.sources[empty]
        reason = "see data.long_documents and data.on_bad_record"
        if source.num_held_out:
            reason = (
                f"hold out fewer documents (data.eval_fraction = {config.data.eval_fraction:g} "
                f"holds out {source.num_held_out:,} of this source)"
            )
        raise UserError(
            f"data.train.{empty} ({source.name}): no document is left of it, and it has a weight. Leave it out, or {reason}."
        )
    streams, shares = [], []
    for number, row_tokens in enumerate(row_lengths):
        parts, rates, members = [], [], []
        for pool, weight in enumerate(pools):
            chosen = np.flatnonzero((wanted == number) & (source_of == pool))
            if not len(chosen):
                continue
            parts.append(
                PackedEpochs(
                    lengths[chosen],
                    row_tokens=row_tokens,
                    max_segments=config.data.max_segments_per_row,
                    seed=config.run.seed,
                    documents=chosen,
                )
            )
            members.append(pool)
            rates.append(weight * parts[-1].count_rows(1) / tokens[pool])
        if parts:
            streams.append(
                RowStream(
                    parts,
                    (np.array(rates) / sum(rates)).tolist(),
                    row_tokens=row_tokens,
                    sources=members if source_weights else (),
                )
            )
            shares.append(sum(rates) * row_tokens)
    return PackedDataset(
        name=name,
        documents=documents,
        streams=tuple(streams),
        step_fractions=tuple((np.array(shares) / sum(shares)).tolist()),
        digests=tuple(digests),
        source_weights=source_weights,
    )
