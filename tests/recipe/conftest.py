"""Small plugins behind fake entry points, so that recipes are tested apart from the plugins that are installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from pydantic import BeforeValidator, Field, field_validator

from decodekit.core import registry
from decodekit.core.options import RecipePath
from decodekit.core.protocols import Constraint, Drafter, Plugin, Rule, SearchStrategy, SequenceStrategy, TokenStrategy


class Sample(TokenStrategy):
    """Plain decoding."""

    kind: Literal["sample"] = "sample"

    def score(self, outputs: Any) -> Any: ...


class Dola(TokenStrategy):
    kind: Literal["dola"] = "dola"
    layers: Literal["low", "high"] | tuple[int, ...] = "low"
    relative_top: float = Field(0.1, ge=0, le=1)
    early_norm: bool = False

    def score(self, outputs: Any) -> Any: ...


class Beam(SearchStrategy):
    kind: Literal["beam"] = "beam"
    num_beams: int = 4
    inner: TokenStrategy = Sample()

    @property
    def width(self) -> int:
        return self.num_beams

    def step(self, group: Any) -> Any: ...


class Contrastive(SearchStrategy):
    kind: Literal["contrastive_search"] = "contrastive_search"
    k: int = 4
    inner: TokenStrategy = Sample()

    @property
    def width(self) -> int:
        return self.k

    def step(self, group: Any) -> Any: ...


class Mbr(SequenceStrategy):
    kind: Literal["mbr"] = "mbr"
    n: int = 16
    inner: TokenStrategy
    also: tuple[TokenStrategy, ...] = ()

    @property
    def count(self) -> int:
        return self.n

    def decide(self, request: Any) -> Any: ...


class Vote(SequenceStrategy):
    """A sequence strategy that scores whole texts, over no token-level strategy."""

    kind: Literal["vote"] = "vote"
    inner: TokenStrategy = Sample()

    @property
    def count(self) -> int:
        return 1

    def decide(self, request: Any) -> Any: ...


class Temperature(Rule):
    kind: Literal["temperature"] = "temperature"
    t: float = Field(gt=0, description="divides the logits")

    def __call__(self, rows: Any, logits: Any) -> Any: ...


class TopP(Rule):
    kind: Literal["top_p"] = "top_p"
    p: float = Field(0.9, gt=0, le=1)

    def __call__(self, rows: Any, logits: Any) -> Any: ...


class Bias(Rule):
    kind: Literal["bias"] = "bias"
    bias: dict[int | str, float] = Field(default_factory=dict)
    words: tuple[str, ...] = ()
    top: int | list[int] = 0
    budget: Annotated[int, BeforeValidator(lambda v: int(v[:-3]) << 30 if str(v).endswith("GiB") else v)] = 0

    @field_validator("words")
    @classmethod
    def _known(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        if "crash" in words:
            raise KeyError("crash")
        if "verbose" in words:
            raise ValueError("first line\n  second line\n")
        return words

    def __call__(self, rows: Any, logits: Any) -> Any: ...


class JsonSchema(Constraint):
    kind: Literal["json_schema"] = "json_schema"
    schema_: RecipePath | dict[str, Any] = Field(alias="schema", default={})
    note: Any = None

    def compile(self, vocabulary: Any) -> Any: ...


class Regex(Constraint):
    kind: Literal["regex"] = "regex"
    file: RecipePath

    def compile(self, vocabulary: Any) -> Any: ...


class Ngram(Drafter):
    kind: Literal["ngram"] = "ngram"
    max_tokens: int = 5

    def start(self, session: Any) -> Any: ...


class _Distribution(NamedTuple):
    name: str
    version: str


class FakeEntryPoint:
    """What the registry reads of an entry point."""

    module = __name__

    def __init__(self, group: str, name: str, plugin: Any, distribution: str = "decodekit") -> None:
        self.group, self.name, self._plugin = group, name, plugin
        self.dist = _Distribution(distribution, "1.0")
        self.value = f"{distribution}.plugins:{name}"

    def load(self) -> Any:
        if isinstance(self._plugin, Exception):
            raise self._plugin
        return self._plugin


GROUPS: dict[str, list[type[Plugin]]] = {
    "rules": [Temperature, TopP, Bias],
    "strategies": [Sample, Dola, Beam, Contrastive, Mbr, Vote],
    "constraints": [Regex, JsonSchema],
    "drafters": [Ngram],
}


@pytest.fixture
def entries() -> list[FakeEntryPoint]:
    """The installed entry points."""
    return [
        FakeEntryPoint(f"decodekit.v1.{group}", plugin.model_fields["kind"].default, plugin)
        for group, plugins in GROUPS.items()
        for plugin in plugins
    ]


@pytest.fixture(autouse=True)
def _installed(entries: list[FakeEntryPoint], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry for entry in entries if entry.group == group])
    registry._entries.cache_clear()
    yield
    registry._entries.cache_clear()


@pytest.fixture
def install(entries: list[FakeEntryPoint]) -> Callable[..., None]:
    """Installs one more plugin, or what its import raises."""

    def install(group: str, kind: str, plugin: Any, distribution: str = "other") -> None:
        entries.append(FakeEntryPoint(f"decodekit.v1.{group}", kind, plugin, distribution))
        registry._entries.cache_clear()

    return install


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes recipe files in a fresh working directory; gives the name of the last one."""
    monkeypatch.chdir(tmp_path)

    def write(**files: str | bytes) -> str:
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path.relative_to(tmp_path))

    return write
