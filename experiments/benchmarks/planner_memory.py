"""Memory of a GPU that the planner predicts for this trainer, beside that of the compiled training step.

    python experiments/benchmarks/planner_memory.py [PRESET ...] [--json]

Presets: llama3_8b, llama3_70b and llama31_405b (64, 256 and 4,096 H100) unless named. Needs no GPU but the environment of
`make setup-gpu-compile`; one to two minutes of a core for each. Compared is what the program allocates, without the workspace
that the planner adds for the libraries.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from llm import overrides
from llm.compile import compile_step
from llm.config import Config
from llm.plan import cost
from parallel.errors import UserError

CONFIGS = Path(__file__).parents[1] / "configs"
PRESETS = ("llama3_8b", "llama3_70b", "llama31_405b")
CLUSTER = "nd-h100-v5"
GIB = 2**30


def compare(name: str, config: Config, compiled: dict) -> dict:
    """One row: predicted and compiled GiB of parameters with optimiser and gradients, of the rest, and of all."""
    parts = cost(config, CLUSTER).memory_parts_gib[0]
    kept = parts["parameters"] + parts["gradients"] + parts["optimizer"]
    total = sum(parts.values()) - parts["workspace"]
    copy = 2 * compiled["gradient_bytes"] / 4  # the 16-bit copy of the weights counts as parameters here
    truth = compiled["parameter_bytes"] + compiled["optimizer_bytes"] + compiled["gradient_bytes"] + copy
    return dict(
        preset=name,
        gpus=config.mesh.product,
        kept_planned_gib=round(kept, 2),
        kept_compiled_gib=round(truth / GIB, 2),
        rest_planned_gib=round(total - kept, 2),
        rest_compiled_gib=round((compiled["total_bytes"] - truth) / GIB, 2),
        total_planned_gib=round(total, 2),
        total_compiled_gib=round(compiled["total_bytes"] / GIB, 2),
        error_pct=round(100 * (total * GIB / compiled["total_bytes"] - 1), 2),
    )


def table(rows: list[dict]) -> str:
    """The rows as text."""
    lines = ["               GPUs   weights, optimiser, gradients   all else              in all, GiB           error"]
    lines.append("                      planned   compiled              planned   compiled    planned   compiled")
    for r in rows:
        numbers = [f"{r[f'{part}_{who}_gib']:9.2f}" for part in ("kept", "rest", "total") for who in ("planned", "compiled")]
        lines.append(
            f"{r['preset']:13} {r['gpus']:5}  {numbers[0]}  {numbers[1]}           {numbers[2]}  {numbers[3]}  "
            f"{numbers[4]}  {numbers[5]}   {r['error_pct']:+5.1f} %"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    names = [a for a in arguments if a != "--json"] or list(PRESETS)
    rows = []
    for name in names:
        if not (CONFIGS / f"{name}.py").is_file():
            print(f"error: there is no preset {name}: there are {', '.join(PRESETS)}", file=sys.stderr)
            return 2
    try:
        for name in names:
            config = overrides.load(str(CONFIGS / f"{name}.py"))
            rows.append(compare(name, config, compile_step(config, CLUSTER)))
            print(table(rows[-1:]), file=sys.stderr)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    print(json.dumps(rows) if "--json" in arguments else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
