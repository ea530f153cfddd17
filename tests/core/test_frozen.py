import copy
import pickle
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from decodekit.core.frozen import FrozenDict


class Model(BaseModel):
    biases: FrozenDict[int, float] = FrozenDict({1: 2.0})


@pytest.mark.parametrize(
    "change",
    [
        lambda frozen: frozen.__setitem__(1, 2),
        lambda frozen: frozen.__delitem__(1),
        lambda frozen: frozen.__ior__({2: 3}),
        lambda frozen: frozen.update({2: 3}),
        lambda frozen: frozen.setdefault(2, 3),
        lambda frozen: frozen.pop(1),
        lambda frozen: frozen.popitem(),
        lambda frozen: frozen.clear(),
    ],
)
def test_cannot_change(change: Callable[[Any], Any]) -> None:
    frozen = FrozenDict({1: 2.0})
    with pytest.raises(TypeError, match="frozen; build a new one"):
        change(frozen)
    assert frozen == {1: 2.0}


def test_equal_dicts_hash_alike_whatever_their_order() -> None:
    assert hash(FrozenDict({1: 2, 3: 4})) == hash(FrozenDict({3: 4, 1: 2}))
    with pytest.raises(TypeError, match="unhashable"):
        hash(FrozenDict({1: []}))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda frozen: pickle.loads(pickle.dumps(frozen))])
def test_copies_are_frozen_dicts(duplicate: Callable[[Any], Any]) -> None:
    again = duplicate(FrozenDict({1: 2.0}))
    assert type(again) is FrozenDict
    assert again == {1: 2.0}


def test_is_a_field_like_a_dict() -> None:
    model = Model(biases=MappingProxyType({"3": "0.5"}))
    assert type(model.biases) is FrozenDict
    assert model.biases == {3: 0.5}
    assert model.model_dump() == {"biases": {3: 0.5}}
    assert Model.model_validate_json(model.model_dump_json()) == model
    with pytest.raises(ValidationError, match="valid dictionary"):
        Model(biases=[1])


@pytest.mark.filterwarnings("error")
def test_schema_is_that_of_a_dict() -> None:
    [schema] = Model.model_json_schema()["properties"].values()
    assert (schema["type"], schema["additionalProperties"]) == ("object", {"type": "number"})
    assert schema["default"] == {"1": 2.0}
