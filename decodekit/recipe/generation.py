"""The generation options of a recipe: those of ``GenerationConfig`` that decodekit honours, and its own seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Count = Annotated[int, Field(ge=1)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
StopString = Annotated[str, Field(min_length=1)]
# A recipe has lists where GenerationConfig has tuples.
Bias = Annotated[tuple[TokenIds, float], Field(strict=False)]
Decay = Annotated[tuple[TokenId, float], Field(strict=False)]


class Generation(BaseModel):
    """Options of ``generate``; what is left out (or null) is not named, and the model's own default holds."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    # Read by core.options: options of generate that ask for a method which has a section of its own in a recipe.
    elsewhere: ClassVar[Mapping[str, str]] = {
        "assistant_early_exit": "drafter: {kind: layer_skip}",
        "cache_implementation": "cache: {kind: dynamic}",
        "constraints": "strategy: {kind: constrained_beam}",
        "dola_layers": "strategy: {kind: dola}",
        "force_words_ids": "strategy: {kind: constrained_beam}",
        "penalty_alpha": "strategy: {kind: contrastive_search}",
        "prompt_lookup_num_tokens": "drafter: {kind: ngram}",
        "use_mtp": "drafter: {kind: mtp}",
    }

    max_new_tokens: Count | None = Field(None, description="most tokens of the output")
    max_length: Count | None = Field(None, description="most tokens of prompt and output; max_new_tokens wins over it")
    min_new_tokens: int | None = Field(
        None, ge=0, description="no end of sequence before the output has this many tokens"
    )
    min_length: int | None = Field(None, ge=0, description="the same, counted with the prompt")
    max_time: float | None = Field(None, gt=0, description="seconds after which no further token is started")
    stop_strings: StopString | Annotated[list[StopString], Field(min_length=1)] | None = Field(
        None, description="texts that end the output"
    )

    do_sample: bool | None = Field(None, description="draw each token; false, the default, takes the most likely one")
    num_beams: Count | None = Field(None, description="hypotheses of a beam strategy")
    num_return_sequences: Count | None = Field(None, description="outputs for each prompt")
    seed: int | None = Field(
        None, ge=0, lt=2**64, description="key of every draw; without one it comes from torch's global generator"
    )

    temperature: float | None = Field(None, gt=0, description="divides the logits; 1 changes nothing")
    top_k: int | None = Field(None, ge=0, description="keep the k most likely tokens; 0 keeps all")
    top_p: float | None = Field(
        None, gt=0, le=1, description="keep the smallest set of tokens of this mass; 1 keeps all"
    )
    min_p: float | None = Field(
        None, ge=0, le=1, description="keep tokens of at least this share of the top probability"
    )
    top_h: float | None = Field(None, gt=0, le=1, description="keep the top tokens within this share of the entropy")
    typical_p: float | None = Field(
        None, gt=0, le=1, description="keep the locally typical tokens of this mass; 1 keeps all"
    )
    epsilon_cutoff: float | None = Field(
        None, ge=0, lt=1, description="keep tokens above this probability; 0 keeps all"
    )
    eta_cutoff: float | None = Field(None, ge=0, lt=1, description="the same, lower where entropy is high; 0 keeps all")

    repetition_penalty: float | None = Field(None, gt=0, description="divides the logits of seen tokens; 1 is none")
    encoder_repetition_penalty: float | None = Field(
        None, gt=0, description="above 1 favours tokens of the prompt; 1 changes nothing"
    )
    no_repeat_ngram_size: int | None = Field(
        None, ge=0, description="no n-gram of this size occurs twice; 0 allows all"
    )
    encoder_no_repeat_ngram_size: int | None = Field(
        None, ge=0, description="no n-gram of this size is repeated from the prompt; 0 allows all"
    )
    bad_words_ids: Annotated[list[TokenIds], Field(min_length=1)] | None = Field(
        None, description="token sequences that may not occur"
    )
    sequence_bias: Annotated[list[Bias], Field(min_length=1)] | None = Field(
        None, description="pairs of a token sequence and what is added to its logit: [[[464], -2.0], ...]"
    )
    suppress_tokens: list[TokenId] | None = Field(None, description="tokens that may not occur")
    begin_suppress_tokens: list[TokenId] | None = Field(None, description="tokens that may not come first")
    forced_bos_token_id: TokenId | None = Field(None, description="the first token of a sequence without a prompt")
    forced_eos_token_id: TokenId | TokenIds | None = Field(None, description="the token at the greatest length")
    exponential_decay_length_penalty: Decay | None = Field(
        None, description="[start, factor]: from token start on, the end of sequence gains by factor a token"
    )
    remove_invalid_values: bool | None = Field(None, description="replace NaN and infinite logits instead of failing")
    renormalize_logits: bool | None = Field(None, description="normalize the logits after all processors")

    bos_token_id: TokenId | None = Field(None, description="the token that starts a sequence")
    eos_token_id: TokenId | TokenIds | None = Field(None, description="the tokens that end a sequence")
    pad_token_id: TokenId | None = Field(None, description="the token that fills rows which have ended")

    use_cache: bool | None = Field(None, description="keep keys and values of past tokens")
    prefill_chunk_size: Count | None = Field(None, description="tokens of the prompt in one forward")

    return_dict_in_generate: bool | None = Field(None, description="return a structure instead of token ids alone")
    output_scores: bool | None = Field(None, description="return the logits after all processors")
    output_logits: bool | None = Field(None, description="return the logits of the model")
    output_hidden_states: bool | None = Field(None, description="return the hidden states of all layers")
    output_attentions: bool | None = Field(None, description="return the attention weights of all layers")

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return [(name, value) for name, value in super().__repr_args__() if value is not None]

    @model_validator(mode="before")
    @classmethod
    def _null_names_nothing(cls, options: Any) -> Any:
        """So that a recipe can take back what the one it extends has set."""
        if isinstance(options, Mapping):
            return {name: value for name, value in options.items() if value is not None or name not in cls.model_fields}
        return options

    @field_validator("temperature", mode="before")
    @classmethod
    def _zero_is_greedy(cls, value: Any) -> Any:
        if value == 0 and not isinstance(value, bool):
            raise ValueError("should be greater than 0, got 0; greedy decoding is do_sample: false")
        return value
