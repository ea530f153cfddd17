"""The end of a model: its final norm, output embedding, logit scale and softcap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from decodekit.core.compat import text_config
from decodekit.core.errors import Refused
from decodekit.core.types import BranchOutputs

_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm", "embedding_norm")


class Readout:
    """Projects hidden states onto the vocabulary as a model's head does.

    Raises:
        Refused: the model has no output embedding, or (when ``norm`` is asked for) no final norm under a known name.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._head = model.get_output_embeddings()
        if self._head is None:
            raise Refused(f"{type(model).__name__} has no output embedding to read hidden layers with")
        config = text_config(model)
        self._model = model
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self._scale = _logit_scale(model, config)

    def __call__(self, hidden: Tensor, *, norm: bool = False, finish: bool = True) -> Tensor:
        """As :meth:`decodekit.core.types.BranchOutputs.readout`."""
        logits = self._project(final_norm(self._model)(hidden) if norm else hidden)
        return self._finish(logits) if finish else logits

    def together(self, last: Tensor, early: Sequence[Tensor], *, norm: bool, finish: bool) -> tuple[Tensor, Tensor]:
        """The model's own logits [P, V] of its last state, and those of C early ones [C, P, V], from one product.

        Args:
            last: [P, H] with the final norm.
            early: [C] states [P, H] without it.
            norm: apply the final norm to the early states.
            finish: apply the logit scale and softcap to the early logits; the model's own always have them.
        """
        if norm:
            logits = self._project(torch.cat([last.unsqueeze(0), final_norm(self._model)(torch.stack([*early]))]))
        else:
            logits = self._project(torch.stack([last, *early]))
        if finish:
            logits = self._finish(logits)
        return logits[0] if finish else self._finish(logits[0]), logits[1:]

    def _project(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(hidden.to(self._head.weight.dtype))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _finish(self, logits: Tensor) -> Tensor:
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits


class UnreadOutputs(BranchOutputs):
    """Outputs whose logits are computed when they are asked for, with the early layers' in one product.

    A head is read from memory at every step, whatever the number of rows that it projects.

    Args:
        last: [P, H] the last hidden state, with the final norm.
        hidden: the kept layers.
        readout: the model's head.
    """

    def __init__(self, last: Tensor, hidden: Mapping[int, Tensor], readout: Readout) -> None:
        super().__init__(None, hidden, readout)
        self._last, self._head = last, readout

    @property
    @override
    def logits(self) -> Tensor:
        if self._logits is None:
            self._logits = self._head(self._last)
        return self._logits

    @override
    def early(self, *, norm: bool = False, finish: bool = True) -> Tensor:
        if self._logits is not None:
            return super().early(norm=norm, finish=finish)
        self._logits, early = self._head.together(self._last, [*self._hidden.values()], norm=norm, finish=finish)
        return early

    @override
    def span(self, start: int, stop: int) -> BranchOutputs:
        # Never itself: what a span computed is its own, and not there when a graph is captured.
        return self._each(lambda own: own[start:stop])

    @override
    def only(self, layers: Sequence[int]) -> BranchOutputs:
        return UnreadOutputs(self._last, {layer: self._hidden[layer] for layer in layers}, self._head)

    @override
    def blank(self) -> None:
        for own in (self._last, *self._hidden.values()):
            own.zero_()

    @override
    def _each(self, part: Callable[[Tensor], Tensor]) -> BranchOutputs:
        return UnreadOutputs(part(self._last), {layer: part(own) for layer, own in self._hidden.items()}, self._head)


def _logit_scale(model: PreTrainedModel, config: Any) -> float:
    if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
        return float(scale)
    if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
        return 1.0 / float(divisor)
    return float(getattr(config, "lm_head_multiplier", 1.0))  # Falcon-H1


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm between the last decoder layer and the head.

    Raises:
        Refused: none under a known name.
    """
    decoder = model.get_decoder()
    for name in _FINAL_NORMS:
        if isinstance(norm := getattr(decoder, name, None), nn.Module):
            return norm
    raise Refused(
        f"the final norm of {type(decoder).__name__} was not found (looked for {', '.join(_FINAL_NORMS)}); "
        "read hidden layers without norm"
    )
