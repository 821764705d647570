"""Documents and the rows they are packed into: what a run learns from, or is evaluated on."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxsp.config import schema, yaml_io
from jaxsp.core import errors
from jaxsp.data.packing import mixing, packing, pipeline, row_reader

_LONG_DOCUMENTS = "data.long_documents"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSet:
    """Documents and the streams of rows they are packed into, one for each length that documents need, the shortest first."""

    name: str
    documents: row_reader.Documents
    streams: tuple[mixing.Stream, ...]
    shares: tuple[float, ...]
    """Of all steps, those with rows of each stream."""
    digests: tuple[str, ...]
    """Of each source's tokens."""
    weights: tuple[float, ...] | None
    """Of each source, adding up to 1; None where all documents are packed together."""

    @property
    def origins(self) -> list[tuple[row_reader.Source, str]]:
        """Each source, with the digest of its tokens."""
        return list(zip(self.documents.sources, self.digests, strict=True))

    def schedule(
        self,
        settings: schema.Config,
        *,
        consumed: Mapping[int, int] | None = None,
        num_steps: int | None = None,
        epochs: int | None = None,
    ) -> mixing.Schedule:
        """The steps to come: so many, or to the end of so many epochs.

        Args: consumed: rows consumed before, by their length.
        """
        begin = [(consumed or {}).get(stream.row_tokens, 0) for stream in self.streams]
        return mixing.schedule(
            begin=begin,
            rows_per_step=[settings.for_rows_of(stream.row_tokens).batch.rows_per_step for stream in self.streams],
            shares=self.shares,
            seed=settings.run.seed,
            num_steps=num_steps,
            ends=None if epochs is None else [max(s.rows_in(epochs), b) for s, b in zip(self.streams, begin, strict=True)],
        )

    def ends_epoch(self, schedule: mixing.Schedule, num_steps: int) -> bool:
        """True if an epoch ends with a step of a schedule.

        With rows of several lengths: a pass over all of them.
        """
        before, after = (min(map(_num_epochs, self.streams, schedule.consumed(steps))) for steps in (num_steps - 1, num_steps))
        return after > before

    def feed(
        self, settings: schema.Config, mesh: jax.sharding.Mesh, schedule: mixing.Schedule, *, layout: int
    ) -> pipeline.Pipeline:
        """The steps of a schedule, for a mesh. Args: layout: the degree of the rows' layout, core/layout.py."""
        return pipeline.Pipeline(self.documents, self.streams, schedule, mesh=mesh, settings=settings, layout=layout)

    def fingerprint(self, settings: schema.Config) -> dict[str, Any]:
        """All that decides which documents lie in which row, and in which order the rows come; in JSON's types."""
        data = settings.data
        return {
            "run.seed": settings.run.seed,
            "data.eval_fraction": data.eval_fraction,
            "data.row_tokens": list(data.row_lengths) if len(data.row_lengths) > 1 else data.longest_row,
            "data.max_documents_per_row": data.max_documents_per_row,
            # where no document is too long, they are the same rows
            _LONG_DOCUMENTS: data.long_documents if any(map(row_reader.Source.had_long, self.documents.sources)) else None,
            "weights": None if self.weights is None else list(self.weights),
            "sources": [
                {"name": one.name, "documents": one.num_documents, "tokens": one.num_tokens, "digest": digest}
                for one, digest in self.origins
            ],
        }


def _num_epochs(stream: mixing.Stream, num_rows: int) -> int:
    """Complete passes in the first rows of a stream. Plans no epoch that they do not reach."""
    epoch = stream.epoch_of(num_rows - 1) if num_rows else 0
    assert epoch is not None, "sources mixed by weight have no epochs"
    return epoch + (num_rows == stream.rows_in(epoch + 1))


def _default(name: str) -> Any:
    """Default of a field of the config."""
    _, field = name.split(".")
    group = schema.Run if name.startswith("run.") else schema.Data
    return group.model_fields[field].get_default()


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What makes other rows than before, in words; nothing where the rows are the same."""
    said = []
    for name in (name for name in now if "." in name):
        # an earlier version, which had no such field, did what its default does
        was = before[name] if name in before else _default(name)
        # null: no document was too long, and then the field decides nothing
        is_idle = name == _LONG_DOCUMENTS and None in (was, now[name])
        if now[name] != was and not is_idle:
            said.append(f"{name} = {yaml_io.line(now[name])}, and was {yaml_io.line(was)}")
    if before["weights"] != now["weights"]:
        said.append(f"weights of data.train = {now['weights']}, and were {before['weights']}")
    if len(before["sources"]) != len(now["sources"]):
        said.append(f"data.train has {len(now['sources'])} sources, and had {len(before['sources'])}")
        return said
    for number, (was, one) in enumerate(zip(before["sources"], now["sources"], strict=True)):
        if was["digest"] == one["digest"] and was["tokens"] == one["tokens"]:
            continue  # under another name they are the same documents
        counts = "; ".join(f"{one[what]:,} {what}, and had {was[what]:,}" for what in ("documents", "tokens"))
        said.append(f"data.train.{number} ({one['name']}) has other tokens than before: {counts}")
    return said


def of(
    name: str,
    documents: row_reader.Documents,
    settings: schema.Config,
    *,
    digests: Sequence[str],
    weights: Sequence[float] | None = None,
) -> DataSet:
    """Documents packed: each in rows of the shortest length that holds it, all together or, with weights, source by source."""
    lengths, row_lengths = documents.lengths, settings.data.row_lengths
    wanted = np.minimum(np.searchsorted(row_lengths, lengths), len(row_lengths) - 1)
    source_of = documents.source_of(np.arange(len(lengths))) if weights is not None else np.zeros(len(lengths), np.int64)
    if weights is not None:
        scaled = np.divide(weights, max(weights))  # the sum of very large weights would be infinite
        weights = tuple((scaled / scaled.sum()).tolist())
    # tokens that the rows of one length and source should have, of all tokens: as many as the source has in this length
    pools = (1.0,) if weights is None else weights
    tokens = np.bincount(source_of, lengths, minlength=len(pools))
    if not tokens.all():
        empty = int(np.argmin(tokens))
        source = documents.sources[empty]
        reason = "see data.long_documents and data.on_bad_record"
        if source.num_held_out:
            reason = (
                f"hold out fewer documents (data.eval_fraction = {settings.data.eval_fraction:g} "
                f"holds out {source.num_held_out:,} of this source)"
            )
        raise errors.UserError(
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
                packing.Epochs(
                    lengths[chosen],
                    row_tokens=row_tokens,
                    max_pieces=settings.data.max_documents_per_row,
                    seed=settings.run.seed,
                    documents=chosen,
                )
            )
            members.append(pool)
            rates.append(weight * parts[-1].rows_in(1) / tokens[pool])
        if parts:
            streams.append(
                mixing.Stream(
                    parts, (np.array(rates) / sum(rates)).tolist(), row_tokens=row_tokens, sources=members if weights else ()
                )
            )
            shares.append(sum(rates) * row_tokens)
    return DataSet(
        name=name,
        documents=documents,
        streams=tuple(streams),
        shares=tuple((np.array(shares) / sum(shares)).tolist()),
        digests=tuple(digests),
        weights=weights,
    )
