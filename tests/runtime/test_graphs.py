"""Runs of steps give the tokens of single steps. On a CPU everything but the capture itself runs."""

import dataclasses

import pytest
import torch

import decodekit
from decodekit.cache.stepping import SteppedCache
from decodekit.core.types import Outputs
from decodekit.runtime.graphs import Graphs
from decodekit.runtime.paged_session import PagedSession
from decodekit.testing import tiny_model

PROMPTS = torch.tensor([[5, 6, 7, 8, 9], [1, 2, 3, 4, 5], [9, 9, 4, 4, 2]])
RULES = [
    {"kind": "repetition_penalty", "penalty": 1.3},
    {"kind": "temperature", "t": 0.7},
    {"kind": "top_k", "k": 20},
    {"kind": "top_p", "p": 0.9},
    {"kind": "min_p", "p": 0.05},
]
SAMPLED = {"do_sample": True, "seed": 3}


@pytest.fixture
def steps(monkeypatch):
    """Lets caches here take runs, too, and counts the steps that came from them and how each run ended."""
    on_gpu = SteppedCache.why_no_run

    def why_no_run(self):
        reason = on_gpu(self)
        return None if reason == "a cache whose memory grows" else reason

    monkeypatch.setattr(SteppedCache, "why_no_run", why_no_run)
    monkeypatch.setattr(PagedSession, "why_no_run", lambda self: self.cache.why_no_run())
    # Attention reads blocks itself only where that is faster; here always.
    monkeypatch.setattr("decodekit.runtime.paged_session.triton_runs", lambda device: True)
    seen = {"steps": 0, "ends": [], "reasons": set()}
    run, takes = Graphs.run, Graphs.takes

    def counted(self, live):
        before = self.stats.steps
        ended = yield from run(self, live)
        seen["steps"] += self.stats.steps - before
        seen["ends"].append(ended)
        return ended

    def asked(self, live):
        seen["reasons"].add(self.stats.eager)
        return takes(self, live)

    monkeypatch.setattr(Graphs, "run", counted)
    monkeypatch.setattr(Graphs, "takes", asked)
    return seen


def one_by_one(model, recipe, prompts=PROMPTS, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graphs, "takes", lambda self, live: False)
        return decode(model, recipe, prompts, **options)


def decode(model, recipe, prompts=PROMPTS, new=24, eos=None, **options):
    decoder = decodekit.load({"cache": "paged", **recipe})
    return model.generate(
        prompts, custom_generate=decoder, max_new_tokens=new, eos_token_id=eos, pad_token_id=0, **options
    )


@pytest.mark.parametrize("family", ["dense", "sliding"])
@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"rules": RULES, "generation": SAMPLED},
        {"rules": [], "generation": SAMPLED},
        {"generation": {**SAMPLED, "num_return_sequences": 2}},
        {"strategy": {"kind": "dola"}},
    ],
    ids=["greedy", "rules", "sample", "options", "dola"],
)
def test_tokens_are_those_of_single_steps(steps, family, recipe) -> None:
    model = tiny_model(family, dtype=torch.float64)
    expected = one_by_one(model, recipe)
    assert steps["steps"] == 0
    assert torch.equal(decode(model, recipe), expected)
    assert steps["steps"] == 23
    assert steps["ends"] == [True]


def test_branches_are_fed_the_same_token(steps, dense) -> None:
    given = {"dk_inputs": [{"context": [6, 7]}, {"context": [1, 2]}, {"context": [9, 4]}]}
    recipe = {"strategy": {"kind": "cad"}}
    assert torch.equal(decode(dense, recipe, **given), one_by_one(dense, recipe, **given))
    assert steps["steps"] == 23


def test_rows_end_on_their_own_and_fewer_go_on(steps, dense, monkeypatch) -> None:
    plain = one_by_one(dense, {})
    # Ends the rows at different places.
    ends = [int(plain[0, 9]), int(plain[1, 14])]
    assert torch.equal(decode(dense, {}, eos=ends), one_by_one(dense, {}, eos=ends))
    assert len(steps["ends"]) > 1
    assert steps["steps"] > 5


def test_a_run_ends_where_keys_are_cut_at_other_places(steps, dense, monkeypatch) -> None:
    monkeypatch.setattr("decodekit.kernels.paged_attention.work.SPLITS", (8, 16))
    assert torch.equal(decode(dense, {}), one_by_one(dense, {}))
    assert len(steps["ends"]) > 1
    assert steps["steps"] == 23


def test_a_row_without_a_token_is_left_to_a_single_step(steps, dense, monkeypatch) -> None:
    """NaN logits fail their row alone, with what it had; its neighbours go on."""
    from decodekit.strategies.sample import Sample

    score, plain = Sample.score, one_by_one(dense, {})
    last = int(plain[1, 14])

    def broken(self, outputs: Outputs):
        scores = score(self, outputs)
        nan = (scores.argmax(-1) == last) & (torch.arange(len(scores)) == 1) & (len(scores) == 3)
        return torch.where(nan.unsqueeze(-1), torch.nan, scores)

    monkeypatch.setattr(Sample, "score", broken)
    with pytest.warns(RuntimeWarning, match="NaN"):
        expected = one_by_one(dense, {})
    with pytest.warns(RuntimeWarning, match="NaN"):
        ids = decode(dense, {})
    assert torch.equal(ids, expected)
    assert torch.equal(ids[[0, 2]], plain[[0, 2]])
    assert steps["ends"] == [False, True]


def test_what_is_not_for_graphs_is_said(steps, dense) -> None:
    decode(dense, {"rules": [{"kind": "mirostat"}], "generation": SAMPLED}, new=4)
    decode(dense, {}, new=4, return_dict_in_generate=True, output_scores=True)
    decode(tiny_model("hybrid", dtype=torch.float64), {}, new=4)
    decode(dense, {"drafter": {"kind": "ngram"}}, new=4)
    assert steps["steps"] == 0
    assert steps["reasons"] == {"rule 'mirostat' keeps a state", "output_scores", "recurrent layers", "drafts"}


def test_where_a_forward_cannot_be_captured_single_steps_go_on(steps, dense, monkeypatch) -> None:
    def refuse(self, frame):
        raise RuntimeError("operation not permitted when stream is capturing")

    expected = one_by_one(dense, {})
    monkeypatch.setattr(PagedSession, "framed", refuse)
    assert torch.equal(decode(dense, {}), expected)
    assert steps["ends"] == [False]


def test_the_output_tells_what_ran(steps, dense, tokenizer) -> None:
    [output] = decodekit.load({"cache": "paged"}).run(dense, tokenizer, ["ab"], max_new_tokens=9, eos_token_id=None)
    [expected] = one_by_one_texts(dense, tokenizer)
    assert output.token_ids == expected.token_ids
    assert output.logprobs == pytest.approx(expected.logprobs, abs=1e-6)
    assert output.stats["forwarded_tokens"] == expected.stats["forwarded_tokens"]
    assert output.stats["target_forwards"] == 9
    assert steps["steps"] == 8


def one_by_one_texts(model, tokenizer):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graphs, "takes", lambda self, live: False)
        return decodekit.load({"cache": "paged"}).run(model, tokenizer, ["ab"], max_new_tokens=9, eos_token_id=None)


def test_cancelled_rows_take_nothing_more(steps, dense, tokenizer) -> None:
    decoder, pieces = decodekit.load({"cache": "paged"}), []
    for piece in decoder.stream(dense, tokenizer, "ab", max_new_tokens=20, eos_token_id=None):
        pieces.append(piece)
        if len(pieces) == 3:
            break
    # The cache was given back in order: another call decodes as ever.
    assert torch.equal(decode(dense, {}), one_by_one(dense, {}))


def test_stats_are_plain_data() -> None:
    from decodekit.runtime.capture import GraphStats

    assert dataclasses.asdict(GraphStats(eager="drafts"))["eager"] == "drafts"
