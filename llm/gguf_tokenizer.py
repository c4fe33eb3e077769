"""The tokenizer of a GGUF file as a tokenizer.json: byte-level BPE with its merges, or SentencePiece's BPE from its scores."""

from collections.abc import Callable
from typing import Any

from llm.families.family import Json
from parallel.errors import UserError

UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # types of tokens
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _split(pattern: str) -> Json:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _BYTES | {"use_regex": False}]}


PRE_TOKENIZERS: dict[str, Json] = {
    "gpt-2": _BYTES,
    "default": _BYTES,
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTES]},
    "llama-bpe": _split(_WORDS % r"\p{N}{1,3}"),
    "qwen2": _split(_WORDS % r"\p{N}"),
}
SPACE = "▁"  # SentencePiece's space


def tokenizer_json(get: Callable[..., Any], bos: int | None, path: str) -> Json:
    """get(key, otherwise): of the file's metadata. bos: the token that is put in front of texts, if the file asks for it.

    Raises UserError on a kind of tokenizer that is not supported."""
    kind, pre = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre", "default")
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and pre not in PRE_TOKENIZERS):
        known = f"gpt2 (with {', '.join(PRE_TOKENIZERS)}) and llama"
        raise UserError(f"{path} has a tokenizer of kind {pre if kind == 'gpt2' else kind!r}: supported are {known}")
    tokens, types = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.token_type")
    ids = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    own = _byte_level(get, ids, pre) if kind == "gpt2" else _sentence_piece(get, ids)
    plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    added = [
        {"id": i, "content": token, "special": types[i] != USER_DEFINED, **plain}
        for token, i in ids.items()
        if types[i] in (CONTROL, USER_DEFINED) or (types[i] == UNKNOWN and kind == "llama")
    ]
    wanted = get("tokenizer.ggml.add_bos_token", kind == "llama" or pre == "llama-bpe") and bos is not None
    front = _with_first(tokens[bos], bos) if wanted else None
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": front, **own}


def _byte_level(get: Callable[..., Any], ids: dict[str, int], pre: str) -> Json:
    merges = [merge.split(" ", 1) for merge in get("tokenizer.ggml.merges")]
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "decoder": _BYTES,
        "model": {"type": "BPE", "vocab": ids, "merges": merges, "ignore_merges": pre == "llama-bpe"},
    }


def _sentence_piece(get: Callable[..., Any], ids: dict[str, int]) -> Json:
    """SentencePiece joins the two neighbours whose joint piece has the best score; as merges: every way to cut a piece in two,
    in the order of scores."""
    scores, merges = get("tokenizer.ggml.scores"), []
    for piece, i in ids.items():
        cuts = ((piece[:n], piece[n:]) for n in range(1, len(piece)))
        pairs = sorted((ids[one], ids[two], one, two) for one, two in cuts if one in ids and two in ids)
        merges += [(scores[i], len(one), len(two), one, two) for _, _, one, two in pairs]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    unknown = get("tokenizer.ggml.unknown_token_id")
    name = next((token for token, i in ids.items() if i == unknown), "<unk>" if "<unk>" in ids else None)
    prefix = get("tokenizer.ggml.add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}] * prefix + [replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "vocab": ids,
            "merges": [[one, two] for *_, one, two in merges],
            "unk_token": name,
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _with_first(token: str, i: int) -> Json:
    """A post-processor that puts a special token in front of a text."""
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    one, two = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [special, one],
        "pair": [special, one, {"SpecialToken": {"id": token, "type_id": 1}}, two],
        "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]}},
    }
