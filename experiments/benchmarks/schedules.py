"""How good the searched schedules are, on the pass times of Zero Bubble (arXiv 2401.10241, Table 9).

python experiments/benchmarks/schedules.py              searches, 5 minutes on 2 cores; one JSON line for each model and memory
python experiments/benchmarks/schedules.py --quick      the same for the two models on 8 stages only, half a minute
python experiments/benchmarks/schedules.py --execute    predicted against measured step times on 4 and 8 virtual CPU devices;
                                                        --execute 4 on 4 only

Expected, rank-span bubble at the memory of 1F1B (p microbatches): at most .0403 (6.2B), .0703 (1.5B), .0498 (14.6B), .0531
(28.3B), what the authors' own search gives; at the memory of V-Half below .1447, .1702, .1682, .1780. Both with at most two
chunks a rank, on a V; `chunks` 4 lets the search use loops as well. The memory of half of 1F1B (p/2) has no published figure.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from parallel.schedule import search, simulate

MODELS = (  # name, stages, microbatches, (F, B, W) and delay in ms, bars at the memory of 1F1B and of V-Half
    ("6.2B", 8, 24, (29.718, 29.444, 19.927), 0.527, 0.0403, 0.1447),
    ("1.5B", 8, 24, (18.522, 18.086, 9.337), 0.601, 0.0703, 0.1702),
    ("14.6B", 16, 48, (11.347, 11.248, 8.132), 0.377, 0.0498, 0.1682),
    ("28.3B", 32, 96, (10.419, 10.207, 7.715), 0.408, 0.0531, 0.1780),
)


def searched(model: str, chunks: int = 2, effort: float = 1.0):
    """One object for each memory: the searched bubble beside that of the best named schedule and the published bar."""
    name, p, m, costs, comm, bar, half_bar = next(row for row in MODELS if row[0] == model)
    for memory, published in ((p, bar), ((p + 2) // 2, half_bar), (p / 2, None)):
        start = time.perf_counter()
        found = search(p, m, costs, comm, memory, chunks, "rank_span", effort)
        run = simulate(found.table.validate(), costs, comm)
        best = min(found.tried, key=found.tried.get)
        yield {
            "model": name,
            "stages": p,
            "microbatches": m,
            "memory": memory,
            "chunks": chunks,
            "bubble_rank_span": round(run.bubble_rank_span, 5),
            "published": published,
            "best_named": best,
            "best_named_bubble": round(1 - run.ideal / found.tried[best], 4),
            "placement": found.table.placement,
            "peak_activations": max(run.peak_activations),
            "bubble_makespan": round(run.bubble_makespan, 4),
            "seconds": round(time.perf_counter() - start, 1),
        }


def main(arguments: list[str]) -> None:
    if "--execute" in arguments:
        os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        from experiments.benchmarks import execution

        cores = len(os.sched_getaffinity(0))
        for stages in [int(n) for n in arguments if n.isdigit()] or (4, 8):
            print(f"{stages} virtual devices on {cores} cores; {execution.MACHINE}", flush=True)
            found = [execution.summary(rows, clock) for clock, rows in execution.execute(stages, 16, cores).items()]
            print("\n\n".join(map(execution.table, found)), flush=True)
            print(json.dumps({"stages": stages, "cores": cores, "clocks": found}), flush=True)
        return
    for model in [row[0] for row in MODELS if row[1] == 8 or "--quick" not in arguments]:
        for chunks in (2, 4) if model in ("6.2B", "1.5B") else (2,):
            for row in searched(model, chunks):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
