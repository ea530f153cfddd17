import pytest
import torch
from pydantic import ValidationError
from transformers import WatermarkingConfig, WatermarkLogitsProcessor

import decodekit
from decodekit.rules.temperature import Temperature
from decodekit.rules.watermark import Watermark
from decodekit.testing import check_rule, make_rows

pytestmark = pytest.mark.integration

SCHEMES = [
    {},
    {"seeding_scheme": "lefthash", "context_width": 3, "bias": 4.0},
    {"seeding_scheme": "selfhash", "context_width": 3, "greenlist_ratio": 0.4, "hashing_key": 12345},
]


@pytest.mark.parametrize("options", SCHEMES)
def test_obeys_the_laws_of_a_rule(options: dict[str, object]) -> None:
    check_rule(Watermark(**options), dtypes=[torch.float32, torch.bfloat16])


@pytest.mark.parametrize("options", SCHEMES)
def test_equals_transformers_row_by_row(options: dict[str, object]) -> None:
    histories = [[5, 6, 7, 8], [9, 9, 9], [30, 40, 50, 60, 70, 80, 90]]
    logits = torch.randn(3, 97)
    result = Watermark(**options)(make_rows(histories), logits)
    processor = WatermarkLogitsProcessor(97, "cpu", **options)
    for row, history in enumerate(histories):
        expected = processor(torch.tensor([history]), logits[row : row + 1])
        assert torch.equal(result[row : row + 1], expected)
        assert not torch.equal(expected, logits[row : row + 1])


def test_a_row_shorter_than_the_context_is_not_marked() -> None:
    logits = torch.randn(2, 97)
    result = Watermark(context_width=3)(make_rows([[5, 6], [5, 6, 7]]), logits)
    assert (result == logits).all(-1).tolist() == [True, False]


def test_selfhash_goes_on_where_no_candidate_is_green() -> None:
    # With one green token of 97 a row often has none among the 40 candidates, where transformers' own processor fails.
    logits = torch.randn(20, 97)
    rule = Watermark(seeding_scheme="selfhash", greenlist_ratio=0.011, context_width=2)
    result = rule(make_rows([[token, 3] for token in range(20)]), logits)
    assert 0 < (result == logits).all(-1).sum() < 20


@pytest.mark.parametrize("options", SCHEMES)
def test_marks_what_the_option_of_generate_marks(dense, options: dict[str, object]) -> None:
    ids = torch.tensor([[5, 17, 42], [9, 8, 7]])
    plain = dense.generate(ids, max_new_tokens=12, watermarking_config=WatermarkingConfig(**options))
    decoder = decodekit.load({"rules": [{"kind": "watermark", **options}]})
    assert torch.equal(dense.generate(ids, max_new_tokens=12, custom_generate=decoder), plain)


@pytest.mark.parametrize("options", SCHEMES)
def test_what_is_marked_is_detected_in_a_padded_batch(model, options: dict[str, object]) -> None:
    ids = torch.tensor([[0, 0, 0, 0, 5], [0, 9, 8, 7, 6], [23, 88, 64, 10, 11]])
    # Hot, so that the text is varied: in a loop chance would decide once and count often.
    rule, hot = Watermark(**{**options, "bias": 6.0}), Temperature(t=6.0)
    marked, plain = (
        model.generate(
            ids,
            attention_mask=(ids != 0).long(),
            max_new_tokens=60,
            eos_token_id=None,
            custom_generate=decodekit.load({"rules": rules, "generation": {"do_sample": True, "seed": 3}}),
        )[:, 5:]
        for rules in ([hot, rule], [hot])
    )
    detect = rule.detector(model.config, ignore_repeated_ngrams=True)
    assert detect(marked).tolist() == [True] * 3
    assert detect(plain).tolist() == [False] * 3
    # Another key finds nothing.
    other = rule.model_copy(update={"hashing_key": 99991}).detector(model.config, ignore_repeated_ngrams=True)
    assert other(marked).tolist() == [False] * 3


@pytest.mark.parametrize(
    "options", [{"greenlist_ratio": 0}, {"greenlist_ratio": 1}, {"hashing_key": 0}, {"context_width": 0}]
)
def test_refuses_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=r"greater than|less than"):
        Watermark(**options)
