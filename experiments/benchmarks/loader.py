"""Tokens per second of the data loader over those that training the demo model consumes, on the same machine in one run.

    python experiments/benchmarks/loader.py           # [--rounds=5] [--seconds=2]

The two take turns; the medians over the rounds are compared. The loader makes whole batches of the demo's shape (16 rows of
128 tokens: reading, segments, positions, weights), each of another step. Prints one JSON line: model_tokens_per_s; of the
demo's source tokens_per_s and ratio (the bar is 50); in `sources` the same of the same text as a mixture of two sources and,
where the package grain is installed, from ArrayRecord."""

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
BAR = 50


def open_sources(data, vocab: int, folder: Path) -> dict:
    """The demo's corpus, and the same text read in other ways."""
    from dataclasses import replace

    from llm.data.corpus import open_corpus
    from llm.tokenize import tokenize

    corpora = {"memory_map": open_corpus(data, vocab, folder)}
    corpora["memory_map"].tokenizer.save(folder / "tokenizer.json")
    mixed = replace(data, paths=(), mixture=("sixties=llm/data/text/196*@1", "later=llm/data/text/19[789]*@2"))
    corpora["mixture"] = open_corpus(mixed, vocab, folder)
    if importlib.util.find_spec("grain"):
        tokenize(data.paths, str(folder / "tokenizer.json"), folder / "records", format="array_record")
        corpora["array_record"] = open_corpus(replace(data, paths=(str(folder / "records"),)), vocab, folder)
    return corpora


def rate(work, seconds: float, tokens: int) -> float:
    """Tokens per second of work(number), called for so many seconds."""
    began, number = time.perf_counter(), 0
    while (now := time.perf_counter()) - began < seconds:
        work(number)
        number += 1
    return tokens * number / (now - began)


def measure(rounds: int, seconds: float) -> dict:
    """The figures of the line that is printed."""
    from experiments.configs.demo import get_config
    from llm.devices import request_devices, select_devices

    config, devices = select_devices(request_devices(get_config().validate()))
    import jax

    from llm.step import build

    rows, length = config.batch.rows, config.batch.length
    with tempfile.TemporaryDirectory() as folder:
        corpora = open_sources(config.data, config.model.vocab, Path(folder))
        program = build(config, devices)
        state = program.init()
        batch = program.put(corpora["memory_map"].batch(0, 0, rows, length))

        def train(_: int) -> None:
            nonlocal state
            state, values = program.train_step(state, batch)
            jax.block_until_ready(values)

        work = {name: lambda step, corpus=corpus: corpus.batch(0, step, rows, length) for name, corpus in corpora.items()}
        rates: dict[str, list[float]] = {name: [] for name in ("model", *work)}
        for turn in range(rounds + 1):
            for name, one in {"model": train, **work}.items():
                speed = rate(one, seconds, rows * length)
                if turn:  # the first one compiles and warms up
                    rates[name].append(speed)
    model, *loaders = map(statistics.median, rates.values())
    sources = {name: {"tokens_per_s": round(speed), "ratio": round(speed / model, 1)} for name, speed in zip(work, loaders)}
    return {"model_tokens_per_s": round(model), **sources["memory_map"], "bar": BAR, "sources": sources}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.rounds, arguments.seconds)))


if __name__ == "__main__":
    main()
