"""Config sections of the data and the batch."""

from collections.abc import Iterator
from typing import Annotated, Literal

import pydantic

from jaxsp.config.fields import (
    HERE,
    Choice,
    ConfigSection,
    CountOrAuto,
    Date,
    NonNegativeCount,
    PositiveCount,
    for_training,
    with_examples,
)
from jaxsp.data.chat_formats import Messages, Preference, PromptCompletion, Unpaired
from jaxsp.data.plain import Text, Tokens, Trajectories
from jaxsp.data.source import Source

FORMATS = (Text, Messages, PromptCompletion, Preference, Unpaired, Tokens, Trajectories)

FORMAT = Choice(selector="format", types=FORMATS)


class DataConfig(ConfigSection):
    """Training and eval data, and how they are packed into rows."""

    train: tuple[Annotated[Source, FORMAT], ...] = for_training(
        "[{source: notes/*.txt, format: text}]", default=(), strict=False
    )
    """Sources of the training documents."""
    eval: Annotated[
        tuple[Annotated[Source, FORMAT], ...],
        with_examples("[{source: held-out/*.txt, format: text}]", strict=False),
    ] = ()
    """Data sets to evaluate on, each separately. Their fields are those of data.train, except
    weight."""
    eval_fraction: Annotated[float | None, with_examples(0.05, gt=0, lt=1)] = None
    """Fraction of the training documents to hold out as an eval set named held_out, in addition to
    data.eval; rounded up. A hash of run.seed, the source's name and the document's index selects
    them, so every mesh and every resume holds out the same documents. A change of the fraction is a
    change of the data (run.on_data_change)."""
    row_tokens: Annotated[PositiveCount, with_examples(8192)]
    """Length of a row in tokens; documents are packed into rows."""
    max_segments_per_row: PositiveCount = 64
    """Maximum number of segments (documents or parts of them) in one row."""
    long_documents: Literal["split", "truncate", "drop", "error"] = "split"
    """Action for a document longer than a row. split: put its segments into several
    rows. truncate: keep its beginning. drop: leave it out. error: refuse to start."""
    chat_template: Annotated[str | None, with_examples("template.jinja", min_length=1)] = None
    """File with a chat template (Jinja), or the template itself. null: the tokenizer's own."""
    chat_template_date: Annotated[Date | None, with_examples("2026-11-25")] = None
    """Date to use as today's date in chat templates that write it (SmolLM3's, Granite's), so that
    tokens do not change from day to day. null: the template's fallback, or an error without one."""
    chat_template_kwargs: Annotated[
        dict[str, pydantic.JsonValue], with_examples("{enable_thinking: false}")
    ] = {}  # noqa: RUF012 - pydantic copies it
    """Variables of the chat template for all records, such as enable_thinking: false for Qwen3's. A
    record's own chat_template_kwargs take precedence, one by one. Exports have the values as
    defaults of their template."""
    earlier_reasoning: Literal["error", "keep", "no_loss"] = "error"
    """Action for an answer whose thinking the chat template drops because other messages follow (as
    Qwen3's does): the model would learn to answer without thinking. error: refuse the record. keep:
    train on the answer without it. no_loss: no loss on that answer."""
    train_on: Literal["assistant", "all"] = "assistant"
    """Tokens that have a loss. assistant: only the assistant's part of messages, and the completion
    of other formats with prompts. all: every token."""
    on_bad_record: Literal["error", "skip"] = "error"
    """Action for a record that does not match its format. error: refuse to start. skip: leave it
    out and count it."""
    max_bad_records: NonNegativeCount = 100
    """Maximum number of skipped records per source. With more, the run does not start."""
    num_workers: Annotated[PositiveCount | None, with_examples(8)] = None
    """Number of processes that tokenize. null: one per core, or fewer for little data."""

    @property
    def eval_names(self) -> list[str]:
        """Names of the eval sets."""
        names = [source.name or source.source for source in self.eval]
        return names if self.eval_fraction is None else [*names, "held_out"]

    def find_problems(self) -> Iterator[str]:
        weighted = [number for number, source in enumerate(self.eval) if source.weight is not None]
        for number in weighted[:1]:
            yield (
                f"{HERE}.eval.{number}.weight: must not be set, because each eval set is "
                "evaluated separately, as a whole. Leave it out."
            )
        has_weight = [source.weight is not None for source in self.train]
        if any(has_weight) and not all(has_weight):
            index = has_weight.index(False)
            yield (
                f"{HERE}.train.{index}.weight: missing. Set it for all sources or for none: "
                f"{HERE}.train.{index}.weight=1."
            )
        sources = (*self.train, *self.eval)
        for name in ("chat_template", "chat_template_kwargs"):
            if getattr(self, name) and self.train and not any(each.is_chat for each in sources):
                yield (
                    f"{self.show(name)}: has no effect, because all sources have the format text "
                    "or tokens. Leave it out."
                )
        pairs = [source.format for source in sources if source.num_documents > 1]
        if self.train_on == "all" and pairs:
            yield (
                f"{HERE}.train_on = all: only completions of records with format: {pairs[0]} have "
                f"a loss. Use {HERE}.train_on=assistant."
            )
        default = type(self).model_fields["max_segments_per_row"].default
        # A run saves its config with all defaults, so this default must be valid for short rows too
        if default != self.max_segments_per_row > self.row_tokens:
            yield (
                f"{self.show('max_segments_per_row')}: must be at most {self.row_tokens}, the "
                f"tokens of a row. Use {min(default, self.row_tokens)}, or the number your "
                "documents need."
            )
        names = self.eval_names
        if self.eval_fraction is not None and "held_out" in names[:-1]:
            name = f"{HERE}.eval.{names.index('held_out')}.name"
            yield (
                f"{name} = held_out: is also the name of the documents that {HERE}.eval_fraction "
                f"holds out. Use another name: {name}=held_out-{names.index('held_out')}."
            )


class BatchConfig(ConfigSection):
    """Number of rows per step."""

    rows_per_step: PositiveCount = for_training(8, default=1)
    """Rows per optimizer update, over the whole mesh; the same for every mesh shape."""
    rows_per_microbatch: Annotated[CountOrAuto, with_examples(2)] = 1
    """Rows per microbatch and sequence-parallel group. The microbatches of a step run one after
    another. auto: the largest number that, by the memory formula, needs no more recomputation than
    1, so that weights are gathered less often; 1 if the formula cannot guarantee it, or if the
    devices' memory is unknown (CPU)."""
