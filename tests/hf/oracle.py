"""Small models of every family in transformers and torch, with the same weights for both sides."""

import contextlib
import copy
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
import yaml

from jaxsp.attention.attend import make_attend
from jaxsp.blocks import layers
from jaxsp.blocks.config import ModelConfig
from jaxsp.blocks.layers import Parameter
from jaxsp.core.batch import NO_LABEL, Batch
from jaxsp.hf import families
from jaxsp.hf.families import FAMILIES, MULTIMODAL_FAMILIES
from jaxsp.model import decoder
from jaxsp.model.remat import RematPolicy
from jaxsp.training import loss
from tests import batches, unsharded

torch = pytest.importorskip(
    "torch", reason="torch is not installed: it is what transformers computes with (extra `test`)"
)

MODELS: dict[str, dict[str, Any]] = {
    name: fields
    for name, fields in yaml.safe_load(
        pathlib.Path(__file__).with_name("models.yaml").read_text(encoding="utf-8")
    ).items()
    if not name.startswith(".")  # parts of others
}
"""Fields of config.json by name."""

TEXT_EXPORTS = [name for name in MODELS if not FAMILIES[MODELS[name]["model_type"]].has_other_parts]
"""The models for which transformers has a class; of the others, it has one with all parts."""


def add_other_parts(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of the multimodal config.json of a text model for which transformers has no class."""
    text_type = fields["model_type"]
    (multimodal_type,) = (
        name for name, family in MULTIMODAL_FAMILIES.items() if text_type in family.text_types
    )
    return {
        "model_type": multimodal_type,
        "architectures": [families.find_architecture(text_type)],
        "text_config": fields,
        "vision_config": {
            **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
            **{"num_attention_heads": 2, "patch_size": 2, "pos_emb_height": 4, "pos_emb_width": 4},
        },
        "out_hidden_size": 64,
        "projector_hidden_size": 8,
        "tie_word_embeddings": fields.get("tie_word_embeddings", False),
    }


def torch_model(fields: dict[str, Any], auto_class: Any = transformers.AutoModelForCausalLM) -> Any:
    """A model with random weights: no bias is 0, no norm is 1, and attention is not uniform."""
    family = FAMILIES.get(fields["model_type"])
    if family is not None and family.has_other_parts:
        whole = add_other_parts(fields)
        return TextPart(torch_model(whole, transformers.AutoModelForImageTextToText))
    config = transformers.AutoConfig.for_model(**copy.deepcopy(fields))
    model = auto_class.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in named_weights(model).items():
            mean = 1.0 if "norm" in name or "scal" in name else 0.0
            weight.normal_(mean, 0.3, generator=generator)
    return model


def named_weights(model: Any) -> dict[str, Any]:
    """All weights by name, also those that are not trained (the numbers that correct the choice of
    experts)."""
    stored = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    return {**dict(model.named_parameters()), **buffers}


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """transformers computes in float64, also where its code casts to float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def float64_gradients(model: Any, documents: list[np.ndarray]) -> "Result":
    """`gradients` of a model's weights, in float64. Args: model: its weights are float32."""
    with float64():
        return gradients(widen(model), documents)


def widen(model: Any) -> Any:
    """The model in float64."""
    config = copy.deepcopy(model.config)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    wide = type(model)._from_config(config, **eager).double()
    wide.load_state_dict({name: x.double() for name, x in model.state_dict().items()})
    return wide


def as_published(named: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors under the names of files on the hub.

    Of experts, the modules of transformers have one tensor for all. Of OLMo Hybrid, they have one
    convolution for q, k and v, and the files that it writes have other norms, and rows of the
    convolution divided into equal parts.
    """
    renamed = {}
    for name, array in named.items():
        name = name.replace("attention_layer_norm", "input_layernorm")
        name = name.replace("feedforward_layer_norm", "post_attention_layernorm")
        renamed[name] = array
    for name in [name for name in renamed if name.endswith("linear_attn.q_proj.weight")]:
        layer = name.removesuffix("q_proj.weight")
        parts = {part: f"{layer}{part}_conv1d.weight" for part in "qkv"}
        stored = [renamed.pop(part, None) for part in (f"{layer}conv1d.weight", *parts.values())]
        whole = np.concatenate([part for part in stored if part is not None])
        for part, part_name in parts.items():
            count = len(renamed[f"{layer}{part}_proj.weight"])
            renamed[part_name], whole = whole[:count], whole[count:]
        assert not len(whole), name
    for name in [name for name in renamed if ".block_sparse_moe." in name]:
        layer, _, module = name.partition("block_sparse_moe.")
        new_name = f"{layer}block_sparse_moe.{_GRANITE_NAMES.get(module, module)}"
        renamed[new_name] = renamed.pop(name)
    is_gpt_oss = any(name.endswith("_proj_bias") for name in renamed)
    for name in [
        name
        for name in renamed
        if ".mlp.experts." in name and "_proj.weight" not in name and "lora" not in name
    ]:
        if is_gpt_oss:
            break  # its files have the names and tensors of modules
        layer, _, module = name.partition("mlp.experts.")
        for expert, whole in enumerate(renamed.pop(name)):
            parts = np.split(whole, 2) if module == "gate_up_proj" else [whole]
            ends = ("gate", "up") if module == "gate_up_proj" else ("down",)
            for end, part in zip(ends, parts, strict=True):
                renamed[f"{layer}mlp.experts.{expert}.{end}_proj.weight"] = part
    return renamed


_GRANITE_NAMES = {
    "router.weight": "router.layer.weight",
    "experts.gate_up_proj": "input_linear.weight",
    "experts.down_proj": "output_linear.weight",
}

_MIXTRAL_NAMES = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def as_mixtral(name: str) -> str:
    """Name of a tensor of a layer's experts in Mixtral's files."""
    return ".".join(_MIXTRAL_NAMES.get(part, part) for part in name.split("."))


class TextPart(torch.nn.Module):
    """Text model and head of a multimodal model, with the tensor names of a text model."""

    def __init__(self, whole: Any):
        super().__init__()
        self.model = whole.model.language_model
        self.lm_head = whole.lm_head
        self.run = whole.forward  # not `whole`, which would be a part of this module

    def forward(self, tokens: Any) -> Any:
        return self.run(input_ids=tokens)

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()


def stacked(named: dict[str, Any], table: layers.Weights) -> layers.Weights:
    """Tensors by their Hugging Face name, as jaxsp's nested dict; each is used exactly once."""
    left = as_published({name: tensor.detach().numpy() for name, tensor in named.items()})
    if any("block_sparse_moe" in param.hf_name for param in jax.tree.leaves(table)):
        left = {as_mixtral(name): array for name, array in left.items()}

    used = set()

    def take_one(param: Parameter, name: str, layer: int | None) -> np.ndarray:
        used.add(name)
        if param.joined_layers is not None:
            return left[name][param.find_block(2 * (slice(None),), layer)]
        whole = param.view_matrices(left[name])
        if param.hf_rows is None:
            return whole
        axis = whole.ndim - len(param.matrix_shape)
        return whole.take(param.hf_rows.find(np.arange(param.matrix_shape[0])), axis=axis)

    def take_layer(param: Parameter, layer: int | None) -> np.ndarray:
        parts = [take_one(param, name, layer) for _, name in param.list_tensors(layer)]
        return np.stack(parts) if param.has_tensor_per_expert else parts[0]

    def take(param: Parameter) -> np.ndarray:
        if param.layers is None:
            return take_layer(param, None)
        return np.stack([take_layer(param, layer) for layer in param.layers])

    weights = jax.tree.map(take, table)
    assert used == left.keys(), f"jaxsp has no parameter for {sorted(left.keys() - used)}"
    return weights


class Result(NamedTuple):
    """Results of transformers or of jaxsp."""

    loss: Any
    """Mean loss over all labels."""
    logits: Any
    gradients: Any
    """Gradients: by Hugging Face name for transformers, a nested dict for jaxsp."""


def gradients(model: Any, documents: list[np.ndarray]) -> Result:
    """Result of transformers and torch, each document in a row of its own.

    The logits are a list with an array for each document.
    """
    model.zero_grad()
    losses = []
    logits = []
    for document in documents:
        tokens = torch.from_numpy(document.astype(np.int64))
        logits.append(model(tokens[None]).logits[0])
        losses.append(
            torch.nn.functional.cross_entropy(logits[-1][:-1], tokens[1:], reduction="sum")
        )
    mean = sum(losses) / sum(len(document) - 1 for document in documents)
    mean.backward()
    grads = {name: torch.zeros_like(buffer) for name, buffer in named_weights(model).items()}
    grads |= {name: weight.grad for name, weight in model.named_parameters()}
    return Result(mean.item(), [part.detach().numpy() for part in logits], grads)


@functools.cache
def jaxsp_result(config: ModelConfig) -> Callable[[layers.Weights, Batch], Result]:
    """Result of the code that training runs; logits are [rows, tokens, vocabulary]."""
    table = decoder.param_table(config)
    dtype = jnp.dtype("float32")
    gather = unsharded.UnshardedGather()
    attend = make_attend(seq=1, kernel="blockwise", layer_scores=config.layer_scores)

    @jax.jit
    def run(weights: layers.Weights, batch: Batch) -> Result:
        def mean_loss(weights: layers.Weights) -> tuple[Any, Any]:
            hidden, _ = decoder.hidden_states(
                weights,
                batch,
                config=config,
                attend=attend,
                gather=gather,
                dtype=dtype,
                policy=RematPolicy(),
                tile_tokens=4096,
            )
            head = decoder.lm_head(weights)
            transform = functools.partial(decoder.transform_logits, config)
            whole = loss.Head(
                gather=gather,
                param=decoder.lm_head(table),
                shard=head,
                tile=7,
                transform_logits=transform,
            )
            sums = loss.sum_token_losses(loss.Tile(hidden, batch.labels_BL), whole)
            count = (batch.labels_BL != NO_LABEL).sum().astype(dtype)
            return sums["loss_sum"] / count, transform(hidden @ head.T)

        (mean, logits), grads = jax.value_and_grad(mean_loss, has_aux=True)(weights)
        return Result(mean, logits, grads)

    return run


def packed_rows(segments: batches.Segments, *, vocab_size: int) -> dict[str, np.ndarray]:
    """Rows of 24 tokens with random documents; four slots, so that a model is compiled once."""
    arrays = batches.make_rows(segments, num_tokens=24, vocab_size=vocab_size, seed=2)
    slots = {
        name: np.pad(arrays[name], ((0, 0), (0, 4 - arrays[name].shape[1])))
        for name in ("starts_BM", "lengths_BM")
    }
    return arrays | slots
