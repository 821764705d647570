"""Tensors in safetensors files, and the tensors of a model as views of them.

Files are read, not mapped: a mapped file that is truncated kills the process (SIGBUS), and its
pages count as memory of the process.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from jaxsp.core.errors import UserError

Index = tuple[slice, ...]
"""A slice without a step for each dim; as in numpy, it may reach past the end."""

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes that jaxsp reads, by safetensors' names; float32 holds all of them exactly."""

_BYTES = "U8"
"""dtype of the parts of tensors in MXFP4."""

_COMPARE_ELEMENTS = 2**24
"""Elements of two tensors that are compared at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file."""

    dtype: str
    """Name in safetensors."""
    shape: tuple[int, ...]
    file: pathlib.Path
    name: str
    offset: int
    """Number of its first byte in the file."""
    file_state: tuple[int, int]
    """Size of the file and time of its last change, when its header was read."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        bits = re.search(r"\d+", self.dtype)  # of F32, BF16 or F8_E4M3; BOOL has 8
        return math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns elements in the order of the file. Raises: UserError if the file has changed."""
        dtype = jnp.dtype(DTYPES.get(self.dtype, "uint8"))
        try:
            with self.file.open("rb") as file:
                if _find_state(file) != self.file_state:
                    raise UserError(f"{self.file} has changed since it was checked. Start again.")
                file.seek(self.offset + start * dtype.itemsize)
                return np.fromfile(file, dtype, stop - start)
        except OSError as error:
            raise UserError(f"{self.file} cannot be read: {error}. Copy it again.") from None

    def to_numpy(self) -> np.ndarray:
        """Returns the whole tensor in its own dtype."""
        with safetensors.safe_open(self.file, "np") as file:
            return file.get_tensor(self.name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor of a model, made of stored tensors."""

    dtype: str
    """Name in safetensors. It is one that jaxsp does not read if a part has such a dtype."""
    shape: tuple[int, ...]
    parts: tuple[StoredTensor, ...]
    """Stored tensors that this tensor is made of."""
    read: Callable[[Index], np.ndarray]
    """Function that returns a slice: float32, or bytes as they are."""


def view_rows(
    parts: Iterable[StoredTensor], shape: tuple[int, ...] | None = None, first: int = 0
) -> Tensor:
    """A tensor whose rows are those from `first` on of stored tensors, one below the other.

    Args: shape: of the rows; None: that of the only part. Dims of a part before its rows, such as
        experts, count as rows too.
    """
    parts = tuple(parts)
    shape = parts[0].shape if shape is None else shape
    size = math.prod(shape[1:])

    def read(index: Index) -> np.ndarray:
        rows = range(shape[0])[index[0]]
        arrays = []
        before = -first
        for part in parts:
            count = math.prod(part.shape) // size
            start = min(max(rows.start - before, 0), count)
            stop = min(max(rows.stop - before, start), count)
            array = part.read(start * size, stop * size)
            # parts of several types have no common one
            is_kept = len(parts) == 1 or dtype == _BYTES
            arrays.append(array if is_kept else array.astype(np.float32))
            before += count
        whole = np.concatenate(arrays).reshape(len(rows), *shape[1:])
        chosen = whole[(slice(None), *index[1:])]
        return chosen if dtype == _BYTES else chosen.astype(np.float32)

    dtype = min((part.dtype for part in parts), key=lambda dtype: dtype in DTYPES)
    return Tensor(dtype=dtype, shape=shape, parts=parts, read=read)


def is_same(tensor: StoredTensor, other: StoredTensor) -> bool:
    """True if two tensors have the same numbers."""
    if tensor.shape != other.shape:
        return False
    size = math.prod(tensor.shape)
    for start in range(0, size, _COMPARE_ELEMENTS):
        stop = min(start + _COMPARE_ELEMENTS, size)
        first, second = (x.read(start, stop).astype(np.float32) for x in (tensor, other))
        if first.tobytes() != second.tobytes():
            return False
    return True


def _find_state(file: Any) -> tuple[int, int]:
    state = os.fstat(file.fileno())
    return state.st_size, state.st_mtime_ns


def read_header(path: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns all tensors of a file by name, without reading their values. Raises: UserError."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            if start == b"version ":  # git-lfs.github.com/spec/v1
                raise UserError(
                    f"{path} is a git-lfs pointer, not the file. Fetch it with git lfs pull."
                )
            with safetensors.safe_open(path, "np"):
                header_bytes = int.from_bytes(start, "little")  # safetensors has checked it
            header = json.loads(file.read(header_bytes))
            state = _find_state(file)
    except safetensors.SafetensorError as error:
        problem = f"is damaged or incomplete ({path.stat().st_size:,} bytes): {error}"
        raise UserError(f"{path} {problem}. Copy or download it again.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}. Copy or download it again.") from None
    return {
        name: StoredTensor(
            file=path,
            name=name,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            offset=8 + header_bytes + entry["data_offsets"][0],
            file_state=state,
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def make_views(
    stored: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    divided: Mapping[str, tuple[str, ...]],
) -> dict[str, Tensor]:
    """Returns the tensors of a model in place of stored ones that are fused, divided or quantized.

    Others, and those that do not fit the model, are returned as they are: their names or shapes
    differ from the model's.

    Args: shapes: of the model's tensors; divided: `families.Family.divided_tensors`.
    """
    views = {name: view_rows([tensor]) for name, tensor in stored.items()}
    for whole, modules in divided.items():
        for name in shapes:
            if name.endswith(f"{modules[0]}.weight"):
                prefix = name.removesuffix(f"{modules[0]}.weight")
                names = [f"{prefix}{module}.weight" for module in modules]
                _divide_rows(views, names, f"{prefix}{whole}.weight", shapes)
    for name in stored:
        prefix, _, kind = name.rpartition("mlp.experts.")
        if kind in _FUSED and f"{prefix}mlp.experts.0.down_proj.weight" in shapes:
            _split_experts(views, name)
        elif name.endswith("_blocks"):
            _dequantize(views, name.removesuffix("_blocks"))
    return views


def _divide_rows(
    views: dict[str, Tensor], names: list[str], whole: str, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Divides rows as in a model that files divide at other places, or not at all."""
    given = [name for name in (*names, whole) if name in views]
    parts = [part for name in given for part in views[name].parts]
    row_shapes = {part.shape[1:] for part in parts} | {shapes[name][1:] for name in names}
    num_rows = sum(shapes[name][0] for name in names)
    if len(row_shapes) > 1 or sum(part.shape[0] for part in parts) != num_rows:
        return
    for name in given:
        del views[name]
    first = 0
    for name in names:
        views[name] = view_rows(parts, shapes[name], first)
        first += shapes[name][0]


_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Tensors with the matrices of all experts, and the modules of each expert that they have, below
each other. transformers has such tensors in memory, and so have the files of Qwen3.5."""


def _split_experts(views: dict[str, Tensor], name: str) -> None:
    """Divides a tensor with the matrices of all experts, where the model has one for each."""
    whole = views[name]
    prefix, _, kind = name.rpartition(".")
    modules = _FUSED[kind]
    if len(whole.shape) != 3 or whole.shape[1] % len(modules):
        return
    num_experts, num_rows, num_columns = whole.shape
    count = num_rows // len(modules)
    experts = {
        f"{prefix}.{expert}.{module}.weight": view_rows(
            whole.parts, (count, num_columns), expert * num_rows + number * count
        )
        for expert in range(num_experts)
        for number, module in enumerate(modules)
    }
    if not experts.keys() & views.keys():
        del views[name]
        views |= experts


_MXFP4_GROUP = 32

_FP4_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)

_FP4_NUMBERS = np.concatenate([_FP4_MAGNITUDES, -_FP4_MAGNITUDES])
"""Numbers of 4 bits: a sign, two bits of the exponent, and one of the mantissa."""


def _dequantize(views: dict[str, Tensor], name: str) -> None:
    """Puts matrices [experts, columns, rows] in place of their two stored parts, if these are in
    MXFP4: numbers of 4 bits, and a factor for each 32 of a row, which is a power of two.

    Blocks [experts, rows, groups, 16] have two numbers in a byte, the first in the lower bits;
    scales [experts, rows, groups] are exponents of the factors plus 127.

    Source: OCP Microscaling Formats (MX) 1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0).
    """
    blocks = views[f"{name}_blocks"]
    scales = views.get(f"{name}_scales")
    if name in views or scales is None or not blocks.dtype == scales.dtype == _BYTES:
        return
    if len(scales.shape) != 3 or blocks.shape != (*scales.shape, _MXFP4_GROUP // 2):
        return
    del views[f"{name}_blocks"], views[f"{name}_scales"]
    num_experts, num_rows, num_groups = scales.shape
    num_columns = num_groups * _MXFP4_GROUP

    def read_mxfp4(index: Index) -> np.ndarray:
        experts, columns, rows = index
        start, stop, _ = columns.indices(num_columns)
        groups = slice(start // _MXFP4_GROUP, -(-stop // _MXFP4_GROUP))
        codes = blocks.read((experts, rows, groups, slice(None)))
        exponents = scales.read((experts, rows, groups))
        before = groups.start * _MXFP4_GROUP
        matrices = np.empty((len(codes), max(stop - start, 0), codes.shape[1]), np.float32)
        for expert, code in enumerate(codes):  # one after another: temporary arrays are large
            pairs = np.stack([code & 15, code >> 4], axis=-1)
            numbers = _FP4_NUMBERS[pairs.reshape(*code.shape[:2], _MXFP4_GROUP)]
            values = np.ldexp(numbers, exponents[expert][..., None].astype(np.int32) - 127)
            flat = values.reshape(len(code), code.shape[1] * _MXFP4_GROUP)
            matrices[expert] = flat[:, start - before : stop - before].T
        return matrices

    views[name] = Tensor(
        dtype="BF16",  # which holds all products of numbers and factors
        shape=(num_experts, num_columns, num_rows),
        parts=blocks.parts + scales.parts,
        read=read_mxfp4,
    )
