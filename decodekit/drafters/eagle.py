"""Propose what a small head makes of the model's hidden states, one layer deep."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from decodekit.core.checkpoints import check_target, load_weights, read_config, read_tensors
from decodekit.core.compat import text_config
from decodekit.core.draft_heads import Head, HeadDrafts
from decodekit.core.drafts import DraftHost, DraftState
from decodekit.core.errors import InputError, Refused
from decodekit.core.heads import Readout
from decodekit.core.options import RecipePath
from decodekit.core.protocols import Drafter
from decodekit.core.types import Need


class EagleHead(nn.Module):
    """The head of EAGLE: ``fc`` joins embedding and hidden state, then one Llama layer without norms around it.

    Args:
        config: of the layer; its hidden size is the target's.
        bias: whether ``fc`` has one.
    """

    def __init__(self, config: LlamaConfig, *, bias: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        decoder = LlamaModel(config)
        decoder.layers[0].input_layernorm = nn.Identity()
        decoder.norm = nn.Identity()
        # Embeddings are the target's.
        decoder.embed_tokens = None
        self.decoder = decoder

    def fuse(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """[..., H] each to [..., H]."""
        fused: Tensor = self.fc(torch.cat([embeddings, hidden], dim=-1))
        return fused


def head_config(config: dict[str, Any], hidden: int) -> LlamaConfig:
    """The config of the layer, from the ``config.json`` of a head."""
    fields = {
        name: value for name, value in config.items() if name not in ("architectures", "model_type", "vocab_size")
    }
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))  # it has no embedding of its own
    return LlamaConfig(
        **{**fields, "hidden_size": hidden, "num_hidden_layers": 1, "vocab_size": 1, **special},
        attn_implementation="sdpa",
    )


class Eagle(Drafter):
    """An EAGLE head: a layer that guesses the next hidden states from the target's, read out with the target's own head.

    Li et al., 2024, arXiv:2401.15077 (the head) and arXiv:2406.16858 (trees that grow where it is confident). Reads
    ``config.json`` and weights as published (``fc``, ``layers.0``, ``embed_tokens``). Its keys and values always come from the
    target's hidden states, never from guessed ones, once a token is accepted. Not EAGLE-3, whose heads read three layers.

    Cost: one layer and one head projection a drafted depth; a row of the tree a leaf.
    """

    cost: ClassVar[str] = "1 layer and 1 head projection a drafted depth"
    needs: ClassVar[frozenset[Need | str]] = frozenset({Need.HIDDEN_STATES})
    reads_prompt: ClassVar[bool] = True

    kind: Literal["eagle"] = "eagle"
    head: RecipePath = Field(description="folder of the trained head")
    branching: int = Field(1, ge=1, le=32, description="most children of a node; 1 drafts chains")
    depth: int = Field(6, ge=1, le=32, description="most depth of the tree")

    def hidden_layers(self, config: Any) -> tuple[int, ...]:
        return (config.num_hidden_layers,)

    def start(self, host: DraftHost) -> DraftState:
        """The head on the model's device.

        Raises:
            InputError: the file is no such head.
            Refused: it was trained for another model.
        """
        model = host.model
        config, text = read_config(self.head), text_config(model)
        check_target(model, config, self.head, self.kind)
        tensors = read_tensors(self.head, r"(model\.)?(fc|layers\.0|embed_tokens)\.")
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        _check_embeddings(model, tensors.pop("embed_tokens.weight", None), self)
        if "fc.weight" not in tensors:
            raise InputError(f"no EAGLE head in {str(self.head)!r}: expected tensors named fc.weight, layers.0. ...")
        biased = "layers.0.self_attn.q_proj.bias" in tensors
        own = head_config({**config, "attention_bias": biased}, text.hidden_size)
        weight = model.get_output_embeddings().weight
        head = EagleHead(own, bias="fc.bias" in tensors).to(weight.device, weight.dtype).eval().requires_grad_(False)
        named = {name if name.startswith("fc.") else f"decoder.{name}": tensor for name, tensor in tensors.items()}
        if biased:
            # Heads of Qwen2 have biases on three of the four projections.
            named.setdefault("decoder.layers.0.self_attn.o_proj.bias", torch.zeros(text.hidden_size))
        load_weights(head, named, self.head)
        embed = model.get_input_embeddings()
        made = Head(lambda ids, hidden: head.fuse(embed(ids), hidden), head.decoder, Readout(model))
        return HeadDrafts(host, made, layer=text.num_hidden_layers, branching=self.branching, depth=self.depth)


def _check_embeddings(model: Any, theirs: Tensor | None, drafter: Eagle) -> None:
    """Published heads carry the embeddings of the model that they were trained for."""
    if theirs is None:
        return
    own = model.get_input_embeddings().weight
    rows = torch.linspace(0, min(len(own), len(theirs)) - 1, 64).long()
    near = theirs.shape == own.shape and torch.allclose(
        theirs[rows].float(), own[rows.to(own.device)].float().cpu(), rtol=2e-2, atol=1e-3
    )
    if not near:
        raise Refused(
            f"drafter 'eagle': the head in {str(drafter.head)!r} was trained for another model: its embed_tokens "
            f"{tuple(theirs.shape)} are not the target's {tuple(own.shape)}; give a head of this model"
        )
