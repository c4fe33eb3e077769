"""Rows and batches cut from a stream of documents; every batch is a pure function of its arguments.

The stream is all documents one after the other, each ended by the end-of-text token, which belongs to its document.
Training row r of length S holds the inputs [r S, r S + S) of the stream and the tokens one further as targets; the
last row is padded. Of several sources each has rows of its own. A target in another document than its input has weight
0: nothing is predicted across a join, so a document's first token is never a counted target and its end of text is.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from llm.data.order import Mixture

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


def training_batch(
    stream: Stream,
    seed: int,
    step: int,
    rows: int,
    length: int,
    which: np.ndarray | None = None,
    mixture: Mixture | None = None,
) -> Batch:
    """Global batch `step`, or of it only the rows that the integers `which` name, in that order; no others are read.

    mixture: the sources that the stream consists of; None: it is one. Returns tokens, targets, segments, positions
    (int32 [rows, length]), weights (float32) and example (int32 [rows], the row's number in the global batch). Segments
    count from 0 in each row, positions from 0 in each segment; padding has segment -1. A document that began in another
    row starts at position 0.
    """
    mixture = mixture or Mixture([""], [1], [0, stream.starts_D[-1]])
    which = np.arange(rows) if which is None else np.asarray(which, np.int64)
    first_B, size_B = mixture.places(seed, step * rows, (step + 1) * rows, length)
    plan = [[Piece(first, size)] for first, size in zip(first_B[which].tolist(), size_B[which].tolist())]
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
    fresh_BS = np.diff(first_BS, axis=1, prepend=first_BS[:, :1]) != 0
    return {
        "tokens": tokens_BS,
        "targets": targets_BS,
        "segments": np.where(used_BS, np.cumsum(fresh_BS, axis=1), -1).astype(np.int32),
        "positions": np.where(used_BS, place_BS - first_BS, 0).astype(np.int32),
        "weights": (used_BS & (place_BS + 1 < stream.starts_D[document_BS + 1])).astype(np.float32),
        "example": example_B.astype(np.int32),
    }
