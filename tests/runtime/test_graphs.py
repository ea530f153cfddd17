"""Runs of steps give the tokens of single steps. On a CPU everything but the capture itself runs."""

import dataclasses
import time
from typing import ClassVar, Literal

import pytest
import torch

import decodekit
from decodekit.cache.allocator import OutOfBlocks
from decodekit.cache.paged import PagedCache
from decodekit.cache.runs import Frame, Run
from decodekit.core.drafts import Draft
from decodekit.core.errors import RowError
from decodekit.core.protocols import Rule
from decodekit.core.types import Outputs
from decodekit.kernels.paged_attention import WorkShape
from decodekit.runtime.capture import fingerprint, hooked
from decodekit.runtime.captured import Device
from decodekit.runtime.constraining import RowConstraint
from decodekit.runtime.decoder import Decoder
from decodekit.runtime.engine import Engine
from decodekit.runtime.graphs import Graphs
from decodekit.runtime.paged_session import PagedSession
from decodekit.runtime.schedule import Schedule
from decodekit.strategies.dola import Dola
from decodekit.testing import tiny_model
from tests.runtime.oracle import Oracle
from tests.runtime.schedules import live_once

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
def steps(monkeypatch, in_place):
    """Counts the steps that came from them and how each run ended."""
    seen = {"steps": 0, "ends": [], "reasons": set(), "rows": set(), "stats": None}
    run, takes = Graphs.run, Graphs.takes

    def counted(self, live, *options):
        before = self.stats.steps
        seen["rows"].add(len(live))
        try:
            ended = yield from run(self, live, *options)
        finally:
            seen["steps"] += self.stats.steps - before
        seen["ends"].append(ended)
        return ended

    def asked(self, live):
        taken = takes(self, live)
        seen["reasons"].add(self.stats.eager)
        seen["stats"] = self.stats
        return taken

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


@pytest.mark.parametrize("family", ["dense", "sliding", "hybrid"])
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


@pytest.mark.parametrize(
    "strategy",
    [
        {"kind": "dola"},
        {"kind": "dola", "early_norm": True},
        {"kind": "dola", "mode": "compat"},
        {"kind": "contrastive_decoding", "amateur": {"layers": 1}},
    ],
    ids=["plain", "norm", "compat", "amateur"],
)
@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("own", [{}, {"logit_scale": 0.25}, {"final_logit_softcapping": 2.0}], ids=["", "scale", "cap"])
def test_one_product_gives_the_logits_of_all_layers(steps, own, strategy) -> None:
    model = with_head(**own)
    recipe = {"strategy": strategy}
    expected = one_by_one(model, recipe)
    head, rows = model.get_output_embeddings(), []
    forward = head.forward

    def counted(hidden):
        rows.append(hidden.shape[:-1].numel())
        return forward(hidden)

    head.forward = counted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decodekit.runtime.graphs.hooked", lambda model: False)
        assert torch.equal(decode(model, recipe), expected)
    assert steps["steps"] == 23
    layers = 1 if "amateur" in strategy else len(Dola(**strategy).hidden_layers(model.config))
    # Once a step and once for the capture; beside it, the model's own head is given nothing.
    assert sorted(filter(None, rows))[-24:] == [3 * (1 + layers)] * 24
    assert rows.count(0) == 24


def with_head(**own):
    """A tiny model whose logits are scaled or capped as its configuration says."""
    from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    options = {"vocab_size": 97, "initializer_range": 0.5, **sizes, **own}
    torch.manual_seed(0)
    if "final_logit_softcapping" in own:
        model = Gemma2ForCausalLM(Gemma2Config(num_key_value_heads=2, head_dim=8, **options))
    elif own:
        model = CohereForCausalLM(CohereConfig(**options))
    else:
        return tiny_model("dense", dtype=torch.float64)
    return model.double().eval()


def test_branches_are_fed_the_same_token(steps, dense) -> None:
    given = {"dk_inputs": [{"context": [6, 7]}, {"context": [1, 2]}, {"context": [9, 4]}]}
    recipe = {"strategy": {"kind": "cad"}}
    assert torch.equal(decode(dense, recipe, **given), one_by_one(dense, recipe, **given))
    assert steps["steps"] == 23


def test_rows_end_on_their_own_and_fewer_go_on(steps, model) -> None:
    plain = one_by_one(model, {})
    # Ends the rows at different places.
    ends = [int(plain[0, 9]), int(plain[1, 14])]
    assert torch.equal(decode(model, {}, eos=ends), one_by_one(model, {}, eos=ends))
    assert len(steps["ends"]) > 1
    assert steps["steps"] > 5


@pytest.fixture
def extended(monkeypatch):
    """Steps by which runs are extended, and whether they could be."""
    seen, extend = [], Device.extend

    def noted(self, count):
        seen.append((count, extend(self, count)))
        return seen[-1][1]

    monkeypatch.setattr(Device, "extend", noted)
    return seen


@pytest.mark.parametrize("family", ["dense", "sliding", "hybrid"])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize(
    "recipe", [{}, {"rules": RULES, "generation": SAMPLED}, {"strategy": "dola"}], ids=["greedy", "rules", "dola"]
)
def test_a_run_is_extended_where_keys_are_cut_at_other_places(
    steps, extended, monkeypatch, family, block_size, recipe
) -> None:
    monkeypatch.setattr("decodekit.kernels.paged_attention.work.SPLITS", (8, 16))
    model, recipe = (
        tiny_model(family, dtype=torch.float64),
        {"cache": {"kind": "paged", "block_size": block_size}, **recipe},
    )
    assert torch.equal(decode(model, recipe), one_by_one(model, recipe))
    assert [steps["steps"], *steps["ends"]] == [23, True]
    assert len(extended) > 1
    assert all(fits for _, fits in extended)


def test_a_run_is_extended_when_the_steps_that_are_planned_at_once_are_over(
    steps, extended, dense, monkeypatch
) -> None:
    monkeypatch.setattr("decodekit.runtime.graphs.STEPS", 5)
    assert torch.equal(decode(dense, {}), one_by_one(dense, {}))
    assert steps["ends"] == [True]
    assert [count for count, _ in extended] == [5, 5, 5, 3]


def test_a_run_ends_where_there_are_no_blocks_to_extend_it(steps, dense, monkeypatch) -> None:
    monkeypatch.setattr("decodekit.runtime.graphs.STEPS", 5)
    expected, calls = one_by_one(dense, {}), []

    def extend(self, count):
        calls.append(count)
        raise OutOfBlocks(9, 2, 0, 8)

    monkeypatch.setattr(Run, "extend", extend)
    assert torch.equal(decode(dense, {}), expected)
    assert steps["ends"] == [True] * 5
    assert calls == [5, 5, 5, 3]
    assert (steps["steps"], steps["stats"].short) == (23, 0)


def test_a_run_ends_where_its_graph_has_no_room_for_what_is_planned_next(steps, extended, dense, monkeypatch) -> None:
    monkeypatch.setattr("decodekit.runtime.graphs.STEPS", 5)
    monkeypatch.setattr(WorkShape, "roomy", lambda self, blocks, growth=1.0: self)
    prompts = PROMPTS.repeat(1, 3)
    assert torch.equal(decode(dense, {}, prompts), one_by_one(dense, {}, prompts))
    assert steps["steps"] == 23
    assert any(not fits for _, fits in extended)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}},
    "required": ["a", "b"],
}
CONSTRAINTS = [
    {"constraint": {"kind": "json_schema", "schema": SCHEMA}},
    {"constraint": {"kind": "regex", "pattern": r"[a-f]{3,20}(\d{3}-)+the end[.!]"}, "generation": SAMPLED},
    {"constraint": {"kind": "regex", "pattern": r"[a-f]{3,20}"}, "strategy": {"kind": "dola", "layers": "high"}},
    {"constraint": {"kind": "choice", "choices": ["abc", "b"], "after": "z"}, "rules": RULES},
]


@pytest.mark.parametrize("recipe", CONSTRAINTS, ids=["schema", "sampled", "dola", "after"])
def test_masks_are_found_between_the_steps(steps, dense, tokenizer, recipe) -> None:
    given = {"dk_tokenizer": tokenizer, "eos": tokenizer.eos_token_id}
    expected = one_by_one(dense, recipe, **given)
    assert torch.equal(decode(dense, recipe, **given), expected)
    assert steps["reasons"] == {None}
    assert steps["steps"] > 3


def test_rows_with_and_without_a_constraint_share_a_run(steps, dense, tokenizer) -> None:
    own = [
        {"constraint": {"kind": "regex", "pattern": r"[a-f]{3,9}"}},
        {},
        {"constraint": {"kind": "regex", "pattern": "b+c"}},
    ]
    given = {"dk_tokenizer": tokenizer, "eos": tokenizer.eos_token_id, "dk_inputs": own}
    expected = one_by_one(dense, {}, **given)
    assert torch.equal(decode(dense, {}, **given), expected)
    assert steps["steps"] > 5
    text = tokenizer.decode(expected[0, PROMPTS.shape[1] :], skip_special_tokens=True)
    assert set(text) <= set("abcdef")
    assert len(text) >= 3


def test_a_constraint_that_cannot_go_on_fails_its_row_alone(steps, dense, tokenizer, monkeypatch) -> None:
    mask = RowConstraint.mask
    calls = []

    def stuck(self):
        calls.append(self)
        if len(calls) > 1 and self is calls[1] and calls.count(self) == 5:
            raise RowError("nothing is legal")
        return mask(self)

    recipe = {"constraint": {"kind": "regex", "pattern": "[a-f]{12}"}}
    given = {"dk_tokenizer": tokenizer, "eos": tokenizer.eos_token_id}
    plain = one_by_one(dense, recipe, **given)
    monkeypatch.setattr(RowConstraint, "mask", stuck)
    with pytest.warns(RuntimeWarning, match="nothing is legal"):
        ids = decode(dense, recipe, **given)
    assert torch.equal(ids[[0, 2]], plain[[0, 2]])
    assert torch.equal(ids[1, :9], plain[1, :9])
    assert (ids[1, 9:] == 0).all()
    assert all(steps["ends"])


def test_a_row_without_a_token_is_left_to_a_single_step(steps, model, monkeypatch) -> None:
    """NaN logits fail their row alone, with what it had; its neighbours go on."""
    from decodekit.strategies.sample import Sample

    score, plain = Sample.score, one_by_one(model, {})
    last = int(plain[1, 14])

    def broken(self, outputs: Outputs):
        scores = score(self, outputs)
        nan = (scores.argmax(-1) == last) & (torch.arange(len(scores)) == 1) & (len(scores) == 3)
        return torch.where(nan.unsqueeze(-1), torch.nan, scores)

    monkeypatch.setattr(Sample, "score", broken)
    with pytest.warns(RuntimeWarning, match="NaN"):
        expected = one_by_one(model, {})
    with pytest.warns(RuntimeWarning, match="NaN"):
        ids = decode(model, {})
    assert torch.equal(ids, expected)
    assert torch.equal(ids[[0, 2]], plain[[0, 2]])
    assert steps["ends"] == [False, True]


def test_what_is_not_for_graphs_is_said(steps, dense) -> None:
    decode(dense, {"rules": [{"kind": "mirostat"}], "generation": SAMPLED}, new=4)
    decode(dense, {}, new=4, return_dict_in_generate=True, output_scores=True)
    decode(dense, {"drafter": {"kind": "ngram", "schedule": "constant"}}, new=4)
    assert steps["steps"] == 0
    assert steps["reasons"] == {"rule 'mirostat' keeps a state", "output_scores", "drafts"}


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


@pytest.fixture
def pads(monkeypatch, fills):
    """Forwards have eight rows."""
    for where in ("forwards", "graphs"):
        monkeypatch.setattr(f"decodekit.runtime.{where}.bucket", lambda rows, device: 8)


@pytest.mark.usefixtures("captured", "pads")
@pytest.mark.parametrize("recipe", [{}, {"rules": RULES, "generation": SAMPLED}], ids=["greedy", "rules"])
def test_a_forward_serves_fewer_rows_than_it_was_captured_for(steps, dense, monkeypatch, recipe) -> None:
    monkeypatch.setattr("decodekit.runtime.graphs.STEPS", 4)
    # Keys of rows are cut, so that they are put together in any number of rows.
    monkeypatch.setattr("decodekit.kernels.paged_attention.work.SPLITS", (8, 16))
    prompts = PROMPTS.repeat(1, 8)
    plain = one_by_one(dense, recipe, prompts)
    ends = [int(plain[0, 44]), int(plain[1, 49])]
    expected = one_by_one(dense, recipe, prompts, eos=ends)
    assert torch.equal(decode(dense, recipe, prompts, eos=ends), expected)
    assert all(steps["ends"])
    assert steps["reasons"] == {None}
    assert len(steps["rows"]) > 1
    assert steps["stats"].forward_captures == 1
    assert steps["stats"].pick_captures == 1


@pytest.mark.usefixtures("captured", "fills")
@pytest.mark.parametrize(("lent", "expected"), [(64, [3]), (3, [1, 2, 3])])
def test_a_few_steps_of_fewer_rows_are_taken_by_the_graph_of_more(
    steps, dense, tokenizer, monkeypatch, lent, expected
) -> None:
    monkeypatch.setattr("decodekit.runtime.lanes._LENT", lent)
    monkeypatch.setattr("decodekit.runtime.batch._STRETCH", 2)
    # Keys of rows are cut, so that they are put together in any number of rows.
    monkeypatch.setattr("decodekit.kernels.paged_attention.work.SPLITS", (8, 16))
    counts, prompts = (20, 30, 40), [[5 + n, 6, 7] for n in range(3)]
    with Engine(dense, tokenizer, {"cache": "paged"}, slots=4, tokens_per_step=64) as engine:
        requests = [
            engine.submit(ids, max_new_tokens=count, eos_token_id=None)
            for ids, count in zip(prompts, counts, strict=True)
        ]
        outputs = [request.result().token_ids for request in requests]
        [graphs] = engine.stats()["graphs"]
        rows = sorted({key[2] for key in engine._batch.sessions[0].cache.captured})
    assert graphs["eager"] is None
    assert rows == expected
    for ids, count, output in zip(prompts, counts, outputs, strict=True):
        assert output == decode(dense, {}, torch.tensor([ids]), new=count)[0, len(ids) :].tolist()


def test_an_audit_sees_every_step(steps, dense, tokenizer) -> None:
    [output] = decodekit.load({"cache": "paged", "audit": 1}).run(
        dense, tokenizer, ["ab"], max_new_tokens=9, eos_token_id=None
    )
    assert output.stats["audit"]["steps"] == 9
    assert steps["reasons"] == {"an audit"}


def test_forward_hooks_are_called_at_every_step(steps) -> None:
    model, called = tiny_model("dense", dtype=torch.float64), []
    decode(model, {}, new=4)
    assert steps["steps"] == 3
    register = model.model.layers[1].mlp.up_proj
    for hook in (register.register_forward_hook, register.register_forward_pre_hook):
        called.clear()
        handle = hook(lambda *given: called.append(1))
        decode(model, {}, new=4)
        handle.remove()
        assert len(called) == 4
        assert steps["stats"].eager == "forward hooks"
    register.forward = lambda hidden, own=register.forward: called.append(1) or own(hidden)
    decode(model, {}, new=4)
    assert len(called) == 8
    assert steps["steps"] == 3
    del register.forward
    decode(model, {}, new=4)
    assert steps["steps"] == 6


def test_a_hook_in_the_place_of_another_is_noticed() -> None:
    model = tiny_model("dense")
    seen = [fingerprint(model)]
    for _ in range(2):
        handle = model.model.norm.register_forward_hook(lambda *given: None)
        seen.append(fingerprint(model))
        handle.remove()
    assert len(set(seen)) == 3
    assert fingerprint(model) == seen[0]
    model.model.norm.forward = model.model.norm.forward
    assert fingerprint(model) not in seen
    assert hooked(model)


def test_where_blocks_are_short_it_is_said_once(steps, dense, monkeypatch, caplog) -> None:
    expected, begin = one_by_one(dense, {}), PagedSession.begin_run
    refused = iter([True, True, False])

    def begin_run(self, rows, tokens, count):
        if next(refused, False):
            raise OutOfBlocks(9, 2, 0, 8)
        return begin(self, rows, tokens, count)

    monkeypatch.setattr(PagedSession, "begin_run", begin_run)
    with caplog.at_level("WARNING", "decodekit.runtime.graphs"):
        assert torch.equal(decode(dense, {}), expected)
    assert steps["ends"] == [False, False, True]
    assert (steps["stats"].short, steps["stats"].eager, steps["steps"]) == (2, None, 21)
    assert [own.args[0].args for own in caplog.records] == [(str(OutOfBlocks(9, 2, 0, 8)),)]


def test_a_rule_with_a_memory_of_its_own_is_not_captured(steps, dense) -> None:
    class Counting(Rule):
        kind: Literal["counting"] = "counting"
        calls: ClassVar[list[int]] = []

        def __call__(self, rows, logits):
            self.calls.append(len(rows))
            return logits.index_fill(1, torch.tensor([len(self.calls) + 10]), torch.inf).clamp(max=1e4)

    ids = decode(dense, {"rules": [Counting()]}, new=4)
    assert ids[0, 5:].tolist() == [11, 12, 13, 14]
    assert steps["reasons"] == {"rule 'counting' is not capturable"}


@pytest.mark.parametrize(
    ("family", "seeds"),
    [
        ("dense", range(12)),
        ("sliding", range(12, 24)),
        ("hybrid", range(24, 36)),
        *(pytest.param(family, range(60), marks=pytest.mark.slow) for family in ("dense", "sliding", "hybrid")),
    ],
)
def test_requests_of_an_engine_come_and_go_between_runs(steps, family, seeds) -> None:
    for seed in seeds:
        live_once(seed, family)
    assert steps["steps"] > len(seeds)


def test_an_engine_with_room_takes_its_steps_from_runs(steps, dense, tokenizer) -> None:
    def outputs():
        with Engine(dense, tokenizer, {"cache": "paged"}, slots=4, tokens_per_step=64) as engine:
            requests = [engine.submit([5 + n, 6, 7], max_new_tokens=20 + 7 * n) for n in range(6)]
            requests[1].cancel()
            outputs = [request.result() for request in requests]
            return [(own.token_ids, own.finish_reason) for own in outputs]

    runs = outputs()
    assert steps["steps"] > 40
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graphs, "takes", lambda self, live: False)
        assert outputs() == runs
    assert runs[1] == ([], "cancelled")
    assert {reason for _, reason in runs} == {"length", "eos", "cancelled"}


def test_a_request_goes_on_in_an_engine_when_one_of_its_rows_has_ended(steps, dense, tokenizer) -> None:
    recipe = {"cache": "paged", "generation": {"do_sample": True, "seed": 1, "num_return_sequences": 2}, "rules": []}

    def outputs(eos):
        with Engine(dense, tokenizer, recipe, slots=4, tokens_per_step=64) as engine:
            return [own.token_ids for own in engine.submit([5, 6, 7], max_new_tokens=30, eos_token_id=eos).results()]

    first, second = next(found for found in map(outputs, range(3, 90)) if {*map(len, found)} == {30})
    # Ends one of the two in the middle of a run.
    eos = next(token for token in first[8:20] if token not in second)
    before = steps["steps"]
    assert sorted(outputs(eos)) == sorted([first[: first.index(eos) + 1], second])
    assert steps["steps"] - before > 20


@pytest.mark.parametrize("error", [ValueError, RowError])
def test_a_constraint_that_breaks_ends_its_request_alone_in_an_engine(
    steps, dense, tokenizer, monkeypatch, error
) -> None:
    mask, calls = RowConstraint.mask, []

    def broken(self):
        calls.append(self)
        if len(calls) > 2 and self is calls[1] and calls.count(self) == 5:
            raise error("on purpose")
        return mask(self)

    def outputs():
        with Engine(dense, tokenizer, {"cache": "paged"}, slots=4, tokens_per_step=64) as engine:
            recipe = {"constraint": {"kind": "regex", "pattern": "[a-f]{20}"}}
            requests = [engine.submit([5 + n, 6, 7], recipe=recipe, max_new_tokens=24) for n in range(3)]
            return [request.result() for request in requests]

    plain = outputs()
    assert steps["steps"] > 15
    assert {len(own.text) for own in plain} == {20}
    monkeypatch.setattr(RowConstraint, "mask", broken)
    found = outputs()
    assert found[1].finish_reason == "error"
    assert "on purpose" in found[1].error
    assert [found[place].text for place in (0, 2)] == [plain[place].text for place in (0, 2)]


def test_a_request_whose_rule_cannot_begin_says_why_where_it_runs_alone(steps, dense, tokenizer) -> None:
    with Engine(dense, tokenizer, {"cache": "paged"}) as engine:
        output = engine.submit([5, 6, 7], recipe={"rules": [BrokenAtTheStart()]}, max_new_tokens=3).result()
    assert output.finish_reason == "error"
    assert "not today" in output.error


class BrokenAtTheStart(Rule):
    kind: Literal["broken_at_the_start"] = "broken_at_the_start"

    def init_state(self, request):
        raise RowError("not today")

    def __call__(self, rows, logits):
        return logits


def test_states_that_are_written_in_place_are_not_copied(steps, monkeypatch) -> None:
    model, copied = tiny_model("hybrid", dtype=torch.float32), []
    cache = PagedCache(model.config, num_blocks=16, preallocate=True)
    session = PagedSession(model, cache)
    session.expect(0, {"main": [5, 6, 7]})
    session.prefill([0])
    run = session.begin_run([0], [9], 4)
    frame = Frame(cache, 1, [WorkShape.of(plan) for plan in run.plan(1)])
    frame.load(run)
    frame.begin()
    layer = next(own for own in cache.layers if getattr(own, "recurrent_states", None))
    state = layer.recurrent_states[0]
    before = state.clone()
    layer.update_recurrent_state(state.add_(1))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda own, *options: copied.append(own.shape))
    frame.end()
    assert state.shape not in copied
    [kept] = [own for own in cache.frame_states[1].values() if own.data_ptr() == state.data_ptr()]
    assert torch.equal(kept, before + 1)


def test_requests_that_came_beside_drafts_take_runs_once_those_are_over(steps, dense, tokenizer) -> None:
    with Engine(dense, tokenizer, {"cache": "paged"}, slots=4, tokens_per_step=64) as engine:
        drafted = engine.submit([5, 6, 7, 5, 6, 7], recipe={"drafter": {"kind": "ngram"}}, max_new_tokens=6)
        engine.step()
        engine.step()
        plain = engine.submit([8, 9, 3], max_new_tokens=30, eos_token_id=96)
        drafted.result()
        assert steps["steps"] == 0
        plain.result()
        assert steps["steps"] > 10
        assert [own["eager"] for own in engine.stats()["graphs"]] == ["drafts", None]


@pytest.mark.parametrize("family", ["dense", "sliding"])
@pytest.mark.parametrize(
    "recipe", [{}, {"rules": RULES, "generation": SAMPLED}, {"strategy": "dola"}], ids=["", "rules", "dola"]
)
@pytest.mark.parametrize("batch", [1, 3])
def test_between_drafts_that_pay_tokens_come_from_runs(steps, monkeypatch, family, recipe, batch) -> None:
    monkeypatch.setattr(Schedule, "_best", lambda self, rows, drafts: max(map(len, drafts)))
    model, prompts = tiny_model(family, dtype=torch.float64), PROMPTS[:batch]
    expected = one_by_one(model, recipe, prompts, new=40)
    truth = {tuple(row[:5]): row[5:] for row in expected.tolist()}
    loaded = decodekit.load({"cache": "paged", **recipe}).recipe
    quiet = tuple(n for n in range(40) if n % 10 < 6)
    decoder = Decoder(loaded.model_copy(update={"drafter": Oracle(truth=truth, silent=quiet, schedule="dynamic")}))
    ids = model.generate(prompts, custom_generate=decoder, max_new_tokens=40, eos_token_id=None, pad_token_id=0)
    assert torch.equal(ids, expected)
    assert steps["stats"].eager is None
    # A run is begun anew after each draft.
    assert 10 <= steps["steps"] < 30


def test_runs_count_as_passes_without_drafts(steps, dense, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(Schedule, "_best", lambda self, rows, drafts: 0)
    plain = decodekit.load({"cache": "paged"}).run(dense, tokenizer, ["ab"], max_new_tokens=20, eos_token_id=None)
    drafted = decodekit.load({"drafter": "ngram"}).run(dense, tokenizer, ["ab"], max_new_tokens=20, eos_token_id=None)
    assert drafted[0].token_ids == plain[0].token_ids
    assert (drafted[0].stats["tokens_per_pass"], drafted[0].stats["fallback_rate"]) == (1, 1)
    assert steps["steps"] == 2 * 19


@pytest.mark.parametrize("drafter", ["recycle", {"kind": "ngram", "schedule": "constant"}])
def test_drafters_that_want_every_step_get_it(steps, dense, drafter) -> None:
    assert torch.equal(decode(dense, {"drafter": drafter}), one_by_one(dense, {}))
    assert steps["reasons"] == {"drafts"}


@pytest.mark.parametrize("length", range(3, 9))
@pytest.mark.parametrize("recipe", [{}, {"strategy": "dola"}], ids=["greedy", "dola"])
def test_a_plan_is_for_steps_that_are_launched_next_also_where_the_first_has_one(
    steps, dense, monkeypatch, length, recipe
) -> None:
    monkeypatch.setattr("decodekit.kernels.paged_attention.work.SPLITS", (8, 16))
    planned, renew = [], Frame.renew

    def noted(self, run):
        planned.append((run.launched, run._passed))
        renew(self, run)

    monkeypatch.setattr(Frame, "renew", noted)
    prompt = torch.arange(3, 3 + length).unsqueeze(0)
    assert torch.equal(decode(dense, recipe, prompt), one_by_one(dense, recipe, prompt))
    assert len(planned) > 1
    assert all(launched == passed for launched, passed in planned)


def test_a_hook_that_comes_in_a_run_is_noticed_when_it_is_extended(steps, tokenizer) -> None:
    model, called = tiny_model("dense", dtype=torch.float64), []
    with Engine(model, tokenizer, {"cache": "paged"}) as engine:
        engine.submit([5, 6, 7, 8], max_new_tokens=90, eos_token_id=None)
        for _ in range(10):
            engine.step()
        model.model.norm.register_forward_hook(lambda *given: called.append(1))
        while engine.step():
            pass
        [graphs] = engine.stats()["graphs"]
    assert graphs["eager"] == "forward hooks"
    assert len(called) >= 90 - 2 * 32


def test_blocks_that_slid_out_of_a_window_are_let_go_of_in_time(steps, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("decodekit.runtime.graphs.STEPS", 32)
    model = tiny_model("sliding", dtype=torch.float64)
    with Engine(model, tokenizer, {"cache": {"kind": "paged", "block_size": 4}}, budget="4MiB") as engine:
        engine.submit([5, 6, 7, 8], max_new_tokens=190, eos_token_id=None).result()
        groups = engine.stats()["caches"]["main"]["groups"]
    peaks = {group["window"]: group["peak"] for group in groups}
    assert peaks.pop(None) == 49
    assert all(peak <= (window + 32) / 4 + 2 for window, peak in peaks.items())


def test_a_slow_consumer_says_nothing_of_what_a_step_takes(steps, dense, tokenizer, monkeypatch) -> None:
    noted, ran = [], Schedule.ran

    def note(self, batch, seconds, drafting):
        noted.append(seconds)
        ran(self, batch, seconds, drafting)

    monkeypatch.setattr(Schedule, "ran", note)
    monkeypatch.setattr(Schedule, "_best", lambda self, rows, drafts: 0)
    decoder = decodekit.load({"cache": "paged", "drafter": "ngram"})
    for _ in decoder.stream(dense, tokenizer, "ab", max_new_tokens=12, eos_token_id=None):
        time.sleep(0.1)
    assert len(noted) == 11
    assert sum(seconds is not None for seconds in noted) <= 3
    noted.clear()
    for _ in decoder.stream(dense, tokenizer, "ab", max_new_tokens=12, eos_token_id=None):
        pass
    assert sum(seconds is not None for seconds in noted) >= 7


def test_looks_that_take_long_are_rare_between_runs_too(steps, dense, monkeypatch) -> None:
    calls = []

    def propose(self, rows, budgets):
        calls.append(1)
        time.sleep(0.005)
        return [Draft() for _ in rows]

    monkeypatch.setattr("decodekit.drafters.ngram._Lookup.propose", propose)
    for _ in range(2):
        calls.clear()
        decode(dense, {"drafter": "ngram"}, PROMPTS[:1], new=110)
    assert len(calls) < 40
