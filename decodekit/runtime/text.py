"""Between text and tokens: the chat template in, incremental text and stop strings out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from decodekit.core.errors import InputError

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Mapping[str, Any]


def split_inputs(prompt: Prompt) -> tuple[str | Sequence[Message], dict[str, Any]]:
    """A prompt given as ``{"prompt": ..., "context": ...}`` as its text or messages, and the rest."""
    if isinstance(prompt, Mapping):
        if "prompt" not in prompt:
            raise InputError(f"a prompt given as a mapping needs the key 'prompt', got {sorted(map(str, prompt))}")
        return prompt["prompt"], {str(key): value for key, value in prompt.items() if key != "prompt"}
    return prompt, {}


def encode(tokenizer: Any, prompt: str | Sequence[Message], *, raw: bool = False) -> list[int]:
    """Token ids of a prompt: through the chat template (one user turn) unless ``raw`` or the tokenizer has none.

    Raises:
        InputError: the prompt is empty, of the wrong type, or not what the chat template expects.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise InputError("the prompt is empty; give at least one word")
        if not prompt.isprintable() and any("\ud800" <= char <= "\udfff" for char in prompt):
            raise InputError("the prompt is not valid Unicode (a lone surrogate): it was probably not UTF-8")
        if raw or not getattr(tokenizer, "chat_template", None):
            return list(tokenizer(prompt).input_ids)
        prompt = [{"role": "user", "content": prompt}]
    messages = list(prompt) if isinstance(prompt, Sequence) else []
    if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise InputError(f"a prompt is a text or a list of {{'role': ..., 'content': ...}}, got {prompt!r}"[:300])
    if raw or not getattr(tokenizer, "chat_template", None):
        raise InputError("chat messages need a tokenizer with a chat template, and no raw; give plain text instead")
    try:
        # The template writes its own special tokens: adding them again would double BOS.
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        raise InputError(f"the chat template refused the messages: {error}") from error
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def encoder(tokenizer: Any, *, raw: bool = False) -> Callable[[str], list[int]] | None:
    """``encode`` bound to a tokenizer; ``None`` without one."""
    return None if tokenizer is None else lambda text: encode(tokenizer, text, raw=raw)


class TextTracker:
    """The text of one growing output, decoded piece by piece, and the stop strings in it.

    A piece is given out only once it can no longer change: not in the middle of a character, and not while it could still
    become a stop string. The text is cut before the first stop string.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        # A special token has no text here: as a stop string it is matched by its id.
        ids = {stop: tokenizer(stop, add_special_tokens=False).input_ids for stop in stop_strings}
        special = {stop: own[0] for stop, own in ids.items() if len(own) == 1 and own[0] in tokenizer.all_special_ids}
        self._stop_ids = frozenset(special.values())
        self._stops = tuple(stop for stop in stop_strings if stop not in special)
        self._longest = max(map(len, self._stops), default=0)
        self._ids: list[int] = []
        self._context, self._read = 0, 0
        self._given = 0
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take the next token; returns the text that became certain. Sets ``stopped`` when a stop string is complete."""
        if token in self._stop_ids:
            self.stopped = True
            return self._flush()
        self._ids.append(token)
        # Decoding needs earlier tokens as context (leading spaces, byte fragments), but only as far back as the last cut.
        known = self._decode(self._context, self._read)
        grown = self._decode(self._context, len(self._ids))
        if len(grown) <= len(known) or grown.endswith("�"):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return self._append(grown[len(known) :])

    @property
    def certain(self) -> str:
        """The text that can no longer change."""
        return self.text[: self._given]

    @property
    def stops(self) -> bool:
        """Whether any text or token could stop it."""
        return bool(self._stops or self._stop_ids)

    def fork(self) -> TextTracker:
        """A second tracker with the same text so far."""
        other = copy.copy(self)
        other._ids = [*self._ids]
        return other

    def finish(self) -> str:
        """What was held back and can now be given out."""
        return self._flush() if not self.stopped else ""

    def _flush(self) -> str:
        rest = self._decode(self._context, len(self._ids))[len(self._decode(self._context, self._read)) :]
        self._read = len(self._ids)
        piece = self._append(rest)
        held, self._given = self.text[self._given :], len(self.text)
        return piece + held

    def _decode(self, start: int, stop: int) -> str:
        return str(self._tokenizer.decode(self._ids[start:stop], skip_special_tokens=True))

    def _append(self, piece: str) -> str:
        start = max(0, len(self.text) - self._longest + 1)
        self.text += piece
        found = [at for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.stopped = True
            self.text = self.text[: min(found)]
        certain = len(self.text) - (0 if self.stopped else self._open_suffix())
        given, self._given = self.text[self._given : certain], max(self._given, certain)
        return given

    def _open_suffix(self) -> int:
        """Length of the longest end of the text that a stop string could start with."""
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stops):
                return length
        return 0
