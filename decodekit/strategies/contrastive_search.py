"""Look one token ahead, and avoid candidates whose representation repeats the context."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from decodekit.core.errors import RowError
from decodekit.core.protocols import SearchStrategy
from decodekit.core.search import Advance, Ended, Group
from decodekit.core.types import FinishReason, Need


class ContrastiveSearch(SearchStrategy):
    """Contrastive search.

    Su et al., 2022, arXiv:2202.06417, eq. 5: of the ``top_k`` most likely tokens the one with the largest
    (1 - penalty_alpha) p(v) - penalty_alpha max_j cos(h_v, h_j), where h is the final normed hidden state and j runs over
    prompt and output. Helps open-ended text that greedy decoding lets repeat itself; of no use for short answers.

    Cost: ``top_k`` tokens forwarded a token of output, in one forward: the candidates are forks of one cache, and what the
    losers looked ahead is dropped. ``mode: compat`` ranks tokens of probability zero too, as transformers 4.55 does.
    """

    cost: ClassVar[str] = "1 forward of top_k rows a token"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.HIDDEN_STATES})
    reads_prompt: ClassVar[bool] = True

    kind: Literal["contrastive_search"] = "contrastive_search"
    penalty_alpha: float = Field(0.6, ge=0, le=1, description="weight of the penalty; 0 is greedy")
    top_k: int = Field(4, ge=1, le=256, description="candidates a token")
    mode: Literal["strict", "compat"] = Field(
        "strict", description="strict is right row by row, compat as transformers 4.55"
    )

    @property
    def width(self) -> int:
        """One hypothesis a candidate."""
        return self.top_k

    def hidden_layers(self, config: Any) -> tuple[int, ...]:
        """The last layer, whose state the model's final norm has been applied to."""
        return (config.num_hidden_layers,)

    def step(self, group: Group) -> Advance:
        """Choose between the candidates that were looked ahead from, and look ahead from the chosen one's."""
        main = group.outputs["main"]
        layer = main.layers[-1]
        hidden = _normalized(main.hidden(layer))  # [R, H]
        if group.state is None:
            winner, context = 0, _normalized(group.prompt_hidden[layer])
        else:
            ahead: _Ahead = group.state
            penalty = (hidden @ ahead.context.T).amax(-1)
            score = (1 - self.penalty_alpha) * ahead.probabilities - self.penalty_alpha * penalty
            winner = int(score.argmax())
            context = torch.cat([ahead.context, hidden[winner : winner + 1]])
            if (reason := ahead.endings[winner]) is not None:
                return Advance(ended=[Ended(winner, None, sum(group.hypotheses[winner].logprobs), reason)])
        if group.logits[winner].max() == -torch.inf:
            raise RowError("the scores or the rules leave no token to follow the chosen candidate")
        probabilities, tokens = group.logits[winner].softmax(-1).topk(min(self.top_k, group.logits.shape[-1]))
        if self.mode == "strict":
            legal = int((probabilities > 0).sum())
            probabilities, tokens = probabilities[:legal], tokens[:legal]
        chosen: list[int] = tokens.tolist()
        endings = [group.ends(winner, token) for token in chosen]
        return Advance([winner] * len(chosen), chosen, state=_Ahead(context, probabilities, endings))


class _Ahead(NamedTuple):
    """What is known of the candidates before they are forwarded.

    Attributes:
        context: [T, H] normalized states of prompt and output.
        probabilities: [R] of the candidates.
        endings: [R] why the output is over with each.
    """

    context: Tensor
    probabilities: Tensor
    endings: list[FinishReason | None]


def _normalized(hidden: Tensor) -> Tensor:
    return hidden / hidden.norm(dim=-1, keepdim=True)
