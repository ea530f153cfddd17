import json

import pytest
import torch

from decodekit.bench import load_suite
from decodekit.bench.decode import random_model
from decodekit.core.errors import InputError
from decodekit.testing import tiny_model


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
def test_without_a_gpu_it_says_what_it_needs() -> None:
    with pytest.raises(InputError, match="'decode' needs an NVIDIA GPU and Triton"):
        load_suite("decode").run(None, None, [], lambda status: None)


def test_a_config_gives_a_model_of_its_shape_with_random_weights(tmp_path) -> None:
    config = tiny_model("dense").config
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    suite = load_suite("decode")
    [read] = suite.reads(tmp_path / "config.json", None)
    assert not suite.needs_model([read])
    assert suite.needs_model(suite.reads(None, 1))
    model = random_model(read, torch.device("cpu"))
    assert model.dtype == torch.bfloat16
    assert model.config.num_hidden_layers == config.num_hidden_layers
    assert float(model.lm_head.weight.detach().float().std()) > 0


def test_without_a_config_prompts_are_read() -> None:
    assert all(isinstance(prompt, str) for prompt in load_suite("decode").reads(None, 2))
