from typing import ClassVar

import pytest
import torch

from decodekit import Branch, Outputs, TokenStrategy
from decodekit.strategies.sample import Sample
from decodekit.testing import check_strategy


class Faulty(TokenStrategy):
    kind: str = "faulty"

    def score(self, outputs: Outputs) -> torch.Tensor:
        return outputs["main"].logits.clone()


class EditsLogits(Faulty):
    def score(self, outputs):
        outputs["main"].logits[:, 0] -= 1
        return outputs["main"].logits


class EditsHidden(Faulty):
    def hidden_layers(self, config):
        return (1,)

    def score(self, outputs):
        outputs["main"].hidden(1).mul_(2)
        return outputs["main"].logits.clone()


class AveragesOverTheBatch(Faulty):
    def score(self, outputs):
        logits = outputs["main"].logits
        return logits + 5 * logits.mean(0, keepdim=True)


class DependsOnOrder(Faulty):
    def score(self, outputs):
        logits = outputs["main"].logits
        return logits * torch.arange(1, len(logits) + 1, dtype=logits.dtype).unsqueeze(-1)


class Counts(Faulty):
    calls: ClassVar[list[int]] = [0]

    def score(self, outputs):
        self.calls[0] += 1
        return outputs["main"].logits + self.calls[0] * torch.arange(97)


class WrongShape(Faulty):
    def score(self, outputs):
        return outputs["main"].logits.argmax(-1)


class ForgetsTheRow(Faulty):
    """A second branch whose prompt is the same for every request of a batch that it has seen."""

    seen: ClassVar[list[tuple[int, ...]]] = []

    def branches(self, request):
        self.seen.append(request.prompt_ids)
        return Branch("main", request.prompt_ids), Branch("other", self.seen[-2] if len(self.seen) > 1 else (5, 6))

    def score(self, outputs):
        return outputs["main"].logits - 2 * outputs["other"].logits


class Mutable(Faulty):
    model_config: ClassVar = {"frozen": False}


@pytest.mark.parametrize(
    ("strategy", "law"),
    [
        (EditsLogits(), "outputs of branch 'main' are not edited"),
        (EditsHidden(), "outputs of branch 'main' are not edited"),
        (AveragesOverTheBatch(), "batched = alone"),
        (DependsOnOrder(), "permuted positions give permuted scores"),
        (Counts(), "batched = alone|the same scores twice"),
        (WrongShape(), "returned .* expected floating-point"),
        (ForgetsTheRow(), "batched = alone|rows may come in any order"),
        (Mutable(), "a plugin is a frozen value"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, TokenStrategy) else "",
)
def test_a_strategy_that_breaks_a_law_is_caught(strategy, law) -> None:
    with pytest.raises(Exception, match=law):
        check_strategy(strategy, families=["dense"])


def test_a_good_strategy_passes() -> None:
    check_strategy(Sample())
    check_strategy(Faulty(), families=["dense"])
