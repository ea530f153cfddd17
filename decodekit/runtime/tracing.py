"""From loop records to trace records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decodekit.cache.paged import PagedCache
from decodekit.core.trace import TraceWriter
from decodekit.kernels.contrast import layer_divergence
from decodekit.runtime.call import Call
from decodekit.runtime.choosing import StepRecord
from decodekit.runtime.speculation import Walk
from decodekit.runtime.tasks import SearchTask
from decodekit.runtime.work import Given

ALTERNATIVES = 5
"""Most likely tokens that a trace keeps of every distribution."""


class Tracer:
    """Writes what a call does.

    Args:
        writer: where to.
        call: the call, before it runs.
        tokenizer: names tokens.
        model: the model's name.
        recipe: the recipe, plain data.
        prompts: the texts or chats of the call's prompts.
        given: what the call was given beside them.
    """

    def __init__(
        self,
        writer: TraceWriter,
        call: Call,
        tokenizer: Any,
        *,
        model: str,
        recipe: dict[str, Any],
        prompts: Sequence[Any],
        given: Given,
    ) -> None:
        self._writer, self._call, self._tokenizer = writer, call, tokenizer
        self._forwards = 0
        requests = [task.root.request for task in call.tasks]
        order = sorted({request.prompt for request in requests})
        writer.header(
            model=model,
            recipe=recipe,
            seed=call.seed,
            prompt_ids=[list(request.prompt_ids) for request in requests],
            prompts=[prompts[order.index(request.prompt)] for request in requests],
            raw=given.raw,
            inputs=[{name: own for name, own in request.inputs.items() if name != "text"} for request in requests],
            # A row's own seed and sample index, with its prompt, name all its draws.
            rows=[
                {"prompt": request.prompt, "seed": request.stream.seed, "sample": request.stream.sample}
                for request in requests
            ],
            **({} if given.replay is None else {"replay": given.replay.told}),
        )

    def step(self, record: StepRecord) -> None:
        """Write a token record a live row, and before those of a forward what was drafted and what the cache holds."""
        if self._call.loop.forwards != self._forwards:
            self._forwards = self._call.loop.forwards
            for walk in record.walks:
                if len(walk.draft):
                    self._draft(walk, record)
            self._cache()
        told = _Told(record, self._text)
        for position, (sequence, token) in enumerate(zip(record.sequences, record.tokens, strict=True)):
            # A search chooses for itself, and a prompt that candidates fork from is given no token.
            if sequence.error is not None or not record.taken[position]:
                continue
            node = record.nodes[position]
            self._writer.token(
                prompt=sequence.request.prompt,
                row=sequence.row,
                position=record.places[position],
                **told.token(position, token),
                **({} if node is None else {"draft": node}),
            )
        for task in dict.fromkeys(task for task in record.tasks if isinstance(task, SearchTask)):
            self._search(task, record, told)

    def end(self) -> None:
        """Write how every row ended, and what was chosen from."""
        for task in self._call.tasks:
            results = task.results(self._call.outputs)
            first = results[0]
            if first.candidates:
                self._writer.event(
                    "candidates",
                    row=task.root.row,
                    prompt=task.root.request.prompt,
                    candidates=first.candidates,
                    **first.report,
                    **first.details,
                )
            for result in results:
                fields: dict[str, Any] = {"row": result.sequence.row, "finish_reason": result.sequence.finish_reason}
                if result.sequence.error is not None:
                    fields["error"] = result.sequence.error
                self._writer.event("finished", **fields)

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def _draft(self, walk: Walk, record: StepRecord) -> None:
        draft = walk.draft
        self._writer.event(
            "draft",
            row=walk.sequence.row,
            position=record.places[record.walks.index(walk)],
            tokens=[[token, self._text(token)] for token in draft.tokens],
            parents=list(draft.parent_of),
            accepted=walk.accepted,
            forced=draft.forced,
        )

    def _cache(self) -> None:
        caches = []
        for session in self._call.loop.sessions:
            if isinstance(session.cache, PagedCache):
                stats = session.cache.stats()
                groups = [
                    {name: group[name] for name in ("layers", "block_size", "used", "cached", "free")}
                    for group in stats["groups"]
                ]
                name = session.model.config._name_or_path
                caches.append({"model": name, "rows": stats["rows"], "tokens": stats["tokens"], "groups": groups})
        if caches:
            self._writer.event("cache", step=self._forwards, caches=caches)

    def _search(self, task: SearchTask, record: StepRecord, told: _Told) -> None:
        own = [position for position, owner in enumerate(record.tasks) if owner is task]
        advance = task.advance
        self._writer.event(
            "search",
            row=task.root.row,
            prompt=task.root.request.prompt,
            position=record.places[own[0]],
            hypotheses=[
                {"parent": parent, "logprob": sum(child.logprobs), **told.token(own[parent], token)}
                for child, parent, token in zip(task.hypotheses, advance.parents, advance.tokens, strict=False)
            ],
            ended=[
                {"parent": ended.parent, "score": ended.score, "reason": ended.reason}
                | ({} if ended.token is None else told.token(own[ended.parent], ended.token))
                for ended in advance.ended
            ],
        )


class _Told:
    """What a step tells about its positions, whichever token was taken there."""

    def __init__(self, record: StepRecord, text_of: Any) -> None:
        self._text_of = text_of
        final = record.picked.final
        self._final = final.log_softmax(-1)
        self._entropy = torch.where(self._final == -torch.inf, 0.0, -self._final.exp() * self._final).sum(-1).tolist()
        self._legal = (final > -torch.inf).sum(-1).tolist()
        [(_, scores), *_] = record.picked.stages
        plain = record.outputs["main"].logits
        # Rounding may leave a little less than nothing.
        self._shift = layer_divergence(plain, scores.unsqueeze(0))[0].clamp(min=0).tolist()
        self._notes = {name: values.tolist() for name, values in record.outputs.annotations.items()}
        self._branches = [_Distribution("branch", name, own.logits) for name, own in record.outputs.items()]
        self._stages = [_Distribution("stage", name, logits) for name, logits in record.picked.stages]

    def token(self, position: int, token: int) -> dict[str, Any]:
        return {
            "id": token,
            "text": self._text_of(token),
            "prob": float(self._final[position, token].exp()),
            "entropy": self._entropy[position],
            "legal": self._legal[position],
            "shift": self._shift[position],
            "branches": [own.told(position, token, self._text_of) for own in self._branches],
            "alternatives": [own.told(position, token, self._text_of) for own in self._stages],
            **{name: values[position] for name, values in self._notes.items()},
        }


class _Distribution:
    """The most likely tokens of [P, V] logits."""

    def __init__(self, what: str, name: str, logits: Tensor) -> None:
        self._what, self._name = what, name
        self._probabilities = logits.softmax(-1)
        values, ids = self._probabilities.topk(min(ALTERNATIVES, logits.shape[-1]), dim=-1)
        self._top = [list(zip(*own, strict=True)) for own in zip(ids.tolist(), values.tolist(), strict=True)]
        self._legal = (logits > -torch.inf).sum(-1).tolist()

    def told(self, position: int, token: int, text_of: Any) -> dict[str, Any]:
        return {
            self._what: self._name,
            "prob": float(self._probabilities[position, token]),
            "legal": self._legal[position],
            "top": [[other, text_of(other), value] for other, value in self._top[position] if value > 0],
        }
