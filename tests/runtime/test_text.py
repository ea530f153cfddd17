import pytest

from decodekit.core.errors import InputError
from decodekit.runtime.text import TextTracker, encode, split_inputs


def track(tokenizer, text: str, stops=()) -> tuple[list[str], TextTracker]:
    tracker = TextTracker(tokenizer, stops)
    pieces = []
    for token in tokenizer(text, add_special_tokens=False).input_ids:
        pieces.append(tracker.push(token))
        if tracker.stopped:
            break
    pieces.append(tracker.finish())
    return pieces, tracker


@pytest.mark.parametrize("text", ["the cat sat", "a", " the the", "1 + 1 = 2\n\nok"])
def test_pieces_join_to_the_text(tokenizer, text) -> None:
    pieces, tracker = track(tokenizer, text)
    assert "".join(pieces) == tracker.text == text


def test_a_character_of_several_tokens_comes_whole(demo) -> None:
    _, tokenizer = demo
    text = "naïve café 日本語 🤗🤗 end"
    pieces, tracker = track(tokenizer, text)
    assert tracker.text == "".join(pieces) == text
    assert all("�" not in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 5


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["sat"], "the cat "),
        (["t sa", "cat"], "the "),
        (["e", "h"], "t"),  # both in one token
        (["zzz"], "the cat sat on it"),
        (["on it"], "the cat sat "),
    ],
)
def test_the_text_is_cut_before_the_first_stop_string(tokenizer, stops, expected) -> None:
    pieces, tracker = track(tokenizer, "the cat sat on it", stops)
    assert tracker.text == "".join(pieces) == expected
    assert tracker.stopped == (stops != ["zzz"])


def test_what_could_become_a_stop_string_is_held_back(tokenizer) -> None:
    tracker = TextTracker(tokenizer, ["abcd"])
    ids = tokenizer("xabcyabc", add_special_tokens=False).input_ids
    assert [tracker.push(token) for token in ids] == ["x", "", "", "", "abcy", "", "", ""]
    assert tracker.finish() == "abc"


def test_a_special_token_stops_by_its_id(tokenizer) -> None:
    tracker = TextTracker(tokenizer, ["<bos>", "zz"])
    pieces = [tracker.push(token) for token in tokenizer("ab", add_special_tokens=False).input_ids]
    assert (pieces, tracker.stopped) == (["a", "b"], False)
    assert tracker.push(tokenizer.bos_token_id) == ""
    assert tracker.stopped
    assert tracker.text == "ab"


def test_text_that_was_not_utf8_is_refused(tokenizer) -> None:
    with pytest.raises(InputError, match="not valid Unicode"):
        encode(tokenizer, "a\udcff")


def test_prompts_go_through_the_chat_template_once(demo) -> None:
    _, tokenizer = demo
    ids = encode(tokenizer, "Hi there")
    messages = [{"role": "user", "content": "Hi there"}]
    assert ids == encode(tokenizer, messages)
    assert ids == list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True).input_ids)
    assert encode(tokenizer, "Hi there", raw=True) == tokenizer("Hi there").input_ids


def test_a_template_that_writes_bos_does_not_get_a_second_one(tokenizer) -> None:
    import copy

    own = copy.deepcopy(tokenizer)
    own.chat_template = "<bos>{% for m in messages %}{{ m.content }}{% endfor %}!"
    assert encode(own, "the") == [2, *tokenizer("the!", add_special_tokens=False).input_ids]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        (" \n", "the prompt is empty"),
        ([], "a prompt is a text or a list of"),
        ([{"text": "x"}], "a prompt is a text or a list of"),
        (3, "a prompt is a text or a list of .* got 3"),
        ([{"role": "user", "content": "x"}], "chat messages need a tokenizer with a chat template"),
    ],
)
def test_prompts_that_cannot_be_used_say_why(tokenizer, prompt, message) -> None:
    with pytest.raises(InputError, match=message):
        encode(tokenizer, prompt)


def test_a_mapping_is_split_into_prompt_and_inputs() -> None:
    assert split_inputs({"prompt": "x", "context": "y"}) == ("x", {"context": "y"})
    assert split_inputs("x") == ("x", {})
    with pytest.raises(InputError, match=r"needs the key 'prompt', got \['context'\]"):
        split_inputs({"context": "y"})
