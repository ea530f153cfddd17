import pytest

import decodekit


@pytest.fixture(scope="session")
def accepts(demo):
    """``decodekit.accepts`` with the demo model's tokenizer."""
    return lambda constraint, text: decodekit.accepts(constraint, text, demo[1])
