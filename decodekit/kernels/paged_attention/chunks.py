"""The chunks of keys that the attention kernel reads: where they lie, and quantized ones dequantized in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bounds(split, size, lowest, highest_key, BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr):
    """Where the steps over a split begin, its first key and where it stops."""
    start = tl.maximum(split, lowest)
    begin = start
    if KIND is not None:
        # Whole blocks are read, which share their scales.
        begin = start - start % BLOCK_SIZE
    return begin, start, tl.minimum(split + size, highest_key)


@triton.jit
def load_blocks(table, places, begin, stop, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, KIND: tl.constexpr):
    """The block of each of the next keys; of quantized ones each block, and where it lies among those that are not."""
    step: tl.constexpr = 1 if KIND is None else BLOCK_SIZE
    token = begin + tl.arange(0, KEYS // step) * step
    block = tl.load(table + token // BLOCK_SIZE, mask=token < stop, other=0)
    spot = block
    if KIND is not None:
        spot = tl.load(places + block, mask=token < stop, other=-1)
    return block, spot


@triton.jit
def load_quantized(
    codes,
    scales,
    pool,
    block,
    spot,
    there,
    head,
    heads,
    stride_h,
    STRIDE_S: tl.constexpr,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BYTES: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """[C * SIZE, BLOCK_D] numbers of C blocks of one head, 0 where there is none; see ``QuantizedKV``.

    ``block`` [C] and ``spot`` [C] say where they lie, ``there`` [C, SIZE] which tokens to read.
    """
    dim, offset = tl.arange(0, BLOCK_D), tl.arange(0, SIZE)
    wanted = there[:, :, None] & (dim < D)[None, None, :]
    slot = block.to(tl.int64)[:, None] * SIZE + offset[None, :]
    sealed = spot < 0
    packed = codes + slot[:, :, None] * STRIDE_S + head * stride_h + (dim % BYTES)[None, None, :]
    code = tl.load(packed, mask=wanted & sealed[:, None, None], other=0)
    levels: tl.constexpr = 1 if KIND == "fp8" else 2
    width: tl.constexpr = D if BY_CHANNEL else 1
    if BY_CHANNEL:
        scale = scales + ((block.to(tl.int64) * levels * heads + head) * width)[:, None, None] + dim[None, None, :]
        scaled = ((tl.max(there.to(tl.int32), 1) > 0) & sealed)[:, None, None] & (dim < D)[None, None, :]
    else:
        scale = scales + ((slot * levels * heads + head) * width)[:, :, None]
        scaled = (there & sealed[:, None])[:, :, None]
    if KIND == "fp8":
        number = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        number *= tl.load(scale, mask=scaled, other=0.0).to(tl.float32)
        # Rounding up to 4 bits may pass the largest number of the dtype; NaN stays.
        number = tl.where(number > LARGEST, LARGEST, tl.where(number < -LARGEST, -LARGEST, number))
    else:
        bits: tl.constexpr = 8 if KIND == "int8" else (4 if KIND == "int4" else 2)
        if bits < 8:
            code = (code >> (dim // BYTES * bits).to(tl.uint8)[None, None, :]) & (2**bits - 1)
        share = code.to(tl.float32) * (1.0 / (2**bits - 1))
        low = tl.load(scale, mask=scaled, other=0.0).to(tl.float32)
        high = tl.load(scale + heads * width, mask=scaled, other=0.0).to(tl.float32)
        number = (1.0 - share) * low + share * high
    number = number.to(pool.dtype.element_ty)
    if tl.max(spot, 0) >= 0:
        own = spot.to(tl.int64)[:, None] * SIZE + offset[None, :]
        kept = tl.load(
            pool + (own * heads + head)[:, :, None] * D + dim[None, None, :],
            mask=wanted & (spot >= 0)[:, None, None],
            other=0.0,
        )
        number = tl.where(sealed[:, None, None], number, kept)
    return tl.reshape(number, [block.shape[0] * SIZE, BLOCK_D])
