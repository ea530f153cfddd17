import pytest
import torch

from decodekit.bench import load_suite
from decodekit.core.errors import InputError


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
def test_without_a_gpu_it_says_what_it_needs() -> None:
    with pytest.raises(InputError, match="'kernels' needs an NVIDIA GPU and Triton"):
        load_suite("kernels").run(None, None, [], lambda status: None)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_kernel_has_a_peer() -> None:
    rows = load_suite("kernels").run(None, None, [], lambda status: None)
    assert {row["kernel"] for row in rows} == {
        "paged_attention", "linear", "kv_write", "block_copy", "sample", "top_token", "apply_bitmask", "layer_divergence",
        "contrast", "repetition_penalty",
        "gated_delta", "chunked_gated_delta", "selective_state_step", "conv_step",
    }  # fmt: skip
    assert all(row["ratio"] == row["ms"] / row["peer_ms"] > 0 for row in rows)
