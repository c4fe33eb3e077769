"""A run's folder: its lock, the configuration saved in it and what may change when the run goes on. Needs no jax."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm.config import Config
from llm.fields import from_dict, to_dict
from llm.overrides import leaves
from parallel.errors import UserError

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"

# Changing these makes the saved state meaningless; but a change of dropout or z_loss is one of training only.
REFUSED = ("model.", "optimizer.name", "data.")
MODEL = ("model.",)
TRAINING = ("model.dropout", "model.z_loss")
# Changing these changes what the next steps compute: allowed, and said. All else (layout, schedule, saving) does not.
TOLD = ("batch.", "optimizer.", "train.seed", "train.steps", "train.dtype", "train.spike", "train.rollback")

MESH_DEPENDENT = {"microbatches": 0, "layers_per_chunk": ()}  # of PipelineConfig, with the value that asks for the derived one


@contextlib.contextmanager
def locked(workdir: str | Path) -> Iterator[None]:
    """The folder, made if need be, for this process alone: what two runs write to it would be lost.

    Raises UserError when another process has it or when it cannot be made."""
    try:
        Path(workdir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--workdir={workdir} cannot be made a folder: {error.strerror}") from error
    with open(Path(workdir) / LOCK, "w") as file:  # the lock ends with the process, however that ends
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process works in --workdir={workdir}: stop it, or use another folder") from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            print(f"note: nothing keeps a second run out of {workdir}: its file system has no locks", file=sys.stderr)
        yield


def save_config(workdir: str | Path, config: Config) -> None:
    """Write the configuration to the folder, atomically."""
    write_atomically(Path(workdir) / CONFIG, json.dumps(to_dict(config), indent=2) + "\n")


def identity(config: Config) -> str:
    """A hash of everything in a configuration."""
    return digest(to_dict(config))


def digest(value: Any) -> str:
    """A short hash of plain JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def load_config(workdir: str | Path, changes: Sequence[tuple[str, str]] = ()) -> Config:
    """The configuration saved in a run's folder. Raises UserError when there is none or it is not readable.

    changes: overrides that will follow; when they change the mesh, what depends on it is left to be derived again."""
    path = Path(workdir) / CONFIG
    if not path.is_file():
        raise UserError(f"--workdir={workdir}: there is no run in this folder (no {CONFIG}); train one there first")
    try:
        config = from_dict(json.loads(path.read_text()), Config)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a saved configuration: {error}") from error
    given = {name for name, _ in changes}
    if not any(name.startswith("mesh.") for name in given):
        return config
    for name, derived in MESH_DEPENDENT.items():
        if (was := getattr(config.pipeline, name)) != derived and f"pipeline.{name}" not in given:
            print(f"note: pipeline.{name} was {was} and is derived again, for the new mesh", file=sys.stderr)
    return replace(config, pipeline=replace(config.pipeline, **MESH_DEPENDENT))


def step_folders(folder: str | Path) -> list[int]:
    """The steps of a folder of checkpoints by the names in it, in order, whatever their state."""
    folder = Path(folder)
    entries = [entry for entry in folder.iterdir() if entry.name.isdecimal()] if folder.is_dir() else []
    return sorted(int(entry.name) for entry in entries if entry.name == str(int(entry.name)) and entry.is_dir())


def newest_step(workdir: str | Path) -> int | None:
    """The newest saved step of a run's folder by the names in it, or None. Step 0 is an imported model."""
    return max(step_folders(Path(workdir) / CHECKPOINTS), default=None)


def check_resume(workdir: str | Path, config: Config, refused: tuple[str, ...] = REFUSED) -> list[str]:
    """What differs from the saved run and matters, as sentences. Raises UserError naming what must not differ."""
    newest = newest_step(workdir)
    if newest is None or not (Path(workdir) / CONFIG).is_file():
        return []
    if newest == 0:  # imported: its first training chooses text and optimiser
        refused = MODEL
    derived = lambda c: replace(c, model=c.model.resolved(), data=replace(c.data, tokenizer=c.tokenizer()))
    before, now = (leaves(derived(c)) for c in (load_config(workdir), config))
    changed = {
        name: f"{name} was {before[name][1]} and is now {value}" for name, (_, value) in now.items() if value != before[name][1]
    }
    wrong = [text for name, text in changed.items() if name.startswith(refused) and name not in TRAINING]
    if wrong:
        raise UserError(f"the run in {workdir} is another one: {'; '.join(wrong)}: use another --workdir")
    return [text for name, text in changed.items() if name in TRAINING or name.startswith(TOLD)]


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old or the new text, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)
