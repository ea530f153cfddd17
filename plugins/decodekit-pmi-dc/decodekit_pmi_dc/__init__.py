"""Prefer what the prompt makes likely over what is likely anyway in its domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from decodekit import Branch, Decoder, Need, Outputs, Request, TokenStrategy, load
from decodekit.kernels.contrast import contrast


class PmiDc(TokenStrategy):
    """Decoding by domain-conditional pointwise mutual information.

    Holtzman et al., 2021, arXiv:2104.08315, eq. 2: log p(y | prompt) - log p(y | premise), where the premise is what comes
    right before every answer of the domain, such as ``Answer:``. As the paper's measure prefers what is rare in the domain,
    only tokens with p(y | prompt) >= relative_top * max p(y | prompt) are chosen from. To rank given answers as the paper
    does, which needs no such bound, use ``rank``.

    Helps where likely answers crowd out right ones: multiple choice, answers of different frequency or length. It does not
    help where the frequency of an answer in its domain tells something, nor with a premise that already names an answer.
    Cost: two cached branches a row, one batched forward a token.
    """

    cost: ClassVar[str] = "2 cached branches a row, 1 batched forward a token"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.TOKENIZER})

    kind: Literal["pmi_dc"] = "pmi_dc"
    premise: str = Field(min_length=1, description="what comes before every answer of the domain, such as 'Answer:'")
    relative_top: float = Field(
        0.1, ge=0, le=1, description="tokens below this share of the top probability are dropped"
    )

    def branches(self, request: Request) -> tuple[Branch, ...]:
        """The prompt, and the premise alone."""
        return Branch("main", request.prompt_ids), Branch("premise", request.encoded(self.premise, self.kind))

    def score(self, outputs: Outputs) -> Tensor:
        """[P, V]: the information on the plausible tokens, -inf elsewhere."""
        return contrast(outputs["main"].logits, outputs["premise"].logits, 1.0, "ratio", share=self.relative_top)


def rank(
    model: Any,
    tokenizer: Any,
    prompt: str | Mapping[str, Any],
    candidates: Sequence[str],
    *,
    premise: str,
    decoder: Decoder | None = None,
    **options: Any,
) -> list[float]:
    """The domain-conditional PMI (nats) of each candidate with the prompt: the largest is the paper's answer.

    Args:
        model: the causal language model.
        tokenizer: its tokenizer.
        prompt: as ``Decoder.score`` takes it.
        candidates: [N] the answers, each with the white space that it follows the prompt and the premise with.
        premise: what comes before every answer of the domain.
        decoder: whose distribution counts; the model's own by default.
        options: as ``Decoder.score`` takes them, such as ``raw=True``.

    Returns:
        [N].
    """
    decoder = decoder or load({})
    given, domain = (decoder.score(model, tokenizer, start, candidates, **options) for start in (prompt, premise))
    return [sum(own) - sum(prior) for own, prior in zip(given, domain, strict=True)]
