"""Weights from a Hugging Face folder, checked before any is read, and a folder made of our weights, whole or not at all."""

import dataclasses
import json
import pathlib
import secrets
import shlex
import shutil
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from jaxsp.core import errors
from jaxsp.core.errors import UserError
from jaxsp.hf import families, folder, tensors
from jaxsp.hf.folder import ModelFolder
from jaxsp.hf.tensors import BadFileError, StoredTensor
from jaxsp.model import layers
from jaxsp.model.layers import Parameter

if TYPE_CHECKING:
    import transformers


_SINGLE_FILE = "model.safetensors"

_HEAD_NAME = "lm_head.weight"

_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
"""End of the names of tensors that only repeat what config.json says; transformers passes over them too."""

_COMPARE_ELEMENTS = 2**24
"""Elements of a tied head that are compared with the embedding at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightReader:
    """Every tensor that a model is made of, in files whose headers were checked."""

    error_prefix: str
    """What the user asked for."""
    tensors: dict[str, StoredTensor]
    """By the name that the table has for it."""

    def read(self, param: Parameter, layer: int | None, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of one tensor, float32. Raises: UserError when its file has changed since it was checked.

        Args:
            layer: None for a tensor that exists once.
            index: a slice for each dim of `row.shape`.
        """
        return self.read_slice(
            self.tensors[param.hf_name if layer is None else param.hf_name.format(layer=layer)],
            index,
        )

    def read_slice(self, tensor: "StoredTensor", index: tuple[slice, ...]) -> np.ndarray:
        """As `read`, of any tensor."""
        try:
            return tensors.read_slice(tensor, index)
        except BadFileError as error:
            raise UserError(
                f"{self.error_prefix}: {tensor.file} {error}. Copy or download it again."
            ) from None


def open_folder(source: ModelFolder, table: layers.Weights) -> WeightReader:
    """The weights of a folder, compared with the table by the headers of their files; fetched first if they are the hub's.

    As in transformers, model.safetensors comes before an index, and of an embedding and a head that are tied, one is enough,
    under either name.

    Raises: UserError with all tensors that are missing, surplus, or of another shape or dtype, and all files that are damaged.
    """
    asked = f"{source.field} = {source.source}"
    found = _read_headers(source, asked)
    # what transformers would tie, it ties by name
    embedding, head = table["embedding"].hf_name, None
    if "head" not in table and _HEAD_NAME in found:
        head = found.pop(_HEAD_NAME)
        found.setdefault(embedding, head)
    shapes = _tensor_shapes(table)
    problems = _find_differences(found, shapes, asked)
    if problems:
        raise UserError(problems)
    reader = WeightReader(error_prefix=asked, tensors={name: found[name] for name in shapes})
    if head is not None and not _is_same_tensor(reader, head, found[embedding]):
        raise UserError(
            f"{asked}: {_HEAD_NAME} is not {embedding}, and config.json has tie_word_embeddings = true, which makes them one. "
            "Set it to false there to train both, or remove the tensor that is wrong."
        )
    return reader


def _read_headers(source: ModelFolder, asked: str) -> dict[str, StoredTensor]:
    """All tensors of all files by name. Raises: UserError for files that are missing, damaged, or not what the index says."""
    weight_map = None
    if (source.path / folder.INDEX_FILE).is_file():
        weight_map = folder.read_json(source.path / folder.INDEX_FILE, error_prefix=asked).get(
            "weight_map"
        )
        names = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
        if not all(isinstance(name, str) and pathlib.PurePath(name).name == name for name in names):
            raise UserError(
                f"{asked}: {folder.INDEX_FILE} does not say which tensor is in which file. Download it again."
            )
    shards = sorted(set((weight_map or {}).values()))
    source.download_files([_SINGLE_FILE, *shards])
    if (source.path / _SINGLE_FILE).is_file():
        shards, weight_map = [_SINGLE_FILE], None
    if not shards:
        raise UserError(f"{asked}: {_no_weights_problem(source)}")
    problems = []
    absent = [name for name in shards if not (source.path / name).is_file()]
    if absent:
        problems.append(
            f"{asked}: {_abbreviate(absent)}: not there, and named in {folder.INDEX_FILE}. Copy or download the folder again."
        )
    places: set[tuple[str, str]] = set()
    found: dict[str, StoredTensor] = {}
    for name in (name for name in shards if name not in absent):
        try:
            header = tensors.read_header(source.path / name)
        except BadFileError as error:
            problems.append(f"{asked}: {source.path / name} {error}. Copy or download it again.")
        else:
            found |= header
            places |= {(tensor, name) for tensor in header}
    if not problems and weight_map is not None and places != set(weight_map.items()):
        wrong = sorted({tensor for tensor, _ in places ^ set(weight_map.items())})
        problems.append(
            f"{asked}: {folder.INDEX_FILE} and the files disagree about where {_abbreviate(wrong)} can be found. "
            "Copy or download the folder again."
        )
    if problems:
        raise UserError(problems)
    return found


def _no_weights_problem(source: ModelFolder) -> str:
    """Why a folder has no weights for us, and what to do; the end of a sentence about it."""
    there = f"{source.path} holds no {_SINGLE_FILE}"
    shards = sorted(path.name for path in source.path.glob("model-*.safetensors"))
    if shards:
        return f"{there} and no {folder.INDEX_FILE}, but {_abbreviate(shards)}. Copy or download the folder again."
    pickled = sorted(path.name for path in source.path.glob("pytorch_model*.bin"))
    out = f"{source.source.rstrip('/').rpartition('/')[2]}-safetensors"
    source_name, out_name = json.dumps(source.source), json.dumps(out)
    code = (
        f'import transformers as t; t.AutoModelForCausalLM.from_pretrained({source_name}, dtype="auto")'
        f".save_pretrained({out_name}); t.AutoTokenizer.from_pretrained({source_name}).save_pretrained({out_name})"
    )
    which = f" but {_abbreviate(pickled)}" if pickled else ". If it has pytorch_model.bin"
    return (
        f"{there}{which}: pickles can run code, jaxsp does not read them. Where torch is installed, make safetensors of them: "
        f"python -c {shlex.quote(code)}, then {source.field}={out}."
    )


def _tensor_shapes(table: layers.Weights) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by name."""
    rows = jax.tree.leaves(table)
    once = {row.hf_name: row.shape for row in rows if row.num_layers is None}
    stacked = [row for row in rows if row.num_layers is not None]
    return once | {
        row.hf_name.format(layer=layer): row.shape
        for row in stacked
        for layer in range(row.num_layers)
    }


def _find_differences(
    found: dict[str, StoredTensor], shapes: dict[str, tuple[int, ...]], asked: str
) -> list[str]:
    """A line for each kind of difference between what is there and what the model needs."""
    both = [name for name in shapes if name in found]
    missing = [name for name in shapes if name not in found]
    surplus = sorted(
        name for name in found if name not in shapes and not name.endswith(_IGNORED_SUFFIX)
    )
    misshapen = [
        f"{name} {list(found[name].shape)} instead of {list(shapes[name])}"
        for name in both
        if found[name].shape != shapes[name]
    ]
    others = [
        f"{name} {found[name].dtype}" for name in both if found[name].dtype not in tensors.DTYPES
    ]
    belongs = "Use the config.json that belongs to these weights"
    tied = (
        ", or tie_word_embeddings: true in it if the model's head is its embedding"
        if missing == [_HEAD_NAME]
        else ""
    )
    return [
        f"{asked}: {words} {_abbreviate(names)}. {way_out}."
        for names, words, way_out in (
            (missing, "missing tensors:", f"{belongs}{tied}, or copy or download the folder again"),
            (surplus, "tensors that the model of config.json has no place for:", belongs),
            (misshapen, "tensors of another shape than config.json makes them:", belongs),
            (
                others,
                f"tensors of another dtype than {errors.format_choices(tensors.DTYPES)}:",
                "Use a model that is not quantized",
            ),
        )
        if names
    ]


def _is_same_tensor(reader: WeightReader, one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors hold the same numbers."""
    if one is other or one.shape != other.shape:
        return one is other
    rows, columns = one.shape
    step = max(_COMPARE_ELEMENTS // columns, 1)
    parts = [(slice(start, start + step), slice(None)) for start in range(0, rows, step)]
    return all(
        reader.read_slice(one, part).tobytes() == reader.read_slice(other, part).tobytes()
        for part in parts
    )


def _abbreviate(names: list[str]) -> str:
    """The first of many names, and how many there are beyond these."""
    return ", ".join(names[:4]) + (f" ... and {len(names) - 4} more" if len(names) > 4 else "")


class _ExportTensor(NamedTuple):
    """One tensor of the export, not fetched yet."""

    param: Parameter
    array: Any
    layer: int | None

    def to_numpy(self, dtype: np.dtype) -> np.ndarray:
        stored = self.array if self.layer is None else self.array[self.layer]
        array = np.asarray(stored.astype(dtype))[tuple(slice(size) for size in self.param.shape)]
        assert array.shape == self.param.shape, (
            f"{self.param.hf_name}: {array.shape} is not {self.param.shape}"
        )
        # safetensors writes the memory behind a view as it lies there
        return np.ascontiguousarray(array)


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
) -> None:
    """Writes a folder that transformers loads: config, generation config, tokenizer, and the weights in safetensors.

    The folder appears under its name when it is complete; until then it is `NAME.incomplete-...` beside it.

    Args:
        master: float32 weights like `table`, in numpy or jax, whole or sharded over devices of this process. Zeros that
            shards are filled with are left out.
        fields: of the config.json that the model was made of.
        tokenizer: None where training read tokens; the folder has none then.
        small_files: a folder whose tokenizer, chat template and generation config come along as they are.
    Memory: beside `master`, the weights of one file of `max_shard_size` at a time, in `dtype`.
    Raises: UserError when the folder holds something already, or cannot be written.
    """
    # rename would not replace a link
    target = pathlib.Path(directory).resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(
            f"{directory}: exists already. Name a new or an empty folder, or remove it."
        )
    token_ids = families.choose_token_ids(fields, tokenizer)
    config = families.make_config_json(fields, dtype=dtype, token_ids=token_ids)
    incomplete = target.with_name(f"{target.name}.incomplete-{secrets.token_hex(4)}")
    try:
        incomplete.mkdir(parents=True)
        _write_json(incomplete / "config.json", config)
        _write_json(
            incomplete / "generation_config.json",
            {name: ids for name, ids in token_ids.items() if ids is not None},
        )
        if small_files is not None:
            folder.copy_small_files(small_files, incomplete, exclude=("config.json",))
        elif tokenizer is not None:
            tokenizer.save_pretrained(incomplete)
        _write_weights(
            incomplete,
            _list_tensors(master, table),
            dtype=jnp.dtype(dtype),
            max_shard_size=max_shard_size,
        )
        incomplete.rename(target)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{directory}: cannot be written: {error}.") from error
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)


def _list_tensors(master: layers.Weights, table: layers.Weights) -> dict[str, _ExportTensor]:
    """All tensors by their Hugging Face name; a layer's are neighbours, so that they mostly share a file."""
    leaves = list(zip(jax.tree.leaves(table), jax.tree.leaves(master), strict=True))
    found = {
        row.hf_name: _ExportTensor(row, array, None)
        for row, array in leaves
        if row.num_layers is None
    }
    stacks = [(row, array) for row, array in leaves if row.num_layers is not None]
    for layer in range(stacks[0][0].num_layers):
        found |= {
            row.hf_name.format(layer=layer): _ExportTensor(row, stack, layer)
            for row, stack in stacks
        }
    return found


def _write_weights(
    target: pathlib.Path,
    tensors: dict[str, _ExportTensor],
    *,
    dtype: np.dtype,
    max_shard_size: str | int,
) -> None:
    plan = huggingface_hub.split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.param.size * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    for name, members in plan.filename_to_tensors.items():
        shard = {member: tensors[member].to_numpy(dtype) for member in members}
        # transformers refuses files that do not say which layout their tensors have
        safetensors.numpy.save_file(shard, target / name, metadata={"format": "pt"})
        # it makes files that nobody else may read
        shutil.copymode(target / "config.json", target / name)
        # before the next file's weights are fetched
        del shard
    if plan.is_sharded:
        _write_json(
            target / folder.INDEX_FILE,
            {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename},
        )


def _write_json(path: pathlib.Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
