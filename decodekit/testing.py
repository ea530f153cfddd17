"""What a plugin's tests need: the laws of each kind as executable checks, tiny models, and positions to feed a rule.

def test_obeys_the_laws_of_a_rule():
    check_rule(MyRule(strength=0.5))
"""

from __future__ import annotations

import copy
import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from decodekit.core.protocols import Plugin, Rule
from decodekit.core.random import Stream, prompt_digest
from decodekit.core.types import Request, Rows
from decodekit.runtime.pipeline import select

Family = Literal["dense", "sliding", "hybrid"]


def make_rows(
    histories: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int] | None = None,
    *,
    eos: tuple[int, ...] = (1,),
    states: Sequence[Any] = (),
    seed: int = 0,
    beyond: int = 0,
) -> Rows:
    """Positions as a rule sees them, one a history.

    Args:
        histories: [P] token ids, prompt and then output; lengths may differ.
        prompt_lengths: [P] how many of them are the prompt; all of them by default.
        eos: ids that end a sequence.
        states: [P] the rule's state at each position.
        seed: of the random streams, which differ from row to row.
        beyond: the id that fills the columns behind a history.
    """
    lengths = [len(history) for history in histories]
    prompts = lengths if prompt_lengths is None else list(prompt_lengths)
    width = max(lengths)
    return Rows(
        tokens=torch.tensor([[*history, *[beyond] * (width - len(history))] for history in histories]),
        lengths=torch.tensor(lengths),
        prompt_lengths=torch.tensor(prompts),
        requests=range(len(histories)),
        streams=[
            Stream(seed, sample, prompt_digest(history[:prompt]))
            for sample, (history, prompt) in enumerate(zip(histories, prompts, strict=True))
        ],
        eos=eos,
        states=states,
    )


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


def check_rule(
    rule: Rule,
    *,
    vocab_size: int = 97,
    tokenizer: Any = None,
    eos: tuple[int, ...] = (1,),
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    seed: int = 0,
    rows: Rows | None = None,
) -> None:
    """Check the laws that every rule obeys, whatever it does.

    It is a value: frozen, hashable, equal to what its own dump builds. It keeps shape and dtype, edits nothing it is
    given, brings no masked token back, makes no NaN or infinity out of finite logits, gives the same result twice. A
    position depends on itself alone: not on its neighbours or their order, on a NaN among them, or on what lies beyond
    its history. States are values. A ``sampling_only`` rule keeps the most likely token.

    Args:
        rule: the rule; its texts are resolved with ``tokenizer``.
        vocab_size: number of tokens of the logits.
        tokenizer: for a rule with texts among its options.
        eos: ids that end a sequence.
        dtypes: the dtypes of logits to try.
        seed: of the histories and logits.
        rows: positions where the rule does something, when histories drawn at random would not show it.

    Raises:
        AssertionError: names the law that does not hold, and where.
    """
    _check_value(rule)
    rule = rule.resolve(tokenizer)
    _check_value(rule)
    generator = torch.Generator().manual_seed(seed)
    if rows is None:
        rows = _repetitive_rows(vocab_size, eos, seed, generator)
    if not rows.states:
        rows = replace(rows, states=_check_states(rule, rows, vocab_size, generator))
    for dtype in dtypes:
        _RuleLaws(rule, rows, _telling_logits(len(rows), vocab_size, generator).to(dtype), generator).check()


def _broken(plugin: Plugin, law: str, found: str) -> AssertionError:
    return AssertionError(f"{plugin.kind} breaks the law {law!r}: {found}")


def _check_value(plugin: Plugin) -> None:
    """A plugin is its own configuration, and nothing else."""
    law = "a plugin is a frozen value"
    try:
        plugin.kind = plugin.kind  # type: ignore[misc]
    except ValidationError:
        pass
    else:
        raise _broken(plugin, law, f"{type(plugin).__name__}.kind can be set; leave frozen=True in model_config")
    try:
        hash(plugin)
    except TypeError as error:
        raise _broken(plugin, law, f"{error} in {plugin!r}; use tuples, and FrozenDict for mappings") from error
    law = "a plugin equals what its dump builds"
    for form, build in (
        ("model_dump", lambda: type(plugin)(**plugin.model_dump())),
        ("model_dump_json", lambda: type(plugin).model_validate_json(plugin.model_dump_json())),
    ):
        try:
            again = build()
        except (TypeError, ValueError) as error:
            raise _broken(plugin, law, f"{form} of {plugin!r} cannot be read back: {error}") from error
        if again != plugin:
            raise _broken(plugin, law, f"{form} of {plugin!r} builds {again!r}")


def _repetitive_rows(vocab_size: int, eos: tuple[int, ...], seed: int, generator: torch.Generator) -> Rows:
    """Histories of different lengths over few tokens, so that penalties and n-gram bans have something to see."""
    lengths, prompt_lengths = [1, 4, 7, 7, 12, 19, 23, 30], [1, 4, 3, 6, 2, 10, 23, 5]
    few = torch.randperm(vocab_size, generator=generator)[:6]
    histories = [few[torch.randint(len(few), (length,), generator=generator)].tolist() for length in lengths]
    return make_rows(histories, prompt_lengths, eos=eos, seed=seed, beyond=int(few[0]))


def _telling_logits(positions: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    """[P, V] float64: rows that are plain, full of ties, flat, far apart, and with masked tokens."""
    logits = 4 * torch.randn(positions, vocab_size, generator=generator, dtype=torch.float64)
    logits[1::5] = logits[1::5].round()
    logits[2::5] = logits[2::5, :1]
    logits[3::5] *= 50
    masked = torch.rand(positions, vocab_size, generator=generator) < 0.3
    masked[::2] = False
    # One row has a single token left.
    masked[-1] = True
    masked[-1, vocab_size // 2] = False
    return logits.masked_fill(masked, -math.inf)


def _check_states(rule: Rule, rows: Rows, vocab_size: int, generator: torch.Generator) -> list[Any]:
    """The rule's state at each position, reached by committing the output of its history."""
    law = "states are values"
    states = []
    for position, (history, length, prompt) in enumerate(
        zip(rows.tokens.tolist(), rows.lengths.tolist(), rows.prompt_lengths.tolist(), strict=True)
    ):
        request = Request(position, tuple(history[:prompt]), rows.streams[position])
        state = rule.init_state(request)
        for token in history[prompt:length]:
            logits = torch.randn(vocab_size, generator=generator)
            earlier, given = copy.deepcopy(state), logits.clone()
            following = rule.commit(state, token, logits)
            if not _same(state, earlier):
                raise _broken(rule, law, f"commit changed {earlier!r} to {state!r}; return a new state")
            if not _same(logits, given):
                raise _broken(rule, law, "commit edited the logits it was given")
            if not _same(rule.commit(state, token, logits), following):
                raise _broken(rule, law, f"commit gave two different states for {earlier!r} and token {token}")
            state = following
        if not _same(rule.init_state(request), rule.init_state(request)):
            raise _broken(rule, law, f"init_state gave two different states for request {position}")
        states.append(state)
    return states


@dataclass(frozen=True)
class _RuleLaws:
    """The laws of a rule on given positions and logits."""

    rule: Rule
    rows: Rows
    logits: Tensor
    generator: torch.Generator

    def check(self) -> None:
        result = self.call(self.rows, self.logits)
        self.check_masked_and_finite(result)
        self.check_argmax(result)
        self.compare("the same result twice", result, self.call(self.rows, self.logits))
        self.compare("what lies beyond a history means nothing", result, self.call(self.with_other_junk(), self.logits))
        order = torch.randperm(len(self.rows), generator=self.generator)
        self.compare(
            "permuted positions give permuted results",
            result[order],
            self.call(select(self.rows, order.tolist()), self.logits[order]),
        )
        for position, length in enumerate(self.rows.lengths.tolist()):
            alone = select(self.rows, [position])
            alone = replace(alone, tokens=alone.tokens[:, :length])
            self.compare(
                f"batched = alone, position {position}",
                result[position : position + 1],
                self.call(alone, self.logits[position : position + 1]),
            )
        for broken in (slice(None), slice(0, 1)):
            poisoned = self.logits.clone()
            poisoned[0, broken] = math.nan
            self.compare(
                "a NaN harms no other position", result[1:], self.call(self.rows, poisoned)[1:], first_position=1
            )

    def call(self, rows: Rows, logits: Tensor) -> Tensor:
        """The rule's result, with everything checked that holds of every call."""
        given, tokens, states = logits.clone(), rows.tokens.clone(), copy.deepcopy(rows.states)
        try:
            result = self.rule(rows, logits)
        except Exception as error:
            raise self.broken("any rows and logits are taken", f"{type(error).__name__}: {error}") from error
        expected, found = f"{tuple(logits.shape)} {logits.dtype}", f"{tuple(result.shape)} {result.dtype}"
        if found != expected:
            raise self.broken("shape and dtype are kept", f"{found} instead of {expected}")
        self.compare("given logits are not edited", given, logits)
        if not (_same(rows.tokens, tokens) and _same(rows.states, states)):
            raise self.broken("given rows are not edited", "tokens or states changed during the call")
        return result

    def check_masked_and_finite(self, result: Tensor) -> None:
        back = (self.logits == -math.inf) & (result != -math.inf)
        if back.any():
            position, token = back.nonzero()[0].tolist()
            raise self.broken(
                "masked tokens stay masked",
                f"token {token} of position {position} was -inf and became {result[position, token]:g}",
            )
        wild = result.isnan() | (result == math.inf)
        if wild.any():
            position, token = wild.nonzero()[0].tolist()
            raise self.broken(
                "finite logits give no NaN and no infinity",
                f"token {token} of position {position} was {self.logits[position, token]:g} and became "
                f"{result[position, token]:g}",
            )

    def check_argmax(self, result: Tensor) -> None:
        if not self.rule.sampling_only:
            return
        best = _first_best(self.logits)
        for position, (before, after) in enumerate(zip(best.tolist(), _first_best(result).tolist(), strict=True)):
            # Rounding may let a later token draw level, which greedy decoding does not see.
            if result[position, before] != result[position, after] or result[position, before] == -math.inf:
                raise self.broken(
                    "a sampling_only rule keeps the most likely token",
                    f"token {before} of position {position} became {result[position, before]:g}, token {after} is at "
                    f"{result[position, after]:g}",
                )

    def with_other_junk(self) -> Rows:
        tokens, order = self.rows.tokens, torch.randperm(self.rows.tokens.numel(), generator=self.generator)
        # Taken from the histories: tokens that would matter if they were read.
        return replace(
            self.rows, tokens=tokens.where(self.rows.within("both"), tokens.flatten()[order].view_as(tokens))
        )

    def compare(self, law: str, expected: Tensor, found: Tensor, *, first_position: int = 0) -> None:
        differs = (expected != found) & ~(expected.isnan() & found.isnan())
        if differs.any():
            position, token = differs.nonzero()[0].tolist()
            raise self.broken(
                law,
                f"token {token} of position {position + first_position} is {found[position, token]:.9g} instead of "
                f"{expected[position, token]:.9g}; {int(differs.sum())} of {differs.numel()} differ",
            )

    def broken(self, law: str, found: str) -> AssertionError:
        return _broken(self.rule, law, f"{found} ({self.logits.dtype})")


def _first_best(logits: Tensor) -> Tensor:
    """[P] the lowest id among the most likely tokens."""
    ids = torch.arange(logits.shape[-1]).expand_as(logits)
    return ids.where(logits == logits.amax(-1, keepdim=True), logits.shape[-1]).amin(-1)


def _same(a: Any, b: Any) -> bool:
    """Whether two states hold the same values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return _same(vars(a), vars(b)) if hasattr(a, "__dict__") else bool(a == b)
