"""Import and export of a model's weights in Hugging Face's files, by the parameter table.

All tensors are checked before any of them is read. A folder is written completely or not at all.
"""

import contextlib
import dataclasses
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
import safetensors.numpy

from jaxsp.blocks import layers
from jaxsp.blocks.config import ModelConfig
from jaxsp.blocks.layers import Parameter
from jaxsp.core import errors
from jaxsp.core.errors import ProblemCollector, UserError, at
from jaxsp.hf import config_fields, folder, model_config, multimodal, tensors
from jaxsp.hf.families import find_text_family
from jaxsp.hf.folder import ModelFolder
from jaxsp.hf.multimodal import PROCESSOR_FILES
from jaxsp.hf.tensors import Index, StoredTensor, Tensor
from jaxsp.model import decoder

if TYPE_CHECKING:
    import transformers

_SINGLE_FILE = "model.safetensors"

_HEAD_NAME = "lm_head.weight"

_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
"""End of the names of tensors that repeat what config.json has; transformers ignores them too."""

_COPY_AGAIN = "Copy or download the folder again"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightReader:
    """All tensors of a model, in files whose headers were checked."""

    source: ModelFolder
    tensors: Mapping[str, Tensor]
    left_out: str = ""
    """Description of `other_tensors`; empty if there are none."""
    other_tensors: dict[str, StoredTensor] = dataclasses.field(default_factory=dict)
    """Tensors of parts that are not trained, by their names in the files."""

    def read(self, param: Parameter, layer: int | None, index: Index) -> np.ndarray:
        """Returns a slice of one tensor (layer None: one outside the layers), float32.

        Args: index: a slice for each dim of `param.shape`.
        Raises: UserError if the file has changed since it was checked.
        """
        with at(self.source.field, self.source.source):
            if param.joined_layers is not None:
                return self.tensors[param.hf_name].read(param.find_block(index, layer))
            num_stacked = 0 if param.num_experts is None else 1
            experts = index[:num_stacked]
            rows, *others = index[num_stacked:]
            numbers = np.arange(param.matrix_shape[0])[rows]
            if param.hf_rows is not None:
                numbers = param.hf_rows.find(numbers)
            views = [self.tensors[name] for _, name in param.list_tensors(layer)]
            if param.expert_layout is not None:  # of an adapter, whose whole tensor is read
                whole = views[0].read(2 * (slice(None),))
                return param.view_matrices(whole)[*experts, :, *others].take(numbers, axis=1)
            first, stop = (int(numbers[0]), int(numbers[-1]) + 1) if len(numbers) else (0, 0)
            matrix: Index = (slice(first, stop), *others)
            if param.is_transposed:
                matrix = matrix[::-1]
            if param.has_tensor_per_expert:
                chosen = views[experts[0]]
                parts = [view.read(matrix) for view in chosen or views[:1]]
                array = np.stack(parts)[: len(chosen)]  # an empty stack has the matrix's shape too
            else:
                array = views[0].read((*experts, *matrix))
            if param.is_transposed:
                array = array.swapaxes(-1, -2)
            if stop - first == len(numbers):
                return array
            return array.take(numbers - first, axis=num_stacked)

    def find_stored_name(self, name: str) -> str:
        """Name in the files of a tensor that is neither fused nor divided in them."""
        return self.tensors[name].parts[0].name

    def list_files(self) -> list[pathlib.Path]:
        """Files that the tensors are in."""
        return sorted({part.file for view in self.tensors.values() for part in view.parts})


def open_folder(source: ModelFolder, table: layers.Weights) -> WeightReader:
    """Opens the weights of a folder, after downloading them if the folder is the hub's.

    Compares the headers of all files with the table of parameters. As in transformers,
    model.safetensors comes before an index. Of an embedding and a head that are tied, one is
    enough, under either name.

    Raises: UserError with all tensors that differ from the table's, and all damaged files.
    """
    fields = source.config_fields
    with at(source.field, source.source):
        stored, others = multimodal.select_tensors(_read_headers(source), fields)
        shapes = tensor_shapes(table)
        if "embed_tokens.weight" in stored:  # AutoModel leaves out `model.`
            own = {_HEAD_NAME, *shapes}
            stored = {x if x in own else f"model.{x}": tensor for x, tensor in stored.items()}
        embedding_name = table["embedding"].hf_name
        left_out = multimodal.describe_left_out(others, fields)
        head_name = table["head"].hf_name if "head" in table else _HEAD_NAME
        # A reward model that is made from a language model
        if head_name != _HEAD_NAME and head_name not in stored:
            del shapes[head_name]
            left_out = "; ".join(filter(None, (left_out, "a new head, which is random")))
            stored.pop(_HEAD_NAME, None)
        elif "head" not in table and _HEAD_NAME in stored:
            head = stored.pop(_HEAD_NAME)
            if not tensors.is_same(head, stored.setdefault(embedding_name, head)):
                raise UserError(
                    f"{_HEAD_NAME} must equal {embedding_name}, because config.json has "
                    "tie_word_embeddings = true. Set it to false there to train both, or remove "
                    "the tensor that is wrong."
                )
        views = tensors.make_views(stored, shapes, find_text_family(fields).divided_tensors)
        suggestion = "Use the config.json that belongs to these weights"
        if shapes.keys() - views.keys() == {_HEAD_NAME}:
            places = "it" if multimodal.find_family(fields) is None else "it and in its text_config"
            suggestion += (
                f", or tie_word_embeddings: true in {places} if the model's head is its embedding"
            )
        return WeightReader(
            source=source,
            tensors=check_tensors(views, shapes, suggestion),
            left_out=left_out,
            other_tensors=others,
        )


def open_other_parts(source: ModelFolder, model: ModelConfig) -> WeightReader:
    """Opens the files of a multimodal checkpoint, after downloading those that are on the hub.

    Args: model: the trained text model; its adapters are left out.
    Raises: UserError if it is not a multimodal checkpoint, or its text model has other sizes.
    """
    if multimodal.find_family(source.config_fields) is None:
        raise UserError(
            f"{source.field} = {source.source}: has only a text model, for which transformers has "
            "no class. Give a multimodal checkpoint, whose other parts are copied into the export: "
            "`jaxsp export --source`, or `Trainer.save(..., source=...)`."
        )
    reader = open_folder(source, decoder.plain_table(model))
    source.download_files(PROCESSOR_FILES)
    return reader


def _read_headers(source: ModelFolder) -> dict[str, StoredTensor]:
    """All tensors by name. Raises: UserError for missing or damaged files, and a wrong index."""
    index_file = folder.INDEX_FILE
    weight_map: Any = {}
    if (source.path / index_file).is_file():
        weight_map = folder.read_json(source.path / index_file).get("weight_map")
        paths = weight_map.values() if isinstance(weight_map, dict) else [None]
        if not all(isinstance(path, str) and pathlib.PurePath(path).name == path for path in paths):
            raise UserError(
                f"{index_file} must have a weight_map with the file of each tensor. Download it "
                "again."
            )
    files = sorted(set(weight_map.values()))
    source.download_files([_SINGLE_FILE, *files])
    if (source.path / _SINGLE_FILE).is_file():
        weight_map = {}
        files = [_SINGLE_FILE]
    if not files:
        found = sorted(
            path.name
            for pattern in ("model-*.safetensors", "pytorch_model*.bin")
            for path in source.path.glob(pattern)
        )
        raise UserError(
            f"{source.path} contains no {_SINGLE_FILE} and no {index_file}, only "
            f"{abbreviate(found) or 'small files'}. {_COPY_AGAIN}. jaxsp does not read pickles "
            "such as pytorch_model.bin, because they can run code: where torch is installed, load "
            "the model with transformers, and save_pretrained writes safetensors."
        )
    problems = ProblemCollector()
    absent = [name for name in files if not (source.path / name).is_file()]
    if absent:
        problems.append(f"{abbreviate(absent)}: missing, but named in {index_file}. {_COPY_AGAIN}.")
    stored: dict[str, StoredTensor] = {}
    places: set[tuple[str, str]] = set()
    for name in sorted({*files} - {*absent}):
        with problems.collect():
            header = tensors.read_header(source.path / name)
            stored |= header
            places |= {(tensor, name) for tensor in header}
    differences = places ^ weight_map.items() if weight_map else ()
    if differences and not problems:
        names = sorted({tensor for tensor, _ in differences})
        problems.append(
            f"{index_file} and the files disagree about the file of {abbreviate(names)}. "
            f"{_COPY_AGAIN}."
        )
    problems.raise_if_any()
    return stored


def tensor_shapes(table: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a tree of parameters; those outside the layers come first."""
    params = jax.tree.leaves(table)
    shapes = {param.hf_name: param.hf_shape for param in params if param.num_layers is None}
    for param in params:
        for layer in param.layers or ():
            shapes |= dict.fromkeys((name for _, name in param.list_tensors(layer)), param.hf_shape)
    return shapes


def check_tensors(
    views: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    suggestion: str,
    surplus_title: str = "tensors that the model of config.json does not have:",
) -> dict[str, Tensor]:
    """Returns the tensors with these names.

    Raises: UserError with those that are missing, surplus or of another shape or dtype.
    """
    common = {name: views[name] for name in shapes if name in views}
    differences = {
        "missing tensors:": [name for name in shapes if name not in views],
        surplus_title: sorted(x for x in views.keys() - shapes if not x.endswith(_IGNORED_SUFFIX)),
        "tensors of another shape than the model's:": [
            f"{name} {list(tensor.shape)} instead of {list(shapes[name])}"
            for name, tensor in common.items()
            if tensor.shape != shapes[name]
        ],
        f"tensors that are not {errors.format_choices(tensors.DTYPES)}, perhaps quantized:": [
            f"{name} {x.dtype}" for name, x in common.items() if x.dtype not in tensors.DTYPES
        ],
    }
    problems = ProblemCollector(
        f"{title} {abbreviate(names)}. {suggestion}."
        for title, names in differences.items()
        if names
    )
    problems.raise_if_any()
    return common


def abbreviate(names: list[str]) -> str:
    """The first four names, and the number of the others."""
    more = f" ... and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


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
    other_parts: WeightReader | None = None,
) -> None:
    """Writes a folder that transformers loads, with `create_folder`: configs, tokenizer, weights.

    Args:
        master: float32 weights with the structure of `table`, in numpy or jax, whole or sharded
            over devices of this process. Zeros that pad shards are left out. Instead of an array, a
            function that returns a layer's (of a weight outside the layers: `function(None)`).
        fields: fields of the config.json that the model was made from.
        tokenizer: None if training read tokens; then the folder has no tokenizer.
        small_files: folder whose tokenizer, chat template and generation config are copied.
        other_parts: parts that are copied unchanged beside the text model; required if the model's
            export has them (`multimodal.are_exported`), else None.
    Memory: `master`, and one file of `max_shard_size` at a time, in `dtype`.
    """
    special = config_fields.choose_token_ids(fields, tokenizer)
    config = model_config.make_config_json(fields, dtype=dtype, token_ids=special)
    named: dict[str, ExportTensor | StoredTensor] = {**list_tensors(master, table, dtype)}
    assert (other_parts is not None) == multimodal.are_exported(fields), "the caller opens them"
    if other_parts is not None:
        config = multimodal.add_other_fields(config, other_parts.source.config_fields)
        named = {other_parts.find_stored_name(name): tensor for name, tensor in named.items()}
        named |= other_parts.other_tensors
    with create_folder(directory) as target:
        write_json(target / "config.json", config)
        given_ids = {name: ids for name, ids in special.items() if ids is not None}
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


def check_target(directory: str | pathlib.Path) -> pathlib.Path:
    """Returns the absolute path of a new or empty folder. Raises: UserError if it has files."""
    target = pathlib.Path(directory).resolve()  # a link could not be replaced by rename
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(
            f"{directory}: exists already. Name a new or an empty folder, or remove it."
        )
    return target


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

    parts: list[tuple[Parameter, Any, int | None]]
    """Parameters whose rows are those of the tensor, with their arrays, or with functions that
    return the array of a layer, and the layer."""
    dtype: np.dtype
    """dtype in the file."""
    expert: int | None = None
    """Number of the expert; None: the tensor has all that there is."""

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.parts[0][0].hf_shape)

    def to_numpy(self) -> np.ndarray:
        """Returns the tensor as files have it; the opposite of `WeightReader.read`."""
        whole = np.empty(self.parts[0][0].hf_shape, self.dtype)
        for param, array, layer in self.parts:
            # One index, so that of all experts of a layer only this one is copied
            index: Any = () if self.expert is None else (self.expert,)
            if callable(array):
                array = array(layer)
            elif layer is not None:
                index = (param.find(layer), *index)
            stored = array[(*index, ...)] if index else array
            shape = param.shape if self.expert is None else param.matrix_shape
            part = np.asarray(stored.astype(self.dtype))[tuple(map(slice, shape))]
            assert part.shape == shape, (param.hf_name, part.shape)
            if param.joined_layers is not None:
                whole[param.find_block(2 * (slice(None),), layer)] = part
                continue
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
                    tensor = named.setdefault(name, ExportTensor([], file_dtype, expert))
                    tensor.parts.append((param, array, layer))
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
