import pytest
import torch

import decodekit
from decodekit import InputError, Refused, Rule
from decodekit.rules.frequency_penalty import FrequencyPenalty
from decodekit.rules.min_length import MinLength

pytestmark = pytest.mark.integration


def test_a_rule_works_under_plain_generate_and_counts_no_pads(dense, tokenizer) -> None:
    prompts = [[5, 17, 42, 8, 42], [9, 9]]
    ids = torch.tensor([prompts[0], [0, 0, 0, *prompts[1]]])
    rule = FrequencyPenalty(penalty=2.0, scope="both")
    processor = decodekit.as_logits_processor(rule, tokenizer)
    batch = dense.generate(ids, attention_mask=(ids != 0).long(), logits_processor=[processor], max_new_tokens=8)
    decoder = decodekit.load({"rules": [{"kind": "frequency_penalty", "penalty": 2.0, "scope": "both"}]})
    for row, prompt in zip(batch[:, 5:].tolist(), prompts, strict=True):
        solo = dense.generate(torch.tensor([prompt]), custom_generate=decoder, max_new_tokens=8)[
            0, len(prompt) :
        ].tolist()
        assert row[: len(solo)] == solo


def test_the_first_call_tells_where_the_prompt_ends(dense, tokenizer) -> None:
    processor = decodekit.as_logits_processor(MinLength(n=6), tokenizer)
    output = dense.generate(torch.tensor([[5, 17, 42]]), logits_processor=[processor], max_new_tokens=6, eos_token_id=1)
    assert output.shape[1] == 9


class Stateful(Rule):
    kind: str = "stateful"

    def init_state(self, request):
        return 0

    def __call__(self, rows, logits):
        return logits


def test_what_cannot_be_carried_is_refused(tokenizer) -> None:
    with pytest.raises(Refused, match="rule 'stateful' keeps state for each row"):
        decodekit.as_logits_processor(Stateful(), tokenizer)
    with pytest.raises(InputError, match="expected a decodekit rule, got str"):
        decodekit.as_logits_processor("top_p", tokenizer)
    with pytest.raises(InputError, match="needs the model's tokenizer"):
        decodekit.as_logits_processor(MinLength(n=1), None)
