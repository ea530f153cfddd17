from decodekit.constraints.choice import Choice


def test_is_one_of_the_texts_to_the_letter(accepts):
    choice = Choice(choices=("yes", "yes, please", "日本", "a.b"))
    assert all(accepts(choice, text) for text in choice.choices)
    assert not any(accepts(choice, text) for text in ("", "no", "yes,", "日", "axb", "yesyes"))
