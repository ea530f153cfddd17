import pytest
import torch
from decodekit_sled import Sled
from torch.nn.functional import cosine_similarity, one_hot

from decodekit import Outputs, Refused, load, strategy
from decodekit.core.types import BranchOutputs
from decodekit.testing import check_strategy, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("options", [{}, {"layers": (1, 3), "evolution_rate": 5, "evolution_scale": 4}], ids=str)
def test_obeys_the_laws_of_a_strategy(options) -> None:
    check_strategy(Sled(**options))


def example(positions: int) -> tuple[Outputs, torch.Tensor, torch.Tensor]:
    """Outputs, their final logits [P, V] and their early ones [C, P, V]."""
    generator = torch.Generator().manual_seed(1)
    head, final, hidden = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((23, 6), (positions, 23), (3, positions, 6))
    )
    layers = dict(enumerate(hidden))
    main = BranchOutputs(final, layers, lambda states, norm, finish: states @ head.T)
    return Outputs({"main": main}), final, hidden @ head.T


def test_equals_the_algorithm_written_out() -> None:
    outputs, final, early = example(5)
    scores = Sled(evolution_rate=1.5, evolution_scale=7).score(outputs)
    for position in range(5):
        z, top = final[position], final[position].topk(7).indices.tolist()
        m = torch.zeros(7, dtype=torch.float64)
        for layer in early[:, position]:
            for place, token in enumerate(top):
                towards = layer.softmax(-1) - one_hot(torch.tensor(token), 23)
                m[place] += cosine_similarity(layer - z, towards, dim=0).clamp(min=0) ** 2
        assert (m > 0).any(), "the example should point somewhere"
        expected = torch.full_like(z, -torch.inf)
        expected[top] = z[top] - 1.5 * (z.softmax(-1)[top] - m / m.sum())
        torch.testing.assert_close(scores[position], expected)


def test_without_evidence_the_logits_stay() -> None:
    final = torch.tensor([[3.0, 2.0, 1.0]], dtype=torch.float64)
    main = BranchOutputs(final, {0: final}, lambda states, norm, finish: states)
    torch.testing.assert_close(Sled(evolution_scale=3).score(Outputs({"main": main})), final)


def test_rate_0_is_greedy_decoding() -> None:
    model, tokenizer = tiny_model("hybrid", dtype=torch.float64), tiny_tokenizer()
    [ours] = strategy("sled", evolution_rate=0).run(model, tokenizer, "Who won?", max_new_tokens=8)
    [plain] = load({}).run(model, tokenizer, "Who won?", max_new_tokens=8)
    assert ours.token_ids == plain.token_ids


def test_a_layer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(Refused, match=r"sled layers \[1, 4\] must be layers of 0 to 3 of this model"):
        tiny_model("dense").generate(torch.tensor([[5, 6]]), custom_generate=strategy("sled", layers=[1, 4]))
