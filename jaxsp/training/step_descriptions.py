"""Descriptions of a step for the banner and for plans."""

import jax

from jaxsp.blocks import float8
from jaxsp.config.yaml_io import format_value
from jaxsp.core import axes
from jaxsp.core.units import format_count
from jaxsp.model import adapters, decoder, flops
from jaxsp.objectives.objective import Sft
from jaxsp.system import device_mesh
from jaxsp.training.specs import StepSpec


def describe_objective(spec: StepSpec, reference: str = "the model of step 0") -> str:
    """Describes the objective; empty for sft. Defaults of token objectives are left
    out.

    Example: `dpo: beta 0.1, label_smoothing 0, sft_weight 0; the reference is the model of step 0`.
    """
    objective = spec.objective
    if isinstance(objective, Sft):
        return ""
    show = lambda value: f"{value:g}" if isinstance(value, float) else format_value(value)
    values = [
        f"{name} {show(value)}"
        for name, value in objective
        if name in ("loss_type", "divergence")
        or (name != "type" and objective.has_pairs)
        or value != type(objective).model_fields[name].default
    ]
    text = f"{objective.type}: {', '.join(values)}"
    if (teacher := spec.teacher) is not None:
        text += f"; the teacher has {flops.num_parameters(teacher.table):,} parameters"
        text += f", {describe_products(teacher)}" if teacher.model.linear_dtype else ""
    if objective.needs_reference:
        text += f"; the reference is {reference}"
        adapter = spec.config.adapter
        if adapter.source is not None:
            text += f" with the adapter {adapter.source}"
        elif adapter.type != "none":
            text += ", without the adapter"
    if spec.scores_pairs_first:
        reason = "its losses depend on the whole step"
        if not objective.needs_step:
            reason = "pairs have rows in two microbatches; an even number of rows per "
            reason += "microbatch avoids it"
        text += f"; a step has one forward pass more, because {reason}"
    return text


def describe_layers(spec: StepSpec) -> str:
    """Describes the blocks of the layers; empty if all have attention and an MLP."""
    is_quantized = spec.config.adapter.quantization != "none"
    is_gathered = device_mesh.num_shards(spec.mesh) > 1 and not is_quantized
    tokens = spec.tokens_per_device if is_gathered else None
    return decoder.describe_layers(spec.model, tokens_per_device=tokens)


def describe_batch(spec: StepSpec) -> str:
    """Describes the rows of a step and its microbatches.

    Example: `8 rows of 512 tokens per step, in 2 microbatches of 1 row per group`.
    """
    rows = format_count(spec.config.rows_per_step, "row")
    count = spec.num_microbatches
    microbatches = "1 microbatch" if count == 1 else f"{count:,} microbatches"
    per_group = format_count(spec.config.microbatch_rows, "row")
    owner = "device" if spec.mesh.shape[axes.SEQ] == 1 else "group"
    return (
        f"{rows} of {spec.config.row_tokens:,} tokens per step, in {microbatches} of "
        f"{per_group} per {owner}"
    )


def describe_products(spec: StepSpec) -> str:
    """Describes which matrices are multiplied in 8 bits; empty if none are requested.

    Example: `224 matrices multiplied in float8`.
    """
    model = spec.model
    if model.linear_dtype is None:
        return ""
    counts = {True: 0, False: 0}
    for param in jax.tree.leaves(spec.table):
        if param.is_projection:
            counts[float8.can_multiply(*param.shape)] += param.num_layers or 1
    others = []
    if counts[False]:
        others.append(f"{counts[False]:,} whose dims are not multiples of {float8.DIM_MULTIPLE}")
    if model.experts is not None:
        others.append("experts")
    text = f"{counts[True]:,} matrices multiplied in {model.linear_dtype}"
    if others:
        text += f", {' and '.join(others)} in {spec.config.compute_dtype}"
    return text


def describe_weights(spec: StepSpec) -> str:
    """Describes the number of weights, their dtypes, and which of them are trained."""
    params = jax.tree.leaves(spec.table)
    num_own = flops.num_parameters([param for param in params if not param.is_adapter])
    text = f"{num_own:,} parameters, {spec.config.compute_dtype} compute"
    if products := describe_products(spec):
        text += f" ({products})"
    if not spec.config.has_frozen_weights:
        return f"{text}, float32 master weights"
    num_trained = flops.num_parameters([param for param in params if param.is_trainable])
    formats = dict.fromkeys(param.frozen_as for param in params if param.frozen_as is not None)
    text += f"; {num_trained:,} are trained in float32 ({100 * num_trained / num_own:.2f} %)"
    if spec.model.lora is not None:
        description = adapters.describe(spec.model, spec.model.lora, spec.config.adapter)
        text += f": {description}"
    return f"{text}; the model's others are frozen in {' and '.join(formats)}"
