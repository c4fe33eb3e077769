"""Log-probabilities of texts by the forward-only pipeline: which tokens are scored, in which rows, in which batches.

The rules, here only:

- Context and continuation are tokenised as one text, as the model would read it. Scored are the tokens from the first one
  that the context alone does not have in the same place: a token that spans the join is scored whole.
- What the tokenizer itself puts in front of a text (a begin-of-text token) is put in front once. Without one, a text with no
  context follows the end-of-text token, so that its first token is scored too.
- A row holds at most `limit` inputs. A longer context loses its beginning, never a scored token. Scored text that is longer
  itself is cut into windows of `limit` tokens, each token scored once; a window is preceded by as many tokens as fit: one
  before a full window, more before the last.
- Rows go into buckets of a few lengths, each with one compiled program and a fixed number of rows, and nothing else shares
  a row: a score does not depend on what is scored with it, nor on the order."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from llm.config import Config
from llm.data.tokenizer import Tokenizer
from llm.generate import leading_ids
from llm.step import Program, build
from llm.tasks import Score
from parallel.errors import CheckError, UserError

SHORTEST = 32  # length of the first bucket


class Row(NamedTuple):
    """Token ids of which ids[start:] are scored, given those before; start is at least 1."""

    ids: tuple[int, ...]
    start: int

    @property
    def key(self) -> str:
        """A name for exactly this row."""
        return hashlib.sha1(np.array([self.start, *self.ids], "<i4").tobytes()).hexdigest()


def encode(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], limit: int) -> list[list[Row]]:
    """The rows of each (context, continuation); nearly always one. Raises UserError when there is nothing to score."""
    front = leading_ids(tokenizer)
    whole, alone = (tokenizer.encode_batch(texts) for texts in ([a + b for a, b in pairs], [a for a, _ in pairs]))
    found = []
    for (context, continuation), ids, before in zip(pairs, whole, alone):
        if not continuation or not ids:
            raise UserError(f"there is nothing to score after {context[-40:]!r}: the continuation is empty")
        start = next((i for i, (a, b) in enumerate(zip(ids, before)) if a != b), min(len(before), len(ids) - 1))
        own = front or ([] if start else [tokenizer.end])
        found.append(cut([*own, *ids], start + len(own), limit))
    return found


def cut(ids: Sequence[int], start: int, limit: int) -> list[Row]:
    """Rows of at most `limit` inputs (and one more token, the last target) that score each of ids[start:] once."""
    rows = []
    for begin in range(start, len(ids), limit):
        stop = min(begin + limit, len(ids))
        first = max(0, stop - limit - 1)
        rows.append(Row(tuple(ids[first:stop]), begin - first))
    return rows


def bucket(inputs: int, limit: int) -> int:
    """Row length for so many inputs: 32, 48, 64, 96, 128, 192 and so on, at most `limit`."""
    length = SHORTEST
    while length < inputs:
        length += length // 2 if length & (length - 1) == 0 else length // 3
    return min(length, limit)


def joined(scores: Iterable[Score]) -> Score:
    """The score of a text from those of its rows."""
    logprobs, tokens, greedy = zip(*scores)
    return Score(float(sum(logprobs)), sum(tokens), all(greedy))


class Scorer:
    """Scores rows with parameters in the layout of a configuration; keeps a compiled program for each bucket.

    A batch has about as many tokens as one of the configuration (batch.rows x batch.length)."""

    def __init__(self, config: Config, devices: Sequence[Any]):
        self.config, self.devices = config, list(devices)
        longest, learned = config.model.max_length, config.model.positions == "learned"
        self.limit = longest if learned else max(longest, config.batch.length)
        self.program = functools.cache(self._program)

    def _program(self, length: int) -> Program:
        c = self.config
        unit = c.mesh.batch_shards * c.pipeline.microbatches
        rows = unit * max(1, c.batch.rows * c.batch.length // (unit * length))
        return build(dataclasses.replace(c, batch=dataclasses.replace(c.batch, rows=rows, length=length)), self.devices)

    def __call__(self, params: Any, rows: Iterable[Row]) -> Iterator[dict[Row, Score]]:
        """The scores of different rows, batch by batch, short rows first. Raises CheckError on one that is not a number."""
        buckets: dict[int, list[Row]] = {}
        for row in dict.fromkeys(rows):
            buckets.setdefault(bucket(len(row.ids) - 1, self.limit), []).append(row)
        for length, members in sorted(buckets.items()):
            program = self.program(length)
            size = program.batch_shape[0]
            for first in range(0, len(members), size):
                part = members[first : first + size]
                out = program.likelihood(params, program.put(_batch(part, size, length)))
                logprob_R, greedy_R = np.asarray(out["logprob"], np.float64), np.asarray(out["greedy"])
                if not np.isfinite(logprob_R[: len(part)]).all():
                    raise CheckError("the model gives log-probabilities that are not finite: its parameters are damaged")
                yield {row: Score(float(p), len(row.ids) - row.start, bool(g)) for row, p, g in zip(part, logprob_R, greedy_R)}


def _batch(rows: Sequence[Row], size: int, length: int) -> dict[str, np.ndarray]:
    """A batch of `size` rows, the last ones empty if there are fewer."""
    tokens_BS, targets_BS, positions_BS = (np.zeros((size, length), np.int32) for _ in range(3))
    segments_BS = np.full((size, length), -1, np.int32)
    weights_BS = np.zeros((size, length), np.float32)
    for i, (ids, start) in enumerate(rows):
        n = len(ids) - 1
        tokens_BS[i, :n], targets_BS[i, :n] = ids[:-1], ids[1:]
        segments_BS[i, :n], positions_BS[i, :n] = 0, np.arange(n)
        weights_BS[i, start - 1 : n] = 1
    side = dict(tokens=tokens_BS, targets=targets_BS, segments=segments_BS, positions=positions_BS, weights=weights_BS)
    return side | {"example": np.arange(size, dtype=np.int32)}
