"""Measured runs that others published (parallel/data/published-runs.csv) as the planner's inputs.

Sources write freely. One alias table turns their words into ours, one table of defaults fills empty cells, and one parser
reads named options in `notes`. No digit in `notes` is read, and nothing of what was measured.
"""

from __future__ import annotations

import csv
import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from llm.config import ModelConfig
from llm.costs import operators
from llm.families import PRESETS
from llm.mixtures import find_mixture
from parallel.cluster import CLUSTERS, Cluster, find_gpu
from parallel.errors import UserError
from parallel.operators import Operators
from parallel.planner import Layout

RUNS = Path(__file__).parents[1] / "parallel" / "data" / "published-runs.csv"
_COLUMNS = """
id suite source verified model family params_b layers hidden ffn heads kv_heads vocab seq experts topk framework gpu n_gpus
gpus_per_node inter_node precision gbs_seqs mbs tp pp vp cp ep dp dp_sharding schedule recompute step_time_s step_kind
tokens_per_s_per_gpu tflops_per_gpu flops_convention mfu_pct hfu_pct mem_gib notes
"""
COLUMNS = tuple(_COLUMNS.split())

# ------------------------------------------------------------------------------------------------- words of the sources
ALIASES: dict[str, tuple[tuple[str, str], ...]] = {
    # column: (pattern, our word); the first pattern found counts
    "framework": (
        (r"zero.?bubble", "zero-bubble"),
        (r"megascale|vescale", "megascale"),
        (r"megatron.?deepspeed", "megatron-deepspeed"),
        (r"deepspeed", "deepspeed-zero3"),
        (r"nemo/megatron|mlperf", "nemo-mlperf"),
        (r"nemo|bridge", "nemo"),
        (r"megatron|mcore", "megatron-core"),
        (r"meta", "meta"),
        (r"torchtitan|torchtune", "torchtitan"),
        (r"foundry|composer|mosaic", "llm-foundry"),
        (r"jax|xla|pax|maxtext|levanter", "xla"),
        (r"fsdp|pytorch", "torchtitan"),
    ),
    "precision": ((r"fp4|mxfp4", "fp4"), (r"fp8|float8|mxfp8", "fp8"), (r"bf16|fp16|bfloat|half|mixed|tf32", "bf16")),
    "recipe": ((r"row", "fp8-row"), (r"mx", "fp8-mx"), (r"", "fp8")),
    "schedule": (
        (r"zb-?2p|zb-?h2", "zb-2p"),
        (r"zb-?1p|zb-?h1", "zb-1p"),
        (r"zb-?v", "zb-v"),
        (r"dualpipe", "dualpipe-v"),
        (r"interleav|1f1b-i|vpp", "interleaved"),
        (r"gpipe|fill", "gpipe"),
        (r"1f1b|pipedream", "1f1b"),
    ),
    "recompute": (
        (r"per-?op", "half"),
        (r"^(none|no|off|false)\b", "none"),
        (r"full|uniform|block|complete", "full"),
        (r"minimal", "selective"),
        (r"selective|core", "selective"),
    ),
    "dp_sharding": ((r"zero-?3|fsdp|full", "3"), (r"zero-?2", "2"), (r"zero-?1|distributed", "1"), (r"none|ddp", "0")),
}

# -------------------------------------------------------------------------------------- what an empty cell stands for
DEFAULTS: tuple[tuple[str, str, str, str], ...] = (
    # framework ('*': any), column, value, source
    ("*", "vocab", "51200", "Megatron-LM: GPT-2's 50,257 entries padded to a multiple of 128 x tensor"),
    ("*", "mbs", "1", "every framework's example for models that need a pipeline"),
    ("*", "gpus_per_node", "8", "HGX and DGX; 4 for GB200 and GB300"),
    ("*", "cp", "1", "off unless named"),
    ("*", "tp", "1", "off unless named"),
    ("*", "pp", "1", "off unless named"),
    ("*", "recompute", "selective", "Megatron-LM README; with flash attention it computes nothing again"),
    ("*", "precision", "bf16", "mixed precision"),
    ("*", "dp_sharding", "0", "plain data parallelism"),
    ("*", "schedule", "1f1b", "Megatron-LM without --num-layers-per-virtual-pipeline-stage"),
    ("*", "vp", "layers 1", "single layers, as in the MLPerf and NeMo recipes, where the schedule is interleaved"),
    ("megatron-core", "dp_sharding", "1", "Megatron-LM README: --use-distributed-optimizer"),
    ("megatron-core", "tp pp", "readme", "Megatron-LM README, layouts of the weak-scaling table by model size"),
    ("megatron-core", "schedule", "interleaved", "Megatron-LM README: virtual pipeline in all runs with a pipeline"),
    ("nemo", "dp_sharding", "1", "NeMo recipes: distributed optimizer"),
    ("nemo", "schedule", "interleaved", "NeMo recipes: virtual pipeline"),
    ("nemo-mlperf", "dp_sharding", "1", "MLPerf training results: NeMo with a distributed optimizer"),
    ("nemo-mlperf", "schedule", "interleaved", "MLPerf training results: interleaved pipeline"),
    ("megascale", "dp_sharding", "1", "arXiv 2402.15627: ZeRO-2, communicated as a distributed optimizer"),
    ("megascale", "schedule", "interleaved", "arXiv 2402.15627, 3.2"),
    ("meta", "schedule", "interleaved", "arXiv 2407.21783, 3.3.2"),
    ("meta", "vp", "layers 1", "arXiv 2407.21783: a layer fewer at both ends to balance stages of single layers"),
    ("torchtitan", "dp_sharding", "3", "torchtitan: FSDP is the default"),
    ("torchtitan", "vp", "2", "torchtitan: two stages a rank in interleaved schedules"),
    ("torchtitan", "microbatches", "pp", "torchtitan: as many microbatches as pipeline stages"),
    ("zero-bubble", "vp", "layers 1", "arXiv 2401.10241: interleaved with one layer a chunk"),
    ("xla", "recompute", "half", "Paxml and MaxText save some matmuls"),
    ("xla", "dp_sharding", "3", "MaxText: fsdp is the default"),
)
README_LAYOUTS = ((2, 1, 1), (8, 2, 1), (17, 4, 1), (33, 8, 1), (75, 8, 2), (125, 8, 4), (200, 8, 6), (350, 8, 8), (1e9, 8, 16))
"""Megatron-LM README, H100 weak scaling: (up to so many 10^9 parameters, tensor, pipe)."""

CASTS = {"fp8-mx": 7.0, "fp8-row": 8.0, "fp4": 7.0}
"""Bytes moved to quantise an element by blocks or rows; 4 for one scale a tensor."""
OPTIONS = (
    # named options in `notes`: pattern, what it sets
    (r"async.?tp", ("tp_hidden", 0.75)),
    (r"tp comm overlap|tp-comm-overlap|userbuffers", ("tp_hidden", 0.75)),
    (r"vanilla.?tp", ("tp_hidden", 0.0)),
    (r"\bcompile", ("fused", True)),
    (r"\bcompile", ("logit_bytes", 14.0)),  # no copy of the gradient in another type
    (r"(?<!no )flash", ("flash", 2)),
    (r"sequence.?parallel", ("sequence_parallel", True)),
    (r"\blora\b|qlora|\bpeft\b", ("frozen", True)),
    (r"one layer (fewer|less)|one fewer layer", ("ends", 1)),
)


def named_options(notes: str) -> dict[str, float | bool | int]:
    """The options that `notes` names; digits are dropped before anything is read."""
    words = re.sub(r"\d", "", notes.lower())
    return {name: value for pattern, (name, value) in OPTIONS if re.search(pattern, words)}


def word(column: str, text: str) -> str:
    """Our word for a source's, '' when it is empty or names nothing known."""
    return next((ours for pattern, ours in ALIASES[column] if re.search(pattern, text.strip().lower())), "")


def default(framework: str, column: str) -> str:
    """The committed value of an empty cell."""
    for name in (framework, "*"):
        for owner, columns, value, _ in DEFAULTS:
            if owner == name and column in columns.split():
                return value
    return ""


# ------------------------------------------------------------------------------------------------------------- one run
@dataclass(frozen=True)
class Run:
    """A published run as the planner takes it. changes: of the framework's constants and facts, from named options."""

    id: str
    suite: str
    model: Operators
    length: int
    layout: Layout
    cluster: Cluster
    framework: str
    precision: str
    recipe: str
    changes: dict
    complete: bool
    key: str


def number(text: str) -> float | None:
    """A cell as a number, None when it is none."""
    try:
        value = float(text.strip().replace(",", ""))
    except (ValueError, AttributeError):
        return None
    return value if value == value and abs(value) != float("inf") else None


def read(path: str | Path) -> list[dict[str, str]]:
    """The rows of a CSV with the columns of README; missing columns are empty. Raises UserError."""
    if not Path(path).is_file():
        raise UserError(f"{path}: there is no such file")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            if not reader.fieldnames or "n_gpus" not in reader.fieldnames:
                raise UserError(
                    f"{path}: expected a CSV with the columns of parallel/data/README.md in its header, such as n_gpus"
                )
            return [{c: (row.get(c) or "").strip() for c in COLUMNS} for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a CSV in UTF-8 ({error})") from error


def is_dense(row: dict[str, str]) -> bool:
    """Whether the row is a dense model."""
    return row["family"].lower() in ("dense", "") and not (number(row["experts"]) or 0) > 1


def measured(row: dict[str, str]) -> float | None:
    """The step time, None when it is not there."""
    value = number(row["step_time_s"])
    return value if value and value > 0 else None


def parse(row: dict[str, str]) -> Run:
    """A row as the planner's input. Raises UserError with the reason when a shape or the GPU is missing."""
    count = lambda name: max(0, int(number(row[name]) or 0))
    gpu = find_gpu(row["gpu"])
    framework = word("framework", row["framework"]) or "other"
    if framework == "megatron-core" and gpu.name.startswith(("A100", "V100")):
        framework = "megatron-2021"
    words = row["precision"].lower()
    precision = word("precision", words) or default(framework, "precision")
    if framework == "megatron-deepspeed" and "bf" in words:
        framework = "megatron-deepspeed-bf16"
    if precision not in gpu.peak:
        raise UserError(f"{gpu.name} has no {precision}")
    options = named_options(row["notes"] + " ; " + row["schedule"])
    n_gpus = count("n_gpus")
    if not n_gpus:
        raise UserError("the number of GPUs (n_gpus) is missing")

    tp, pp, cp = count("tp"), count("pp"), count("cp") or 1
    if not tp and not pp and default(framework, "tp") == "readme" and number(row["params_b"]):
        tp, pp = next((t, p) for size, t, p in README_LAYOUTS if number(row["params_b"]) <= size)
    tp, pp = tp or 1, pp or 1
    dp = n_gpus // (tp * pp * cp) or 1
    model, length = _model(row, pp)
    if pp > model.layers:
        raise UserError(f"{pp} pipeline stages and {model.layers} layers: a stage would be empty")

    zero = int(word("dp_sharding", row["dp_sharding"]) or default(framework, "dp_sharding"))
    remat = word("recompute", row["recompute"]) or default(framework, "recompute")
    if framework == "torchtitan" and remat == "selective":
        remat = "half"  # torchtitan's selective computes every other layer or matmul again
    chunks = _chunks(row, framework, model.layers, pp, options.get("ends", 0))
    schedule = word("schedule", row["schedule"])
    if not schedule or (schedule == "1f1b" and chunks > 1 and not row["schedule"]):
        schedule = default(framework, "schedule") if not count("vp") else "interleaved" if count("vp") > 1 else "1f1b"
    if pp == 1:
        schedule, chunks = "1f1b", 1
    elif schedule == "interleaved":
        schedule, chunks = ("interleaved", chunks) if chunks > 1 else ("1f1b", 1)
    else:
        chunks = 1

    batch = number(row["gbs_seqs"])
    if not batch or batch < 1:
        raise UserError("the global batch (gbs_seqs) is missing")
    rows = max(0.0, number(row["mbs"]) or 0.0)
    share = batch / dp
    if not rows and pp > 1 and default(framework, "microbatches") == "pp":
        rows = max(1.0, share / pp)
    rows = max(1, min(round(rows or int(default(framework, "mbs"))), round(share) or 1))
    microbatches = max(1, round(share / rows))
    if pp > 1 and chunks > 1 and pp * chunks > model.layers + 2 * options.get("ends", 0):
        chunks = max(1, model.layers // pp)
    layout = Layout(tp, pp, dp, cp, rows, microbatches, chunks, schedule, zero, remat, options.get("ends", 0) if pp > 1 else 0)
    experts = count("ep") or 1
    if model.experts:
        most = max(1, min(model.experts.count, tp * dp))
        layout = dataclasses.replace(layout, expert=max(e for e in range(1, min(experts, most) + 1) if most % e == 0))
    complete = all(row[c] for c in ("layers", "hidden", "heads", "seq", "gbs_seqs", "mbs", "tp", "pp", "vp", "recompute"))
    complete = complete and (bool(row["schedule"]) or pp == 1)
    recipe = word("recipe", words) if precision == "fp8" else precision
    changes = {k: v for k, v in options.items() if k != "ends"}
    if framework == "megatron-2021" and remat == "selective":
        changes["sequence_parallel"] = True  # both came with arXiv 2205.05198
    if changes.get("flash") and not gpu.name.startswith(("A100", "A800", "V100")):
        changes.pop("flash")  # every framework on a newer GPU has it already
    if recipe in CASTS:
        changes["casts"] = CASTS[recipe]
    if framework == "torchtitan" and "fused" not in changes:
        changes["fused"] = "async" in row["notes"].lower() or "tp" in row["notes"].lower()  # the TP tables are all compiled
    cluster = _cluster(row, gpu, framework)
    return Run(
        row["id"], row["suite"], model, length, layout, cluster, framework, precision, recipe, changes, complete, _key(row)
    )


def _key(row: dict[str, str]) -> str:
    """What the constant-efficiency baseline has one constant for: GPU type and precision, mixtures of experts apart."""
    return f"{row['gpu'].lower()}|{row['precision'].lower()}|{'dense' if is_dense(row) else 'experts'}"


def _model(row: dict[str, str], pipe: int) -> tuple[Operators, int]:
    """The operator table and the sequence length; a preset or the parameter count fills what is missing."""
    shape = {c: max(0, int(number(row[c]) or 0)) for c in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq")}
    name = row["model"].lower()
    if not is_dense(row):  # the columns lack an expert's width and the layers without experts
        if (found := find_mixture(name)) is None:
            raise UserError(f"a mixture of experts, and no preset is called {row['model']!r}")
        if not shape["seq"]:
            raise UserError("no sequence length is given")
        known, mixture = found
        layers = shape["layers"] or known.layers
        dense = round(mixture.dense * layers / known.layers) or min(1, mixture.dense)  # a cut model keeps its proportions
        known, mixture = dataclasses.replace(known, layers=layers), dataclasses.replace(mixture, dense=min(dense, layers - 1))
        return operators(known, row["model"], mixture), shape["seq"]
    plain = re.sub(r"[^a-z0-9.]", "", name)
    preset = next((m for key, (m, _) in PRESETS.items() if re.sub(r"[^a-z0-9.]", "", key) == plain), None)
    if preset is not None:
        p = preset.resolved()
        known = (p.layers, p.width, p.ffn, p.heads, p.kv_heads, p.vocab)
        for column, value in zip(("layers", "hidden", "ffn", "heads", "kv_heads", "vocab"), known):
            shape[column] = shape[column] or value
    h = shape["hidden"]
    if not h or not shape["seq"]:
        raise UserError(
            f"no {'hidden size' if not h else 'sequence length'} is given, and no preset is called {row['model']!r}"
        )
    vocab = shape["vocab"] or int(default("*", "vocab"))
    gated = bool(re.search(r"llama|mistral|qwen|gemma|olmo|deepseek|yi-|baichuan|internlm|phi-3|grok|nemotron-?h", name))
    ffn = shape["ffn"] or (-(-8 * h // 24) * 8 if gated else 4 * h)
    heads = shape["heads"] or max(1, h // 128)
    kv = shape["kv_heads"] or heads
    head_dim = max(1, h // heads)
    if not shape["layers"]:
        size = number(row["params_b"])
        if not size or size <= 0:
            raise UserError("neither the number of layers nor that of parameters is given")
        layer = 2 * h * head_dim * (heads + kv) + (3 if gated else 2) * h * ffn
        layers = (size * 1e9 - vocab * h) / layer
        shape["layers"] = max(pipe, round(layers / pipe) * pipe)
    config = ModelConfig(
        layers=shape["layers"],
        width=h,
        heads=heads,
        kv_heads=kv,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        tied=not gated,
        dropout=0.0 if gated or "mpt" in name else 0.1,
        norm="rms" if gated else "layer",
        mlp="swiglu" if gated else "gelu",
        bias=not gated and "mpt" not in name,
        positions="rotary" if gated else "learned",
        max_length=shape["seq"],
    )
    return operators(config, row["model"]), shape["seq"]


def _chunks(row: dict[str, str], framework: str, layers: int, pipe: int, ends: int) -> int:
    """Chunks a rank: as given, or as many as leave the default number of layers in each."""
    value = int(number(row["vp"]) or 0)
    if value > 0:
        return value
    words = row["vp"].lower()
    rule = default(framework, "vp")
    if "layer" in words or "max" in words:
        rule = "layers 1"
    if rule.startswith("layers"):
        per_rank = max(1, (layers + 2 * ends) // pipe)
        wanted = max(1, per_rank // int(rule.split()[1]))
        return max(v for v in range(1, wanted + 1) if per_rank % v == 0)
    return int(rule or 1)


def _cluster(row: dict[str, str], gpu, framework: str) -> Cluster:
    """The node that a row describes: GPUs, NVLink domain, and network as `inter_node` says."""
    usual = next((c for c in CLUSTERS.values() if c.gpu.name == gpu.name), CLUSTERS["dgx-h100"])
    per_node = max(0, int(number(row["gpus_per_node"]) or 0)) or usual.gpus_per_node
    domain = 72 if gpu.name.startswith("GB") else per_node
    text, nic, share = row["inter_node"].lower(), usual.nic_gbs * per_node / usual.gpus_per_node, 0.92
    links = re.search(r"(\d+)\s*x\D{0,20}?(\d+)\s*gb/s", text)
    total = re.search(r"(\d+)\s*gb/s", text)
    if links:
        each = int(links[2])
        each = 200 if "hdr" in text else 400 if "ndr" in text else 100 if "edr" in text else each
        nic = int(links[1]) * each / 8
    elif total:
        nic = int(total[1]) / 8
    if "omni-path" in text or "ethernet" in text or "efa" in text:
        share = 0.7
    elif "roce" in text or "oversubscri" in text:
        share = 0.8
    return Cluster(usual.name, gpu, per_node, domain, nic, share, usual.latency_us, usual.nvme_gbs, row["inter_node"])
