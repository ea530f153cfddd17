from collections.abc import Sequence

import pytest
import torch

PROMPTS = [
    [5, 17, 42, 8],
    [9, 9, 30, 61, 77, 12, 4],
    [50, 3],
    [23, 88, 64, 10, 11, 12, 13, 14, 15],
    [7],
    [90] * 12,
    [33, 34],
    [6, 5, 4, 3],
]


@pytest.fixture(scope="session")
def padded():
    """Prompts as generate takes them: left-padded ids and their mask."""

    def pad(prompts: Sequence[Sequence[int]] = PROMPTS, pad_id: int = 0) -> dict[str, torch.Tensor]:
        width = max(map(len, prompts))
        return {
            "input_ids": torch.tensor([[pad_id] * (width - len(ids)) + list(ids) for ids in prompts]),
            "attention_mask": torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]),
        }

    return pad
