import json
import re

import jsonschema
import pytest
import torch

import decodekit
from decodekit.core.errors import InputError, UnsupportedConstraint
from decodekit.fsm.masks import FsmState
from decodekit.runtime.constraining import Marker, constrain

PATTERN = r"(\d{3}-)+the end(ing)?[.!]|abc"
PROMPTS = ["Who won?", "a", "The other one, please: 1 + 2 = "]

pytestmark = pytest.mark.integration


def decoder(**recipe) -> decodekit.Decoder:
    return decodekit.load({"constraint": {"kind": "regex", "pattern": PATTERN}, **recipe})


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"cache": "dynamic"},
        {"generation": {"do_sample": True, "seed": 2}},
        {"generation": {"do_sample": True, "seed": 2, "num_return_sequences": 3}},
        {"strategy": {"kind": "beam", "num_beams": 3}},
        {"strategy": "contrastive_search"},
        {"strategy": {"kind": "dola", "layers": "high"}},
        {"drafter": {"kind": "ngram", "schedule": "constant"}},
        {"rules": [{"kind": "repetition_penalty", "penalty": 1.3}]},
    ],
    ids=str,
)
def test_every_output_belongs_to_the_language_in_a_batch_as_alone(model, tokenizer, recipe) -> None:
    own = decoder(**recipe)
    outputs = own.run(model, tokenizer, PROMPTS, max_new_tokens=24)
    for output in outputs:
        assert re.fullmatch(PATTERN, output.text)
        assert output.stats["constraint"] == {"kind": "regex", "exact": True, "complete": True}
    copies = len(outputs) // len(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        alone = own.run(model, tokenizer, [prompt], max_new_tokens=24)
        assert [output.token_ids for output in alone] == [
            output.token_ids for output in outputs[row * copies : (row + 1) * copies]
        ]


def test_forced_tokens_are_forwarded_together_and_change_nothing(model, tokenizer) -> None:
    together = decoder().run(model, tokenizer, PROMPTS, max_new_tokens=24)
    apart = decoder(cache="dynamic").run(model, tokenizer, PROMPTS, max_new_tokens=24)
    for fast, slow in zip(together, apart, strict=True):
        assert fast.token_ids == slow.token_ids
        assert fast.logprobs == pytest.approx(slow.logprobs, abs=1e-4)  # states of the hybrid model are float32
        forced = fast.stats["forced_tokens"]
        assert forced >= 5  # "he end" and more once it has begun
        assert fast.stats["target_forwards"] <= slow.stats["target_forwards"] - forced + 2


@pytest.mark.parametrize("room", range(3, 20))
def test_a_limit_still_gives_a_whole_text(dense, tokenizer, room) -> None:
    for output in decoder().run(dense, tokenizer, PROMPTS, max_new_tokens=room):
        assert re.fullmatch(PATTERN, output.text), output.text
        assert len(output.token_ids) <= room


def test_a_limit_that_no_text_fits_is_said_before_generation(dense, tokenizer) -> None:
    with pytest.raises(InputError, match="no text of constraint 'regex' has at most 2 tokens; raise max_new_tokens"):
        decoder().run(dense, tokenizer, PROMPTS, max_new_tokens=2)


def test_each_prompt_may_have_its_own_and_one_that_cannot_be_fails_alone(dense, tokenizer) -> None:
    free = decodekit.load({}).run(dense, tokenizer, ["a"], max_new_tokens=12)[0]
    outputs = decodekit.load({}).run(
        dense,
        tokenizer,
        [
            {"prompt": "Who won?", "constraint": {"kind": "regex", "pattern": "x+y"}},
            "a",
            {"prompt": "b", "constraint": {"kind": "choice", "choices": ["yes", "no"]}},
            {"prompt": "c", "constraint": {"kind": "regex", "pattern": "x{50}"}},
            {"prompt": "d", "constraint": {"kind": "regexx", "pattern": "x"}},
        ],
        max_new_tokens=12,
    )
    assert re.fullmatch("x+y", outputs[0].text)
    assert outputs[1].token_ids == free.token_ids
    assert "constraint" not in outputs[1].stats
    assert outputs[2].text in ("yes", "no")
    assert "no text of constraint 'regex' has at most 12 tokens" in outputs[3].error
    assert "unknown constraint 'regexx'" in outputs[4].error


def test_a_rule_that_bans_all_that_is_legal_ends_the_row_with_its_name(dense, tokenizer) -> None:
    [output] = decodekit.load(
        {"constraint": {"kind": "choice", "choices": ["yes"]}, "rules": [{"kind": "bad_words", "words": ["y"]}]}
    ).run(dense, tokenizer, ["a"], max_new_tokens=5)
    assert output.finish_reason == "error"
    assert "rule 'bad_words' left no token" in output.error


@pytest.mark.parametrize("hook", ["mask_within", "advance", "forced_tokens"])
def test_one_that_grows_too_large_ends_its_row_alone(dense, tokenizer, monkeypatch, hook) -> None:
    free = decodekit.load({}).run(dense, tokenizer, ["b"], max_new_tokens=12)[0]
    plain = getattr(FsmState, hook)

    def too_large(state, *args):
        if len(state._places) > 3:
            raise UnsupportedConstraint("more than 3 states", ("size",))
        return plain(state, *args)

    monkeypatch.setattr(FsmState, hook, too_large)
    own = {"kind": "regex", "pattern": "[xy]+z"}
    stopped, other = decodekit.load({"drafter": {"kind": "ngram", "schedule": "constant"}}).run(
        dense, tokenizer, [{"prompt": "a", "constraint": own}, "b"], max_new_tokens=12
    )
    assert stopped.finish_reason == "error"
    assert "constraint 'regex' cannot be followed any further: more than 3 states" in stopped.error
    assert not stopped.stats["constraint"]["complete"]
    assert other.token_ids == free.token_ids


def test_it_begins_after_its_marker(dense, tokenizer) -> None:
    free = decodekit.load({}).run(dense, tokenizer, ["Who won?"], max_new_tokens=12)[0]
    marker = free.text[3:5]
    own = decodekit.load({"constraint": {"kind": "regex", "pattern": "x+y", "after": marker}})
    [output] = own.run(dense, tokenizer, ["Who won?"], max_new_tokens=20)
    before, _, after = output.text.partition(marker)
    assert output.text.startswith(free.text[: len(before)])
    assert re.fullmatch("x+y", after[len(after) - len(after.lstrip()) :]) or re.fullmatch("x+y", after)


def test_a_marker_may_lie_over_several_tokens_and_its_forks_are_apart(tokenizer) -> None:
    ids = tokenizer("ok the end", add_special_tokens=False).input_ids
    marker = Marker("the e", tokenizer)
    found = [marker.seen(token) for token in ids]
    assert found.index(True) == len(tokenizer("ok the e", add_special_tokens=False).input_ids) - 1
    first = Marker("ab", tokenizer)
    [a], [b] = (tokenizer(text, add_special_tokens=False).input_ids for text in "ab")
    first.seen(a)
    other = first.fork()
    assert other.seen(b)
    assert not first.seen(a)


def test_free_positions_cost_nothing() -> None:
    scores = torch.randn(2, 5)
    same, failures = constrain(scores, scores, [None, None])
    assert same is scores
    assert failures == {}


def test_where_no_legal_token_is_plausible_the_models_own_logits_count() -> None:
    class Legal:
        def mask(self) -> torch.Tensor:
            return torch.tensor([0b00110], dtype=torch.int32)

    scores = torch.tensor([[0.0, -torch.inf, -torch.inf, 1.0, 2.0], [0.0, -torch.inf, 3.0, 1.0, 2.0]])
    plain = torch.tensor([[9.0, 4.0, 5.0, 9.0, 9.0]] * 2)
    found, failures = constrain(scores, plain, [Legal(), Legal()])
    inf = torch.inf
    assert found.tolist() == [[-inf, 4.0, 5.0, -inf, -inf], [-inf, -inf, 3.0, -inf, -inf]]
    assert failures == {}


def test_it_needs_a_tokenizer(dense) -> None:
    with pytest.raises(InputError, match="constraint 'regex' needs a tokenizer; give dk_tokenizer"):
        dense.generate(torch.tensor([[5]]), custom_generate=decoder(), max_new_tokens=5)


def test_a_second_call_begins_afresh(dense, tokenizer) -> None:
    own = decoder()
    first = own.run(dense, tokenizer, PROMPTS, max_new_tokens=24)
    again = own.run(dense, tokenizer, PROMPTS, max_new_tokens=24)
    assert [output.token_ids for output in first] == [output.token_ids for output in again]


def test_it_begins_after_a_special_token(dense, tokenizer) -> None:
    special = tokenizer.eos_token
    marker = Marker(special, tokenizer)
    ids = [*tokenizer("ab", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    assert [marker.seen(token) for token in ids] == [False] * (len(ids) - 1) + [True]


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "recipe",
    [
        {"drafter": {"kind": "ngram", "schedule": "constant"}},
        {"generation": {"do_sample": True, "seed": 3, "num_return_sequences": 3}},
        {
            "strategy": {"kind": "self_consistency", "n": 3, "extract": {"kind": "json_path", "path": "b"}},
            "generation": {"do_sample": True, "seed": 3},
        },
        {"strategy": {"kind": "beam", "num_beams": 3}},
        {"strategy": {"kind": "dola", "layers": "high"}},
        {"strategy": {"kind": "cad", "context": "b is x"}},
    ],
    ids=lambda recipe: str(recipe.get("strategy", recipe)),
)
def test_a_schema_holds_whatever_decodes(model, tokenizer, recipe) -> None:
    own = decodekit.load({"constraint": {"kind": "json_schema", "schema": SCHEMA, "whitespace": "compact"}, **recipe})
    for output in own.run(model, tokenizer, ["Who won?", "a"], max_new_tokens=60):
        jsonschema.validate(json.loads(output.text), SCHEMA)
        assert output.stats["constraint"] == {"kind": "json_schema", "exact": True, "complete": True}


def test_an_end_far_behind_the_limit_is_looked_for_once(model, tokenizer, monkeypatch) -> None:
    from decodekit.llg import engine

    looks, search = [], engine.GrammarState._searched_end

    def counted(self):
        looks.append(self)
        return search(self)

    monkeypatch.setattr(engine.GrammarState, "_searched_end", counted)
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 200}
    own = decodekit.load({"constraint": {"kind": "json_schema", "schema": schema}})
    [output] = own.run(model, tokenizer, ["a"], max_new_tokens=90)
    assert output.finish_reason == "length"
    assert output.text.startswith("[")
    assert len(looks) == 1
