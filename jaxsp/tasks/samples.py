"""Samples of evaluation tasks: every cell of a table of lengths and depths.

The samples depend on the seed, the task, the depth and the tokenizer, and not on the process or the
platform. Samples of different lengths have the same questions, so that lengths are compared by the
same questions; those of different depths have different ones.
"""

import zlib
from collections.abc import Callable

import numpy as np

from jaxsp.core.errors import UserError
from jaxsp.tasks.part_tokenizer import PartTokenizer
from jaxsp.tasks.registry import TASKS
from jaxsp.tasks.task import Sample, TooShortError


def make_samples(
    task: str,
    tokenize: Callable[[str], list[int]],
    *,
    length: int,
    depths: int | None,
    samples: int,
    seed: int,
    reserved_tokens: int = 0,
    field: str = "length",
) -> list[Sample]:
    """Makes the samples of one length, one depth after another.

    Args:
        task: a key of TASKS.
        tokenize: tokenizer without special tokens.
        length: maximum number of tokens of prompt, answer and reserved tokens.
        depths: number of equally spaced depths, for a task with a depth; otherwise None.
        samples: number of samples for each depth.
        reserved_tokens: number of tokens that the caller adds, such as BOS.
        field: name of the field that has the length, for errors.

    Raises: UserError for a length in which the question does not fit, with the smallest that works.
    """
    assert TASKS[task].has_depth == (depths is not None)
    parts = PartTokenizer(tokenize)
    task_key = zlib.crc32(task.encode())  # Python's hash differs between processes
    made = []
    min_length = 0
    all_depths: list[float | None] = [None]
    if depths is not None:
        all_depths = [0.5] if depths == 1 else [index / (depths - 1) for index in range(depths)]
    for depth in all_depths:
        depth_key = 0 if depth is None else 1 + round(depth * 1e6)
        for index in range(samples):
            random = np.random.default_rng([seed, task_key, depth_key, index])
            try:
                prompt_ids, answer_ids = TASKS[task].make_sample(
                    parts, random, max_tokens=length - reserved_tokens, depth=depth
                )
            except TooShortError as error:
                min_length = max(min_length, error.min_tokens + reserved_tokens)
                continue
            made.append(
                Sample(prompt_ids=prompt_ids, answer_ids=answer_ids, length=length, depth=depth)
            )
    if min_length:
        raise UserError(
            f"{field} = {length}: must be at least {min_length}, the tokens of the shortest "
            f"prompts and answers of {task} with this tokenizer. Use {min_length} or more."
        )
    return made
