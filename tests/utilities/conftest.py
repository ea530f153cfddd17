import json
from pathlib import Path

import pytest

POOLS = json.loads((Path(__file__).parents[1] / "golden" / "mbr_selections.json").read_text())


@pytest.fixture(scope="session")
def pools() -> list[list[str]]:
    """Thirty pools of translations, with ties, an empty text, a pool of one and Chinese among them."""
    return [item["candidates"] for item in POOLS["items"]]
