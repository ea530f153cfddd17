"""What a recipe says, validated: its plugins, its cache and its options of generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WrapValidator, model_validator
from pydantic_core import to_jsonable_python

from decodekit.core import options, registry
from decodekit.core.errors import nearest
from decodekit.core.protocols import (
    Constraint,
    Drafter,
    Plugin,
    Rule,
    SearchStrategy,
    SequenceStrategy,
    TokenStrategy,
    plain_decoding,
)
from decodekit.core.units import parse_bytes
from decodekit.recipe.generation import Generation

MAX_RULES = 100

Strategy = TokenStrategy | SearchStrategy | SequenceStrategy
Fallback = Literal["error", "relax", "eos", "raw"]


class DynamicSpec(BaseModel):
    """Hugging Face's own cache: a row's keys and values grow with it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["dynamic"] = "dynamic"


def _size(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, str) else value


class PagedSpec(BaseModel):
    """Keys and values in blocks, shared by rows that begin alike; states of recurrent layers by row."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["paged"] = "paged"
    block_size: int = Field(16, ge=1, le=256, description="tokens a block")
    budget: Annotated[int, Field(ge=1), BeforeValidator(_size)] | None = Field(
        None, description="most bytes of keys and values, such as 4GiB; as many as the call needs when left out"
    )
    quantization: Literal["int8", "fp8", "int4", "int2"] | None = Field(
        None, description="of full blocks of keys and values; as the model computes them when left out"
    )
    window: int | None = Field(
        None,
        ge=1,
        description="last tokens that full attention keeps, so that a row of any length takes constant memory "
        "(StreamingLLM); all of them when left out",
    )
    sinks: int = Field(4, ge=0, description="first tokens that stay beside a window")


CACHES: Mapping[str, type[DynamicSpec | PagedSpec]] = {"dynamic": DynamicSpec, "paged": PagedSpec}
"""The caches a recipe can name. A new one is a model like this, an entry here, and a member of the type of ``cache``."""


def _strategy(spec: Any, _: Any) -> Any:
    return registry.build("strategies", spec)


def _rules(spec: Any) -> Any:
    if isinstance(spec, str | Mapping):
        raise options.fault(
            f"should be a list, got {options.shown(spec)}; put one rule in brackets, too: [{{kind: ...}}]"
        )
    return spec


def _cache(spec: Any) -> Any:
    spec = {"kind": spec} if isinstance(spec, str) else spec
    if not isinstance(spec, Mapping):
        return spec
    if not isinstance(kind := spec.get("kind"), str):
        raise options.fault(f"'kind' should name one of {', '.join(CACHES)}")
    if kind not in CACHES:
        raise options.fault(f"unknown cache {kind!r}: {nearest(kind, CACHES)}", "kind")
    return options.validate(CACHES[kind], spec)


def _generation(spec: Any) -> Any:
    return options.validate(Generation, spec) if isinstance(spec, Mapping) else spec


class Recipe(BaseModel):
    """How to decode: which strategy, under which rules and constraint, with which drafter, cache and options.

    ``load_recipe`` makes one from a file or a mapping; from Python, plugins are given as they are.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Read by core.options: names that are often written here, and where they belong.
    elsewhere: ClassVar[Mapping[str, str]] = {
        **{name: f"generation: {{{name}: ...}}" for name in Generation.model_fields},
        "extend": "extends: base.yaml",
    }

    strategy: Annotated[Strategy, WrapValidator(_strategy)] = Field(
        default_factory=plain_decoding,
        description="scores tokens, keeps hypotheses, or decides between outputs; sample when left out",
    )
    rules: Annotated[Annotated[tuple[Rule, ...], Field(max_length=MAX_RULES)] | None, BeforeValidator(_rules)] = Field(
        None,
        description="change the logits, in order; given, even empty, they replace the sampling warpers of generate",
    )
    constraint: Constraint | None = Field(None, description="a language that every output belongs to")
    drafter: Drafter | None = Field(
        None, description="proposes tokens for the innermost token-level strategy to verify"
    )
    cache: Annotated[PagedSpec | DynamicSpec, BeforeValidator(_cache)] = Field(
        default_factory=PagedSpec,
        description="where keys and values live; left out, in blocks where the model and the call allow it",
    )
    fallback: Fallback = Field(
        "error",
        description="what becomes of a row whose rules leave no token: it fails, relaxes its rules, ends (eos), or "
        "decodes from the raw logits",
    )
    audit: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the steps whose logits are computed again without a cache and compared; what came of it is "
        "`audit` in the output's stats",
    )
    generation: Annotated[Generation, BeforeValidator(_generation)] = Field(
        default_factory=Generation, description="options of generate; the call's own win over them"
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, sections: Any) -> Any:
        """So that a recipe can take back a section of the one it extends, or leave one empty."""
        if isinstance(sections, Mapping):
            return {
                name: value for name, value in sections.items() if value is not None or name not in cls.model_fields
            }
        return sections

    def to_dict(self) -> dict[str, Any]:
        """What was written, merged, paths resolved: plain data for JSON; ``load_recipe`` makes an equal recipe."""
        return {name: plain(getattr(self, name)) for name in type(self).model_fields if name in self.model_fields_set}


def plain(value: Any) -> Any:
    """A plugin or section as a recipe writes it: its kind and the options that were given."""
    if isinstance(value, BaseModel):
        given = {
            name: plain(getattr(value, attribute))
            for name, attribute in options.names(type(value)).items()
            if attribute in value.model_fields_set
        }
        if isinstance(value, Plugin):
            return {"kind": registry.name_of(value), **{name: item for name, item in given.items() if name != "kind"}}
        return given
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return to_jsonable_python(value, fallback=repr)  # a Python function is shown: no file can name it
