"""The demo: train, evaluate, generate and draw, on virtual devices, in minutes.

    make demo        (or: python experiments/demo.py)

Trains experiments/configs/demo.py in runs/demo, or goes on where it stopped; writes sample.txt, ticks.png and
evaluation.json there.
"""

import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from experiments.configs.demo import get_config  # noqa: E402
from llm.devices import request_devices  # noqa: E402

WORKDIR = ROOT / "runs" / "demo"
PROMPTS = ("My fellow citizens,", "The state of the Union is", "We must")


def main() -> int:
    """Run the demo; returns the exit code."""
    began = time.perf_counter()
    config = request_devices(get_config())
    # jax makes its devices from here on
    from llm.evaluate import evaluate, table
    from llm.generate import generate
    from llm.metrics import METRICS, read_jsonl
    from llm.sampling import Sampling
    from llm.step import COSTS, build
    from llm.train import train
    from llm.workdir import write_atomically
    from parallel.schedule.draw import draw_ticks

    print(f"training on {config.mesh.product} virtual devices\n")
    if train(config, WORKDIR)["stopped"]:
        print("stopped and saved: make demo goes on")
        return 75

    print("\nevaluating on held-out documents\n")
    scores = evaluate(WORKDIR)
    write_atomically(WORKDIR / "evaluation.json", json.dumps(scores, indent=2) + "\n")
    print(table(scores))

    print("\ngenerating\n")
    results = generate(WORKDIR, PROMPTS, Sampling(temperature=0.7, top_p=0.95, max_tokens=60))
    sample = "\n\n".join(result["prompt"] + result["text"] for result in results)
    write_atomically(WORKDIR / "sample.txt", sample + "\n")
    print(sample)

    program = build(config)
    times = sorted(record["step_time_s"] for record in read_jsonl(WORKDIR / METRICS) if "step_time_s" in record)
    step_time = times[len(times) // 2]
    facts = program.describe()
    ticks, costs = program.tick_table, COSTS[config.pipeline.remat]
    title = f"{facts['schedule']}: {ticks.length} ticks in a step of {1000 * step_time:.0f} ms (measured median)"
    picture = draw_ticks(ticks, WORKDIR / "ticks.png", step_time, title, costs, facts["idle"])

    def path(file: str | Path) -> str:
        return str(Path(file).relative_to(Path.cwd())) if Path(file).is_relative_to(Path.cwd()) else str(file)

    tokens = config.batch.rows * config.batch.length
    print(
        f"""
summary
  model         {facts["parameters"]:,} parameters, {config.train.steps} steps of {tokens:,} tokens
  devices       {facts["mesh"]}, {facts["schedule"]}
  step          {1000 * step_time:.0f} ms (median), predicted bubble {facts["bubble"]:.1%}
  perplexity    {scores["perplexity"]:.1f} held out (unigram {scores["unigram_perplexity"]:.1f}, bigram \
{scores["bigram_perplexity"]:.1f}), {scores["bits_per_byte"]:.3f} bits per byte
  picture       {path(picture)}
  sample        {path(WORKDIR / "sample.txt")}
  time          {time.perf_counter() - began:.0f} s

go on with
  {path(sys.executable)} main.py generate --workdir={path(WORKDIR)} --prompt="My fellow citizens,"
  {path(sys.executable)} main.py evaluate --workdir={path(WORKDIR)} --config.mesh.pipe=2 --json"""
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
