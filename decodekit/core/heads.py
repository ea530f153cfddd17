"""The end of a model: its final norm, output embedding, logit scale and softcap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decodekit.core.compat import text_config
from decodekit.core.errors import Refused

_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm", "embedding_norm")


def readout(model: PreTrainedModel) -> Callable[..., Tensor]:
    """A function that projects hidden states onto the vocabulary as the model's head does.

    Raises:
        Refused: the model has no output embedding, or (when ``norm`` is asked for) no final norm under a known name.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise Refused(f"{type(model).__name__} has no output embedding to read hidden layers with")
    config = text_config(model)
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = _logit_scale(model, config)

    def read(hidden: Tensor, *, norm: bool = False, finish: bool = True) -> Tensor:
        if norm:
            hidden = final_norm(model)(hidden)
        logits = head(hidden.to(head.weight.dtype))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if finish and scale != 1.0:
            logits = logits * scale
        if finish and softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits

    return read


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
