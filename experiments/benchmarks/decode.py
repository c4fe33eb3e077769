"""Tokens per second of greedy decoding against transformers: SmolLM2-135M in fp32, on the same CPU and threads.

    make real parity                                  # once: the weights, and the environment .venv-parity with transformers
    python experiments/benchmarks/decode.py           # [--batches=1,8] [--rounds=3] [--threads=N]

Each batch has prompts of 128 tokens from the bundled speeches and 128 new tokens; a text is timed whole, its prompt included.
transformers (`model.generate` with its own cache) runs in a child process; the two take turns, and the medians over the rounds
are compared. Prints one JSON line: tokens_per_s, reference_tokens_per_s and ratio of the batch in `batch`, the one with the
smaller ratio; `batches` has these of each, and `same_tokens`, the share of the new tokens that both agree on."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
WORKDIR = ROOT / "runs" / "decode"
REFERENCE = ROOT / ".venv-parity" / "bin" / "python"
PROMPT, NEW = 128, 128


def reference(folder: str, threads: int) -> None:
    """The child: answers each line of stdin (prompts as JSON) with the seconds and the new ids."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    how = dict(do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0)
    for line in sys.stdin:
        ids = torch.tensor(json.loads(line))
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        print(json.dumps([time.perf_counter() - began, out[:, PROMPT:].tolist()]), flush=True)


def prepare() -> Path:
    """The imported model in WORKDIR, exported again for transformers; kept for the next call."""
    from experiments.real import find_model
    from llm.huggingface import export_model, import_model
    from llm.workdir import newest_step

    if newest_step(WORKDIR) is None:
        import_model(find_model(), WORKDIR)
    if not (WORKDIR / "exported").is_dir():
        export_model(WORKDIR, WORKDIR / "exported", dtype="float32")
    return WORKDIR / "exported"


def prompts_of(tokenizer, number: int) -> list[list[int]]:
    """So many pieces of PROMPT tokens from one speech."""
    ids = tokenizer.encode(next((ROOT / "llm/data/text").glob("1974*.txt")).read_text())
    return [ids[i * PROMPT : (i + 1) * PROMPT] for i in range(number)]


def measure(batch: int, rounds: int, child: subprocess.Popen) -> dict:
    """The figures of one batch; the first turn of each warms up and is not counted."""
    from llm.generate import continue_ids, open_decoder
    from llm.sampling import Sampling

    decoder, tokenizer = open_decoder(WORKDIR, batch)
    decoder.reserve(PROMPT + NEW)
    prompts, sampling = prompts_of(tokenizer, batch), Sampling(temperature=0, max_tokens=NEW)

    def ours():
        decoder.forget()
        began = time.perf_counter()
        ids = continue_ids(decoder, prompts, sampling, tokenizer.size)
        return time.perf_counter() - began, ids

    def theirs():
        child.stdin.write(json.dumps(prompts) + "\n")
        child.stdin.flush()
        return json.loads(child.stdout.readline())

    turns = []
    for turn in range(rounds + 1):
        turns.append((ours(), theirs()))
        seconds = [round(side[0], 2) for side in turns[-1]]
        print(f"batch {batch}, turn {turn} of {rounds}: {seconds[0]} s, transformers {seconds[1]} s", file=sys.stderr)
    turns = turns[1:]
    one, two = (statistics.median(turn[side][0] for turn in turns) for side in (0, 1))
    pairs = [a == b for x, y in zip(turns[0][0][1], turns[0][1][1]) for a, b in zip(x, y)]
    speed = dict(tokens_per_s=round(batch * NEW / one, 2), reference_tokens_per_s=round(batch * NEW / two, 2))
    return speed | dict(ratio=round(two / one, 3), same_tokens=sum(pairs) / len(pairs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--reference", help=argparse.SUPPRESS)  # the child: the folder of the model
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    if options.reference:
        reference(options.reference, options.threads)
        return 0
    if not REFERENCE.is_file():
        print(f"error: {REFERENCE} is missing: run make parity first", file=sys.stderr)
        return 2
    from llm.devices import request_devices
    from llm.workdir import load_config
    from parallel.errors import UserError

    try:
        folder = prepare()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    request_devices(load_config(WORKDIR))
    command = [str(REFERENCE), __file__, f"--reference={folder}", f"--threads={options.threads}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        batches = {batch: measure(int(batch), options.rounds, child) for batch in options.batches.split(",")}
        child.stdin.close()
    worst = min(batches, key=lambda batch: batches[batch]["ratio"])
    chosen = {key: batches[worst][key] for key in ("tokens_per_s", "reference_tokens_per_s", "ratio")}
    print(json.dumps(chosen | dict(batch=int(worst), threads=options.threads, batches=batches)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
