"""New tokens that are trees, against dense attention of each token over what was before and the way to it."""

import pytest
import torch

from decodekit.kernels.paged_attention import Tree, paged_attention

from .test_paged_attention import by_kernel, make

LENGTHS, COUNTS, PADS = [70, 41, 9, 0, 90], [5, 1, 9, 0, 40], [0, 0, 2, 1, 0]


def drafted(**shape):
    """Rows whose new tokens hang on random earlier ones or on what was before; one is all new, one longer than a word."""
    arguments, options = make(LENGTHS, COUNTS, dtype=torch.float32, **shape)
    query, keys, values, table, lengths, _ = arguments
    generator = torch.Generator().manual_seed(1)
    queries, ancestors, start, paths, begin = [], [], [], [], 0
    for length, count, pads in zip(LENGTHS, COUNTS, PADS, strict=True):
        own = [[] for _ in range(count)]
        for token in range(count):
            parent = int(torch.randint(-1, token, (), generator=generator)) if token else -1
            own[token] = [*(own[parent] if parent >= 0 else []), token]
        words = torch.zeros(pads + count, 2, dtype=torch.int64)
        for token, path in enumerate(own):
            for seen in path:
                words[pads + token, seen // 32] |= 1 << seen % 32
        paths += [None] * pads + [[*range(length - count), *(length - count + token for token in path)] for path in own]
        # Bits 31 are the sign.
        ancestors.append(torch.where(words >= 2**31, words - 2**32, words).int())
        start.append(torch.full((pads + count,), length - count, dtype=torch.int32))
        queries += [torch.full((pads, *query.shape[1:]), torch.nan), query[begin : begin + count]]
        begin += count
    starts = torch.tensor([0, *(count + pads for count, pads in zip(COUNTS, PADS, strict=True))]).cumsum(0)
    tree = Tree(torch.cat(ancestors), torch.cat(start))
    return (torch.cat(queries), keys, values, table, lengths, starts), options, tree, paths


def dense(arguments, options, paths, softcap=None, sinks=None):
    query, keys, values, table, _, starts = arguments
    group, size = query.shape[1] // keys.shape[1], options["block_size"]
    output = torch.zeros(*query.shape[:2], values.shape[-1], dtype=torch.float64)
    for row in range(len(LENGTHS)):
        for place in range(int(starts[row]), int(starts[row + 1])):
            if paths[place] is None:
                continue
            slots = torch.tensor([int(table[row, token // size]) * size + token % size for token in paths[place]])
            for head in range(query.shape[1]):
                scores = keys[slots, head // group].double() @ query[place, head].double() * options["scale"]
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                weights = torch.cat(
                    [scores, scores.new_empty(0) if sinks is None else sinks[head, None].double()]
                ).softmax(0)
                output[place, head] = weights[: len(slots)] @ values[slots, head // group].double()
    return output


CASES = [({}, {}), ({"heads": 6, "block_size": 16}, {"softcap": 1.5, "sinks": torch.randn(6)})]


@pytest.mark.parametrize(("shape", "more"), CASES)
def test_plain_torch_follows_the_branches(shape, more) -> None:
    arguments, options, tree, paths = drafted(**shape)
    output = paged_attention(*arguments, **options, **more, tree=tree)
    torch.testing.assert_close(output.double(), dense(arguments, options, paths, **more), atol=2e-6, rtol=2e-6)
    assert not torch.allclose(output, paged_attention(*arguments, **options, **more), atol=1e-2)


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize(("shape", "more"), CASES)
def test_the_kernel_follows_the_branches(device, monkeypatch, shape, more) -> None:
    monkeypatch.setattr("decodekit.kernels.paged_attention.work.SPLITS", (32, 64))
    arguments, options, tree, paths = drafted(**shape)
    on_device = Tree(*(part.to(device) for part in tree))
    output, _ = by_kernel(arguments, options, device, tree=on_device, **more)
    torch.testing.assert_close(output.double(), dense(arguments, options, paths, **more), atol=2e-6, rtol=2e-6)


def test_a_tree_that_is_a_chain_changes_no_bit(device) -> None:
    arguments, options, tree, _ = drafted()
    for row, pads in enumerate(PADS):
        for token in range(COUNTS[row]):
            place = int(arguments[5][row]) + pads + token
            bits = 2 ** (token + 1) - 1
            low, high = bits % 2**32, bits >> 32
            tree.ancestors[place] = torch.tensor([low - (low >= 2**31) * 2**32, high]).int()
    on_device = Tree(*(part.to(device) for part in tree))
    chain, _ = by_kernel(arguments, options, device)
    assert torch.equal(by_kernel(arguments, options, device, tree=on_device)[0], chain)


def test_trees_that_do_not_fit_are_refused() -> None:
    arguments, options, tree, _ = drafted()
    short = Tree(tree.ancestors[:-1], tree.start)
    with pytest.raises(ValueError, match=r"ancestors \[57, 2\] and start \[58\]; 58 queries need \[58, W\] and \[58\]"):
        paged_attention(*arguments, **options, tree=short)
    with pytest.raises(ValueError, match="a tree beside a window of 7"):
        paged_attention(*arguments, **{**options, "window": 7}, tree=tree)
