"""A trained run opened again: configuration, program, corpus, tokenizer and the parameters of a checkpoint."""

import dataclasses
from pathlib import Path
from typing import Any

from llm.checkpoint import Checkpoints
from llm.config import TOKENIZER, Config, DataConfig
from llm.data.corpus import Corpus, open_corpus
from llm.data.tokenizer import Tokenizer
from llm.devices import select_devices
from llm.step import build
from llm.workdir import CHECKPOINTS, MODEL, check_resume, load_config
from parallel import distributed
from parallel.errors import UserError

CORPUS = "corpus"


@dataclasses.dataclass(frozen=True)
class Run:
    """A checkpoint's parameters in the layout of `config`, and what is needed to use them."""

    config: Config
    step: int
    program: Any
    params: Any
    tokenizer: Tokenizer
    corpus: Corpus | None


def open_run(workdir: str | Path, step: int | None = None, config: Config | None = None, with_corpus: bool = True) -> Run:
    """Open checkpoint `step` (None or -1: the newest) of a run in any layout. Raises UserError.

    config: the run's own with another layout, batch or text, or None.
    """
    workdir, saved = Path(workdir), load_config(workdir)
    config = config or saved
    check_resume(workdir, config, MODEL)
    config, devices = select_devices(config)
    checkpoints = Checkpoints(workdir / CHECKPOINTS, config.checkpoint.keep)
    try:
        wanted = pick_step(checkpoints, workdir, step)
        tokenizer = Tokenizer.load(workdir / TOKENIZER, config.model.vocab)
        data = own_tokenizer(config.data, workdir)
        if data != saved.data and not data.tokenizer:  # other text, read with the tokens that the model knows
            data = dataclasses.replace(data, tokenizer=str(workdir / TOKENIZER))
        with distributed.first_goes_first("corpus"):  # it builds what the others open
            corpus = open_corpus(data, config.model.vocab, workdir / CORPUS) if with_corpus else None
        program = build(config, devices)
        read = lambda step: restore_params(checkpoints, step, program)
        step, params = (wanted, read(wanted)) if step not in (None, -1) else checkpoints.newest(read)
        trained_on = checkpoints.meta(step).get("corpus")
        if corpus and config.data == saved.data and trained_on not in (None, corpus.identity):
            print(f"note: the text that data.paths names has changed since step {step} was saved: these are other documents")
    finally:
        checkpoints.close()
    return Run(config, step, program, params, tokenizer, corpus)


def pick_step(checkpoints: Checkpoints, workdir: Path, step: int | None) -> int:
    """The asked step, or the newest. Raises UserError naming the steps that there are."""
    newest, steps = checkpoints.latest(), checkpoints.steps()
    if newest is None:
        raise UserError(f"--workdir={workdir}: the run has not saved a checkpoint yet")
    if step is None or step == -1:
        return newest
    if step not in steps:
        raise UserError(f"--step={step}: the checkpoints in {workdir} are of the steps {', '.join(map(str, steps))}")
    return step


def restore_params(checkpoints: Checkpoints, step: int, program: Any) -> Any:
    """The parameters alone, in the program's layout."""
    abstract, stored = program.abstract_state(), program.stored()
    return checkpoints.restore(step, {"params": abstract["params"]}, {"params": stored["params"]})["params"]


def own_tokenizer(data: DataConfig, workdir: Path) -> DataConfig:
    """The same data, read with the run's own copy of its tokenizer when the file that it was read from is gone."""
    gone = data.tokenizer and not Path(data.tokenizer).exists() and (workdir / TOKENIZER).is_file()
    return dataclasses.replace(data, tokenizer=str(workdir / TOKENIZER)) if gone else data


@dataclasses.dataclass(frozen=True)
class Source:
    """The checkpoint that `init_from` names, whose parameters and tokenizer another run begins with."""

    name: str
    checkpoints: Checkpoints
    step: int
    tokenizer: str | None

    @classmethod
    def of(cls, config: Config) -> "Source | None":
        """Raises UserError when there is no such checkpoint or when it is of another model."""
        run, step = config.init_source() or (None, None)
        if run is None:
            return None
        try:
            load_config(run)
            check_resume(run, config, MODEL)
            checkpoints = Checkpoints(Path(run) / CHECKPOINTS, 1)
            step = pick_step(checkpoints, Path(run), step)
        except UserError as error:
            raise UserError(f"init_from={config.init_from}: {error}") from error
        return cls(config.init_from, checkpoints, step, checkpoints.meta(step).get("tokenizer"))

    def params(self, program: Any) -> Any:
        """The parameters in the program's layout."""
        return restore_params(self.checkpoints, self.step, program)
