"""Small models on a mesh, and their logits token by token."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsp.blocks.config import ModelConfig
from jaxsp.blocks.layers import Weights
from jaxsp.generation.generator import Generator
from jaxsp.generation.programs import PER_ROW
from jaxsp.model.cached_layers import Answers
from jaxsp.sharding.sharding import Gather
from jaxsp.training import specs
from jaxsp.training.specs import StepSpec
from tests import batches

ROW_TOKENS = 64


def make_spec(
    model: ModelConfig,
    sizes: tuple[int, int, int],
    row_tokens: int = ROW_TOKENS,
    adapter: dict[str, Any] | None = None,
    compute_dtype: str = "float32",
    **fields: Any,
) -> StepSpec:
    """A step on a mesh. Args: fields: fields of the config's attention."""
    config = batches.make_config(adapter=adapter, compute_dtype=compute_dtype).step.change(
        row_tokens=row_tokens,
        mesh=dict(zip(("replica", "data", "seq"), sizes, strict=True)),
        attention=fields,
    )
    return specs.make_spec(config, model, devices=list(batches.mesh(*sizes).devices.flat))


def compute_logits(
    generator: Generator,
    master: Weights,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    gather: Gather | None = None,
) -> list[np.ndarray]:
    """Logits after each prompt and after each token of its answer except the last, in the programs
    that `Generator` runs. Shapes: [tokens of the answers, V] for each prompt.

    Args: gather: by default that for weights that are sharded as in training.
    """
    num_tokens = len(answers[0])
    programs = generator.choose_programs(
        len(prompts),
        prompt_tokens=max(map(len, prompts)),
        new_tokens=num_tokens,
        gather=gather or generator.spec.gather,
    )
    assert programs.num_rows >= len(prompts), "they are answered together"
    logits, cache, states = programs.prefill(master, programs.make_batch(prompts))
    state = Answers(programs.make_slots(cache, num_tokens), states)
    steps = [logits]
    for number in range(num_tokens - 1):
        tokens_B = np.zeros(programs.num_rows, np.int32)
        tokens_B[: len(prompts)] = [answer[number] for answer in answers]
        tokens = programs.put(tokens_B, PER_ROW)
        logits, state = programs.decode(master, tokens, cache, state, jnp.int32(number))
        steps.append(logits)
    by_row = np.stack(jax.device_get(steps), axis=1)
    return list(by_row[: len(prompts)])


def draw_texts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Random tokens of these numbers."""
    rng = np.random.default_rng(3)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]
