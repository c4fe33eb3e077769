"""The arrays of one saved step: the same files whatever the layout of the run that wrote them.

    manifest.json                    every array's shape, dtype and rows per chunk, and the caller's meta; checksummed
    params/block/mlp/up/zarr.json    a per-layer parameter: a Zarr version 3 array [layers, ...] in canonical order
    params/block/mlp/up/c/7/0/0      its layer 7: one layer per chunk
    params/embedding/zarr.json       any other array [...], whole rows per chunk, up to BLOCK numbers

A chunk holds little-endian numbers and their CRC-32C. All are written, zeros too, and reading a missing one fails.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import zlib
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from parallel.errors import CheckError, UserError
from parallel.sharding import Stored

FORMAT = 1
MANIFEST = "manifest.json"
UNREADABLE = (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
BLOCK = 1 << 22  # numbers in a chunk of an array that is not stacked
IN_FLIGHT = 1 << 26  # bytes that reads or writes under way may hold
PIECE = 1 << 25  # bytes of a leaf that the host holds while it is read; a layer, when that is more
CHECKSUM_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Info:
    """An array on disk: its shape, the name of its dtype and how many rows (entries of dimension 0) make a chunk."""

    shape: tuple[int, ...]
    dtype: str
    rows: int

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype, stacked: bool) -> "Info":
        """The one way to cut an array of this shape; it depends on nothing else. stacked: dimension 0 is the layer."""
        rows = 1 if stacked or not shape else min(shape[0], max(1, BLOCK // max(1, math.prod(shape[1:]))))
        return cls(tuple(shape), np.dtype(dtype).name, rows)

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        return (self.rows, *self.shape[1:]) if self.shape else ()

    @property
    def chunks(self) -> int:
        return -(-self.shape[0] // self.rows) if self.shape else 1

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk_shape) * np.dtype(self.dtype).itemsize

    def region(self, chunk: int) -> tuple[slice, ...]:
        """What a chunk covers of the array; the last one may be shorter."""
        whole = tuple(slice(0, n) for n in self.shape[1:])
        return (slice(chunk * self.rows, min((chunk + 1) * self.rows, self.shape[0])), *whole) if self.shape else ()


def pieces(index, info: Info, stored: Stored) -> Iterator[tuple[int, tuple[slice, ...], tuple]]:
    """How a part of a leaf in memory maps to its array on disk.

    index: the slices of the leaf that the part covers. Yields (chunk, slices of the array, slices of the part), which
    have the same shape; padding and empty slots are in none of them."""
    lead = 0 if stored.index_CPL is None else 3
    rest = info.shape[1:] if lead else info.shape
    disk = tuple(slice(s.start, min(s.stop, n)) for s, n in zip(index[lead:], rest))
    if any(s.start >= s.stop for s in disk):
        return
    part = tuple(slice(0, s.stop - s.start) for s in disk)
    if lead:
        for (c, p, slot), layer in np.ndenumerate(stored.index_CPL[index[:lead]]):
            if layer >= 0:
                yield int(layer), (slice(layer, layer + 1), *disk), (c, p, slice(slot, slot + 1), *part)
    elif not disk:
        yield 0, (), ()
    else:
        start, stop = disk[0].start, disk[0].stop
        for chunk in range(start // info.rows, -(-stop // info.rows)):
            a, b = max(start, chunk * info.rows), min(stop, (chunk + 1) * info.rows)
            yield chunk, (slice(a, b), *disk[1:]), (slice(a - start, b - start), *part[1:])


def write_shards(folder: Path, name: str, info: Info, stored: Stored, shards) -> None:
    """Writes a leaf's parts: shards is a list of (slices of the leaf, numpy array), each in no other one's.

    A chunk of which several shards hold a part is put together first and written once; one that other processes hold
    parts of, too, is completed piece by piece under tensorstore's conditional writes."""
    parts = defaultdict(list)
    for index, values in shards:
        for chunk, disk, where in pieces(index, info, stored):
            parts[chunk].append((disk, values[where]))
    store = open_array(folder, name, info, create=True) if parts else None
    with _Window() as window:
        for chunk, held in parts.items():
            region = info.region(chunk)
            if len(held) > 1 and sum(values.size for _, values in held) == math.prod(_shape(region)):
                block = np.empty(_shape(region), info.dtype)
                for disk, values in held:
                    block[_within(disk, region)] = values
                held = [(region, block)]
            for disk, values in held:
                # Nobody changes the host copies, so tensorstore need not copy them once more.
                write = lambda disk=disk, values=values: store[disk].write(values, can_reference_source_data_indefinitely=True)
                window.add(values.nbytes, write)


def read_leaf(folder: Path, name: str, info: Info, stored: Stored, abstract: jax.ShapeDtypeStruct) -> jax.Array:
    """Reads an array into a leaf with the shape, dtype and sharding of `abstract` (no sharding: the first device).

    Each chunk that this process needs is read once. A leaf goes to the devices piece by piece, one layer or PIECE bytes
    of this process's part at a time, so that the host never holds more than a piece and a few chunks."""
    sharding = abstract.sharding or NamedSharding(Mesh(np.array(jax.local_devices()[:1]), ("x",)), PartitionSpec())
    local, leaf = sharding.shard_shape(abstract.shape), None
    shards = {_bounds(index, abstract.shape) for index in sharding.addressable_devices_indices_map(abstract.shape).values()}
    store, most = open_array(folder, name, info), PIECE // np.dtype(abstract.dtype).itemsize // len(shards)
    for offset, size in _cuts(local, 1 if stored.index_CPL is None else 3, most):
        buffers, parts = {}, defaultdict(list)
        for shard in shards:
            buffer = buffers[tuple(start // n for (start, _), n in zip(shard, local))] = np.zeros(size, abstract.dtype)
            index = tuple(slice(start + o, start + o + n) for (start, _), o, n in zip(shard, offset, size))
            for chunk, disk, where in pieces(index, info, stored):
                parts[chunk].append((buffer, where, _within(disk, info.region(chunk))))
        with _Window() as window:
            for chunk, held in sorted(parts.items()):
                read = lambda chunk=chunk: store[info.region(chunk)].read()
                window.add(info.chunk_bytes, read, lambda block, held=held: _scatter(block, held))
        whole = tuple(n // k * part for n, k, part in zip(abstract.shape, local, size))
        at = lambda index, size=size: tuple((s.start or 0) // n for s, n in zip(index, size))
        piece = jax.make_array_from_callback(whole, sharding, lambda index, b=buffers, at=at: b[at(index)])
        if size == local:
            return piece
        leaf = _zeros(sharding, abstract.shape, piece.dtype) if leaf is None else leaf
        leaf = jax.block_until_ready(_put(sharding)(leaf, piece, np.array(offset, np.int32)))
    return leaf


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape))


def _cuts(shape: tuple[int, ...], lead: int, most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts a shard into pieces of equal size along its `lead` first dimensions: (offset, size) of each.

    A piece holds at most `most` numbers, or one row of the last of these dimensions; the last pieces may overlap."""
    if math.prod(shape) <= max(most, 1) or not shape:
        yield (0,) * len(shape), shape
        return
    rows = shape[lead - 1]
    size = (*(1,) * (lead - 1), min(rows, max(1, most // math.prod(shape[lead:]))), *shape[lead:])
    for first in np.ndindex(*shape[: lead - 1], -(-rows // size[lead - 1])):
        row = min(first[-1] * size[lead - 1], rows - size[lead - 1])
        yield (*first[:-1], row, *(0,) * (len(shape) - lead)), size


def _scatter(block: np.ndarray, held: list[tuple[np.ndarray, tuple, tuple]]) -> None:
    for buffer, where, within in held:
        buffer[where] = block[within]


def _zeros(sharding: NamedSharding, shape: tuple[int, ...], dtype) -> jax.Array:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()


@functools.cache
def _put(sharding: NamedSharding):
    """Jitted (leaf, piece, offset) -> the leaf, in place, with the piece at this offset of every shard."""
    put = lambda leaf, piece, offset: jax.lax.dynamic_update_slice(leaf, piece, [*offset])
    specs = dict(in_specs=(sharding.spec, sharding.spec, PartitionSpec()), out_specs=sharding.spec)
    return jax.jit(jax.shard_map(put, mesh=sharding.mesh, check_vma=False, **specs), donate_argnums=0)


def open_array(folder: Path, name: str, info: Info, create: bool = False) -> tensorstore.TensorStore:
    """Opens, or creates, an array; fails when what is there is not what info says."""
    metadata = {
        "shape": info.shape,
        "data_type": info.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": info.chunk_shape}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "fill_value": False if info.dtype == "bool" else 0,
    }
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(folder / name)},
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }
    return tensorstore.open(spec, open=True, create=create).result()


def write_manifest(folder: Path, infos: dict[str, Info], meta: dict) -> None:
    """Writes what a step holds and the caller's meta (plain JSON; integers of any size stay exact)."""
    arrays = {name: dataclasses.asdict(info) for name, info in infos.items()}
    body = json.loads(json.dumps({"format": FORMAT, "arrays": arrays, "meta": meta}))  # as a reader will see it
    text = json.dumps({"crc32": _checksum(body), **body}, indent=1)
    with open(folder / MANIFEST, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@dataclasses.dataclass(frozen=True)
class Saved:
    """A saved step, opened for reading."""

    folder: Path
    title: str
    infos: dict[str, Info]
    meta: dict

    @classmethod
    def open(cls, folder: Path, title: str) -> "Saved":
        """Raises CheckError (missing or damaged), UserError (of a newer version), OSError (cannot be read)."""
        try:
            body = json.loads((folder / MANIFEST).read_text())
            version, checksum = body["format"], body.pop("crc32")
            if version == FORMAT and checksum != _checksum(body):
                raise ValueError("its checksum does not fit")
        except UNREADABLE as error:
            raise CheckError(f"{title}: {MANIFEST} cannot be read: {error}") from error
        if version != FORMAT:
            raise UserError(f"{title} has format {version}, this version reads up to {FORMAT}: use a newer one")
        infos = {n: Info(tuple(a["shape"]), a["dtype"], a["rows"]) for n, a in body["arrays"].items()}
        return cls(folder, title, infos, body["meta"])

    def problem(self) -> str | None:
        """What is missing or cut short, found from file sizes alone; None when nothing is."""
        for name, info in self.infos.items():
            grid = "/0" * (len(info.shape) - 1)
            for chunk in range(info.chunks):
                file = self.folder / name / (f"c/{chunk}{grid}" if info.shape else "c")
                try:
                    size = file.stat().st_size
                except (FileNotFoundError, NotADirectoryError):
                    return f"array {name}: {file.relative_to(self.folder)} is missing"
                if size != info.chunk_bytes + CHECKSUM_BYTES:
                    return f"array {name}: {file.relative_to(self.folder)} is cut short"
        return None

    def damage(self) -> list[str]:
        """Everything that is missing, cut short or does not fit its checksum; reads all of it."""
        if problem := self.problem():
            return [problem]
        found = []
        for name in self.infos:
            try:
                for _ in self.blocks(name):
                    pass
            except CheckError as error:
                found.append(str(error).removeprefix(f"{self.title}: "))
        return found

    @property
    def bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(info.chunks * (info.chunk_bytes + CHECKSUM_BYTES) for info in self.infos.values())

    def blocks(self, name: str) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """An array chunk by chunk: what the chunk covers and its numbers. Raises CheckError at a damaged one."""
        info, ahead = self._info(name), deque()
        with self._naming(name):
            store = open_array(self.folder, name, info)
            for chunk in range(info.chunks):
                ahead.append((info.region(chunk), store[info.region(chunk)].read()))
                if len(ahead) > 1:
                    yield _finished(ahead)
            while ahead:
                yield _finished(ahead)

    def read(self, name: str, layer: int | None = None, rows: slice = slice(None)) -> np.ndarray:
        """An array, or one layer of a per-layer array; of it, the rows (of dimension 0) that are asked for.

        Raises UserError (no such array), CheckError (damaged)."""
        info = self._info(name)
        if layer is not None and not (info.shape and 0 <= layer < info.shape[0]):
            raise UserError(f"{self.title}: array {name} has shape {info.shape}, so there is no layer {layer} in it")
        with self._naming(name):
            store = open_array(self.folder, name, info)
            part = store if layer is None else store[layer]
            return (part if rows == slice(None) else part[rows]).read().result()

    def restore(self, names: list[str], abstract: list, stored: list[Stored]) -> list[jax.Array]:
        """Leaves with the shapes, dtypes and shardings of `abstract`. UserError: another model wrote them."""
        for name, leaf, form in zip(names, abstract, stored):
            check_form(name, form, leaf.shape)
            if self._info(name).shape != form.shape:
                raise UserError(
                    f"{self.title}: array {name} has shape {self.infos[name].shape} and the model wants {form.shape}: "
                    "use the model configuration that it was saved with"
                )
        leaves = []
        for name, leaf, form in zip(names, abstract, stored):
            with self._naming(name):
                leaves.append(read_leaf(self.folder, name, self.infos[name], form, leaf))
        return leaves

    def _info(self, name: str) -> Info:
        if name not in self.infos:
            raise UserError(f"{self.title} has no array {name}; it has {', '.join(self.infos)}")
        return self.infos[name]

    def _naming(self, name: str):
        return _naming(f"{self.title}: array {name} is damaged")


def check_form(name: str, stored: Stored, shape: tuple[int, ...]) -> None:
    """Raises ValueError when a leaf of this shape in memory cannot be the canonical array `stored`."""
    lead = () if stored.index_CPL is None else stored.index_CPL.shape
    rest = stored.shape[1:] if lead else stored.shape
    fits = len(shape) == len(lead) + len(rest) and shape[: len(lead)] == lead
    if not fits or any(n < k for n, k in zip(shape[len(lead) :], rest)):
        raise ValueError(f"{name}: the leaf has shape {shape}, which does not hold {(*lead, *rest)}")


@contextlib.contextmanager
def _naming(what: str):
    """Turns what tensorstore raises into a CheckError that starts with `what`."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise CheckError(f"{what}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """What an error says, without the specification that tensorstore appends."""
    return re.split(r" \[(?:tensorstore_spec|source locations)=", str(error))[0]


class _Window:
    """Lets transfers run together while they hold no more than IN_FLIGHT bytes; leaving it waits for all of them."""

    def __init__(self):
        self.running, self.bytes = deque(), 0

    def __enter__(self):
        return self

    def add(self, size: int, start, then=lambda result: None) -> None:
        while self.running and self.bytes + size > IN_FLIGHT:
            self._finish_one()
        self.running.append((size, start(), then))
        self.bytes += size

    def _finish_one(self) -> None:
        size, future, then = self.running.popleft()
        self.bytes -= size
        then(future.result())

    def __exit__(self, kind, error, trace):
        try:
            while self.running and kind is None:
                self._finish_one()
        finally:  # when one failed, let the others end before anybody removes the folder
            for _, future, _ in self.running:
                future.exception()


def _finished(reads: deque) -> tuple[tuple[slice, ...], np.ndarray]:
    region, future = reads.popleft()
    return region, future.result()


def _shape(index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in index)


def _within(inner: tuple[slice, ...], outer: tuple[slice, ...]) -> tuple[slice, ...]:
    return tuple(slice(i.start - o.start, i.stop - o.start) for i, o in zip(inner, outer))


def _checksum(body: dict) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
