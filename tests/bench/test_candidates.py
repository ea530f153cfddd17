import pytest
import torch

from decodekit.bench import candidates, load_suite
from decodekit.bench.prompts import DEFAULT
from decodekit.bench.timing import Pair


def test_a_vote_and_as_many_sequences_of_generate_do_the_same_work(dense, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(candidates, "PROMPT_TOKENS", 24)
    monkeypatch.setattr(candidates, "NEW_TOKENS", 5)
    monkeypatch.setattr(candidates, "CANDIDATES", 3)
    outputs: list[torch.Tensor] = []

    def paired(peer, ours, *, rounds):
        outputs.extend([peer(), ours()])
        return Pair(peer=8.0, ours=2.0, ratio=0.25, low=0.2, high=0.3)

    monkeypatch.setattr(candidates, "paired", paired)
    [row] = load_suite("candidates").run(dense, tokenizer, list(DEFAULT), lambda status: None)
    theirs, ours = outputs
    assert theirs.shape == (3, 24 + 5)
    assert ours.shape == (1, 24 + 5)
    assert torch.equal(theirs[0, :24], ours[0, :24])
    assert row == {
        "prompt_tokens": 24,
        "candidates": 3,
        "new_tokens": 5,
        "generate_s": 8.0,
        "decodekit_s": 2.0,
        "times_faster": pytest.approx(4),
    }
