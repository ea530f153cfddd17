import json
import random
import re

import jsonschema
import pytest
from pydantic import ValidationError

import decodekit
from decodekit.constraints.tool_calls import ToolCalls
from decodekit.core.errors import InputError, UnsupportedConstraint
from tests.llg.walks import accepts, byte_vocabulary, random_text

VOCABULARY = byte_vocabulary()
ADD = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"$ref": "#/$defs/number"}},
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "number"}},
}
WORD = {"type": "object", "properties": {"x": {"$ref": "#/$defs/number"}}, "$defs": {"number": {"enum": ["a", "b"]}}}
TOOLS = [
    {"name": "add", "parameters": ADD},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
    {"name": "spell", "parameters": {**WORD, "additionalProperties": False}},
]
PARAMETERS = {"add": ADD, "now": {"maxProperties": 0}, "spell": {**WORD, "additionalProperties": False}}


@pytest.fixture(scope="module")
def compiled():
    return ToolCalls(tools=TOOLS).compile(VOCABULARY)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Just text, with <b>tags</b> and < tool_call.",
        'So: <tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call> that was it.',
        '<tool_call>\n{"arguments": {"y": 1.5, "x": -2}, "name": "add"}\n</tool_call>',
        '<tool_call>{"name":"now","arguments":{}}</tool_call> <tool_call>{"name":"spell","arguments":{"x":"b"}}</tool_call>',
    ],
)
def test_text_and_calls_that_fit_are_legal(compiled, text) -> None:
    assert accepts(compiled, VOCABULARY, text)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call> I will call </tool_call>",
        '<tool_call>{"name": "subtract", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"y": 1}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"x": 1}}</tool_call>',
        '<tool_call>{"name": "spell", "arguments": {"x": 1}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {}, "id": 1}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {}}',
    ],
)
def test_calls_of_no_tool_or_with_wrong_arguments_are_not(compiled, text) -> None:
    assert not accepts(compiled, VOCABULARY, text)


def test_walks_hold_only_valid_calls(compiled) -> None:
    rng, calls = random.Random(0), 0
    for _ in range(20):
        state = compiled.start()
        for token in VOCABULARY.encode("a<tool_call>", first=True):
            state.advance(token)
        text = "a<tool_call>" + random_text(compiled, VOCABULARY, rng, rng.choice([0, 10, 40]), state)
        for call in re.findall("(?s)<tool_call>(.*?)</tool_call>", text):
            value = json.loads(call)
            jsonschema.validate(value["arguments"], PARAMETERS[value["name"]])
            calls += 1
    assert calls >= 20


def test_at_least_one_call_between_other_tags() -> None:
    constraint = ToolCalls(tools=TOOLS[:1], opening="[[", closing="]]/", arguments="parameters", required=True)
    compiled = constraint.compile(VOCABULARY)
    assert accepts(compiled, VOCABULARY, 'a [ [[{"name": "add", "parameters": {"x": 1}}]]/ b')
    assert not accepts(compiled, VOCABULARY, "a [ b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": []}, "at least 1 item"),
        ({"tools": TOOLS[:1] * 2}, r"tools \['add'\] are listed more than once"),
        ({"tools": TOOLS, "arguments": "name"}, "give another member"),
        ({"tools": [{"parameters": {}}]}, "name"),
    ],
)
def test_wrong_options(options, message) -> None:
    with pytest.raises(ValidationError, match=message):
        ToolCalls(**options)


def test_parameters_that_cannot_be() -> None:
    with pytest.raises(InputError, match="no JSON Schema"):
        ToolCalls(tools=[{"name": "a", "parameters": {"type": "text"}}]).text()
    with pytest.raises(UnsupportedConstraint):
        ToolCalls(tools=[{"name": "a", "parameters": {"$ref": "#/$defs/gone"}}]).text()


def test_the_demo_model_calls_a_tool(demo) -> None:
    model, tokenizer = demo
    decoder = decodekit.load(
        {
            "constraint": {"kind": "tool_calls", "tools": TOOLS[:1], "required": True},
            "generation": {"max_new_tokens": 60},
        }
    )
    [output] = decoder.run(model, tokenizer, ["Add 1 and 2 with the tool add."])
    call = json.loads(re.search("(?s)<tool_call>(.*?)</tool_call>", output.text)[1])
    assert call["name"] == "add"
    jsonschema.validate(call["arguments"], ADD)
