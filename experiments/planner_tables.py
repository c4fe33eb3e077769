"""Two tables about the planner: its error without each of its terms, and on a suite that no constant was fitted on.

python -m experiments.planner_tables ablation
python -m experiments.planner_tables transfer
"""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Callable
from statistics import fmean
from unittest.mock import patch

from experiments.fit_planner import chosen_rows, fit
from llm import plan_errors, published
from parallel import frameworks, planner
from parallel.errors import UserError


def rows(with_tiny: bool = False) -> list[dict[str, str]]:
    """The published rows; those of vtrain_single are many and outside `all`."""
    return [row for row in published.read(published.RUNS) if with_tiny or row["suite"] not in plan_errors.OUTSIDE]


def constants(**values: float) -> Callable:
    """A patch that sets constants of every framework."""
    find = frameworks.find
    return patch.object(frameworks, "find", lambda *a, **k: dataclasses.replace(find(*a, **k), **values))


def ablation() -> str:
    """`all` and `all, complete` with each term taken out, nothing fitted again."""
    run = planner.bubble.run
    no_bubble = lambda *a, **k: (lambda p: p._replace(seconds=p.work))(run(*a, **k))
    cases = {
        "everything": constants(),
        "without waves and partly filled tiles": patch("parallel.operator_time.filling", lambda m, n, sms: 0.93),
        "without the depth of a matmul": patch("parallel.operator_time.DEPTH", 0),
        "without memory-bound passes": constants(passes=1e9),
        "without attention": patch.object(planner, "attention", lambda *a: 0.0),
        "without the bubble": patch.object(planner.bubble, "run", no_bubble),
        "without tensor communication": constants(tp_hidden=1.0),
        "without the gradient reduction": patch.object(planner, "reduction", lambda *a: 0.0),
        "without crowding": constants(crowding=0.0),
        "without pipeline messages": patch.object(planner.communication, "message", lambda *a: 0.0),
        "without launches": constants(host_ms=0.0),
        "without optimiser and fixed time": patch.multiple(planner, update_time=lambda *a: 0.0),
        "without slow nodes": constants(noise=0.0),
    }
    lines = [f"{'':40} {'all':>6} {'complete':>9}"]
    for name, change in cases.items():
        with change:
            table = {entry["suite"]: entry for entry in plan_errors.summary(plan_errors.predict(rows()))}
        lines.append(f"{name:40} {table['all']['mape']:6.1f} {table['all, complete']['mape']:9.1f}")
    return "\n".join(lines)


def transfer() -> str:
    """Error on each suite when none of its rows was fitted: the framework's other suites, or its priors, stand in."""
    picked, everything = chosen_rows(), defaultdict(list)
    for row in rows():
        try:
            run = published.parse(row)
        except UserError:
            continue
        if published.measured(row) and published.is_dense(row) and run.layout.tensor * run.layout.pipe > 1:
            everything[run.suite].append((run, published.measured(row)))
    lines, means = [f"{'suite':24} {'n':>4} {'MAPE':>6} {'bias':>6}"], []
    for suite, runs in everything.items():
        table = dict(frameworks.fitted()["constants"])
        for name in {run.framework for run, _ in runs}:
            table = {key: value for key, value in table.items() if key.split("/")[0] != name}
            others = [pair for pair in picked if pair[0].framework == name and pair[0].suite != suite]
            others = [pair for pair in others if pair[0].suite not in plan_errors.OUTSIDE or len(others) < 200]
            if others:
                table |= fit(name, others)
        errors = [plan_errors.predict_run(run, table).step_time_s / time - 1 for run, time in runs]
        means.append(fmean(map(abs, errors)))
        lines.append(f"{suite:24} {len(runs):4} {100 * means[-1]:6.1f} {100 * fmean(errors):6.1f}")
    return "\n".join([*lines, f"{'mean of suites':24} {'':4} {100 * fmean(means):6.1f}"])


if __name__ == "__main__":
    tables = {"ablation": ablation, "transfer": transfer}
    if sys.argv[1:2] and sys.argv[1] in tables:
        print(tables[sys.argv[1]]())
    else:
        print(__doc__)
