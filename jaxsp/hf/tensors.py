"""Tensors in safetensors files: headers and slices.

A file is opened anew for every read. Pages of a mapped file count as memory of the process until it
is closed, and a file that is truncated while it is mapped kills the process (SIGBUS). Opening takes
about 1 ms for 400 tensors, and checks the header again.
"""

import abc
import contextlib
import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorView(abc.ABC):
    """A tensor of a model, which is made of slices of stored tensors."""

    dtype: str
    """Name in safetensors."""
    shape: tuple[int, ...]

    @abc.abstractmethod
    def list_stored(self) -> "tuple[StoredTensor, ...]":
        """Stored tensors that this tensor is made of."""

    @abc.abstractmethod
    def read(self, index: Index, read: ReadSlice) -> np.ndarray:
        """Returns a slice, float32. Args: read: see `open_files`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor(TensorView):
    """A tensor in a file."""

    file: pathlib.Path
    name: str

    def list_stored(self) -> "tuple[StoredTensor, ...]":
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
class StoredRows(TensorView):
    """A tensor whose rows are some of those of other tensors, concatenated along the rows."""

    parts: tuple[StoredTensor, ...]
    first: int
    """Number of the first row, counted from the first row of the first part."""

    def list_stored(self) -> tuple[StoredTensor, ...]:
        return self.parts

    def read(self, index: Index, read: ReadSlice) -> np.ndarray:
        rows, *others = index
        start, stop, _ = rows.indices(self.shape[0])
        start += self.first
        stop += self.first
        arrays = []
        for part in self.parts:
            arrays.append(read(part, (slice(max(start, 0), max(stop, 0)), *others)))
            start -= part.shape[0]
            stop -= part.shape[0]
        return np.concatenate(arrays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredExpert(TensorView):
    """The matrix of one expert: some rows of a tensor [experts, rows, columns]."""

    whole: TensorView
    expert: int
    first: int
    """Number of the first row."""

    def list_stored(self) -> tuple[StoredTensor, ...]:
        return self.whole.list_stored()

    def read(self, index: Index, read: ReadSlice) -> np.ndarray:
        start, stop, _ = index[0].indices(self.shape[0])
        rows = slice(self.first + start, self.first + stop)
        return self.whole.read((slice(self.expert, self.expert + 1), rows, index[1]), read)[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mxfp4Matrices(TensorView):
    """Matrices [experts, columns, rows] that are stored in MXFP4: numbers of 4 bits, and a factor
    for each 32 of a row, which is a power of two.

    Source: OCP Microscaling Formats (MX) 1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0).
    """

    blocks: StoredTensor
    """Two numbers in a byte, the first in the lower bits: [experts, rows, groups, 16]."""
    scales: StoredTensor
    """Exponents of the factors plus 127: [experts, rows, groups]."""

    def list_stored(self) -> tuple[StoredTensor, ...]:
        return self.blocks, self.scales

    def read(self, index: Index, read: ReadSlice) -> np.ndarray:
        experts, columns, rows = index
        start, stop, _ = columns.indices(self.shape[1])
        groups = slice(start // _MXFP4_GROUP, -(-stop // _MXFP4_GROUP))
        blocks = read(self.blocks, (experts, rows, groups, slice(None)))
        scales = read(self.scales, (experts, rows, groups))
        num_experts, num_rows, num_groups = scales.shape
        before = groups.start * _MXFP4_GROUP
        matrices = np.empty((num_experts, max(stop - start, 0), num_rows), np.float32)
        for expert in range(num_experts):  # one after another: temporary arrays are large
            codes = np.stack([blocks[expert] & 15, blocks[expert] >> 4], axis=-1)
            numbers = _FP4_NUMBERS[codes.reshape(num_rows, num_groups, _MXFP4_GROUP)]
            values = np.ldexp(numbers, scales[expert][..., None].astype(np.int32) - 127)
            flat = values.reshape(num_rows, num_groups * _MXFP4_GROUP)
            matrices[expert] = flat[:, start - before : stop - before].T
        return matrices


_MXFP4_GROUP = 32

_FP4_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)

_FP4_NUMBERS = np.concatenate([_FP4_MAGNITUDES, -_FP4_MAGNITUDES])
"""Numbers of 4 bits: a sign, two bits of the exponent, and one of the mantissa."""


def dequantize(
    views: Mapping[str, TensorView], stored: Mapping[str, StoredTensor]
) -> dict[str, TensorView]:
    """Returns matrices in place of those stored tensors that are in MXFP4; others as they are."""
    views = {**views}
    for blocks_name, blocks in stored.items():
        name = blocks_name.removesuffix("_blocks")
        scales = stored.get(f"{name}_scales")
        if name == blocks_name or name in stored or scales is None:
            continue
        is_mxfp4 = blocks.dtype == scales.dtype == _BYTES and len(blocks.shape) == 4
        if not is_mxfp4 or blocks.shape != (*scales.shape, _MXFP4_GROUP // 2):
            continue  # named as surplus
        num_experts, num_rows, num_groups = scales.shape
        del views[blocks_name]
        del views[f"{name}_scales"]
        views[name] = Mxfp4Matrices(
            dtype="BF16",  # which holds all products of numbers and factors
            shape=(num_experts, num_groups * _MXFP4_GROUP, num_rows),
            blocks=blocks,
            scales=scales,
        )
    return views


FUSED_EXPERTS = {
    "mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.experts.down_proj": ("down_proj",),
}
"""Names of tensors with the matrices of all experts, and the modules of each expert that they have,
below each other. transformers has such tensors in memory, and so have the files of Qwen3.5."""


def fused_names(shapes: Iterable[str]) -> dict[str, str]:
    """Names of tensors with the matrices of all experts, and the beginnings of these names.

    Args: shapes: names of the model's tensors, which has a matrix for each expert.
    """
    first = "mlp.experts.0.down_proj.weight"
    prefixes = [name.removesuffix(first) for name in shapes if name.endswith(first)]
    return {prefix + name: prefix for prefix in prefixes for name in FUSED_EXPERTS}


def split_experts(
    stored: Mapping[str, TensorView], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, TensorView]:
    """Returns a matrix for each expert, where the model has those; other tensors as they are."""
    views = {**stored}
    for name, prefix in fused_names(shapes).items():
        if name not in stored or len(stored[name].shape) != 3:
            continue
        modules = FUSED_EXPERTS[name.removeprefix(prefix)]
        num_experts, num_rows, num_columns = stored[name].shape
        count = num_rows // len(modules)
        parts = {
            f"{prefix}mlp.experts.{expert}.{module}.weight": StoredExpert(
                dtype=stored[name].dtype,
                shape=(count, num_columns),
                whole=stored[name],
                expert=expert,
                first=number * count,
            )
            for expert in range(num_experts)
            for number, module in enumerate(modules)
        }
        if count * len(modules) == num_rows and not parts.keys() & stored.keys():
            del views[name]  # otherwise it is named as surplus
            views |= parts
    return views


def divide_rows(
    stored: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    divided: Mapping[str, tuple[str, ...]],
) -> dict[str, TensorView]:
    """Returns tensors whose rows are divided as in a model; others as they are.

    Args: divided: `families.Family.divided_tensors`.
    """
    result: dict[str, TensorView] = {**stored}
    for whole, modules in divided.items():
        ends = [f"{module}.weight" for module in modules]
        for prefix in [x.removesuffix(ends[0]) for x in shapes if x.endswith(ends[0])]:
            names = [prefix + end for end in ends]
            given = [x for x in (*names, f"{prefix}{whole}.weight") if x in stored]
            parts = tuple(stored[name] for name in given)
            row_shapes = {part.shape[1:] for part in parts} | {shapes[x][1:] for x in names}
            num_rows = sum(shapes[name][0] for name in names)
            if len(row_shapes) > 1 or sum(part.shape[0] for part in parts) != num_rows:
                continue  # named as missing, surplus or of another shape
            for name in given:
                del result[name]
            # One that jaxsp does not read, if there is one
            dtype = min((part.dtype for part in parts), key=lambda dtype: dtype in DTYPES)
            first = 0
            for name in names:
                shape = shapes[name]
                result[name] = StoredRows(dtype=dtype, shape=shape, parts=parts, first=first)
                first += shape[0]
    return result


def read_header(path: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns all tensors of a file by name, without reading their values. Raises: UserError."""
    with _open(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not iterable
        return {
            name: StoredTensor(
                file=path, name=name, dtype=part.get_dtype(), shape=tuple(part.get_shape())
            )
            for name, part in slices.items()
        }


@contextlib.contextmanager
def open_files() -> Iterator[ReadSlice]:
    """Context that yields a function that reads slices. It opens one file at a time.

    Raises: UserError for a damaged file.
    """
    with contextlib.ExitStack() as opened:
        files: dict[pathlib.Path, Any] = {}

        def read(tensor: StoredTensor, index: Index) -> np.ndarray:
            if tensor.file not in files:
                files.clear()
                opened.close()
                files[tensor.file] = opened.enter_context(_open(tensor.file))
            return _read_slice(files[tensor.file], tensor, index)

        yield read


def _read_slice(file: Any, tensor: StoredTensor, index: Index) -> np.ndarray:
    spans = [range(*part.indices(size)) for part, size in zip(index, tensor.shape, strict=True)]
    shape = [len(span) for span in spans]
    if 0 in shape:  # safetensors refuses an empty slice at the end of a dim
        return np.zeros(shape, np.uint8 if tensor.dtype == _BYTES else np.float32)
    part = file.get_slice(tensor.name)[tuple(slice(span.start, span.stop) for span in spans)]
    return part if tensor.dtype == _BYTES else part.astype(np.float32, copy=False)


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
