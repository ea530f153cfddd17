"""What other libraries' users reported about constraints, and what decodekit does there."""

import re

import pytest
import torch

import decodekit
from decodekit.constraints.json_schema import JsonSchema
from decodekit.constraints.regex import Regex
from decodekit.core.constraint import is_legal, mask_tokens, mask_words
from decodekit.core.errors import UnsupportedConstraint
from decodekit.core.protocols import Constraint
from decodekit.testing import tiny_model, tiny_tokenizer
from tests.llg.walks import byte_vocabulary

BYTES = byte_vocabulary()
PROMPTS = ["Who won?", "a", "The other one, please: 1 + 2 = "]


def started(constraint, vocabulary=BYTES):
    return constraint.compile(vocabulary).start()


def masked(state, vocabulary=BYTES):
    out = torch.zeros(1, mask_words(vocabulary.width), dtype=torch.int32)
    state.mask(out, 0)
    return out[0]


def walks(constraint, text, vocabulary=BYTES):
    """Whether the text's tokens are legal, and the text may end after them."""
    state = started(constraint, vocabulary)
    for token in vocabulary.encode(text, first=True):
        if not is_legal(masked(state, vocabulary), token):
            return False
        state.advance(token)
    return state.is_accepting()


def run(constraint, model, tokenizer, prompts=PROMPTS, **recipe):
    spec = {"constraint": constraint, **recipe}
    return decodekit.load(spec).run(model, tokenizer, prompts, max_new_tokens=40)


# Characters and tokens


def test_characters_over_several_tokens_are_never_cut() -> None:
    """https://github.com/dottxt-ai/outlines/issues/725."""
    emoji = Regex(pattern="[😀-🙏]+")
    assert walks(emoji, "😀🙏")
    state = started(emoji)
    for byte in "😃".encode():
        assert not state.is_accepting()
        state.advance(byte)
    assert state.is_accepting()


def test_tokens_that_spell_a_part_of_a_literal_are_legal_too() -> None:
    """https://github.com/guidance-ai/guidance/issues/1352."""
    legal = mask_tokens(masked(started(Regex(pattern="the cat"))))
    spelt = {BYTES.tokens[token] for token in legal}
    assert spelt == {b"t", b"the"}


def test_logits_wider_than_the_tokenizer(tokenizer) -> None:
    """https://github.com/dottxt-ai/outlines/issues/213."""
    wide = tiny_model("dense", vocab_size=130)
    wide.lm_head.weight[100:] *= 50  # without a mask these win
    for output in run({"kind": "regex", "pattern": "[ab]{5}"}, wide, tokenizer):
        assert re.fullmatch("[ab]{5}", output.text)


# Regexes


def test_an_accepting_state_keeps_its_edges() -> None:
    """outlines-core 0.2.14 loses them."""
    optional = Regex(pattern=r"1(\.5)?")
    assert [walks(optional, text) for text in ("1", "1.5", "1.", "1.55")] == [True, True, False, False]


def test_a_lookahead_is_enforced() -> None:
    """https://github.com/dottxt-ai/outlines/issues/456."""
    assert [walks(Regex(pattern="(?!foo)[a-z]{3}"), text) for text in ("bar", "fob", "foo")] == [True, True, False]


def test_everything_is_a_constraint_whose_mask_is_kept() -> None:
    """https://github.com/noamgat/lm-format-enforcer/issues/84: a mask a step took long; here it is the same tensor again."""
    compiled = Regex(pattern=".*").compile(BYTES)
    state = compiled.start()
    for token in b"abc":
        state.advance(token)
    before = compiled.mask(state._places[-1])
    state.advance(ord("d"))
    assert compiled.mask(state._places[-1]) is before


def test_a_compilation_that_explodes_is_ended_with_a_clear_error() -> None:
    """https://github.com/vllm-project/vllm/issues/45118."""
    with pytest.raises(UnsupportedConstraint, match=r"regex .* characters|repetitions|more than"):
        Regex(pattern="((a|b){1000}c){1000}").compile(BYTES)


# JSON Schema


def test_pattern_properties_are_enforced() -> None:
    """https://github.com/dottxt-ai/outlines-core/issues/148."""
    schema = {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False}
    texts = ('{"xa":1}', "{}", '{"xa":"b"}', '{"a":1}')
    assert [walks(JsonSchema(schema=schema), text) for text in texts] == [True, True, False, False]


def test_pattern_and_max_length_both_hold() -> None:
    """https://github.com/mlc-ai/xgrammar/issues/895."""
    schema = JsonSchema(schema={"type": "string", "pattern": "^a+b?$", "maxLength": 3})
    assert [walks(schema, f'"{text}"') for text in ("aab", "a", "aaab", "ba")] == [True, True, False, False]


def test_required_without_properties() -> None:
    """https://github.com/mlc-ai/xgrammar/issues/104."""
    schema = JsonSchema(schema={"type": "object", "required": ["a"]})
    assert [walks(schema, text) for text in ("{}", '{"b":1}', '{"a":1}', '{"b":1,"a":2}')] == [False, False, True, True]


def test_items_after_prefix_items() -> None:
    """https://github.com/mlc-ai/xgrammar/issues/840."""
    new = JsonSchema(schema={"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "integer"}})
    old = JsonSchema(
        schema={"type": "array", "items": [{"type": "null"}], "additionalItems": {"type": "integer"}}, draft="7"
    )
    for schema in (new, old):
        assert [walks(schema, text) for text in ("[null,1,2]", '[null,"a"]', "[1]")] == [True, False, False]


def test_a_declared_key_out_of_order_is_legal() -> None:
    """https://github.com/mlc-ai/xgrammar/issues/831."""
    members = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    schema = {"type": "object", "properties": members, "required": ["a", "b"], "additionalProperties": False}
    assert [walks(JsonSchema(schema=schema), text) for text in ('{"b":2,"a":1}', '{"b":2}')] == [True, False]


@pytest.mark.parametrize("whitespace", ["compact", "spaces", "indented"])
def test_whitespace_is_bounded(whitespace) -> None:
    """https://github.com/mlc-ai/xgrammar/issues/412, https://github.com/guidance-ai/llguidance/issues/267."""
    state = started(JsonSchema(schema={"type": "array", "minItems": 1}, whitespace=whitespace))
    state.advance(ord("["))
    taken = 0
    while blanks := [sign for sign in b" \n\t" if is_legal(masked(state), sign)]:
        state.advance(blanks[-1])
        taken += 1
        assert taken <= 70
    assert mask_tokens(masked(state))


# In the loop


def test_rows_of_a_batch_end_at_different_steps(dense, tokenizer) -> None:
    """https://github.com/dottxt-ai/outlines-core/issues/227."""
    outputs = run(
        {"kind": "regex", "pattern": "[1]{1,3}"},
        dense,
        tokenizer,
        PROMPTS * 3,
        generation={"do_sample": True, "seed": 1},
    )
    assert len({len(output.token_ids) for output in outputs}) > 1
    assert all(re.fullmatch("1{1,3}", output.text) for output in outputs)


def test_a_batch_with_one_schema(dense, tokenizer) -> None:
    """https://github.com/dottxt-ai/outlines/issues/1720."""
    schema = {"kind": "json_schema", "schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}}
    together = run(schema, dense, tokenizer)
    apart = [run(schema, dense, tokenizer, [prompt])[0] for prompt in PROMPTS]
    assert [output.token_ids for output in together] == [output.token_ids for output in apart]


def test_each_call_begins_anew(dense, tokenizer) -> None:
    """https://github.com/dottxt-ai/outlines/issues/1160."""
    decoder = decodekit.load({"constraint": {"kind": "regex", "pattern": "[a-c]{3}"}})
    first, again = (decoder.run(dense, tokenizer, PROMPTS, max_new_tokens=8) for _ in range(2))
    assert [output.text for output in first] == [output.text for output in again]
    assert all(re.fullmatch("[a-c]{3}", output.text) for output in again)


def test_legal_tokens_that_rules_ban_end_the_row_with_the_rules_name(dense, tokenizer) -> None:
    """https://github.com/huggingface/transformers/issues/22890."""
    [output] = run(
        {"kind": "choice", "choices": ["yes"]}, dense, tokenizer, ["a"], rules=[{"kind": "bad_words", "words": ["y"]}]
    )
    assert (output.finish_reason, output.token_ids) == ("error", [])
    assert "rule 'bad_words' left no token" in output.error


def test_constrained_text_without_a_bos_token(dense) -> None:
    """https://github.com/huggingface/transformers/issues/36210: token healing failed without one."""
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = None
    [output] = run({"kind": "regex", "pattern": "ly [a-z]{3}"}, dense, tokenizer, ["most"])
    assert re.fullmatch("ly [a-z]{3}", output.text)


@pytest.mark.parametrize("prompt", ["ab ab ab ab", "Who won?"])
def test_each_draft_position_has_a_mask_of_its_own(dense, tokenizer, prompt) -> None:
    """https://github.com/huggingface/transformers/issues/48390, https://github.com/vllm-project/vllm/issues/50952."""
    pattern = "(ab |cd ){4}[xy]z"
    plain = run({"kind": "regex", "pattern": pattern}, dense, tokenizer, [prompt], cache="dynamic")
    drafted = run(
        {"kind": "regex", "pattern": pattern},
        dense,
        tokenizer,
        [prompt],
        drafter={"kind": "ngram", "schedule": "constant"},
    )
    assert plain[0].token_ids == drafted[0].token_ids
    assert re.fullmatch(pattern, drafted[0].text)


@pytest.mark.parametrize(
    "constraint",
    [
        Regex(pattern="(ab?c|[a-d]{2}){2,8}"),
        JsonSchema(schema={"type": "array", "items": {"type": "string", "maxLength": 5}}),
    ],
    ids=["regex", "json_schema"],
)
def test_a_mask_after_rollback_is_that_of_a_replay(constraint: Constraint) -> None:
    """https://github.com/vllm-project/vllm/issues/46272."""
    text = "abcacab" if constraint.kind == "regex" else '["ab", "c"'
    tokens = list(text.encode())
    for kept in range(len(tokens)):
        state, replay = started(constraint), started(constraint)
        for token in tokens:
            state.advance(token)
        state.rollback(len(tokens) - kept)
        for token in tokens[:kept]:
            replay.advance(token)
        assert torch.equal(masked(state), masked(replay))
