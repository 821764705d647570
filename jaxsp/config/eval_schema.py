"""Config section of evaluations: what is measured beside the loss of the eval sets."""

from typing import Annotated, Literal

from jaxsp.config.fields import ConfigSection, NonNegativeCount, PositiveCount, with_examples

TASK_DEFAULTS = {
    "needle": {"depths": 11},
    "multi_key": {},
    "multi_value": {},
    "multi_query": {},
    "variable_tracking": {},
    "frequent_words": {},
}
"""Fields that apply only to some tasks, with their defaults."""


class TaskConfig(ConfigSection):
    """A retrieval task: prompts whose answers are found in them."""

    task: Annotated[
        Literal[
            "needle",
            "multi_key",
            "multi_value",
            "multi_query",
            "variable_tracking",
            "frequent_words",
        ],
        with_examples("needle"),
    ]
    """Task, after RULER's, with jaxsp's own words and sentences. needle: a code hidden in
    sentences. multi_key: one of four codes with different keys. multi_value: four codes of one key.
    multi_query: the codes of four keys. variable_tracking: variables that get one value from each
    other. frequent_words: the three most frequent words. Results are the rate of answers of which
    each token is the most probable one, as greedy decoding would write them, and the mean loss of
    the answers' tokens. They are not RULER's score, which accepts other words around the answer."""
    lengths: Annotated[
        tuple[PositiveCount, ...],
        with_examples("[4096, 32768, 131072]", min_length=1, strict=False),
    ]
    """Lengths of prompt and answer together, in tokens. Samples of all lengths have the same
    questions."""
    depths: Annotated[PositiveCount | None, with_examples(11)] = None
    """Number of places of the needle, equally spaced from the start to the end of the text; 1: the
    middle. null: 11. Only for needle."""
    samples: PositiveCount = 20
    """Number of samples for each length, and for each depth of needle."""
    seed: NonNegativeCount = 0
    """Seed of keys, values and sentences."""

    @property
    def num_depths(self) -> int | None:
        """Number of places of the needle; None for tasks without this axis."""
        return self.depths or TASK_DEFAULTS[self.task].get("depths")


class EvalConfig(ConfigSection):
    """Measurements beside the loss of the eval sets, which data.eval lists."""

    tasks: Annotated[
        tuple[TaskConfig, ...],
        with_examples("[{task: needle, lengths: [4096, 32768]}]", strict=False),
    ] = ()
    """Retrieval tasks to measure at each evaluation."""
    long_ppl: bool = False
    """Also compute LongPPL of each eval set (Fang et al. 2024): perplexity of tokens that depend on
    far context: those whose loss falls by more than 2 to below 2 if the model sees more than the
    4,096 tokens before them. Takes a pass over five times the tokens."""
