"""Tool calls: free text with calls between tags, each call one of some tools with arguments that fit its schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from decodekit.core.protocols import Constraint
from decodekit.core.vocabulary import Vocabulary
from decodekit.llg.engine import CompiledGrammar, is_empty
from decodekit.schemas.compiler import SchemaGrammar, Whitespace
from decodekit.schemas.drafts import draft_of
from decodekit.schemas.grammar import check_size, schema_grammar


class Tool(BaseModel):
    """A tool that may be called; a description, or the ``type`` beside a ``function``, says nothing about a call's form."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str = Field(min_length=1)
    parameters: bool | dict[str, Any] = Field(
        default_factory=lambda: {"type": "object", "properties": {}, "additionalProperties": False},
        description="the JSON Schema of its arguments; a tool without one takes none",
    )

    @model_validator(mode="before")
    @classmethod
    def _unwrapped(cls, value: Any) -> Any:
        """As chat templates have it, a tool is a ``function`` with a ``type`` beside it."""
        return value["function"] if isinstance(value, Mapping) and "function" in value else value

    @field_validator("parameters")
    @classmethod
    def _within_limits(cls, schema: Any) -> Any:
        check_size(schema)
        return schema


class ToolCalls(Constraint):
    """Free text and any number of calls in it, such as ``<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>``.

    The opening tag is what starts a call: behind it a call of one of the tools must follow, its members in any order, and the
    closing tag. Text without the opening tag stays free. The tags are spelled by ordinary tokens; a tokenizer that has them as
    special ones cannot write them here. Cost: as :class:`JsonSchema`'s within a call, less outside.
    """

    cost: ClassVar[str] = "one mask a token"

    kind: Literal["tool_calls"] = "tool_calls"
    tools: tuple[Tool, ...] = Field(
        min_length=1, description="a name and its parameters' JSON Schema each, also as chat templates take them"
    )
    opening: str = Field("<tool_call>", min_length=1, description="what a call begins with")
    closing: str = Field("</tool_call>", min_length=1, description="what a call ends with")
    arguments: str = Field("arguments", min_length=1, description="the name of the member with a call's arguments")
    required: bool = Field(False, description="at least one call")
    whitespace: Whitespace = Field("spaces", description="inside a call, as json_schema has it")

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [tool.name for tool in self.tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"tools {twice} are listed more than once; give each name once")
        if self.arguments == "name":
            raise ValueError("arguments is 'name', which holds the tool's name; give another member")
        return self

    def compile(self, vocabulary: Vocabulary) -> CompiledGrammar:
        grammar = self._calls()
        call = CompiledGrammar(grammar.lark, vocabulary, names=grammar.names).start().shortest_end()
        ending = b"" if call is None else self.opening.encode() + call + self.closing.encode()
        return CompiledGrammar(self.text(), vocabulary, ending=ending)

    def text(self) -> str:
        """The grammar in llguidance's Lark.

        Raises:
            UnsupportedConstraint: a keyword of a tool's parameters cannot be enforced.
            InputError: they are no JSON Schema, or no arguments fit them.
        """
        call = self._calls().lark
        opening = "".join(
            rf"\x{{{ord(character):x}}}" for character in self.opening
        )  # no sign means anything in a regex
        return "\n".join(
            [
                f"start: (dk_lead dk_call){'+' if self.required else '*'} DK_TEXT?",
                f"dk_lead[lazy]: /(?s:.*){opening}/",
                f"dk_call: DK_SPACE? dk_value DK_SPACE? {json.dumps(self.closing, ensure_ascii=False)}",
                f"DK_TEXT: /(?s:.+)/ & ~/(?s:.*){opening}(?s:.*)/",
                "DK_SPACE: /[ \\n]/",
                re.sub(r"(?m)^start(?=:)", "dk_value", call, count=1),
            ]
        )

    def _calls(self) -> SchemaGrammar:
        document = self.schema_of_calls()
        return schema_grammar(document, draft=draft_of(document), whitespace=self.whitespace, empty=is_empty)

    def schema_of_calls(self) -> dict[str, Any]:
        """The JSON Schema of one call; each tool's parameters are a resource of their own, so that references stay theirs."""
        return {
            "$defs": {
                str(number): {"$id": f"urn:tool:{number}", "allOf": [tool.parameters]}
                if isinstance(tool.parameters, bool)
                else {"$id": f"urn:tool:{number}", **tool.parameters}
                for number, tool in enumerate(self.tools)
            },
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"name": {"const": tool.name}, self.arguments: {"$ref": f"urn:tool:{number}"}},
                    "required": ["name", self.arguments],
                    "additionalProperties": False,
                }
                for number, tool in enumerate(self.tools)
            ],
        }
