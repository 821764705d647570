"""A Hugging Face folder made of our weights, and nothing of it when that fails."""

import json
import pathlib
import secrets
import shutil
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from jaxsp.core import errors
from jaxsp.hf import families
from jaxsp.model import layers

if TYPE_CHECKING:
    import transformers


class _Tensor(NamedTuple):
    """One tensor of the export, not fetched yet."""

    row: layers.Parameter
    stack: Any
    layer: int | None

    def whole(self, dtype: np.dtype) -> np.ndarray:
        array = self.stack if self.layer is None else self.stack[self.layer]
        assert array.shape == self.row.shape, f"{self.row.hf_name}: {array.shape} is not {self.row.shape}"
        # safetensors writes the memory behind a view as it lies there
        return np.ascontiguousarray(array.astype(dtype))


def export(
    master: layers.Weights,
    *,
    table: layers.Weights,
    fields: dict[str, Any],
    tokenizer: "transformers.PreTrainedTokenizerBase | None",
    directory: str | pathlib.Path,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    max_shard_size: str | int = "5GB",
) -> None:
    """Writes a folder that transformers loads: config, generation config, tokenizer, and the weights in safetensors.

    The folder appears under its name when it is complete; until then it is `NAME.incomplete-...` beside it.

    Args:
        master: whole float32 weights like `table`, in numpy or jax, without the zeros that shards are filled with.
        fields: of the config.json that the model was made of.
        tokenizer: None where training read tokens; the folder has none then.
    Memory: beside `master`, the weights of one file of `max_shard_size` at a time, in `dtype`.
    Raises: UserError when the folder holds something already, or cannot be written.
    """
    # rename would not replace a link
    target = pathlib.Path(directory).resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise errors.UserError(f"{directory}: exists already. Name a new or an empty folder, or remove it.")
    token_ids = families.token_ids(fields, tokenizer)
    config = families.config_json(fields, dtype=dtype, token_ids=token_ids)
    incomplete = target.with_name(f"{target.name}.incomplete-{secrets.token_hex(4)}")
    try:
        incomplete.mkdir(parents=True)
        _write_json(incomplete / "config.json", config)
        _write_json(incomplete / "generation_config.json", {name: ids for name, ids in token_ids.items() if ids is not None})
        if tokenizer is not None:
            tokenizer.save_pretrained(incomplete)
        _write_weights(incomplete, _tensors(master, table), dtype=jnp.dtype(dtype), max_shard_size=max_shard_size)
        incomplete.rename(target)
    except (OSError, safetensors.SafetensorError) as error:
        raise errors.UserError(f"{directory}: cannot be written: {error}.") from error
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)


def _tensors(master: layers.Weights, table: layers.Weights) -> dict[str, _Tensor]:
    """All tensors by their Hugging Face name; a layer's are neighbours, so that they mostly share a file."""
    leaves = list(zip(jax.tree.leaves(table), jax.tree.leaves(master), strict=True))
    found = {row.hf_name: _Tensor(row, array, None) for row, array in leaves if row.num_layers is None}
    stacks = [(row, array) for row, array in leaves if row.num_layers is not None]
    for layer in range(stacks[0][0].num_layers):
        found |= {row.hf_name.format(layer=layer): _Tensor(row, stack, layer) for row, stack in stacks}
    return found


def _write_weights(folder: pathlib.Path, tensors: dict[str, _Tensor], *, dtype: np.dtype, max_shard_size: str | int) -> None:
    plan = huggingface_hub.split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.row.size * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    for name, members in plan.filename_to_tensors.items():
        shard = {member: tensors[member].whole(dtype) for member in members}
        # transformers refuses files that do not say which layout their tensors have
        safetensors.numpy.save_file(shard, folder / name, metadata={"format": "pt"})
        # it makes files that nobody else may read
        shutil.copymode(folder / "config.json", folder / name)
        # before the next file's weights are fetched
        del shard
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: pathlib.Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
