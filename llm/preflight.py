"""Checks of a job before anything of the model is compiled: what differs between processes, what is missing, what is slow."""

import collections
import importlib.metadata
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm.config import Config
from llm.data.corpus import corpus_identity
from llm.layout import auto_layout
from llm.run import CORPUS
from llm.workdir import CHECKPOINTS, digest, identity
from parallel import distributed
from parallel.distributed import Job
from parallel.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "tokenizers", "numpy")
GPU_PACKAGES = ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12")
CHECKPOINTS_THAT_FIT = 2  # a new one is complete before an old one is removed
SEEN_S = 10.0  # how long a shared file system may take to show a file to the others


def preflight(
    config: Config, workdir: str | Path, job: Job | None = None, limit: float = 120.0, changes: Sequence[tuple[str, str]] = ()
) -> dict[str, Any]:
    """{ok, checks: [{name, ok, detail}], axes: [{axis, bytes, gb_per_s}]}: the same in every process of the job.

    job: of this process, which has not joined it yet; limit: seconds to wait for the others. changes: what plan=auto must
    keep, from the command line. gb_per_s: bandwidth of the
    axis's collective, 10^9 bytes/s that each device sends. Raises ConnectionError when the processes do not meet."""
    workdir = Path(workdir)
    own = dict(versions=_versions(), code=_code_digest(), configuration=identity(config))
    own |= dict(data=_data(config, workdir), folder=_folder(workdir, job))
    if job:
        distributed.meet_others(job, limit, own)
    everyone = distributed.facts() or [dict(own, host=socket.gethostname())]
    checks = [_same(name, everyone) for name in ("versions", "code", "configuration", "data")]
    checks.append(_writable(everyone))
    axes: list[dict[str, Any]] = []
    if all(check["ok"] for check in checks[:3]):  # processes of other programs or configurations cannot work together
        if job:
            distributed.start_jax(job)
        if config.plan:
            import jax

            config, _ = auto_layout(config, jax.devices(), changes)
        checks.append(_devices(config, len(everyone)))
        if checks[-1]["ok"]:
            checks += _with_devices(config, workdir, everyone, axes)
    distributed.all_end_alike()
    return {"ok": all(check["ok"] for check in checks), "checks": checks, "axes": axes}


def table(document: dict[str, Any]) -> str:
    """The document for a reader."""
    width = max(len(check["name"]) for check in document["checks"])
    lines = [f"{'ok  ' if c['ok'] else 'FAIL'}  {c['name']:<{width}}  {c['detail']}" for c in document["checks"]]
    lines += [f"      {'axis':<10}{'bytes':>12}{'GB/s':>10}"] if document["axes"] else []
    lines += [f"      {a['axis']:<10}{a['bytes']:>12,}{a['gb_per_s']:>10.3g}" for a in document["axes"]]
    return "\n".join(lines)


def _check(name: str, problems: list[str], detail: str) -> dict[str, Any]:
    shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
    return {"name": name, "ok": not problems, "detail": shown or detail}


# --------------------------------------------------------------------------------------------------- what a process knows
def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES + GPU_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = Path("/proc/driver/nvidia/version")
    return found | ({"nvidia driver": driver.read_text().splitlines()[0]} if driver.is_file() else {})


def _code_digest() -> str:
    files = sorted(path for folder in ("llm", "parallel") for path in (ROOT / folder).rglob("*.py"))
    return digest([[str(path.relative_to(ROOT)), path.read_text()] for path in files])


def _data(config: Config, workdir: Path) -> str:
    try:
        return corpus_identity(config.data, config.model.vocab, workdir / CORPUS)
    except UserError as error:
        return f"error: {error}"


def _folder(workdir: Path, job: Job | None) -> dict[str, Any]:
    """Writes to the checkpoint folder; what process 0 leaves there shows the others that it is the same folder."""
    folder, name, problem = workdir / CHECKPOINTS, _probe(job.process if job else 0, job), None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / name, "w") as file:
            file.write(socket.gethostname())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = error.strerror or str(error)
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    return dict(problem=problem, free=shutil.disk_usage(there).free)


def _probe(process: int, job: Job | None) -> str:
    return f".preflight.{digest(job.address if job else '')[:8]}.{process}"


# --------------------------------------------------------------------------------------------------- what they have in common
def _same(name: str, everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether a fact is the same everywhere, and no error."""
    first = everyone[0][name]
    problems = []
    for process, fact in enumerate(everyone):
        value = fact[name]
        if isinstance(value, str) and value.startswith("error: "):
            problems.append(f"process {process} ({fact['host']}): {value.removeprefix('error: ')}")
        elif isinstance(value, dict) and value != first:
            other = [f"{key} {value.get(key)}" for key in {**first, **value} if value.get(key) != first.get(key)]
            problems.append(f"process {process} ({fact['host']}) has {', '.join(other)}, unlike process 0")
        elif value != first:
            problems.append(f"process {process} ({fact['host']}) has {value} and process 0 has {first}")
    shown = ", ".join(f"{key} {value}" for key, value in first.items()) if isinstance(first, dict) else first
    return _check(name, problems, shown if len(everyone) == 1 else f"{shown} in all {len(everyone)} processes")


def _writable(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    problems = [
        f"process {i} ({fact['host']}) cannot write: {fact['folder']['problem']}"
        for i, fact in enumerate(everyone)
        if fact["folder"]["problem"]
    ]
    return _check("folder", problems, "the checkpoint folder can be written")


def _devices(config: Config, processes: int) -> dict[str, Any]:
    """Whether every process has as many devices as the others, and all of them as many as the mesh."""
    import jax

    counts = collections.Counter(device.process_index for device in jax.devices())
    usual = counts.most_common(1)[0][1]
    problems = [f"process {i} has {counts[i]} devices and most have {usual}" for i in range(processes) if counts[i] != usual]
    try:
        config.validate(len(jax.devices()))
    except UserError as error:
        problems.append(str(error))
    kinds = sorted({device.device_kind for device in jax.devices()})
    if len(kinds) > 1:
        problems.append(f"the devices are of different kinds: {', '.join(kinds)}")
    return _check("devices", problems, f"{len(jax.devices())} {kinds[0]}, {usual} in each of {processes} processes")


# --------------------------------------------------------------------------------------------------- with devices
def _with_devices(config: Config, workdir: Path, everyone: list[dict[str, Any]], axes: list[dict[str, Any]]) -> list[dict]:
    """The checks that need devices; fills `axes`."""
    import jax

    from llm.step import build
    from parallel import links

    program = build(config.validate(len(jax.devices())))
    checks = [_shared(workdir, everyone)] if distributed.count() > 1 else []
    if distributed.is_first():
        for path in (workdir / CHECKPOINTS).glob(".preflight.*"):
            path.unlink(missing_ok=True)
    checks.append(_space(program, everyone))
    for axis, size in program.mesh.shape.items():
        if size == 1:
            continue
        found = links.measure(program.mesh, axis)
        axes.append({"axis": axis, "bytes": found.bytes, "gb_per_s": found.gb_per_s})
        rates = f"{found.gb_per_s:.3g} GB/s by {found.collective} of {found.bytes:,} bytes over {size} devices"
        checks.append(_check(f"axis {axis}", found.slow, rates))
    return checks


def _shared(workdir: Path, everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether every process sees what the others have written."""
    deadline = time.monotonic() + SEEN_S
    wanted = {str(process) for process in range(len(everyone))}
    look = lambda: wanted - {path.name.rpartition(".")[2] for path in (workdir / CHECKPOINTS).glob(".preflight.*")}
    while look() and time.monotonic() < deadline:
        time.sleep(0.2)
    unseen = distributed.gather(len(look()))
    problems = [
        f"process {i} ({everyone[i]['host']}) does not see what {count} others write there"
        for i, count in enumerate(unseen)
        if count
    ]
    return _check("shared folder", problems, "all processes see the same checkpoint folder")


def _space(program: Any, everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether the checkpoint folder has room."""
    import jax

    stored, abstract = jax.tree.leaves(program.stored()), jax.tree.leaves(program.abstract_state())
    size = sum(math.prod(form.shape) * leaf.dtype.itemsize for form, leaf in zip(stored, abstract))
    free = min(fact["folder"]["free"] for fact in everyone)
    gib = lambda number: f"{number / 2**30:,.3g} GiB"
    need = CHECKPOINTS_THAT_FIT * size
    problem = (
        f"{CHECKPOINTS_THAT_FIT} checkpoints need {gib(need)} and {gib(free)} are free: make room, or use another --workdir"
    )
    return _check("space", [problem] if free < need else [], f"{gib(free)} free for checkpoints of {gib(size)}")
