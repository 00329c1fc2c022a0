"""Models of Hugging Face from a folder, data made for them, and such models as functions of one tensor."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite import data as data_sets
from theodolite.cli.loading import text as tokens
from theodolite.cli.loading.batches import LABELS, in_batches, is_one_batch, raw_batches, top_label
from theodolite.cli.loading.datasets import STORIES, Source
from theodolite.cli.loading.losses import cross_entropy_for
from theodolite.cli.loading.module_attribute import reason
from theodolite.cli.loading.text import Encode
from theodolite.models.initialisation import seeded
from theodolite.models.pretrained import load_weights, quiet, refuse_code
from theodolite.problem.calling import main_output
from theodolite.text import listed

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# Task -> the table of transformers that lists its classes; the first one that has a family gives its head.
TABLES = {
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "images": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "classes": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
# Families that count positions from behind the padding token.
OFFSET_POSITIONS = ("roberta", "camembert", "longformer", "mpnet", "esm", "ibert", "data2vec-text", "xmod")
SAMPLES = 16
IMAGE_SIDE = 64  # where a configuration names no size


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


def transformers() -> Any:
    """The library, or one line that says how to get it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformers as library
    except ImportError as error:
        raise ValueError(f"hf: needs transformers ({reason(error)}): pip install 'theodolite[hf]'") from error
    return library


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder; whatever transformers raises comes through."""
    refuse_code(folder)
    with quiet():
        return transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


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
    return next((task for task, table in _tables().items() if any(class_name in names for names in table.values())), None)


def _tables() -> dict[str, dict[str, tuple[str, ...]]]:
    from transformers.models.auto import modeling_auto

    def flat(table: Any) -> dict[str, tuple[str, ...]]:
        return {family: (names,) if isinstance(names, str) else tuple(names) for family, names in table.items()}

    return {task: flat(getattr(modeling_auto, name)) for task, name in TABLES.items()}


def _from_folder(path: Path, seed: int) -> HuggingFaceModel:
    library = transformers()
    refuse_code(path)
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
            notes.append(text + listed(names, 3))
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


class HuggingData:
    """Makes the batches of one model; collects notes on the way."""

    def __init__(self, loaded: HuggingFaceModel, samples: int | None, seed: int, context: int = tokens.LENGTH) -> None:
        self.loaded, self.samples, self.seed, self.context = loaded, samples, seed, context
        config: Any = loaded.model.config
        self.config = config
        self.words: Any = config.get_text_config()
        self.notes: list[str] = []
        self._tokenizer: Any = None

    def batches(self, source: Source | None) -> tuple[Any, int | None]:
        """What `Problem` gets, and how many samples there are in all where these are a part."""
        if source is not None and source.own:
            return source.content, source.population
        batch: dict[str, Tensor]
        if self.loaded.task == "images":
            batch, population = self._images(source)
        elif source is not None and source.content is not None:
            batch, population = self._given_ids(source), source.population
        elif self.loaded.task == "classes":
            batch, population = self._labelled_text(source)
        else:
            ids, population = self._ids(source)
            batch = {"causal": self._causal, "masked": self._masked, "seq2seq": self._seq2seq}[self.loaded.task](ids)
        if self.loaded.task == "classes" and self.words.pad_token_id is None:
            self.notes.append("sequences come one by one, because the model has no padding token")
            return in_batches(batch, 1), population
        return [batch], population

    # Tokens

    @property
    def length(self) -> int:
        context = getattr(self.words, "max_position_embeddings", None) or self.context
        if any(family in self.config.model_type for family in OFFSET_POSITIONS):
            context -= (self.words.pad_token_id or 0) + 1
        return max(2, min(int(context), self.context))

    def _ids(self, source: Source | None) -> tuple[Tensor, int | None]:
        if source is None:
            return self._random_ids(), None
        if source.text is None:
            raise ValueError(
                f"--data {source.name} holds no running text, which {type(self.loaded.model).__name__} needs: name a text "
                "data set (wikitext2, tinyshakespeare, tinystories_sample), a .txt file, or module:attribute."
            )
        count = self.samples or tokens.TEXT_SEQUENCES
        with quiet():
            ids, population = tokens.sequences(source.text.train, self._encoder(), self.length, count, source.name)
        self._check_range(ids)
        return ids, population

    def _given_ids(self, source: Source) -> dict[str, Tensor]:
        """Tokens and labels from a file."""
        ids, labels = source.content
        if ids.is_floating_point() or ids.ndim != 2:
            raise ValueError(
                f"--data {source.name} holds neither text nor integer tokens (sequences, tokens), which "
                f"{type(self.loaded.model).__name__} needs. Text: wikitext2, tinyshakespeare, tinystories_sample, or a .txt file."
            )
        self._check_range(ids)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    def _random_ids(self) -> Tensor:
        self.notes.append("the data are random tokens, because no --data was given")
        special = [getattr(self.words, f"{name}_token_id", None) for name in ("pad", "bos", "eos")]
        flat = [i for s in special for i in (s if isinstance(s, list | tuple) else [s])]
        count = self.samples or tokens.RANDOM_SEQUENCES
        avoid = (*flat, self._mask_token() if self.loaded.task == "masked" else None)
        return tokens.random_tokens(self.words.vocab_size, count, self.length, self.seed, avoid)

    def _causal(self, ids: Tensor) -> dict[str, Tensor]:
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    def _masked(self, ids: Tensor) -> dict[str, Tensor]:
        hidden, labels = tokens.masked(ids, self._mask_token(), self.seed)
        return {"input_ids": hidden, "attention_mask": torch.ones_like(ids), "labels": labels}

    def _seq2seq(self, ids: Tensor) -> dict[str, Tensor]:
        """The first half of each row goes in, the second is to come out."""
        half = max(1, ids.shape[1] // 2)
        first, second = ids[:, :half].contiguous(), ids[:, half:].contiguous()
        # Given here, because some families know the token they begin with only in their generation settings.
        begun = torch.cat([torch.full_like(second[:, :1], self._start_token()), second[:, :-1]], dim=1)
        return {"input_ids": first, "attention_mask": torch.ones_like(first), "decoder_input_ids": begun, "labels": second}

    def _start_token(self) -> int:
        places = (self.config, getattr(self.loaded.model, "generation_config", None))
        known = [getattr(place, "decoder_start_token_id", None) for place in places]
        return int(next((k for k in (*known, self.words.pad_token_id) if k is not None), 0))

    def _mask_token(self) -> int:
        """The token that hides another: the configuration's, the tokenizer's, or else the last one."""
        known = getattr(self.words, "mask_token_id", None)
        if known is None and (tokenizer := self._read_tokenizer()) is not None:
            known = getattr(tokenizer, "mask_token_id", None)
        return int(known) if known is not None and known < self.words.vocab_size else int(self.words.vocab_size) - 1

    def _encoder(self) -> tokens.Encode:
        if self.loaded.encode is not None:
            return self.loaded.encode
        tokenizer = self._read_tokenizer()
        if tokenizer is None:
            self.notes.append("tokens are bytes modulo the vocabulary, because no usable tokenizer lies with the model")
            return tokens.byte_encoder(int(self.words.vocab_size))
        encode: Callable[[str], list[int]] = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
        return encode

    def _read_tokenizer(self) -> Any:
        folder = self.loaded.folder
        if self._tokenizer is None and folder is not None and any((folder / name).is_file() for name in TOKENIZER_FILES):
            try:
                self._tokenizer = read_tokenizer(folder)
            except Exception as error:  # a missing package, a foreign file
                note = f"the folder's tokenizer could not be used: {reason(error)}"
                self.notes += [note] if note not in self.notes else []
        return self._tokenizer

    def _check_range(self, ids: Tensor) -> None:
        top, size = int(ids.max()), int(self.words.vocab_size)
        if top >= size:
            raise ValueError(
                f"The data have token {top}, but the vocabulary of the model ends at {size - 1}: they do not belong together."
            )

    # Labels

    def _labelled_text(self, source: Source | None) -> tuple[dict[str, Tensor], int | None]:
        if source is None:
            ids = self._random_ids()
            self.notes.append("the labels are random too")
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": self._random_labels(len(ids))}, None
        if source.documents is None:
            raise ValueError(
                f"--data {source.name} has no labelled texts, which a classifier needs: name ag_news, or module:attribute."
            )
        everything = len(source.documents.x_train)
        self._check_classes(len(source.documents.classes), source.name)
        count = min(self.samples or SAMPLES, everything)
        chosen = torch.randperm(everything, generator=torch.Generator().manual_seed(self.seed))[:count].sort().values
        with quiet():
            encode = self._encoder()
            rows = [list(encode(source.documents.x_train[int(i)]))[: self.length] for i in chosen]
        pad = self.words.pad_token_id or 0
        ids = torch.tensor([row + [pad] * (self.length - len(row)) for row in rows])
        seen = torch.tensor([[1] * len(row) + [0] * (self.length - len(row)) for row in rows])
        self._check_range(ids)
        labels = source.documents.y_train[chosen]
        return {"input_ids": ids, "attention_mask": seen, "labels": labels}, everything if count < everything else None

    def _random_labels(self, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        if self.config.num_labels == 1:  # transformers then fits a number
            return torch.randn(count, generator=generator)
        return torch.randint(self.config.num_labels, (count,), generator=generator)

    def _check_classes(self, classes: int, name: str) -> None:
        if classes > self.config.num_labels:
            raise ValueError(
                f"--data {name} has {classes} classes, but the model has num_labels={self.config.num_labels}. "
                "Take a data set with fewer classes, or a model with as many labels."
            )

    # Images

    def _images(self, source: Source | None) -> tuple[dict[str, Tensor], int | None]:
        side = getattr(self.config, "image_size", None) or IMAGE_SIDE
        size = (side, side) if isinstance(side, int) else tuple(side)
        channels = int(getattr(self.config, "num_channels", 3))
        if source is None:
            self.notes.append("the data are random images, because no --data was given")
            count = self.samples or tokens.RANDOM_SEQUENCES
            pixels = torch.randn(count, channels, *size, generator=torch.Generator().manual_seed(self.seed))
            return {"pixel_values": pixels, "labels": self._random_labels(count)}, None
        if source.content is None or not is_one_batch(source.content) or source.content[0].ndim != 4:
            raise ValueError(f"--data {source.name} holds no images (channels, height, width), which the model needs.")
        x, y = source.content
        self._check_classes(source.classes or top_label(source.content) + 1, source.name)
        if x.shape[1] != channels:
            if x.shape[1] != 1:
                raise ValueError(f"--data {source.name} has {x.shape[1]} channels, the model {channels}.")
            x = x.expand(-1, channels, -1, -1)
        if tuple(x.shape[2:]) != size:
            before = "×".join(map(str, x.shape[2:]))
            x = F.interpolate(x, size=size, mode="bilinear", antialias=True)
            self.notes.append(f"the images were resized from {before} to {'×'.join(map(str, size))} pixels")
        return {"pixel_values": self._normalised(x.contiguous()), "labels": y}, source.population

    def _normalised(self, x: Tensor) -> Tensor:
        """Less the mean, over the deviation that the folder's image processor names."""
        path = None if self.loaded.folder is None else self.loaded.folder / "preprocessor_config.json"
        settings = _read_json(path)
        mean, std = (settings.get(key) for key in ("image_mean", "image_std"))
        if not settings.get("do_normalize", True) or not mean or not std or len(mean) != x.shape[1]:
            return x
        self.notes.append("the images were normalised as the folder's preprocessor_config.json says")
        return (x - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


def _read_json(path: Path | None) -> dict[str, Any]:
    if path is None or not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {reason(error)}.") from error
    return content if isinstance(content, dict) else {}


class OneTensor(nn.Module):
    """The model on its inputs side by side in one tensor, `widths` columns of each; `shift` drops the last token's output."""

    def __init__(self, model: nn.Module, keys: tuple[str, ...], widths: tuple[int, ...], *, shift: bool) -> None:
        super().__init__()
        self.model, self.keys, self.widths, self.shift = model, keys, widths, shift

    def forward(self, inputs: Tensor) -> Tensor:
        parts = [inputs] if len(self.keys) == 1 else list(inputs.split(self.widths, dim=1))
        found = main_output(self.model(**dict(zip(self.keys, parts, strict=True))))
        return found[:, :-1] if self.shift else found


def as_one_tensor(model: nn.Module, data: Any) -> tuple[Any, Any, tuple[Tensor, Tensor]]:
    """A wrapper for such models, their loss, and the data as `(inputs, targets)`.

    A mask that hides nothing is left out.
    """
    task = task_of(type(model).__name__)
    batches = list(raw_batches(data))
    if task is None or not batches or not all(isinstance(batch, Mapping) and LABELS in batch for batch in batches):
        raise ValueError(
            f"{type(model).__name__} computes its own loss, so that of a single example is not known. Name one with --loss, or a "
            "model of transformers for text or images, on data with labels."
        )
    joined = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    targets = joined.pop(LABELS)
    joined = {key: t for key, t in joined.items() if key != "attention_mask" or not bool((t == 1).all())}
    keys, widths = tuple(joined), tuple(t.shape[1] for t in joined.values())
    shift = task == "causal"
    inputs = next(iter(joined.values())) if len(keys) == 1 else torch.cat(list(joined.values()), dim=1)
    targets = targets[:, 1:].contiguous() if shift else targets
    loss: Any = nn.MSELoss() if targets.is_floating_point() else cross_entropy_for(targets)
    if targets.is_floating_point() and targets.ndim == 1:
        targets = targets.unsqueeze(1)
    return lambda fresh: OneTensor(fresh, keys, widths, shift=shift), loss, (inputs, targets)
