"""Faults of other projects' strategies and rules, which must not happen here; each test names where it was reported."""

import math

import pytest
import torch
from accelerate import dispatch_model
from transformers import LogitsProcessor, StoppingCriteria

import decodekit
from decodekit.core.errors import Refused, RowError
from decodekit.core.types import BranchOutputs, Outputs
from decodekit.rules.repetition_penalty import RepetitionPenalty
from decodekit.rules.top_h import TopH
from decodekit.rules.typical import Typical
from decodekit.strategies.dola import Dola
from decodekit.testing import make_rows, tiny_model
from tests.strategies.golden import left_pad

pytestmark = pytest.mark.integration

PROMPTS = [[5, 17, 42, 8], [9, 9, 30, 61, 77, 12, 4], [50, 3]]
OPTIONS = {"max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}


def decoded(model, decoder, prompts=PROMPTS, **options) -> list[list[int]]:
    """The new tokens of these prompts, left-padded to one batch."""
    inputs = left_pad(prompts)
    ids = model.generate(**inputs, custom_generate=decoder, **{**OPTIONS, **options})
    return ids[:, inputs["input_ids"].shape[1] :].tolist()


def alone(model, decoder, prompts=PROMPTS, **options) -> list[list[int]]:
    return [decoded(model, decoder, [prompt], **options)[0] for prompt in prompts]


# --- contrasting layers


def test_dola_chooses_a_layer_for_each_row_and_position(model) -> None:
    """https://github.com/voidism/DoLa/issues/13: one layer was chosen for a whole batch."""
    chosen = []

    class Watched(Dola):
        def score(self, outputs):
            scores = super().score(outputs)
            chosen.append(outputs.annotations["premature_layer"].tolist())
            return scores

    def layers(prompts) -> list[list[int]]:
        chosen.clear()
        strategy = Watched(layers=(0, 1, 2), relative_top=0.0)
        recipe = decodekit.load({}).recipe.model_copy(update={"strategy": strategy})
        tokens.append(decoded(model, decodekit.Decoder(recipe), prompts))
        return [list(row) for row in zip(*chosen, strict=True)]

    tokens: list[list[list[int]]] = []
    batch = layers(PROMPTS[:2])
    assert batch == [layers([prompt])[0] for prompt in PROMPTS[:2]]
    assert tokens[0] == [own[0] for own in tokens[1:]]
    assert len({layer for row in batch for layer in row}) > 1


def test_dola_reads_early_layers_without_the_norm_unless_told(dense) -> None:
    """https://github.com/voidism/DoLa/issues/9: early layers are projected as they are, which is an option here."""
    seen = []

    def readout(hidden, *, norm, finish):
        seen.append(norm)
        return dense.lm_head(dense.model.norm(hidden) if norm else hidden)

    hidden = {layer: torch.randn(3, 32, dtype=torch.float64) for layer in (0, 2)}
    logits = torch.randn(3, 97, dtype=torch.float64)
    scores = [
        Dola(layers=(0, 2), relative_top=0, early_norm=norm).score(
            Outputs({"main": BranchOutputs(logits, hidden, readout)})
        )
        for norm in (False, True)
    ]
    assert seen == [False, True]
    assert not torch.allclose(*scores)
    assert Dola().early_norm is False


# --- contrastive search


def test_contrastive_search_with_left_padding_gives_the_unpadded_text(model) -> None:
    """https://github.com/huggingface/transformers/issues/33507: pads counted as context, or made it NaN."""
    for mode in ("strict", "compat"):
        decoder = decodekit.strategy("contrastive_search", penalty_alpha=0.6, top_k=4, mode=mode)
        assert decoded(model, decoder) == alone(model, decoder)


def test_contrastive_search_over_several_devices(tmp_path) -> None:
    """https://github.com/huggingface/transformers/issues/24634: hidden states and logits lay on different devices."""
    decoder = decodekit.strategy("contrastive_search")
    expected = decoded(tiny_model("dense"), decoder)
    # Without two GPUs the second half lies on disk, so that nobody may read or follow its weights outside a forward.
    one, other = (0, 1) if torch.cuda.device_count() > 1 else ("cpu", "disk")
    places = {"model.embed_tokens": one, "model.rotary_emb": one, "model.norm": other, "lm_head": other}
    places |= {f"model.layers.{layer}": one if layer < 2 else other for layer in range(4)}
    spread = dispatch_model(tiny_model("dense"), places, main_device=one, offload_dir=tmp_path)
    assert decoded(spread, decoder) == expected


def test_contrastive_search_with_beams_is_refused(dense) -> None:
    """https://github.com/huggingface/transformers/issues/24971: beams were ignored without a word."""
    with pytest.raises(Refused, match="num_beams=4 was given, but strategy 'contrastive_search'"):
        decoded(dense, decodekit.strategy("contrastive_search"), num_beams=4)


# --- penalties


def test_the_scope_of_a_repetition_penalty_is_selectable() -> None:
    """https://github.com/huggingface/transformers/issues/36642: words of the prompt were always penalized."""
    rows, logits = make_rows([[3, 4, 5]], prompt_lengths=[2]), torch.full((1, 8), 6.0)
    for scope, penalized in {"prompt": {3, 4}, "output": {5}, "both": {3, 4, 5}}.items():
        scores = RepetitionPenalty(penalty=2.0, scope=scope)(rows, logits)
        assert {token for token in range(8) if scores[0, token] == 3.0} == penalized
        assert sorted(scores[0].tolist()) == [3.0] * len(penalized) + [6.0] * (8 - len(penalized))


def test_a_repetition_penalty_lowers_negative_logits_too() -> None:
    """https://github.com/huggingface/transformers/issues/2302: dividing a negative logit raised it."""
    scores = RepetitionPenalty(penalty=2.0)(make_rows([[3, 4]]), torch.tensor([[0.0, 0.0, 0.0, -4.0, 4.0]]))
    assert scores.tolist() == [[0.0, 0.0, 0.0, -8.0, 2.0]]


@pytest.mark.parametrize(
    "rule",
    [
        {"kind": "repetition_penalty", "penalty": 1.5},
        {"kind": "presence_penalty", "penalty": 2.0, "scope": "both"},
        {"kind": "frequency_penalty", "penalty": 2.0, "scope": "both"},
        {"kind": "no_repeat_ngram", "n": 1},
    ],
    ids=lambda rule: rule["kind"],
)
def test_pads_are_not_counted(dense, rule) -> None:
    """https://github.com/huggingface/text-generation-inference/issues/1765: left padding was penalized as if it were text."""
    decoder, inputs = decodekit.load({"rules": [rule]}), left_pad(PROMPTS)
    output = dense.generate(
        **inputs,
        custom_generate=decoder,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **OPTIONS,
    )
    scores, logits = output.scores[0], output.logits[0]
    assert torch.equal(scores[:, 0], logits[:, 0])  # the pad of these prompts, which none of them holds
    assert not torch.equal(scores, logits)
    assert output.sequences[:, inputs["input_ids"].shape[1] :].tolist() == alone(dense, decoder)


# --- what is sampled from


def test_a_typical_mass_of_1_is_valid(dense) -> None:
    """https://github.com/huggingface/transformers/issues/16080: 1.0 was refused, or dropped tokens."""
    logits = torch.randn(4, 200)
    assert torch.equal(Typical(p=1.0)(make_rows([[3]] * 4), logits), logits)
    sampled = decodekit.load({"generation": {"do_sample": True, "seed": 0, "top_k": 0}})
    assert decoded(dense, sampled, typical_p=1.0) == decoded(dense, sampled)


@pytest.mark.parametrize("mode", ["strict", "compat"])
def test_top_h_keeps_a_token_whatever_the_share(dense, mode) -> None:
    """https://github.com/huggingface/transformers/issues/47262: the least number of tokens to keep was not kept."""
    for logits in (torch.zeros(2, 50), torch.randn(2, 50), torch.tensor([[9.0, *[-math.inf] * 49]] * 2)):
        kept = TopH(h=1e-9, mode=mode)(make_rows([[3]] * 2), logits) > -math.inf
        assert torch.equal(kept.sum(-1), torch.ones(2, dtype=torch.long))
        assert torch.equal(kept.int().argmax(-1), logits.argmax(-1))
    rules = [{"kind": "top_h", "h": 1e-9, "mode": mode}]
    sampled = decodekit.load({"rules": rules, "generation": {"do_sample": True, "seed": 0}})
    assert decoded(dense, sampled) == decoded(dense, decodekit.load({}))


# --- beams


def test_beam_scores_with_a_length_penalty_follow_from_what_is_returned(model, tokenizer) -> None:
    """https://github.com/huggingface/transformers/issues/15869: the score could not be computed from the returned parts."""
    for penalty in (0.0, 0.8, 2.0):
        decoder = decodekit.strategy("beam", length_penalty=penalty)
        outputs = decoder.run(
            model, tokenizer, "Who won?", num_return_sequences=4, max_new_tokens=8, eos_token_id=[1, *range(20, 30)]
        )
        scores = [sum(output.logprobs) / len(output.token_ids) ** penalty for output in outputs]
        assert scores == sorted(scores, reverse=True)
        # From 3.12 on, Python's sum rounds once.
        assert scores == pytest.approx([own["score"] for own in outputs[0].candidates[:4]], rel=1e-12)


class Poison(LogitsProcessor):
    """NaN wherever these tokens follow each other."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores):
        found = (input_ids.unfold(1, len(self.tokens), 1) == self.tokens).all(-1).any(-1)
        return scores.masked_fill(found.unsqueeze(-1), math.nan)


@pytest.mark.parametrize(("strategy", "sampled"), [("beam", True), ("beam", False), ("contrastive_search", False)])
def test_nan_under_a_search_is_a_typed_error_of_its_prompt(dense, strategy, sampled) -> None:
    """https://github.com/huggingface/transformers/issues/22914: torch.multinomial raised a bare RuntimeError."""
    decoder = decodekit.load({"strategy": strategy, "rules": [], "generation": {"do_sample": sampled, "seed": 0}})
    clean = decoded(dense, decoder)
    with pytest.warns(RuntimeWarning, match=r"prompt 1\) ended early: .*NaN"):
        poisoned = decoded(dense, decoder, logits_processor=[Poison(61, 77)])
    assert [poisoned[0], poisoned[2]] == [clean[0], clean[2]]
    with pytest.raises(RowError, match="NaN"):
        decoded(dense, decoder, PROMPTS[1:2], logits_processor=[Poison(61, 77)])


@pytest.mark.parametrize("sampled", [True, False])
def test_a_beam_that_meets_nan_is_dropped_and_the_others_go_on(dense, sampled) -> None:
    """As above, where a single hypothesis of a prompt is broken."""
    decoder = decodekit.load({"strategy": "beam", "rules": [], "generation": {"do_sample": sampled, "seed": 0}})
    [clean] = decoded(dense, decoder, PROMPTS[:1])
    [held] = decoded(dense, decoder, PROMPTS[:1], logits_processor=[Poison(*clean[2:4])])
    assert held != clean
    assert clean[2:4] not in [held[start : start + 2] for start in range(6)]


def test_return_sequences_are_ordered_and_differ(dense, tokenizer) -> None:
    """https://github.com/huggingface/transformers/issues/25375: the same sequence was returned several times."""
    beams = decoded(dense, decodekit.strategy("beam"), num_beams=5, num_return_sequences=5)
    for start in range(0, len(beams), 5):
        assert len({tuple(row) for row in beams[start : start + 5]}) == 5
    best = decoded(dense, decodekit.strategy("beam", num_beams=5))
    assert beams[::5] == best
    sampled = decodekit.load({"rules": [], "generation": {"do_sample": True, "seed": 0}})
    assert (
        len({tuple(row) for row in decoded(dense, sampled, PROMPTS[:1], num_return_sequences=8, do_sample=True)}) == 8
    )


class Ban(LogitsProcessor):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids, scores):
        return scores.index_fill(-1, torch.tensor([self.token]), -math.inf)


def test_processors_apply_to_beams(dense) -> None:
    """https://github.com/vllm-project/vllm/issues/21546: logits processors were left out under beam search."""
    for decoder in (decodekit.strategy("beam"), decodekit.strategy("beam", num_beam_groups=2, diversity_penalty=0.5)):
        free = decoded(dense, decoder)
        banned = free[0][2]
        held = decoded(dense, decoder, logits_processor=[Ban(banned)])
        assert all(banned not in row for row in held)
        ruled = decodekit.load(
            {"strategy": decoder.recipe.strategy, "rules": [{"kind": "bad_words", "ids": [[banned]]}]}
        )
        assert held == decoded(dense, ruled)


# --- rows of a batch


class EndsWith(StoppingCriteria):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


def test_a_stop_condition_stops_its_row_alone(model) -> None:
    """https://github.com/huggingface/transformers/issues/22340: one row that met the condition ended the whole batch."""
    free = decoded(model, decodekit.load({}))
    token = next(token for token in free[0] if all(token not in row for row in free[1:]))
    stopped = decoded(model, decodekit.load({}), stopping_criteria=[EndsWith(token)])
    length = free[0].index(token) + 1
    assert stopped[0] == free[0][:length] + [0] * (8 - length)
    assert stopped[1:] == free[1:]


def test_guidance_in_a_padded_batch_is_that_of_each_prompt_alone(model) -> None:
    """https://github.com/baaivision/Emu3/issues/56: pads of the negative branch took part."""
    negatives = [[7, 21, 33], [44], [60, 61, 62, 63, 64]]
    decoder = decodekit.strategy("cfg", guidance_scale=3.0)
    batch = decoded(model, decoder, dk_inputs=[{"negative_prompt": ids} for ids in negatives])
    for prompt, ids, row in zip(PROMPTS, negatives, batch, strict=True):
        assert decoded(model, decoder, [prompt], dk_inputs=[{"negative_prompt": ids}]) == [row]


# --- constraints


@pytest.mark.parametrize("width", [97, 104, 128])
def test_logits_may_be_wider_than_the_vocabulary(tokenizer, width) -> None:
    """https://github.com/dottxt-ai/outlines/issues/236: a mask of the tokenizer's size met logits of the model's."""
    model = tiny_model("dense", vocab_size=width, dtype=torch.float64)
    decoder = decodekit.load({"constraint": {"kind": "regex", "pattern": "[0-9]{3,5}"}})
    for output in decoder.run(model, tokenizer, ["Who won?", "a"], max_new_tokens=8):
        assert output.error is None
        assert output.text.isdigit()
        assert 3 <= len(output.text) <= 5
        assert max(output.token_ids) < 97
