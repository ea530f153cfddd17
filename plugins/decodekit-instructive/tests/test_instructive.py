import pytest
import torch
from decodekit_instructive import Instructive

from decodekit import RowError, strategy
from decodekit.testing import check_strategy, tiny_model, tiny_tokenizer


def test_obeys_the_laws_of_a_strategy() -> None:
    check_strategy(Instructive(epsilon=0.5))


def test_equals_the_formula_recomputed_without_cache() -> None:
    model, tokenizer = tiny_model("dense", dtype=torch.float64), tiny_tokenizer()
    [output] = strategy("instructive", epsilon=0.5).run(model, tokenizer, ["Who won?"], max_new_tokens=6)
    plain = tokenizer("Who won?").input_ids
    noisy = tokenizer(f"{Instructive().noisy}\nWho won?").input_ids
    for token in output.token_ids:
        with torch.no_grad():
            z, z_noisy = (model(torch.tensor([ids])).logits[0, -1] for ids in (plain, noisy))
        assert token == int((z - 0.5 * z_noisy).argmax())
        plain, noisy = [*plain, token], [*noisy, token]


def test_says_which_text_is_missing() -> None:
    model = tiny_model("dense")
    with pytest.raises(RowError, match="instructive needs 'text' for prompt 0; give it as dk_inputs"):
        model.generate(torch.tensor([[5, 6]]), custom_generate=strategy("instructive"), max_new_tokens=2)
