"""Tokens as the tokenizer cut them, in the form in which people read them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Piece(NamedTuple):
    """A token: its text; where one character is cut into several tokens, which of how many this one is."""

    text: str
    part: int = 0
    of: int = 1


def texts(tokens: Any, what: str = "tokens", item: int = 0) -> list[str]:
    """What was given as tokens, as a list of strings; a refusal of anything else."""
    if hasattr(tokens, "input_ids"):
        try:
            tokens = tokens.tokens(item)
        except (AttributeError, ValueError, IndexError):
            raise TypeError(
                f"{what} is a tokenizer's output that doesn't know its tokens: "
                "give tokenizer.convert_ids_to_tokens(ids)"
            ) from None
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise TypeError(
            f"{what} must be a list of strings, one for each token, such as tokenizer.convert_ids_to_tokens(ids), "
            f"or a tokenizer's output, not {type(tokens).__name__}"
        )
    wrong = [token for token in tokens if not isinstance(token, str)]
    if wrong:
        raise TypeError(f"{what} must hold strings, but holds {wrong[0]!r}: write tokenizer.convert_ids_to_tokens(ids)")
    return list(tokens)


# Scripts that write no space between words.
_DENSE = re.compile(r"[\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")


def apart(pieces: Sequence[Piece]) -> bool:
    """Whether tokens are plain words that say nothing of the spaces between them: then the page puts some."""
    said = [piece.text for piece in pieces]
    if len(said) < 2 or any(text[:1] == " " or text[-1:] == " " for text in said):
        return False
    letters = [c for text in said for c in text if c.isalnum()]
    return 2 * sum(_DENSE.match(c) is not None for c in letters) <= len(letters)


def unpadded(tokens: Any, item: int, count: int) -> Bool[Tensor, " j"] | None:
    """Which of a tokenizer's output's first `count` tokens aren't padding; None where it doesn't say."""
    kept = tokens.get("attention_mask") if hasattr(tokens, "input_ids") and hasattr(tokens, "get") else None
    if kept is None:
        return None
    kept = torch.as_tensor(kept)
    kept = kept[item] if kept.ndim == 2 else kept
    return kept[:count].bool().cpu() if len(kept) in (count, count + 1) else None


def readable(tokens: Sequence[str]) -> list[Piece]:
    """Tokens in a tokenizer's own spelling (`Ġthe`, `▁the`, `##ing`, `<0xE2>`) or already decoded, as pieces of text.

    >>> [piece.text for piece in readable(["The", "Ġcat", "Ċ"])]
    ['The', ' cat', '\\n']
    """
    return _clusters(_pieces(tokens))


def _pieces(tokens: Sequence[str]) -> list[Piece]:
    if (spelled := _of_bytes(tokens)) is not None:
        return _joined(spelled)
    if any(token.startswith("▁") for token in tokens):
        pieces = [bytes([int(m[1], 16)]) if (m := _BYTE.fullmatch(t)) else t.replace("▁", " ") for t in tokens]
        return _joined(pieces)
    if any(token.startswith("##") and len(token) > 2 for token in tokens):
        # WordPiece says where a word goes on, not where one begins.
        words = [t[2:] if t.startswith("##") and len(t) > 2 else " " + t for t in tokens]
        return [Piece(word) for word in [words[0].lstrip(), *words[1:]]]
    if any(token.endswith("</w>") for token in tokens):
        return [Piece(token.replace("</w>", " ")) for token in tokens]
    return [Piece(token) for token in tokens]


# What is drawn as one with the emoji before it: joiners, variants, skin tones, the frame of a key, flags' tags.
_ON = "[\u200d\ufe0e\ufe0f\u20e3\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]"
_EMOJI = "[\u00a9\u00ae\u203c-\u3299\U0001f000-\U0001faff]"
_GOES_ON = re.compile(f"(?:{_EMOJI}{_ON}*|[0-9#*]\ufe0f)\\Z")
_JOINS = re.compile(f"{_EMOJI}{_ON}*\u200d\\Z")


def _clusters(pieces: list[Piece]) -> list[Piece]:
    """An emoji made of several characters, in as many tokens, is one picture: shown whole at its first token."""
    made: list[Piece] = []
    start = 0
    while start < len(pieces):
        end, text = start + pieces[start].of, pieces[start].text
        while end < len(pieces):
            following = pieces[end].text
            on = re.match(_ON, following) and _GOES_ON.search(text)
            if not on and not (re.match(_EMOJI, following) and _JOINS.search(text)):
                break
            text += following
            end += pieces[end].of
        count = end - start
        made += pieces[start:end] if count == pieces[start].of else [Piece(text, n, count) for n in range(count)]
        start = end
    return made


def _of_bytes(tokens: Sequence[str]) -> list[str | bytes] | None:
    """Tokens in GPT-2's spelling, where a character stands for a byte; None if they aren't."""
    alphabet = _alphabet()
    pieces = [bytes(alphabet[c] for c in t) if all(c in alphabet for c in t) else t for t in tokens]
    if any("Ġ" in token or "Ċ" in token for token in tokens):
        return pieces
    # Without a space or a line break it may still be: where every byte together makes valid text beyond ASCII.
    if any(isinstance(piece, str) for piece in pieces):
        return None
    whole = b"".join(piece for piece in pieces if isinstance(piece, bytes))
    try:
        return None if whole.decode().isascii() else pieces
    except UnicodeDecodeError:
        return None


@cache
def _alphabet() -> dict[str, int]:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [n for n in range(256) if n not in plain]
    return {chr(n): n for n in plain} | {chr(256 + k): n for k, n in enumerate(others)}


def _joined(pieces: Sequence[str | bytes]) -> list[Piece]:
    """Bytes as text; the tokens of a character that was cut up are joined to it."""
    made: list[Piece] = []
    held: list[bytes] = []  # tokens whose bytes end inside a character
    for piece in pieces:
        if isinstance(piece, bytes):
            held.append(piece)
            if _ends_whole(b"".join(held)):
                made += _group(held)
                held = []
        else:
            made += _group(held)
            held = []
            made.append(Piece(piece))
    return made + _group(held)


def _group(held: list[bytes]) -> list[Piece]:
    if len(held) == 1:
        return [Piece(held[0].decode(errors="replace"))]
    text = b"".join(held).decode(errors="replace")
    return [Piece(text, n, len(held)) for n in range(len(held))]


def _ends_whole(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        # What can't be completed by more bytes is whole in its way.
        return error.reason != "unexpected end of data"
    return True
