import pytest
import torch

from decodekit.cache import rectangle
from decodekit.cache.paged import PagedCache
from decodekit.cache.rectangle import Rectangle
from decodekit.runtime.forward import RaggedForward
from decodekit.testing import tiny_model
from tests.cache.families import FAMILIES, Loop, family_model, forward

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def little_to_spare(monkeypatch):
    monkeypatch.setattr(rectangle, "_SPARE", 3)


def tokens(count, seed=0):
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def loop_over(model, *prompts, keeps=True, **options):
    loop = Loop(model, PagedCache(model.config, **{"num_blocks": 96, "block_size": 4, **options}))
    for group in loop.cache.groups:
        group.rectangle = Rectangle(keeps=keeps)
    loop.open(*prompts)
    for row, prompt in enumerate(prompts):
        loop.prefill(row, prompt)
    return loop


def grow(loop, rows, steps, seed=0):
    for step in range(steps):
        yield loop.step(rows, [[token] for token in tokens(len(rows), seed + step)])


def kept(loop):
    return loop.cache.stats()["gathered_bytes"]


PROMPTS = tokens(5), tokens(17, 1), tokens(9, 2)


def grown(loop):
    yield from grow(loop, [0, 1, 2], 12)


def several_tokens_a_step(loop):
    for seed in range(4):
        for count in (1, 3, 2):
            yield loop.extend([2, 0, 1], [tokens(count, seed + row) for row in range(3)])


def forked(loop):
    yield from grow(loop, [0, 1, 2], 3)
    loop.cache.fork([0, 1, 1])
    yield from grow(loop, [0, 1, 2], 3, 10)
    loop.cache.fork([0, 1, 2, 1])
    yield from grow(loop, [0, 1, 2], 3, 20)
    yield from grow(loop, [0, 1, 2, 3], 3, 30)


def reordered(loop):
    for seed in range(4):
        yield from grow(loop, [0, 1, 2], 3, seed)
        loop.cache.fork([2, 0, 1])
    yield from grow(loop, [1, 0, 2], 3, 50)


def reordered_at_one_length(loop):
    for row, count in ((0, 12), (2, 8)):
        yield loop.extend([row], [tokens(count, 7)])
    for seed in range(3):
        yield from grow(loop, [0, 1, 2], 3, seed)
        loop.cache.fork([2, 0, 1])


def beams(loop):
    for seed in range(8):
        yield from grow(loop, [0, 1, 2], 1, seed)
        loop.cache.fork([0, 0, 2] if seed % 2 else [1, 0, 1])


def taken_back(loop, drop):
    before = [list(row.tokens) for row in loop.cache.rows]
    for row, count in enumerate(loop.cache.rollback(drop)):
        stop = len(before[row]) - drop[row]
        yield loop.extend([row], [before[row][stop - count : stop]]) if count else torch.zeros(0)


def rolled_back(loop):
    loop.cache.activate_past_recording()
    for drop in ([0, 0, 0], [1, 0, 0], [3, 3, 3], [0, 2, 1]):
        yield from grow(loop, [0, 1, 2], 4, drop[1])
        yield from taken_back(loop, drop)


def drafted(loop):
    """Of some tokens a step, each row keeps as many as the others."""
    loop.cache.activate_past_recording()
    for seed, (count, drop) in enumerate(
        [(1, 0), (4, 2), (4, 3), (1, 0), (4, 0), (3, 2), (1, 0), (2, 1), (5, 4), (1, 1)]
    ):
        yield loop.extend([0, 1, 2], [tokens(count, 3 * seed + row) for row in range(3)])
        yield from taken_back(loop, [drop] * 3)


def rolled_back_and_forwarded_alone(loop):
    """Every row has its old length again, and another last token."""
    loop.cache.activate_past_recording()
    yield from grow(loop, [0, 1, 2], 4)
    loop.cache.rollback([1, 1, 1])
    for row in range(3):
        yield from grow(loop, [row], 1, 30 + row)
    yield from grow(loop, [0, 1, 2], 4, 40)


def released(loop):
    yield from grow(loop, [0, 1, 2], 4)
    loop.cache.release([1])
    yield from grow(loop, [0, 1], 4, 10)
    loop.open(tokens(7, 8))
    yield loop.prefill(2, tokens(7, 8))[None]
    yield from grow(loop, [0, 1, 2], 4, 20)


def restored(loop):
    snapshot = loop.cache.snapshot()
    yield from grow(loop, [0, 1, 2], 4)
    loop.cache.restore(snapshot)
    yield from grow(loop, [0, 1, 2], 4, 10)
    snapshot.release()
    yield from grow(loop, [0, 1, 2], 4, 20)


def aborted(loop):
    yield from grow(loop, [0, 1, 2], 4)
    step = loop.cache.begin([0, 1, 2], [[5], [6], [7]])
    forward(loop.model, [[5], [6], [7]], loop.cache, attention_mask=step.attention_mask, position_ids=step.position_ids)
    loop.cache.abort()
    yield from grow(loop, [0, 1, 2], 4, 10)


SCENARIOS = [
    grown,
    several_tokens_a_step,
    forked,
    reordered,
    reordered_at_one_length,
    beams,
    rolled_back,
    drafted,
    rolled_back_and_forwarded_alone,
    released,
    restored,
    aborted,
]
scenarios = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)


def check(model, scenario, **options):
    """Logits, and whether anything was kept, with columns kept and without."""
    kept_loop, plain_loop = (loop_over(model, *PROMPTS, keeps=keeps, **options) for keeps in (True, False))
    was_kept = False
    for own, expected in zip(scenario(kept_loop), scenario(plain_loop), strict=True):
        assert torch.equal(own, expected)
        was_kept |= kept(kept_loop) > 0
        assert kept(plain_loop) == 0
    assert was_kept == (scenario is not beams and bool(kept_loop.cache.groups))


@scenarios
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("family", ["dense", "sliding", "hybrid"])
def test_logits_are_those_of_columns_gathered_again(family, dtype, scenario):
    check(tiny_model(family), scenario, dtype=dtype)


@scenarios
@pytest.mark.parametrize("family", [pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES])
def test_so_in_every_family(family, scenario):
    check(family_model(family), scenario)


@pytest.mark.parametrize("family", ["dense", "sliding", "hybrid"])
def test_a_step_that_reads_blocks_itself_leaves_no_gap(family):
    def mixed(loop):
        direct = RaggedForward(loop.model, loop.cache)
        for seed in range(3):
            yield from grow(loop, [0, 1, 2], 3, seed)
            yield direct([0, 1, 2], [[token] for token in tokens(3, 40 + seed)], direct=True).logits
            assert not kept(loop)

    check(tiny_model(family), mixed)


@pytest.mark.parametrize("family", ["dense", "sliding"])
def test_generate_keeps_them_too(family):
    model = tiny_model(family)
    ids = torch.tensor([tokens(9), tokens(9, 1)])

    def logits_of(keeps):
        loop = loop_over(model, keeps=keeps)
        logits = [forward(model, ids, loop.cache)]
        logits.extend(forward(model, [[token], [99 - token]], loop.cache) for token in tokens(15, 2))
        return torch.cat(logits, dim=1), kept(loop)

    (found, held), (expected, nothing) = logits_of(True), logits_of(False)
    assert torch.equal(found, expected)
    assert held > 0 == nothing


def test_rows_that_are_over_or_taken_back_hold_nothing():
    model = tiny_model("dense")
    for change in (
        lambda cache: cache.release([1]),
        lambda cache: cache.rollback([0, 1]),
        lambda cache: cache.reset(),
    ):
        loop = loop_over(model, *PROMPTS[:2])
        list(grow(loop, [0, 1], 4))
        # 2 rows of 18 columns when they were made and 3 to spare; K and V of 2 heads of width 8 in 4 layers.
        assert kept(loop) == 2 * (19 + 3) * 2 * 2 * 8 * 4 * 4
        change(loop.cache)
        assert kept(loop) == 0


@pytest.mark.parametrize("family", ["dense", "sliding"])
def test_rows_that_go_back_alike_hold_what_is_left(family):
    loop = loop_over(tiny_model(family), *PROMPTS[:2])
    loop.cache.activate_past_recording()
    list(grow(loop, [0, 1], 4))
    held = kept(loop)
    loop.cache.rollback([2, 2])
    assert kept(loop) == held > 0


def test_a_window_bounds_what_is_kept():
    model = tiny_model("sliding")
    loop = loop_over(model, *PROMPTS)
    sizes = []
    for _ in grow(loop, [0, 1, 2], 30):
        sizes.append([group.rectangle.nbytes // len(group.layers) for group in loop.cache.groups])
    windowed = [size for size, group in zip(zip(*sizes, strict=True), loop.cache.groups, strict=True) if group.window]
    for size in windowed:
        assert max(size[4:]) == min(size[4:]) > 0


def test_quantized_blocks_are_gathered_anew():
    loop = Loop(tiny_model("dense"), PagedCache(tiny_model("dense").config, num_blocks=96, quantization="int8"))
    loop.open(*PROMPTS[:2])
    for row, prompt in enumerate(PROMPTS[:2]):
        loop.prefill(row, prompt)
    list(grow(loop, [0, 1], 5))
    assert kept(loop) == 0


def test_steps_in_any_mode_add_to_what_was_kept():
    loop = loop_over(tiny_model("dense"), *PROMPTS)
    with torch.inference_mode():
        list(grow(loop, [0, 1, 2], 3))
    held = kept(loop)
    with torch.no_grad():
        list(grow(loop, [0, 1, 2], 1))
    assert kept(loop) == held > 0
