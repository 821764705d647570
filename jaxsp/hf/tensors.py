"""One safetensors file: what its header says, checked, and slices of its tensors.

Files are read, not mapped into memory: pages of a mapping count as memory of the process, so that importing a share of the
weights would seem to take all of them.
"""

import dataclasses
import io
import json
import math
import pathlib
import struct
from typing import Any

import jax.numpy as jnp
import numpy as np

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
}
"""What jaxsp reads, by safetensors' names; float32 holds all of them exactly."""

_MAX_HEADER_BYTES = 10**8
"""Bytes; the same limit as in the safetensors library."""


class BadFileError(ValueError):
    """A file that is not what its name says; the message is the end of a sentence about it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies."""

    file: pathlib.Path
    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""


def read_header(path: pathlib.Path) -> dict[str, StoredTensor]:
    """All tensors of a file by name; nothing but the header is read. Raises: BadFile."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER_BYTES + 1
            if start == b"version ":  # git-lfs.github.com/spec/v1
                raise BadFileError(
                    "is a pointer of git-lfs, not the file itself: git lfs pull fetches it"
                )
            if length > _MAX_HEADER_BYTES:
                raise BadFileError("is no safetensors file")
            text = file.read(length)
    except OSError as error:
        raise BadFileError(f"cannot be read: {error}") from None
    if len(text) < length:
        raise BadFileError(
            f"is cut short: {size:,} bytes, of which the header alone needs {8 + length:,}"
        )
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        found = {
            name: _parse_entry(path, entry, begin=8 + length) for name, entry in entries.items()
        }
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BadFileError("is no safetensors file: its header is damaged") from None
    if size < end:
        raise BadFileError(f"is cut short: {size:,} bytes of {end:,}")
    if size > end:
        raise BadFileError(f"is damaged: {size:,} bytes, and its header speaks of {end:,}")
    return found


def read_slice(tensor: StoredTensor, index: tuple[slice, ...]) -> np.ndarray:
    """A slice of a tensor, float32. Reads nothing else, in as few pieces as it lies in. Raises: BadFile.

    Args:
        index: for each dim, without steps.
    """
    shape = tensor.shape
    spans = [range(*one.indices(size)) for one, size in zip(index, shape, strict=True)]
    assert all(span.step == 1 for span in spans), index
    taken = np.empty([len(span) for span in spans], DTYPES[tensor.dtype])
    if taken.size:
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        # the last dim that is not taken whole: what is behind it lies side by side
        cut = max((dim for dim, span in enumerate(spans) if len(span) < shape[dim]), default=0)
        begin = sum(span.start * stride for span, stride in zip(spans, strides, strict=True))
        try:
            with tensor.file.open("rb", buffering=0) as file:
                for place in np.ndindex(taken.shape[:cut]):
                    elements = begin + sum(
                        at * stride for at, stride in zip(place, strides, strict=False)
                    )
                    file.seek(tensor.offset + elements * taken.itemsize)
                    _read_into(file, taken[(*place, ...)])
        except OSError as error:
            raise BadFileError(f"cannot be read: {error}") from None
    return taken.astype(np.float32, copy=False)


def _parse_entry(path: pathlib.Path, entry: dict, *, begin: int) -> StoredTensor:
    """Raises: ValueError, TypeError or KeyError for an entry that makes no sense."""
    first, last = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (first, last, *shape)):
        raise ValueError
    dtype = entry["dtype"]
    if dtype in DTYPES and last - first != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError
    return StoredTensor(file=path, dtype=str(dtype), shape=shape, offset=begin + first)


def _read_into(file: io.FileIO, array: np.ndarray) -> None:
    """Reads an array full; one call of the system reads 2 GiB at most."""
    left = array.reshape(-1).view(np.uint8).data
    while left:
        count = file.readinto(left)
        if not count:
            raise BadFileError("became shorter while it was read")
        left = left[count:]
