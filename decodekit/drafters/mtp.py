"""Propose what the model's own multi-token-prediction layer says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from decodekit.core.checkpoints import check_target, load_weights, read_config, read_tensors
from decodekit.core.compat import cache_layers, text_config
from decodekit.core.draft_heads import Head, HeadDrafts
from decodekit.core.drafts import DraftHost, DraftState
from decodekit.core.errors import InputError, Refused
from decodekit.core.heads import Readout, final_norm
from decodekit.core.options import RecipePath
from decodekit.core.protocols import Drafter
from decodekit.core.sublayers import decoder_layers, with_layers
from decodekit.core.types import Need

_DEEPSEEK = {"enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "fc", "shared_head.norm": "norm"}
_QWEN = {"pre_fc_norm_embedding": "embedding_norm", "pre_fc_norm_hidden": "hidden_norm", "fc": "fc", "norm": "norm"}


class MtpHead(nn.Module):
    """Two norms, a projection of embedding and hidden state to one, a layer of the target's own kind, and a norm.

    Args:
        model: the target.
        place: which of its layers the head's is like.
    """

    def __init__(self, model: Any, place: int) -> None:
        super().__init__()
        config, norm = text_config(model), type(final_norm(model))
        width, eps = config.hidden_size, config.rms_norm_eps
        self.embedding_norm, self.hidden_norm, self.norm = (norm(width, eps=eps) for _ in range(3))
        self.fc = nn.Linear(2 * width, width, bias=False)
        layer: Any = type(decoder_layers(model)[2][place])
        self.layer = layer(config, place)

    def fuse(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """[..., H] each to [..., H]."""
        fused: Tensor = self.fc(torch.cat([self.embedding_norm(embeddings), self.hidden_norm(hidden)], dim=-1))
        return fused

    def decoder(self, model: Any, place: int) -> Any:
        """The target's decoder around this layer and norm: its masks and rotary embeddings."""
        shorter = with_layers(model, [place])
        decoder, _, layers = decoder_layers(shorter)
        layers[0] = self.layer
        for module in self.layer.modules():
            if "layer_idx" in vars(module):
                module.layer_idx = 0
        outer = final_norm(shorter)
        [name] = [name for name, child in decoder.named_children() if child is outer]
        setattr(decoder, name, self.norm)
        return decoder


class Mtp(Drafter):
    """The multi-token-prediction layer that a model was trained with, used again and again on what it guessed.

    DeepSeek-AI, 2024, arXiv:2412.19437, section 2.2. Reads what lies in the model's own checkpoint and transformers leaves
    there: ``mtp.*`` (Qwen3-Next, Qwen3.5) or ``model.layers.N.*`` behind the last layer N - 1 (DeepSeek-V3, GLM-4.5). Models
    with several such layers are read to the first, which is trained for the next token but one.

    Cost: one layer and one head projection a drafted token; a row of the tree a leaf.
    """

    cost: ClassVar[str] = "1 layer and 1 head projection a drafted depth"
    needs: ClassVar[frozenset[Need | str]] = frozenset({Need.HIDDEN_STATES})
    reads_prompt: ClassVar[bool] = True

    kind: Literal["mtp"] = "mtp"
    head: RecipePath | None = Field(None, description="folder of the checkpoint; the model's own if left out")
    branching: int = Field(1, ge=1, le=32, description="most children of a node; 1 drafts chains")
    depth: int = Field(3, ge=1, le=32, description="most depth of the tree")

    def hidden_layers(self, config: Any) -> tuple[int, ...]:
        return (config.num_hidden_layers,)

    def start(self, host: DraftHost) -> DraftState:
        """The layer on the model's device.

        Raises:
            InputError: the checkpoint holds no such layer.
            Refused: it is another model's, or the model has no full-attention layer.
        """
        model = host.model
        count = text_config(model).num_hidden_layers
        path = self.head or Path(model.config.name_or_path)
        check_target(model, read_config(path), path, self.kind)
        tensors = _renamed(read_tensors(path, rf"mtp\.|model\.layers\.{count}\."), count)
        if not tensors:
            raise InputError(
                f"no MTP layer in {str(path)!r}: expected tensors named mtp.* or model.layers.{count}.*; was it left out when "
                "the model was saved?"
            )
        config = text_config(model)
        layers = cache_layers(config)
        full = [place for place, own in enumerate(layers) if own.attention and own.window is None and not own.states]
        if not full:
            raise Refused(
                f"drafter 'mtp': {type(model).__name__} has no full-attention layer, which an MTP layer is like"
            )
        if not cache_layers(text_config(with_layers(model, full[-1:])))[0].attention:
            raise Refused(
                f"drafter 'mtp': the decoder of {type(model).__name__} cannot run one of its attention layers alone"
            )
        place = full[-1]
        weight = model.get_output_embeddings().weight
        head = MtpHead(model, place).to(weight.device, weight.dtype).eval().requires_grad_(False)
        load_weights(head, tensors, path)
        embed = model.get_input_embeddings()
        made = Head(lambda ids, hidden: head.fuse(embed(ids), hidden), head.decoder(model, place), Readout(model))
        return HeadDrafts(host, made, layer=count, branching=self.branching, depth=self.depth)


def _renamed(tensors: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """The tensors under the names of :class:`MtpHead`; copies of the target's embeddings are left out."""
    renamed, experts = dict[str, Tensor](), dict[str, dict[int, Tensor]]()
    for name, tensor in tensors.items():
        own = re.sub(rf"^(mtp|model\.layers\.{count})\.", "", name)
        outer = own.removesuffix(".weight")
        known = _QWEN if name.startswith("mtp.") else _DEEPSEEK
        inner = own.removeprefix("layers.0.") if known is _QWEN else own
        if outer in known:
            renamed[f"{known[outer]}.weight"] = tensor
        elif expert := re.match(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight$", inner):
            experts.setdefault(expert[2], {})[int(expert[1])] = tensor
        elif not own.startswith(("embed_tokens.", "shared_head.head.", "layers.1.")):
            renamed[f"layer.{inner}"] = tensor
    if experts:
        # transformers keeps the experts of a layer in one tensor.
        stacked = {part: torch.stack([own[number] for number in sorted(own)]) for part, own in experts.items()}
        renamed["layer.mlp.experts.gate_up_proj"] = torch.cat([stacked["gate"], stacked["up"]], dim=1)
        renamed["layer.mlp.experts.down_proj"] = stacked["down"]
    return renamed
