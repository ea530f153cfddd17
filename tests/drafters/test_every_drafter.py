"""Every drafter on every kind of memory: greedy tokens are those of plain decoding, whatever else the recipe asks for."""

import copy

import pytest
import torch

import decodekit
from decodekit.cache.paged import PagedCache
from decodekit.core.compat import CACHE_KEY
from decodekit.core.errors import Refused
from decodekit.core.types import Output
from decodekit.testing import tiny_model
from tests.cache.families import family_model
from tests.drafters.making import QWEN, eagle_head, ids, medusa_head, mtp_head, near
from tests.drafters.test_draft_model import reversed_vocabulary

NAMES = [
    "ngram",
    "suffix",
    "recycle",
    "recycle tree",
    "lookahead",
    "draft_model",
    "another vocabulary",
    "layer_skip",
    "medusa",
    "eagle",
    "eagle tree",
    "mtp",
]
PROMPTS = ["Who won?", "a", "1 + 2 = 1 + 2 = ", "the other one", "b b b b b b b", "{}", "No.", "Say it again: the"]
RULES = [{"kind": "repetition_penalty", "penalty": 1.3}, {"kind": "no_repeat_ngram", "n": 4}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bo"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON = {"kind": "json_schema", "schema": SCHEMA, "whitespace": "compact"}


def target(family: str):
    """In float64."""
    return (
        copy.deepcopy(family_model("bamba")).double() if family == "mamba2" else tiny_model(family, dtype=torch.float64)
    )


def reversed_near(model):
    """A model like it, over the reversed vocabulary."""
    other = near(model)
    for embedding in (other.get_input_embeddings(), other.get_output_embeddings()):
        embedding.weight.data = embedding.weight.data.flip(0)
    return other


def made(name: str, model, folder) -> tuple[dict, dict]:
    """A drafter's part of a recipe, and the models that it names."""
    kind, *tree = name.split()
    options, models = {"kind": kind, "schedule": "constant"}, {}
    if kind in ("draft_model", "another"):
        options |= {"kind": "draft_model", "model": "small"}
        models["small"] = (reversed_near(model), reversed_vocabulary()) if kind == "another" else near(model)
    elif kind == "layer_skip":
        options["first"] = 3
    elif kind == "medusa":
        options["head"] = str(medusa_head(folder / kind, model))
    elif kind == "eagle":
        options["head"] = str(eagle_head(folder / kind, model))
    elif kind == "mtp":
        options["head"] = str(mtp_head(folder / kind, model, QWEN, "mtp"))
    elif kind == "lookahead":
        options |= {"max_tokens": 9, "window": 3, "guesses": 2}
    if tree == ["tree"]:
        options |= {"max_tokens": 6} | ({"leaves": 8} if kind == "recycle" else {"branching": 3})
    return options, models


class Turns:
    """Two turns of a batch over one cache: prompts, then each with its answer."""

    def __init__(self, model, tokenizer, parts: dict, prompts: list[str], new: int) -> None:
        self.model, self.tokenizer, self.parts, self.prompts = model, tokenizer, parts, prompts
        self.new = new
        self.plain = self._decode({}, {}, prompts, {})
        self.longer = [prompt + output.text for prompt, output in zip(prompts, self.plain, strict=True)]
        self.plain_again = self._decode({}, {}, self.longer, {})

    def check(self, drafter: dict, models: dict) -> list[Output]:
        """The outputs of a drafter, which have to be those of plain decoding."""
        cache = PagedCache(self.model.config, num_blocks=256, block_size=4, dtype=self.model.dtype)
        first = self._decode({"drafter": drafter}, models, self.prompts, {CACHE_KEY: cache})
        second = self._decode({"drafter": drafter}, models, self.longer, {CACHE_KEY: cache})
        for found, plain in ((first, self.plain), (second, self.plain_again)):
            assert ids(found) == ids(plain), (drafter, self.parts)
            assert [own.finish_reason for own in found] == [own.finish_reason for own in plain]
            assert [own.text for own in found] == [own.text for own in plain]
            assert all("drafter_error" not in own.stats for own in found), found[0].stats
        return [*first, *second]

    def _decode(self, more: dict, models: dict, prompts: list[str], options: dict) -> list[Output]:
        decoder = decodekit.load({**self.parts, **more}).bind(models=models)
        return decoder.run(self.model, self.tokenizer, prompts, raw=True, max_new_tokens=self.new, **options)


def all_turns(model, tokenizer, batch: int) -> list[Turns]:
    """Plain, with rules, in JSON, and with a stop string that ends in the middle of a row."""
    prompts = PROMPTS[:batch]
    turns = [
        Turns(model, tokenizer, parts, prompts, new)
        for parts, new in (({}, 12), ({"rules": RULES}, 12), ({"constraint": JSON}, 32))
    ]
    text = turns[0].plain[0].text
    stops = Turns(model, tokenizer, {"generation": {"stop_strings": [text[4:6]]}}, prompts, 12)
    assert stops.plain[0].finish_reason == "stop"
    return [*turns, stops]


@pytest.fixture(scope="module")
def turns():
    """Made once for a family and batch."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("family", ["dense", "sliding", "hybrid", "mamba2"])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_plain_decoding(turns, tokenizer, tmp_path, family, batch, name) -> None:
    if (family, batch) not in turns:
        turns[family, batch] = all_turns(target(family), tokenizer, batch)
    drafter, models = made(name, turns[family, batch][0].model, tmp_path)
    if (name, family) == ("mtp", "mamba2"):
        with pytest.raises(Refused, match="cannot run one of its attention layers alone"):
            turns[family, batch][0].check(drafter, models)
        return
    outputs = [output for own in turns[family, batch] for output in own.check(drafter, models)]
    assert sum(output.stats["draft_tokens"] for output in outputs) > 0
    if name in ("draft_model", "another vocabulary"):
        assert sum(output.stats["accepted_tokens"] for output in outputs) > 0


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_the_demo_model_says_the_same_with_every_training_free_drafter(demo, batch) -> None:
    model, tokenizer = demo
    turns = all_turns(model, tokenizer, batch)
    for name in ("ngram", "suffix", "recycle", "recycle tree", "lookahead"):
        outputs = [output for own in turns for output in own.check(*made(name, model, None))]
        assert sum(output.stats["draft_tokens"] for output in outputs) > 0


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
def test_the_demo_model_says_the_same_with_every_model_and_head(demo, batch, tmp_path) -> None:
    model, tokenizer = demo
    for own in all_turns(model, tokenizer, batch):
        for name in ("draft_model", "layer_skip"):
            own.check(*made(name, model, tmp_path))
