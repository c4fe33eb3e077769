"""From ticks to what the executor scans: a buffer slot for everything that waits, and one row of integers per tick and rank."""

import dataclasses

import numpy as np

from parallel.schedule.ticks import Lives, TickTable

CLASSES = ("a", "aw", "cut", "x", "g")
USES = dict(F=("a", "aw", "x"), B=("a", "aw", "cut", "g"), W=("aw", "cut"))
MOVES = ("right", "left", "stay")
"""The ways in which a rank hands on what it made: to the next rank, to the one before, or to another chunk of its own."""

RANK_FIELDS = (
    *(f"{kind}_{field}" for kind in "FBW" for field in ("busy", "m", "c")),
    *(f"{kind}_{field}" for kind in "FBW" for field in USES[kind]),
    *(f"{field}_{move}" for field in "xg" for move in MOVES),
    "F_first",
    "head_g",
)
JOINT_FIELDS = ("enter", "leave", "exit")  # the microbatch of the tick's joint vocabulary work, -1 for none


@dataclasses.dataclass(frozen=True)
class Rows:
    """ranks [ticks, p, RANK_FIELDS] and joint [ticks, JOINT_FIELDS], int32, and the number of slots of each class.

    Slot number `slots[class]` of a buffer is its waste bin: idle reads and writes go there. moves: the ways that activations
    ("x") and gradients ("g") take in this table. first_rank, last_rank: where the model begins and ends."""

    ranks: np.ndarray
    joint: np.ndarray
    slots: dict[str, int]
    moves: dict[str, tuple[str, ...]]
    first_rank: int
    last_rank: int

    def padded(self, ticks: int, slots: dict[str, int], moves: dict[str, tuple[str, ...]]) -> "Rows":
        """The same work in at least as many ticks and slots, so that several tables can share one compiled program."""
        ranks, joint = self.ranks.copy(), self.joint
        for i, field in enumerate(RANK_FIELDS):
            kind = _buffer(field)
            if kind:
                ranks[..., i] = np.where(ranks[..., i] == self.slots[kind], slots[kind], ranks[..., i])
        idle = np.zeros((ticks - len(ranks), *ranks.shape[1:]), np.int32)
        for i, field in enumerate(RANK_FIELDS):
            idle[..., i] = slots[_buffer(field)] if _buffer(field) else 0
        none = np.full((ticks - len(joint), len(JOINT_FIELDS)), -1, np.int32)
        return dataclasses.replace(
            self, ranks=np.concatenate([ranks, idle]), joint=np.concatenate([joint, none]), slots=slots, moves=moves
        )


def _buffer(field: str) -> str | None:
    """The class of buffer whose slot a field names, if it does."""
    head, _, tail = field.partition("_")
    name = "g" if field == "head_g" else tail if head in ("F", "B", "W") else head
    return name if name in CLASSES else None


def allocate(lives: Lives) -> tuple[dict[tuple[int, int], int], int]:
    """Slots for one rank's lifetimes {unit: (first, last)}: ({unit: slot}, number of slots), no more than are alive at once."""
    slots: dict[tuple[int, int], int] = {}
    ends: list[int] = []
    for unit, (first, last) in sorted(lives.items(), key=lambda item: item[1]):
        slot = next((i for i, end in enumerate(ends) if end < first), len(ends))
        ends[slot : slot + 1] = [last]
        slots[unit] = slot
    return slots, len(ends)


def lower(ticks: TickTable) -> Rows:
    """The rows that run a tick table."""
    table, at = ticks.table, ticks.at
    given = {name: [allocate(lives) for lives in ranks] for name, ranks in ticks.lifetimes().items()}
    slots = {name: max((n for _, n in given[name]), default=0) if name in given else 0 for name in CLASSES}
    column = {field: i for i, field in enumerate(RANK_FIELDS)}
    ranks = np.zeros((ticks.length, table.stages, len(RANK_FIELDS)), np.int32)
    for field, i in column.items():
        if _buffer(field):
            ranks[..., i] = slots[_buffer(field)]
    joint = np.full((ticks.length, len(JOINT_FIELDS)), -1, np.int32)
    moves: dict[str, set[str]] = dict(x=set(), g=set())

    def slot(name: str, stage: int, m: int) -> int:
        return given[name][table.places[stage][0]][0][stage, m]

    def hand_on(name: str, tick: int, stage: int, to: int, m: int) -> None:
        way = _way(table.places[stage][0], table.places[to][0], table.stages)
        moves[name].add(way)
        ranks[tick, table.places[to][0], column[f"{name}_{way}"]] = slot(name, to, m)

    for (kind, s, m), t in at.items():
        r, c = table.places[s]
        before, after = table.before(s), table.after(s)
        row = ranks[t, r]
        for field, value in dict(busy=1, m=m, c=c).items():
            row[column[f"{kind}_{field}"]] = value
        for name in USES[kind]:
            if name in given and (name != "x" or before >= 0):
                row[column[f"{kind}_{name}"]] = slot(name, s, m)
        if kind == "F":
            if before < 0:
                row[column["F_first"]] = 1
                joint[t, 0] = m
            if after >= 0:
                hand_on("x", t, s, after, m)
            else:
                joint[t, 1] = m
                if not ticks.forward_only:
                    row[column["head_g"]] = slot("g", s, m)
        elif kind == "B":
            if before >= 0:
                hand_on("g", t + 1, s, before, m)  # it travels while the next tick's F slot computes
            else:
                joint[t, 2] = m
    order = {name: tuple(move for move in MOVES if move in ways) for name, ways in moves.items()}
    return Rows(ranks, joint, slots, order, table.places[0][0], table.places[-1][0])


def _way(here: int, there: int, stages: int) -> str:
    if here == there:
        return "stay"
    return "right" if (here + 1) % stages == there else "left"
