"""Samples of the retrieval tasks of a config."""

import dataclasses
from typing import Any

import numpy as np

from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.data.tokenization import encoding
from jaxsp.evaluation.retrieval import Samples
from jaxsp.run.config_file import Config
from jaxsp.tasks.task import Sample


def make(config: Config, tokenizer: Any) -> Samples:
    """Makes the samples of `eval.tasks`, by task; prompts begin as every text of the tokenizer.

    Raises: UserError for lengths that no prompt fits, and for models that predict no tokens.
    """
    if not config.eval.tasks:
        return {}
    if config.objective.type == "reward":
        raise UserError(
            "eval.tasks: a reward model predicts no tokens, so it has no answers. Leave the tasks "
            "out."
        )
    first_ids = np.array(encoding.surrounding_tokens(tokenizer)[0], np.int32)
    tokenize = lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    made: dict[str, list[Sample]] = {}
    problems = ProblemCollector()
    for number, task in enumerate(config.eval.tasks):
        field = f"eval.tasks.{number}.lengths"
        for length in task.lengths:
            with problems.collect():
                samples = task.make_samples(
                    tokenize, length=length, reserved_tokens=len(first_ids), field=field
                )
                made.setdefault(task.task, []).extend(
                    dataclasses.replace(sample, prompt_ids=np.append(first_ids, sample.prompt_ids))
                    for sample in samples
                )
    problems.raise_if_any()
    return made
