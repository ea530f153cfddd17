import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from decodekit.core.errors import InputError
from decodekit.scorers.reward_model import RewardModel
from decodekit.testing import tiny_tokenizer
from tests.scorers.texts import scores

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny reward model of one label and one of three, saved."""
    torch.manual_seed(0)
    folders = {}
    for labels in (1, 3):
        folder = tmp_path_factory.mktemp(f"reward-{labels}")
        config = LlamaConfig(
            vocab_size=97,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            initializer_range=0.5,
            pad_token_id=0,
            num_labels=labels,
        )
        LlamaForSequenceClassification(config).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        folders[labels] = str(folder)
    return folders


@pytest.mark.parametrize(("labels", "label"), [(1, None), (3, 2)])
def test_is_the_logit_for_prompt_and_answer(saved, labels, label) -> None:
    tokenizer = tiny_tokenizer()
    model = LlamaForSequenceClassification.from_pretrained(saved[labels]).eval()
    found = scores(RewardModel(model=saved[labels], label=label), "yes", "no, never", prompt="Is it?")
    for text, score in zip(("yes", "no, never"), found, strict=True):
        ids = torch.tensor([tokenizer("Is it?" + text).input_ids])
        assert score == pytest.approx(float(model(ids).logits[0, label or 0]), abs=1e-5)
    assert found[0] != found[1]


def test_a_chat_template_writes_the_turns(saved, tmp_path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    model = LlamaForSequenceClassification.from_pretrained(saved[1]).eval()
    model.save_pretrained(tmp_path)
    [score] = scores(RewardModel(model=str(tmp_path)), "yes", prompt="Is it?")
    ids = torch.tensor([tokenizer("<user>Is it?<assistant>yes").input_ids])
    assert score == pytest.approx(float(model(ids).logits[0, 0]), abs=1e-5)


def test_it_is_loaded_once(saved) -> None:
    first, _ = RewardModel(model=saved[1])._loaded()
    assert RewardModel(model=saved[1])._loaded()[0] is first


def test_which_label_is_the_reward_must_be_said(saved) -> None:
    with pytest.raises(InputError, match="has 3 labels and no label was given; give one of 0 to 2"):
        RewardModel(model=saved[3]).resolve(None)
    with pytest.raises(InputError, match="has 1 labels and label 1 was given; give one of 0 to 0"):
        RewardModel(model=saved[1], label=1).resolve(None)
