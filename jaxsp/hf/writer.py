"""Writes a model as a Hugging Face folder, completely or not at all."""

import contextlib
import functools
import json
import math
import pathlib
import secrets
import shutil
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from jaxsp.blocks import layers
from jaxsp.blocks.layers import Parameter
from jaxsp.core.errors import UserError
from jaxsp.hf import folder, model_config
from jaxsp.hf.multimodal import PROCESSOR_FILES, OtherParts, are_exported
from jaxsp.hf.tensors import StoredTensor

if TYPE_CHECKING:
    import transformers


def check_target(directory: str | pathlib.Path) -> pathlib.Path:
    """Returns the absolute path of a new or empty folder. Raises: UserError if it has files."""
    target = pathlib.Path(directory).resolve()  # a link could not be replaced by rename
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(
            f"{directory}: exists already. Name a new or an empty folder, or remove it."
        )
    return target


def export_model(
    master: layers.Weights,
    *,
    table: layers.Weights,
    fields: dict[str, Any],
    tokenizer: "transformers.PreTrainedTokenizerBase | None",
    directory: str | pathlib.Path,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    max_shard_size: str | int = "5GB",
    small_files: pathlib.Path | None = None,
    other_parts: OtherParts | None = None,
) -> None:
    """Writes a folder that transformers loads: configs, tokenizer, and weights in safetensors.

    See `create_folder`.

    Args:
        master: float32 weights with the structure of `table`, in numpy or jax, whole or sharded
            over devices of this process. Zeros that pad shards are left out. Instead of an array, a
            function that returns a layer's (of a weight outside the layers: `function(None)`).
        fields: fields of the config.json that the model was made from.
        tokenizer: None if training read tokens; then the folder has no tokenizer.
        small_files: folder whose tokenizer, chat template and generation config are copied
            unchanged.
        other_parts: parts that are copied unchanged beside the text model; required if the model's
            export has them (`multimodal.are_exported`), else None.
    Memory:
        In addition to `master`, the weights of one file of `max_shard_size` at a time, in `dtype`.
    Raises: UserError if the folder exists and is not empty, or cannot be written.
    """
    token_ids = model_config.choose_token_ids(fields, tokenizer)
    config = model_config.make_config_json(fields, dtype=dtype, token_ids=token_ids)
    named: dict[str, ExportTensor | StoredTensor] = {**list_tensors(master, table, dtype)}
    assert (other_parts is not None) == are_exported(fields), "the caller opens them"
    if other_parts is not None:
        config = other_parts.add_fields(config)
        named = {other_parts.text_names[name]: tensor for name, tensor in named.items()}
        named |= other_parts.tensors
    with create_folder(directory) as target:
        write_json(target / "config.json", config)
        given_ids = {name: ids for name, ids in token_ids.items() if ids is not None}
        write_json(target / "generation_config.json", given_ids)
        if small_files is not None:
            folder.copy_small_files(small_files, target, exclude=("config.json",))
        elif tokenizer is not None:
            tokenizer.save_pretrained(target)
        if other_parts is not None:
            folder.copy_small_files(other_parts.source.path, target, patterns=PROCESSOR_FILES)
        plan = huggingface_hub.split_state_dict_into_shards_factory(
            named,
            get_storage_size=lambda tensor: tensor.num_bytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        for name, members in plan.filename_to_tensors.items():
            write_file(target / name, {member: named[member] for member in members})
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            write_json(target / folder.INDEX_FILE, index)


@contextlib.contextmanager
def create_folder(directory: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """Context that yields a folder to write to, which appears under its name when it is complete.

    Until then it is `NAME.incomplete-...` beside it; it is removed if the body fails.

    Raises: UserError if the folder exists and is not empty, or cannot be written.
    """
    target = check_target(directory)
    incomplete = target.with_name(f"{target.name}.incomplete-{secrets.token_hex(4)}")
    new_parents = [parent for parent in target.parents if not parent.exists()]
    try:
        incomplete.mkdir(parents=True)
        yield incomplete
        incomplete.rename(target)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{directory}: cannot be written: {error}.") from error
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)
        for parent in new_parents:
            with contextlib.suppress(OSError):  # a folder with files stays
                parent.rmdir()


class ExportTensor(NamedTuple):
    """A tensor that is not yet copied to the host."""

    parts: list[tuple[Parameter, Any]]
    """Parameters whose rows are those of the tensor, with their arrays, or with functions that
    return the array of a layer."""
    layer: int | None
    dtype: np.dtype
    """dtype in the file."""
    expert: int | None = None
    """Number of the expert; None: the tensor has all that there is."""

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.parts[0][0].hf_shape)

    def to_numpy(self) -> np.ndarray:
        whole = np.empty(self.parts[0][0].hf_shape, self.dtype)
        for param, array in self.parts:
            # One index, so that of all experts of a layer only this one is copied
            index: Any = () if self.expert is None else (self.expert,)
            if callable(array):
                array = array(self.layer)
            elif self.layer is not None:
                index = (param.find(self.layer), *index)
            stored = array[(*index, ...)] if index else array
            shape = param.shape if self.expert is None else param.matrix_shape
            part = np.asarray(stored.astype(self.dtype))[tuple(map(slice, shape))]
            assert part.shape == shape, (param.hf_name, part.shape)
            is_whole = param.hf_rows is None and param.expert_layout is None
            if is_whole and not param.is_transposed:
                return np.ascontiguousarray(part)  # safetensors ignores strides
            axis = part.ndim - len(param.matrix_shape)
            rows = np.arange(part.shape[axis])
            if param.hf_rows is not None:
                rows = param.hf_rows.find(rows)
            index = (*axis * (slice(None),), rows)
            param.view_matrices(whole)[index] = part
        return whole


def list_tensors(
    master: layers.Weights, table: layers.Weights, dtype: str
) -> dict[str, ExportTensor]:
    """All tensors by name, layer by layer, so that a layer is mostly in one file.

    Args: dtype: that of tensors without a `file_dtype` of their own.
    """
    named: dict[str, ExportTensor] = {}
    leaves = jax.tree.leaves(master)
    arrays = [functools.lru_cache(maxsize=1)(x) if callable(x) else x for x in leaves]
    parts = list(zip(jax.tree.leaves(table), arrays, strict=True))
    numbers = sorted({layer for param, _ in parts for layer in param.layers or ()})
    for layer in (None, *numbers):
        for param, array in parts:
            if layer in ((None,) if param.layers is None else param.layers):
                for expert, name in param.list_tensors(layer):
                    file_dtype = jnp.dtype(param.file_dtype or dtype)
                    tensor = named.setdefault(name, ExportTensor([], layer, file_dtype, expert))
                    tensor.parts.append((param, array))
    return named


def write_file(path: pathlib.Path, named: Mapping[str, ExportTensor | StoredTensor]) -> None:
    """Writes tensors to a safetensors file."""
    path.touch()
    mode = path.stat().st_mode
    arrays = {name: tensor.to_numpy() for name, tensor in named.items()}
    # transformers refuses files without a format
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors makes files that only their owner can read


def write_json(path: pathlib.Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
