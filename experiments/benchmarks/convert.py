"""Peak memory and time of importing and exporting a model of many shards, on a sparse file of zeros.

    python experiments/benchmarks/convert.py [--layers=24]

Prints one JSON line: gigabytes of the source (bfloat16), largest tensor (MB, in the fp32 that it is stored in), peak_mb of
each direction above the bare process, seconds. Needs ten times the layers / 24 x 1 GB of disk and no accelerator."""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
SHAPE = dict(hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, intermediate_size=8192, vocab_size=64000)


def write_sparse(folder: Path, layers: int) -> int:
    """A Llama of zeros in one shard for each layer; returns its bytes."""
    from llm.families import family_of

    config = dict(model_type="llama", num_hidden_layers=layers, torch_dtype="bfloat16", tie_word_embeddings=False, **SHAPE)
    (folder / "config.json").write_text(json.dumps(config))
    family = family_of("llama")
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor in family.tensors(family.read(config)):
        shards.setdefault(f"model-{tensor.layer}.safetensors", {})[tensor.name] = tensor.shape
    total = 0
    for file, shapes in shards.items():
        header, offset = {}, 0
        for name, shape in shapes.items():
            end = offset + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + offset)
        total += offset
    where = {name: file for file, shapes in shards.items() for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return total


def measure(direction: str, source: str, target: str) -> None:
    """Run one direction in this process and print its figures."""
    from llm.huggingface import export_model, import_model

    resident = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    bare, began = resident(), time.perf_counter()
    (import_model if direction == "import" else export_model)(source, target)
    print(json.dumps({"peak_mb": round(resident() - bare), "seconds": round(time.perf_counter() - began, 1)}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--measure", nargs=3)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        source, run, out = (Path(folder) / name for name in ("source", "run", "out"))
        source.mkdir()
        size = write_sparse(source, options.layers)
        figures = {"gigabytes": round(size / 1e9, 2), "largest_mb": 4 * SHAPE["vocab_size"] * SHAPE["hidden_size"] // 2**20}
        for direction, one, two in (("import", source, run), ("export", run, out)):
            command = [sys.executable, __file__, "--measure", direction, str(one), str(two)]
            result = subprocess.run(command, capture_output=True, text=True, check=True)
            figures[direction] = json.loads(result.stdout.splitlines()[-1])
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
