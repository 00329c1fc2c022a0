"""`hf:FOLDER`: families, heads, weights or none, tokenizers, images; offline and quiet."""

from __future__ import annotations

import builtins
import json

import pytest
import torch

import theodolite as th
from tests.cli.loading.conftest import one_line
from theodolite.cli.loading.subject import load_subject

transformers = pytest.importorskip("transformers")

from theodolite.cli.loading.hugging_face import quiet  # noqa: E402

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "hidden_size": 16}
WORDS = {"vocab_size": 40, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def config(family: str, **more):
    if family == "gpt2":
        sizes = {
            "n_layer": 1,
            "n_head": 2,
            "n_embd": 8,
            "vocab_size": 40,
            "n_positions": 32,
            "bos_token_id": 1,
            "eos_token_id": 1,
        }
        return transformers.GPT2Config(**sizes, **more)
    if family == "vit":
        return transformers.ViTConfig(**SMALL, image_size=16, patch_size=8, **{"num_labels": 10, **more})
    if family == "t5":
        return transformers.T5Config(d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2, vocab_size=40)
    kind = {"llama": transformers.LlamaConfig, "bert": transformers.BertConfig, "roberta": transformers.RobertaConfig}[family]
    return kind(**SMALL, **{**WORDS, **more})


def save(kind: str, family: str, folder, **more) -> str:
    """A folder made by save_pretrained with weights of the class."""
    with quiet():
        torch.manual_seed(5)
        getattr(transformers, kind)(config(family, **more)).save_pretrained(folder)
    return f"hf:{folder}"


HEADS = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "vit": "ViTForImageClassification",
    "t5": "T5ForConditionalGeneration",
}
BODIES = {"gpt2": "GPT2Model", "llama": "LlamaModel", "bert": "BertModel", "vit": "ViTModel"}


def has_note(subject, *words: str) -> bool:
    return any(all(word in note for word in words) for note in subject.notes)


@pytest.mark.parametrize("family", HEADS)
def test_a_configuration_alone(surveyed, tmp_path, family, capfd):
    config(family).save_pretrained(tmp_path / "m")
    subject = surveyed(f"hf:{tmp_path / 'm'}")
    assert type(subject.model).__name__ == HEADS[family]
    assert subject.loss is None
    assert subject.name.startswith("m on random")
    assert has_note(subject, "weights are random", "configuration")
    assert has_note(subject, "no --data")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("family", HEADS)
def test_weights_of_a_model_with_its_head(surveyed, tmp_path, family):
    word = save(HEADS[family], family, tmp_path)
    subject = surveyed(word)
    assert type(subject.model).__name__ == HEADS[family]
    assert not has_note(subject, "fresh")
    assert not has_note(subject, "weights are random")
    torch.manual_seed(5)
    with quiet():
        expected = getattr(transformers, HEADS[family])(config(family)).state_dict()
    for name, value in subject.model.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("family", BODIES)
def test_weights_of_a_body_get_a_head(surveyed, tmp_path, family, capfd):
    subject = surveyed(save(BODIES[family], family, tmp_path))
    assert type(subject.model).__name__ == HEADS[family]
    assert has_note(subject, BODIES[family], HEADS[family])
    if family != "gpt2":  # whose head is its embedding
        assert has_note(subject, "fresh")
    assert "REPORT" not in "".join(capfd.readouterr())


def test_old_and_sharded_weights(surveyed, tmp_path):
    model = transformers.GPT2LMHeadModel(config("gpt2"))
    config("gpt2", architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path / "old")
    torch.save({k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}, tmp_path / "old" / "pytorch_model.bin")
    with quiet():
        model.save_pretrained(tmp_path / "parts", max_shard_size="4KB")
    assert (tmp_path / "parts" / "model.safetensors.index.json").is_file()
    for folder in ("old", "parts"):
        found = surveyed(f"hf:{tmp_path / folder}").model
        assert torch.equal(found.transformer.wte.weight, model.transformer.wte.weight)


def test_masked_tokens(tmp_path):
    config("bert").save_pretrained(tmp_path)
    (batch,) = load_subject(f"hf:{tmp_path}", None).data
    assert batch["input_ids"].shape == (8, 32)
    hidden = batch["labels"] != -100
    assert (hidden.sum(1) == 5).all()  # 15 % of 32
    assert (batch["input_ids"][hidden] == 39).all()
    assert (batch["input_ids"][~hidden] < 39).all()


def test_classifiers_of_text(surveyed, tmp_path):
    subject = surveyed(save("BertForSequenceClassification", "bert", tmp_path / "b", num_labels=3))
    assert set(subject.data[0]["labels"].tolist()) <= {0, 1, 2}
    subject = surveyed(save("GPT2ForSequenceClassification", "gpt2", tmp_path / "g"))
    assert len(subject.data) == 8
    (tmp_path / "poem.txt").write_text("a rose is a rose " * 50)
    with pytest.raises(ValueError, match="ag_news") as error:
        load_subject(f"hf:{tmp_path / 'b'}", str(tmp_path / "poem.txt"))
    one_line(error)


def test_text_as_bytes_without_a_tokenizer(surveyed, tmp_path):
    config("llama").save_pretrained(tmp_path)
    (tmp_path / "poem.txt").write_text("a rose is a rose is a rose\n" * 100)
    subject = surveyed(f"hf:{tmp_path}", str(tmp_path / "poem.txt"), samples=4, batch_size=2)
    assert [tuple(batch["input_ids"].shape) for batch in subject.data] == [(2, 32), (2, 32)]
    assert has_note(subject, "bytes modulo")
    assert subject.population == 2700 // 32


def test_text_with_the_folders_tokenizer(surveyed, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["[UNK]", "[MASK]", "a", "rose", "is"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config("bert").save_pretrained(tmp_path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", mask_token="[MASK]").save_pretrained(
        tmp_path
    )
    (tmp_path / "poem.txt").write_text("a rose is " * 500)
    subject = surveyed(f"hf:{tmp_path}", str(tmp_path / "poem.txt"), samples=3)
    (batch,) = subject.data
    hidden = batch["labels"] != -100
    assert (batch["input_ids"][hidden] == 1).all()
    assert set(batch["input_ids"][~hidden].tolist()) <= {2, 3, 4}
    assert not has_note(subject, "bytes")


def test_tokens_from_a_file(surveyed, tmp_path):
    config("llama").save_pretrained(tmp_path)
    ids = torch.arange(30).reshape(3, 10)
    torch.save({"x": ids, "y": ids}, tmp_path / "ids.pt")
    assert surveyed(f"hf:{tmp_path}", str(tmp_path / "ids.pt")).data[0]["labels"].shape == (3, 10)
    torch.save({"x": ids + 20, "y": ids}, tmp_path / "large.pt")
    for name, message in ((str(tmp_path / "large.pt"), "ends at 39"), ("digits", "integer tokens")):
        with pytest.raises(ValueError, match=message) as error:
            load_subject(f"hf:{tmp_path}", name)
        one_line(error)


def test_images_are_fitted_to_the_model(surveyed, tmp_path):
    config("vit").save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    subject = surveyed(f"hf:{tmp_path}", "digits", samples=4)
    (batch,) = subject.data
    assert batch["pixel_values"].shape == (4, 3, 16, 16)
    assert -1 <= float(batch["pixel_values"].min()) < 0
    assert subject.population == 1438
    assert has_note(subject, "resized")
    assert has_note(subject, "normalised")


def test_labels_must_fit(tmp_path):
    config("vit", num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"10 classes.*num_labels=3") as error:
        load_subject(f"hf:{tmp_path}", "digits")
    one_line(error)


def test_own_data_and_own_models(surveyed, here):
    config("gpt2").save_pretrained(here / "m")
    (here / "mine.py").write_text(
        "import torch, transformers\nids = torch.arange(12).reshape(2, 6)\nbatches = [{'input_ids': ids, 'labels': ids}]\n"
        "def net():\n    return transformers.GPT2LMHeadModel(transformers.GPT2Config("
        "n_layer=1, n_head=2, n_embd=8, vocab_size=40, n_positions=32, bos_token_id=1, eos_token_id=1))\n"
    )
    assert len(surveyed("hf:m", "mine:batches").data) == 1
    subject = surveyed("mine:net")
    assert subject.loss is None
    assert has_note(subject, "random tokens")
    assert surveyed("mine:net", "mine:batches").loss is None


def test_losses(surveyed, tmp_path):
    config("gpt2").save_pretrained(tmp_path)
    assert surveyed(f"hf:{tmp_path}", None, "cross-entropy").loss is None
    with pytest.raises(ValueError, match="its own loss") as error:
        load_subject(f"hf:{tmp_path}", None, "mse")
    one_line(error)


def test_a_checkpoint_into_the_model(surveyed, tmp_path):
    config("gpt2").save_pretrained(tmp_path)
    model = transformers.GPT2LMHeadModel(config("gpt2"))
    torch.save({"module." + k: v for k, v in model.state_dict().items()}, tmp_path / "w.pt")
    subject = surveyed(f"hf:{tmp_path}", checkpoint=tmp_path / "w.pt")
    assert torch.equal(subject.model.transformer.wte.weight, model.transformer.wte.weight)
    assert not has_note(subject, "weights are random")


def test_the_stored_llama_by_all_its_names(surveyed, real, here, monkeypatch):
    for word in (f"hf:{real}/stories260k", f"hf:{real}/stories260k.npz", f"hf:{real}/stories260k.json", "hf:stories260k"):
        subject = load_subject(word, "tinystories_sample", samples=8)
        assert type(subject.model).__name__ == "LlamaForCausalLM"
        assert th.Problem(subject.model, subject.loss, subject.data).loss() < 2.5
    assert not subject.notes
    assert has_note(surveyed("hf:stories260k", samples=2), "random tokens")


def test_a_folder_made_from_the_stored_llama(surveyed, real, tmp_path):
    stored = load_subject(f"hf:{real}/stories260k", "tinystories_sample", samples=2)
    with quiet():
        stored.model.save_pretrained(tmp_path / "llama")
    subject = surveyed(f"hf:{tmp_path / 'llama'}", samples=2)
    assert th.Problem(subject.model, None, stored.data).loss() == th.Problem(stored.model, None, stored.data).loss()


def test_bad_folders_are_one_clear_line(tmp_path, no_data):
    (tmp_path / "empty").mkdir()
    for name, text in (("strange", '{"model_type": "nosuch"}'), ("broken", "{"), ("clap", '{"model_type": "timesformer"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    config("gpt2").save_pretrained(tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"cut")
    for word, message in (
        (f"hf:{tmp_path}/nosuch", "Nothing is downloaded"),
        ("hf:openai-community/gpt2", "Nothing is downloaded"),
        ("hf:", "followed by a folder"),
        (f"hf:{tmp_path}/empty", "config.json"),
        (f"hf:{tmp_path}/strange", "could not be read"),
        (f"hf:{tmp_path}/broken", "could not be read"),
        (f"hf:{tmp_path}/clap", "module:attribute"),
        (f"hf:{tmp_path}/cut", "could not be built"),
        ("hf:stories260k", "stories260k"),
    ):
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            load_subject(word, None)
        assert message in one_line(error)


def test_without_transformers_the_extra_is_named(tmp_path, monkeypatch):
    config("gpt2").save_pretrained(tmp_path)
    plain = builtins.__import__

    def refuse(name, *rest, **more):
        if name.split(".")[0] == "transformers":
            raise ImportError("No module named 'transformers'")
        return plain(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ValueError, match=r"theodolite\[hf\]") as error:
        load_subject(f"hf:{tmp_path}", None)
    one_line(error)
