from decodekit.core.candidates import Candidate
from decodekit.core.protocols import Scorer


def scores(scorer: Scorer, *texts: str, prompt: str = "") -> list[float]:
    candidates = [Candidate(number, text, (5,), (-1.0,), "eos") for number, text in enumerate(texts)]
    return list(scorer.score(prompt, candidates))
