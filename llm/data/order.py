"""Which rows come when: an endless order of the rows of one source, and of several sources mixed by weight.

Everything is a pure function of the seed and of a place in the order, so any process finds any row of any step alone.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from parallel.errors import UserError

BLOCK = 1 << 16  # places that together hold every source exactly by its share
TABLE = 1 << 24  # rows whose order is drawn as a whole; that of more is computed place by place, in no memory
ROUNDS = 8  # of the Feistel network that does so


def count_rows(tokens: int, length: int, name: str = "") -> int:
    """Number of rows in an epoch of a source. Raises UserError when its text does not fill one."""
    if tokens - 1 < length:  # a row also needs the target of its last input
        raise UserError(
            f"the training text{name and f' of {name}'} has {tokens} tokens, which do not fill one row of "
            f"batch.length={length} and its last target: give more text or set a smaller batch.length"
        )
    return -(-(tokens - 1) // length)  # the last token of all is only a target


def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.argsort(_random(seed, epoch, 0, count), kind="stable").astype(np.uint32)


def _permuted(seed: int, epoch: int, place_R: np.ndarray, count: int) -> np.ndarray:
    """The rows at some places of an order of `count` rows: a Feistel network on the next even number of bits.

    What falls outside goes through it again until it is inside (cycle walking: Black & Rogaway, "Ciphers with arbitrary
    finite domains", 2002), so it is a permutation of range(count). The rounds mix with the finaliser of SplitMix64.
    """
    half = np.uint64((int(count - 1).bit_length() + 1) // 2)
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = _random(seed, epoch, 2, ROUNDS)
    row_R = place_R.astype(np.uint64)
    outside_R = np.ones(len(row_R), bool)
    while outside_R.any():
        left, right = row_R[outside_R] >> half, row_R[outside_R] & mask
        for key in keys:
            mixed = right + key
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
        row_R[outside_R] = (left << half) | right
        outside_R = row_R >= np.uint64(count)
    return row_R.astype(np.int64)


def _random(seed: int, number: int, stream: int, count: int) -> np.ndarray:
    # Raw Philox output is the same in every numpy release; the streams of numpy's shuffles are not promised to be.
    key = np.array([int(seed) % 2**64, int(number) % 2**64], dtype=np.uint64)
    return np.random.Philox(key=key, counter=[0, 0, 0, stream]).random_raw(count)


def row_numbers(seed: int, start: int, stop: int, count: int, order: Callable[..., np.ndarray] = _order) -> np.ndarray:
    """Rows at the places [start, stop) of an endless order: one permutation of `count` rows per epoch, each different.

    An epoch's last rows share a batch with the first of the next one. Returns int64; any Python integers are fine.
    order(seed, epoch, count): the permutation, for a caller that remembers those it has had.
    """
    parts = [np.zeros(0, np.int64)]
    while start < stop:
        epoch, first = divmod(start, count)
        last = min(first + stop - start, count)
        drawn = count <= TABLE
        parts.append(order(seed, epoch, count)[first:last] if drawn else _permuted(seed, epoch, np.arange(first, last), count))
        start += last - first
    return np.concatenate(parts, dtype=np.int64)


class Mixture:
    """Sources that lie one after the other in a stream, and the order in which their rows are drawn.

    The places of the order are cut into blocks. Every block holds each source as often as its share of BLOCK says
    (largest remainders), shuffled by (seed, block); so the first n rows of a run hold a number of each source that is
    known without counting. The rows of a source follow each other in its own endless order.

    names: of the sources; weights: positive, in any unit; starts: of the sources in the stream, and the stream's end.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[float], starts: Sequence[int]):
        self.names, self.starts = tuple(names), tuple(int(start) for start in starts)
        self.orders = [functools.lru_cache(maxsize=2)(_order) for _ in names]  # this epoch's, and the next one's at its end
        self.shares = tuple(weight / sum(weights) for weight in weights)
        quota_N = np.array(self.shares) * BLOCK
        count_N = np.floor(quota_N).astype(np.int64)
        count_N[np.argsort(count_N - quota_N, kind="stable")[: BLOCK - count_N.sum()]] += 1
        self.counts = tuple(count_N.tolist())
        for name, share, count in zip(self.names, self.shares, self.counts):
            if not count:
                raise UserError(
                    f"data.mixture: {name} has a share of {share:.1g}, below 1 / {BLOCK}: raise its weight or drop it"
                )

    def rows(self, length: int) -> list[int]:
        """Rows in an epoch of each source. Raises UserError when one does not fill a row."""
        return [count_rows(stop - start, length, name) for name, start, stop in zip(self.names, self.starts, self.starts[1:])]

    def taken(self, seed: int, stop: int) -> list[int]:
        """How many of the first `stop` rows come from each source."""
        block, rest = divmod(stop, BLOCK)
        part_N = np.bincount(_block(seed, block, self.counts)[:rest], minlength=len(self.names))
        return [block * count + int(part) for count, part in zip(self.counts, part_N)]

    def places(self, seed: int, start: int, stop: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """First input and number of inputs, in the stream, of the rows at the places [start, stop) of the order."""
        drawn, place = [], start
        while place < stop:
            block, first = divmod(place, BLOCK)
            drawn.append(_block(seed, block, self.counts)[first : first + stop - place])
            place += len(drawn[-1])
        source_R = np.concatenate(drawn) if drawn else np.zeros(0, np.int16)
        first_R, size_R = np.zeros(len(source_R), np.int64), np.zeros(len(source_R), np.int64)
        for source, (count, before) in enumerate(zip(self.rows(length), self.taken(seed, start))):
            mine_R = source_R == source
            numbers = row_numbers(seed, before, before + int(mine_R.sum()), count, self.orders[source])
            first_R[mine_R] = self.starts[source] + numbers * length
            size_R[mine_R] = np.minimum(length, self.starts[source + 1] - 1 - first_R[mine_R])
        return first_R, size_R


@functools.lru_cache(maxsize=4)
def _block(seed: int, block: int, counts: tuple[int, ...]) -> np.ndarray:
    """The source at each place of a block."""
    source_P = np.repeat(np.arange(len(counts), dtype=np.int16), counts)
    return source_P if len(counts) == 1 else source_P[np.argsort(_random(seed, block, 1, BLOCK), kind="stable")]
