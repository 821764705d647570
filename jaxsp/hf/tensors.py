"""Tensors in safetensors files, and the tensors of a model as views of them.

A file is opened anew for every read. Pages of a mapped file count as memory of the process until it
is closed, and a file that is truncated while it is mapped kills the process (SIGBUS). Opening takes
about 1 ms for 400 tensors, and checks the header again.
"""

import contextlib
import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import safetensors

from jaxsp.core.errors import UserError

Index = tuple[slice, ...]
"""A slice without a step for each dim; as in numpy, it may reach past the end."""

ReadSlice = Callable[["StoredTensor", Index], np.ndarray]
"""Function that reads a slice of a stored tensor: float32, or bytes as they are."""

DTYPES = ("F32", "F16", "BF16")
"""Dtypes that jaxsp reads, by safetensors' names; float32 holds all of them exactly."""

_BYTES = "U8"
"""dtype of the parts of tensors in MXFP4."""

_WHOLE = slice(None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file."""

    dtype: str
    """Name in safetensors."""
    shape: tuple[int, ...]
    file: pathlib.Path
    name: str

    @property
    def parts(self) -> "tuple[StoredTensor, ...]":
        return (self,)

    def read(self, index: Index, read: ReadSlice) -> np.ndarray:
        return read(self, index)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        bits = re.search(r"\d+", self.dtype)  # of F32, BF16 or F8_E4M3; BOOL has 8
        return math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8

    def to_numpy(self) -> np.ndarray:
        """Returns the whole tensor in its own dtype. Raises: UserError."""
        with _open(self.file) as file:
            return file.get_tensor(self.name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorView:
    """A tensor of a model that is made of slices of stored tensors."""

    dtype: str
    """Name in safetensors. It is one that jaxsp does not read if a part has such a dtype."""
    shape: tuple[int, ...]
    parts: tuple[StoredTensor, ...]
    """Stored tensors that this tensor is made of."""
    read: Callable[[Index, ReadSlice], np.ndarray]
    """Function that returns a slice, float32. Its second argument is that of `open_files`."""


Tensor = StoredTensor | TensorView


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
    views: dict[str, Tensor] = {**stored}
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
    parts = tuple(part for name in given for part in views[name].parts)
    row_shapes = {part.shape[1:] for part in parts} | {shapes[name][1:] for name in names}
    num_rows = sum(shapes[name][0] for name in names)
    if len(row_shapes) > 1 or sum(part.shape[0] for part in parts) != num_rows:
        return
    for name in given:
        del views[name]
    dtype = min((part.dtype for part in parts), key=lambda dtype: dtype in DTYPES)

    def read_rows(rows: slice, index: Index, read: ReadSlice) -> np.ndarray:
        arrays = [read(part, len(part.shape) * (_WHOLE,)) for part in parts]  # they are small
        return np.concatenate(arrays)[rows][index]

    first = 0
    for name in names:
        rows = slice(first, first + shapes[name][0])
        read = functools.partial(read_rows, rows)
        views[name] = TensorView(dtype=dtype, shape=shapes[name], parts=parts, read=read)
        first = rows.stop


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

    def read_expert(expert: int, first: int, index: Index, read: ReadSlice) -> np.ndarray:
        span = range(first, first + count)[index[0]]
        part = (slice(expert, expert + 1), slice(span.start, span.stop), index[1])
        return whole.read(part, read)[0]

    experts = {
        f"{prefix}.{expert}.{module}.weight": TensorView(
            dtype=whole.dtype,
            shape=(count, num_columns),
            parts=whole.parts,
            read=functools.partial(read_expert, expert, number * count),
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

    def read_mxfp4(index: Index, read: ReadSlice) -> np.ndarray:
        experts, columns, rows = index
        start, stop, _ = columns.indices(num_columns)
        groups = slice(start // _MXFP4_GROUP, -(-stop // _MXFP4_GROUP))
        codes = blocks.read((experts, rows, groups, _WHOLE), read)
        exponents = scales.read((experts, rows, groups), read)
        before = groups.start * _MXFP4_GROUP
        matrices = np.empty((len(codes), max(stop - start, 0), codes.shape[1]), np.float32)
        for expert, code in enumerate(codes):  # one after another: temporary arrays are large
            pairs = np.stack([code & 15, code >> 4], axis=-1)
            numbers = _FP4_NUMBERS[pairs.reshape(*code.shape[:2], _MXFP4_GROUP)]
            values = np.ldexp(numbers, exponents[expert][..., None].astype(np.int32) - 127)
            flat = values.reshape(len(code), code.shape[1] * _MXFP4_GROUP)
            matrices[expert] = flat[:, start - before : stop - before].T
        return matrices

    views[name] = TensorView(
        dtype="BF16",  # which holds all products of numbers and factors
        shape=(num_experts, num_columns, num_rows),
        parts=(*blocks.parts, *scales.parts),
        read=read_mxfp4,
    )


def read_header(path: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns all tensors of a file by name, without reading their values. Raises: UserError."""
    header = {}
    with _open(path) as file:
        for name in file.keys():  # noqa: SIM118 - not iterable
            part = file.get_slice(name)
            shape = tuple(part.get_shape())
            header[name] = StoredTensor(file=path, name=name, dtype=part.get_dtype(), shape=shape)
    return header


@contextlib.contextmanager
def open_files() -> Iterator[ReadSlice]:
    """Yields a function that reads slices, with one open file at a time. Raises: UserError."""
    with contextlib.ExitStack() as opened:
        files: dict[pathlib.Path, Any] = {}

        def read(tensor: StoredTensor, index: Index) -> np.ndarray:
            if tensor.file not in files:
                files.clear()
                opened.close()
                files[tensor.file] = opened.enter_context(_open(tensor.file))
            spans = [range(size)[part] for part, size in zip(index, tensor.shape, strict=True)]
            shape = [len(span) for span in spans]
            dtype = np.uint8 if tensor.dtype == _BYTES else np.float32
            if 0 in shape:  # safetensors refuses an empty slice at the end of a dim
                return np.zeros(shape, dtype)
            stored = files[tensor.file].get_slice(tensor.name)
            part = stored[tuple(slice(span.start, span.stop) for span in spans)]
            return part.astype(dtype, copy=False)

        yield read


@contextlib.contextmanager
def _open(path: pathlib.Path) -> Iterator[Any]:
    """Opens a safetensors file and checks its header. Raises: UserError."""
    try:
        with path.open("rb") as file:
            is_lfs_pointer = file.read(8) == b"version "  # git-lfs.github.com/spec/v1
        if not is_lfs_pointer:
            with safetensors.safe_open(path, "np") as opened:
                yield opened
            return
        problem = "is a git-lfs pointer, not the file. Fetch it with git lfs pull"
    except safetensors.SafetensorError as error:
        problem = f"is damaged or incomplete ({path.stat().st_size:,} bytes): {error}"
    except OSError as error:
        problem = f"cannot be read: {error}"
    raise UserError(f"{path} {problem}. Copy or download it again.")
