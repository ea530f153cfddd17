"""One forward of a model: over the rectangular batch of ``generate``, or over rows of a paged cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from decodekit.cache.attention import NAME, NAME_OF_FEW, NAME_WITHOUT_MASKS
from decodekit.cache.fixed import FixedStep
from decodekit.cache.paged import PagedCache
from decodekit.cache.states import load as load_states
from decodekit.core.compat import CACHE_KEY, Prepared, attention, context_length, uses_sdpa
from decodekit.core.errors import Refused

FEW = 16
"""Tokens a row up to which a forward's attention costs most by the K/V that it reads."""


class Stepper:
    """Runs a model over one rectangular batch with the cache that ``generate`` prepared.

    The batch keeps transformers' own shapes and order of operations, so that logits equal plain ``generate``'s to the bit.

    Args:
        model: the model.
        prepared: its inputs.
        hidden_states: whether the outputs are to hold all hidden states.
    """

    def __init__(self, model: PreTrainedModel, prepared: Prepared, *, hidden_states: bool = False) -> None:
        self.model = model
        self.input_ids = prepared.input_ids
        self._config = prepared.config
        self._kwargs = dict(prepared.model_kwargs)
        if hidden_states:
            self._kwargs["output_hidden_states"] = True
        self._context = context_length(model)
        self._cached = bool(self._kwargs.get("use_cache", True))
        compiled = model._valid_auto_compile_criteria(self._kwargs, self._config)
        self._forward: Callable[..., Any] = (
            model.get_compiled_call(self._config.compile_config) if compiled else model.__call__
        )

    @property
    def cache(self) -> Any:
        """The transformers cache, or ``None``."""
        return self._kwargs.get(CACHE_KEY)

    def extend(self, tokens: Tensor) -> None:
        """Append known tokens, [R, N], to the prompts before they are prefilled."""
        self.input_ids = torch.cat([self.input_ids, tokens], dim=-1)
        self._kwargs = self.model._update_model_kwargs_for_generation(
            ModelOutput(), self._kwargs, num_new_tokens=tokens.shape[1]
        )

    def prefill(self, last: int = 1) -> Any:
        """Forward the whole prompt; the outputs hold logits of at least its ``last`` positions."""
        if "logits_to_keep" in self._kwargs:
            self._kwargs["logits_to_keep"] = last
        outputs = self.model._prefill(self.input_ids, self._config, self._kwargs)
        return self._advance(outputs)

    def step(self, tokens: Tensor) -> Any:
        """Append one token a row, [R], and forward it."""
        self.input_ids = torch.cat([self.input_ids, tokens.unsqueeze(-1)], dim=-1)
        if "logits_to_keep" in self._kwargs:
            self._kwargs["logits_to_keep"] = 1
        inputs = self.model.prepare_inputs_for_generation(
            self.input_ids, next_sequence_length=1 if self._cached else None, **self._kwargs
        )
        return self._advance(self._forward(**inputs, return_dict=True))

    def _advance(self, outputs: Any) -> Any:
        self._kwargs = self.model._update_model_kwargs_for_generation(outputs, self._kwargs, is_encoder_decoder=False)
        positions = self._kwargs.get("position_ids")
        if positions is not None and self._context is not None:
            # Ended rows are carried along: a model with learned positions has none for them beyond its context.
            positions[..., -1].clamp_(max=self._context - 1)
        return outputs


class RaggedForward:
    """Runs a model over some rows of a paged cache.

    Args:
        model: the model.
        cache: its cache.
        hidden_states: whether the outputs are to hold all hidden states.
    """

    def __init__(self, model: PreTrainedModel, cache: PagedCache, *, hidden_states: bool = False) -> None:
        self._model, self._cache = model, cache
        # Models without positions or attention (Mamba) do not name what they would ignore.
        self._accepted = {"attention_mask", "position_ids", "logits_to_keep"} & inputs_of(model)
        self._always: dict[str, Any] = {CACHE_KEY: cache, "use_cache": True, "return_dict": True}
        if hidden_states:
            self._always["output_hidden_states"] = True
        self._nowhere = torch.zeros(0, dtype=torch.long, device=model.device)

    def __call__(
        self, rows: Sequence[int], tokens: Sequence[Sequence[int]], *, last: int = 1, direct: bool = False
    ) -> Any:
        """Forward the next tokens of these rows, [R] of any numbers; the outputs are right-aligned.

        Args:
            rows: places in the cache.
            tokens: [R] their next tokens.
            last: how many of the last positions of each row to give logits of.
            direct: let attention read the blocks itself.

        Raises:
            Refused: it cannot, for this model; nothing has changed.
        """
        width = max(map(len, tokens))
        padded = [[0] * (width - len(ids)) + list(ids) for ids in tokens]
        input_ids = torch.tensor(padded, device=self._model.device)
        with self._cache.begin(rows, tokens, direct=direct) as step:
            inputs = {
                # Rows of one length have no pads, and attention without a mask is faster.
                "attention_mask": step.attention_mask if step.padded else None,
                "position_ids": step.position_ids,
                "logits_to_keep": last,
            }
            given = {name: value for name, value in inputs.items() if name in self._accepted}
            if not direct:
                few = 1 < width <= FEW and self._model.device.type == "cpu" and uses_sdpa(self._model)
                with attention(self._model, NAME_OF_FEW) if few else nullcontext():
                    return self._model(input_ids=input_ids, **given, **self._always)
            with attention(self._model, NAME):
                return self._model(
                    input_ids=input_ids, **{**given, "attention_mask": None}, **self._always, dk_cache=step
                )

    def packed(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], kept: Tensor) -> Any:
        """Forward the next tokens of these rows after each other, as one row without pads; attention reads the blocks itself.

        Args:
            rows: places in the cache.
            tokens: [R] their next tokens, N in all.
            kept: [n] the places among the N to give logits of.

        Returns:
            the outputs, with logits [1, n, V] and, where these are kept, hidden states [1, N, H].

        Raises:
            Refused: it cannot, for this model; nothing has changed.
        """
        # Other models than transformers' own may count from the end with what they are given.
        heads = {"logits_to_keep": kept} if self.headless else {}
        ids = torch.tensor([[token for own in tokens for token in own]], device=self._model.device)
        with self._cache.begin(rows, tokens, direct=True, packed=True) as step:
            given = {"position_ids": step.position_ids, **heads, **self._always}
            with attention(self._model, NAME_WITHOUT_MASKS):
                outputs = self._model(input_ids=ids, **given, dk_cache=step)
            expected, found = len(kept) if heads else ids.shape[1], outputs.logits.shape[1]
            if found != expected:
                raise Refused(f"{type(self._model).__name__} gave logits of {found} positions instead of {expected}")
        if not heads:
            outputs.logits = outputs.logits[:, kept]
        return outputs

    @property
    def packs(self) -> bool:
        """Whether its model is told the tokens' positions, without which rows cannot lie after each other."""
        return "position_ids" in self._accepted

    @property
    def headless(self) -> bool:
        """Whether its model can leave its head out: transformers' own take the positions to project, which may be none."""
        return "logits_to_keep" in self._accepted and type(self._model).__module__.startswith("transformers.")

    def framed(self, frame: FixedStep, *, head: bool = True) -> Any:
        """Forward the tokens of a frame, and count them: nothing of it waits for the device, so that a graph can hold it.

        Args:
            frame: the frame.
            head: give logits; without, the model is to be ``headless``.
        """
        frame.begin()
        inputs = {"position_ids": frame.position_ids, "logits_to_keep": frame.last if head else self._nowhere}
        given = {name: value for name, value in inputs.items() if name in self._accepted}
        self._cache.frame = frame
        try:
            with attention(self._model, NAME_WITHOUT_MASKS):
                outputs = self._model(input_ids=frame.input_ids, **given, **self._always, dk_cache=frame)
            frame.end()
        finally:
            self._cache.frame = None
            load_states(self._cache.layers, None)
        return outputs


def inputs_of(model: nn.Module) -> set[str]:
    """The inputs that a model names; of one that is not transformers' own and hands others on, also the inner model's."""
    parameters = inspect.signature(model.forward).parameters
    named = set(parameters)
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if hands_on and not type(model).__module__.startswith("transformers."):
        within = (part for part in model.modules() if part is not model and isinstance(part, PreTrainedModel))
        named |= inputs_of(inner) if (inner := next(within, None)) is not None else set()
    return named
