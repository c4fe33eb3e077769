"""Fit the planner's constants on a few published rows and write parallel/data/efficiencies.json.

    python -m experiments.fit_planner

Rows: at most a fifth of each suite (one of a suite of fewer than five), chosen by their inputs alone: spread evenly over
GPU, number format and layout. Constants: least squares of log time with a robust loss, each held near its prior, for one
framework at a time. Minutes on one core.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections import defaultdict

import numpy as np
from scipy.optimize import least_squares

from llm import published
from llm.plan_errors import predict_run
from parallel.errors import UserError
from parallel.frameworks import CONSTANTS, FILE, FRAMEWORKS, generation

WIDTH = dict(
    matmul=0.30, passes=0.25, host_ms=0.5, tp_hidden=0.8, dp_hidden=1.0, pp_hidden=1.0, step_ms=0.6, noise=0.7, crowding=0.25
)
"""Standard deviations of the priors, in log or (for shares) in log odds."""
NARROW = 0.12
"""Of the logarithm of `matmul` on one GPU and number format about that of the framework."""
SHARES = ("tp_hidden", "dp_hidden", "pp_hidden")
ZEROS = (*SHARES, "crowding")
"""Constants that a framework may lack."""
ERROR = 0.03
"""What one row's log time is off even with right constants."""
OFFSETS = (0.0, 0.12, 0.24)
"""Where the logarithm of `matmul` starts, over its prior."""
ALWAYS = ("mlperf31-Eos_n64",)


def chosen_rows() -> list[tuple[published.Run, float]]:
    """(run, measured seconds) of the rows that the fit may use."""
    suites: dict[str, list] = defaultdict(list)
    for row in published.read(published.RUNS):
        try:
            run = published.parse(row)
        except UserError:
            continue
        if published.measured(row) and published.is_dense(row):
            suites[row["suite"]].append((run, published.measured(row)))
    out = []
    for members in suites.values():
        split = sum(run.layout.tensor * run.layout.pipe > 1 for run, _ in members)
        room = max(1, (split or len(members)) // 5)  # of the rows that are counted, where a suite has split models
        groups = defaultdict(list)
        for run, time in members:
            parallel = run.layout.tensor * run.layout.pipe > 1
            groups[generation(run.cluster.gpu.name), run.recipe, parallel].append((run, time))
        if any(key[2] for key in groups):  # a suite of split models is fitted on those
            groups = {key: group for key, group in groups.items() if key[2]}
        for group in groups.values():
            group.sort(key=_order)
        picked = [pair for pair in members if pair[0].id in ALWAYS]
        size = {key: len(group) for key, group in groups.items()}
        order = sorted(groups, key=lambda key: (not key[2], -size[key], key))
        take = dict.fromkeys(order, 0)
        for _ in range(room - len(picked)):  # one for each group, then where a row stands for most others
            empty = [key for key in order if not take[key]]
            best = (
                empty[0] if empty else max(order, key=lambda key: size[key] / (take[key] + 1) if take[key] < size[key] else -1)
            )
            take[best] += 1
        for key, n in take.items():
            for i in range(n):
                pair = groups[key][int((i + 0.5) * size[key] / n)]
                if pair not in picked:
                    picked.append(pair)
        out += picked[:room]
    return out


def _order(pair) -> tuple:
    run = pair[0]
    return (
        run.model.parameters,
        run.layout.pipe,
        run.layout.tensor,
        run.layout.rows,
        run.layout.chunks,
        run.layout.data,
        run.id,
    )


def fit(name: str, rows: list[tuple[published.Run, float]]) -> dict[str, dict[str, float]]:
    """Constants of one framework: {key: {constant: value}}."""
    prior = FRAMEWORKS[name]
    keys = sorted({f"{name}/{generation(run.cluster.gpu.name)}/{run.recipe}" for run, _ in rows})
    free = [(name, c) for c in CONSTANTS if c != "matmul" and not (c in ZEROS and getattr(prior, c) in (0.0, 1.0))]
    free += [(name, "matmul")] + [(key, "matmul") for key in keys]
    start = np.array([_inward(c, getattr(prior, c)) for _, c in free])
    width = np.array([WIDTH[c] for _, c in free])

    def constants(x: np.ndarray) -> dict:
        table: dict[str, dict[str, float]] = defaultdict(dict)
        for (key, c), value in zip(free, x):
            table[key][c] = _outward(c, value)
        return table

    def from_prior(x: np.ndarray) -> np.ndarray:
        whole = x[free.index((name, "matmul"))]  # one GPU and format differs little from the framework's own speed
        own = [(v - whole) / NARROW if key in keys else (v - s) / w for (key, _), v, s, w in zip(free, x, start, width)]
        return np.array(own)

    def residuals(x: np.ndarray) -> np.ndarray:
        table = constants(x)
        error = np.array([math.log(predict_run(run, table).step_time_s / time) for run, time in rows]) / ERROR
        soft = np.sign(error) * np.sqrt(np.log1p(error**2))  # Cauchy: some measurements are of a cluster in trouble
        return np.concatenate([soft, from_prior(x)])

    speeds = np.array([c == "matmul" for _, c in free])
    jumps = any(run.layout.schedule.startswith("zb-") for run, _ in rows)  # these tables change with the times of passes
    tries = [start + offset * speeds for offset in (OFFSETS if jumps else (0.0,))]
    results = [least_squares(residuals, x, diff_step=1e-3, max_nfev=25) for x in tries]
    result = min(results, key=lambda r: r.cost)
    errors = [predict_run(run, constants(result.x)).step_time_s / time - 1 for run, time in rows]
    print(f"{name}: {len(rows)} rows, {len(free)} constants, mean error {100 * np.mean(np.abs(errors)):.1f} %", file=sys.stderr)
    return {key: {c: float(f"{v:.4g}") for c, v in values.items()} for key, values in constants(result.x).items()}


def _inward(constant: str, value: float) -> float:
    value = min(max(value, 1e-3), 0.999) if constant in SHARES else max(value, 1e-4)
    return math.log(value / (1 - value)) if constant in SHARES else math.log(value)


def _outward(constant: str, x: float) -> float:
    return 1 / (1 + math.exp(-x)) if constant in SHARES else math.exp(x)


def main(only: list[str]) -> None:
    rows = chosen_rows()
    table = json.loads(FILE.read_text())["constants"] if only and FILE.is_file() else {}
    by: dict[str, list] = defaultdict(list)
    for run, time in rows:
        by[run.framework].append((run, time))
    for run, time in rows:  # one job at any scale: constants from this row alone
        if run.id in ALWAYS:
            by["mlperf-eos"].append((dataclasses.replace(run, framework="mlperf-eos"), time))
    for name, mine in by.items():
        if not only or name in only:
            table = {key: value for key, value in table.items() if key.split("/")[0] != name} | fit(name, mine)
    FILE.write_text(json.dumps({"constants": table, "spread": {}, "rows": [run.id for run, _ in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
