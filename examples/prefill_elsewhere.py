"""Prefill in one process, decode in another: what does the way of the cache between them cost?

A worker prefills each prompt and exports its cache; this process loads it and decodes. Printed are the bytes that went over,
the seconds that exporting, sending and loading took beside a prefill here, and whether the tokens are the same.

    python examples/prefill_elsewhere.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from decodekit.cache.paged import PagedCache
from decodekit.integrations.models import load_model
from decodekit.runtime.forward import RaggedForward

PROMPT = "Explain how a lighthouse keeper spends the night, what he sees, and why ships depended on him. "


def cache_of(model: Any) -> PagedCache:
    """Blocks for one long prompt."""
    return PagedCache(model.config, num_blocks=1024, device=model.device)


def prefill(model: Any, cache: PagedCache, ids: list[int]) -> int:
    """Forward a prompt as a new row; its first token."""
    [row] = cache.open([ids])
    done = cache.rows[row].length
    with torch.no_grad():
        return int(RaggedForward(model, cache)([row], [ids[done:]]).logits[0, -1].argmax())


def worker(pipe: Connection, name: str | None) -> None:
    """Prefill what comes, and send the first token and the cache back."""
    model, _ = load_model(name)
    while ids := pipe.recv():
        cache = cache_of(model)
        first = prefill(model, cache, ids)
        started = time.perf_counter()
        blob = cache.export(0)
        pipe.send((first, time.perf_counter() - started, time.perf_counter()))
        pipe.send_bytes(blob)


def decode(model: Any, cache: PagedCache, token: int, count: int) -> list[int]:
    """Greedy tokens of the only row, ``token`` first."""
    forward, tokens = RaggedForward(model, cache), [token]
    with torch.no_grad():
        while len(tokens) < count:
            tokens.append(int(forward([0], [tokens[-1:]]).logits[0, -1].argmax()))
    return tokens


def main() -> None:
    """Send a few prompts there and back."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", help="a Hugging Face id or local folder; the demo model if left out")
    parser.add_argument("--repeat", type=int, nargs="+", default=[2, 10, 40], help="how long the prompts are")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    options = parser.parse_args()

    model, tokenizer = load_model(options.model)
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=worker, args=(there, options.model), daemon=True)
    process.start()
    print("tokens      bytes  export s    send s    load s  prefill here s  same tokens")
    for repeat in options.repeat:
        ids = tokenizer(PROMPT * repeat).input_ids
        here.send(ids)
        first, export, sent = here.recv()
        blob = here.recv_bytes()
        received = time.perf_counter()
        cache = cache_of(model)
        cache.load(blob)
        loaded = time.perf_counter()
        tokens = decode(model, cache, first, options.max_new_tokens)
        own = cache_of(model)
        started = time.perf_counter()
        token = prefill(model, own, ids)
        took = time.perf_counter() - started
        same = tokens == decode(model, own, token, options.max_new_tokens)
        # perf_counter is one clock for all processes of a machine.
        times = f"{export:9.4f} {received - sent:9.4f} {loaded - received:9.4f} {took:15.4f}"
        print(f"{len(ids):6d} {len(blob):10d} {times}  {same}")
    here.send([])
    process.join()


if __name__ == "__main__":
    main()
