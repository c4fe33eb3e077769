"""The model `convoy` of lm-evaluation-harness: its tasks on the checkpoints of a run. Needs the package lm_eval, not torch.

Which tokens are scored, in which rows, is said in llm/score.py and nowhere else, so the harness and `evaluate --tasks` give the
same log-probabilities bit for bit. Texts are generated as `generate` does it."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llm.cache import Decoder
from llm.config import Config
from llm.generate import continue_prompts, encode_prompts, stop_ids
from llm.run import open_run
from llm.sampling import Sampling
from llm.score import Scorer, encode, joined
from llm.tasks import Score
from llm.workdir import load_config
from parallel.errors import UserError

MODEL = "convoy"
ROWS = 8  # texts that are continued together
NEW = 256  # tokens of an answer for which a task names no number
IGNORED = ("until", "max_gen_toks", "do_sample")  # of a task's generation_kwargs: not fields of Sampling


@functools.cache
def register() -> type:
    """The class behind `lm_eval --model convoy`, registered under that name. Raises UserError without the package.

    Its arguments: workdir, step (default: the newest), batch_size (texts that are continued together) and, in Python, config
    (the run's own with another layout)."""
    try:
        from lm_eval.api.model import LM
        from lm_eval.api.registry import register_model
    except ImportError:
        raise UserError("this needs the package lm_eval: make lm_eval, or pip install -r requirements-lm-eval.txt") from None

    @register_model(MODEL)
    class Convoy(LM):
        """A checkpoint of a run."""

        def __init__(self, workdir: str, step: int = -1, batch_size: int = ROWS, config: Config | None = None):
            super().__init__()
            config = dataclasses.replace(config or load_config(workdir), zero=0)  # one copy serves scoring and decoding
            self.run = open_run(workdir, int(step), config, with_corpus=False)
            self.scorer = Scorer(self.run.config, self.run.program.devices)
            self.stop, self.batch_size = stop_ids(workdir, self.run.tokenizer), int(batch_size)

        @functools.cached_property
        def decoder(self) -> Decoder:
            decoder = Decoder(self.run.program, self.batch_size)
            decoder.load(self.run.params)
            return decoder

        def loglikelihood(self, requests):
            """[(log-probability, whether greedy decoding gives it)] of continuations after their contexts."""
            return [(score.logprob, score.greedy) for score in self._score("loglikelihood", requests)]

        def loglikelihood_rolling(self, requests):
            """[log-probability] of whole texts, each token scored once."""
            return [score.logprob for score in self._score("loglikelihood_rolling", requests)]

        def _score(self, kind: str, requests: Sequence[Any]) -> list[Score]:
            pairs = [("", *request.args)[-2:] for request in requests]
            rows = encode(self.run.tokenizer, pairs, self.scorer.limit)
            known: dict = {}
            for batch in self.scorer(self.run.params, [row for part in rows for row in part]):
                known |= batch
            scores = [joined(known[row] for row in part) for part in rows]
            for request, score in zip(requests, scores):
                value = score.logprob if kind == "loglikelihood_rolling" else (score.logprob, score.greedy)
                self.cache_hook.add_partial(kind, request.args, value)
            return scores

        def generate_until(self, requests):
            """The texts that follow contexts, up to one of `until`, the end of the text or max_gen_toks tokens."""
            texts: list[str] = [""] * len(requests)
            for sampling, numbers in _groups(requests, self.batch_size):
                prompts = encode_prompts(self.run.tokenizer, [requests[i].args[0] for i in numbers])
                room = self.decoder.limit - sampling.max_tokens
                if room < 1:
                    raise UserError(f"max_gen_toks={sampling.max_tokens} leaves no room for a context: a text of this model "
                                    f"has at most {self.decoder.limit} tokens")  # fmt: skip
                prompts = [ids[-room:] for ids in prompts]
                for i, one in zip(numbers, continue_prompts(self.decoder, prompts, sampling, self.run.tokenizer, self.stop)):
                    texts[i] = one["text"]
                    self.cache_hook.add_partial("generate_until", requests[i].args, one["text"])
            return texts

    return Convoy


def _groups(requests: Sequence[Any], rows: int) -> Iterator[tuple[Sampling, list[int]]]:
    """Numbers of requests that are generated in the same way, at most `rows` together, of similar lengths."""
    ways: dict[Sampling, list[int]] = {}
    for i in sorted(range(len(requests)), key=lambda i: len(requests[i].args[0])):
        ways.setdefault(_sampling(requests[i].args[1]), []).append(i)
    for sampling, numbers in ways.items():
        for first in range(0, len(numbers), rows):
            yield sampling, numbers[first : first + rows]


def _sampling(given: dict[str, Any]) -> Sampling:
    """A task's generation_kwargs: greedy unless do_sample. Raises UserError on one that is not known."""
    fields = {field.name for field in dataclasses.fields(Sampling)} - {"stop", "max_tokens"}
    if unknown := sorted(set(given) - fields - set(IGNORED)):
        raise UserError(f"generation_kwargs has {', '.join(unknown)}: known are {', '.join([*IGNORED, *sorted(fields)])}")
    until = given.get("until") or []
    stop = tuple(text for text in ([until] if isinstance(until, str) else until) if text)
    how = {name: value for name, value in given.items() if name in fields}
    if not given.get("do_sample", False):
        how["temperature"] = 0.0
    return Sampling(**how, stop=stop, max_tokens=int(given.get("max_gen_toks", NEW))).validate()


def lm_eval(
    workdir: str | Path,
    names: Sequence[str],
    include_path: str = "",
    limit: int = 0,
    num_fewshot: int | None = None,
    step: int | None = None,
    config: Config | None = None,
) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness: {step, results: {task: metrics}, versions, n-shot, n-samples}.

    include_path: a folder of task files (YAML), which are then the only tasks; '' for the built-in ones, which download their
    data. limit: documents of each task, 0 for all. step and config: as for `evaluate`. Raises UserError."""
    model = register()
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    if include_path and not Path(include_path).is_dir():
        raise UserError(f"--include_path={include_path} is no folder")
    manager = TaskManager(include_path=include_path or None, include_defaults=not include_path)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        known = f": there are {', '.join(manager.all_tasks) or 'none'}" if include_path else ""
        raise UserError(f"--tasks={','.join(unknown)}: lm_eval knows no such task{known}")
    lm = model(str(workdir), -1 if step is None else step, config=config)
    how = dict(num_fewshot=num_fewshot, limit=limit or None, log_samples=False, bootstrap_iters=0)
    found = simple_evaluate(model=lm, tasks=list(names), task_manager=manager, **how)
    return {"step": lm.run.step} | {key: found[key] for key in ("results", "versions", "n-shot", "n-samples")}


def table(result: dict[str, Any]) -> str:
    """The result for a reader, as lm_eval prints it."""
    from lm_eval.utils import make_table

    return f"checkpoint step {result['step']}\n{make_table(result)}"
