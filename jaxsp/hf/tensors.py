"""Tensors in safetensors files: headers and slices.

A file is opened anew for every read. Pages of a mapped file count as memory of the process until it
is closed, and a file that is truncated while it is mapped kills the process (SIGBUS). Opening takes
about 1 ms for 400 tensors, and checks the header again.
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import safetensors

DTYPES = ("F32", "F16", "BF16")
"""Dtypes that jaxsp reads, by safetensors' names; float32 holds all of them exactly."""


class BadFileError(ValueError):
    """A file that cannot be read as safetensors; the message is the end of a sentence about it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file."""

    file: pathlib.Path
    name: str
    dtype: str
    """Name in safetensors."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        bits = re.search(r"\d+", self.dtype)  # of F32, BF16 or F8_E4M3; BOOL has 8
        return math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredRows:
    """A tensor whose rows are some of those of other tensors, concatenated along the rows."""

    parts: tuple[StoredTensor, ...]
    first: int
    """Number of the first row, counted from the first row of the first part."""
    count: int
    """Number of rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, *self.parts[0].shape[1:])

    @property
    def dtype(self) -> str:
        """dtype of a part; one that jaxsp does not read, if there is one."""
        return min((part.dtype for part in self.parts), key=lambda dtype: dtype in DTYPES)

    def split(self, index: tuple[slice, ...]) -> Iterator[tuple[StoredTensor, tuple[slice, ...]]]:
        """Yields all parts, with the slices of them that a slice of this tensor consists of."""
        rows, *others = index
        start, stop, _ = rows.indices(self.count)
        start += self.first
        stop += self.first
        for part in self.parts:
            yield part, (slice(max(start, 0), max(stop, 0)), *others)
            start -= part.shape[0]
            stop -= part.shape[0]


def divide_rows(
    stored: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    divided: Mapping[str, tuple[str, ...]],
) -> dict[str, StoredTensor | StoredRows]:
    """Returns tensors whose rows are divided as in a model; others as they are.

    Args:
        shapes: shapes of the model's tensors.
        divided: `families.Family.divided_tensors`.
    """
    result: dict[str, StoredTensor | StoredRows] = {**stored}
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
            first = 0
            for name in names:
                count = shapes[name][0]
                result[name] = StoredRows(parts=parts, first=first, count=count)
                first += count
    return result


def read_header(path: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns all tensors of a file by name, without reading their values. Raises: BadFileError."""
    with _open(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not iterable
        return {
            name: StoredTensor(
                file=path, name=name, dtype=part.get_dtype(), shape=tuple(part.get_shape())
            )
            for name, part in slices.items()
        }


def read_slice(tensor: StoredTensor, index: tuple[slice, ...]) -> np.ndarray:
    """Returns a slice of a tensor, like `read_slices`."""
    return read_slices(tensor.file, [(tensor, index)])[0]


def read_slices(
    path: pathlib.Path, parts: Iterable[tuple[StoredTensor, tuple[slice, ...]]]
) -> list[np.ndarray]:
    """Returns slices of tensors of a file, float32. Raises: BadFileError.

    Args:
        parts: tensors, and a slice without a step for each dim; as in numpy, it may reach past the
            end.
    """
    with _open(path) as file:
        return [_read_slice(file, *part) for part in parts]


def _read_slice(file: Any, tensor: StoredTensor, index: tuple[slice, ...]) -> np.ndarray:
    spans = [range(*part.indices(size)) for part, size in zip(index, tensor.shape, strict=True)]
    shape = [len(span) for span in spans]
    if 0 in shape:  # safetensors refuses an empty slice at the end of a dim
        return np.zeros(shape, np.float32)
    part = file.get_slice(tensor.name)[tuple(slice(span.start, span.stop) for span in spans)]
    return part.astype(np.float32, copy=False)


def read_unchanged(tensor: StoredTensor) -> np.ndarray:
    """Returns a whole tensor in its own dtype. Raises: BadFileError."""
    with _open(tensor.file) as file:
        return file.get_tensor(tensor.name)


@contextmanager
def _open(path: pathlib.Path) -> Iterator[Any]:
    """Opens a safetensors file and checks its header. Raises: BadFileError."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
        if start == b"version ":  # git-lfs.github.com/spec/v1
            raise BadFileError("is a git-lfs pointer, not the file. Fetch it with git lfs pull")
        with safetensors.safe_open(path, "np") as opened:
            yield opened
    except safetensors.SafetensorError as error:
        size = path.stat().st_size
        raise BadFileError(f"is damaged or incomplete ({size:,} bytes): {error}") from None
    except OSError as error:
        raise BadFileError(f"cannot be read: {error}") from None
