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
from jaxsp.tasks.task import Sample, Task, TooShortError


def make_samples(
    task: Task,
    tokenize: Callable[[str], list[int]],
    *,
    length: int,
    reserved_tokens: int = 0,
    field: str = "length",
) -> list[Sample]:
    """Makes the samples of one length, one depth after another.

    Args:
        tokenize: tokenizer without special tokens.
        length: maximum number of tokens of prompt, answer and reserved tokens.
        reserved_tokens: number of tokens that the caller adds, such as BOS.
        field: name of the field that has the length, for errors.

    Raises: UserError for a length in which the question does not fit, with the smallest that works.
    """
    parts = PartTokenizer(tokenize)
    task_key = zlib.crc32(task.task.encode())  # Python's hash differs between processes
    made = []
    min_length = 0
    for depth in task.list_depths():
        depth_key = 0 if depth is None else 1 + round(depth * 1e6)
        for index in range(task.samples):
            random = np.random.default_rng([task.seed, task_key, depth_key, index])
            try:
                prompt_ids, answer_ids = task.make_sample(
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
            f"prompts and answers of {task.task} with this tokenizer. Use {min_length} or more."
        )
    return made
