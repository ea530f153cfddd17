import pytest
import torch
from transformers import LlamaConfig

import decodekit
from decodekit.core.errors import Refused
from decodekit.core.types import BranchOutputs, Outputs
from decodekit.kernels.contrast import layer_divergence
from decodekit.strategies.dola import Dola
from decodekit.testing import check_strategy, tiny_model
from tests.strategies.golden import DEMO, TINY, golden_model, left_pad, prompt_ids, representative

DEMO_DOLA_RUNS = [name for name, golden in DEMO["single"].items() if "dola_layers" in golden["settings"]]
DOLA_RUNS = ["dola_low", "dola_high", "dola_list", "dola_one", "dola_high_rp12"]

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("run", DOLA_RUNS)
def test_compat_gives_the_tokens_and_scores_of_transformers(name: str, run: str) -> None:
    model, golden = golden_model(name), TINY[name]["runs"][run]
    options = dict(golden["settings"])
    decoder = decodekit.strategy("dola", layers=options.pop("dola_layers"), mode="compat")
    for single in golden["single"]:
        output = model.generate(
            torch.tensor([single["prompt"]]),
            custom_generate=decoder,
            max_new_tokens=24,
            eos_token_id=1,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        assert output.sequences[0, len(single["prompt"]) :].tolist() == single["new_ids"][0]
        best = torch.stack([scores.max() for scores in output.scores])
        # float32 alone moves these scores, up to 150 large, by more than 1e-4: hence the relative part.
        torch.testing.assert_close(best, torch.tensor(single["step_max_score"]), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "run", "divergence"),
    [
        # Quick: each run of each model with one divergence, in turn.
        pytest.param(name, run, divergence, marks=[] if (row + column + place) % 2 == 0 else pytest.mark.slow)
        for row, name in enumerate(TINY)
        for column, run in enumerate(DOLA_RUNS)
        for place, divergence in enumerate(["jsd", "official"])
    ],
)
def test_strict_gives_every_row_of_a_batch_its_solo_run(name: str, run: str, divergence: str) -> None:
    model, golden = golden_model(name, torch.float64), TINY[name]["runs"][run]
    prompts, options = TINY[name]["prompts"], dict(golden["settings"])
    decoder = decodekit.strategy("dola", layers=options.pop("dola_layers"), divergence=divergence)

    def decode(prompts: list[list[int]]) -> list[list[int]]:
        inputs = left_pad(prompts)
        out = model.generate(
            **inputs, custom_generate=decoder, max_new_tokens=12, eos_token_id=1, pad_token_id=0, **options
        )
        return [row.tolist() for row in out[:, inputs["input_ids"].shape[1] :]]

    for batched, prompt in zip(decode(prompts), prompts, strict=True):
        [solo] = decode([prompt])
        assert batched[: len(solo)] == solo
        assert set(batched[len(solo) :]) <= {0}


def dola(layers, count, tied=False, **options) -> tuple[int, ...]:
    return Dola(layers=layers, **options).hidden_layers(LlamaConfig(num_hidden_layers=count, tie_word_embeddings=tied))


def test_buckets_are_those_of_the_paper() -> None:
    assert dola("low", 30, tied=True) == tuple(range(2, 15, 2))
    assert dola("high", 30, tied=True) == tuple(range(15, 30, 2))
    assert dola("low", 32) == tuple(range(0, 16, 2))
    assert dola("low", 60) == tuple(range(0, 20, 2))
    assert dola("low", 60, tied=True) == tuple(range(2, 20, 2))
    assert dola("high", 60) == tuple(range(40, 60, 2))
    assert dola("low", 2, tied=True) == (1,)
    assert dola((3, 1), 4) == (3, 1)


def test_a_layer_that_does_not_exist_is_refused_before_prefill() -> None:
    with pytest.raises(Refused, match=r"dola layers \[2, 4\] must be layers of 0 to 3 of this model, got \[4\]"):
        dola((2, 4), 4)
    model = tiny_model("dense")
    with pytest.raises(Refused, match=r"dola layers \[99\]"):
        model.generate(torch.tensor([[5, 6]]), custom_generate=decodekit.strategy("dola", layers=[99]))


@pytest.mark.parametrize("options", [{}, {"layers": "high", "divergence": "official"}, {"early_norm": True}])
def test_obeys_the_laws_of_a_strategy(options) -> None:
    check_strategy(Dola(**options))


def outputs_of(final: torch.Tensor, hidden: dict[int, torch.Tensor], head: torch.Tensor) -> Outputs:
    return Outputs({"main": BranchOutputs(final, hidden, lambda states, norm, finish: states @ head.T)})


def test_score_is_the_log_ratio_to_the_layer_of_each_position() -> None:
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    hidden = {layer: torch.randn(6, 5, generator=generator, dtype=torch.float64) for layer in (0, 2, 4)}
    final = torch.randn(6, 7, generator=generator, dtype=torch.float64)
    outputs = outputs_of(final, hidden, head)
    scores = Dola(relative_top=0.1).score(outputs)
    layers = outputs.annotations["premature_layer"].tolist()
    assert len(set(layers)) > 1, "the example should choose different layers"
    for position, layer in enumerate(layers):
        p = final[position].log_softmax(-1)
        candidates = {other: (states[position] @ head.T).log_softmax(-1) for other, states in hidden.items()}
        far = {other: float(layer_divergence(p[None], q[None, None])) for other, q in candidates.items()}
        assert layer == max(far, key=far.get)
        expected = torch.where(p.exp() >= 0.1 * p.exp().max(), p - candidates[layer], -torch.inf)
        torch.testing.assert_close(scores[position], expected)


def test_relative_top_0_keeps_every_token() -> None:
    head = torch.eye(5, dtype=torch.float64)
    final = torch.tensor([[9.0, 1, 0, -3, -20]], dtype=torch.float64)
    outputs = outputs_of(final, {0: torch.zeros(1, 5, dtype=torch.float64)}, head)
    assert torch.isfinite(Dola(relative_top=0).score(outputs)).all()
    assert int(torch.isfinite(Dola(relative_top=0.5).score(outputs)).sum()) == 1


@pytest.mark.parametrize("family", ["softcap", "scale"])
def test_early_layers_pass_the_models_scale_and_softcap(family: str) -> None:
    """The head of the model is reproduced: the last layer, read out, gives the model's own logits."""
    from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config

    from decodekit.core import heads

    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    if family == "softcap":
        config = Gemma2Config(
            **sizes, num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0, initializer_range=0.5
        )
    else:
        config = CohereConfig(**sizes, logit_scale=0.25, initializer_range=0.5)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        out = model(torch.tensor([[5, 6, 7]]), output_hidden_states=True)
        read = heads.Readout(model)
        torch.testing.assert_close(read(out.hidden_states[-1]), out.logits)
        assert not torch.allclose(read(out.hidden_states[-1], finish=False), out.logits)
        normed = heads.final_norm(model)(out.hidden_states[1])
        torch.testing.assert_close(read(out.hidden_states[1], norm=True), read(normed))


class Noted(Dola):
    """DoLa that tells which layers it chose."""

    def score(self, outputs: Outputs) -> torch.Tensor:
        scores = super().score(outputs)
        CHOSEN.append(outputs.annotations["premature_layer"].tolist())
        return scores


CHOSEN: list[list[int]] = []


@pytest.mark.parametrize("run", representative(DEMO_DOLA_RUNS, ["dola_low", "dola_high_rp1.2"]))
def test_compat_gives_the_layers_and_scores_on_the_demo_model(demo, run: str) -> None:
    model, _ = demo
    options = dict(DEMO["single"][run]["settings"])
    strategy = Noted(layers=options.pop("dola_layers"), mode="compat")
    decoder = decodekit.Decoder(decodekit.load({}).recipe.model_copy(update={"strategy": strategy}))
    for row in DEMO["single"][run]["rows"]:
        CHOSEN.clear()
        ids = prompt_ids(row["prompt"])
        output = model.generate(
            ids,
            custom_generate=decoder,
            max_new_tokens=16,
            eos_token_id=2,
            pad_token_id=1,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        assert output.sequences[0, ids.shape[1] :].tolist() == row["new_ids"]
        assert row["dola_layer"] == CHOSEN
        best = torch.stack([scores.max() for scores in output.scores])
        torch.testing.assert_close(best, torch.tensor(row["step_top1_score"]), atol=1e-4, rtol=1e-4)
