"""The plan command: which layout and schedule should run a model on a cluster, and what that will cost."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm import costs, overrides
from llm.config import Config
from llm.fields import check_fields
from llm.layout import fixed_fields, label, own_layout, possible, why
from llm.mixtures import parse_mixture
from llm.published import CASTS
from parallel import frameworks, layouts, reliability
from parallel.cluster import Cluster, find_cluster
from parallel.errors import FitError, UserError
from parallel.planner import Estimate, estimate

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


PRECISIONS = {
    "bf16": ("bf16", "bf16"),
    "fp8": ("fp8", "fp8"),
    "mxfp8": ("fp8", "fp8-mx"),
    "nvfp4": ("fp4", "fp4"),
    "fp4": ("fp4", "fp4"),
}
"""Name of a number format: (whose rate, which recipe)."""


def count(text: str, name: str) -> int:
    """A count such as 4M or 15T: K, M, B, T are 10^3, 10^6, 10^9, 10^12. Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMBT]?)", text.strip().replace(",", ""), re.IGNORECASE)
    if not match or not float(match[1]):
        raise UserError(f"--{name}={text}: expected a count such as 512, 4M or 15T (K, M, B, T are 10^3, 10^6, 10^9, 10^12)")
    return round(float(match[1]) * UNITS[match[2].upper()])


def plan(
    config: Config,
    cluster: str | Cluster,
    gpus: int,
    batch_tokens: int = 0,
    changes: Sequence[tuple[str, str]] = (),
    tokens: int = 0,
    watts: float = 0.0,
    shown: int = layouts.SHOWN,
    framework: str = "convoy",
    precision: str = "bf16",
    microbatch_rows: int = 0,
    moe: str = "",
) -> tuple[dict, str, int]:
    """Rank the layouts of a model on a cluster: (document, text, exit code).

    batch_tokens: tokens of a step, rounded to whole rows; 0: the configuration's rows. changes: options given on the command
    line; of these, fields of the layout are kept. framework: whose speed is predicted; only this trainer's own checks layouts.
    precision: of the matmuls, one of PRECISIONS. microbatch_rows: rows of a microbatch; 0: searched.
    tokens: of the whole run, for days and goodput. Exit code 3: nothing fits.
    """
    machine = find_cluster(cluster) if isinstance(cluster, str) else cluster
    if gpus < 1:
        raise UserError(f"--gpus={gpus}: at least one GPU")
    if microbatch_rows < 0:
        raise UserError(f"--microbatch_rows={microbatch_rows}: at least 1, or 0 to search")
    ours = framework == "convoy"
    if ours and (config.mesh.context != 1 or config.mesh.expert != 1):
        config.validate()  # says what is not possible yet
    if ours and moe:
        raise UserError("--moe: this trainer has no experts; cost another framework's with --framework, such as nemo")
    length = config.batch.length
    rows = max(1, round(batch_tokens / length)) if batch_tokens else config.batch.rows
    notes = []
    if batch_tokens and rows * length != batch_tokens:
        notes.append(f"{batch_tokens:,} tokens are {batch_tokens / length:.1f} rows of {length:,}: rounded to {rows}")
    fixed = fixed_fields(config, changes, ours) | ({"rows": microbatch_rows} if microbatch_rows else {})
    shape, mixture = parse_mixture(moe, config.model) if moe else (config.model, None)
    model = costs.operators(shape, mixture=mixture)
    if framework not in frameworks.FRAMEWORKS:
        raise UserError(f"--framework={framework}: known are {', '.join(frameworks.FRAMEWORKS)}")
    if precision not in PRECISIONS:
        raise UserError(f"--precision={precision}: there are {', '.join(PRECISIONS)}")
    number, recipe = PRECISIONS[precision]
    machine.gpu.rate(number)  # says which there are
    if recipe == "fp8-mx" and "fp4" not in machine.gpu.peak:
        raise UserError(f"--precision=mxfp8: {machine.gpu.name} scales no blocks; from Blackwell on there is mxfp8, here fp8")
    if ours and precision != "bf16":
        raise UserError(f"--precision={precision}: this trainer computes in bf16; name another framework with --framework")
    speeds = frameworks.find(framework, machine.gpu.name, recipe)
    if recipe in CASTS:
        speeds = dataclasses.replace(speeds, casts=CASTS[recipe])
    found = layouts.search(
        model, length, rows, gpus, machine, speeds, number, fixed,
        lambda layout: not ours or possible(config, layout), exact=not batch_tokens, shown=shown,
    )  # fmt: skip
    document = dict(
        framework=framework,
        precision=precision,
        cluster=machine.name,
        gpu=machine.gpu.name,
        gpus=gpus,
        rows=rows,
        length=length,
        parameters=model.parameters,
        memory_limit_gib=round(machine.gpu.hbm_gib * layouts.SPARE, 1),
        looked_at=found.looked_at,
        notes=notes,
    )
    if not found.fits:
        near = found.nearest
        document |= dict(best=None, layouts=[], nearest=describe(near))
        text = "\n".join(notes) + (
            f"\nNothing fits {document['memory_limit_gib']} GiB of {machine.gpu.name}. The nearest layout needs "
            f"{near.peak_memory_gib:.1f} GiB: {label(near.layout)}. More GPUs, more remat or fewer tokens would help."
        )
        return document, text.strip(), FitError.code
    if found.fits[0].layout.rows * found.fits[0].layout.microbatches * found.fits[0].layout.data != rows:
        notes.append("a layout rounds the rows to what it divides (column rows); layouts are ranked by tokens per second")
    document |= dict(best=describe(found.fits[0]), layouts=[describe(e) for e in found.fits])
    document["why"] = why(found.fits)
    if tokens:
        document["run"] = whole_run(found.fits[0], machine, model.parameters, tokens, watts)
    return document, render(document, machine), 0


def cost(config: Config, cluster: str | Cluster, framework: str = "convoy", precision: str = "bf16") -> Estimate:
    """The estimate of a configuration's own layout, nothing searched."""
    machine = find_cluster(cluster) if isinstance(cluster, str) else cluster
    speeds = frameworks.find(framework, machine.gpu.name, precision)
    return estimate(costs.operators(config.model), config.batch.length, own_layout(config), machine, speeds, precision)


def command(options: Any) -> tuple[dict, str, int]:
    """The plan command: flags in, (document, text, exit code) out."""
    if not options.config:
        raise UserError("plan needs --config=FILE, for example --config=experiments/configs/llama3_70b.py")
    config = overrides.apply(overrides.load(options.config), options.changes)
    check_fields(config)
    optional = lambda name: count(getattr(options, name), name) if getattr(options, name) else 0
    machine = find_cluster(options.cluster)
    if options.calibration:
        machine = calibrated(machine, options.calibration)
    rest = dict(batch_tokens=optional("batch_tokens"), changes=options.changes, tokens=optional("tokens"), watts=options.watts)
    rest |= dict(framework=options.framework, precision=options.precision, microbatch_rows=options.microbatch_rows)
    rest |= dict(moe=options.moe)
    document, text, code = plan(config, machine, count(options.gpus, "gpus"), **rest)
    if options.sweep:
        document["sweep"] = sweep(config, machine, options.sweep, **rest)
        text += "\n\n" + render_sweep(document["sweep"])
    if options.html:
        from llm.plan_report import write

        write(options.html, document)
        text += f"\nwritten: {options.html}"
    return document, text, code


def sweep(config: Config, machine: Cluster, span: str, **rest: Any) -> list[dict]:
    """The best layout for A, 2A, 4A ... and B GPUs with the same batch. span: 'A:B'. Raises UserError."""
    first, colon, last = span.partition(":")
    if not colon:
        raise UserError(f"--sweep={span}: expected A:B, the first and last number of GPUs, such as 8:16384")
    gpus, stop, out = count(first, "sweep"), count(last, "sweep"), []
    while gpus <= stop:
        try:
            document, _, _ = plan(config, machine, gpus, **rest, shown=1)
            best, run = document["best"], document.get("run", {})
            reason = "" if best else f"nothing fits: {document['nearest']['peak_memory_gib']:.0f} GiB at least"
        except UserError as error:
            best, run, reason = None, {}, str(error)
        out.append(dict(gpus=gpus, best=best, days=run.get("days"), goodput=run.get("goodput"), reason=reason))
        gpus = min(2 * gpus, stop) if gpus < stop else 2 * gpus
    return out


def render_sweep(points: list[dict]) -> str:
    """A sweep as text."""
    lines = ["  GPUs  step s [90 %]                tokens/s  tok/s/GPU    MFU  data pipe tensor  bubble"]
    for point in points:
        best = point["best"]
        if not best:
            lines.append(f"{point['gpus']:6}  {point['reason'].partition(':')[0]}")
            continue
        mesh, speed = best["mesh"], best["tokens_per_s_per_gpu"]
        lines.append(
            f"{point['gpus']:6} {best['step_time_s']:7.3f} [{best['low_s']:.3f}, {best['high_s']:.3f}]".ljust(34)
            + f"{speed * point['gpus']:11,.0f} {speed:10,.0f} {100 * best['mfu']:6.1f} "
            f"{mesh['data']:5} {mesh['pipe']:4} {mesh['tensor']:6} {100 * best['bubble']:6.1f} %"
        )
    return "\n".join(lines)


def calibrated(machine: Cluster, file: str) -> Cluster:
    """The cluster with the shares of peak that `calibrate` measured on one of its devices. Raises UserError."""
    if not Path(file).is_file():
        raise UserError(f"--calibration={file}: there is no such file; python main.py calibrate writes one")
    try:
        measured = json.loads(Path(file).read_text())
        gpu = machine.gpu
        ceiling = dict(gpu.ceiling) | {
            k: min(1.0, v / gpu.peak[k]) for k, v in measured["matmul_tflops"].items() if k in gpu.peak
        }
        share = min(1.0, measured["copy_tbs"] / gpu.hbm_tbs)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--calibration={file}: not a file that calibrate wrote ({error})") from error
    return dataclasses.replace(machine, gpu=dataclasses.replace(gpu, ceiling=ceiling, hbm_share=share))


def whole_run(best: Estimate, machine: Cluster, parameters: int, tokens: int, watts: float = 0.0) -> dict:
    """Days, GPU-hours, energy, failures, checkpoints and goodput of training on so many tokens."""
    speed = best.tokens_per_s_per_gpu * best.layout.gpus
    state = 12.0 * parameters  # float32 weights and two moments
    power = watts or machine.gpu.watts * reliability.OVERHEAD
    return reliability.run_cost(
        tokens, speed, best.layout.gpus, machine.gpus_per_node, state, machine.nvme_gbs, machine.pcie_gbs, power
    )


def describe(e: Estimate) -> dict:
    """An estimate as a plain object."""
    l = e.layout
    expert = math.gcd(l.expert, l.data)  # what is left of an expert group lies in tensor
    return dict(
        mesh=dict(replica=1, data=l.data // expert, pipe=l.pipe, context=l.context, expert=expert, tensor=l.tensor),
        expert_group=l.expert,
        zero=l.zero,
        rows=l.rows * l.microbatches * l.data,
        microbatches=l.microbatches,
        rows_per_microbatch=l.rows,
        chunks=l.chunks,
        schedule=l.schedule,
        remat=l.remat,
        step_time_s=e.step_time_s,
        low_s=e.low_s,
        high_s=e.high_s,
        tokens_per_s_per_gpu=e.tokens_per_s_per_gpu,
        mfu=e.mfu,
        peak_memory_gib=e.peak_memory_gib,
        memory_per_rank_gib=list(e.memory_per_rank_gib),
        bubble=e.bubble,
        exposed_s=e.exposed_s,
        parts_s=e.parts,
        memory_parts_gib=[{k: round(v, 3) for k, v in rank.items()} for rank in e.memory_parts_gib],
    )


def render(document: dict, machine: Cluster) -> str:
    """The ranked layouts as text."""
    wide = any(d["mesh"]["context"] > 1 or d["expert_group"] > 1 for d in document["layouts"])
    head = (
        f"data pipe tensor {'ctx experts' if wide else ''} m x rows  v  schedule     remat      zero  step s [90 %]"
        "             tok/s/GPU   MFU   GiB   bubble "
        " exposed tensor, pipe, data" + (", context, experts" if wide else "")
    )
    lines = [
        f"{document['parameters'] / 1e9:.2f} B parameters on {document['gpus']} {document['gpu']} ({machine.name}), "
        f"{document['framework']} in {document['precision']}, "
        f"{document['rows']} rows of {document['length']}: {document['looked_at']} layouts looked at",
        *document["notes"],
        "",
        head,
    ]
    for d in document["layouts"]:
        mesh, x = d["mesh"], d["exposed_s"]
        lines.append(
            f"{mesh['data'] * mesh['expert']:4} {mesh['pipe']:4} {mesh['tensor']:6} "
            + (f"{mesh['context']:3} {d['expert_group']:7}" if wide else "")
            + f" {d['microbatches']:3} x {d['rows_per_microbatch']:<4} "
            f"{d['chunks']:2}  {d['schedule']:12} {d['remat']:10} {d['zero']:4}  "
            f"{d['step_time_s']:6.3f} [{d['low_s']:.3f}, {d['high_s']:.3f}]".ljust(78)
            + f" {d['tokens_per_s_per_gpu']:8.0f} {100 * d['mfu']:5.1f} {d['peak_memory_gib']:5.1f} "
            f"  {100 * d['bubble']:5.1f} % "
            f" {x['tensor']:.3f}, {x['pipe']:.3f}, {x['data']:.3f} s"
            + (f", {x['context']:.3f}, {x['expert']:.3f} s" if wide else "")
        )
    lines += ["", f"The first wins. {document['why']}"]
    if "run" in document:
        r = document["run"]
        lines.append(
            f"{r['tokens'] / 1e12:.4g} T tokens: {r['days']:.1f} days, {r['gpu_hours']:,.0f} GPU-hours, "
            f"{r['energy_mwh']:,.0f} MWh at {r['watts_per_gpu']:.0f} W a GPU with its share of the node; "
            f"{r['failures']:.0f} failures expected, a checkpoint every {r['checkpoint_interval_s'] / 60:.0f} minutes, "
            f"goodput {100 * r['goodput']:.1f} %"
        )
    return "\n".join(lines)
