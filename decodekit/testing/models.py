"""Random models and a tokenizer, small enough to run in milliseconds."""

from __future__ import annotations

import string
from typing import Any, Literal

import torch

Family = Literal["dense", "sliding", "hybrid"]


def tiny_model(
    family: Family,
    *,
    vocab_size: int = 97,
    layers: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Any:
    """A random causal LM of about 45k weights, small enough to run in milliseconds.

    Its weights are drawn so wide that greedy tokens differ from prompt to prompt and from step to step: a wrong cache,
    position or mask shows in the tokens. Pad is 0, EOS 1, BOS 2.

    Args:
        family: ``dense`` is Llama; ``sliding`` is Gemma 3 with a window of 6 tokens in every other layer; ``hybrid`` is
            Qwen 3.5 with gated DeltaNet, a recurrence without keys and values, in every other layer.
        vocab_size: number of tokens, at least 3.
        layers: number of decoder layers.
        dtype: of the weights.
        seed: of the weights; torch's global generator is left alone.

    Returns:
        The ``PreTrainedModel``, in evaluation mode.
    """
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "initializer_range": 0.5,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }

    def alternating(other: str) -> list[str]:
        return [(other, "full_attention")[layer % 2] for layer in range(layers)]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any
        if family == "dense":
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
        elif family == "sliding":
            model = transformers.Gemma3ForCausalLM(
                transformers.Gemma3TextConfig(**shape, sliding_window=6, layer_types=alternating("sliding_attention"))
            )
        else:
            model = transformers.Qwen3_5ForCausalLM(
                transformers.Qwen3_5TextConfig(
                    **shape,
                    layer_types=alternating("linear_attention"),
                    linear_key_head_dim=8,
                    linear_value_head_dim=8,
                    linear_num_key_heads=2,
                    linear_num_value_heads=4,
                )
            )
    return model.to(dtype).eval().requires_grad_(False)


def tiny_tokenizer() -> Any:
    """A tokenizer of 97 tokens for ``tiny_model``: three special ones, most of ASCII, ``th``, ``the`` and `` the``.

    Other characters become ``?``. It has no chat template and adds no BOS.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    characters = "\n " + string.ascii_letters + string.digits + ".,:;!?'\"()-+=*/<>[]{}_#$%&@"
    merges = [("t", "h"), ("th", "e"), (" ", "the")]
    vocabulary = [*special.values(), *characters, *("".join(pair) for pair in merges)]
    model = models.BPE({token: index for index, token in enumerate(vocabulary)}, merges, unk_token="?")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
