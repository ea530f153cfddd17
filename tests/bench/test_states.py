import sys

import pytest
import torch

from decodekit.bench import states


@pytest.mark.skipif("fla" in sys.modules or torch.cuda.is_available(), reason="the peer may be another there")
def test_ours_and_the_peer_compute_the_same(monkeypatch) -> None:
    for name, size in {"HEADS": 2, "WIDTH": 16, "LENGTH": 130, "MAMBA_HEADS": 2, "CHANNELS": 64}.items():
        monkeypatch.setattr(states, name, size)
    shapes = []
    for case in states.state_cases(torch.device("cpu")):
        shapes.append((case.kernel, case.shape.split()[0]))
        if case.shape.startswith("1 "):  # of several rows ours has the states in disorder
            torch.testing.assert_close(case.ours(), case.theirs(), atol=0, rtol=0)
        assert case.peer == "torch"
    assert shapes == [
        *[("gated_delta", rows) for rows in ("1", "32", "256")],
        ("chunked_gated_delta", "1"),
        *[(kernel, rows) for rows in ("1", "256") for kernel in ("selective_state_step", "conv_step")],
    ]
