"""Tables as CSV files in PyTorch's compute-only notation: one row a rank, a cell an action.

A cell is the global stage, a letter and the microbatch: F forward, I input gradient (our B), W weight gradient, B whole
backward (our BW). `(1F6;6B2)OVERLAP_F_B` is a pair. Empty cells are idle and mean nothing.
"""

from __future__ import annotations

import os
import re

from parallel.errors import UserError
from parallel.schedule.table import PLACEMENTS, Action, ScheduleError, Table, place

OUR = {"F": "F", "I": "B", "W": "W", "B": "BW"}
THEIR = {ours: theirs for theirs, ours in OUR.items()}
CELL = re.compile(r"([0-9]{1,9})([FIWB])([0-9]{1,9})")
PAIR = re.compile(r"\((.+);(.+)\)OVERLAP_F_B")


def load(path: str | os.PathLike) -> Table:
    """Read and validate a table; the placement is found from the stages in each row.

    Raises UserError (no such file, what a cell should look like, stages that fit no placement) and ScheduleError.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:  # spreadsheets begin a file with a byte order mark
            text = file.read()
    except OSError as error:
        raise UserError(f"cannot read the schedule {os.fspath(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read the schedule {os.fspath(path)!r}: it is no text but a binary file") from error
    return loads(text, os.fspath(path))


def loads(text: str, name: str = "csv") -> Table:
    """As `load`, from the text itself."""
    lines = [line for line in text.splitlines() if line.strip(", \t")]
    if not lines:
        raise UserError(f"{name}: holds no actions")
    rows: list[list[tuple[int, str, int]]] = []
    pairs: list[frozenset[int]] = []
    for r, line in enumerate(lines):
        row: list[tuple[int, str, int]] = []
        starts = set()
        for cell in (c.strip().strip('"') for c in line.split(",")):
            if not cell:
                continue
            both = PAIR.fullmatch(cell)
            if both:
                starts.add(len(row))
            row += [_action(c.strip(), name, r) for c in (both.groups() if both else (cell,))]
        rows.append(row)
        pairs.append(frozenset(starts))
    p, cells = len(rows), sum(map(len, rows))
    stages, m = (1 + max(action[i] for row in rows for action in row) for i in (0, 2))
    for what, n in (("stage", stages), ("microbatch", m)):
        if n > cells:  # each has an F at least; and the checks below count up to the largest
            raise UserError(f"{name}: {what} {n - 1} cannot be among {cells} actions: numbers start at 0 and leave none out")
    if stages % p:
        raise UserError(f"{name}: {stages} stages do not divide over {p} rows (ranks)")
    placement = _placement(rows, stages // p, name)
    places = [place(placement, p, stages // p, s) for s in range(stages)]
    ranks = tuple(tuple(Action(OUR[k], places[s][1], i) for s, k, i in row) for row in rows)
    return Table(name, p, stages // p, m, placement, ranks, tuple(pairs) if any(pairs) else ()).validate()


def _action(cell: str, name: str, rank: int) -> tuple[int, str, int]:
    match = CELL.fullmatch(cell)
    if not match:
        shown = repr(cell if len(cell) <= 24 else cell[:24] + "...")
        raise UserError(
            f"{name}: rank {rank}: {shown} is no action; an action is like 2F0, with F, I, W or B "
            "(compute only: no sends, receives or sharding)"
        )
    return int(match[1]), match[2], int(match[3])


def _placement(rows: list[list[tuple[int, str, int]]], chunks: int, name: str) -> str:
    """The placement by which every row holds its own stages."""
    p = len(rows)
    for placement in PLACEMENTS:
        if (placement == "linear") != (chunks == 1) or placement == "bidirectional" or (placement == "v" and chunks != 2):
            continue
        if all(place(placement, p, chunks, s)[0] == r for r, row in enumerate(rows) for s, _, _ in row):
            return placement
    seen = {s: r for r, row in enumerate(rows) for s, _, _ in row}
    raise ScheduleError(
        f"{name}: the stages of the rows follow no known placement (round and round, or there and back): "
        + ", ".join(f"stage {s} on rank {r}" for s, r in sorted(seen.items())[: 2 * p])
    )


def dumps(table: Table) -> str:
    """A table as CSV text. A bidirectional table has two stages with each number and cannot be written."""
    if table.copies > 1:
        raise UserError(f"{table.name}: two copies of a model cannot be written as CSV")
    lines = []
    for r, rank in enumerate(table.ranks):
        word = lambda a, r=r: f"{table.stage_grid[r][a.chunk]}{THEIR[a.kind]}{a.microbatch}"
        starts = table.pairs[r] if table.pairs else frozenset()
        cells, i = [], 0
        while i < len(rank):
            if i in starts:
                cells.append(f"({word(rank[i])};{word(rank[i + 1])})OVERLAP_F_B")
                i += 2
            else:
                cells.append(word(rank[i]))
                i += 1
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


def save(table: Table, path: str | os.PathLike) -> str:
    """Write a table as CSV; returns the path."""
    text = dumps(table)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return os.fspath(path)
