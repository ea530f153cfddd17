"""Whatever a file or a text holds, it is read or refused in one clear line: no other error, no endless work.

Every parser of what users write or download: recipes, schemas, regexes, grammars, cache files, heads, traces. The long run:
``pytest -m slow tests/fuzz``.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from decodekit.cache.paged import PagedCache
from decodekit.core import registry
from decodekit.core.checkpoints import read_tensors
from decodekit.core.constraint import mask_words
from decodekit.core.errors import DecodekitError, RowError
from decodekit.core.trace import TRACE_VERSION, read_trace
from decodekit.core.vetting import vet
from decodekit.recipe.load import recipe_faults
from decodekit.testing import tiny_model
from tests.cache.families import Loop
from tests.llg.walks import byte_vocabulary

ROOT = Path(__file__).parents[2]
RECIPES = [path.read_text() for path in sorted((ROOT / "examples/recipes").glob("*.yaml"))]
GRAMMARS = [path.read_text() for path in sorted((ROOT / "grammars").glob("*.lark"))]
VOCABULARY = byte_vocabulary()
RUNS = [40, pytest.param(4000, marks=pytest.mark.slow)]

NASTY = [
    *"{}[]()<>:,-#&*!|>'\"%@`\\/~^$.+?=;\n\t\0",
    *("\ufeff", "\u2028", "\x85", "\ud800", "😀", "é", "*a", "&a ", "<<: *a", "!!python/object/apply:os.system [ls]", "---\n"),
    *("...\n", ".nan", ".inf", "1e999", "-0", "0x", "9" * 80, "null", "true", "extends: recipe.yaml\n", "kind:", "{1000000}"),
    *("{1,99999}", "(?", "(?<=", "(?!", "[^", "[:", r"\p{L}", r"\1", r"\u{110000}", r"\x", "$ref", '"#"', "%import", "%ignore"),
    *("->", "::=", "start:"),
]  # fmt: skip


@st.composite
def mutated(draw, sources):
    """One of these texts with a few pieces deleted, repeated, moved, or put in."""
    text = draw(st.sampled_from(sources))
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.sampled_from([0, 1, 2, 5, 20, 200])))
        piece = text[start:stop]
        put = draw(st.sampled_from(["", piece * 2, piece[::-1]]) | st.sampled_from(NASTY) | st.text(max_size=4))
        text = text[:start] + put + text[stop:]
    return text


def clear(error: DecodekitError) -> None:
    assert "\n" not in str(error), "one line"
    assert len(str(error)) < 5000, "a line that a person reads"


def fuzz(examples: int, strategy, check) -> None:
    """The short run repeats its examples; the long one draws new ones."""

    @settings(max_examples=examples, derandomize=examples == RUNS[0], suppress_health_check=list(HealthCheck))
    @given(strategy)
    def run(value):
        check(value)

    run()


@pytest.mark.parametrize("examples", RUNS)
def test_recipes(examples, tmp_path) -> None:
    for source in (ROOT / "examples/recipes").glob("*.yaml"):
        (tmp_path / source.name).write_text(source.read_text())

    def check(text) -> None:
        for name in ("fuzzed.yaml", "fuzzed.json"):
            path = tmp_path / name
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
            for error in recipe_faults(path):
                clear(error)
                assert name in str(error) or error.origin

    fuzz(examples, mutated(RECIPES), check)


@pytest.mark.parametrize("examples", RUNS)
def test_values_of_recipes(examples) -> None:
    """Any plain data in the place of any section."""
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    data = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    )
    sections = st.sampled_from(
        ["strategy", "rules", "constraint", "drafter", "cache", "generation", "fallback", "audit", "extends"]
    )
    kinds = st.sampled_from([kind for group in registry.GROUPS for kind in registry.kinds(group)])
    plugins = st.builds(lambda kind, more: {**more, "kind": kind}, kinds, st.dictionaries(st.text(max_size=6), data))

    def check(recipe) -> None:
        for error in recipe_faults(recipe):
            clear(error)

    fuzz(examples, st.dictionaries(sections, data | plugins | st.lists(plugins, max_size=3), max_size=4), check)


def compiled(spec: dict) -> None:
    """Compile a constraint as a call does, and walk it for a few tokens."""
    try:
        constraint = registry.create("constraints", spec)
        vet(constraint)
        state = constraint.compile(VOCABULARY).start()
        mask = torch.zeros(1, mask_words(VOCABULARY.width), dtype=torch.int32)
        rng = random.Random(0)
        for _ in range(4):
            state.mask(mask, 0)
            legal = [token for token in range(VOCABULARY.width) if mask[0, token // 32] >> token % 32 & 1]
            if not legal or legal == list(VOCABULARY.eos_ids):
                break
            state.advance(rng.choice([token for token in legal if token not in VOCABULARY.eos_ids]))
    except RowError:
        pass
    except DecodekitError as error:
        clear(error)


@pytest.mark.parametrize("examples", RUNS)
def test_regexes(examples) -> None:
    sources = [
        r"(\d{3}-)+the end(ing)?[.!]|abc",
        r"^(?:[a-zé]+\s?){1,4}$",
        r"(?=.*\d)(?!.*x)[\w\-]{4,8}",
        r"[^\]\\]*\b",
    ]
    fuzz(examples, mutated(sources), lambda text: compiled({"kind": "regex", "pattern": text}))


@pytest.mark.parametrize("examples", RUNS)
def test_schemas(examples) -> None:
    names = [
        "type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties", "items",
        "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minimum", "maximum", "exclusiveMinimum",
        "multipleOf", "pattern", "minLength", "maxLength", "format", "anyOf", "oneOf", "allOf", "not", "if", "then", "else",
        "$ref", "$defs", "definitions", "dependentRequired", "propertyNames", "minProperties", "maxProperties", "$schema",
        "$id", "unevaluatedProperties",
    ]  # fmt: skip
    leaves = (
        st.none() | st.booleans() | st.integers(-5, 2**40) | st.floats() | st.text(max_size=4)
        | st.sampled_from(["object", "array", "string", "integer", "number", "date", "#", "#/$defs/a", "^a+$", "http://x/y"])
    )  # fmt: skip
    schemas = st.recursive(
        leaves,
        lambda inner: (
            st.dictionaries(st.sampled_from(names), inner, max_size=4)
            | st.dictionaries(st.sampled_from(["a", "b", "é", ""]), inner, max_size=2)
            | st.lists(inner, max_size=3)
        ),
        max_leaves=12,
    )
    fuzz(examples, schemas, lambda schema: compiled({"kind": "json_schema", "schema": schema}))


@pytest.mark.parametrize("examples", RUNS)
def test_grammars(examples) -> None:
    gbnf = 'root ::= "a" [0-9]+ (item | "b")*\nitem ::= "[" root? "]" | [^x]{1,3}\n'
    fuzz(
        examples,
        mutated([*GRAMMARS, gbnf]),
        lambda text: compiled({"kind": "grammar", "gbnf" if "::=" in text else "lark": text}),
    )


@pytest.fixture(scope="module")
def exported():
    model = tiny_model("hybrid", layers=2)
    loop = Loop(model, PagedCache(model.config, num_blocks=32, block_size=4))
    loop.open([5, 6, 7, 8, 9, 10])
    loop.prefill(0, [5, 6, 7, 8, 9, 10])
    return loop.cache, loop.cache.export(0)


@st.composite
def damaged(draw, blob: bytes):
    """Bytes of a file with a few of them changed, missing or added; most of them in the header."""
    blob = bytearray(blob)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, 400) | st.integers(0, len(blob)))
        blob[place : place + draw(st.integers(0, 9))] = draw(st.binary(max_size=9))
    return bytes(blob)


@pytest.mark.parametrize("examples", RUNS)
def test_cache_files(examples, exported) -> None:
    cache, blob = exported
    rows = len(cache.rows)

    def check(content) -> None:
        if content != blob:
            with pytest.raises(DecodekitError) as error:
                cache.load(content)
            clear(error.value)
            assert len(cache.rows) == rows

    fuzz(examples, damaged(blob) | st.binary(max_size=300), check)


@pytest.mark.parametrize("examples", RUNS)
def test_heads(examples, tmp_path) -> None:
    torch.save({"0.weight": torch.zeros(2, 3)}, tmp_path / "whole.pt")
    files = {"pt": (tmp_path / "whole.pt").read_bytes(), "safetensors": save({"0.weight": torch.zeros(2, 3)})}
    for suffix, blob in files.items():
        path = tmp_path / f"head.{suffix}"

        def check(content, path=path) -> None:
            path.write_bytes(content)
            try:
                tensors = read_tensors(path, ".*")
            except DecodekitError as error:
                clear(error)
            else:
                assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())

        fuzz(examples, damaged(blob), check)


@pytest.mark.parametrize("examples", RUNS)
def test_traces(examples, tmp_path) -> None:
    lines = [
        {"trace": TRACE_VERSION, "model": "m", "recipe": {}, "prompt_ids": [[5]], "seed": 1},
        {"event": "token", "id": 5, "row": 0, "position": 3, "text": "a"},
    ]
    path = tmp_path / "trace.jsonl"

    def check(text) -> None:
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            assert all(isinstance(record, dict) for record in read_trace(path)[1])
        except DecodekitError as error:
            clear(error)

    fuzz(examples, mutated(["\n".join(map(json.dumps, lines)) + "\n"]), check)
