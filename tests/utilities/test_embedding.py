import pytest
import torch

from decodekit.core.errors import InputError
from decodekit.testing import tiny_model, tiny_tokenizer
from decodekit.utilities.embedding import Embedding

pytestmark = pytest.mark.integration
TEXTS = ["the cat", "a dog is here", "the cat", ""]


def test_is_the_cosine_of_mean_states(tiny_folder) -> None:
    model, tokenizer = tiny_model("dense"), tiny_tokenizer()
    states = [model.model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0].mean(0) for text in TEXTS[:2]]
    scores = Embedding(model=str(tiny_folder)).pairwise(TEXTS, TEXTS)
    cosine = float(torch.nn.functional.cosine_similarity(*states, dim=0))
    assert float(scores[0, 1]) == pytest.approx(100 * cosine, abs=1e-3)
    assert scores[0, [0, 2]].tolist() == pytest.approx([100, 100])
    assert abs(cosine) < 0.99
    assert scores[3].tolist() == [0, 0, 0, 0]


def test_the_mean_of_unit_vectors_stands_for_all(tiny_folder) -> None:
    utility, weights = Embedding(model=str(tiny_folder)), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    scores = utility.aggregated(TEXTS, TEXTS[:3], weights)
    torch.testing.assert_close(scores, utility.pairwise(TEXTS, TEXTS[:3]) @ weights)


def test_a_model_that_cannot_be_loaded_is_one_line() -> None:
    with pytest.raises(
        InputError, match=r"embedding: cannot load '/nowhere/at/all' as AutoModel: .*; give an id or a folder"
    ):
        Embedding(model="/nowhere/at/all").resolve(None)
