"""Rows and batches cut from a stream of documents; every batch is a pure function of its arguments.

The stream is all documents one after the other, each ended by the end-of-text token, which belongs to its document.
Training row r of length S holds the inputs [r S, r S + S) of the stream and the tokens one further as targets; the
last row is padded. A target in another document than its input has weight 0: nothing is predicted across a join, so a
document's first token is never a counted target and its end of text is.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from parallel.errors import UserError

Batch = dict[str, np.ndarray]


class Stream(Protocol):
    """Tokens of concatenated documents; document d holds [starts_D[d], starts_D[d + 1]), its end of text included."""

    starts_D: np.ndarray  # int64 [documents + 1]
    end: int

    def read(self, start: int, stop: int) -> np.ndarray: ...


class Piece(NamedTuple):
    """A run of inputs that lie together in a row as one segment."""

    start: int
    size: int


def count_rows(stream: Stream, length: int) -> int:
    """Number of rows in an epoch. Raises UserError when the text does not fill one."""
    tokens = int(stream.starts_D[-1])
    if tokens - 1 < length:  # a row also needs the target of its last input
        raise UserError(
            f"the training text has {tokens} tokens, which do not fill one row of batch.length={length} and its last "
            "target: give more text or set a smaller batch.length"
        )
    return -(-(tokens - 1) // length)  # the last token of all is only a target


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    # Raw Philox output is the same in every numpy release; the streams of numpy's shuffles are not promised to be.
    key = np.array([seed % 2**64, epoch % 2**64], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


def row_numbers(seed: int, start: int, stop: int, count: int) -> np.ndarray:
    """Rows at the places [start, stop) of an endless order: one permutation of `count` rows per epoch, each different.

    An epoch's last rows share a batch with the first of the next one. Returns int64; any Python integers are fine.
    """
    parts = []
    while start < stop:
        epoch, first = divmod(start, count)
        parts.append(_order(seed, epoch, count)[first : first + stop - start])
        start += len(parts[-1])
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def training_batch(stream: Stream, seed: int, step: int, rows: int, length: int, which: np.ndarray | None = None) -> Batch:
    """Global batch `step`, or of it only the rows that the integers `which` name, in that order; no others are read.

    Returns tokens, targets, segments, positions (int32 [rows, length]), weights (float32) and example (int32 [rows],
    the row's number in the global batch). Segments count from 0 in each row, positions from 0 in each segment; padding
    has segment -1. A document that began in another row starts at position 0.
    """
    which = np.arange(rows) if which is None else np.asarray(which, np.int64)
    numbers = row_numbers(seed, step * rows, (step + 1) * rows, count_rows(stream, length))[which]
    total = int(stream.starts_D[-1])
    plan = [[Piece(int(row) * length, min(length, total - 1 - int(row) * length))] for row in numbers]
    return _fill(stream, plan, which, length)


def held_out_batches(stream: Stream, rows: int, length: int) -> Iterator[Batch]:
    """Batches that score every token of every document exactly once, except its first, which has no context.

    A document of n tokens and its end of text has n targets. Windows do not overlap: window k of a document holds the
    inputs [k length, k length + length) and their next tokens as targets, so the first target of a window is predicted
    from one token. What does not fill a row is packed with its neighbours, in order. The last batch is padded with
    rows of weight 0.
    """
    plan: list[list[Piece]] = [[]]
    room = length
    for start, stop in zip(stream.starts_D[:-1].tolist(), (stream.starts_D[1:] - 1).tolist()):
        for first in range(start, stop, length):
            piece = Piece(first, min(length, stop - first))
            if piece.size > room:
                plan.append([])
                room = length
            plan[-1].append(piece)
            room -= piece.size
    plan.extend([] for _ in range(-len(plan) % rows))
    for first in range(0, len(plan), rows):
        yield _fill(stream, plan[first : first + rows], np.arange(rows), length)


def _fill(stream: Stream, plan: list[list[Piece]], example_B: np.ndarray, length: int) -> Batch:
    """One row for each list of pieces. A piece that runs over joins is divided into segments there."""
    shape = (len(plan), length)
    tokens_BS = np.full(shape, stream.end, np.int32)
    targets_BS = np.full(shape, stream.end, np.int32)
    place_BS = np.full(shape, -1, np.int64)  # in the stream
    begin_BS = np.zeros(shape, np.int64)  # of the piece, in the stream
    for row, pieces in enumerate(plan):
        left = 0
        for start, size in pieces:
            here = np.s_[row, left : left + size]
            ids = stream.read(start, start + size + 1)
            tokens_BS[here], targets_BS[here] = ids[:-1], ids[1:]
            place_BS[here], begin_BS[here] = np.arange(start, start + size), start
            left += size
    used_BS = place_BS >= 0
    document_BS = np.searchsorted(stream.starts_D, place_BS, side="right") - 1
    first_BS = np.maximum(stream.starts_D[document_BS], begin_BS)  # where this token's segment begins
    fresh_BS = np.pad(first_BS[:, 1:] != first_BS[:, :-1], ((0, 0), (1, 0)))
    return {
        "tokens": tokens_BS,
        "targets": targets_BS,
        "segments": np.where(used_BS, np.cumsum(fresh_BS, axis=1), -1).astype(np.int32),
        "positions": np.where(used_BS, place_BS - first_BS, 0).astype(np.int32),
        "weights": (used_BS & (place_BS + 1 < stream.starts_D[document_BS + 1])).astype(np.float32),
        "example": example_B.astype(np.int32),
    }
