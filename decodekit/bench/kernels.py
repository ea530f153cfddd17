"""Each Triton kernel beside its peer, both replayed from CUDA graphs, and as a share of what the GPU's memory allows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from decodekit.bench.cases import Case
from decodekit.bench.states import state_cases
from decodekit.cache.quantization import QuantizedStore
from decodekit.core.errors import InputError
from decodekit.kernels import triton_runs
from decodekit.kernels.apply_bitmask import apply_bitmask
from decodekit.kernels.apply_bitmask import reference as torch_bitmask
from decodekit.kernels.block_copy import block_copy
from decodekit.kernels.block_copy import reference as torch_copy
from decodekit.kernels.contrast import contrast, contrast_layers, layer_divergence
from decodekit.kernels.contrast import reference as torch_contrast
from decodekit.kernels.kv_write import kv_write
from decodekit.kernels.kv_write import reference as torch_write
from decodekit.kernels.linear import gated_linear, linear
from decodekit.kernels.linear import reference as torch_linear
from decodekit.kernels.paged_attention import paged_attention, plan_attention
from decodekit.kernels.repetition_penalty import penalize_repeated
from decodekit.kernels.repetition_penalty import reference as torch_penalty
from decodekit.kernels.sample import reference as torch_sample
from decodekit.kernels.sample import sample
from decodekit.kernels.top_token import reference as torch_top
from decodekit.kernels.top_token import top_token

ROUNDS = 20
BLOCK_SIZE = 16
HEADS, KV_HEADS, WIDTH = 32, 8, 128
"""Of a Llama of 8 billion parameters."""
VOCAB_SIZE = 128_256
LINEARS = (
    ("q, k, v", (4096, 1024, 1024), 4096),
    ("o", (4096,), 4096),
    ("gate, up", (14336, 14336), 4096),
    ("down", (4096,), 14336),
)
ROWS_AND_LENGTHS = ((64, 8192), (8, 32768), (1, 131072), (128, 1024), (32, 2048), (1, 512))


def needs_model(prompts: Sequence[str]) -> bool:
    """Shapes are measured, no model."""
    return False


def run(model: Any, tokenizer: Any, prompts: Sequence[str], status: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row a kernel and shape; model and prompts are not used.

    - ``ms``, ``peer_ms``: medians of the replays of a CUDA graph; ``ratio`` is ours / peer.
    - ``memory_limit``: the time that reading as many bytes takes, measured here, over ours. Data that fits into the cache
      can pass 1.

    Raises:
        InputError: there is no GPU with Triton.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not triton_runs(device):
        raise InputError(
            "suite 'kernels' needs an NVIDIA GPU and Triton, and this machine lacks one of them; run another"
        )
    status("memory limit")
    bytes_a_ms = memory_speed(device)
    rows = []
    for case in chain(_cases(device), state_cases(device)):
        status(f"{case.kernel} {case.shape}")
        # Of small operations several a graph, so that its launch does not count.
        repeats = 1 if case.nbytes > 2**28 else 10
        ours, theirs = _ms(case.ours, repeats), _ms(case.theirs, repeats)
        rows.append(
            {
                "kernel": case.kernel,
                "shape": case.shape,
                "ms": ours,
                "peer": case.peer,
                "peer_ms": theirs,
                "ratio": ours / theirs,
                "memory_limit": case.nbytes / bytes_a_ms / ours,
            }
        )
    return rows


def memory_speed(device: torch.device) -> float:
    """Bytes a millisecond that reading gets from the GPU's memory."""
    large = torch.randn(2**29, device=device)
    return large.nbytes / _ms(large.sum, 1)


def _ms(call: Callable[[], Any], repeats: int) -> float:
    """The median milliseconds of a call, replayed from a graph that holds it so often."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    times = []
    for _ in range(ROUNDS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / repeats)
    return statistics.median(times[2:])


def _cases(device: torch.device) -> Iterator[Case]:
    normal = partial(torch.randn, device=device)
    for rows, length in ROWS_AND_LENGTHS:
        yield _attention(rows, length, device)
    yield _shared_prefix(64, 8192, device)
    for kind in ("int8", "int4"):
        yield _quantized(64, 8192, kind, device)
    for rows in (1, 8, 32):
        yield from _layers(rows, device)
    stored, slots = normal(2 * KV_HEADS, 2**18, WIDTH, dtype=torch.bfloat16), torch.randperm(2**18, device=device)
    keys, values = stored[:KV_HEADS].transpose(0, 1), stored[KV_HEADS:].transpose(0, 1)
    for count in (32, 8192):
        new = normal(2, count, KV_HEADS, WIDTH, dtype=torch.bfloat16)
        arguments: tuple[Tensor, ...] = (keys, values, slots[:count], *new)
        ours: Callable[[], Any]
        theirs: Callable[[], Any]
        ours, theirs = partial(kv_write, *arguments), partial(torch_write.kv_write, *arguments)
        yield Case("kv_write", f"{count} tokens", "index_copy", ours, theirs, 2 * new.nbytes)
        source, target = torch.randperm(2**18 // BLOCK_SIZE, device=device)[: 2 * (count // BLOCK_SIZE)].chunk(2)
        arguments = stored, source, target
        ours = partial(block_copy, *arguments, block_size=BLOCK_SIZE)
        theirs = partial(torch_copy.block_copy, *arguments, block_size=BLOCK_SIZE)
        yield Case("block_copy", f"{len(source)} blocks", "indexing", ours, theirs, 2 * new.nbytes)
    for rows in (1, 64):
        logits, shape = normal(rows, VOCAB_SIZE) * 3, f"{rows} x {VOCAB_SIZE}"
        filters = [torch.full((rows,), value, device=device) for value in (0.8, 50, 0.9, 0.05)]
        filters[1] = filters[1].int()
        counters = torch.randint(2**31, (rows, 4), device=device, dtype=torch.int32)
        draws = torch.randint(2**62, (rows,), device=device), counters
        arguments = logits, *filters, *draws
        ours, theirs = partial(sample, *arguments), partial(torch_sample.sample, *arguments)
        yield Case("sample", shape, "sort", ours, theirs, logits.nbytes)
        seen = torch.randint(VOCAB_SIZE, (rows, 1024), device=device), None, torch.full((rows,), 600, device=device)
        ops = penalize_repeated, torch_penalty.penalize_repeated
        ours, theirs = (partial(op, logits, *seen, 1.1) for op in ops)
        yield Case("repetition_penalty", shape, "torch", ours, theirs, 2 * logits.nbytes)
        words = torch.randint(-(2**31), 2**31, (rows, -(-VOCAB_SIZE // 32)), device=device, dtype=torch.int32)
        masked = logits.clone()
        peer, op = _bitmask_peer()
        ours, theirs = partial(apply_bitmask, masked, words), partial(op, masked, words)
        yield Case("apply_bitmask", shape, peer, ours, theirs, masked.nbytes)
        ours, theirs = partial(top_token, logits), partial(torch_top.top_token, logits)
        yield Case("top_token", shape, "max", ours, theirs, logits.nbytes)
        early = normal(8, rows, VOCAB_SIZE)
        ours, theirs = (partial(op, logits, early) for op in (layer_divergence, torch_contrast.layer_divergence))
        yield Case("layer_divergence", f"8 x {shape}", "torch", ours, theirs, logits.nbytes + early.nbytes)
        layers = contrast_layers, torch_contrast.contrast_layers
        ours, theirs = (partial(op, logits, early, share=0.1) for op in layers)
        yield Case("contrast", f"8 layers, {shape}", "torch", ours, theirs, 2 * logits.nbytes + early.nbytes)
        pair = contrast, torch_contrast.contrast
        ours, theirs = (partial(op, logits, early[0], 0.5, "ratio", share=0.1) for op in pair)
        yield Case("contrast", shape, "torch", ours, theirs, 3 * logits.nbytes)


def _bitmask_peer() -> tuple[str, Callable[..., Any]]:
    """Where it is installed, what xgrammar does on a GPU."""
    if find_spec("xgrammar") is None:
        return "masked_fill", torch_bitmask.apply_bitmask
    from xgrammar import apply_token_bitmask_inplace

    return "xgrammar", apply_token_bitmask_inplace


def _layers(rows: int, device: torch.device) -> Iterator[Case]:
    """The products of a step, over more weights than the cache holds."""
    normal = partial(torch.randn, device=device, dtype=torch.bfloat16)
    for name, sizes, width in LINEARS:
        hidden, weights = normal(rows, width), [[normal(size, width) for size in sizes] for _ in range(4)]

        def each(op: Callable[..., Any], given: Any = hidden, weights: Any = weights) -> None:
            for own in weights:
                op(given, own)

        ours = partial(each, lambda given, own: linear(given, own, [None] * len(own)))
        theirs = partial(each, lambda given, own: [functional.linear(given, weight) for weight in own])
        if name == "gate, up":
            ours = partial(each, lambda given, own: gated_linear(given, *own))
            theirs = partial(each, lambda given, own: torch_linear.gated_linear(given, *own))
        nbytes = 4 * sum(weight.nbytes for weight in weights[0])
        yield Case("linear", f"{rows} x {width} to {name}", "torch", ours, theirs, nbytes)


def _shared_prefix(rows: int, length: int, device: torch.device) -> Case:
    """Rows that share all their blocks; the peer is the same with blocks of each row's own."""
    shared, apart = _attention(rows, length, device), _attention(rows, length, device)
    query, keys, values, table, *rest = shared.ours.args  # type: ignore[attr-defined]
    common = table[:1].expand(rows, -1).contiguous()
    parts = plan_attention(query, keys, values, common, *rest, block_size=BLOCK_SIZE)
    options = {**shared.ours.keywords, "parts": parts}  # type: ignore[attr-defined]
    ours = partial(paged_attention, query, keys, values, common, *rest, **options)
    return Case("paged_attention", f"{rows} x {length} shared", "apart", ours, apart.ours, shared.nbytes // rows)


def _quantized(rows: int, length: int, kind: str, device: torch.device) -> Case:
    """Blocks that are quantized but for each row's last; the peer is the same kernel over blocks in full precision."""
    full = _attention(rows, length, device)
    query, keys, values, table, *rest = full.ours.args  # type: ignore[attr-defined]
    store = QuantizedStore(table.numel(), BLOCK_SIZE, keys[:1], values[:1], kind)
    for blocks in table:
        slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten().to(device)
        store.write(slots, keys[slots], values[slots])
        store.seal(blocks[:-1])
    ours = partial(paged_attention, query, store.keys, store.values, table, *rest, **full.ours.keywords)  # type: ignore[attr-defined]
    return Case("paged_attention", f"{rows} x {length} {kind}", "in full", ours, full.ours, store.nbytes)


def _attention(rows: int, length: int, device: torch.device) -> Case:
    """A query a row over blocks in disorder; the peer has K/V in order."""
    normal = partial(torch.randn, device=device, dtype=torch.bfloat16)
    query, stored = normal(rows, HEADS, WIDTH), normal(2, KV_HEADS, rows * length, WIDTH)
    keys, values = stored.transpose(1, 2)
    table = torch.randperm(rows * length // BLOCK_SIZE).view(rows, -1)
    tables = table, torch.full((rows,), length), torch.arange(rows + 1)
    parts = plan_attention(query, keys, values, *tables, block_size=BLOCK_SIZE)
    ours = partial(
        paged_attention,
        *(query, keys, values, *tables),
        block_size=BLOCK_SIZE,
        scale=WIDTH**-0.5,
        parts=parts,
    )
    ordered_keys, ordered_values = stored.view(2, rows, KV_HEADS, length, WIDTH)

    def theirs() -> Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            return scaled_dot_product_attention(query.unsqueeze(2), ordered_keys, ordered_values, enable_gqa=True)

    return Case("paged_attention", f"{rows} x {length}", "SDPA", ours, theirs, stored.nbytes)
