"""The tokenizer of stories260k: its rule, on a small vocabulary and against the plain version of itself."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from theodolite import data

SPECIAL = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{i:02X}>" for i in range(256))]


def tokenizer(**scores):
    """Blank and letters a to e, and the given pieces with `_` for a blank."""
    pieces = [*SPECIAL, " ", *"abcde", *(piece.replace("_", " ") for piece in scores)]
    return data.Tokenizer(pieces, [*[0.0] * (len(pieces) - len(scores)), *scores.values()])


def plain(tok, text):
    """The rule as written: join the best pair, from the left, until none is left."""
    tokens = tok._single(" " + text)
    while True:
        best = None
        for i in range(len(tokens) - 1):
            joined = tok._index.get(tok.pieces[tokens[i]] + tok.pieces[tokens[i + 1]])
            if joined is not None and (best is None or tok.scores[joined] > tok.scores[best[1]]):
                best = i, joined
        if best is None:
            return tokens
        tokens[best[0] : best[0] + 2] = [best[1]]


def test_the_best_pair_goes_first():
    tok = tokenizer(ab=-1, bc=-2, abc=-3, _a=-4)
    names = [tok.pieces[t] for t in tok.encode("abcbc")]
    assert names == ["\n<s>\n", " ", "abc", "bc"]
    assert [tok.pieces[t] for t in tok.encode("aab", begin=False)] == [" a", "ab"]


def test_equal_scores_go_from_the_left():
    tok = tokenizer(aa=-1)
    assert [tok.pieces[t] for t in tok.encode("aaa", begin=False)] == [" ", "aa", "a"]


def test_unknown_characters_become_bytes_and_come_back():
    tok = tokenizer(ab=-1)
    tokens = tok.encode("é", begin=False).tolist()
    assert tokens[1:] == [0xC3 + 3, 0xA9 + 3]
    for text in ("é", "abba 日本 ", "  a", "", "a\nb"):
        assert tok.decode(tok.encode(text)) == text
    assert tok.encode("").tolist() == [1]
    assert tok.decode(tok.encode("ab", begin=False)) == " ab"
    assert tok.decode([1, *tok.encode("ab", begin=False).tolist(), 2]) == "ab"


def test_the_fast_way_equals_the_plain_one():
    draw = random.Random(0)
    for _ in range(60):
        pieces = {"".join(draw.choices("abcde_", k=draw.randint(2, 4))): float(-draw.randint(0, 5)) for _ in range(25)}
        tok = tokenizer(**pieces)
        text = "".join(draw.choices("abcde é", k=40))
        assert tok.encode(text, begin=False).tolist() == plain(tok, text)


def test_config_and_tokenizer_from_the_file(tmp_path):
    np.savez(tmp_path / "stories260k.npz", w=np.ones(2))
    tok = tokenizer(ab=-1)
    document = {"config": {"vocab_size": len(tok)}, "tokens": list(zip(tok.pieces, tok.scores, strict=True))}
    path = tmp_path / "stories260k.json"
    path.write_text(json.dumps(document))
    assert data.stories260k_config(folder=tmp_path) == {"vocab_size": len(tok)}
    assert data.stories260k_tokenizer(folder=tmp_path).pieces == tok.pieces
    document["tokens"].pop()
    for content in (json.dumps(document), "{", "[]", '{"config": {}}', '{"config": {"vocab_size": 1}, "tokens": [["a"]]}'):
        path.write_text(content)
        with pytest.raises(data.DamagedDataError, match=r"stories260k\.json is damaged: it is not JSON with config and tokens"):
            data.stories260k_tokenizer(folder=tmp_path)
    with pytest.raises(ValueError, match="equally long"):
        data.Tokenizer(["a"], [])
