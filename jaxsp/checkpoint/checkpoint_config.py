"""Config section of checkpoints."""

from typing import Annotated

from jaxsp.config.fields import ConfigSection, NonNegativeCount, PositiveCount, with_examples


class CheckpointConfig(ConfigSection):
    """Checkpoint retention."""

    keep_latest: PositiveCount = 2
    """Number of latest checkpoints to keep. Older ones are deleted when the next one is complete,
    so the disk must hold one more. The run does not start without space for one checkpoint, and
    prints a warning without space for all."""
    keep_best: NonNegativeCount = 0
    """Number of checkpoints with the lowest loss on an eval set to keep, in addition to the latest
    ones. If it is not 0, the run evaluates before each checkpoint. A checkpoint that a stop writes
    is evaluated when the run resumes."""
    best_eval: Annotated[str | None, with_examples("held out", min_length=1)] = None
    """Name of the eval set whose loss ranks checkpoints for keep_best and decides early stopping.
    null: the first of data.eval, or held_out. After a change of this field or of that set's
    documents, earlier losses no longer count."""
