"""The seam to transformers: everything that depends on its version or its private names, and nothing else.

Works with transformers 5.17 to 5.x. What ``generate`` prepared before it calls a ``custom_generate`` callable is kept in a
``Prepared``; ``prepare`` obtains the same without decoding, since ``generate`` returns whatever the callable returns.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, cache_utils
from transformers.generation import (
    GenerateBeamDecoderOnlyOutput,
    GenerateDecoderOnlyOutput,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from decodekit.core.errors import Refused

CACHE_KEY = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
"""The keyword and output field that carry the cache: renamed in 5.24, and 5.17 silently ignores the new name."""

CROP_TAKES_A_LENGTH = Version(transformers.__version__) < Version("5.18")
"""Whether a positive argument of ``crop`` is the length to keep; later it is an error."""

_LAST_PROCESSORS = ("WatermarkLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor", "LogitNormalization")


_OWN_CACHES = {
    "deepseek_v4": "compresses K/V in cache layers of its own",
    "minimax": "takes only its own MiniMaxCache",
    "minimax_m3_vl": "indexes K/V in cache layers of its own",
    "recurrent_gemma": "keeps its recurrent states in its modules, not in a cache",
    "reformer": "keeps hashed buckets in a cache of its own",
    "rwkv": "keeps its states in a list of its own",
    "xlstm": "keeps its states in a cache of its own",
}
"""Model types whose forward leaves transformers' Cache aside, and how."""


_CONTINUES = {
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "inkling",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "zamba2",
}
"""Recurrent models whose forward of several tokens goes on from the cached state."""

_FORGETS = {"falcon_mamba", "jamba", "mamba", "zamba"}
"""Those whose forward of several tokens begins from an empty state, without saying so."""


def continues(config: Any) -> bool:
    """Whether a recurrent model can forward several tokens at once after those in its cache."""
    return str(config.get_text_config(decoder=True).model_type).removesuffix("_text") in _CONTINUES


@dataclass(frozen=True)
class CacheLayer:
    """What transformers' Cache keeps for one layer.

    Attributes:
        attention: whether it keeps K/V.
        window: tokens a query sees, itself included; ``None`` for all.
        states: how many pairs of a convolution and a recurrent state it keeps.
    """

    attention: bool = False
    window: int | None = None
    states: int = 0


def cache_layers(config: Any) -> list[CacheLayer]:
    """What each layer of a model keeps in transformers' Cache.

    Args:
        config: a model's, also a multimodal one.

    Raises:
        Refused: the model does not use this Cache, or not for what it keeps.
    """
    config = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise Refused(f"{config.model_type} is an encoder-decoder; a paged cache is for decoder-only models")
    kind = str(config.model_type).removesuffix("_text")
    if (reason := _OWN_CACHES.get(kind)) is not None:
        raise Refused(f"{config.model_type} {reason}: it cannot use a paged cache (use cache: {{kind: dynamic}})")
    try:
        layers = DynamicCache(config=config).layers
    except (AttributeError, KeyError) as error:
        raise Refused(f"{config.model_type} has layers whose cache transformers does not make ({error})") from error
    if any(getattr(layer, "number_of_states", 0) for layer in layers) and kind not in _CONTINUES | _FORGETS:
        raise Refused(
            f"{config.model_type} keeps recurrent states, and a paged cache was not tried with its own way to go on from them "
            "(use cache: {kind: dynamic})"
        )
    names = getattr(config, "layer_types", None) or []
    # Before 5.24 layers without any mixer were given a recurrent cache that stays empty.
    idle = [number < len(names) and names[number] in ("moe", "mlp") for number in range(len(layers))]
    return [
        CacheLayer() if none else _cache_layer(layer, config.model_type)
        for layer, none in zip(layers, idle, strict=True)
    ]


def _cache_layer(layer: Any, model_type: str) -> CacheLayer:
    kind = type(layer)
    if kind is getattr(cache_utils, "DummyLayer", None):
        return CacheLayer()
    states = getattr(layer, "number_of_states", 0)
    if kind is cache_utils.LinearAttentionLayer:
        return CacheLayer(states=states)
    known = [cache_utils.DynamicLayer, cache_utils.LinearAttentionAndFullAttentionLayer]
    sliding = [
        cache_utils.DynamicSlidingWindowLayer,
        getattr(cache_utils, "LinearAttentionAndSlidingWindowAttentionLayer", None),
    ]
    if kind not in known and kind not in sliding:
        raise Refused(f"{model_type} keeps {kind.__name__} caches, which a paged cache does not have yet")
    return CacheLayer(attention=True, window=layer.sliding_window if kind in sliding else None, states=states)


@dataclass
class Prepared:
    """What ``generate`` hands to a custom decoding callable.

    Attributes:
        input_ids: [R, T] left-padded, expanded to ``num_return_sequences``.
        config: the merged generation configuration.
        model_kwargs: what every forward is given (mask, position ids, cache, ...).
    """

    input_ids: Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    config: GenerationConfig
    model_kwargs: dict[str, Any]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row without its pads.

        Raises:
            Refused: a mask that does more than leave out pads on the left, or a prompt given as embeddings.
        """
        rows, width = self.input_ids.shape
        if self.model_kwargs.get("inputs_embeds") is not None:
            raise Refused("the prompt is given as inputs_embeds; decodekit decodes from token ids: give input_ids")
        mask = self.model_kwargs.get("attention_mask")
        if mask is None:
            return [width] * rows
        mask = mask[:, -width:]
        if bool((mask[:, 1:] < mask[:, :-1]).any()):
            raise Refused(
                "attention_mask has zeros behind ones; pads belong on the left: set tokenizer.padding_side = 'left'"
            )
        return [int(n) for n in mask.sum(-1).tolist()]


def check_model(model: PreTrainedModel) -> None:
    """Refuse models and launchers that cannot be decoded row by row in one process.

    Raises:
        Refused: an encoder-decoder, DeepSpeed ZeRO-3 or FSDP, or dropout that is active.
    """
    if model.config.is_encoder_decoder:
        raise Refused(f"{type(model).__name__} is an encoder-decoder; decodekit decodes causal (decoder-only) models")
    if is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model):
        raise Refused(
            "the model's weights are sharded by DeepSpeed ZeRO-3 or FSDP, whose ranks must stop together; gather the "
            "weights, or use device_map or tp_plan to spread a model over devices"
        )
    if (dropout := _active_dropout(model)) is not None:
        raise Refused(
            f"the model is in training mode and drops activations ({dropout}); call model.eval() before decoding"
        )


def _active_dropout(model: PreTrainedModel) -> str | None:
    """A module of a model that drops activations now, and its rate: of its own, or handed to a function of torch."""
    if not _trains(model):
        return None  # asked for every request: names cost more than all else
    for name, module in model.named_modules():
        if module.training:
            rates = {"p": module.p} if isinstance(module, _DropoutNd) else vars(module)
            for attribute, rate in rates.items():
                named = attribute == "p" or "drop" in attribute
                if named and isinstance(rate, float | int) and not isinstance(rate, bool) and rate > 0:
                    return f"{name or type(model).__name__}.{attribute} = {rate}"
    return None


def _trains(model: nn.Module) -> bool:
    """Whether some module of a model is in training mode."""
    pending: list[nn.Module | None] = [model]
    while pending:
        module = pending.pop()
        if module is not None:
            if module.training:
                return True
            pending += module._modules.values()
    return False


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the language model, also inside a multimodal one."""
    return model.config.get_text_config(decoder=True)


def context_length(model: PreTrainedModel) -> int | None:
    """Most tokens the model's positions can number; ``None`` where there is no such limit."""
    return getattr(text_config(model), "max_position_embeddings", None)


def defaults(model: PreTrainedModel) -> GenerationConfig:
    """The generation options that hold when nobody names any: the model's own, then transformers'."""
    config = copy.deepcopy(model.generation_config)
    for name, value in config._get_default_generation_params().items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    return config


def prepare(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, **options: Any) -> Prepared:
    """What ``model.generate`` would hand to a decoding callable for these inputs."""

    def keep(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Prepared:
        return Prepared(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)

    prepared: Any = model.generate(input_ids, attention_mask=attention_mask, custom_generate=keep, **options)
    return prepared


def expand(model: PreTrainedModel, prepared: Prepared, copies: int) -> None:
    """Repeat every row ``copies`` times, as ``num_return_sequences`` does, in place."""
    prepared.input_ids, prepared.model_kwargs = model._expand_inputs_for_generation(
        expand_size=copies, input_ids=prepared.input_ids, **prepared.model_kwargs
    )


def keep_every(prepared: Prepared, stride: int) -> None:
    """Keep one row of every ``stride``, which ``generate`` made of one prompt, in place."""
    if stride == 1:
        return
    rows = prepared.input_ids.shape[0]
    prepared.input_ids = prepared.input_ids[::stride]
    prepared.model_kwargs = {
        name: value[::stride] if isinstance(value, Tensor) and value.ndim and value.shape[0] == rows else value
        for name, value in prepared.model_kwargs.items()
    }


def set_special_tokens(config: GenerationConfig, device: torch.device) -> None:
    """Renew the tensors that transformers derives from the special ids, after these were changed."""
    for name in ("eos", "pad", "bos"):
        value = getattr(config, f"{name}_token_id")
        tensor = None if value is None else torch.tensor(value, dtype=torch.long, device=device)
        if name == "eos" and tensor is not None:
            tensor = tensor.reshape(-1)
        setattr(config, f"_{name}_token_tensor", tensor)


def _same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.shape == right.shape and bool((left == right).all())
    if isinstance(left, LogitsProcessor | StoppingCriteria):
        return vars(left).keys() == vars(right).keys() and all(
            _same(value, vars(right)[name]) for name, value in vars(left).items()
        )
    return bool(left == right)


def callers_processors(model: PreTrainedModel, prepared: Prepared) -> list[LogitsProcessor]:
    """The processors that the caller gave, without those ``generate`` made from options.

    Transformers' guidance counts as the caller's: it owns a cache and the negative prompt, which cannot be had again.
    """
    made = _made_processors(model, prepared.config, prepared.input_ids, prepared.model_kwargs)
    # A watermark holds a random generator, which equals nothing.
    marked = _LAST_PROCESSORS if prepared.config.watermarking_config is not None else ()
    return [
        own
        for own in prepared.logits_processor
        if type(own).__name__ not in marked and not any(_same(own, other) for other in made)
    ]


@dataclass(frozen=True)
class Guidance:
    """What ``guidance_scale`` and ``negative_prompt_ids`` of ``generate`` asked for.

    Attributes:
        scale: the scale.
        negative_prompts: ids without what the mask leaves out, a list a row; ``None`` when none were given.
    """

    scale: float
    negative_prompts: list[list[int]] | None


def guidance(prepared: Prepared) -> tuple[Guidance | None, LogitsProcessorList]:
    """The guidance among the processors that ``generate`` made, and the others."""
    others = LogitsProcessorList()
    found = None
    for own in prepared.logits_processor:
        if not isinstance(own, UnbatchedClassifierFreeGuidanceLogitsProcessor):
            others.append(own)
            continue
        ids, mask = (own.unconditional_context[name] for name in ("input_ids", "attention_mask"))
        rows = None
        if ids is not None:
            kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
            rows = [row[keep].tolist() for row, keep in zip(ids, kept, strict=True)]
        found = Guidance(own.guidance_scale, rows)
    return found, others


def make_processors(
    model: PreTrainedModel, config: GenerationConfig, prompt_ids: Tensor, *, instead: Collection[type]
) -> tuple[list[LogitsProcessor], ...]:
    """The processors that options ask for, the sampling warpers, and what comes last (watermark, normalisation).

    Args:
        model: the model being decoded.
        config: the options; there are sampling warpers only if ``do_sample`` is on.
        prompt_ids: [R, T] without pads; what is counted from the prompt's end counts from T.
        instead: types that the caller brings, which take the place of those made here, warpers apart.
    """
    plain = copy.copy(config)
    plain.do_sample = False
    base, whole = (_made_processors(model, own, prompt_ids, {}) for own in (plain, config))
    last = [own for own in whole if type(own).__name__ in _LAST_PROCESSORS]
    wanted = {id(own) for own in whole} - {id(own) for own in last}
    first = [own for own in whole if id(own) in wanted]
    count = sum(type(own).__name__ not in _LAST_PROCESSORS for own in base)
    return [own for own in first[:count] if type(own) not in instead], first[count:], last


def _made_processors(
    model: PreTrainedModel, config: GenerationConfig, input_ids: Tensor, model_kwargs: Mapping[str, Any]
) -> LogitsProcessorList:
    config = copy.copy(config)
    config.guidance_scale = None
    return model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=input_ids.shape[1],
        encoder_input_ids=input_ids,
        prefix_allowed_tokens_fn=None,
        logits_processor=LogitsProcessorList(),
        device=input_ids.device,
        model_kwargs=dict(model_kwargs),
    )


class WatermarkProcessor(WatermarkLogitsProcessor):
    """Transformers' watermark; by itself it fails where none of the candidates that ``selfhash`` tries is green."""

    def _score_rejection_sampling(self, input_seq: Tensor, scores: Tensor) -> Tensor:
        # An empty list becomes a tensor of floats, which cannot index.
        return super()._score_rejection_sampling(input_seq, scores).long()


@dataclass
class Criteria:
    """The caller's own stopping criteria; one of a kind that ``generate`` makes takes that one's place.

    Attributes:
        own: all of them.
        max_length: padded length at which one ends the call; ``None`` without.
        replaces_time: whether one replaces ``max_time``.
        replaces_eos: whether one replaces the EOS ids.
    """

    own: StoppingCriteriaList
    max_length: int | None
    replaces_time: bool
    replaces_eos: bool


def callers_criteria(prepared: Prepared) -> Criteria:
    """The stopping criteria that the caller gave, without those ``generate`` made from options."""
    config = prepared.config

    def made(criterion: StoppingCriteria) -> bool:
        if isinstance(criterion, MaxLengthCriteria):
            return criterion.max_length == config.max_length
        if isinstance(criterion, MaxTimeCriteria):
            return criterion.max_time == config.max_time
        eos = getattr(config, "_eos_token_tensor", None)
        return isinstance(criterion, EosTokenCriteria) and eos is not None and _same(criterion.eos_token_id, eos)

    own = [criterion for criterion in prepared.stopping_criteria if not made(criterion)]
    lengths = [criterion.max_length for criterion in own if isinstance(criterion, MaxLengthCriteria)]
    return Criteria(
        StoppingCriteriaList(own),
        min(lengths, default=None),
        any(isinstance(criterion, MaxTimeCriteria) for criterion in own),
        any(isinstance(criterion, EosTokenCriteria) for criterion in own),
    )


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """A context in which the layers of the language model attend by the implementation of this name."""
    config = text_config(model)
    usual = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = usual


def uses_sdpa(model: PreTrainedModel) -> bool:
    """Whether the layers of the language model attend by torch's scaled dot product."""
    return bool(text_config(model)._attn_implementation == "sdpa")


def optimized(model: PreTrainedModel) -> AbstractContextManager[None]:
    """A context in which the model is tuned for one-token steps, as ``generate`` tunes it."""
    context: AbstractContextManager[None] = model._optimize_model_for_decode()
    return context


def generate_output(
    sequences: Tensor, records: Mapping[str, tuple[Any, ...] | None], cache: Any, ranked: Tensor | None = None
) -> GenerateDecoderOnlyOutput | GenerateBeamDecoderOnlyOutput:
    """The dictionary that ``return_dict_in_generate`` promises; ``ranked`` [R] is what outputs were ranked by, if anything."""
    if ranked is None:
        return GenerateDecoderOnlyOutput(sequences=sequences, **records, **{CACHE_KEY: cache})
    return GenerateBeamDecoderOnlyOutput(sequences=sequences, sequences_scores=ranked, **records, **{CACHE_KEY: cache})
