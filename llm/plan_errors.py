"""How well the planner does: its predictions beside published measurements, by suite, with the baseline."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median

from llm import published
from parallel import frameworks
from parallel.errors import UserError
from parallel.planner import Estimate, estimate

UNDER = 0.02
"""A prediction of memory that is lower by more than this share counts as too low."""
TABLES = ("errors", "choices", "memory")
EXPERTS = ", experts"
"""What the name of a suite gets for its mixtures of experts, which are listed apart and are not counted."""
OUTSIDE = ("vtrain_single",)
"""Suites that the row `all` leaves out: shapes so small that launches decide."""

AIMS = (
    ("all, complete", "mape", 5.0),
    ("all, complete", "median", 3.0),
    ("all", "mape", 8.0),
    ("vtrain_multi", "mape", 5.0),
    ("vtrain_single", "mape", 8.4),
    ("all", "memory_mape", 5.0),
)
"""(suite, key of its row, at most so many percent): what the planner is to reach on the published rows."""
REGRETS = dict(worst=5.0, mean=2.0)
"""At most so many percent slower than the best layout measured, in any job and over the jobs of a suite."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One row: what was predicted, or why not. counted: dense, several GPUs, tensor or pipeline parallel."""

    row: int
    id: str
    suite: str
    measured: float | None
    run: published.Run | None
    estimate: Estimate | None
    refused: str
    counted: bool
    fitted: bool

    @property
    def error(self) -> float:
        """(predicted - measured) / measured of the step time."""
        return self.estimate.step_time_s / self.measured - 1


def predict_run(run: published.Run, constants: dict | None = None) -> Estimate:
    """The planner's estimate of a published run. constants: instead of the committed ones."""
    framework = frameworks.find(run.framework, run.cluster.gpu.name, run.recipe, constants)
    framework = dataclasses.replace(framework, **run.changes)
    spread = frameworks.spread(run.framework, run.cluster.gpu.name, run.recipe)
    return estimate(run.model, run.length, run.layout, run.cluster, framework, run.precision, spread=spread)


def predict(rows: list[dict[str, str]], suite: str = "") -> list[Prediction]:
    """Predict every row, or those of one suite; a row that cannot be has its reason instead."""
    used, out = set(frameworks.fitted()["rows"]), []
    for i, row in enumerate(rows):
        if suite and row["suite"] != suite:
            continue
        run = guess = None
        refused = ""
        try:
            run = published.parse(row)
            guess = predict_run(run)
            if not math.isfinite(guess.step_time_s):
                raise UserError("the shapes give no finite time")
        except UserError as error:
            refused, guess = str(error), None
        except (ArithmeticError, ValueError, LookupError, TypeError) as error:  # a cell that makes no sense
            refused, guess = f"cells that do not fit together ({type(error).__name__}: {error})", None
        split = [published.number(row[c]) or 1 for c in ("tp", "pp")]
        if run:
            split = [run.layout.tensor, run.layout.pipe]
        several = (published.number(row["n_gpus"]) or 0) > 1
        counted = published.is_dense(row) and several and max(split) > 1
        out.append(
            Prediction(
                i,
                row["id"],
                (row["suite"] or "unnamed") + ("" if published.is_dense(row) else EXPERTS),
                published.measured(row),
                run,
                guess,
                refused,
                counted,
                row["id"] in used,
            )
        )
    return out


def baseline(predictions: list[Prediction]) -> dict[int, float]:
    """{row: error} of one constant efficiency for each GPU type and precision, leaving the row itself out."""
    speed = defaultdict(list)
    for p in predictions:
        if p.run and p.measured and p.suite not in OUTSIDE:
            flops = p.run.model.model_flops(
                p.run.layout.rows * p.run.layout.microbatches * p.run.layout.data * p.run.length, p.run.length
            )
            speed[p.run.key].append((p.row, flops / p.measured / p.run.layout.gpus))
        elif p.run and p.measured:
            flops = p.run.model.model_flops(
                p.run.layout.rows * p.run.layout.microbatches * p.run.layout.data * p.run.length, p.run.length
            )
            speed[p.suite].append((p.row, flops / p.measured / p.run.layout.gpus))
    out = {}
    for rates in speed.values():
        total = sum(math.log(rate) for _, rate in rates)
        for row, rate in rates:
            if len(rates) > 1:
                out[row] = rate / math.exp((total - math.log(rate)) / (len(rates) - 1)) - 1
    return out


def summary(predictions: list[Prediction], rows: list[dict[str, str]] | None = None) -> list[dict]:
    """One object for each suite, then `all` (mean of suites) and `rows` (mean of rows); with the file's rows, memory too.

    Only rows that no fit used are in the errors. A suite with rows that split the model counts those; one without is
    listed with all its rows and left out of `all`, as is vtrain_single.
    """
    base = baseline(predictions)
    memory = memory_errors(predictions, rows) if rows else {}
    suites: dict[str, list[Prediction]] = defaultdict(list)
    for p in predictions:
        suites[p.suite].append(p)
    table, rows_in_all = [], []
    for suite, members in suites.items():
        counted = [p for p in members if p.counted]
        inside = bool(counted) and suite not in OUTSIDE
        mine = counted if counted else [p for p in members if p.refused or p.run]
        good = [p for p in mine if p.estimate and p.measured and not p.fitted]
        entry = _entry(suite, mine, good, base)
        complete = [abs(p.error) for p in good if p.run.complete]
        entry["complete_n"] = len(complete)
        entry["complete_mape"] = round(100 * fmean(complete), 2) if complete else None
        entry |= _memory([memory[p.row] for p in members if p.row in memory])
        entry["in_all"] = inside and bool(good)
        table.append(entry)
        if entry["in_all"]:
            rows_in_all += mine
    used = [e for e in table if e["in_all"]]
    good = [p for p in rows_in_all if p.estimate and p.measured and not p.fitted]
    if used:
        mean = lambda key: fmean(e[key] for e in used if e[key] is not None)
        everything = _entry("all", rows_in_all, good, base)
        for key in ("mape", "median", "bias", "coverage", "baseline_mape"):
            everything[key] = mean(key) if any(e[key] is not None for e in used) else None
        complete = [p for p in good if p.run.complete]
        everything |= _memory(list(memory.values()))
        table += [everything, _entry("rows", rows_in_all, good, base), _entry("rows, complete", complete, complete, base)]
        by = defaultdict(list)
        for p in complete:
            by[p.suite].append(abs(p.error))
        table[-1]["suites"] = len(by)
        if by:
            row = dict(table[-1], suite="all, complete", mape=100 * fmean(fmean(v) for v in by.values()))
            row["median"] = 100 * fmean(median(v) for v in by.values())
            table.append(row)
    return table


def _entry(suite: str, members: list[Prediction], good: list[Prediction], base: dict[int, float]) -> dict:
    errors = [p.error for p in good]
    sizes = [abs(e) for e in errors]
    inside = [p.estimate.low_s <= p.measured <= p.estimate.high_s for p in good]
    other = [abs(base[p.row]) for p in good if p.row in base]
    percent = lambda values, of: round(100 * of(values), 2) if values else None
    return dict(
        suite=suite,
        n=len(good),
        fitted=sum(p.fitted for p in members),
        refused=sum(bool(p.refused) for p in members),
        mape=percent(sizes, fmean),
        median=percent(sizes, median),
        max=percent(sizes, max),
        bias=percent(errors, fmean),
        coverage=percent([float(i) for i in inside], fmean),
        baseline_mape=percent(other, fmean),
    )


def memory_errors(predictions: list[Prediction], rows: list[dict[str, str]]) -> dict[int, float]:
    """{row: error} of the fullest GPU's memory, on rows that print it and their layers.

    A printed whole number counts as the range that rounds to it. Sources' GB are taken as GiB: their frameworks count in
    units of 2^30 and the shapes of the smallest rows leave no room for 7 % less.
    """
    errors = {}
    for p in predictions:
        text = rows[p.row]["mem_gib"]
        value = published.number(text)
        if value and p.estimate and published.number(rows[p.row]["layers"]):
            guess, half = p.estimate.peak_memory_gib, 0.0 if "." in text else 0.5
            errors[p.row] = (guess - min(max(guess, value - half), value + half)) / value
    return errors


def _memory(errors: list[float]) -> dict:
    """memory_n, memory_mape, and memory_not_under: the share of rows not more than 2 % under, in percent."""
    if not errors:
        return dict(memory_n=0, memory_mape=None, memory_not_under=None)
    under = fmean(e < -UNDER for e in errors)
    return dict(
        memory_n=len(errors), memory_mape=round(100 * fmean(map(abs, errors)), 2), memory_not_under=round(100 - 100 * under, 1)
    )


def choices(predictions: list[Prediction]) -> list[dict]:
    """For every job that was measured in three layouts or more: the planner's first choice, its regret, the best measured.

    A job: the same model, batch, row length, GPUs, number format and framework.
    """
    jobs: dict[tuple, list[Prediction]] = defaultdict(list)
    for p in predictions:
        if p.estimate and p.measured and p.run.layout.gpus > 1:
            r, l = p.run, p.run.layout
            batch = l.rows * l.microbatches * l.data
            jobs[r.suite, r.model, r.length, r.framework, r.recipe, r.cluster.gpu.name, l.gpus, batch].append(p)
    out = []
    for members in jobs.values():
        if len({p.run.layout for p in members}) < 3:
            continue
        first = min(members, key=lambda p: p.estimate.step_time_s)
        best = min(members, key=lambda p: p.measured)
        out.append(
            dict(
                suite=first.suite,
                model=first.run.model.name,
                gpus=first.run.layout.gpus,
                layouts=len(members),
                choice=_layout(first),
                choice_id=first.id,
                choice_measured_s=first.measured,
                best=_layout(best),
                best_id=best.id,
                best_measured_s=best.measured,
                regret_pct=round(100 * (first.measured / best.measured - 1), 2),
            )
        )
    return out


def _layout(p: Prediction) -> str:
    l = p.run.layout
    return f"data {l.data} pipe {l.pipe} tensor {l.tensor}, {l.microbatches} x {l.rows}, {l.chunks} ch., {l.remat}"


def render_choices(found: list[dict]) -> str:
    """The choices as text, with the mean regret of each suite."""
    if not found:
        return "No job was measured in three layouts or more."
    names = ("suite", "model", "gpus", "layouts", "choice", "choice_measured_s", "best", "best_measured_s", "regret_pct")
    lines = [tuple("regret, %" if n == "regret_pct" else n.replace("_measured_s", ", s") for n in names)]
    lines += [tuple(f"{c[n]:.2f}" if isinstance(c[n], float) else str(c[n]) for n in names) for c in found]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    text = ["  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in lines]
    by = defaultdict(list)
    for c in found:
        by[c["suite"]].append(c["regret_pct"])
    beside = lambda name, value: f"{name} {value:.2f} % ({_aim(value, REGRETS[name])})"
    text += [f"{suite}: regret {beside('mean', fmean(v))}, {beside('worst', max(v))}" for suite, v in by.items()]
    return "\n".join(text)


def _aim(value: float, most: float) -> str:
    return f"aim {most:g}" + (", missed" if value > most else "")


def render_memory(
    predictions: list[Prediction], rows: list[dict[str, str]], errors: dict[int, float]
) -> tuple[list[dict], str]:
    """Every row with measured memory: (objects, text)."""
    out, by = [], {p.row: p for p in predictions}
    for row, error in errors.items():
        peak = by[row].estimate.peak_memory_gib
        out.append(
            dict(
                suite=by[row].suite,
                id=by[row].id,
                measured=rows[row]["mem_gib"],
                predicted_gib=round(peak, 2),
                error_pct=round(100 * error, 2),
            )
        )
    wide = max([len(o["id"]) for o in out] + [2])
    lines = [f"{'id':{wide}} measured predicted  error, %"]
    lines += [f"{o['id']:{wide}} {o['measured']:>8} {o['predicted_gib']:9.1f} {o['error_pct']:9.1f}" for o in out]
    total = _memory(list(errors.values()))
    lines.append(
        f"{total['memory_n']} rows, MAPE {total['memory_mape']} %, {total['memory_not_under']} % not more than 2 % under."
    )
    return out, "\n".join(lines)


def write_predictions(path: str, predictions: list[Prediction]) -> None:
    """row, step_time_s, low_s, high_s, mem_gib, refused; a function of the inputs alone."""
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(("row", "step_time_s", "low_s", "high_s", "mem_gib", "refused"))
        for p in predictions:
            e = p.estimate
            numbers = [f"{x:.6g}" for x in (e.step_time_s, e.low_s, e.high_s, e.peak_memory_gib)] if e else [""] * 4
            out.writerow((p.row, *numbers, p.refused))


def render(table: list[dict], reasons: dict[str, int]) -> str:
    """The table in text, what is outside `all`, and why rows were refused."""
    names = (
        "suite", "n", "fitted", "refused", "mape", "median", "max", "bias", "coverage", "baseline_mape", "complete_n",
        "complete_mape", "memory_n", "memory_mape", "memory_not_under",
    )  # fmt: skip
    head = (
        "suite", "n", "fitted", "refused", "MAPE", "median", "max", "bias", "in 90 %", "baseline", "complete", "MAPE",
        "memory", "MAPE", "not under",
    )  # fmt: skip
    show = lambda v: "-" if v is None else f"{v:.1f}" if isinstance(v, float) else str(v)
    lines = [head]
    for entry in table:
        mark = "" if entry.get("in_all", True) else " *"
        lines.append((entry["suite"] + mark, *(show(entry.get(n)) for n in names[1:])))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))) for line in lines]
    text.append("Percent of step time, on rows that no fit used. *: outside `all` (no split model, or tiny shapes).")
    text.append(
        "Memory of the fullest GPU: rows that print it, its MAPE, and the share of them not more than 2 % under, percent."
    )
    by_suite = {entry["suite"]: entry for entry in table}
    for suite, key, most in AIMS:
        if (value := by_suite.get(suite, {}).get(key)) is not None:
            text.append(f"{suite}: {key} {value:.2f} % ({_aim(value, most)})")
    text += [f"Refused {count}: {reason}" for reason, count in sorted(reasons.items(), key=lambda r: -r[1])]
    return "\n".join(text)


def plan_errors(csv_file: str = "", suite: str = "", predictions: str = "", table: str = "errors") -> tuple[list[dict], str]:
    """The error table as a document and as text; table: `choices` and `memory` instead. Raises UserError for a file, a
    suite or a table that is not there."""
    if table not in TABLES:
        raise UserError(f"--table={table}: there are {', '.join(TABLES)}")
    rows = published.read(csv_file or published.RUNS)
    if suite:
        names = sorted({row["suite"] for row in rows})
        if suite not in names:
            raise UserError(f"--suite={suite}: the file has {', '.join(names)}")
    done = predict(rows, suite)
    if predictions:
        if not Path(predictions).absolute().parent.is_dir():
            raise UserError(f"--predictions={predictions}: there is no such folder")
        write_predictions(predictions, done)
    if table == "choices":
        found = choices([p for p in done if suite or p.suite not in OUTSIDE])
        return found, render_choices(found)
    if table == "memory":
        return render_memory(done, rows, memory_errors(done, rows))
    reasons: dict[str, int] = defaultdict(int)
    for p in done:
        if p.refused:
            reasons[p.refused] += 1
    document = summary(done, rows)
    return document, render(document, reasons)
