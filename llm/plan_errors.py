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

OUTSIDE = ("vtrain_single",)
"""Suites that the row `all` leaves out: shapes so small that launches decide."""


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


def predict(rows: list[dict[str, str]]) -> list[Prediction]:
    """Predict every row; a row that cannot be has its reason instead."""
    used, out = set(frameworks.fitted()["rows"]), []
    for i, row in enumerate(rows):
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
                row["suite"] or "unnamed",
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


def summary(predictions: list[Prediction]) -> list[dict]:
    """One object for each suite, then `all` (mean of suites) and `rows` (mean of rows).

    Only rows that no fit used are in the errors. A suite with rows that split the model counts those; one without is
    listed with all its rows and left out of `all`, as is vtrain_single.
    """
    base = baseline(predictions)
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


def memory_summary(predictions: list[Prediction], rows: list[dict[str, str]]) -> dict:
    """Error of the fullest GPU's memory; a printed whole number counts as the range that rounds to it."""
    errors = []
    for p in predictions:
        text = rows[p.row]["mem_gib"]
        value = published.number(text)
        if not (value and p.estimate and published.number(rows[p.row]["layers"])):
            continue
        guess, half = p.estimate.peak_memory_gib, 0.0 if "." in text else 0.5
        near = min(max(guess, value - half), value + half)
        errors.append((guess - near) / value)
    if not errors:
        return dict(n=0)
    good = fmean(e > -0.02 for e in errors)
    return dict(n=len(errors), mape=round(100 * fmean(map(abs, errors)), 2), not_under=round(100 * good, 1))


def write_predictions(path: str, predictions: list[Prediction]) -> None:
    """row, step_time_s, low_s, high_s, mem_gib, refused; a function of the inputs alone."""
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(("row", "step_time_s", "low_s", "high_s", "mem_gib", "refused"))
        for p in predictions:
            e = p.estimate
            numbers = [f"{x:.6g}" for x in (e.step_time_s, e.low_s, e.high_s, e.peak_memory_gib)] if e else [""] * 4
            out.writerow((p.row, *numbers, p.refused))


def render(table: list[dict], memory: dict, reasons: dict[str, int]) -> str:
    """The table in text, what is outside `all`, and why rows were refused."""
    names = ("suite", "n", "fitted", "refused", "mape", "median", "max", "bias", "coverage", "baseline_mape")
    head = ("suite", "n", "fitted", "refused", "MAPE", "median", "max", "bias", "in 90 %", "baseline")
    show = lambda v: "-" if v is None else f"{v:.1f}" if isinstance(v, float) else str(v)
    lines = [head]
    for entry in table:
        mark = "" if entry.get("in_all", True) else " *"
        lines.append((entry["suite"] + mark, *(show(entry[n]) for n in names[1:])))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))) for line in lines]
    text.append("Percent of step time, on rows that no fit used. *: outside `all` (no split model, or tiny shapes).")
    if memory["n"]:
        text.append(
            f"Memory of the fullest GPU: {memory['n']} rows, MAPE {memory['mape']} %, "
            f"{memory['not_under']} % not more than 2 % under."
        )
    text += [f"Refused {count}: {reason}" for reason, count in sorted(reasons.items(), key=lambda r: -r[1])]
    return "\n".join(text)


def plan_errors(csv_file: str = "", suite: str = "", predictions: str = "") -> tuple[list[dict], str]:
    """The error table as a document and as text. Raises UserError for a file or a suite that is not there."""
    rows = published.read(csv_file or published.RUNS)
    if suite:
        names = sorted({row["suite"] for row in rows})
        if suite not in names:
            raise UserError(f"--suite={suite}: the file has {', '.join(names)}")
    done = predict(rows)
    if predictions:
        if not Path(predictions).parent.is_dir():
            raise UserError(f"--predictions={predictions}: there is no such folder")
        write_predictions(predictions, done)
    if suite:
        base_rows = done
        done = [p for p in base_rows if p.suite == suite]
    reasons: dict[str, int] = defaultdict(int)
    for p in done:
        if p.refused:
            reasons[p.refused] += 1
    table = summary(done)
    return table, render(table, memory_summary(done, rows), reasons)
