import pytest

from decodekit.core.candidates import Candidate
from decodekit.scorers.logprob import Logprob


def test_the_length_is_taken_to_a_power() -> None:
    own = Candidate(0, "", (5, 6, 7, 1), (-1.0, -2.0, -0.5, -0.5), "eos")
    scores = [Logprob(length_penalty=power).score("", [own])[0] for power in (0, 0.5, 1)]
    assert scores == pytest.approx([-4, -2, -1])
