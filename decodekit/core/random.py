"""Counter-based draws: every uniform is a pure function of where it is used.

Philox4x32-10 (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3) with the constants and the
integer-to-float mapping of Triton's ``tl.philox`` / ``tl.rand``, so that a draw is bit-equal on CPU and GPU. A row's draw
depends on its seed, position, lane, sample index and prompt, never on its neighbours, and survives rollback.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

TOKEN_LANE = 0
"""The lane that picks the token; rules draw from lanes of their own."""

SEARCH_LANE = 1 << 16
DRAFT_LANE = 1 << 17
VERIFY_LANE = 1 << 18
AUDIT_LANE = 1 << 19
"""The first lanes of a search strategy, of a drafter, of verification and of audits, beyond those of any number of rules."""


class Stream(NamedTuple):
    """What names the random stream of one row: its 64-bit seed, sample index and 32-bit prompt digest."""

    seed: int
    sample: int
    digest: int


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words for one 4x32-bit counter and a 2x32-bit key, after 10 rounds."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(stream: Stream, position: int, lane: int = TOKEN_LANE) -> float:
    """One draw in [0, 1), exactly representable in float32.

    Args:
        stream: the row's random stream.
        position: index of the token being chosen; 0 is the first token of the output.
        lane: which of the independent draws of this position.
    """
    key = (stream.seed & _MASK, (stream.seed >> 32) & _MASK)
    word = philox((position & _MASK, lane & _MASK, stream.sample & _MASK, stream.digest), key)[0]
    signed = word - (1 << 32) if word >> 31 else word
    # tl.uint_to_uniform_float: fold the negative half, then scale in float32.
    folded = -signed - 1 if signed < 0 else signed
    return float(np.float32(folded) * np.float32(4.6566127342e-10))


def prompt_digest(prompt_ids: Sequence[int]) -> int:
    """CRC-32 of the prompt's token ids (without pads) as little-endian int64."""
    return zlib.crc32(np.asarray(prompt_ids, dtype="<i8").tobytes())


def fresh_seed() -> int:
    """A 63-bit seed from torch's global generator, so that ``torch.manual_seed`` reproduces a run without a seed."""
    return int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64).item())


def inverse_cdf(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token at which each row's cumulative mass passes its uniform, in vocabulary order.

    Args:
        probabilities: [P, V], non-negative, rows need not sum to one.
        uniforms: [P] in [0, 1).

    Returns:
        [P] int64; never a token of zero mass.
    """
    cumulative = probabilities.to(torch.float64).cumsum(-1)
    target = uniforms.to(torch.float64).unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp_(max=probabilities.shape[-1] - 1)
