"""What becomes of a prompt whose search or decision does what it must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from decodekit.core.candidates import Cancel, Decision, Failed, Finished, Progress, Start, Wait
from decodekit.core.errors import PluginError, RowError
from decodekit.core.protocols import Rule, SearchStrategy, SequenceStrategy
from decodekit.core.search import Advance, Ended
from decodekit.recipe import Generation, Recipe, load_recipe
from decodekit.runtime.decoder import Decoder

pytestmark = pytest.mark.integration

PROMPTS = ["Who won?", "a", "Is it so?"]


class Stepping(SearchStrategy):
    """A search of width 2 that answers what a function of the group says."""

    kind: str = "stepping"
    answer: Callable[[Any], Advance]

    @property
    def width(self) -> int:
        return 2

    def step(self, group):
        return self.answer(group)


class Deciding(SequenceStrategy):
    """At most 4 candidates, decided by a generator of the request."""

    kind: str = "deciding"
    how: Callable[[Any], Any]

    @property
    def count(self) -> int:
        return 4

    def decide(self, request):
        return self.how(request)


def run(model, tokenizer, strategy, prompts=PROMPTS, **options):
    generation = Generation(max_new_tokens=6, suppress_tokens=[1], do_sample=isinstance(strategy, Deciding), seed=0)
    return Decoder(Recipe(strategy=strategy, generation=generation)).run(model, tokenizer, prompts, **options)


# --- searches


@pytest.mark.parametrize(
    ("advance", "message"),
    [
        (Advance([1], [5]), r"answered parents \[1\] with tokens \[5\] and 0 ended; .* rows below 1, ids below 97"),
        (Advance([-1], [5]), r"answered parents \[-1\]"),
        (Advance([0], [97]), r"with tokens \[97\]"),
        (Advance([0], [5, 6]), "expected as many tokens as parents"),
        (Advance(ended=[Ended(3, 5, 0.0, "eos")]), "1 ended; expected"),
        (Advance(ended=[Ended(0, 97, 0.0, "eos")]), "1 ended; expected"),
        (Advance([0, 0, 0], [5, 6, 7]), "keeps 3 hypotheses; its width is 2"),
    ],
)
def test_a_search_that_answers_what_there_is_not_is_named(dense, tokenizer, advance, message) -> None:
    with pytest.raises(PluginError, match=message):
        run(dense, tokenizer, Stepping(answer=lambda group: advance))


def test_a_search_that_fails_is_named(dense, tokenizer) -> None:
    with pytest.raises(PluginError, match="'stepping' failed in step: ZeroDivisionError: "):
        run(dense, tokenizer, Stepping(answer=lambda group: 1 // 0))


def greedy(group) -> Advance:
    token = int(group.logits[0].argmax())
    reason = group.ends(0, token)
    return Advance([0], [token]) if reason is None else Advance(ended=[Ended(0, token, 0.0, reason)])


def test_a_search_that_gives_a_prompt_up_gives_up_that_one_alone(model, tokenizer) -> None:
    def gives_up(group):
        if group.request.prompt == 1 and len(group.hypotheses[0].tokens) == 2:
            raise RowError("there is no way on")
        return greedy(group)

    outputs = run(model, tokenizer, Stepping(answer=gives_up))
    assert outputs[1].finish_reason == "error"
    assert outputs[1].error == "prompt 1: there is no way on"
    plain = Decoder(Recipe(generation=Generation(max_new_tokens=6, suppress_tokens=[1])))
    for place in (0, 2):
        assert outputs[place].token_ids == plain.run(model, tokenizer, PROMPTS[place])[0].token_ids


def test_a_search_that_ends_without_an_output_says_so(dense, tokenizer) -> None:
    outputs = run(dense, tokenizer, Stepping(answer=lambda group: Advance()))
    assert {output.finish_reason for output in outputs} == {"error"}
    assert outputs[0].error == "prompt 0: 1 outputs were asked for and 0 came out"


def test_hypotheses_fork_and_are_dropped(model, tokenizer) -> None:
    """Two hypotheses each step, of which the second has the other's token: the first lives on as if it were alone."""

    def forking(group):
        single = greedy(group)
        if not single.parents:
            return single
        other = int(group.logits[0].argmin())
        return Advance([0, 0], [single.tokens[0], other])

    forked, alone = (run(model, tokenizer, Stepping(answer=answer)) for answer in (forking, greedy))
    assert [output.token_ids for output in forked] == [output.token_ids for output in alone]


# --- decisions


def _starts_too_many(request):
    yield Start(3)
    yield Start(2)


def _starts_none(request):
    yield Start(0)


def _waits_for_nothing(request):
    yield Wait()


def _waits_once_too_often(request):
    yield Start(1)
    while True:
        yield Wait()


def _yields_a_word(request):
    yield "start"


def _returns_nothing(request):
    yield Start(1)


def _ranks_what_there_is_not(request):
    yield Start(1)
    return Decision([1])


def _ranks_nothing(request):
    yield Start(1)
    return Decision([])


def _cancels_what_there_is_not(request):
    yield Start(1)
    yield Cancel([4])


def _raises(request):
    yield Start(2)
    yield Wait()
    raise KeyError("votes")


def _gives_up(request):
    yield Start(2)
    raise RowError("no candidate will do")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (_starts_too_many, "'deciding' starts 2 candidates after 3; its count is 4"),
        (_starts_none, "'deciding' starts 0 candidates after 0; its count is 4"),
        (_waits_for_nothing, "'deciding' waits, but none of its candidates is running"),
        (_waits_once_too_often, "'deciding' waits, but none of its candidates is running"),
        (_yields_a_word, "'deciding' yielded 'start'; expected Start, Cancel or Wait"),
        (_returns_nothing, "'deciding' returned None; expected a Decision that ranks some of 1 candidates"),
        (_ranks_what_there_is_not, "expected a Decision that ranks some of 1 candidates"),
        (_ranks_nothing, "expected a Decision that ranks some of 1 candidates"),
        (_cancels_what_there_is_not, "'deciding' cancels candidate 4; it has started 1"),
        (_raises, "'deciding' failed in decide: KeyError: 'votes'"),
        (_gives_up, "prompt 1: no candidate will do"),
    ],
)
def test_a_decision_that_goes_wrong_fails_its_prompt_alone(dense, tokenizer, how, message) -> None:
    def second_goes_wrong(request):
        return (yield from (how if request.prompt == 1 else first_of_two)(request))

    outputs = run(dense, tokenizer, Deciding(how=second_goes_wrong))
    assert outputs[1].finish_reason == "error"
    assert message in outputs[1].error
    assert "\n" not in outputs[1].error
    alone = [run(dense, tokenizer, Deciding(how=first_of_two), [PROMPTS[place]])[0] for place in (0, 2)]
    assert [outputs[place].token_ids for place in (0, 2)] == [output.token_ids for output in alone]
    assert all(own["finish_reason"] is not None for own in outputs[1].candidates)


def first_of_two(request):
    yield Start(2)
    yield Wait()
    yield Wait()
    return Decision([0])


def test_what_a_decision_leaves_running_is_cancelled(model, tokenizer) -> None:
    def hasty(request):
        yield Start(3, watch=2)
        event = yield Wait()
        assert isinstance(event, Progress)
        return Decision([event.id])

    for output in run(model, tokenizer, Deciding(how=hasty)):
        assert output.finish_reason == "cancelled"
        # Candidates take their tokens in order, so the others of this step had not had theirs yet.
        assert [len(own["token_ids"]) for own in output.candidates] == [2, 1, 1]


def test_a_candidate_that_an_earlier_one_cancels_in_the_same_step_stays_cancelled(model, tokenizer) -> None:
    seen = []

    def strict(request):
        yield Start(3, watch=2)
        event = yield Wait()
        seen.append(event)
        yield Cancel([1])
        yield Cancel([1])  # a second time changes nothing
        while not isinstance(event, Finished) or event.candidate.id != 2:
            event = yield Wait()
            seen.append(event)
        return Decision([2, 0])

    [output] = run(model, tokenizer, Deciding(how=strict), PROMPTS[:1])
    assert [own["finish_reason"] for own in output.candidates] == ["length", "cancelled", "length"]
    assert [len(own["token_ids"]) for own in output.candidates] == [6, 1, 6]
    assert [event.id for event in seen if isinstance(event, Progress)] == [0, 2, 0, 2]
    # Alone, the third candidate is what it is beside the others.
    [free] = run(model, tokenizer, Deciding(how=all_of(3)), PROMPTS[:1])
    assert output.token_ids == free.candidates[2]["token_ids"]
    # The cancelled candidate took one token, which nothing was read from.
    prompt = len(tokenizer(PROMPTS[0]).input_ids)
    assert output.stats["forwarded_tokens"] == prompt + 5 + 1 + 5


def all_of(count: int):
    def how(request):
        yield Start(count)
        for _ in range(count):
            yield Wait()
        return Decision([*range(count)])

    return how


def test_candidates_that_start_later_are_those_that_would_have_started_at_once(model, tokenizer) -> None:
    def one_by_one(request):
        for _ in range(4):
            yield Start(1)
            yield Wait()
        return Decision([*range(4)])

    for late, at_once in zip(
        run(model, tokenizer, Deciding(how=one_by_one)), run(model, tokenizer, Deciding(how=all_of(4))), strict=True
    ):
        assert [own["token_ids"] for own in late.candidates] == [own["token_ids"] for own in at_once.candidates]


class Spoiled(Rule):
    """Leaves the second sample of a prompt nothing after its first token."""

    kind: str = "spoiled"

    def __call__(self, rows, logits):
        spoiled = [
            stream.sample == 1 and int(position) == 1
            for stream, position in zip(rows.streams, rows.positions, strict=True)
        ]
        return logits.masked_fill(torch.tensor(spoiled).unsqueeze(-1), -torch.inf)


def test_a_candidate_that_fails_is_reported_and_is_no_output(model, tokenizer) -> None:
    events = []

    def listening(request):
        yield Start(3)
        for _ in range(3):
            events.append((yield Wait()))
        return Decision([1, 2, 0])

    generation = Generation(max_new_tokens=4, suppress_tokens=[1], do_sample=True, seed=0, num_return_sequences=3)
    recipe = Recipe(strategy=Deciding(how=listening), rules=(Spoiled(),), generation=generation)
    outputs = Decoder(recipe).run(model, tokenizer, "Who won?")
    assert [type(event) for event in events] == [Failed, Finished, Finished]
    assert "rule 'spoiled' left no token to choose from" in events[0].error
    assert events[0].id == 1
    told = outputs[0].candidates
    assert [own["finish_reason"] for own in told] == ["length", "error", "length"]
    # Asked for three, it gives the two that there are, in the order of the decision.
    assert [output.token_ids for output in outputs[:2]] == [told[2]["token_ids"], told[0]["token_ids"]]
    assert outputs[2].error == "prompt 0: 3 outputs were asked for and 2 came out"


class Remembering(Rule):
    """Its state is the output so far; anything else is an error."""

    kind: Literal["remembering"] = "remembering"

    def init_state(self, request):
        return ()

    def commit(self, state, token, logits):
        return (*state, token)

    def __call__(self, rows, logits):
        for state, tokens, start, stop in zip(
            rows.states, rows.tokens.tolist(), rows.prompt_lengths.tolist(), rows.lengths.tolist(), strict=True
        ):
            assert [*state] == tokens[start:stop]
        return logits


@pytest.mark.parametrize(
    "recipe",
    [
        {"strategy": {"kind": "beam", "num_beams": 4}},
        {"strategy": {"kind": "self_consistency", "n": 3}, "generation": {"do_sample": True, "seed": 0}},
        {"drafter": {"kind": "ngram", "schedule": "constant"}},
    ],
    ids=["beam", "candidates", "drafts"],
)
def test_rows_that_fork_keep_states_of_their_own(model, tokenizer, recipe) -> None:
    recipe = load_recipe(recipe).model_copy(update={"rules": (Remembering(),)})
    outputs = Decoder(recipe).run(model, tokenizer, ["1 2 1 2 1", "a"], raw=True, max_new_tokens=12)
    assert [output.error for output in outputs] == [None, None]
