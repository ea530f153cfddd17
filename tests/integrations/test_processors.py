import re
from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessor

import decodekit
from decodekit import InputError, PluginError, Refused, RowError, Rule
from decodekit.constraints.json_schema import JsonSchema
from decodekit.constraints.regex import Regex
from decodekit.core import registry
from decodekit.core.random import Stream, prompt_digest
from decodekit.core.types import Request
from decodekit.rules.frequency_penalty import FrequencyPenalty
from decodekit.rules.min_length import MinLength
from decodekit.testing import make_rows, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.integration


def test_a_rule_works_under_plain_generate_and_counts_no_pads(dense, tokenizer) -> None:
    prompts = [[5, 17, 42, 8, 42], [9, 9]]
    ids = torch.tensor([prompts[0], [0, 0, 0, *prompts[1]]])
    rule = FrequencyPenalty(penalty=2.0, scope="both")
    processor = decodekit.as_logits_processor(rule, tokenizer)
    batch = dense.generate(ids, attention_mask=(ids != 0).long(), logits_processor=[processor], max_new_tokens=8)
    decoder = decodekit.load({"rules": [{"kind": "frequency_penalty", "penalty": 2.0, "scope": "both"}]})
    for row, prompt in zip(batch[:, 5:].tolist(), prompts, strict=True):
        solo = dense.generate(torch.tensor([prompt]), custom_generate=decoder, max_new_tokens=8)[
            0, len(prompt) :
        ].tolist()
        assert row[: len(solo)] == solo


def test_the_first_call_tells_where_the_prompt_ends(dense, tokenizer) -> None:
    processor = decodekit.as_logits_processor(MinLength(n=6), tokenizer)
    output = dense.generate(torch.tensor([[5, 17, 42]]), logits_processor=[processor], max_new_tokens=6, eos_token_id=1)
    assert output.shape[1] == 9


RULES = [
    {"kind": "typical", "p": 0.6},
    {"kind": "epsilon", "epsilon": 0.02},
    {"kind": "eta", "epsilon": 0.02},
    {"kind": "top_h", "h": 0.5},
    {"kind": "top_h", "h": 0.5, "mode": "compat"},
    {"kind": "xtc", "threshold": 0.02, "probability": 0.6},
    {"kind": "dry", "allowed_length": 1, "multiplier": 2.0},
    {"kind": "watermark"},
    {"kind": "watermark", "seeding_scheme": "selfhash", "context_width": 3},
    {"kind": "mirostat", "tau": 1.0},
]


@pytest.mark.parametrize("spec", RULES, ids=str)
def test_a_rule_does_the_same_in_a_recipe_in_python_and_under_plain_generate(model, tokenizer, spec) -> None:
    prompts = [[5, 17, 42, 8, 42], [9, 9], [30, 61, 30], [77, 12, 4, 77]]
    ids = torch.tensor([[0] * (5 - len(prompt)) + prompt for prompt in prompts])
    options = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "do_sample": True, "top_k": 0, **options}
    recipe = decodekit.load({"rules": [spec], "generation": {"seed": 5}}).bind(tokenizer=tokenizer)
    ours = model.generate(**inputs, custom_generate=recipe)
    rule = registry.create("rules", spec)
    streams = [Stream(5, 0, prompt_digest(prompt)) for prompt in prompts]
    requests = [Request(row, tuple(prompt), streams[row]) for row, prompt in enumerate(prompts)]
    rows = make_rows(prompts, states=[rule.init_state(request) for request in requests])
    python = rule.resolve(tokenizer)(replace(rows, streams=streams), ours.logits[0])
    assert torch.equal(ours.scores[0], python)
    assert not torch.equal(python, ours.logits[0])
    if spec["kind"] == "mirostat":
        with pytest.raises(Refused, match="rule 'mirostat' keeps state for each row"):
            decodekit.as_logits_processor(rule, tokenizer)
        return
    processor = decodekit.as_logits_processor(rule, tokenizer, seed=5)
    plain = model.generate(**inputs, logits_processor=[processor])
    torch.testing.assert_close(plain.scores[0], python.float())


class Stateful(Rule):
    kind: str = "stateful"

    def init_state(self, request):
        return 0

    def __call__(self, rows, logits):
        return logits


def test_what_cannot_be_carried_is_refused(tokenizer) -> None:
    with pytest.raises(Refused, match="rule 'stateful' keeps state for each row"):
        decodekit.as_logits_processor(Stateful(), tokenizer)
    with pytest.raises(InputError, match="expected a rule or a constraint, or its options such as"):
        decodekit.as_logits_processor("top_p", tokenizer)
    with pytest.raises(InputError, match="needs the model's tokenizer"):
        decodekit.as_logits_processor(MinLength(n=1), None)


def test_options_name_a_rule_or_a_constraint(dense, tokenizer) -> None:
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    given = [{"kind": "no_repeat_ngram", "n": 1}, {"kind": "regex", "pattern": "[a-d]{2}"}]
    processors = [decodekit.as_logits_processor(own, tokenizer) for own in given]
    output = dense.generate(torch.tensor([[5, 6]]), logits_processor=processors, **options)
    text = tokenizer.decode(output[0, 2:], skip_special_tokens=True)
    assert re.fullmatch("[a-d]{2}", text)
    assert text[0] != text[1]
    with pytest.raises(PluginError, match="unknown rule 'rejex'"):
        decodekit.as_logits_processor({"kind": "rejex"}, tokenizer)


PATTERN = "(the |[a-d]{2}){2,6}[xyz]"


def constrained(model, tokenizer, constraint, prompts=("abc", "hello the"), before=(), **options):
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    processor = decodekit.as_logits_processor(constraint, tokenizer)
    output = model.generate(
        **inputs, logits_processor=[*before, processor], max_new_tokens=40, pad_token_id=0, **options
    )
    return [tokenizer.decode(row, skip_special_tokens=True) for row in output[:, inputs.input_ids.shape[1] :]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "num_return_sequences": 4},
        {"num_beams": 4, "num_return_sequences": 4},
        {"num_beams": 3, "do_sample": True},
    ],
)
def test_every_output_of_generate_belongs_to_the_language(model, tokenizer, options):
    torch.manual_seed(0)
    texts = constrained(model, tokenizer, Regex(pattern=PATTERN), **({"do_sample": False} | options))
    assert len(texts) == 2 * options.get("num_return_sequences", 1)
    assert all(re.fullmatch(PATTERN, text) for text in texts), texts


def test_rows_end_at_different_steps(dense, tokenizer):
    torch.manual_seed(1)
    texts = constrained(dense, tokenizer, Regex(pattern="1{1,3}"), do_sample=True, num_return_sequences=8)
    assert len({len(text) for text in texts}) > 1
    assert all(set(text) == {"1"} for text in texts)


def test_beams_with_fewer_legal_tokens_than_beams(dense, tokenizer):
    texts = constrained(dense, tokenizer, Regex(pattern="a[bc]d"), num_beams=4, num_return_sequences=2)
    assert {*texts[:2]} == {"abd", "acd"} == {*texts[2:]}


def test_logits_wider_than_the_tokenizer_are_masked(tokenizer):
    wide = tiny_model("dense", vocab_size=130)
    wide.lm_head.weight[100:] *= 50  # without a mask these win
    assert constrained(wide, tokenizer, Regex(pattern="[ab]{5}")) != ["", ""]
    assert all(re.fullmatch("[ab]{5}", text) for text in constrained(wide, tokenizer, Regex(pattern="[ab]{5}")))


def test_says_so_when_other_processors_ban_all_legal_tokens(dense, tokenizer):
    class BanDigits(LogitsProcessor):
        def __call__(self, input_ids, scores):
            digits = tokenizer.convert_tokens_to_ids([*"0123456789"])
            return scores.index_fill(1, torch.tensor(digits), -torch.inf)

    with pytest.raises(RowError, match="row 0: every token that constraint 'regex' allows is banned"):
        constrained(dense, tokenizer, Regex(pattern=r"\d+"), before=[BanDigits()])


def test_each_call_starts_anew(dense):
    constraint, tokenizer = Regex(pattern="[a-c]{3}"), tiny_tokenizer()
    assert constrained(dense, tokenizer, constraint) == constrained(dense, tokenizer, constraint)


def test_beams_under_a_schema(model, tokenizer):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    constraint = JsonSchema(schema=schema, whitespace="compact")
    texts = constrained(model, tokenizer, constraint, num_beams=3, num_return_sequences=2)
    assert {*texts} == {'{"a":true}', '{"a":false}'}
