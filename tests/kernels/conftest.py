import pytest
import torch


@pytest.fixture
def device():
    """Where Triton kernels run here: on a GPU, or interpreted."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def unwritten(monkeypatch):
    """New floating tensors are full of NaN, so that an element that a kernel does not write shows."""
    new_empty = torch.Tensor.new_empty

    def poisoned(self, *arguments, **options):
        tensor = new_empty(self, *arguments, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
