"""Checkpoints: saved in the background, committed whole or not at all, read into any layout or without one.

    <folder>/<step>/state/...   the arrays and the manifest of a step, see arrays.py

Orbax commits a step by renaming its folder and keeps the newest ones. Reading needs the files alone.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from llm.arrays import Info, Saved, check_form, open_array, reason, write_manifest, write_shards
from llm.workdir import step_folders
from parallel import distributed
from parallel.errors import CheckError, UserError
from parallel.sharding import Stored

STATE = "state"
UNFINISHED = ".orbax-checkpoint-tmp"  # ends the name of a step's folder until it is committed
DAMAGED = ".damaged"  # ends the name of a step's folder that was set aside

T = TypeVar("T")
log = logging.getLogger(__name__)
logging.getLogger("absl").addFilter(lambda record: "/orbax/" not in record.pathname)  # what matters, it raises


class Checkpoints:
    """The checkpoints of one run in `folder`, of which the `keep` newest stay, and the `best` ones by meta[metric].

    `step` is the number of completed updates. `arrays` is a pytree of jax arrays, `stored` one of Stored like it; the
    names of the arrays on disk are the paths in it, such as params/block/mlp/up. All processes of a run call the same
    methods in the same order."""

    def __init__(self, folder: str | Path, keep: int, best: int = 0, metric: str = "eval_loss"):
        self.folder, self.keep, self.best, self.metric = Path(folder).absolute(), keep, best, metric
        self._manager, self._saving = None, None
        self._buffers: dict[tuple, np.ndarray] = {}
        self._metas: dict[int, dict] = {}  # of the steps that are complete
        self._damaged: set[int] = set()
        self._refused: dict[int, str] = {}  # what cannot be read although it need not be damaged
        self._warned: set[str] = set()

    def steps(self) -> list[int]:
        """The complete steps, in order. What is unfinished or lacks a part is left out, with a warning."""
        return distributed.from_first(self._scan() if distributed.is_first() else None)

    def _scan(self) -> list[int]:
        for path in self.folder.glob(f"*{UNFINISHED}") if self._manager is None else []:
            self._warn(f"{path} is unfinished (still being saved, or killed meanwhile): ignored")
        return [step for step in step_folders(self.folder) if self._problem(step) is None]

    def latest(self) -> int | None:
        """The newest complete step, or None. Raises CheckError when there are steps, but all are damaged; UserError when a
        newer one cannot be read for another reason, so that nobody goes on without it."""
        newest = max(self.steps(), default=None)
        found, refused = distributed.from_first([step_folders(self.folder), sorted(self._refused.items())])
        newer = [problem for step, problem in refused if newest is None or step > newest]
        if newer:
            raise UserError(f"{newer[-1]}; nothing was changed")
        if found and newest is None:
            raise CheckError(
                f"no checkpoint in {self.folder} can be read; nothing was changed: repair or move them, or use another folder"
            )
        return newest

    def newest(self, read: Callable[[int], T]) -> tuple[int, T]:
        """(step, read(step)) of the newest step that is not damaged; of each that is, a warning says so.

        Raises as `latest` does, and CheckError when there is none."""
        while (step := self.latest()) is not None:
            result, error = None, None
            try:
                result = read(step)
            except CheckError as damage:
                error = damage
            if not distributed.any_process(error is not None):
                return step, result
            self._warn(f"step {step} is left out, the one before it is taken: {error or 'another process cannot read it'}")
            self._damaged.add(step)
        raise CheckError(f"there is no checkpoint in {self.folder}")

    def meta(self, step: int) -> dict:
        """What `save` was given as meta."""
        return open_step(self.folder, step).meta

    def save(self, step: int, arrays: Any, stored: Any, meta: dict) -> None:
        """Copies the arrays to the host and returns; the rest happens in the background. meta must be plain JSON.

        First waits for a save under way; raises OSError when that one failed. A step that is already there and
        complete is not saved again. The arrays may be donated afterwards."""
        self.wait()
        args = _Save.of(arrays, stored, meta, self._buffers)
        if step in self.steps():
            log.warning("step %d is already saved in %s", step, self.folder)
            return
        self._saving = step
        with self._failing():
            self._manager = self._manager or self._open_manager()
            self._metas[step] = meta
            self._manager.save(step, args=ocp.args.Composite(**{STATE: args}), force=True)

    def check(self) -> None:
        """Raises OSError when a save in the background has failed; does not wait for it."""
        if self._manager is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits for a save under way. Raises OSError when it failed; the steps before it are unharmed."""
        if self._manager is not None:
            with self._failing():
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for a save under way, raising as `wait` does, and lets go of the folder."""
        self.wait()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def delete(self, step: int) -> None:
        """Removes a step, after the save under way, if any. Killed meanwhile, it leaves an unfinished one."""
        self.close()  # orbax keeps a list of its own
        if distributed.is_first():
            gone = self.folder / f"{step}{UNFINISHED}"
            (self.folder / str(step)).rename(gone)
            shutil.rmtree(gone)
        self._metas.pop(step, None)
        distributed.barrier("deleted")

    def restore(self, step: int, abstract: Any, stored: Any) -> Any:
        """The arrays of a step with the shapes, dtypes and shardings of `abstract` (jax.ShapeDtypeStruct leaves).

        A subtree may be asked for, such as {"params": ...} in both arguments. Every process reads its own part.
        Raises UserError when the arrays are those of another model, CheckError when one is damaged."""
        found, leaves, forms, tree = _flatten(abstract, stored)
        return tree.unflatten(open_step(self.folder, step).restore(found, leaves, forms))

    @contextlib.contextmanager
    def _failing(self):
        """Turns a failure into an OSError. The next save opens a new manager, which removes what this one left."""
        try:
            yield
        except Exception as error:
            manager, self._manager = self._manager, None
            self._metas.pop(self._saving, None)
            with contextlib.suppress(Exception):
                manager.close()
            raise OSError(
                f"saving step {self._saving} in {self.folder} failed, the steps before it are whole: {reason(error)}"
            ) from error

    def _open_manager(self) -> ocp.CheckpointManager:
        """Called by the first save: whoever saves owns the folder and sets aside what is damaged."""
        if distributed.is_first():
            self._scan()
            for step in sorted(self._damaged):
                path = self.folder / str(step)
                names = (path.with_name(f"{step}{DAMAGED}{n}") for n in itertools.chain([""], itertools.count(2)))
                aside = next(name for name in names if not name.exists())
                log.warning("%s is damaged: renamed to %s", path, aside.name)
                path.rename(aside)
        self._damaged.clear()
        distributed.barrier("set aside")
        options = ocp.CheckpointManagerOptions(preservation_policy=_Kept(self), cleanup_tmp_directories=True)
        return ocp.CheckpointManager(self.folder, options=options)

    def stay(self, steps: list[int]) -> list[bool]:
        """Whether each of these steps stays, given the others. What cannot be read always does."""
        known = {step: self._metas[step].get(self.metric) for step in steps if step in self._metas}
        staying = kept(known, self.keep, self.best)
        return [step in staying or step not in known for step in steps]

    def _problem(self, step: int) -> str | None:
        """Why a step cannot be used; None when it can."""
        if step in self._damaged:
            return "damaged"
        if step in self._metas:
            return None
        try:
            saved = open_step(self.folder, step)
            problem = saved.problem()
            damaged = problem is not None
        except CheckError as error:
            problem, damaged = str(error), True
        except (UserError, OSError) as error:
            problem, damaged = str(error), False
        self._refused.pop(step, None)
        if problem is None:
            self._metas[step] = saved.meta
            return None
        self._warn(f"step {step} in {self.folder} is ignored: {problem}")
        if damaged:
            self._damaged.add(step)
        else:
            self._refused[step] = problem
        return problem

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning(text)


@dataclasses.dataclass
class _Kept(ocp.checkpoint_managers.PreservationPolicy):
    """Tells orbax which steps stay when a new one has been saved."""

    checkpoints: Checkpoints

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        return self.checkpoints.stay([info.step for info in checkpoints])


def kept(metrics: dict[int, Any], keep: int, best: int) -> set[int]:
    """The steps that stay of those with these metrics: the `keep` newest, and the `best` lowest finite metrics."""
    steps = sorted(metrics)
    finite = [s for s in steps if isinstance(metrics[s], int | float) and math.isfinite(metrics[s])]
    return set(steps[-max(keep, 1) :]) | set(sorted(finite, key=lambda step: metrics[step])[:best])


def names(folder: str | Path, step: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a step: name -> shape and dtype. Needs no mesh."""
    infos = open_step(folder, step).infos
    return {name: jax.ShapeDtypeStruct(info.shape, np.dtype(info.dtype)) for name, info in infos.items()}


def read(folder: str | Path, step: int, name: str, layer: int | None = None, rows: slice = slice(None)) -> np.ndarray:
    """An array of a step, or one layer of it, or rows of it. Needs no mesh and reads nothing else."""
    return open_step(folder, step).read(name, layer, rows)


@contextlib.contextmanager
def writing(folder: str | Path, step: int, infos: dict[str, Info], meta: dict):
    """Writes a step without a mesh: yields put(name, value, layer=None, rows=...), and commits at the end of the block.

    rows: which rows of the array or layer the value is; whole chunks (Info.rows) are written once, parts are not.

    Raises CheckError, and commits nothing, when an array or a layer was not put."""
    final = Path(folder).absolute() / str(step)
    part = final.with_name(final.name + UNFINISHED)
    if final.exists():
        raise UserError(f"{final} exists: choose another step or folder")
    shutil.rmtree(part, ignore_errors=True)
    (part / STATE).mkdir(parents=True)
    opened = functools.cache(lambda name: open_array(part / STATE, name, infos[name], create=True))

    def put(name: str, value: np.ndarray, layer: int | None = None, rows: slice = slice(None)) -> None:
        store = opened(name)
        target = store if layer is None else store[layer]
        target = target if rows == slice(None) else target[rows]
        if np.shape(value) != target.shape:
            raise ValueError(f"{name}: {np.shape(value)} was put where {target.shape} belongs")
        target.write(np.asarray(value, infos[name].dtype)).result()

    yield put
    write_manifest(part / STATE, infos, meta)
    if problem := Saved.open(part / STATE, f"step {step}").problem():
        raise CheckError(f"step {step} in {folder} was not written: {problem}")
    part.rename(final)


def open_step(folder: str | Path, step: int) -> Saved:
    path = Path(folder).absolute() / str(step)
    title = f"checkpoint step {step} in {folder}"
    if not path.is_dir():
        raise UserError(f"{title}: there is no such step")
    return Saved.open(path / STATE, title)


def _flatten(arrays: Any, stored: Any) -> tuple[list[str], list, list[Stored], Any]:
    """Names, leaves and forms of a pytree, and its structure. The wrapper of optax.masked is not part of a name."""
    paths, tree = jax.tree_util.tree_flatten_with_path(arrays)
    forms = tree.flatten_up_to(stored)
    parts = [jax.tree_util.keystr(path, simple=True, separator="/").split("/") for path, _ in paths]
    found = ["/".join(part for part in path if part != "inner_state") for path in parts]
    if len(set(found)) < len(found):
        raise ValueError("two arrays have the same name")
    return found, [leaf for _, leaf in paths], forms, tree


class _Handler(ocp.AsyncCheckpointHandler):
    """Writes the shards of this process: copied to the host before async_save returns, written in the background."""

    async def async_save(self, directory, args):
        host, infos, forms, meta = _on_host(args), args.infos, args.forms, args.meta  # not the leaves: the caller's memory

        async def write():
            for (name, info), form in zip(infos.items(), forms):
                write_shards(Path(directory), name, info, form, host.pop(0))
            if jax.process_index() == 0:
                write_manifest(Path(directory), infos, meta)

        return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name="write_arrays")]

    def save(self, directory, args):
        raise NotImplementedError("arrays are saved asynchronously")

    def restore(self, directory, args=None):
        raise NotImplementedError("arrays are read without orbax")


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _Save(ocp.args.CheckpointArgs):
    """What is saved: leaves in memory, how they are on disk, meta."""

    leaves: list[jax.Array]
    forms: list[Stored]
    infos: dict[str, Info]
    meta: dict
    buffers: dict[tuple, np.ndarray]  # of the saves before, to be used again

    @classmethod
    def of(cls, arrays: Any, stored: Any, meta: dict, buffers: dict[tuple, np.ndarray]) -> "_Save":
        """Raises here what would otherwise fail in the background."""
        json.dumps(meta)
        found, leaves, forms, _ = _flatten(arrays, stored)
        infos = {}
        for name, leaf, form in zip(found, leaves, forms):
            check_form(name, form, leaf.shape)
            layers = form.index_CPL
            if layers is not None and sorted(layers[layers >= 0]) != list(range(form.shape[0])):
                raise ValueError(f"{name}: its slots do not hold each of {form.shape[0]} layers once")
            infos[name] = Info.of(form.shape, leaf.dtype, stacked=layers is not None)
        return cls(leaves, forms, infos, meta, buffers)


def _on_host(args: _Save) -> list[list[tuple[tuple[slice, ...], np.ndarray]]]:
    """The shards of each leaf that this process writes, with what they cover, in memory that no step writes to.

    On a CPU device numpy sees the array's own memory, which is copied into buffers that stay: a system that has to find
    as much fresh memory for every save takes several times as long as the copy."""
    own = [[shard for shard in leaf.addressable_shards if shard.replica_id == 0] for leaf in args.leaves]
    for shard in itertools.chain(*own):
        shard.data.copy_to_host_async()

    def one(name: str, leaf: jax.Array, shard) -> tuple[tuple[slice, ...], np.ndarray]:
        covers, values = tuple(slice(*s.indices(n)[:2]) for s, n in zip(shard.index, leaf.shape)), np.asarray(shard.data)
        if shard.device.platform == "cpu":
            buffer = args.buffers.get((name, shard.device.id))
            if buffer is None or (buffer.shape, buffer.dtype) != (values.shape, values.dtype):
                buffer = args.buffers[name, shard.device.id] = np.empty_like(values)
            np.copyto(buffer, values)
            values = buffer
        return covers, values

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = [[pool.submit(one, name, leaf, s) for s in part] for name, leaf, part in zip(args.infos, args.leaves, own)]
        return [[future.result() for future in part] for part in parts]
