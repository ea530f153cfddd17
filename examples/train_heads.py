"""Train Medusa, EAGLE and MTP heads for a model on what it writes itself, and show how many tokens a pass they bring.

The model answers some prompts; the heads learn from its hidden states over the answers, minutes on a CPU for the demo
model. They are saved as published heads are, with a fingerprint of the model, and tried on prompts not trained on:

    python examples/train_heads.py heads/
    decodekit run recipe.yaml "Name three fruits."     # drafter: {kind: eagle, head: heads/eagle}

So short a training shows the method, not its limit: real heads see thousands of times as much (--prompts FILE, one a line).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import decodekit
from decodekit.core.checkpoints import FINGERPRINT, fingerprint
from decodekit.core.compat import text_config
from decodekit.core.heads import final_norm
from decodekit.core.sublayers import decoder_layers
from decodekit.drafters.eagle import EagleHead, head_config
from decodekit.drafters.medusa import make_heads
from decodekit.drafters.mtp import MtpHead
from decodekit.integrations.models import load_model
from decodekit.runtime.text import encoder

PROMPTS = [
    f"{ask} {about}."
    for about in (
        "rain",
        "bread",
        "the moon",
        "a library",
        "horses",
        "trains",
        "honey",
        "winter",
        "mathematics",
        "music",
    )
    for ask in ("Write three sentences about", "Explain to a child what is special about", "List five facts about")
]


def main() -> None:
    """Generate, train, save, measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for the heads")
    parser.add_argument("--prompts", type=Path, help="a text file, a prompt a line; a few built-in ones if left out")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--heads", type=int, default=3, help="Medusa heads")
    parser.add_argument("--minutes", type=float, default=2.0, help="of training, for each kind of head")
    parser.add_argument("--held-out", type=int, default=4, help="last prompts that are only measured on")
    parser.add_argument("-m", "--model", help="a Hugging Face id or local folder; the demo model if left out")
    options = parser.parse_args()

    model, tokenizer = load_model(options.model)
    prompts = options.prompts.read_text(encoding="utf-8").splitlines() if options.prompts else PROMPTS
    learned, held_out = prompts[: -options.held_out], prompts[-options.held_out :]
    sequences = answers(model, tokenizer, learned, options.tokens)
    print(f"{sum(len(ids) - start for ids, start in sequences)} tokens written for {len(learned)} prompts")
    features = [hidden_states(model, ids) for ids, _ in sequences]

    torch.manual_seed(0)
    mark = {FINGERPRINT: fingerprint(model)}
    medusa = train_medusa(model, sequences, features, options.heads, options.minutes)
    save(
        options.out / "medusa",
        "medusa_lm_head.safetensors",
        medusa.state_dict(),
        {"medusa_num_heads": options.heads} | mark,
    )
    eagle, config = train_eagle(model, sequences, features, options.minutes)
    weights = {name.removeprefix("decoder."): tensor for name, tensor in eagle.state_dict().items()}
    save(options.out / "eagle", "model.safetensors", weights, config | mark)
    mtp = train_mtp(model, sequences, features, options.minutes)
    save(options.out / "mtp", "model.safetensors", published(mtp), mark)

    plain = decodekit.load({}).run(model, tokenizer, held_out, max_new_tokens=options.tokens)
    print(f"{'':24}tokens a pass  acceptance by position")
    for name, drafter in {
        "medusa": {"kind": "medusa", "max_tokens": 4},
        "eagle, chains": {"kind": "eagle", "max_tokens": 4},
        "eagle, trees": {"kind": "eagle", "max_tokens": 8, "branching": 3},
        "mtp": {"kind": "mtp", "max_tokens": 3},
    }.items():
        recipe = {
            "drafter": {**drafter, "schedule": "constant", "head": str((options.out / drafter["kind"]).resolve())}
        }
        outputs = [
            decodekit.load(recipe).run(model, tokenizer, [prompt], max_new_tokens=options.tokens)[0]
            for prompt in held_out
        ]
        same = all(one.token_ids == other.token_ids for one, other in zip(outputs, plain, strict=True))
        passes = sum(output.stats["target_forwards"] for output in outputs)
        accepted = [output.stats["acceptance_by_position"] for output in outputs]
        columns = [[own[place] for own in accepted if place < len(own)] for place in range(max(map(len, accepted)))]
        rates = " ".join(f"{sum(column) / len(column):.2f}" for column in columns)
        tokens = sum(len(output.token_ids) for output in outputs)
        print(f"{name:24}{tokens / passes:13.2f}  {rates}{'' if same else '   DIFFERS FROM PLAIN'}")


def answers(model: Any, tokenizer: Any, prompts: list[str], tokens: int) -> list[tuple[list[int], int]]:
    """Each prompt with the model's own answer, and where the answer begins."""
    encode = encoder(tokenizer, raw=False)
    outputs = decodekit.load({}).run(model, tokenizer, prompts, max_new_tokens=tokens)
    encoded = [encode(prompt) for prompt in prompts]
    return [([*ids, *output.token_ids], len(ids)) for ids, output in zip(encoded, outputs, strict=True)]


@torch.no_grad()
def hidden_states(model: Any, ids: list[int]) -> Tensor:
    """[T, H]: the last hidden states over a sequence."""
    outputs = model(torch.tensor([ids], device=model.device), output_hidden_states=True, use_cache=False)
    states: Tensor = outputs.hidden_states[-1][0].float()
    return states


def vocabulary(model: Any, sequences: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
    """[V'] the tokens that occur, and [V', H] their rows of the head: the whole softmax would cost most of the training."""
    tokens = torch.tensor(sorted({token for ids, _ in sequences for token in ids}), device=model.device)
    return tokens, model.get_output_embeddings().weight.detach()[tokens].float()


def train_medusa(
    model: Any, sequences: list[tuple[list[int], int]], features: list[Tensor], count: int, minutes: float
) -> nn.ModuleList:
    """Medusa-1 (arXiv:2401.10774, section 2.2.1), with the projection kept as the model's own."""
    weight = model.get_output_embeddings().weight.detach()
    heads = make_heads(weight.shape[1], weight.shape[0], count, 1).to(weight.device)
    for head in heads:
        nn.init.zeros_(head[0].linear.weight)
        nn.init.zeros_(head[0].linear.bias)
        head[1].weight.data = weight.float()
        head[1].requires_grad_(False)
    tokens, rows = vocabulary(model, sequences)
    optimizer = torch.optim.AdamW([own for own in heads.parameters() if own.requires_grad], lr=1e-3)
    ends, step = time.monotonic() + 60 * minutes, 0
    while time.monotonic() < ends:
        ids, start = sequences[step % len(sequences)]
        known = torch.searchsorted(tokens, torch.tensor(ids, device=tokens.device))
        losses = []
        for number, head in enumerate(heads):
            # The state at t chooses token t + 1; head k guesses token t + 2 + k.
            ahead = number + 2
            states = features[step % len(sequences)][start - 1 : len(ids) - ahead]
            target = known[start - 1 + ahead :]
            losses.append(0.8**number * nn.functional.cross_entropy(head[0](states) @ rows.T, target))
        loss = torch.stack(losses).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 200 == 0:
            print(f"medusa: step {step}, loss {loss.item():.3f}")
    return heads


def train_eagle(
    model: Any, sequences: list[tuple[list[int], int]], features: list[Tensor], minutes: float
) -> tuple[EagleHead, dict[str, Any]]:
    """The head of arXiv:2401.15077, section 4.2: hidden states by smooth L1, tokens by cross-entropy with weight 0.1."""
    own = text_config(model)
    config = {
        name: getattr(own, name)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    }
    config |= {"max_position_embeddings": own.max_position_embeddings, "rope_parameters": own.rope_parameters}
    head = EagleHead(head_config(config, own.hidden_size)).to(model.device)
    _, rows = vocabulary(model, sequences)
    embed = model.get_input_embeddings()
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-4, betas=(0.9, 0.95))
    ends, step = time.monotonic() + 60 * minutes, 0
    while time.monotonic() < ends:
        (ids, start), states = sequences[step % len(sequences)], features[step % len(sequences)]
        with torch.no_grad():
            embeddings = embed(torch.tensor([ids[1:]], device=model.device)).float()
        # Noise makes the head robust against its own mistakes.
        given = states[:-1] + 0.2 * (torch.rand_like(states[:-1]) - 0.5)
        guessed = head.decoder(
            inputs_embeds=head.fuse(embeddings, given.unsqueeze(0)), use_cache=False
        ).last_hidden_state[0]
        guessed, wanted = guessed[start - 1 :], states[start:]
        probabilities = (wanted @ rows.T).softmax(-1)
        loss = nn.functional.smooth_l1_loss(guessed, wanted)
        loss = loss + 0.1 * nn.functional.cross_entropy(guessed @ rows.T, probabilities)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        step += 1
        if step % 200 == 0:
            print(f"eagle: step {step}, loss {loss.item():.3f}")
    return head, config


def train_mtp(model: Any, sequences: list[tuple[list[int], int]], features: list[Tensor], minutes: float) -> MtpHead:
    """The layer of arXiv:2412.19437, section 2.2, that a model without one is given afterwards: it begins as the last layer.

    It learns what the model itself says one token later, by cross-entropy.
    """
    layers = decoder_layers(model)[2]
    place = len(layers) - 1
    head = MtpHead(model, place).to(model.device).float()
    head.layer.load_state_dict(layers[place].state_dict())
    head.norm.load_state_dict(final_norm(model).state_dict())
    # At first the hidden state goes through as it is.
    width = head.fc.weight.shape[0]
    head.fc.weight.data = torch.cat([torch.zeros(width, width), torch.eye(width)], dim=1).to(model.device)
    decoder = head.decoder(model, place)
    _, rows = vocabulary(model, sequences)
    embed = model.get_input_embeddings()
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-4, betas=(0.9, 0.95))
    ends, step = time.monotonic() + 60 * minutes, 0
    while time.monotonic() < ends:
        (ids, start), states = sequences[step % len(sequences)], features[step % len(sequences)]
        with torch.no_grad():
            embeddings = embed(torch.tensor([ids[1:]], device=model.device)).float()
            probabilities = (states[start:] @ rows.T).softmax(-1)
        fused = head.fuse(embeddings, states[:-1].unsqueeze(0))
        guessed = decoder(inputs_embeds=fused, use_cache=False).last_hidden_state[0, start - 1 :]
        loss = nn.functional.cross_entropy(guessed @ rows.T, probabilities)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        step += 1
        if step % 200 == 0:
            print(f"mtp: step {step}, loss {loss.item():.3f}")
    return head


def published(head: MtpHead) -> dict[str, Tensor]:
    """Its weights under the names of Qwen3-Next."""
    names = {"embedding_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "layer": "layers.0"}
    parts = [(name.partition("."), tensor) for name, tensor in head.state_dict().items()]
    return {f"mtp.{names.get(outer, outer)}.{inner}": tensor for (outer, _, inner), tensor in parts}


def save(folder: Path, name: str, weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    """A head as published ones are: its weights and ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: tensor.detach().to("cpu", torch.bfloat16, copy=True) for key, tensor in weights.items()}, folder / name
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
