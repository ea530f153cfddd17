"""The strategies of a call, taken apart."""

from __future__ import annotations

import dataclasses

from decodekit.core.protocols import Drafter, SearchStrategy, SequenceStrategy, TokenStrategy


@dataclasses.dataclass(frozen=True)
class Plan:
    """The strategies of a call.

    Attributes:
        strategy: scores the tokens.
        search: keeps hypotheses of what ``strategy`` scores, or nothing does.
        sequence: decides between outputs of ``strategy``, or nothing does.
        drafter: proposes tokens for ``strategy`` to verify, or nothing does.
        constrained: some prompt has a constraint, whose forced tokens are best forwarded together.
    """

    strategy: TokenStrategy
    search: SearchStrategy | None = None
    sequence: SequenceStrategy | None = None
    drafter: Drafter | None = None
    constrained: bool = False

    @property
    def rows(self) -> int:
        """Most rows that a prompt forks into, drafts aside."""
        if self.search is not None:
            return self.search.width
        # The prompt itself stays as long as candidates may still be started.
        return 1 if self.sequence is None else self.sequence.count + 1

    @property
    def drafted(self) -> int:
        """Most tokens of a draft."""
        return 0 if self.drafter is None else self.drafter.max_tokens

    @property
    def needs_blocks(self) -> str | None:
        """What cannot be without a paged cache: rows that fork or go back."""
        if self.drafter is not None:
            return f"drafter {self.drafter.kind!r}"
        return None if self.whole is self.strategy else f"strategy {self.whole.kind!r}"

    @property
    def wants_blocks(self) -> bool:
        """Whether it is better off with a paged cache even where a prompt is alone."""
        return self.constrained or self.needs_blocks is not None

    @property
    def reads_prompt(self) -> bool:
        """Whether hidden states over the whole prompt are read, so that none of it may come from a prefix cache."""
        return any(own.reads_prompt for own in (self.search, self.drafter) if own is not None)

    @property
    def rolls_back(self) -> bool:
        """Whether tokens are forwarded that may have to be taken back."""
        return self.drafter is not None or (self.constrained and self.search is None)

    @property
    def whole(self) -> TokenStrategy | SearchStrategy | SequenceStrategy:
        """The outermost strategy."""
        return self.search or self.sequence or self.strategy

    @property
    def outputs(self) -> int:
        """Most outputs of a prompt; 0 where its outputs are rows of their own."""
        return self.search.width if self.search is not None else self.sequence.count if self.sequence is not None else 0
