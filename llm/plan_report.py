"""A plan as one self-contained HTML page: ranked layouts, where the time goes, memory by rank, scaling, the schedule."""

from __future__ import annotations

import html
import math
from pathlib import Path

from parallel import bubble
from parallel.errors import UserError
from parallel.schedule import pack
from parallel.schedule.boxes import of_ticks
from parallel.schedule.html import page as timeline_page

COLOURS = ("#4070ac", "#f4aa48", "#7bb274", "#c0504d", "#8064a2", "#4bacc6", "#9c8a5c", "#b0b0b0", "#606060")
STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:1.2rem auto;max-width:78rem;padding:0 1rem;color:#111;background:#fff}
h1{font-size:1.35rem}h2{font-size:1.05rem;margin:1.8rem 0 .5rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;white-space:nowrap}
td,th{padding:3px 9px;text-align:right;border-bottom:1px solid #ddd}tr.best{background:#eef4fb;font-weight:600}
svg{width:100%;min-width:620px;height:auto;display:block}svg text{font:12px system-ui,sans-serif;fill:#222}
.key span{display:inline-block;margin:0 14px 4px 0;font-size:13px}
.key i{display:inline-block;width:12px;height:12px;margin-right:5px}
iframe{width:100%;border:1px solid #ccc}
"""
HEADS = (
    "data", "pipe", "tensor", "microbatches", "rows each", "chunks", "schedule", "remat", "ZeRO", "step, s", "90 %",
    "tokens/s/GPU", "MFU, %", "GiB", "bubble, %",
)  # fmt: skip
SCALING = "<p>By GPUs; under each point its MFU; dashed: perfect scaling.</p>"
MICROBATCHES_DRAWN = 24


def write(path: str, document: dict) -> None:
    """Write the page of a plan's document. Raises UserError when the folder is not there."""
    if not Path(path).absolute().parent.is_dir():
        raise UserError(f"--html={path}: there is no such folder")
    Path(path).write_text(page(document), encoding="utf-8")


def page(document: dict) -> str:
    """The text of the page."""
    title = f"{document['parameters'] / 1e9:.1f} B parameters on {document['gpus']:,} {document['gpu']} ({document['cluster']})"
    parts = [f"<h1>{html.escape(title)}</h1>"]
    parts += [f"<p>{html.escape(note)}</p>" for note in document["notes"]]
    best = document["best"]
    if best is None:
        near = document["nearest"]
        parts.append(
            f"<p>Nothing fits {document['memory_limit_gib']} GiB: the nearest layout needs "
            f"{near['peak_memory_gib']:.1f} GiB.</p>"
        )
        best = near
    else:
        parts += [
            f"<p>The first layout wins. {html.escape(document['why'])}</p>",
            "<h2>Layouts</h2>",
            _table(document["layouts"]),
        ]
    if "run" in document:
        parts += ["<h2>The whole run</h2>", _run(document["run"])]
    parts += ["<h2>Where the time of a step goes, seconds</h2>", _times(document["layouts"] or [best])]
    parts += ["<h2>Memory of the pipeline's ranks, GiB</h2>", _memory(best, document["memory_limit_gib"])]
    if document.get("sweep"):
        parts += ["<h2>Scaling with the same batch</h2>", _scaling(document["sweep"])]
    parts += ["<h2>The schedule</h2>", _timeline(best)]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    return f'<!DOCTYPE html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{"".join(parts)}</body></html>'


def _name(layout: dict) -> str:
    mesh = layout["mesh"]
    return f"data {mesh['data']} pipe {mesh['pipe']} tensor {mesh['tensor']}, {layout['chunks']} ch., {layout['remat']}"


def _table(layouts: list[dict]) -> str:
    rows = ["<tr>" + "".join(f"<th>{name}</th>" for name in HEADS) + "</tr>"]
    for i, x in enumerate(layouts):
        mesh = x["mesh"]
        cells = (
            mesh["data"], mesh["pipe"], mesh["tensor"], x["microbatches"], x["rows_per_microbatch"], x["chunks"],
            html.escape(x["schedule"]), x["remat"], x["zero"], f"{x['step_time_s']:.3f}",
            f"{x['low_s']:.2f} to {x['high_s']:.2f}",
            f"{x['tokens_per_s_per_gpu']:.0f}", f"{100 * x['mfu']:.1f}", f"{x['peak_memory_gib']:.1f}",
            f"{100 * x['bubble']:.1f}",
        )  # fmt: skip
        rows.append(f"<tr{' class=best' if not i else ''}>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    return f'<div class="wide"><table>{"".join(rows)}</table></div>'


def _run(run: dict) -> str:
    return (
        f"<p>{_short(run['tokens'])} tokens: {run['days']:.1f} days, {run['gpu_hours']:,.0f} GPU-hours, "
        f"{run['energy_mwh']:,.0f} MWh at {run['watts_per_gpu']:.0f} W a GPU; {run['failures']:.0f} failures expected; "
        f"a checkpoint every {run['checkpoint_interval_s'] / 60:.0f} minutes; goodput {100 * run['goodput']:.1f} %.</p>"
    )


def _bars(bars: list[tuple[str, dict[str, float]]], limit: float = 0.0) -> str:
    """Stacked horizontal bars with a legend. limit: where a line stands, 0 for none."""
    keys = list(dict.fromkeys(k for _, parts in bars for k, v in parts.items() if v > 0))
    colour = {k: COLOURS[i % len(COLOURS)] for i, k in enumerate(keys)}
    most = max([sum(max(v, 0) for v in parts.values()) for _, parts in bars] + [limit, 1e-9])
    left, width, step = 290, 560, 22
    out = []
    for i, (name, parts) in enumerate(bars):
        x, y = float(left), 4 + i * step
        out.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{html.escape(name)}</text>')
        for k, v in parts.items():
            if v > 0:
                w = v / most * width
                tip = f"{k}: {v:.3g}"
                out.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="17" fill="{colour[k]}"><title>{tip}</title></rect>'
                )
                x += w
        out.append(f'<text x="{x + 5:.1f}" y="{y + 13}">{sum(max(v, 0) for v in parts.values()):.3g}</text>')
    height = len(bars) * step + 8
    if limit:
        x = left + limit / most * width
        out.append(f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height}" stroke="#c00" stroke-dasharray="4 3"/>')
    key = "".join(f'<span><i style="background:{colour[k]}"></i>{html.escape(k)}</span>' for k in keys)
    return (
        f'<div class="key">{key}</div><div class="wide"><svg viewBox="0 0 920 {height}" role="img">{"".join(out)}</svg></div>'
    )


def _times(layouts: list[dict]) -> str:
    return _bars([(_name(x), x["parts_s"]) for x in layouts])


def _memory(best: dict, limit: float) -> str:
    ranks = [(f"rank {r}", parts) for r, parts in enumerate(best["memory_parts_gib"])]
    if len(ranks) > 16:
        ranks = [*ranks[:8], *ranks[-8:]]
    return _bars(ranks, limit) + f"<p>Dashed: {limit} GiB may be filled.</p>"


def _scaling(points: list[dict]) -> str:
    """Tokens per second by GPUs, both in powers of two, with the straight line that perfect scaling would be."""
    good = [(p["gpus"], p["best"]["tokens_per_s_per_gpu"] * p["gpus"], p["best"]["mfu"]) for p in points if p["best"]]
    if not good:
        return "<p>Nothing fits at any of these sizes.</p>"
    xs, ys = [math.log2(g) for g, _, _ in good], [math.log2(s) for _, s, _ in good]
    first, top = good[0][1] / good[0][0], max(ys + [math.log2(good[0][1]) + xs[-1] - xs[0]])
    fx = lambda x: 90 + (x - xs[0]) / max(xs[-1] - xs[0], 1) * 760
    fy = lambda y: 300 - (y - ys[0]) / max(top - ys[0], 1) * 270
    ideal = (
        f'<line x1="{fx(xs[0]):.1f}" y1="{fy(ys[0]):.1f}" x2="{fx(xs[-1]):.1f}" y2="{fy(math.log2(first * good[-1][0])):.1f}" '
    )
    out = [ideal + 'stroke="#999" stroke-dasharray="4 4"/>']
    out.append(
        f'<polyline fill="none" stroke="{COLOURS[0]}" stroke-width="2" points="'
        + " ".join(f"{fx(x):.1f},{fy(y):.1f}" for x, y in zip(xs, ys))
        + '"/>'
    )
    last = math.inf
    for x, y, (gpus, speed, mfu) in zip(xs, ys, good):
        out.append(f'<circle cx="{fx(x):.1f}" cy="{fy(y):.1f}" r="4" fill="{COLOURS[0]}"/>')
        out.append(f'<text x="{fx(x):.1f}" y="{fy(y) + 18:.1f}" text-anchor="middle">{100 * mfu:.0f} %</text>')
        out.append(f'<text x="{fx(x):.1f}" y="340" text-anchor="middle">{gpus:,}</text>')
        if last - fy(y) > 14:  # labels that would touch are left out
            last = fy(y)
            out.append(f'<text x="4" y="{last + 4:.1f}">{_short(speed)} tok/s</text>')
    return f'<div class="wide"><svg viewBox="0 0 920 350" role="img">{"".join(out)}</svg></div>{SCALING}'


def _short(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _timeline(best: dict) -> str:
    """The executor's ticks of the chosen schedule; of many microbatches the first few."""
    p, m = best["mesh"]["pipe"], min(best["microbatches"], max(MICROBATCHES_DRAWN, 2 * best["mesh"]["pipe"]))
    whole = p == 1 or best["remat"] == "full"
    table = bubble.make(best["schedule"], p, m, best["chunks"], ticks=True, whole=whole)
    costs = (6, 15 if best["remat"] == "full" else 12 if best["remat"] == "selective" else 10, 4)
    picture = of_ticks(pack(table), costs, "compute")
    inner = timeline_page(
        picture, f"{table.name}, {p} ranks, {m} of {best['microbatches']} microbatches, {best['chunks']} chunks"
    )
    return f'<iframe style="height:{min(140 + 26 * p, 700)}px" title="timeline" srcdoc="{html.escape(inner)}"></iframe>'
