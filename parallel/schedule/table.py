"""The schedule as data: which action each pipeline rank runs, in which order. Validated here, used by everything else.

A *rank* is one of the p pipeline ranks, a *chunk* is one of the v pieces of the model that a rank holds, a *stage* is
one of the p*v pieces in model order. An action is (kind, chunk, microbatch) with kind

    F   forward          B   input gradient only          W   weight gradient only          BW   both in one go
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from parallel.errors import UserError

KINDS = ("F", "B", "W", "BW")
PLACEMENTS = ("linear", "loop", "v", "wave", "bidirectional")
MOST = 1_000_000  # forwards in a table: minutes of work and gigabytes


class Action(NamedTuple):
    """One thing a rank does: `kind` of `chunk` for `microbatch`."""

    kind: str
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of chunk {self.chunk}, microbatch {self.microbatch}"


class ScheduleError(UserError):
    """A table that cannot run; the message names the action."""


def check_sizes(stages: int, microbatches: int, chunks: int = 0, group: int = 0, memory: float = 0.0) -> None:
    """Refuse numbers of which no table is made, and tables too large to be handled. Raises UserError."""
    if min(stages, microbatches) < 1 or min(chunks, group) < 0:
        raise UserError(
            "stages and microbatches are at least 1, chunks and group at least 0 (0: the schedule's own); "
            f"not {stages}, {microbatches}, {chunks} and {group}"
        )
    if not (memory == 0 or 1 <= memory < math.inf):
        raise UserError(f"memory is in microbatches of a rank: at least 1, or 0 for no limit; not {memory:g}")
    if stages * microbatches * max(chunks, 1) > MOST:
        raise UserError(
            f"{stages} stages, {microbatches} microbatches and {max(chunks, 1)} chunks are too many: a table holds at most "
            f"{MOST:,} forwards, which is their product"
        )


def place(placement: str, stages: int, chunks: int, stage: int) -> tuple[int, int]:
    """(rank, chunk) that hold global `stage` of `stages * chunks`.

    linear, loop: round and round the ranks. v, wave: there and back again. bidirectional: two copies of a model of
    `stages` stages, the second (stages p .. 2p-1) running from the last rank to the first.
    """
    if not 0 <= stage < stages * chunks:
        raise ScheduleError(f"stage {stage} does not exist: there are {stages} ranks x {chunks} chunks")
    chunk, position = divmod(stage, stages)
    return (position if placement in ("linear", "loop") or chunk % 2 == 0 else stages - 1 - position), chunk


def stage_of(placement: str, stages: int, rank: int, chunk: int) -> int:
    """The global stage that `rank` holds as its `chunk`; the inverse of `place`."""
    back = placement not in ("linear", "loop") and chunk % 2 == 1
    return chunk * stages + (stages - 1 - rank if back else rank)


@dataclasses.dataclass(frozen=True)
class Table:
    """Each rank's actions in the order in which it runs them. forward_only: a table without any backward (evaluation).

    stages: pipeline ranks p. chunks: v per rank. pairs: per rank, the positions i at which actions i and i+1 (an F and
    a B or BW, either first) are meant to overlap as one; empty when no pair is.
    """

    name: str
    stages: int
    chunks: int
    microbatches: int
    placement: str
    ranks: tuple[tuple[Action, ...], ...]
    pairs: tuple[frozenset[int], ...] = ()
    forward_only: bool = False

    # ------------------------------------------------------------------------------------------- where things are
    def place(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) of a global stage."""
        return place(self.placement, self.stages, self.chunks, stage)

    def stage_of(self, rank: int, chunk: int) -> int:
        """The global stage of a rank's chunk."""
        return stage_of(self.placement, self.stages, rank, chunk)

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """(rank, chunk) of every global stage."""
        return [self.place(s) for s in range(self.stages * self.chunks)]

    @cached_property
    def stage_grid(self) -> list[list[int]]:
        """[rank][chunk] -> global stage."""
        return [[self.stage_of(r, c) for c in range(self.chunks)] for r in range(self.stages)]

    @property
    def copies(self) -> int:
        """Copies of the model: 2 for a bidirectional placement, each microbatch runs through one of them."""
        return 2 if self.placement == "bidirectional" else 1

    @property
    def share(self) -> float:
        """A chunk's share of one full rank's layers."""
        return self.copies / self.chunks

    def before(self, stage: int) -> int:
        """The stage whose output `stage` reads, -1 for the first of a model."""
        return stage - 1 if stage % (self.stages * self.chunks // self.copies) else -1

    def after(self, stage: int) -> int:
        """The stage that reads the output of `stage`, -1 for the last of a model."""
        return stage + 1 if (stage + 1) % (self.stages * self.chunks // self.copies) else -1

    def owns(self, chunk: int, microbatch: int) -> bool:
        """Whether `microbatch` passes through `chunk`: always, but for a bidirectional table (first half: chunk 0)."""
        return self.copies == 1 or (microbatch >= (self.microbatches + 1) // 2) == bool(chunk)

    # ------------------------------------------------------------------------------------------- what it is
    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of action that occur."""
        return frozenset(a.kind for rank in self.ranks for a in rank)

    @property
    def whole(self) -> bool:
        """Every backward is whole (BW): no W of its own."""
        return not self.kinds & {"B", "W"}

    # ------------------------------------------------------------------------------------------- is it right
    def validate(self, memory: float = 0.0) -> Table:
        """Return the table itself, or raise ScheduleError naming the first wrong action.

        Every (chunk, microbatch) of every rank: F once, then B once and W once, or BW once (or F alone, everywhere).
        Nothing may wait for itself: the ranks are run in order and must finish. By then everything stashed is taken
        again. memory: the most microbatches of one full rank that a rank may hold from F to W (0: no limit).
        """
        p, v, m = self.stages, self.chunks, self.microbatches
        if min(p, v, m) < 1 or self.placement not in PLACEMENTS:
            raise ScheduleError(f"{self.name}: needs at least one rank, chunk and microbatch, and a placement of {PLACEMENTS}")
        if self.placement == "linear" and v != 1:
            raise ScheduleError(f"{self.name}: a linear placement has one chunk a rank, not {v}")
        if self.placement in ("v", "bidirectional") and v != 2:
            raise ScheduleError(f"{self.name}: a {self.placement} placement has two chunks a rank, not {v}")
        if self.placement == "bidirectional" and m % 2:
            raise ScheduleError(f"{self.name}: a bidirectional placement needs an even number of microbatches, not {m}")
        if len(self.ranks) != p:
            raise ScheduleError(f"{self.name}: has rows for {len(self.ranks)} ranks, not {p}")
        for r, rank in enumerate(self.ranks):
            self._check_rank(r, rank)
            held = 0.0
            for a in rank if memory else ():
                held += self.share * (1 if a.kind == "F" else 0 if a.kind == "B" else -1)
                if held > memory + 1e-6:
                    raise ScheduleError(f"{self.name}: rank {r}: {a}: holds {held:g} microbatches, more than {memory:g}")
        self._check_pairs()
        for _ in self.in_order():
            pass
        return self

    def _check_rank(self, r: int, rank: tuple[Action, ...]) -> None:
        done: dict[str, set[tuple[int, int]]] = {k: set() for k in KINDS}

        def wrong(a: Action, why: str) -> ScheduleError:
            return ScheduleError(f"{self.name}: rank {r}: {Action(*a)}: {why}")

        for a in rank:
            kind, chunk, microbatch = a
            key = (chunk, microbatch)
            if kind not in KINDS:
                raise wrong(a, f"the kind is one of {', '.join(KINDS)}")
            if not 0 <= chunk < self.chunks or not 0 <= microbatch < self.microbatches:
                raise wrong(a, f"there are {self.chunks} chunks and {self.microbatches} microbatches")
            if not self.owns(chunk, microbatch):
                raise wrong(a, "this microbatch runs through the other copy of the model")
            if self.forward_only and kind != "F":
                raise wrong(a, "a forward-only table has no backward")
            if key in done[kind]:
                raise wrong(a, "a second time")
            if kind != "F" and key not in done["F"]:
                raise wrong(a, "comes before its F")
            if kind in ("B", "BW") and (key in done["B"] or key in done["BW"]):
                raise wrong(a, "its input gradient was already computed")
            if kind == "W" and key not in done["B"]:
                raise wrong(a, "its weight gradient was already computed" if key in done["BW"] else "comes before its B")
            done[kind].add(key)
        for c in range(self.chunks):
            for i in range(self.microbatches):
                if not self.owns(c, i):
                    continue
                missing = [] if (c, i) in done["F"] else ["F"]
                if not self.forward_only and (c, i) not in done["BW"]:
                    missing += [k for k in "BW" if (c, i) not in done[k]]
                if missing:
                    raise wrong(Action(missing[0], c, i), "is missing")

    def _check_pairs(self) -> None:
        if self.pairs and len(self.pairs) != self.stages:
            raise ScheduleError(f"{self.name}: pairs are given for {len(self.pairs)} ranks, not {self.stages}")
        for r, starts in enumerate(self.pairs):
            for i in starts:
                two = self.ranks[r][i : i + 2] if i >= 0 else ()
                if len(two) < 2 or {a.kind for a in two} not in ({"F", "B"}, {"F", "BW"}) or i + 1 in starts:
                    raise ScheduleError(f"{self.name}: rank {r}: position {i} is no pair of an F and a B")
                if two[0][1:] == two[1][1:]:
                    raise ScheduleError(f"{self.name}: rank {r}: {two[0]}: cannot overlap with its own backward")

    def waits_for(self, rank: int, action: Action) -> tuple[str, int, int] | None:
        """The (kind, stage, microbatch) of another action that must come first, beyond the rank's own order; None if
        nothing.
        """
        stage = self.stage_grid[rank][action.chunk]
        if action.kind == "W":
            return None
        other = self.before(stage) if action.kind == "F" else self.after(stage)
        return None if other < 0 else ("F" if action.kind == "F" else "B", other, action.microbatch)

    def in_order(self) -> Iterator[tuple[int, int, Action, tuple[str, int, int] | None]]:
        """Run all ranks, each in its order: yields (rank, position, action, what it waited for), never before its
        needs.

        Raises ScheduleError when every unfinished rank waits for something (a deadlock).
        """
        grid, places = self.stage_grid, self.places
        ends = [self.before(s) for s in range(len(places))], [self.after(s) for s in range(len(places))]
        done: set[tuple[str, int, int]] = set()
        position = [0] * self.stages
        waiting: dict[tuple[str, int, int], int] = {}
        ready = list(range(self.stages - 1, -1, -1))
        while ready:
            r = ready.pop()
            rank, stage_at = self.ranks[r], grid[r]
            while position[r] < len(rank):
                a = rank[position[r]]
                kind, chunk, microbatch = a
                stage, need = stage_at[chunk], None
                if kind != "W":
                    other = ends[0 if kind == "F" else 1][stage]
                    if other >= 0:
                        need = ("F" if kind == "F" else "B", other, microbatch)
                        if need not in done:
                            waiting[need] = r
                            break
                position[r] += 1
                yield r, position[r] - 1, a, need
                key = ("B" if kind == "BW" else kind, stage, microbatch)
                done.add(key)
                if key in waiting:
                    ready.append(waiting.pop(key))
        for r, rank in enumerate(self.ranks):
            if position[r] < len(rank):
                a = rank[position[r]]
                kind, stage, microbatch = self.waits_for(r, a)
                there = places[stage][0]
                raise ScheduleError(
                    f"{self.name}: deadlock: rank {r} waits at position {position[r]} ({a}) for {kind} of microbatch "
                    f"{microbatch} on rank {there}, which does not come to it"
                )

    # ------------------------------------------------------------------------------------------- small changes
    def only(self, microbatches: int) -> Table:
        """The same orders for the first `microbatches` only. Dependencies join actions of one microbatch, so it stays
        valid.
        """
        keep = [[i for i, a in enumerate(rank) if a.microbatch < microbatches] for rank in self.ranks]
        ranks = tuple(tuple(rank[i] for i in kept) for rank, kept in zip(self.ranks, keep))
        pairs = tuple(
            frozenset(j for j, i in enumerate(kept) if i in starts and i + 1 in kept) for kept, starts in zip(keep, self.pairs)
        )
        return dataclasses.replace(self, ranks=ranks, pairs=pairs, microbatches=microbatches)

    def join_backward(self) -> Table:
        """The same table with every W moved into its B: whole backwards, no W."""
        if self.whole:
            return self
        kept = [[i for i, a in enumerate(rank) if a.kind != "W"] for rank in self.ranks]
        ranks = tuple(
            tuple(rank[i]._replace(kind="F" if rank[i].kind == "F" else "BW") for i in keep)
            for rank, keep in zip(self.ranks, kept)
        )
        pairs = tuple(frozenset(j for j, i in enumerate(keep) if i in starts) for keep, starts in zip(kept, self.pairs))
        return dataclasses.replace(self, ranks=ranks, pairs=pairs)

    def split_backward(self) -> Table:
        """The same table with every whole backward as a B with its W right behind it."""
        ranks, pairs = [], []
        for r, rank in enumerate(self.ranks):
            out: list[Action] = []
            starts: set[int] = set()
            held: Action | None = None  # the W of a pair's backward that comes first follows the pair
            for i, a in enumerate(rank):
                paired = bool(self.pairs) and i in self.pairs[r]
                if paired:
                    starts.add(len(out))
                if a.kind != "BW":
                    out.append(a)
                    if held is not None:
                        out.append(held)
                        held = None
                    continue
                out.append(a._replace(kind="B"))
                if paired:
                    held = a._replace(kind="W")
                else:
                    out.append(a._replace(kind="W"))
            ranks.append(tuple(out))
            pairs.append(frozenset(starts))
        return dataclasses.replace(self, ranks=tuple(ranks), pairs=tuple(pairs) if self.pairs else ())
