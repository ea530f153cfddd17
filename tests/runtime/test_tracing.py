import pytest

import decodekit
from decodekit.core.trace import read_trace

PLAIN = {"max_new_tokens": 12, "eos_token_id": 96}


def traced(recipe, model, tokenizer, prompts, path):
    """The outputs, the header, the token records and the events by name."""
    outputs = decodekit.load(recipe).run(model, tokenizer, prompts, trace=path)
    header, records = read_trace(path)
    tokens, events = [], {}
    for record in records:
        if record["type"] == "token":
            tokens.append(record)
        else:
            events.setdefault(record["event"], []).append(record)
    return outputs, header, tokens, events


@pytest.mark.parametrize("alpha", [0, 1])
def test_both_branches_of_a_contrast_are_told(dense, tokenizer, tmp_path, alpha) -> None:
    recipe = {
        "strategy": {"kind": "cad", "alpha": alpha},
        "rules": [{"kind": "top_k", "k": 3}],
        "generation": {**PLAIN, "do_sample": True, "seed": 0},
    }
    prompt = {"prompt": "Who won?", "context": "The other."}
    _, header, tokens, _ = traced(recipe, dense, tokenizer, [prompt], tmp_path / "t.jsonl")
    assert header["prompts"] == ["Who won?"]
    assert tokens
    for token in tokens:
        given, prior = token["branches"]
        assert [given["branch"], prior["branch"]] == ["main", "without_context"]
        scores, kept = token["alternatives"]
        assert scores["stage"] == "scores"
        assert [scores["legal"], kept["legal"]] == [97, 3]
        assert kept["prob"] == pytest.approx(token["prob"])
        chosen = [probability for other, _, probability in kept["top"] if other == token["id"]]
        assert chosen == [pytest.approx(token["prob"])]
        # Without contrast the scores are the model's own, with it they are not.
        assert (scores["top"] == given["top"]) == (token["shift"] < 1e-9) == (alpha == 0)
        assert given["top"] != prior["top"]


@pytest.mark.parametrize("drafter", ["ngram", {"kind": "recycle", "leaves": 3}])
def test_drafts_are_told_before_their_tokens(dense, tokenizer, tmp_path, drafter) -> None:
    recipe = {
        "drafter": {"kind": drafter} if isinstance(drafter, str) else drafter,
        "rules": [{"kind": "logit_bias", "bias": {"th": 30.0, "the": 30.5}}],
        "generation": PLAIN,
    }
    recipe["drafter"] |= {"schedule": "constant"}
    [output], _, tokens, events = traced(recipe, dense, tokenizer, ["the the the"], tmp_path / "t.jsonl")
    assert [token["id"] for token in tokens] == output.token_ids
    assert sum("draft" in token for token in tokens) == output.stats["accepted_tokens"] > 0
    drafted = 0
    for event in events["draft"]:
        drafted += len(event["tokens"])
        path = [event["tokens"][node][0] for node in event["accepted"]]
        own = {token["position"]: token for token in tokens}
        start = event["position"]
        assert output.token_ids[start : start + len(path)] == path
        assert [own[start + depth]["draft"] for depth in range(len(path))] == event["accepted"]
        parents = [event["parents"][node] for node in event["accepted"]]
        assert parents == [-1, *event["accepted"]][: len(parents)]
    assert drafted == output.stats["draft_tokens"]


def test_the_steps_of_a_search_lead_to_its_outputs(dense, tokenizer, tmp_path) -> None:
    recipe = {"strategy": {"kind": "beam", "num_beams": 3}, "generation": {**PLAIN, "num_return_sequences": 3}}
    outputs, _, tokens, events = traced(recipe, dense, tokenizer, ["Who won?"], tmp_path / "t.jsonl")
    assert tokens == []
    paths, found = [[]], []
    for event in events["search"]:
        found += [paths[own["parent"]] + [own["id"]] for own in event["ended"] if "id" in own]
        found += [paths[own["parent"]] for own in event["ended"] if "id" not in own]
        paths = [paths[own["parent"]] + [own["id"]] for own in event["hypotheses"]]
        assert all(len(own["alternatives"]) == len(own["branches"]) == 1 for own in event["hypotheses"])
    assert all(output.token_ids in found for output in outputs)


def test_candidates_are_told_with_their_rows_and_the_matrix_of_utilities(dense, tokenizer, tmp_path) -> None:
    recipe = {
        "strategy": {"kind": "mbr", "n": 3, "references": 2, "utility": "chrf"},
        "rules": [],
        "generation": {**PLAIN, "do_sample": True, "seed": 0},
    }
    [output], _, tokens, events = traced(recipe, dense, tokenizer, ["Who won?"], tmp_path / "t.jsonl")
    [event] = events["candidates"]
    assert len(event["utilities"]) == 3
    assert {len(row) for row in event["utilities"]} == {2}
    means = [sum(row) / 2 for row in event["utilities"]]
    assert means == pytest.approx([event["candidates"][own]["score"] for own in event["hypothesis_ids"]])
    assert event["ranking"][0] == max(range(3), key=lambda own: means[own])
    for row, candidate in zip(event["rows"], event["candidates"], strict=True):
        assert [token["id"] for token in tokens if token["row"] == row] == candidate["token_ids"]
    assert "utilities" not in output.stats


def test_what_the_cache_holds_is_told_after_every_forward(dense, tokenizer, tmp_path) -> None:
    recipe = {"cache": {"kind": "paged", "block_size": 4}, "generation": {**PLAIN, "suppress_tokens": [96]}}
    outputs, _, _, events = traced(recipe, dense, tokenizer, ["Who won?", "a"], tmp_path / "t.jsonl")
    assert [event["step"] for event in events["cache"]] == list(range(1, 13))
    assert outputs[0].stats["target_forwards"] == 12
    prompt = outputs[0].stats["prompt_tokens"] + outputs[1].stats["prompt_tokens"]
    for step, event in enumerate(events["cache"]):
        [cache] = event["caches"]
        [group] = cache["groups"]
        assert cache["tokens"] == prompt + 2 * step
        assert group["used"] * 4 >= cache["tokens"] > (group["used"] - 2) * 4
