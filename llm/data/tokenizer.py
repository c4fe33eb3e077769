"""Byte-level BPE: trained on the training documents or loaded from a tokenizer.json, with exact round trips."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from parallel.errors import UserError

END_OF_TEXT = "<|endoftext|>"
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
SMALLEST = 257  # 256 bytes and the end of text


class Tokenizer:
    """Text to ids and back. `size`: highest id + 1; `end`: id of the end of text; `hash`: of all it depends on."""

    def __init__(self, inner: tokenizers.Tokenizer, name: str = "the tokenizer"):
        inner.no_truncation()
        inner.no_padding()
        # "<|endoftext|>" written in a document is text like any other: only the corpus ends documents.
        inner.encode_special_tokens = True
        self.inner = inner
        ids = inner.get_vocab(with_added_tokens=True)
        self.size = max(ids.values()) + 1
        end = next((ids[text] for text in _END_NAMES if text in ids), None)
        if end is None:
            raise UserError(f"{name} has no end-of-text token (looked for {', '.join(_END_NAMES)}): add one of them")
        self.end = end
        self.hash = hashlib.sha256(inner.to_str().encode()).hexdigest()

    @classmethod
    def train(cls, texts: Iterable[str], vocab: int) -> "Tokenizer":
        """Train on texts up to `vocab` entries (fewer on a short text); the same texts give the same ids."""
        if vocab < SMALLEST:
            raise UserError(f"model.vocab={vocab} is too small to train a tokenizer: it needs {SMALLEST} (bytes, end of text)")
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab,
            min_frequency=2,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    @classmethod
    def load(cls, path: str | os.PathLike, vocab: int | None, option: str = "data.tokenizer") -> "Tokenizer":
        """Read the tokenizer.json of `option`, whose ids must fit a model of `vocab` entries (None: any). Raises UserError."""
        if not Path(path).is_file():
            raise UserError(f"{option}: {str(path)!r} is no file: name a tokenizer.json")
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception
            raise UserError(f"{option}: {str(path)!r} is not a tokenizer.json that can be read ({error})") from None
        loaded = cls(inner, str(path))
        if vocab is not None and loaded.size > vocab:
            raise UserError(
                f"{path} has token ids up to {loaded.size - 1}, outside model.vocab={vocab}: "
                f"set model.vocab to {loaded.size} or more, or name another data.tokenizer"
            )
        return loaded

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with nothing added in front or behind."""
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of several texts at once, in parallel."""
        return [encoding.ids for encoding in self.inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; the end of text gives none, bytes that are no UTF-8 become U+FFFD."""
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def save(self, path: str | os.PathLike) -> None:
        """Write a tokenizer.json that `load` reads."""
        Path(path).write_text(self.inner.to_str(), encoding="utf-8")
