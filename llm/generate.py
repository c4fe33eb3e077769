"""Text from a model: prompts are read into a cache and continued token by token."""

import dataclasses
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llm.config import Config
from llm.data.tokenizer import Tokenizer
from llm.sampling import Sampling, choose
from parallel.errors import CheckError, UserError

TAIL = 8  # ids of a prompt that are decoded with what follows, as some tokenizers treat the first one in a text differently
PARTIAL = "\ufffd"  # what bytes that are not a whole character decode to


class Written:
    """The text of ids as they come, in whole characters and up to the first stop string (`ended`)."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, stop
        self.ids = list(prompt[-TAIL:])
        self.known, self.read = 0, len(self.ids)  # ids from `known` are decoded again; up to `read` their text is in `text`
        self.text, self.shown, self.ended = "", 0, False

    def _decode(self, whole: bool) -> None:
        before = self.tokenizer.decode(self.ids[self.known : self.read])
        now = self.tokenizer.decode(self.ids[self.known :])
        if whole and now.endswith(PARTIAL):
            return
        self.text += now[len(before) :]
        self.known, self.read = self.read, len(self.ids)
        places = [place for place in (self.text.find(stop) for stop in self.stop) if place >= 0]
        if places:
            self.text, self.ended = self.text[: min(places)], True

    def _take(self, stop: int) -> str:
        shown, self.shown = self.shown, max(stop, self.shown)
        return self.text[shown : self.shown]

    def add(self, token: int) -> str:
        """The text that is certain now: nothing that may be the beginning of a stop string."""
        self.ids.append(token)
        self._decode(whole=True)
        begun = (n for stop in self.stop for n in range(len(stop) - 1, 0, -1) if self.text.endswith(stop[:n]))
        return self._take(len(self.text) - (0 if self.ended else max(begun, default=0)))

    def finish(self) -> str:
        """The rest: no more ids come."""
        if not self.ended:
            self._decode(whole=False)
        return self._take(len(self.text))


def continue_ids(
    decoder: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    size: int,
    stop_ids: Collection[int] = (),
    accept: Callable[[int, int], bool] = lambda row, token: True,
) -> list[list[int]]:
    """Ids added to each prompt, up to one of stop_ids (left out), max_tokens or the longest text of the model.

    Only ids below `size` are drawn. decoder: with parameters loaded, and places for prompts and what is added.
    accept(row, token) is told each id and returns whether the row goes on. A row depends on no other. Raises CheckError on
    logits that are not finite."""
    texts, rngs = [list(ids) for ids in prompts], [sampling.generator(row) for row in range(len(prompts))]
    seen = [set(ids) for ids in prompts]
    lengths = [min(len(ids) + sampling.max_tokens, decoder.limit) for ids in prompts]
    going = set(range(len(texts)))
    logits_RV = decoder.start(texts)
    while True:
        tokens_R1 = np.zeros((len(texts), 1), np.int32)
        if not np.isfinite(logits_RV[sorted(going)]).all():
            raise CheckError("the model gives logits that are not finite: its parameters are damaged, or training had diverged")
        for row in sorted(going):
            token = choose(logits_RV[row, :size], sampling, rngs[row], seen[row])
            if token not in stop_ids:
                texts[row].append(token)
                seen[row].add(token)
                tokens_R1[row] = token
                if accept(row, token) and len(texts[row]) < lengths[row]:
                    continue
            going.remove(row)
            decoder.drop(row)
        if not going:
            return [text[len(ids) :] for text, ids in zip(texts, prompts)]
        logits_RV = decoder.feed(tokens_R1)


def continue_prompts(
    decoder: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    tokenizer: Tokenizer,
    stop_ids: Collection[int],
    on_text: Callable[[int, str], None] = lambda row, text: None,
) -> list[dict[str, Any]]:
    """`text` and `token_ids` added to each prompt (ids): as `continue_ids`, and up to a stop string, which is not part of text.

    on_text(row, text) is told the text as it comes. Raises UserError on a prompt that leaves no room."""
    longest = max(map(len, prompts))
    if longest >= decoder.limit:
        raise UserError(f"the prompt has {longest} tokens and a text of this model at most {decoder.limit}: shorten it")
    decoder.reserve(min(longest + sampling.max_tokens, decoder.limit))
    written = [Written(tokenizer, ids, sampling.stop) for ids in prompts]

    def accept(row, token):
        on_text(row, written[row].add(token))
        return not written[row].ended

    added = continue_ids(decoder, prompts, sampling, tokenizer.size, stop_ids, accept)
    for row, one in enumerate(written):
        on_text(row, one.finish())
    return [{"text": one.text, "token_ids": [int(i) for i in ids]} for one, ids in zip(written, added)]


def leading_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids that a tokenizer's own post-processor puts in front of a text: the beginning of sequence, or nothing."""
    bare, full = tokenizer.encode("a"), tokenizer.inner.encode("a").ids
    return next((full[:n] for n in range(len(full)) if full[n : n + len(bare)] == bare), [])


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Ids of the prompts, each after the tokenizer's beginning of sequence, if it has one. Raises UserError on an empty one."""
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    if not encoded or not all(encoded):
        raise UserError("--prompt is empty: give the start of a text")
    start = leading_ids(tokenizer)
    return [start + ids for ids in encoded]


def imported_json(workdir: str | Path, name: str) -> dict[str, Any]:
    """One of the files that came with an imported model; empty without it."""
    path = Path(workdir) / "huggingface" / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def stop_ids(workdir: str | Path, tokenizer: Tokenizer) -> set[int]:
    """The ids that end a text: the tokenizer's end of text, and what an imported model says of it."""
    found = imported_json(workdir, "generation_config.json").get("eos_token_id")
    found = imported_json(workdir, "config.json").get("eos_token_id") if found is None else found
    name = imported_json(workdir, "tokenizer_config.json").get("eos_token")
    named = tokenizer.inner.token_to_id(name["content"] if isinstance(name, dict) else name) if name else None
    listed = found if isinstance(found, list) else [found]
    return {tokenizer.end, *(i for i in (*listed, named) if i is not None)}


def open_decoder(
    workdir: str | Path, rows: int, step: int | None = None, config: Config | None = None
) -> tuple[Any, Tokenizer]:
    """A decoder with the parameters of a checkpoint, and the tokenizer. step and config: as for `evaluate`."""
    from llm.cache import Decoder
    from llm.run import open_run
    from llm.workdir import load_config

    config = dataclasses.replace(config or load_config(workdir), zero=0)  # nothing here is shared out over `data`
    run = open_run(workdir, step, config, with_corpus=False)
    decoder = Decoder(run.program, rows)
    decoder.load(run.params)
    return decoder, run.tokenizer


def generate(
    workdir: str | Path,
    prompts: Sequence[str],
    sampling: Sampling | None = None,
    step: int | None = None,
    config: Config | None = None,
    on_text: Callable[[int, str], None] = lambda row, text: None,
) -> list[dict[str, Any]]:
    """Continue prompts with a checkpoint of a run: a list of prompt, text (what was added) and token_ids (that were drawn).

    step and config: as for `evaluate`. on_text(number of the prompt, text) is told the text as it comes. Raises UserError."""
    from llm.run import TOKENIZER
    from llm.workdir import load_config

    sampling = (sampling or Sampling()).validate()
    config = config or load_config(workdir)
    tokenizer = Tokenizer.load(Path(workdir) / TOKENIZER, config.model.vocab)
    encoded = encode_prompts(tokenizer, prompts)
    decoder, _ = open_decoder(workdir, len(encoded), step, config)
    added = continue_prompts(decoder, encoded, sampling, tokenizer, stop_ids(workdir, tokenizer), on_text)
    return [{"prompt": prompt, **one} for prompt, one in zip(prompts, added)]
