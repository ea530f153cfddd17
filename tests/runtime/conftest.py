from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from decodekit.cache.stepping import SteppedCache
from decodekit.cache.storage import FullStore
from decodekit.runtime.paged_session import PagedSession

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


@pytest.fixture
def in_place(monkeypatch) -> None:
    """Caches here are as on a GPU: attention reads the blocks itself, and forwards can be captured."""
    on_gpu = SteppedCache.why_no_run

    def why_no_run(self):
        reason = on_gpu(self)
        return None if reason == "a cache whose memory grows" else reason

    monkeypatch.setattr(SteppedCache, "why_no_run", why_no_run)
    monkeypatch.setattr(PagedSession, "why_no_run", lambda self: self.cache.why_no_run())
    # Elsewhere only where that is faster; here always.
    monkeypatch.setattr("decodekit.runtime.places.triton_runs", lambda device: True)


@pytest.fixture
def captured(monkeypatch):
    """Forwards and picks are captured: called once before, as a capture does, then replayed."""

    def capture(call, stats):
        call()
        return SimpleNamespace(replay=call)

    for where in ("captured", "forwards", "replays"):
        monkeypatch.setattr(f"decodekit.runtime.{where}.captures", lambda device: True)
    for where in ("forwards", "graphs"):
        monkeypatch.setattr(f"decodekit.runtime.{where}.capture", capture)


@pytest.fixture
def fills(monkeypatch):
    """K/V of rows that are not there are left out, as the kernel that writes them does."""
    write = FullStore.write
    monkeypatch.setattr(
        FullStore, "write", lambda self, slots, *kv: write(self, slots[slots >= 0], *(own[slots >= 0] for own in kv))
    )
