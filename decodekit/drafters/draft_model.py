"""Propose what a smaller model would say."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import Field

from decodekit.core.compat import check_model, context_length
from decodekit.core.draft_chains import ChainDrafts
from decodekit.core.drafts import Draft, DraftHost, DraftRow, DraftState, Runner, Verified
from decodekit.core.errors import Refused
from decodekit.core.options import ModelName
from decodekit.core.protocols import Drafter

STRETCH = 4
"""Room in the cache: so many tokens of another vocabulary for one of the target's."""

TAIL = 16
"""Last tokens of the output that are tokenized again with what is drafted, so that words are cut as they would be."""


class DraftModel(Drafter):
    """A smaller model, decoded ahead of the target.

    Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318. When sampling, tokens are drawn from the
    model's distribution after the target's rules, and that is what they are verified against; with ``schedule: dynamic``,
    whose lengths depend on the clock, its most likely tokens are drafted instead, so that a seed gives the same output again.

    A model of another vocabulary drafts text, which is tokenized again (Timor et al., 2025, arXiv:2502.05202, algorithm 2);
    its tokenizer and the target's are needed. Equal vocabularies are told by their entries, or without tokenizers by their
    size. Helps where the model is of the same family and at least ten times smaller.

    Cost: one forward of the smaller model a drafted token; a cache of its own.
    """

    cost: ClassVar[str] = "1 forward of a smaller model a drafted token"
    cheap: ClassVar[bool] = False

    kind: Literal["draft_model"] = "draft_model"
    model: ModelName = Field(description="id or folder of the smaller model, or the name under which one was bound")
    schedule: Literal["constant", "heuristic", "dynamic"] = Field(
        "heuristic",
        description="length of drafts, as of every drafter; sampling draws from the model except if dynamic",
    )

    def models(self) -> tuple[str, ...]:
        return (self.model,)

    def start(self, host: DraftHost) -> DraftState:
        """A cache for the smaller model.

        Raises:
            Refused: its vocabulary is another, and there are not both tokenizers.
        """
        model, tokenizer = host.bound(self.model)
        check_model(model)
        if _same_vocabulary(host, model, tokenizer):
            return ChainDrafts(host, host.runner(model), draws=host.sample and self.schedule != "dynamic")
        if tokenizer is None or host.tokenizer is None:
            missing = "its tokenizer" if tokenizer is None else "the target's tokenizer"
            how = "models={name: (model, tokenizer)}" if tokenizer is None else "tokenizer"
            raise Refused(
                f"drafter 'draft_model': model {self.model!r} has another vocabulary than the target, and {missing} was not "
                f"given; give decoder.bind({how}), or a model of the same family"
            )
        return _TextDrafts(host, host.runner(model, stretch=STRETCH), tokenizer)


def _same_vocabulary(host: DraftHost, model: Any, tokenizer: Any) -> bool:
    if tokenizer is None or host.tokenizer is None:
        sizes = {own.config.get_text_config(decoder=True).vocab_size for own in (model, host.model)}
        return len(sizes) == 1
    return tokenizer is host.tokenizer or tokenizer.get_vocab() == host.tokenizer.get_vocab()


@dataclass
class _Text:
    """A row as the smaller model reads it.

    Attributes:
        prompt: ids of the prompt.
        ids: of prompt and output.
        held: those that its cache holds.
        drafted: what was drafted behind ``ids``.
    """

    prompt: list[int]
    ids: list[int]
    held: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)


class _TextDrafts(DraftState):
    """Greedy drafts of a model with another tokenizer."""

    def __init__(self, host: DraftHost, runner: Runner, tokenizer: Any) -> None:
        self._runner, self._own, self._target = runner, tokenizer, host.tokenizer
        self._vocab = host.vocab
        self._context = context_length(runner.model)
        self._texts: dict[int, _Text] = {}
        self._retokenizing = 0.0

    def propose(self, rows: Sequence[DraftRow], budgets: Sequence[int]) -> Sequence[Draft]:
        rooms: dict[int, int] = {}
        fed: dict[int, Sequence[int]] = {}
        for row, budget in zip(rows, budgets, strict=True):
            if row.row not in self._texts:
                prompt = self._encoded(self._decoded(self._target, row.prompt_ids), special=True)
                self._texts[row.row] = _Text(prompt, [*prompt, *self._output(row)])
            text = self._texts[row.row]
            room = budget if self._context is None else min(budget, self._context - len(text.ids) + 1)
            # Room in the cache is shared: a text that takes more than its part goes without drafts.
            fits = len(text.ids) + budget <= STRETCH * (len(row.prompt_ids) + len(row.tokens))
            if room > 0 and fits and (new := text.ids[len(text.held) :]):
                rooms[row.row], fed[row.row] = room, new
        while fed:
            outputs = self._runner.forward(fed)
            for number, ids in fed.items():
                self._texts[number].held += ids
            fed = {}
            for number, own in outputs.items():
                text, token = self._texts[number], int(own.logits[-1].argmax())
                if token == self._own.eos_token_id:
                    continue
                text.drafted.append(token)
                if len(text.drafted) < rooms[number]:
                    fed[number] = [token]
        return [
            Draft(self._continuation(row)[:budget] if row.row in rooms else ())
            for row, budget in zip(rows, budgets, strict=True)
        ]

    def observe(self, verified: Sequence[Verified]) -> None:
        drop = {}
        for own in verified:
            if (text := self._texts.get(own.row.row)) is None:
                continue
            text.ids = [*text.prompt, *self._output(own.row)]
            # One token at least is left to be fed.
            agreed = min(_common(text.held, text.ids), max(0, len(text.ids) - 1))
            drop[own.row.row] = len(text.held) - agreed
            text.held, text.drafted = text.held[:agreed], []
        self._runner.rollback(drop)

    def fork(self, children: Mapping[int, int]) -> None:
        self._runner.fork(children)
        self._texts |= {
            row: copy.deepcopy(self._texts[parent]) for row, parent in children.items() if parent in self._texts
        }

    def release(self, rows: Sequence[int]) -> None:
        self._runner.release(rows)
        for row in rows:
            self._texts.pop(row, None)

    def seconds(self) -> Mapping[str, float]:
        return {"retokenize_s": self._retokenizing}

    def _output(self, row: DraftRow) -> list[int]:
        """The row's output in the smaller model's tokens."""
        return self._encoded(self._decoded(self._target, row.tokens))

    def _continuation(self, row: DraftRow) -> list[int]:
        """What was drafted behind a row, in the target's tokens."""
        text = self._texts[row.row]
        output = text.ids[len(text.prompt) :][-TAIL:]
        before, after = (self._decoded(self._own, ids) for ids in (output, [*output, *text.drafted]))
        if not after.startswith(before):
            return []  # a character was cut in two
        drafted, tail = after[len(before) :], list(row.tokens[-TAIL:])
        started = time.perf_counter()
        ids = self._target(self._decoded(self._target, tail) + drafted, add_special_tokens=False).input_ids
        whole = ids[: len(tail)] == tail
        ids = ids[len(tail) :] if whole else self._target(drafted, add_special_tokens=False).input_ids
        self._retokenizing += time.perf_counter() - started
        return [token for token in ids if token < self._vocab]

    def _encoded(self, text: str, *, special: bool = False) -> list[int]:
        started = time.perf_counter()
        ids = self._own(text, add_special_tokens=special).input_ids
        self._retokenizing += time.perf_counter() - started
        return list(ids)

    def _decoded(self, tokenizer: Any, ids: Sequence[int]) -> str:
        started = time.perf_counter()
        text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self._retokenizing += time.perf_counter() - started
        return text


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many first tokens two lists share."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
