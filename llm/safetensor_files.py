"""Files in the safetensors format, read and written piece by piece: never more than a block beside the tensor in hand.

The format: 8 bytes with the length of a header, the header (JSON: name -> dtype, shape, offsets of its bytes), the numbers,
little-endian. Memory maps are avoided: their pages count as resident memory."""

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from parallel.errors import UserError

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BLOCK = 1 << 22  # numbers converted at a time
ALIGN = 8  # the header is padded with spaces, so that the numbers start at a multiple


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # first byte in the file

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows start to stop of the tensor, in fp32. Raises UserError when its numbers are of a kind that is not supported."""
        if self.dtype not in DTYPES:
            raise UserError(f"{self.path}: tensor {self.name} is of type {self.dtype}: supported are {', '.join(DTYPES)}")
        dtype, row = DTYPES[self.dtype], math.prod(self.shape[1:])
        out = np.empty((len(range(*slice(start, stop).indices(self.shape[0]))), *self.shape[1:]), np.float32)
        flat = out.reshape(-1)
        with open(self.path, "rb") as file:
            file.seek(self.start + start * row * dtype.itemsize)
            for first in range(0, flat.size, BLOCK):
                part = flat[first : first + BLOCK]
                block = np.fromfile(file, dtype, part.size)
                if block.size < part.size:
                    raise UserError(f"{self.path} is cut short: tensor {self.name} is not whole")
                part[:] = block
        return out


def entries(path: Path) -> dict[str, Entry]:
    """What is in a file. Raises UserError when it is no safetensors file or is cut short."""
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                raise ValueError("its header is cut short")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = {}
        for name, tensor in header.items():
            begin, end = tensor["data_offsets"]
            shape, dtype = tuple(tensor["shape"]), tensor["dtype"]
            if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
                raise ValueError(f"tensor {name} of shape {shape} and type {dtype} has {end - begin} bytes")
            if not 0 <= begin <= end <= size - 8 - length:
                raise ValueError(f"it is cut short in tensor {name}")
            found[name] = Entry(path, name, dtype, shape, 8 + length + begin)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a safetensors file that can be read: {error}") from None
    return found


def write(
    path: Path, shapes: dict[str, tuple[int, ...]], dtype: np.dtype, parts: Callable[[str], Iterable[np.ndarray]]
) -> None:
    """Writes a file of tensors of one dtype. parts(name): the rows of a tensor, in one or several arrays."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGN)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            written = sum(_write_rows(file, part, dtype) for part in parts(name))
            if written != math.prod(shape):
                raise ValueError(f"{name}: {written} numbers were written where {shape} belong")
        file.flush()
        os.fsync(file.fileno())


def _write_rows(file: BinaryIO, array: np.ndarray, dtype: np.dtype) -> int:
    rows = max(1, BLOCK // max(1, math.prod(array.shape[1:])))
    for first in range(0, len(array), rows):
        np.ascontiguousarray(array[first : first + rows], dtype).tofile(file)
    return array.size
