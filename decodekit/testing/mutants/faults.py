"""The faults that are seeded, by what they are in."""

from __future__ import annotations

from decodekit.testing.mutants import Mutant

_STEPS = "tests/cache/test_families.py"
_SPECULATION = ("tests/runtime/test_speculation.py", "tests/cases/test_speculation.py")


def _of(package: str, *faults: tuple[str, ...]) -> list[Mutant]:
    return [
        Mutant(name, f"decodekit.{package}{target}", right, wrong, tuple(tests))
        for name, target, right, wrong, *tests in faults
    ]


RULES = _of(
    "rules.",
    ("temperature multiplies", "temperature:Temperature.__call__", ") / self.t).to", ") * self.t).to"),
    ("top-k keeps one less", "top_k:TopK.__call__", "(positions, 1), self.k", "(positions, 1), self.k - 1"),
    ("the token that crosses p is dropped", "top_p:TopP.__call__", "wanted) + 1", "wanted)"),
    ("p is of the batch's best token", "top_p:TopP.__call__", "amax(-1, keepdim=True)", "amax().repeat(len(logits), 1)"),
    ("min-p is relative to the batch", "min_p:MinP.__call__", "logits.amax(-1, keepdim=True)", "logits.amax()"),
    ("entropy is averaged over the batch", "typical:Typical.__call__", "(probabilities).sum(-1, keepdim=True)",
     "(probabilities).sum(-1, keepdim=True).mean()"),
    ("epsilon drops the best token", "epsilon:Epsilon.__call__", " & (logits < logits.amax(-1, keepdim=True))", ""),
    ("eta grows with entropy", "eta:Eta.__call__", "(-entropy).exp()", "entropy.exp()"),
    ("mirostat corrects the wrong way", "mirostat:Mirostat.commit", "(surprise - self.tau)", "(self.tau - surprise)"),
    ("one state for all rows", "mirostat:Mirostat.__call__", "torch.tensor(rows.states,",
     "torch.tensor([rows.states[0]] * len(rows),"),
    ("one draw for all rows", "xtc:Xtc.__call__", "rows.random() <", "rows.random()[:1] <"),
    ("xtc keeps none", "xtc:Xtc.__call__", "top & ~(ties & (ties.cumsum(-1, dtype=torch.int32) == 1))", "top"),
    ("the scope is ignored", "repetition_penalty:RepetitionPenalty.__call__", 'self.scope == "output"', "False"),
    ("occurrences are not counted", "frequency_penalty:FrequencyPenalty.__call__", "self.scope)",
     "self.scope).clamp(max=1)"),
    ("n-grams beyond the history are banned", "no_repeat_ngram:NoRepeatNgram.__call__", "inside & reached & (", "("),
    ("dry allows one more", "dry:Dry.__call__", ">= self.allowed_length, 0.0", "> self.allowed_length, 0.0"),
    ("part of a bad word is enough", "bad_words:BadWords.__call__", "== preceding).all(-1)", "== preceding).any(-1)"),
    ("a bias replaces the logit", "logit_bias:LogitBias.__call__", ".index_add(1,", ".index_copy(1,"),
    ("the least length is one short", "min_length:MinLength.__call__", "< self.n", "< self.n - 1"),
    ("the prompt counts as output", "min_length:MinLength.__call__", "rows.positions <", "rows.lengths <"),
    ("one row's position forces all", "forced_tokens:ForcedTokens.__call__", "here.any(-1, keepdim=True)", "here.any()"),
    ("no token has to stay", "top_h:_leading_count", ".clamp_(min=1)", ""),
    ("the watermark begins late", "watermark:Watermark.__call__", ">= self.context_width)", "> self.context_width + 1)"),
)  # fmt: skip

KERNELS = _of(
    "kernels.",
    ("negative logits are divided", "repetition_penalty.reference:penalize_repeated", "scores * penalty)",
     "scores / penalty)", "tests/rules/test_repetition_penalty.py"),
    ("divergence is averaged over the batch", "contrast.reference:contrast_layers", "apart.argmax(0)",
     "apart.mean(-1, keepdim=True).expand_as(apart).argmax(0)", "tests/strategies/test_dola.py"),
    ("the first row's layer is everyone's", "contrast.reference:contrast_layers", "early[chosen, torch",
     "early[chosen[:1], torch", "tests/strategies/test_dola.py"),
    ("excluded tokens come back", "contrast.reference:contrast", ".masked_fill(_implausible(log_probs, share), -math.inf)",
     ".nan_to_num(nan=0.0)", "tests/strategies/test_cfg.py"),
    ("the expert is not amplified", "contrast.reference:contrast", "(1 + weight) * expert", "expert",
     "tests/strategies/test_contrastive_decoding.py"),
)  # fmt: skip

STRATEGIES = _of(
    "strategies.",
    ("context and prior change places", "cad:ContextAware.score", "contrast(given, prior, alpha)",
     "contrast(prior, given, alpha)"),
    ("adaptive weights are averaged", "cad:ContextAware.score", ".squeeze(0)  # [P]",
     ".squeeze(0).mean().expand(len(given))"),
    ("the prior sees the context", "cad:ContextAware.branches", '("without_context", without)', '("without_context", main)'),
    ("the negative prompt is the prompt", "cfg:ClassifierFree.branches", "request.prompt_ids[-1:]", "request.prompt_ids"),
    ("similarity is averaged", "contrastive_search:ContrastiveSearch.step", ".amax(-1)", ".mean(-1)"),
    ("the winner's state is lost", "contrastive_search:ContrastiveSearch.step", "hidden[winner : winner + 1]", "hidden[:1]"),
    ("the length penalty is forgotten", "beam:Beam.step", "best.score / length**self.length_penalty", "best.score"),
    ("a group's beams fork from another's", "beam:Beam.step", "parent=rows[own.parent]", "parent=own.parent"),
    ("the worst hypothesis wins", "mbr:rank", "(-scores[place], place)", "(scores[place], place)"),
    ("equal references count once", "mbr:_rated", "index_add_(0,", "index_copy_(0,"),
    ("the worst candidate wins", "best_of_n:BestOfN._order", "(-keys[number], number)", "(keys[number], number)"),
)  # fmt: skip

SPECULATION = [
    *_of(
        "kernels.verify.",
        ("the residual is scalar", "reference:verify", "(left - own).clamp", "(left - own[token]).clamp",
         "tests/kernels/test_verify.py"),
        ("every draft is accepted", "reference:verify", "if accept *", "if True or accept *", "tests/kernels/test_verify.py"),
        ("siblings meet the first target", "reference:verify", "left = residual / mass", "left = left",
         "tests/kernels/test_verify.py"),
    ),
    *_of(
        "runtime.",
        ("rejected tokens stay in the cache", "speculation:Speculation.settle", "len(path) - len(walk.accepted)", "0",
         *_SPECULATION),
        ("accepted tokens leave the cache", "speculation:Speculation.settle", "len(path) - len(walk.accepted)", "len(path)",
         *_SPECULATION),
        ("the bonus token is missing", "speculation:Walk.accept", "self.sequence.finish_reason is None",
         "self.sequence.finish_reason is None and self.node + 1 < len(self.draft)", *_SPECULATION),
        ("after a rejection the target is drawn from", "speculation:Speculation.choose",
         "int(inverse_cdf(left.unsqueeze(0), own))", "picked", *_SPECULATION),
        ("siblings share one draw", "speculation:Speculation.choose", "VERIFY_LANE + child", "VERIFY_LANE", *_SPECULATION),
        ("the first leaf's row goes on", "speculation:Speculation.settle", "if kept != walk.sequence.row:", "if False:",
         *_SPECULATION),
        ("any child agrees", "speculation:Speculation.choose", "draft.child(walk.node, picked)",
         "next(iter(children), None)", *_SPECULATION),
    ),
]  # fmt: skip

LOOP = [
    *_of(
        "core.random:",
        ("the position does not count", "uniform", "(position & _MASK", "(0 & _MASK"),
        ("tokens of no mass are drawn", "inverse_cdf", "right=True", "right=False"),
    ),
    *_of(
        "runtime.",
        ("every row draws the first row's", "pipeline:Pipeline.__call__", "draw(rows.streams,",
         "draw([rows.streams[0]] * len(rows),", "tests/runtime/test_decoder.py"),
        ("broken rows go unnoticed", "pipeline:Pipeline.__call__", "~torch.isfinite(top)", "top.isnan() & False"),
        ("edits of shared logits go unnoticed", "pipeline:Pipeline._apply", "if logits._version != version:", "if False:"),
        ("forks share their rules' states", "sequence:SequenceState.fork", "states=[*self.states]", "states=self.states",
         "tests/strategies/test_beam.py", "tests/strategies/test_nested.py", "tests/runtime/test_tasks.py"),
        ("the first of two stop strings does not win", "text:TextTracker._append", "min(found)", "max(found)"),
        ("the beginning of a stop string is given out", "text:TextTracker._append", "self._open_suffix()", "0"),
    ),
    *_of("core.", ("pads are part of the row", "compat:Prepared.lengths", "[int(n) for n in mask.sum(-1).tolist()]",
                   "[width] * rows", "tests/runtime/test_decoder.py")),
]  # fmt: skip

CONSTRAINTS = [
    *_of(
        "runtime.constraining:",
        ("forks share their place in the language", "RowConstraint.fork", "self._state.fork()", "self._state",
         "tests/runtime/test_constraining.py", "tests/constraints/test_walks.py"),
        ("a tree's nodes all follow the row", "RowConstraint.legal", "places.get(parent)", "places.get(-1)",
         "tests/runtime/test_constraining.py"),
        ("the limit does not come nearer", "RowConstraint.advance", "self._left -= 1", "pass"),
        ("the strategy's own tokens are legal", "constrain", "own = legal_only(scores if all_rows else scores[index], masks)",
         "own = scores if all_rows else scores[index]"),
    ),
    *_of(
        "fsm.",
        ("a text may end anywhere", "masks:CompiledAutomaton.mask", "if self.accepts(place):", "if True:"),
        ("a text never ends", "masks:CompiledAutomaton.mask", "if self.accepts(place):", "if False:"),
        ("rollback is one token short", "masks:FsmState.rollback", "len(self._places) - count :",
         "len(self._places) - count + 1 :"),
        ("the mask ends a word short", "masks:_packed", "words[: len(packed)] = packed",
         "words[: len(packed) - 4] = packed[:-4]"),
    ),
]  # fmt: skip

CACHE = [
    *_of(
        "cache.",
        ("a step works on the states themselves", "states:working_copy", "key: tensor.clone()", "key: tensor", _STEPS,
         "tests/cache/test_states.py"),
        ("the newest state survives a rollback", "rows:RowBook._truncate", "row.length, row.state = resume",
         "row.length = resume.length", _STEPS),
        ("states are saved without their salt", "rows:RowBook._save", "tokens=row.tokens)", "tokens=row.tokens, salt=None)",
         "tests/cache/test_paged.py", "tests/cache/test_host.py"),
        ("states are saved anywhere in a block", "rows:RowBook._save", "row.length == self", "row.length >= self",
         "tests/cache/test_paged.py", "tests/cases/test_cache_and_serving.py"),
        ("a window is gathered a token short", "gather:Group.first_needed", "length - self.window + 1",
         "length - self.window + 2"),
        ("another row's columns are kept", "rectangle:Rectangle.begin", "same and lengths == self._ends", "bool(self._ends)"),
        ("the mask is one short", "steps:Step.attention_mask", "columns >= starts", "columns > starts", _STEPS),
        ("positions count pads", "steps:Step.position_ids", "torch.tensor(self.lengths)",
         "torch.tensor([max(self.lengths)] * len(self.lengths))", _STEPS),
        ("admission looks at free blocks only", "blocks:BlockPool.can_admit",
         "self.can_allocate(self.to_admit(prompt, max_new))",
         "self.to_admit(prompt, max_new) <= len(self._allocator.free)"),
        ("a block that is written again loses its beginning", "quantization:QuantizedStore._make_residual",
         "torch.isin(blocks, begun, invert=True)", "torch.zeros_like(blocks, dtype=torch.bool)"),
        ("keys share a scale by token", "quantization:QuantizedStore.__init__", "keys, kind, by_channel=True",
         "keys, kind, by_channel=False"),
    ),
]  # fmt: skip

FAULTS = [*RULES, *KERNELS, *STRATEGIES, *SPECULATION, *LOOP, *CONSTRAINTS, *CACHE]
