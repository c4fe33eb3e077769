"""A run's folder: the configuration saved in it and what may change when the run goes on. Needs no jax."""

import json
import os
from dataclasses import replace
from pathlib import Path

from llm.config import Config
from llm.fields import from_dict, to_dict
from llm.overrides import leaves
from parallel.errors import UserError

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"

# Changing these makes the saved state meaningless; but a change of dropout or z_loss is one of training only.
REFUSED = ("model.", "optimizer.name", "data.")
MODEL = ("model.",)
TRAINING = ("model.dropout", "model.z_loss")
# Changing these changes what the next steps compute: allowed, and said. All else (layout, schedule, saving) does not.
TOLD = ("batch.", "optimizer.", "train.seed", "train.steps", "train.dtype")


def save_config(workdir: str | Path, config: Config) -> None:
    """Write the configuration to the folder, atomically."""
    write_atomically(Path(workdir) / CONFIG, json.dumps(to_dict(config), indent=2) + "\n")


def load_config(workdir: str | Path) -> Config:
    """The configuration saved in a run's folder. Raises UserError when there is none or it is not readable."""
    path = Path(workdir) / CONFIG
    if not path.is_file():
        raise UserError(f"--workdir={workdir}: there is no run in this folder (no {CONFIG}); train one there first")
    try:
        return from_dict(json.loads(path.read_text()), Config)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a saved configuration: {error}") from error


def newest_step(workdir: str | Path) -> int | None:
    """The newest saved step of a run's folder by the names in it, or None. Step 0 is an imported model."""
    folder = Path(workdir) / CHECKPOINTS
    steps = [int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()] if folder.is_dir() else []
    return max(steps, default=None)


def check_resume(workdir: str | Path, config: Config, refused: tuple[str, ...] = REFUSED) -> list[str]:
    """What differs from the saved run and matters, as sentences. Raises UserError naming what must not differ."""
    newest = newest_step(workdir)
    if newest is None or not (Path(workdir) / CONFIG).is_file():
        return []
    if newest == 0:  # imported: its first training chooses text and optimiser
        refused = MODEL
    before, now = (leaves(replace(c, model=c.model.resolved())) for c in (load_config(workdir), config))
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
