"""A model and the cached streams of one batch: prompts in once, then one token a row.

This one keeps transformers' own cache (``cache: {kind: dynamic}``): rectangular, left-padded, rows stay until all end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decodekit.core import compat
from decodekit.core.errors import Refused
from decodekit.core.types import BranchOutputs


class Session:
    """One branch of every row of a batch over one transformers cache.

    Args:
        model: the model that runs this branch.
        prepared: its inputs, [R, T].
        layers: hidden layers to keep.

    Attributes:
        prompt_lengths: [R] tokens of each prompt without pads.
        forwards: forwards so far.
        raw: what the model returned last.
    """

    def __init__(self, model: Any, prepared: compat.Prepared, *, layers: tuple[int, ...] = ()) -> None:
        self._stepper = compat.Stepper(model, prepared, hidden_states=bool(layers))
        self._model = model
        self._layers = layers
        self.prompt_lengths = prepared.lengths
        self._readout = compat.readout(model) if layers else None
        self.forwards = 0
        self.raw: Any = None

    @property
    def input_ids(self) -> Tensor:
        """[R, T] the padded ids so far."""
        return self._stepper.input_ids

    @property
    def cache(self) -> Any:
        """The transformers cache behind this session."""
        return self._stepper.cache

    @property
    def cached_tokens(self) -> int:
        """Columns already in the cache (a caller may pass one that is filled)."""
        return self._stepper.cached_tokens

    def optimized(self) -> Any:
        """A context in which one-token steps are fastest."""
        return self._stepper.optimized()

    def extend(self, tokens: Tensor) -> None:
        """Append known tokens, [R, N], to the prompts before they are prefilled."""
        self._stepper.extend(tokens)

    def prefill(self, last: int = 1) -> BranchOutputs:
        """Forward the prompts; outputs at the ``last`` positions of each row, row by row: [R * last, ...]."""
        outputs = self._outputs(self._stepper.prefill(last), last)
        if self._readout is not None:
            self._check_head(outputs)
        return outputs

    def step(self, tokens: Tensor) -> BranchOutputs:
        """Forward one more token a row, [R]; outputs [R, ...]."""
        return self._outputs(self._stepper.step(tokens), 1)

    def _outputs(self, raw: Any, last: int) -> BranchOutputs:
        self.forwards += 1
        self.raw = raw
        # A copy, so that the logits of a whole prompt are not kept alive by a view of their last row.
        logits = raw.logits[:, -last:].flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        hidden = {layer: raw.hidden_states[layer][:, -last:].flatten(0, 1) for layer in self._layers}
        return BranchOutputs(logits, hidden, self._readout)

    def _check_head(self, outputs: BranchOutputs) -> None:
        """A head with a scale or softcap that is not known here would skew every early layer: refuse it.

        The last entry of ``hidden_states`` is the normed state that the model's own head read.
        """
        expected = self.raw.logits[:, -1].to(outputs.logits.dtype)
        worst = (outputs.readout(self.raw.hidden_states[-1][:, -1]) - expected).abs().max().item()
        # NaN logits are a fault of their row, not of the head.
        if worst > 1e-2 * max(1.0, expected.abs().max().item()):
            raise Refused(
                f"the output head of {type(self._model).__name__} is not understood: logits read from its last hidden state "
                f"differ by {worst:.3g}, so hidden layers cannot be contrasted; use a strategy that needs no hidden states"
            )
