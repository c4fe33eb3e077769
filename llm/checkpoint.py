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
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from llm.arrays import Info, Saved, check_form, open_array, reason, write_manifest, write_shards
from parallel.errors import CheckError, UserError
from parallel.sharding import Stored

STATE = "state"
UNFINISHED = ".orbax-checkpoint-tmp"  # ends the name of a step's folder until it is committed

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run in `folder`, of which the `keep` newest stay.

    `step` is the number of completed updates. `arrays` is a pytree of jax arrays, `stored` one of Stored like it; the
    names of the arrays on disk are the paths in it, such as params/block/mlp/up."""

    def __init__(self, folder: str | Path, keep: int):
        self.folder, self.keep = Path(folder).absolute(), keep
        self._manager, self._saving = None, None
        self._complete, self._warned = set(), set()

    def steps(self) -> list[int]:
        """The complete steps, in order. What is unfinished or lacks a part is left out, with a warning."""
        if not self.folder.is_dir():
            return []
        names = [entry.name for entry in self.folder.iterdir()]
        for name in names if self._manager is None else []:
            if name.endswith(UNFINISHED):
                self._warn(f"{self.folder / name} is unfinished (still being saved, or killed meanwhile): ignored")
        return sorted(step for step in map(int, filter(str.isdecimal, names)) if self._is_complete(step))

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return max(self.steps(), default=None)

    def meta(self, step: int) -> dict:
        """What `save` was given as meta."""
        return _open(self.folder, step).meta

    def save(self, step: int, arrays: Any, stored: Any, meta: dict) -> None:
        """Copies the arrays to the host and returns; the rest happens in the background. meta must be plain JSON.

        First waits for a save under way; raises CheckError when that one failed. A step that is already there and
        complete is not saved again."""
        self.wait()
        args = _Save.of(arrays, stored, meta)
        if step in self.steps():
            log.warning("step %d is already saved in %s", step, self.folder)
            return
        self._saving = step
        with self._failing():
            self._manager = self._manager or self._open_manager()
            self._manager.save(step, args=ocp.args.Composite(**{STATE: args}), force=True)

    def wait(self) -> None:
        """Waits for a save under way. Raises CheckError when it failed; the steps before it are unharmed."""
        if self._manager is not None:
            with self._failing():
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for a save under way, raising as `wait` does, and lets go of the folder."""
        self.wait()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    @contextlib.contextmanager
    def _failing(self):
        """Turns a failure into a CheckError. The next save opens a new manager, which removes what this one left."""
        try:
            yield
        except Exception as error:
            manager, self._manager = self._manager, None
            with contextlib.suppress(Exception):
                manager.close()
            raise CheckError(f"saving step {self._saving} in {self.folder} failed: {reason(error)}") from error

    def restore(self, step: int, abstract: Any, stored: Any) -> Any:
        """The arrays of a step with the shapes, dtypes and shardings of `abstract` (jax.ShapeDtypeStruct leaves).

        A subtree may be asked for, such as {"params": ...} in both arguments. Every process reads its own part.
        Raises UserError when the arrays are those of another model, CheckError when one is damaged."""
        found, leaves, forms, tree = _flatten(abstract, stored)
        return tree.unflatten(_open(self.folder, step).restore(found, leaves, forms))

    def _open_manager(self) -> ocp.CheckpointManager:
        """Called by the first save: whoever saves owns the folder and removes what cannot be read."""
        if jax.process_index() == 0 and self.folder.is_dir():
            for entry in self.folder.iterdir():
                if entry.name.isdecimal() and not self._is_complete(int(entry.name)):
                    log.warning("removing %s, which is not complete", entry)
                    shutil.rmtree(entry)
        options = ocp.CheckpointManagerOptions(max_to_keep=self.keep, cleanup_tmp_directories=True)
        return ocp.CheckpointManager(self.folder, options=options)

    def _is_complete(self, step: int) -> bool:
        if step not in self._complete:
            try:
                problem = _open(self.folder, step).problem()
            except (CheckError, UserError) as error:
                problem = str(error)
            if problem:
                self._warn(f"step {step} in {self.folder} is ignored: {problem}")
            else:
                self._complete.add(step)
        return step in self._complete

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning(text)


def names(folder: str | Path, step: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a step: name -> shape and dtype. Needs no mesh."""
    infos = _open(folder, step).infos
    return {name: jax.ShapeDtypeStruct(info.shape, np.dtype(info.dtype)) for name, info in infos.items()}


def read(folder: str | Path, step: int, name: str, layer: int | None = None, rows: slice = slice(None)) -> np.ndarray:
    """An array of a step, or one layer of it, or rows of it. Needs no mesh and reads nothing else."""
    return _open(folder, step).read(name, layer, rows)


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


def _open(folder: str | Path, step: int) -> Saved:
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
        own = [[shard for shard in leaf.addressable_shards if shard.replica_id == 0] for leaf in args.leaves]
        for shard in itertools.chain(*own):
            shard.data.copy_to_host_async()
        host = [[(_bounds(shard, leaf.shape), _copy(shard)) for shard in part] for part, leaf in zip(own, args.leaves)]
        infos, forms, meta = args.infos, args.forms, args.meta  # not the leaves: their memory belongs to the caller

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

    @classmethod
    def of(cls, arrays: Any, stored: Any, meta: dict) -> "_Save":
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
        return cls(leaves, forms, infos, meta)


def _bounds(shard, shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(shard.index, shape))


def _copy(shard) -> np.ndarray:
    """A host copy that stays when the array is donated. On a CPU device numpy would see the array's own memory."""
    return np.array(shard.data, copy=True if shard.device.platform == "cpu" else None)
