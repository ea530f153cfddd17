"""Reported faults of speculative decoding with draft models and heads, as they would show here.

transformers #32165, #30413, #48280, #48039, #48981, #46936, #47932; vLLM #14649, #41838; SGLang #9187, #27463; EAGLE #250;
Medusa #56.
That q is what was drawn from (#47932) is tested by distribution in ``tests/drafters/test_draft_model.py``.
"""

import pytest
import torch

from decodekit.core.draft_heads import HeadDrafts, run_head
from decodekit.testing import tiny_model, tiny_tokenizer
from tests.drafters.making import OPEN, PROMPTS, accepted, decode, eagle_head, few, ids, medusa_head, near
from tests.drafters.test_draft_model import reversed_model, reversed_vocabulary

SMALL = {"kind": "draft_model", "model": "small", "schedule": "constant"}


def test_a_row_of_a_batch_is_its_solo_run_with_its_own_acceptance() -> None:
    """transformers #32165, #30413."""
    model = few("dense")
    models = {"small": near(model)}
    together = decode(model, SMALL, models=models, generation=OPEN)
    for prompt, output in zip(PROMPTS, together, strict=True):
        [alone] = decode(model, SMALL, [prompt], models=models, generation=OPEN)
        assert output.token_ids == alone.token_ids
        assert output.stats["acceptance_by_position"] == alone.stats["acceptance_by_position"]
    assert len({output.stats["draft_rounds"] for output in together}) > 1


def test_bursts_across_a_sliding_window_are_those_of_whole_forwards() -> None:
    """transformers #48280: windows of 6 in target and draft, bursts of 4, far past the window."""
    model = few("sliding")
    generation = {"max_new_tokens": 30, "suppress_tokens": [1]}
    outputs = decode(model, {**SMALL, "max_tokens": 4}, models={"small": near(model)}, generation=generation)
    assert accepted(outputs) > 0
    [prompt] = [[5, 6, 4, 6, 5]]
    known = list(prompt)
    for token in outputs[0].token_ids:
        logits = model(torch.tensor([known]), use_cache=False).logits[0, -1]
        logits[1] = -torch.inf
        assert token == int(logits.argmax())
        known.append(token)


@pytest.mark.parametrize("most", [1, 2, 3, 9])
def test_eos_and_length_inside_a_draft_end_the_row(most) -> None:
    """transformers #48981, #48039: the model itself drafts, so that whole drafts would be accepted."""
    model = few("dense")
    [whole] = ids(decode(model, prompts=["ab"], generation=OPEN))
    for generation in ({**OPEN, "max_new_tokens": most}, {**OPEN, "eos_token_id": whole[min(most, 7)]}):
        [plain] = decode(model, prompts=["ab"], generation=generation)
        [output] = decode(model, SMALL, ["ab"], models={"small": model}, generation=generation)
        assert (output.token_ids, output.finish_reason) == (plain.token_ids, plain.finish_reason)


def test_tokenizers_of_other_lengths_give_the_tokens_of_plain_decoding() -> None:
    """transformers #46936: ``the`` is one token of one vocabulary and another of the other, and prompts differ in length."""
    model, texts = tiny_model("dense", dtype=torch.float64), ["the the the", "a", "? the ?"]
    models = {"small": (reversed_model("dense"), reversed_vocabulary())}
    outputs = decode(model, SMALL, texts, models=models, generation=OPEN)
    assert ids(outputs) == ids(decode(model, prompts=texts, generation=OPEN))
    assert accepted(outputs) > 0


def test_what_a_head_has_read_is_always_the_targets(tmp_path, monkeypatch) -> None:
    """vLLM #14649: after any rounds, keys and values are those of teacher forcing."""
    model, checked = few("dense"), []
    honest = HeadDrafts.observe

    def observe(self, verified) -> None:
        honest(self, verified)
        for own in verified:
            read = self._rows[own.row.row]
            if read.count:
                tokens = own.row.ids[: read.count + 1]
                hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
                _, [past] = run_head(self._head, [None], [tokens[1:]], [hidden[:-1]])
                torch.testing.assert_close(read.past.keys, past.keys)
                torch.testing.assert_close(read.past.values, past.values)
                checked.append(len(own.accepted))

    monkeypatch.setattr(HeadDrafts, "observe", observe)
    drafter = {"kind": "eagle", "head": str(eagle_head(tmp_path / "eagle", model)), "schedule": "constant"}
    accepted(decode(model, {**drafter, "branching": 3, "max_tokens": 8}, generation=OPEN))
    assert len(checked) > 10
    assert any(checked)


@pytest.mark.parametrize("family", ["dense", "hybrid"])
def test_heads_draft_trees_for_batches_and_do_not_wear_out(tmp_path, family) -> None:
    """SGLang #27463 (trees on a hybrid), EAGLE #250 (batches), Medusa #56 (greedy tokens), vLLM #41838 (acceptance stays)."""
    model = few(family)
    plain = ids(decode(model, generation=OPEN))
    for drafter in (
        {"kind": "eagle", "head": str(eagle_head(tmp_path / "eagle", model)), "branching": 3, "max_tokens": 8},
        {"kind": "medusa", "head": str(medusa_head(tmp_path / "medusa", model)), "max_tokens": 8},
    ):
        runs = [decode(model, {**drafter, "schedule": "constant"}, generation=OPEN) for _ in range(3)]
        assert all(ids(outputs) == plain for outputs in runs)
        assert len({accepted(outputs) for outputs in runs}) == 1


def test_heads_under_a_schema_end_with_it(tmp_path) -> None:
    """SGLang #9187: EAGLE and a schema never ended."""
    model, schema = (
        tiny_model("dense", dtype=torch.float64),
        {"type": "array", "items": {"enum": [1, 22]}, "maxItems": 3},
    )
    constraint = {"kind": "json_schema", "schema": schema, "whitespace": "compact"}
    plain = decode(model, constraint=constraint)
    for drafter in (
        {"kind": "eagle", "head": str(eagle_head(tmp_path / "eagle", model)), "branching": 3, "max_tokens": 8},
        {"kind": "medusa", "head": str(medusa_head(tmp_path / "medusa", model)), "max_tokens": 8},
    ):
        found = decode(model, {**drafter, "schedule": "constant"}, constraint=constraint)
        assert ids(found) == ids(plain)
        assert [own.finish_reason for own in found] == [own.finish_reason for own in plain]
        assert all(own.stats["constraint"]["complete"] for own in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_differ_at_near_ties_only_and_in_half_precision_only(tmp_path, dtype) -> None:
    """Medusa #56: blocks of tokens are computed in another order than single ones."""
    model, exact = few("dense").to(dtype), few("dense").to(dtype).double()
    drafter = {"kind": "medusa", "head": str(medusa_head(tmp_path / "medusa", model)), "max_tokens": 8}
    plain = ids(decode(model, generation=OPEN))
    found = ids(decode(model, {**drafter, "schedule": "constant"}, generation=OPEN))
    if dtype is torch.float32:
        assert found == plain
    prompts = [tiny_tokenizer()(prompt).input_ids for prompt in PROMPTS]
    for prompt, one, other in zip(prompts, found, plain, strict=True):
        place = next((place for place, pair in enumerate(zip(one, other, strict=True)) if len({*pair}) > 1), None)
        if place is not None:
            logits = exact(torch.tensor([[*prompt, *one[:place]]])).logits[0, -1]
            apart = abs(float(logits[one[place]] - logits[other[place]]))
            assert apart < 16 * torch.finfo(dtype).eps * float(logits.abs().max())
