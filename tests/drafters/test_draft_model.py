import math
from collections import Counter
from itertools import product

import pytest
import torch
from scipy.stats import chi2

import decodekit
from decodekit.core import draft_chains
from decodekit.core.drafts import DraftRow, Verified
from decodekit.core.errors import InputError, Refused
from decodekit.core.random import Stream
from decodekit.core.types import BranchOutputs
from decodekit.drafters.draft_model import DraftModel
from decodekit.integrations.models import load_others
from decodekit.runtime.drafting import Host
from decodekit.runtime.pipeline import Pipeline
from decodekit.testing import tiny_model, tiny_tokenizer
from decodekit.testing.values import check_value
from tests.drafters.making import (
    OPEN,
    PROMPTS,
    QWEN,
    accepted,
    decode,
    eagle_head,
    few,
    ids,
    medusa_head,
    mtp_head,
    near,
)

FAMILIES = ["dense", "sliding", "hybrid"]
RULES = [{"kind": "repetition_penalty", "penalty": 1.3}, {"kind": "no_repeat_ngram", "n": 4}]


def drafter(**options) -> dict:
    return {"kind": "draft_model", "model": "small", "schedule": "constant", **options}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parts", [{"generation": OPEN}, {"rules": RULES}], ids=["open", "rules"])
def test_greedy_tokens_are_those_of_plain_decoding(family, parts) -> None:
    model = few(family)
    plain = ids(decode(model, **parts))
    for small in (near(model), few(FAMILIES[FAMILIES.index(family) - 1])):
        together = decode(model, drafter(), models={"small": small}, **parts)
        alone = [decode(model, drafter(), [prompt], models={"small": small}, **parts)[0] for prompt in PROMPTS]
        assert ids(together) == ids(alone) == plain
        assert accepted(together) == accepted(alone) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_target_itself_drafts_is_all_accepted(family) -> None:
    model = few(family)
    options = {"max_new_tokens": 19, "suppress_tokens": [1]}
    for sample in (False, True):
        generation = {**options, "do_sample": sample, "seed": 3}
        outputs = decode(model, drafter(max_tokens=5), models={"small": model}, generation=generation)
        for output in outputs:
            assert set(output.stats["acceptance_by_position"]) == {1.0}
            # The prompt, then six tokens a pass.
            assert output.stats["target_forwards"] == 1 + 18 / 6


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stop_string_inside_a_draft_ends_the_row_there(family) -> None:
    model = few(family)
    [whole] = decode(model, prompts=["ab"], generation=OPEN)
    pairs = [whole.text[place : place + 2] for place in range(12)]
    stop = next(pair for place, pair in enumerate(pairs) if place >= 2 and pair not in pairs[:place])
    generation = {"stop_strings": [stop], **OPEN}
    [plain] = decode(model, prompts=["ab"], generation=generation)
    [output] = decode(model, drafter(), ["ab"], models={"small": model}, generation=generation)
    assert plain.finish_reason == output.finish_reason == "stop"
    assert (output.text, output.token_ids) == (plain.text, plain.token_ids)
    assert output.stats["target_forwards"] < plain.stats["target_forwards"]


@pytest.mark.parametrize("schedule", ["constant", "heuristic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_reproduced_alone_and_in_a_batch(family, schedule) -> None:
    model = few(family)
    models = {"small": near(model)}
    generation = {"do_sample": True, "seed": 11}
    given = drafter(schedule=schedule)
    together = ids(decode(model, given, models=models, generation=generation))
    assert together == ids(decode(model, given, models=models, generation=generation))
    for row, prompt in enumerate(PROMPTS):
        assert ids(decode(model, given, [prompt], models=models, generation=generation)) == [together[row]]
    assert together != ids(decode(model, given, models=models, generation=generation | {"seed": 12}))


def test_lengths_by_the_clock_leave_the_draws_of_plain_decoding(model) -> None:
    generation = {"do_sample": True, "seed": 11}
    given = drafter(schedule="dynamic")
    outputs = decode(model, given, models={"small": model}, generation=generation)
    assert ids(outputs) == ids(decode(model, generation=generation))


def test_samples_of_one_prompt_differ(dense) -> None:
    generation = {"do_sample": True, "seed": 11, "num_return_sequences": 4}
    outputs = ids(
        decode(dense, drafter(), ["Who?"], models={"small": tiny_model("dense", seed=1)}, generation=generation)
    )
    assert len({tuple(own) for own in outputs}) == 4


NEW, TOKENS, ROWS = 4, 5, 5200


def fit(outputs: torch.Tensor, expected: dict[tuple[int, ...], float]) -> float:
    """The p-value of a chi-square test, cells of fewer than 5 expected pooled."""
    seen = Counter(map(tuple, outputs.tolist()))
    statistic, cells, rest, rest_seen = 0.0, 0, 0.0, 0
    for cell, probability in expected.items():
        mean = probability * len(outputs)
        if mean < 5:
            rest, rest_seen = rest + mean, rest_seen + seen[cell]
        else:
            statistic, cells = statistic + (seen[cell] - mean) ** 2 / mean, cells + 1
    if rest > 0:
        statistic, cells = statistic + (rest_seen - rest) ** 2 / rest, cells + 1
    return float(chi2.sf(statistic, cells - 1))


@pytest.fixture(scope="module")
def sampled():
    """What a model of five tokens says, sharpened and cut by rules: its exact distribution over four tokens, and samples."""
    model = tiny_model("dense", vocab_size=TOKENS, dtype=torch.float64, layers=2)
    small = tiny_model("dense", vocab_size=TOKENS, dtype=torch.float64, layers=1, seed=5)
    rules = [{"kind": "temperature", "t": 3.0}, {"kind": "top_k", "k": 4}]
    prompt = [3, 4, 2]
    expected = {(): 1.0}
    for _ in range(NEW):
        cells = list(expected)
        logits = model(torch.tensor([[*prompt, *cell] for cell in cells])).logits[:, -1] / 3.0
        least = logits.topk(4).values[:, -1:]
        probabilities = logits.masked_fill(logits < least, -math.inf).softmax(-1).tolist()
        expected = {
            (*cell, token): expected[cell] * probabilities[row][token]
            for (row, cell), token in product(enumerate(cells), range(TOKENS))
            if probabilities[row][token]
        }

    def samples(seed: int, given: dict | None = None) -> torch.Tensor:
        generation = {"do_sample": True, "seed": seed}
        decoder = decodekit.load({"drafter": given or drafter(), "rules": rules, "generation": generation})
        out = model.generate(
            torch.tensor([prompt]),
            custom_generate=decoder.bind(models={"small": small}),
            max_new_tokens=NEW,
            num_return_sequences=ROWS,
            do_sample=True,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[:, len(prompt) :]

    return expected, samples, model


def test_samples_are_distributed_as_the_target_says(sampled) -> None:
    expected, samples, _ = sampled
    assert sum(expected.values()) == pytest.approx(1)
    assert fit(samples(1), expected) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"kind": "draft_model", "model": "small"},
        {"kind": "layer_skip", "first": 1},
        {"kind": "ngram"},
        {"kind": "suffix"},
        {"kind": "recycle"},
        {"kind": "recycle", "max_tokens": 6, "leaves": 64},
        {"kind": "lookahead", "max_tokens": 9, "window": 3},
        {"kind": "medusa", "max_tokens": 4},
        {"kind": "eagle", "max_tokens": 5, "branching": 2},
        {"kind": "mtp"},
    ],
    ids=str,
)
def test_twenty_thousand_samples_of_every_drafter(sampled, given, tmp_path) -> None:
    expected, samples, model = sampled
    heads = {"medusa": medusa_head, "eagle": eagle_head, "mtp": lambda *args: mtp_head(*args, QWEN, "mtp")}
    if given["kind"] in heads:
        given = {**given, "head": str(heads[given["kind"]](tmp_path / "head", model))}
    outputs = torch.cat([samples(seed, {**given, "schedule": "constant"}) for seed in range(4)])
    assert len(outputs) >= 20_000
    assert fit(outputs, expected) > 1e-3


@pytest.mark.slow
def test_the_fit_catches_a_draft_that_was_not_drawn_from_what_it_reports(sampled, monkeypatch) -> None:
    expected, samples, _ = sampled
    monkeypatch.setattr(draft_chains, "inverse_cdf", lambda q, uniforms: q.argmax(-1))
    assert fit(samples(1), expected) < 1e-6


@pytest.mark.slow
def test_the_fit_catches_one_draw_shared_by_a_batch(sampled, monkeypatch) -> None:
    expected, samples, _ = sampled
    honest = draft_chains.uniform
    shared = Stream(0, 0, 0)
    monkeypatch.setattr(draft_chains, "uniform", lambda stream, position, lane: honest(shared, position, lane))
    assert fit(samples(1), expected) < 1e-6


def reversed_vocabulary():
    """The tiny tokenizer with its ids in reverse order: the same text, other tokens."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    own = tiny_tokenizer()
    vocabulary = {token: 96 - index for token, index in own.get_vocab().items()}
    merges = [("t", "h"), ("th", "e"), (" ", "the")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def reversed_model(family: str):
    """The tiny model with its embeddings in reverse order: the same model over the reversed vocabulary."""
    model = tiny_model(family, dtype=torch.float64)
    for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
        embedding.weight.data = embedding.weight.data.flip(0)
    return model


TEXTS = ["Who won?", "a", "The other one, please: 1 + 2 = "]


@pytest.mark.parametrize("family", FAMILIES)
def test_another_vocabulary_drafts_text(family) -> None:
    model = tiny_model(family, dtype=torch.float64)
    generation = {"suppress_tokens": [0, 1, 2]}
    plain = decode(model, prompts=TEXTS, generation=generation)
    for small, least in ((reversed_model(family), 12), (tiny_model("dense", dtype=torch.float64, seed=1), 0)):
        models = {"small": (small, reversed_vocabulary())}
        outputs = decode(model, drafter(), TEXTS, models=models, generation=generation)
        assert ids(outputs) == ids(plain)
        assert accepted(outputs) >= least
        assert outputs[0].stats["retokenize_s"] > 0
        [alone] = decode(model, drafter(), TEXTS[2:], models=models, generation=generation)
        assert alone.token_ids == plain[2].token_ids
    sampling = {"do_sample": True, "seed": 4, **generation}
    models = {"small": (reversed_model(family), reversed_vocabulary())}
    assert ids(decode(model, drafter(), TEXTS, models=models, generation=sampling)) == ids(
        decode(model, prompts=TEXTS, generation=sampling)
    )


def test_another_vocabulary_without_its_tokenizer_is_refused(dense) -> None:
    small = tiny_model("dense", vocab_size=90)
    with pytest.raises(Refused, match="another vocabulary than the target, and its tokenizer was not given"):
        decode(dense, drafter(), ["a"], models={"small": small})
    decoder = decodekit.load({"drafter": drafter()}).bind(models={"small": (small, reversed_vocabulary())})
    with pytest.raises(Refused, match="the target's tokenizer was not given"):
        dense.generate(torch.tensor([[5, 6]]), custom_generate=decoder, max_new_tokens=4)
    with pytest.raises(InputError, match=r"needs a model called 'small'.*bind"):
        decode(dense, drafter(), ["a"])


def test_a_head_padded_to_another_width_drafts_all_the_same(dense) -> None:
    for width in (90, 104):
        small = tiny_model("dense", vocab_size=width, dtype=torch.float64, seed=1)
        outputs = decode(dense, drafter(), TEXTS, models={"small": (small, tiny_tokenizer())})
        assert ids(outputs) == ids(decode(dense, prompts=TEXTS))
        assert sum(output.stats["draft_tokens"] for output in outputs) > 0
        assert "drafter_error" not in outputs[0].stats


def test_beyond_the_smaller_models_context_plain_decoding_goes_on(dense) -> None:
    small = tiny_model("dense", dtype=torch.float64)
    small.config.max_position_embeddings = 16
    [output] = decode(dense, drafter(), ["Who won?"], models={"small": small}, generation={"suppress_tokens": [1]})
    assert [output.token_ids] == ids(decode(dense, prompts=["Who won?"], generation={"suppress_tokens": [1]}))
    assert accepted([output]) == 7


@pytest.mark.parametrize("family", FAMILIES)
def test_forks_draft_as_their_parent_would(family) -> None:
    model = tiny_model(family, dtype=torch.float64)
    host = Host(model, None, {"small": model}, Pipeline([], sample=False), 2000, model.device)
    state = DraftModel(model="small").start(host)
    prompt, stream = [5, 17, 42, 8], Stream(0, 0, 0)
    parent = DraftRow(0, prompt, [9], 0, stream)
    [first] = state.propose([parent], [3])
    state.observe([Verified(parent, 9, (), first, BranchOutputs(torch.empty(4, 97)))])
    state.fork({1: 0, 2: 0})
    state.release([0, 2])
    # One that goes on from its parent's cache, and one that was never seen.
    rows = [DraftRow(1, prompt, [9, 30], 0, stream), DraftRow(3, prompt, [9], 0, stream)]
    drafts = state.propose(rows, [3, 3])
    for row, draft in zip(rows, drafts, strict=True):
        expected = list(row.ids)
        for _ in range(3):
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
        assert list(draft.tokens) == expected[-3:]
    assert list(first.tokens) == list(drafts[1].tokens)


def test_a_recipe_names_a_folder(dense, tiny_folder) -> None:
    recipe = {"drafter": {"kind": "draft_model", "model": str(tiny_folder)}, "generation": {"max_new_tokens": 12}}
    decoder = decodekit.load(recipe)
    others = load_others(decoder.recipe, dense, tiny_tokenizer())
    outputs = decoder.bind(models=others).run(dense, tiny_tokenizer(), TEXTS)
    assert ids(outputs) == ids(decodekit.load(recipe | {"drafter": None}).run(dense, tiny_tokenizer(), TEXTS))


def test_it_is_a_value() -> None:
    check_value(DraftModel(model="small"))
