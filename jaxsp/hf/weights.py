"""Weights of a Hugging Face folder, checked before any of them is read."""

import dataclasses
import json
import pathlib
import shlex
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxsp.blocks import layers
from jaxsp.blocks.config import ModelConfig
from jaxsp.blocks.layers import Parameter
from jaxsp.core import errors
from jaxsp.core.errors import ProblemCollector, UserError, at
from jaxsp.hf import folder, multimodal, tensors
from jaxsp.hf.families import FAMILIES, Family
from jaxsp.hf.folder import ModelFolder
from jaxsp.hf.multimodal import PROCESSOR_FILES, OtherParts
from jaxsp.hf.tensors import Index, StoredTensor, TensorView
from jaxsp.model import decoder

_SINGLE_FILE = "model.safetensors"

_HEAD_NAME = "lm_head.weight"

_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
"""End of the names of tensors that repeat what config.json has; transformers ignores them too."""

_WRAPPERS = ("_orig_mod.", "module.")
"""Prefixes of names that torch.compile and DDP save."""

_COMPARE_ELEMENTS = 2**24
"""Elements of a tied head that are compared with the embedding at a time."""

_COPY_AGAIN = "Copy or download the folder again"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightReader:
    """All tensors of a model, in files whose headers were checked."""

    source: ModelFolder
    tensors: Mapping[str, TensorView]
    left_out: str
    """Description of `other_tensors`; empty if there are none."""
    other_tensors: dict[str, StoredTensor] = dataclasses.field(default_factory=dict)
    """Tensors of parts that are not trained, by their names in the files."""

    def read(self, param: Parameter, layer: int | None, index: Index) -> np.ndarray:
        """Returns a slice of one tensor, float32.

        Args:
            layer: None for a tensor that exists once.
            index: a slice for each dim of `param.shape`.
        Raises: UserError if the file has changed since it was checked.
        """
        num_stacked = 0 if param.num_experts is None else 1
        experts = index[:num_stacked]
        rows, *others = index[num_stacked:]
        numbers = np.arange(param.matrix_shape[0])[rows]
        if param.hf_rows is not None:
            numbers = param.hf_rows.find(numbers)
        views = [self.tensors[name] for _, name in param.list_tensors(layer)]
        if param.expert_layout is not None:  # of an adapter, whose whole tensor is read
            whole = self.read_slice(views[0], 2 * (slice(None),))
            return param.view_matrices(whole)[*experts, :, *others].take(numbers, axis=1)
        first, stop = (int(numbers[0]), int(numbers[-1]) + 1) if len(numbers) else (0, 0)
        matrix: Index = (slice(first, stop), *others)
        if param.is_transposed:
            matrix = matrix[::-1]
        if param.has_tensor_per_expert:
            chosen = views[experts[0]]
            with at(self.source.field, self.source.source), tensors.open_files() as read:
                parts = [view.read(matrix, read) for view in chosen or views[:1]]
            array = np.stack(parts)[: len(chosen)]  # an empty stack has the matrix's shape too
        else:
            array = self.read_slice(views[0], (*experts, *matrix))
        if param.is_transposed:
            array = array.swapaxes(-1, -2)
        if stop - first == len(numbers):
            return array
        return array.take(numbers - first, axis=num_stacked)

    def list_files(self) -> list[pathlib.Path]:
        """Files that the tensors are in."""
        return sorted({part.file for view in self.tensors.values() for part in view.list_stored()})

    def read_slice(self, tensor: TensorView, index: Index) -> np.ndarray:
        """Returns a slice of any tensor, like `read`."""
        with at(self.source.field, self.source.source), tensors.open_files() as read:
            return tensor.read(index, read)


def open_folder(source: ModelFolder, table: layers.Weights) -> WeightReader:
    """Opens the weights of a folder, after downloading them if the folder is the hub's.

    Compares the headers of all files with the table of parameters. As in transformers,
    model.safetensors comes before an index. Of an embedding and a head that are tied, one is
    enough, under either name.

    Raises: UserError with all tensors that differ from the table's, and all damaged files.
    """
    with at(source.field, source.source):
        stored, others = multimodal.select_tensors(_read_headers(source), source.config_fields)
        shapes = tensor_shapes(table)
        stored = _rename(stored, {*shapes, *tensors.fused_names(shapes), _HEAD_NAME})
        embedding_name = table["embedding"].hf_name
        head = None
        left_out = multimodal.describe_left_out(others, source.config_fields)
        head_name = table["head"].hf_name if "head" in table else _HEAD_NAME
        # A reward model that is made from a language model
        if head_name != _HEAD_NAME and head_name not in stored:
            del shapes[head_name]
            left_out = "; ".join(filter(None, (left_out, "a new head, which is random")))
            stored.pop(_HEAD_NAME, None)
        elif "head" not in table and _HEAD_NAME in stored:
            head = stored.pop(_HEAD_NAME)
            stored.setdefault(embedding_name, head)
        family = FAMILIES.get(str(source.config_fields.get("model_type")), Family())
        views = tensors.divide_rows(stored, shapes, family.divided_tensors)
        views = tensors.dequantize(tensors.split_experts(views, shapes), stored)
        _check_tensors(views, shapes, source)
        reader = WeightReader(
            source=source,
            tensors={name: views[name] for name in shapes},
            left_out=left_out,
            other_tensors=others,
        )
        if head is not None and not is_same_tensor(reader, head, stored[embedding_name]):
            raise UserError(
                f"{_HEAD_NAME} must equal {embedding_name}, because config.json has "
                "tie_word_embeddings = true. Set it to false there to train both, or remove the "
                "tensor that is wrong."
            )
        return reader


def open_other_parts(source: ModelFolder, model: ModelConfig) -> OtherParts:
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
    # no family with other parts has divided tensors
    text_names = {name: view.list_stored()[0].name for name, view in reader.tensors.items()}
    return OtherParts(source=source, text_names=text_names, tensors=reader.other_tensors)


def _rename(stored: dict[str, StoredTensor], names: set[str]) -> dict[str, StoredTensor]:
    """Returns tensors under a model's names, also where AutoModel, torch.compile or DDP saved them.

    AutoModel leaves out `model.`; the others put a prefix of their own before it.
    """
    renamed = {}
    for name, tensor in stored.items():
        candidates = (f"model.{name}", *(name.removeprefix(prefix) for prefix in _WRAPPERS))
        new_names = [each for each in candidates if each in names and each not in stored]
        renamed[new_names[0] if new_names and name not in names else name] = tensor
    return renamed


def _read_headers(source: ModelFolder) -> dict[str, StoredTensor]:
    """All tensors of all files by name.

    Raises: UserError for files that are missing, damaged, or different from the index.
    """
    weight_map: Any = {}
    if (source.path / folder.INDEX_FILE).is_file():
        weight_map = folder.read_json(source.path / folder.INDEX_FILE).get("weight_map")
        paths = weight_map.values() if isinstance(weight_map, dict) else [None]
        if not all(isinstance(path, str) and pathlib.PurePath(path).name == path for path in paths):
            raise UserError(
                f"{folder.INDEX_FILE} must have a weight_map with the file of each tensor. "
                "Download it again."
            )
    files = sorted(set(weight_map.values()))
    source.download_files([_SINGLE_FILE, *files])
    has_index = not (source.path / _SINGLE_FILE).is_file()
    if not has_index:
        files = [_SINGLE_FILE]
    if not files:
        problem = f"{source.path} contains no {_SINGLE_FILE}"
        shards = sorted(path.name for path in source.path.glob("model-*.safetensors"))
        if shards:
            raise UserError(
                f"{problem} and no {folder.INDEX_FILE}, only {abbreviate(shards)}. {_COPY_AGAIN}."
            )
        pickled = sorted(path.name for path in source.path.glob("pytorch_model*.bin"))
        instead = f", only {abbreviate(pickled)}" if pickled else ". If it has pytorch_model.bin"
        raise UserError(
            f"{problem}{instead}: jaxsp does not read pickles, because they can run code. Where "
            f"torch is installed, convert them to safetensors: {_suggest_conversion(source)}."
        )
    problems = ProblemCollector()
    absent = [name for name in files if not (source.path / name).is_file()]
    if absent:
        problems.append(
            f"{abbreviate(absent)}: missing, but named in {folder.INDEX_FILE}. {_COPY_AGAIN}."
        )
    file_of_tensor: set[tuple[str, str]] = set()
    stored: dict[str, StoredTensor] = {}
    for name in sorted({*files} - {*absent}):
        with problems.collect():
            header = tensors.read_header(source.path / name)
            stored |= header
            file_of_tensor |= {(tensor, name) for tensor in header}
    differences = file_of_tensor ^ set(weight_map.items())
    if not problems and has_index and differences:
        names = sorted({tensor for tensor, _ in differences})
        problems.append(
            f"{folder.INDEX_FILE} and the files disagree about the file of {abbreviate(names)}. "
            f"{_COPY_AGAIN}."
        )
    problems.raise_if_any()
    return stored


def _suggest_conversion(source: ModelFolder) -> str:
    """Command with which transformers writes a model anew, and the field for its new folder."""
    out = f"{source.source.rstrip('/').rpartition('/')[2]}-safetensors"
    source_name = json.dumps(source.source)
    out_name = json.dumps(out)
    family = multimodal.find_family(source.config_fields)
    auto_class = FAMILIES[family.text_types[0]].auto_class if family else "AutoModelForCausalLM"
    code = (
        "import transformers as t; "
        f't.{auto_class}.from_pretrained({source_name}, dtype="auto")'
        f".save_pretrained({out_name}); "
        f"t.AutoTokenizer.from_pretrained({source_name}).save_pretrained({out_name})"
    )
    return f"python -c {shlex.quote(code)}, then {source.field}={out}"


def tensor_shapes(table: Any) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by name; those that exist once come first.

    Args: table: a tree of parameters.
    """
    params = jax.tree.leaves(table)
    shapes = {param.hf_name: param.hf_shape for param in params if param.num_layers is None}
    for param in params:
        for layer in param.layers or ():
            shapes |= dict.fromkeys((name for _, name in param.list_tensors(layer)), param.hf_shape)
    return shapes


def compare(
    stored: Mapping[str, TensorView], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[str], list[str], list[str]]:
    """Names of missing and of surplus tensors, and descriptions of those of another shape."""
    missing = [name for name in shapes if name not in stored]
    surplus = sorted(stored.keys() - shapes.keys())
    misshapen = [
        f"{name} {list(stored[name].shape)} instead of {list(shape)}"
        for name, shape in shapes.items()
        if name in stored and stored[name].shape != shape
    ]
    return missing, surplus, misshapen


def _check_tensors(
    stored: Mapping[str, TensorView], shapes: dict[str, tuple[int, ...]], source: ModelFolder
) -> None:
    """Raises UserError for differences between the stored tensors and those of the model."""
    missing, surplus, misshapen = compare(stored, shapes)
    surplus = [name for name in surplus if not name.endswith(_IGNORED_SUFFIX)]
    unsupported = [
        f"{name} {stored[name].dtype}"
        for name in shapes
        if name in stored and stored[name].dtype not in tensors.DTYPES
    ]
    matching = "Use the config.json that belongs to these weights"
    tie = ""
    if missing == [_HEAD_NAME]:
        is_multimodal = multimodal.find_family(source.config_fields) is not None
        places = "it and in its text_config" if is_multimodal else "it"
        tie = f", or tie_word_embeddings: true in {places} if the model's head is its embedding"
    dtypes = errors.format_choices(tensors.DTYPES)
    leave_out = ""
    if not missing and not misshapen:
        leave_out = (
            ". If the model works without them (such as a value head), transformers leaves them "
            f"out, where torch is installed: {_suggest_conversion(source)}"
        )
    refuse(
        (missing, "missing tensors:", f"{matching}{tie}, or copy or download the folder again"),
        (surplus, "tensors that the model of config.json does not have:", matching + leave_out),
        (misshapen, "tensors of another shape than in config.json:", matching),
        (unsupported, f"tensors that are not {dtypes}:", "Use a model that is not quantized"),
    )


def refuse(*differences: tuple[list[str], str, str]) -> None:
    """Raises UserError if there are any tensors. Args: their names, a title, and a suggestion."""
    problems = [
        f"{title} {abbreviate(names)}. {suggestion}."
        for names, title, suggestion in differences
        if names
    ]
    if problems:
        raise UserError(problems)


def is_same_tensor(reader: WeightReader, head: StoredTensor, embedding: StoredTensor) -> bool:
    """True if two tensors contain the same numbers."""
    if head is embedding or head.shape != embedding.shape:
        return head is embedding
    num_rows, num_columns = head.shape
    step = max(_COMPARE_ELEMENTS // num_columns, 1)
    parts = [(slice(start, start + step), slice(None)) for start in range(0, num_rows, step)]
    return all(
        reader.read_slice(head, part).tobytes() == reader.read_slice(embedding, part).tobytes()
        for part in parts
    )


def abbreviate(names: list[str]) -> str:
    """The first four names, and the number of the others."""
    more = f" ... and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
