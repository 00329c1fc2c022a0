"""`hf:FOLDER`: a Hugging Face model as it lies on disk. Nothing is downloaded and no code of the folder is run."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from theodolite import data as data_sets
from theodolite.cli.sources.text import Encode
from theodolite.cli.sources.words import listed, reason
from theodolite.models.initialisation import seeded
from theodolite.models.pretrained import load_weights

STORIES = "stories260k"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# Task -> the table of transformers that lists its classes; the first one that has a family gives its head.
TABLES = {
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "images": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "classes": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}


@dataclass(frozen=True)
class HuggingFaceModel:
    """A model that returns its loss, what it is for, its tokenizer if that is known, and what the user should know."""

    model: nn.Module
    task: str
    name: str
    folder: Path | None = None
    encode: Encode | None = None
    weights: str = ""
    notes: tuple[str, ...] = ()


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own warnings, reports and bars; all settings are put back."""
    from transformers.utils import logging

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


def transformers() -> Any:
    """The library, or one line that says how to get it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformers as library
    except ImportError as error:
        raise ValueError(f"hf: needs transformers ({reason(error)}): pip install 'theodolite[hf]'") from error
    return library


def load_folder(word: str, seed: int) -> HuggingFaceModel:
    """The model of `hf:FOLDER`; `hf:stories260k` is the stored Llama where no such folder exists."""
    place = word.removeprefix("hf:")
    if not place:
        raise ValueError("--model hf: must be followed by a folder, as in hf:path/to/model.")
    path = Path(place).expanduser()
    if not (path / "config.json").is_file():
        folder = _stories_folder(path)
        if folder is not None or place == STORIES:
            return _stories(folder)
        if not path.is_dir():
            raise FileNotFoundError(
                f"--model {word!r}: there is no folder {path}. Nothing is downloaded: name a folder made by save_pretrained."
            )
        raise FileNotFoundError(f"--model {word!r}: {path} holds no config.json. Name a folder made by save_pretrained.")
    return _from_folder(path, seed)


def task_of(class_name: str) -> str | None:
    """What a class of transformers is for; None where it has no head whose loss needs only labels."""
    for task, names in _tables().items():
        if any(class_name in names_of for names_of in names.values()):
            return task
    return None


def _tables() -> dict[str, dict[str, tuple[str, ...]]]:
    from transformers.models.auto import modeling_auto

    def flat(table: Any) -> dict[str, tuple[str, ...]]:
        return {family: (names,) if isinstance(names, str) else tuple(names) for family, names in table.items()}

    return {task: flat(getattr(modeling_auto, name)) for task, name in TABLES.items()}


def _from_folder(path: Path, seed: int) -> HuggingFaceModel:
    library = transformers()
    with quiet(), seeded(seed):
        try:
            config = library.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises many kinds
            raise ValueError(f"--model hf:{path}: the configuration could not be read: {reason(error)}") from error
        kind, task, notes = _choose(library, config, path)
        found = next((name for name in WEIGHTS if (path / name).is_file()), None)
        try:
            if found is None:
                model = kind(config).eval()
                notes = (*notes, "weights are random: the folder holds only a configuration")
                weights = f"random, seed {seed}"
            else:
                model, info = kind.from_pretrained(path, local_files_only=True, output_loading_info=True)
                notes = (*notes, *_loading_notes(info, type(model).__name__))
                weights = str(path / found)
            _ = getattr(model, "loss_function", None)  # transformers may warn about it once: now, while it is quiet
        except Exception as error:  # a damaged file, sizes that do not fit, a missing package
            raise ValueError(f"--model hf:{path}: {kind.__name__} could not be built: {reason(error)}") from error
    name = path.resolve().name
    return HuggingFaceModel(model, task, name, path, weights=weights, notes=notes)


def _choose(library: Any, config: Any, path: Path) -> tuple[Any, str, tuple[str, ...]]:
    """The class, its task, and a note where it is not the one the configuration names."""
    named = (config.architectures or [None])[0]
    if named is not None:
        kind, task = getattr(library, named, None), task_of(named)
        if kind is not None and task is not None and _takes_labels(kind):
            return kind, task, ()
    tables = _tables()
    order = list(tables)
    if getattr(config, "is_decoder", False):  # an encoder's layers used as a decoder
        order.remove("masked")
    if not getattr(config, "is_encoder_decoder", False):
        order.remove("seq2seq")
    for task in order:
        for name in tables[task].get(config.model_type, ()):
            kind = getattr(library, name, None)
            if kind is not None and _takes_labels(kind):
                why = "the configuration names no architecture" if named is None else f"{named} returns no loss of its own"
                return kind, task, (f"{why}, so the model is a {name}",)
    raise ValueError(
        f"--model hf:{path}: transformers has no model of the family {config.model_type!r} that returns a loss for text or "
        "images. Write a function that returns a dict with model, loss and data, and name it as module:attribute."
    )


def _takes_labels(kind: Any) -> bool:
    return "labels" in inspect.signature(kind.forward).parameters


def _loading_notes(info: dict[str, Any], kind: str) -> tuple[str, ...]:
    """What the folder's weights did not give, and what of them was not used."""
    notes = []
    for key, text in (
        ("missing_keys", f"the folder has no weights for this part of {kind}, which is therefore fresh (random): "),
        ("unexpected_keys", f"weights of the folder that {kind} does not have were left out: "),
    ):
        names = sorted(info.get(key) or ())
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            notes.append(text + listed(names[:3]) + more)
    return tuple(notes)


# The stored Llama of stories260k ------------------------------------------------------------------------------------


def _stories_folder(path: Path) -> Path | None:
    """The folder with stories260k.json and stories260k.npz that a path means: the folder, or a file with or without ending."""
    candidates = [path] if path.is_dir() else []
    if path.name.removesuffix(".json").removesuffix(".npz") == STORIES:
        candidates.append(path.parent)
    for folder in candidates:
        if all((folder / f"{STORIES}{ending}").is_file() for ending in (".json", ".npz")):
            return folder
    return None


def _stories(folder: Path | None) -> HuggingFaceModel:
    library = transformers()
    weights, sizes = data_sets.weights(STORIES, folder=folder), data_sets.stories260k_config(folder=folder)
    tokenizer = data_sets.stories260k_tokenizer(folder=folder)
    rotary = {"rope_type": "default", "rope_theta": sizes.pop("rope_theta")}
    with quiet(), seeded(0):  # all weights are replaced: the seed is of no account
        model = library.LlamaForCausalLM(library.LlamaConfig(**sizes, rope_parameters=rotary))
        model.tie_weights()
        load_weights(model, weights)
    origin = data_sets.where(STORIES, folder=folder).origin
    return HuggingFaceModel(
        model.eval(), "causal", STORIES, None, lambda text: tokenizer.encode(text, begin=False).tolist(), origin
    )
