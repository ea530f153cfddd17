"""What every sequence-level strategy must keep to, with a model."""

from __future__ import annotations

from typing import Any

from decodekit.runtime.decoder import Decoder

PROMPTS = ["Who won?", "a", "The other one, please: 1 + 2 = ", "Is it so?"]


def check_candidates(decoder: Decoder, model: Any, tokenizer: Any, length: int = 10) -> None:
    """Batched = alone, token for token, candidates, scores and cost included; some rows end early."""
    ends = [1, *range(10, 25)]  # so many that rows end at different steps
    options = {"max_new_tokens": length, "do_sample": True, "seed": 3, "eos_token_id": ends}
    batch = decoder.run(model, tokenizer, PROMPTS, **options)
    assert len({len(own["token_ids"]) for output in batch for own in output.candidates}) > 2
    for output, prompt in zip(batch, PROMPTS, strict=True):
        [solo] = decoder.run(model, tokenizer, prompt, **options)
        assert output.error is None
        assert output.token_ids == solo.token_ids
        assert [own["token_ids"] for own in output.candidates] == [own["token_ids"] for own in solo.candidates]
        assert [own["finish_reason"] for own in output.candidates] == [own["finish_reason"] for own in solo.candidates]
        # The prompt once for all candidates; a candidate's last token is never forwarded.
        fed = sum(len(own["token_ids"]) - 1 for own in output.candidates)
        assert output.stats["forwarded_tokens"] == len(tokenizer(prompt).input_ids) + fed
