"""What can be done with the checkpoints of a run without its mesh: list, verify, look into, compare, copy, prune."""

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from llm.arrays import Saved
from llm.checkpoint import DAMAGED, STATE, UNFINISHED, Checkpoints, kept, open_step
from llm.config import TOKENIZER
from llm.run import pick_step
from llm.workdir import CHECKPOINTS, CONFIG, MODEL, check_resume, load_config, locked, step_folders
from parallel.errors import CheckError, UserError

Document = dict[str, Any]
KEPT_FILES = (CONFIG, TOKENIZER)  # of a run, without which a checkpoint is of no use
KEPT_FOLDERS = ("huggingface",)  # what came with an imported model


def list_checkpoints(workdir: str | Path, verify: bool = False) -> Document:
    """Every checkpoint: {ok, checkpoints: [{step, folder, state, size_bytes, saved_unix_s, loss, eval_loss, detail}]}.

    state: complete, damaged, unreadable (a newer version's, or the system refuses), unfinished, set aside. Without
    verify, damage is looked for in the manifests and the sizes of the files, with it in every byte. ok: no step is
    damaged or unreadable. Raises UserError."""
    load_config(workdir)
    folder = Path(workdir) / CHECKPOINTS
    lines = [_line(folder, step, verify) for step in step_folders(folder)]
    for ending, state in ((UNFINISHED, "unfinished"), (DAMAGED, "set aside")):
        for path in sorted(folder.glob(f"*{ending}*")):
            number = path.name.partition(".")[0]
            if number.isdecimal() and path.is_dir():
                lines.append(dict(_unknown(int(number), path), state=state))
    bad = [line for line in lines if line["state"] in ("damaged", "unreadable")]
    return {"ok": not bad, "checkpoints": sorted(lines, key=lambda line: line["step"])}


def _unknown(step: int, path: Path) -> Document:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    facts = dict(step=step, folder=path.name, state="", size_bytes=size, saved_unix_s=path.stat().st_mtime)
    return facts | dict(loss=None, eval_loss=None, detail="")


def _line(folder: Path, step: int, verify: bool) -> Document:
    line = _unknown(step, folder / str(step))
    try:
        saved = open_step(folder, step)
        line |= {name: saved.meta.get(name) for name in ("loss", "eval_loss")}
        damage = saved.damage() if verify else [problem for problem in [saved.problem()] if problem]
    except CheckError as error:
        damage = [str(error)]
    except (UserError, OSError) as error:
        return line | dict(state="unreadable", detail=str(error))
    return line | dict(state="damaged" if damage else "complete", detail="; ".join(damage))


def show_tree(workdir: str | Path, step: int | None = None) -> Document:
    """The arrays of a step: {step, position, layout, numbers, arrays: [{name, shape, dtype, norm, largest, not_finite}]}.

    norm: the square root of the sum of squares; largest: of the absolute values; both of the finite numbers only, and
    not_finite counts the others. position: the data position, the number of the next batch. Raises UserError, CheckError."""
    step, saved = _open(workdir, step)
    arrays = []
    for name, info in saved.infos.items():
        squares, largest, odd = 0.0, 0.0, 0
        for _, block in saved.blocks(name):
            values = np.abs(np.asarray(block, np.float64)).ravel()
            finite = values[np.isfinite(values)]
            squares, odd = squares + float(finite @ finite), odd + values.size - finite.size
            largest = max(largest, float(finite.max(initial=0.0)))
        facts = dict(name=name, shape=list(info.shape), dtype=info.dtype, norm=math.sqrt(squares), largest=largest)
        arrays.append(facts | dict(not_finite=odd))
    numbers = sum(math.prod(info.shape) for info in saved.infos.values())
    config = saved.meta.get("config") or {}
    layout = {axis: size for axis, size in config.get("mesh", {}).items() if size != 1}
    return dict(step=step, position=saved.meta.get("position", step), layout=layout, numbers=numbers, arrays=arrays)


def compare(workdir: str | Path, steps: str) -> Document:
    """What differs between two steps "A:B": {steps, only, config, arrays: [{name, relative, largest}]}.

    relative: the norm of the difference over the norm in A; largest: the largest difference. config: {name: [in A, in B]}.
    only: {step: arrays that the other one does not have, or has in another shape}. Raises UserError, CheckError."""
    first, colon, second = steps.partition(":")
    if not (colon and first.isdecimal() and second.isdecimal()):
        raise UserError(f"--diff={steps}: expected two steps A:B")
    (a, before), (b, now) = (_open(workdir, int(step)) for step in (first, second))
    both = [name for name, info in before.infos.items() if name in now.infos and now.infos[name].shape == info.shape]
    arrays = []
    for name in both:
        norm, difference, largest = 0.0, 0.0, 0.0
        for (_, old), (_, new) in zip(before.blocks(name), now.blocks(name)):
            old, new = (np.asarray(block, np.float64).ravel() for block in (old, new))
            change = new - old
            norm, difference = norm + float(old @ old), difference + float(change @ change)
            largest = max(largest, float(np.abs(change).max(initial=0.0)))
        relative = math.sqrt(difference / norm) if norm else (math.inf if difference else 0.0)
        arrays.append(dict(name=name, relative=relative, largest=largest))
    only = {str(step): [name for name in saved.infos if name not in both] for step, saved in ((a, before), (b, now))}
    return dict(steps=[a, b], only=only, config=_changes(before.meta, now.meta), arrays=arrays)


def _changes(before: Document, now: Document) -> Document:
    flat = lambda tree, prefix="": {
        key: value
        for name, inner in (tree or {}).items()
        for key, value in (flat(inner, f"{prefix}{name}.") if isinstance(inner, dict) else {prefix + name: inner}).items()
    }
    old, new = flat(before.get("config")), flat(now.get("config"))
    return {name: [old.get(name), new.get(name)] for name in {**old, **new} if old.get(name) != new.get(name)}


def copy(workdir: str | Path, destination: str | Path, step: int | None = None) -> Document:
    """Copy a step, with the run's configuration and tokenizer, to another run's folder: {step, size_bytes, destination}.

    The copy is verified before it gets its name. Raises UserError when it is there already or the folder is that of another
    model, CheckError when the step is damaged, OSError."""
    step, saved = _open(workdir, step)
    source, folder = Path(workdir) / CHECKPOINTS / str(step), Path(destination) / CHECKPOINTS
    if Path(destination).exists() and Path(destination).samefile(workdir):
        raise UserError(f"--copy={destination} is the run's own folder: name another one")
    with locked(destination):
        if (folder / str(step)).exists():
            raise UserError(f"--copy={destination} has a checkpoint of step {step} already")
        if (Path(destination) / CONFIG).is_file():
            check_resume(destination, load_config(workdir), MODEL)
        part = folder / f"{step}{UNFINISHED}"
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(source, part)
        if damage := Saved.open(part / STATE, saved.title).damage():
            shutil.rmtree(part)
            raise CheckError(f"{saved.title} was not copied: {damage[0]}")
        for name in KEPT_FILES:
            if (Path(workdir) / name).is_file() and not (Path(destination) / name).exists():
                shutil.copyfile(Path(workdir) / name, Path(destination) / name)
        for name in KEPT_FOLDERS:
            if (Path(workdir) / name).is_dir():
                shutil.copytree(Path(workdir) / name, Path(destination) / name, dirs_exist_ok=True)
        part.rename(folder / str(step))
    return dict(step=step, size_bytes=saved.bytes, destination=str(destination))


def prune(workdir: str | Path, keep: int = -1, best: int = -1) -> Document:
    """Delete all but the newest `keep` and the `best` best steps (-1: as the run's configuration says), and what is
    unfinished or set aside: {kept, deleted, freed_bytes}. Raises UserError, also when the run is being trained."""
    config = load_config(workdir).checkpoint
    keep, best = config.keep if keep == -1 else keep, config.best if best == -1 else best
    if keep < 1 or best < 0:
        raise UserError(f"--keep={keep} --best={best}: at least the newest checkpoint stays")
    with locked(workdir):
        before = list_checkpoints(workdir)["checkpoints"]
        folder = Path(workdir) / CHECKPOINTS
        checkpoints = Checkpoints(folder, keep, best, config.metric)
        steps = checkpoints.steps()
        checkpoints.latest()  # refuses when something newer cannot be read
        staying = kept({step: checkpoints.meta(step).get(config.metric) for step in steps}, keep, best)
        for step in set(steps) - staying:
            checkpoints.delete(step)
        for line in before:
            if line["state"] in ("unfinished", "set aside"):
                shutil.rmtree(folder / line["folder"])
    gone = [line for line in before if not (folder / line["folder"]).exists()]
    freed = sum(line["size_bytes"] for line in gone)
    return dict(kept=sorted(staying), deleted=[line["folder"] for line in gone], freed_bytes=freed)


def _open(workdir: str | Path, step: int | None) -> tuple[int, Saved]:
    load_config(workdir)
    folder = Path(workdir) / CHECKPOINTS
    step = pick_step(Checkpoints(folder, 1), Path(workdir), step)
    return step, open_step(folder, step)


# ------------------------------------------------------------------------------------------- for a reader
def command(options: Any) -> tuple[Any, str, int]:
    """The command: (document, text, exit code)."""
    asked = [name for name in ("verify", "tree", "diff", "copy", "prune") if getattr(options, name)]
    if len(asked) > 1:
        raise UserError(f"--{asked[0]} and --{asked[1]} are two things to do: ask for one at a time")
    if (options.keep, options.best) != (-1, -1) and not options.prune:
        raise UserError("--keep=N and --best=N are of --prune")
    if options.prune:
        result = prune(options.workdir, options.keep, options.best)
        text = f"kept {_numbers(result['kept'])}; deleted {_numbers(result['deleted'])}, {_size(result['freed_bytes'])}"
        return result, text, 0
    if options.copy:
        result = copy(options.workdir, options.copy, options.step)
        return result, f"step {result['step']} ({_size(result['size_bytes'])}) is in {options.copy} and verified", 0
    if options.diff:
        result = compare(options.workdir, options.diff)
        return result, _diff_table(result), 0
    if options.tree:
        result = show_tree(options.workdir, options.step)
        return result, _tree(result), 0
    result = list_checkpoints(options.workdir, options.verify)
    return result, _list_table(result, options.verify), CheckError.code if options.verify and not result["ok"] else 0


def _numbers(values: list) -> str:
    return ", ".join(map(str, values)) or "nothing"


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1024
    return ""


def _list_table(result: Document, verified: bool) -> str:
    if not result["checkpoints"]:
        return "no checkpoint yet"
    number = lambda value: "" if value is None else f"{value:.4f}"
    rows = [("step", "size", "saved", "loss", "held-out loss", "state")]
    for line in result["checkpoints"]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line["saved_unix_s"]))
        state = "verified" if verified and line["state"] == "complete" else line["state"]
        state += f": {line['detail']}" if line["detail"] else ""
        rows.append(
            (str(line["step"]), _size(line["size_bytes"]), when, number(line["loss"]), number(line["eval_loss"]), state)
        )
    return _columns(rows, "rr rr ")


def _tree(result: Document) -> str:
    rows, above = [("array", "shape", "type", "norm", "largest")], []
    for line in result["arrays"]:
        *folders, name = line["name"].split("/")
        same = next((i for i, (old, new) in enumerate(zip(above, folders)) if old != new), min(len(above), len(folders)))
        rows += [("  " * i + folder, "", "", "", "") for i, folder in enumerate(folders) if i >= same]
        odd = f" {line['not_finite']} not finite" if line["not_finite"] else ""
        shape = " x ".join(map(str, line["shape"])) or "number"
        rows.append(("  " * len(folders) + name, shape, line["dtype"], f"{line['norm']:.6g}", f"{line['largest']:.6g}{odd}"))
        above = folders
    layout = " x ".join(f"{axis} {size}" for axis, size in result["layout"].items()) or "1 device"
    head = f"step {result['step']}, saved by {layout}, next batch {result['position']}, {result['numbers']:,} numbers"
    return f"{head}\n{_columns(rows, '   rr')}"


def _diff_table(result: Document) -> str:
    rows = [("array", "relative", "largest")]
    rows += [(line["name"], f"{line['relative']:.3e}", f"{line['largest']:.3e}") for line in result["arrays"]]
    lines = [f"config {name}: {json.dumps(a)} -> {json.dumps(b)}" for name, (a, b) in result["config"].items()]
    lines += [f"only in step {step}: {', '.join(names)}" for step, names in result["only"].items() if names]
    return "\n".join([*lines, _columns(rows, " rr")])


def _columns(rows: list[tuple[str, ...]], sides: str) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    put = lambda cell, width, side: cell.rjust(width) if side == "r" else cell.ljust(width)
    return "\n".join("  ".join(map(put, row, widths, sides)).rstrip() for row in rows)
