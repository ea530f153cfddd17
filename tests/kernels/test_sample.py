import pytest
import torch

from decodekit.core.random import Stream, uniform
from decodekit.kernels.sample import reference, sample


@pytest.fixture
def small_tiles(monkeypatch):
    """The kernel with tiles that a small vocabulary crosses; the interpreter adds up a tile element by element."""
    from decodekit.kernels.sample import triton

    def small(*, tokens, few, many):
        for name, size in (("_TOKENS", tokens), ("_FEW", few), ("_MANY", many)):
            monkeypatch.setattr(triton, name, size)
        return triton

    return small


def draws(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    return seeds, torch.randint(-(2**31), 2**31, (rows, 4), generator=generator).int()


def filters(rows, temperature=1.0, top_k=1 << 30, top_p=1.0, min_p=0.0):
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
    )


def shares(logits, **options):
    """How often each token is drawn from one row of logits."""
    rows = 20_000
    tokens = sample(logits.expand(rows, -1), *filters(rows, **options), *draws(rows))
    return tokens.bincount(minlength=logits.shape[-1]) / rows


def test_uniforms_are_those_of_the_core() -> None:
    seeds, counters = draws(200)
    expected = [
        uniform(Stream(seed, sample, digest & 0xFFFFFFFF), position, lane)
        for seed, (position, lane, sample, digest) in zip(seeds.tolist(), counters.tolist(), strict=True)
    ]
    assert reference.uniforms(seeds, counters).tolist() == expected


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.65}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_k": 3, "top_p": 0.75}, [4 / 7, 3 / 7, 0, 0]),
        ({"min_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
    ],
)
def test_filters_keep_what_their_rules_keep(options, kept) -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    torch.testing.assert_close(shares(logits, **options), torch.tensor(kept).float(), atol=0.015, rtol=0)


def test_of_equal_logits_the_lowest_ids_are_kept() -> None:
    logits = torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert shares(logits, top_k=2).nonzero().flatten().tolist() == [0, 2]
    assert shares(logits, top_p=0.5).nonzero().flatten().tolist() == [0, 2]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1, torch.float32), (37, torch.bfloat16), (300, torch.float32)])
def test_kernel_draws_the_tokens_of_the_reference(device, small_tiles, vocab_size, dtype) -> None:
    triton = small_tiles(tokens=128, few=16, many=64)
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(1)).mul(2).to(dtype)
    logits[:, 1::5] = -torch.inf
    chosen = (
        torch.tensor([0.0, 0.5, 1.0, 1.5, 1.0, 1.0, 0.7, 1.0]),
        torch.tensor([vocab_size, 5, 1, vocab_size, 200, vocab_size, 20, vocab_size], dtype=torch.int32),
        torch.tensor([1.0, 0.9, 1.0, 1.0, 0.95, 0.5, 1e-6, 0.999]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.01, 0.2, 0.0, 0.0]),
    )
    strided = (torch.stack([option, option], dim=1)[:, 0] for option in chosen)
    arguments = logits, *strided, *draws(8)
    tokens = triton.sample(*(argument.to(device) for argument in arguments))
    assert tokens.tolist() == reference.sample(*arguments).tolist()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "top_k": 5, "top_p": 0.8, "min_p": 0.1}])
def test_log_probabilities_are_those_of_what_is_left(device, options, small_tiles) -> None:
    triton = small_tiles(tokens=32, few=8, many=16)
    logits = torch.randn(6, 50) * 3
    given = [tensor.to(device) for tensor in (logits, *filters(6, **options), *draws(6))]
    for op in (reference.sample, triton.sample):
        logprobs = torch.full((6,), torch.nan, device=device)
        tokens = op(*given, logprobs=logprobs).cpu()
        scaled = logits.double() / options.get("temperature", 1.0)
        for row, token, logprob in zip(scaled, tokens.tolist(), logprobs.tolist(), strict=True):
            kept = row.masked_fill(row < row.topk(options.get("top_k", 50)).values[-1], -torch.inf).softmax(-1)
            ordered = kept.sort(descending=True).values
            least = ordered[min(int((ordered.cumsum(0) < options.get("top_p", 1.0)).sum()), 49)]
            kept = kept.masked_fill(kept < max(float(least), options.get("min_p", 0.0) * float(ordered[0])), 0.0)
            assert abs(float((kept[token] / kept.sum()).log()) - logprob) < 1e-5


def test_rows_without_a_token_are_told_and_leave_the_others_alone(device, small_tiles) -> None:
    triton = small_tiles(tokens=16, few=8, many=16)
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(2))
    whole = reference.sample(logits, *filters(5, top_k=9, top_p=0.9), *draws(5)).tolist()
    logits[1, 30], logits[2], logits[3, 4] = torch.nan, -torch.inf, torch.inf
    for options in ({"top_k": 9, "top_p": 0.9}, {}, {"top_p": 0.5}):
        given = [tensor.to(device) for tensor in (logits, *filters(5, **options), *draws(5))]
        for op in (reference.sample, triton.sample):
            broken = torch.zeros(5, dtype=torch.bool, device=device)
            tokens = op(*given, broken=broken).tolist()
            assert broken.tolist() == [False, True, True, True, False]
            assert tokens[1:4] == [0, 0, 0]
            if "top_k" in options:
                assert [tokens[0], tokens[4]] == [whole[0], whole[4]]


FILTERS = {"none": {}, "k": {"top_k": 12}, "p": {"top_p": 0.7}, "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.01}}
QUICK = {"k": (0.05, 2.0), "p": (0.05, 30.0), "all": (2.0, 30.0), "none": (2.0,)}
"""Every filter where few tokens and where many lie at its end, in one tile and in several."""


@pytest.mark.parametrize(
    ("spread", "name"),
    [
        pytest.param(spread, name, marks=[] if spread in QUICK[name] else pytest.mark.slow)
        for spread in (0.05, 2.0, 30.0)
        for name in FILTERS
    ],
)
def test_flat_and_steep_rows_draw_the_tokens_of_the_reference(device, small_tiles, spread, name) -> None:
    triton = small_tiles(tokens=32, few=16, many=32)
    logits = torch.randn(4, 80, generator=torch.Generator().manual_seed(3)).mul(spread)
    logits[3] = logits[3].round()  # many ties
    arguments = logits, *filters(4, temperature=0.8, **FILTERS[name]), *draws(4, seed=5)
    tokens = triton.sample(*(argument.to(device) for argument in arguments))
    assert tokens.tolist() == reference.sample(*arguments).tolist()
