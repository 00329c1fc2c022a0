"""Batches for Hugging Face models: dicts of tensors with labels, from text, images or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from theodolite.cli.sources import text as tokens
from theodolite.cli.sources.batches import in_batches, is_one_batch, top_label
from theodolite.cli.sources.datasets import Source
from theodolite.cli.sources.hugging_face import HuggingFaceModel, quiet
from theodolite.cli.sources.words import reason

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
# Families that count positions from behind the padding token.
OFFSET_POSITIONS = ("roberta", "camembert", "longformer", "mpnet", "esm", "ibert", "data2vec-text", "xmod")
SAMPLES = 16
IMAGE_SIDE = 64  # where a configuration names no size


class HuggingData:
    """Makes the batches of one model; collects notes on the way."""

    def __init__(self, loaded: HuggingFaceModel, samples: int | None, seed: int) -> None:
        self.loaded, self.samples, self.seed = loaded, samples, seed
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
        context = getattr(self.words, "max_position_embeddings", None) or tokens.LENGTH
        if any(family in self.config.model_type for family in OFFSET_POSITIONS):
            context -= (self.words.pad_token_id or 0) + 1
        return max(2, min(int(context), tokens.LENGTH))

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
            from transformers import AutoTokenizer

            try:
                with quiet():
                    self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
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
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {reason(error)}.") from error
    return content if isinstance(content, dict) else {}
