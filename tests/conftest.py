import os

import pytest
import torch
from hypothesis import settings

# Read when triton is imported, as transformers does: without a GPU the kernels are interpreted.
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

from decodekit.integrations.models import load_model
from decodekit.testing import tiny_model, tiny_tokenizer

# One thread, also in the processes that tests start: the models are tiny, and threads that wait for each other cost more than
# they bring, beside other workers ten times as much.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# The same examples every time, so that a run says the same of the same code; new ones: --hypothesis-profile=default.
settings.register_profile("repeated", deadline=None, derandomize=True, database=None)
settings.load_profile("repeated")


@pytest.fixture(scope="session")
def demo():
    """The demo model and its tokenizer; downloaded once, then read from the cache folder."""
    return load_model(None)


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="session", params=["dense", "sliding", "hybrid"])
def model(request):
    """A tiny model of each family, in float64."""
    return tiny_model(request.param, dtype=torch.float64)


@pytest.fixture(scope="session")
def dense():
    return tiny_model("dense", dtype=torch.float64)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A saved tiny model with its tokenizer, for commands that load one."""
    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_model("dense").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
