"""What a plugin's tests need: the laws of each kind as executable checks, tiny models, and positions to feed a rule.

def test_obeys_the_laws_of_a_rule():
    check_rule(MyRule(strength=0.5))
"""

from decodekit.testing.models import tiny_model, tiny_tokenizer
from decodekit.testing.rules import check_rule, make_rows
from decodekit.testing.strategies import check_strategy

__all__ = ["check_rule", "check_strategy", "make_rows", "tiny_model", "tiny_tokenizer"]
