"""A schedule as a Chrome trace, for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import json
import os

from parallel.schedule.boxes import WORDS, Picture


def events(picture: Picture) -> list[dict]:
    """One complete event an action; a unit of time counts as a millisecond, ranks are threads of one process."""
    table = picture.table
    out = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": f"{table.name} ({picture.note})"}}]
    for r in range(table.stages):
        out.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": r, "args": {"name": f"rank {r}"}})
        out.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": r, "args": {"sort_index": r}})
    for b in picture.boxes:
        out.append(
            {
                "ph": "X",
                "name": f"{b.kind}{b.microbatch}" + (f" chunk {b.chunk}" if table.chunks > 1 else ""),
                "cat": WORDS[b.kind],
                "pid": 0,
                "tid": b.rank,
                "ts": round(b.start * 1000, 3),
                "dur": round((b.end - b.start) * 1000, 3),
                "args": {"microbatch": b.microbatch, "chunk": b.chunk, "stage": b.stage},
            }
        )
    return out


def save_trace(picture: Picture, path: str | os.PathLike) -> str:
    """Write the trace as JSON; returns the path."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events(picture), "displayTimeUnit": "ms"}, file)
    return os.fspath(path)
