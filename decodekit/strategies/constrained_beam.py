"""Beams whose output holds the phrases that it must."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from decodekit.core.beams import Continuation, EarlyStopping, can_improve, log_probabilities, most_likely
from decodekit.core.errors import InputError, RowError
from decodekit.core.protocols import SearchStrategy
from decodekit.core.search import Advance, Ended, Group
from decodekit.core.tokens import TokenId, check_ids, encode

Ids = tuple[TokenId, ...]
Alternatives = tuple[Annotated[Ids, Field(min_length=1)], ...]


class ConstrainedBeam(SearchStrategy):
    """Beam search over outputs that hold every one of some phrases, anywhere and in any order.

    Dynamic beam allocation (Post and Vilar, 2018, arXiv:1804.06609, section 3): beside the most likely continuations each
    hypothesis's own best and those that begin or go on with a phrase are tried, and beams are shared out between hypotheses
    that have met equally many tokens. A hypothesis may only end by EOS when it has met all; a row whose hypotheses all run
    into a limit before fails. Helps where words are given (terminology in translation); a constraint with a grammar says
    more, and needs no beams.

    A phrase is a text, or several of which one will do. A text is tokenized both as it stands and with a space before it.

    Cost: ``num_beams`` tokens forwarded a token of output, in one forward; beams are forks of one cache.
    """

    cost: ClassVar[str] = "1 forward of num_beams rows a token"

    kind: Literal["constrained_beam"] = "constrained_beam"
    phrases: tuple[str | tuple[str, ...], ...] = Field((), description="texts to hold; a list is of alternatives")
    ids: tuple[Annotated[Alternatives, Field(min_length=1)], ...] = Field(
        (), description="token sequences to hold, each a list of alternatives"
    )
    num_beams: int = Field(8, ge=2, le=256, description="hypotheses kept; generate's num_beams beats it")
    length_penalty: float = Field(
        1.0, description="power of the length that a score is divided by; above 0 favours length"
    )
    early_stopping: EarlyStopping = Field(
        False,
        description="true: over with num_beams outputs; false: when no better one is likely; never: when none is possible",
    )

    @model_validator(mode="after")
    def _something_to_hold(self) -> Self:
        if not (self.phrases or self.ids):
            raise ValueError(
                "constrained_beam holds nothing; give phrases: [text, ...] or ids: [[[id, ...], ...], ...]"
            )
        return self

    @property
    def width(self) -> int:
        """One row a beam."""
        return self.num_beams

    def resolve(self, tokenizer: Any) -> ConstrainedBeam:
        own = list[Alternatives]()
        for phrase in self.phrases:
            texts = (phrase,) if isinstance(phrase, str) else phrase
            spaced = (form for text in texts for form in (text, " " + text))
            own.append(tuple(dict.fromkeys(encode(tokenizer, form, "constrained_beam") for form in spaced)))
        return self.model_copy(update={"phrases": (), "ids": (*self.ids, *own)})

    def step(self, group: Group) -> Advance:
        """The best continuations of every bank of hypotheses."""
        if self.phrases:
            raise InputError(
                f"constrained_beam: {self.phrases[0]!r} is not tokenized yet; use strategy.resolve(tokenizer)"
            )
        state: _State = group.state or self._start(group)
        log_probs = log_probabilities(group.logits)
        unmet = [row for row, progress in enumerate(state.progress) if progress.missing]
        if unmet and group.eos:
            # Only what has met all may end.
            log_probs = log_probs.clone()
            log_probs[torch.tensor(unmet)[:, None], torch.tensor(group.eos)] = -torch.inf
        totals = log_probs + torch.tensor(state.scores, dtype=log_probs.dtype, device=log_probs.device).unsqueeze(-1)
        length = len(group.hypotheses[0].tokens) + 1
        ended, finished = list[Ended](), [*state.finished]
        going = list[tuple[Continuation, _Progress]]()
        for best, progress in self._shared_out(self._continuations(group, totals, state.progress), state.progress):
            reason = group.ends(best.parent, best.token)
            if reason is None:
                going.append((best, progress))
            elif not progress.missing and len(ended) < self.num_beams:
                score = best.score / length**self.length_penalty
                ended.append(Ended(best.parent, best.token, score, reason))
                finished.append(score)
        going = sorted(going[: self.num_beams], key=lambda item: -item[0].score)
        if not going and not finished:
            raise RowError(
                f"none of {self.num_beams} hypotheses holds all {len(self.ids)} required phrases after {length} tokens; raise "
                "max_new_tokens or num_beams"
            )
        if going and not can_improve(
            going[0][0].score,
            finished,
            self.num_beams,
            length=length,
            max_length=group.max_new_tokens,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        ):
            going = []
        return Advance(
            [own.parent for own, _ in going],
            [own.token for own, _ in going],
            ended,
            _State([own.score for own, _ in going], [progress for _, progress in going], finished),
        )

    def _start(self, group: Group) -> _State:
        vocab = group.logits.shape[-1]
        check_ids((token for phrase in self.ids for ids in phrase for token in ids), vocab, "constrained_beam")
        needed = sum(min(map(len, phrase)) for phrase in self.ids)
        if needed > group.max_new_tokens:
            raise RowError(
                f"the required phrases have {needed} tokens, max_new_tokens is {group.max_new_tokens}; raise it to {needed}"
            )
        return _State([0.0], [_Progress(self.ids)])

    def _continuations(self, group: Group, totals: Tensor, progress: Sequence[_Progress]) -> list[Continuation]:
        """The most likely ones, every hypothesis's own best, and every one that it comes on with."""
        likely = most_likely(totals, max(2, 1 + len(group.eos)) * self.num_beams)
        best = totals.argmax(-1).tolist()
        own = [(row, token) for row, held in enumerate(progress) for token in sorted({best[row], *held.wanted})]
        known = {(one.parent, one.token) for one in likely}
        more = [Continuation(float(totals[row, token]), row, token) for row, token in own if (row, token) not in known]
        return likely + [one for one in more if one.score != -torch.inf]

    def _shared_out(
        self, continuations: Sequence[Continuation], progress: Sequence[_Progress]
    ) -> list[tuple[Continuation, _Progress]]:
        """All of them in the order in which beams are given: one of each bank in turn, the bank that has met most first."""
        banks: dict[int, list[tuple[Continuation, _Progress]]] = defaultdict(list)
        for own in sorted(continuations, key=lambda own: -own.score):
            grown = progress[own.parent].then(own.token)
            banks[grown.met].append((own, grown))
        turns = [(rank, -met, item) for met, bank in banks.items() for rank, item in enumerate(bank)]
        return [item for *_, item in sorted(turns, key=lambda turn: turn[:2])]


class _Begun(NamedTuple):
    """A phrase that is being written: which of the missing ones, which alternative, and how many of its tokens are there."""

    phrase: int
    alternative: int
    length: int


@dataclass(frozen=True)
class _Progress:
    """What a hypothesis has of the phrases.

    Attributes:
        missing: phrases that it does not hold yet.
        begun: those that its last tokens may be the beginning of.
        held: tokens of the phrases that it holds.
    """

    missing: tuple[Alternatives, ...]
    begun: tuple[_Begun, ...] = ()
    held: int = 0

    @property
    def met(self) -> int:
        """Tokens of phrases so far, also of one that is only begun."""
        return self.held + max((begun.length for begun in self.begun), default=0)

    @property
    def wanted(self) -> set[int]:
        """The tokens that begin a phrase or go on with one."""
        return {ids[0] for phrase in self.missing for ids in phrase} | {
            self.missing[begun.phrase][begun.alternative][begun.length] for begun in self.begun
        }

    def then(self, token: int) -> _Progress:
        """What it has with one more token."""
        begun = list[_Begun]()
        fresh = (_Begun(number, place, 0) for number, phrase in enumerate(self.missing) for place in range(len(phrase)))
        for own in (*self.begun, *fresh):
            ids = self.missing[own.phrase][own.alternative]
            if ids[own.length] != token:
                continue
            if own.length + 1 == len(ids):
                rest = tuple(phrase for number, phrase in enumerate(self.missing) if number != own.phrase)
                return _Progress(rest, (), self.held + len(ids))
            begun.append(own._replace(length=own.length + 1))
        return _Progress(self.missing, tuple(begun), self.held)


@dataclass(frozen=True)
class _State:
    """Of the beams, [R]: the sums of log-probabilities and what they hold; and the scores of what is over."""

    scores: list[float]
    progress: list[_Progress]
    finished: list[float] = field(default_factory=list)
