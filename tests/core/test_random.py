import numpy as np
import pytest
import torch
from scipy import stats

from decodekit.core.random import Stream, inverse_cdf, philox, prompt_digest, uniform


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, expected) -> None:
    assert philox(counter, key) == expected


def test_uniform_maps_the_first_word_as_triton_does() -> None:
    # tl.uint_to_uniform_float of 0x6627E8D5, and of a word with the sign bit set.
    assert uniform(Stream(0, 0, 0), 0, 0) == float(np.float32(0x6627E8D5) * np.float32(4.6566127342e-10))
    draws = [uniform(Stream(seed, 0, 0), 0) for seed in range(2000)]
    assert min(draws) >= 0
    assert max(draws) < 1
    assert all(float(np.float32(draw)) == draw for draw in draws)
    assert stats.kstest(draws, "uniform").pvalue > 0.01


def test_every_part_of_the_counter_matters() -> None:
    base = Stream(seed=7, sample=0, digest=1)
    draws = {
        uniform(base, 0),
        uniform(base, 1),
        uniform(base, 0, lane=1),
        uniform(base._replace(sample=1), 0),
        uniform(base._replace(digest=2), 0),
        uniform(base._replace(seed=8), 0),
        uniform(base._replace(seed=7 + (1 << 40)), 0),
    }
    assert len(draws) == 7


def test_inverse_cdf_takes_the_token_in_vocabulary_order_and_none_without_mass() -> None:
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).expand(4, -1)
    assert inverse_cdf(probabilities, torch.tensor([0.0, 0.2499, 0.25, 0.999999])).tolist() == [1, 1, 3, 3]


def test_inverse_cdf_follows_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.2, 0.0, 0.3])
    draws = torch.tensor([uniform(Stream(3, sample, 0), 0) for sample in range(4000)])
    counts = inverse_cdf(probabilities.expand(4000, -1), draws).bincount(minlength=4)
    assert counts[2] == 0
    observed, expected = counts[[0, 1, 3]].tolist(), (probabilities[[0, 1, 3]] * 4000).tolist()
    assert stats.chisquare(observed, expected).pvalue > 0.01


def test_prompt_digest_depends_on_every_id_and_their_order() -> None:
    assert len({prompt_digest(ids) for ids in ([1, 2], [2, 1], [1, 2, 0], [1], [])}) == 5
    assert prompt_digest([1, 2]) == prompt_digest((1, 2))
