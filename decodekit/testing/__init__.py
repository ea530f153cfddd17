"""What a plugin's tests need: the laws of each kind as executable checks, tiny models, and what to feed a plugin.

def test_obeys_the_laws_of_a_rule():
    check_rule(MyRule(strength=0.5))
"""

from decodekit.testing.drafters import check_drafter
from decodekit.testing.models import tiny_model, tiny_tokenizer
from decodekit.testing.rules import check_rule, make_rows
from decodekit.testing.strategies import check_strategy
from decodekit.testing.texts import check_constraint, check_scorer, check_utility, make_candidates

__all__ = [
    "check_constraint",
    "check_drafter",
    "check_rule",
    "check_scorer",
    "check_strategy",
    "check_utility",
    "make_candidates",
    "make_rows",
    "tiny_model",
    "tiny_tokenizer",
]
