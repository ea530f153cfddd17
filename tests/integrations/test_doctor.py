"""The laws hold on models that are right, and each fails on one that breaks it."""

import types

import pytest
import torch

from decodekit.integrations.doctor import LAWS, examine
from decodekit.testing import tiny_model, tiny_tokenizer
from decodekit.testing.mutants import planted
from decodekit.testing.mutants.faults import FAULTS
from tests.cache.families import family_model

pytestmark = pytest.mark.integration

TEXT = "tokens give the text back"  # a tokenizer of 97 tokens cannot


def failing(model) -> dict[str, str]:
    """The laws that fail, each with what it says to avoid."""
    findings = examine(model, tiny_tokenizer())
    return {own.law: own.avoid for own in findings if own.status == "fails" and own.law != TEXT}


@pytest.mark.parametrize("family", ["dense", "sliding", "hybrid"])
def test_all_laws_hold(family) -> None:
    findings = list(examine(tiny_model(family), tiny_tokenizer()))
    failed = [own.law for own in findings if own.status != "holds"]
    # Logits of such size are sharp: the smallest difference is a token's.
    assert failed == [
        TEXT,
        *([f"K/V as {kind} = full precision" for kind in ("fp8", "int4")] if family == "dense" else []),
    ]
    assert len(findings) == len(LAWS) + 4  # batches in four dtypes
    assert all(own.value <= own.limit for own in findings if own.status == "holds")


def test_a_tokenizer_of_bytes_gives_every_text_back(demo) -> None:
    _, tokenizer = demo
    model = tiny_model("dense", vocab_size=len(tokenizer), layers=1)
    [finding] = [own for own in examine(model, tokenizer) if own.law == TEXT]
    assert (finding.status, finding.value) == ("holds", 0)


def test_what_forgets_its_state_is_named() -> None:
    failed = failing(family_model("jamba"))
    assert failed["prefill in chunks = at once"].startswith("prefill_chunk_size")
    assert "prefill in chunks, in blocks" not in failed


def altered(model, change):
    """The model with another forward."""
    honest = type(model).forward

    def forward(self, *given, **inputs):
        return honest(self, *given, **change(dict(inputs)))

    forward.__signature__ = __import__("inspect").signature(honest)
    model.forward = types.MethodType(forward, model)
    return model


def test_a_model_that_ignores_its_mask_is_named() -> None:
    def ignoring(inputs):
        return {**inputs, "attention_mask": None}

    failed = failing(altered(tiny_model("dense"), ignoring))
    assert {"0 in a mask hides a token", "left padding changes nothing"} <= failed.keys()


def test_a_cache_that_is_wrong_is_named() -> None:
    def forgetful(inputs):
        cache = next((inputs[name] for name in ("cache", "past_key_values") if inputs.get(name) is not None), None)
        if cache is not None and cache.get_seq_length() > 8 and hasattr(cache, "layers"):
            for layer in cache.layers:
                if getattr(layer, "keys", None) is not None:
                    layer.keys[..., 3, :] = 0
        return inputs

    failed = failing(altered(tiny_model("dense"), forgetful))
    assert "cached = uncached" in failed
    assert not failed.keys() & {"0 in a mask hides a token", "a batch = its rows alone, float32"}


@pytest.mark.parametrize(
    ("fault", "family", "law"),
    [
        ("the newest state survives a rollback", "hybrid", "rollback = never forwarded"),
        ("a step works on the states themselves", "hybrid", "forks go their own way"),
        ("a window is gathered a token short", "sliding", "cached in blocks = uncached"),
        ("rejected tokens stay in the cache", "dense", "speculation = plain decoding"),
    ],
)
def test_a_fault_of_decodekit_itself_would_be_found(fault, family, law) -> None:
    [mutant] = [own for own in FAULTS if own.name == fault]
    with planted(mutant):
        assert law in failing(tiny_model(family))


def test_a_model_without_blocks_is_refused_nothing_else(monkeypatch) -> None:
    monkeypatch.setattr("decodekit.core.compat._OWN_CACHES", {"llama": "keeps a cache of its own"})
    findings = {own.law: own for own in examine(tiny_model("dense"), tiny_tokenizer())}
    assert findings["rollback = never forwarded"].status == "refused"
    assert "keeps a cache of its own" in findings["rollback = never forwarded"].note
    assert findings["cached = uncached"].status == "holds"


def test_nan_is_a_failure() -> None:
    model = tiny_model("dense")
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    assert "cached = uncached" in failing(model)
