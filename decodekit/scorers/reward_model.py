"""A reward model: a sequence classifier of transformers that rates answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from typing_extensions import override

from decodekit.core.candidates import Candidate
from decodekit.core.errors import InputError
from decodekit.core.extras import load_other_model
from decodekit.core.protocols import Scorer
from decodekit.core.types import Need


class RewardModel(Scorer):
    """The logit of the reward model for prompt and answer, written as its chat template has them, else as a text pair.

    Ouyang et al., 2022, arXiv:2203.02155, section 3.5. Much better than log-probability where the model was trained for
    such prompts; with many candidates it is the reward model's own errors that win (Gao et al., 2022, arXiv:2210.10760).
    The model is loaded once a process, by id or path.
    """

    cost: ClassVar[str] = "1 forward of the reward model a candidate"
    needs: ClassVar[frozenset[Need | str]] = frozenset({Need.TOKENIZER, Need.TEXT})

    kind: Literal["reward_model"] = "reward_model"
    model: str = Field(description="a Hugging Face id or a local folder of a sequence classifier")
    label: int | None = Field(None, ge=0, description="the logit that is the reward, for a model that has several")

    @override
    def resolve(self, tokenizer: Any) -> Self:
        self._loaded()
        return self

    @torch.no_grad()
    def score(self, prompt: str, candidates: Sequence[Candidate]) -> Sequence[float]:
        model, tokenizer = self._loaded()
        scores = []
        for own in candidates:  # each alone: classifiers differ in how they find the end of a padded row
            if getattr(tokenizer, "chat_template", None):
                turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": own.text}]
                text = tokenizer.apply_chat_template(turns, tokenize=False)
                inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
            else:
                inputs = tokenizer(prompt, own.text, return_tensors="pt")
            # Not all classifiers take what their tokenizers give beside the ids.
            logits = model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask).logits[0]
            scores.append(float(logits[self.label or 0]))
        return scores

    def _loaded(self) -> tuple[Any, Any]:
        model, tokenizer = load_other_model(self.model, "AutoModelForSequenceClassification", self.kind)
        labels = model.config.num_labels
        if (labels > 1 and self.label is None) or (self.label or 0) >= labels:
            given = "no label was given" if self.label is None else f"label {self.label} was given"
            raise InputError(
                f"reward_model: {self.model!r} has {labels} labels and {given}; give one of 0 to {labels - 1}"
            )
        return model, tokenizer
