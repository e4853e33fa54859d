"""prepare_data.py: what it makes of texts, what it reads, and what it refuses."""
import gzip
import importlib.util
import json
import math
import os
import pickle
import random
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
from tokenizers import Tokenizer

import prepare_data
from conftest import assert_one_line, chinese_text, english_text, run_script, save_tokens
from model import GPTConfig, UserError
from prepare_data import (Tokens, check_ids, documents_of, id_dtype, load_corpus, main, prepare_default, sample_batch,
                          split_last_tenth, train_tokenizer)


def prepare(text, *flags, name="text.txt", encoding="utf-8"):
    with open(name, "w", encoding=encoding, newline="") as f:
        f.write(text)
    main([name, *flags])
    return torch.load("tokens.pt", weights_only=True)


# --- documents ------------------------------------------------------------------------------------------------------

def test_chapters_are_documents_and_the_last_tenth_is_validation():
    stored = prepare(chinese_text(chapters=20))
    assert stored["meta"]["documents"] == {"train": 18, "val": 2}
    assert stored["meta"]["tokenizer"] == "char-bpe"


@pytest.mark.parametrize("heading", ["第一回：", "第一○九回：", "第三十回 ", "第12章\n", "　　第二章 ", "CHAPTER XII\n", "Chapter 7. "])
def test_headings(heading):
    text = "".join(f"{heading}某某\n" + "正文。" * 9 + "\n" for _ in range(3))
    unit, documents = documents_of([text])
    assert unit == "chapters" and len(documents) == 3 and "".join(documents) == text


@pytest.mark.parametrize("line", ["他在第三回合中倒下。", "见第一回：此处不在行首", "第回：", "a chapter 7", "第一百回合"])
def test_what_only_looks_like_a_heading(line):
    assert documents_of([f"甲{line}\n\n乙{line}\n"])[0] == "paragraphs"


def test_a_preface_is_a_document_of_its_own_and_nothing_is_lost():
    text = "序言。\n" + chinese_text(chapters=3)
    unit, documents = documents_of([text])
    assert unit == "chapters" and len(documents) == 4 and "".join(documents) == text


def test_files_then_paragraphs():
    assert documents_of(["one\n\nmore", "two"]) == ("files", ["one\n\nmore", "two"])
    unit, documents = documents_of(["one\nline\n\n  \n\ntwo\n\nthree"])
    assert unit == "paragraphs" and [d.strip() for d in documents] == ["one\nline", "two", "three"]


@pytest.mark.parametrize("n, held_out", [(2, 1), (9, 1), (10, 1), (19, 1), (20, 2), (120, 12)])
def test_the_last_tenth_at_least_one(n, held_out):
    train, val = split_last_tenth(list(range(n)))
    assert val == list(range(n - held_out, n)) and train == list(range(n - held_out))


# --- tokens ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, kind", [(chinese_text(), "char"), (english_text(), "byte"), (english_text(), "char")])
def test_tokens_decode_to_the_text_and_each_document_ends(text, kind):
    stored = prepare(text, "--tokenizer", kind, "--vocab-size", "600")
    tokenizer = Tokenizer.from_file("tokenizer.json")
    eos = tokenizer.token_to_id("<eos>")
    ids = torch.cat((stored["train"], stored["val"])).tolist()
    assert ids.count(eos) == sum(stored["meta"]["documents"].values()) and ids[-1] == eos
    pieces = "".join(tokenizer.id_to_token(i) for i in ids if i != eos) if kind == "char" else tokenizer.decode(ids)
    assert pieces == text
    assert stored["meta"]["vocab_size"] == tokenizer.get_vocab_size() <= 600


def test_bytes_per_token_are_the_texts():
    text = chinese_text()
    stored = prepare(text)
    ratio = stored["meta"]["bytes_per_token"]
    total = sum(ratio[split] * len(stored[split]) for split in ("train", "val"))
    assert total == pytest.approx(len(text.encode()), rel=1e-9)
    corpus = load_corpus()
    assert corpus.bits_per_byte(2.533) == pytest.approx(2.533 / math.log(2) / ratio["val"])


def test_the_chapters_special_tokens_and_boundaries():
    tokenizer = train_tokenizer(["甲乙甲乙，甲乙\n甲乙。" * 50], "char", 50)
    assert (tokenizer.token_to_id("<unk>"), tokenizer.token_to_id("<eos>")) == (0, 1)
    crossing = [t for t in tokenizer.get_vocab() if len(t) > 1 and any(c in t for c in "，。\n") and t not in ("<unk>", "<eos>")]
    assert not crossing


def test_a_special_token_that_a_text_spells_out_is_text():
    stored = prepare("\n\n".join(f"{p} <eos>" for p in english_text().split("\n\n")))
    tokenizer = Tokenizer.from_file("tokenizer.json")
    ids = torch.cat((stored["train"], stored["val"])).tolist()
    assert ids.count(tokenizer.token_to_id("<eos>")) == 40


@pytest.mark.parametrize("vocab_size, dtype", [(256, torch.int16), (32_768, torch.int16), (32_769, torch.int32),
                                               (50_257, torch.int32), (70_000, torch.int32)])
def test_ids_are_stored_wide_enough(vocab_size, dtype):
    assert id_dtype(vocab_size) == dtype
    highest = torch.tensor([vocab_size - 1])
    assert highest.to(id_dtype(vocab_size)).item() == vocab_size - 1


@pytest.mark.parametrize("vocab_size", [50_257, 70_000])
def test_large_vocabularies_are_read_unwrapped(vocab_size):
    stored = save_tokens(vocab_size=vocab_size)
    corpus = load_corpus()
    x, y = sample_batch(corpus.train, 16, 64, torch.Generator().manual_seed(0))
    assert x.dtype == y.dtype == torch.int64 and x.max() > 32_767 and 0 <= x.min()
    assert int(corpus.train.arrays[0].max()) == int(stored["train"].max()) < vocab_size


def test_encodings_line_ends_and_byte_order_marks():
    text = chinese_text()
    expected = prepare(text, name="a.txt")
    for flags, form, encoding in ((("--encoding", "gb18030"), text, "gb18030"), ((), text.replace("\n", "\r\n"), "utf-8"),
                                  ((), text, "utf-8-sig"), (("--encoding", "utf_8"), text, "utf-8-sig"), (("--encoding", "UTF8"), text, "utf-8-sig")):
        stored = prepare(form, *flags, name="b.txt", encoding=encoding)
        assert all(torch.equal(stored[split], expected[split]) for split in ("train", "val"))


def test_batches_are_drawn_as_the_chapter_draws_them():
    save_tokens()
    tokens = load_corpus().train
    train = tokens.arrays[0]
    x, y = sample_batch(tokens, 16, 5, torch.Generator().manual_seed(3))
    starts = torch.randint(0, len(train) - 17, (5,), generator=torch.Generator().manual_seed(3))
    for row, j in enumerate(starts.tolist()):
        assert x[row].tolist() == train[j:j + 16].tolist() and y[row].tolist() == train[j + 1:j + 17].tolist()


# --- the default corpus ---------------------------------------------------------------------------------------------

def test_without_network_pythons_own_sources(capsys):
    stored = prepare_default()
    out = capsys.readouterr().out
    assert "cannot be reached" in out and "python prepare_data.py FILE" in out
    assert stored["meta"]["tokenizer"] == "byte-bpe" and stored["meta"]["vocab_size"] == 8192
    assert stored["meta"]["characters"] > 5e6
    documents = stored["meta"]["documents"]
    assert documents["val"] == sum(documents.values()) // 10


def test_a_script_that_finds_no_tokens_makes_the_default_ones(capsys, monkeypatch):
    parts = [english_text(10, seed=i) for i in range(11)], [english_text(10, seed=11)]
    monkeypatch.setattr(prepare_data, "stdlib_parts", lambda: ("the standard library", "files", *parts))
    corpus = load_corpus()
    assert "making the default one" in capsys.readouterr().out and "standard library" in str(corpus)


def test_a_text_as_bytes_is_its_bytes():
    Path("a.txt").write_text(chinese_text(), encoding="utf-8")
    corpus = prepare_data.byte_corpus([Path("a.txt")], 16)
    whole = bytes(corpus.train.arrays[0]) + b"\n" + bytes(corpus.val.arrays[0])
    assert whole.replace(b"\n\n", b"\n") == chinese_text().encode().replace(b"\n\n", b"\n") and corpus.vocab_size == 256
    assert corpus.bits_per_byte(math.log(256)) == pytest.approx(8.0)
    x, y = corpus.train.windows([0], 16)
    assert x[0].tolist() == list(whole[:16]) and y[0].tolist() == list(whole[1:17])


def test_a_novel_that_is_there_is_used_and_another_text_is_named(capsys):
    (prepare_data.NOVEL_FILE).write_text(chinese_text(), encoding="utf-8")
    assert prepare_default()["meta"]["corpus"] == "sanguo.txt"
    assert "not the text that the chapter measured" in capsys.readouterr().out


def test_what_answers_in_the_novels_place_is_not_taken_for_it(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "login.html").write_text("<html>please log in</html>")
    monkeypatch.setattr(prepare_data, "NOVEL_URL", (tmp_path / "login.html").as_uri())
    with pytest.raises(OSError):
        prepare_data.fetch_novel()
    assert not prepare_data.NOVEL_FILE.exists()
    (tmp_path / "novel.html").write_text(chinese_text(), encoding="utf-8")
    monkeypatch.setattr(prepare_data, "NOVEL_URL", (tmp_path / "novel.html").as_uri())
    assert prepare_default()["meta"]["documents"] == {"train": 18, "val": 2}
    assert prepare_data.NOVEL_FILE.read_text(encoding="utf-8") == chinese_text()
    assert not list(tmp_path.glob("*.part"))


# --- reading and refusing -------------------------------------------------------------------------------------------

def test_an_earlier_chapters_token_file_works_unchanged():
    save_tokens(vocab_size=8192, meta=False)
    corpus = load_corpus(seq_len=128)
    assert corpus.vocab_size == 8192 and corpus.bits_per_byte(6.0) is None and "no meta" in str(corpus)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64])
def test_every_integer_type_is_read(dtype):
    ids = torch.arange(120).to(dtype)
    torch.save({"train": ids, "val": ids}, "tokens.pt")
    x, y = sample_batch(load_corpus(seq_len=16).train, 16, 2, torch.Generator().manual_seed(0))
    assert torch.equal(x + 1, y)


@pytest.mark.parametrize("content", [b"", b"not a token file", b"PK\x03\x04 cut short"])
def test_files_that_are_no_token_files(content):
    with open("tokens.pt", "wb") as f:
        f.write(content)
    with pytest.raises(UserError, match="not a token file"):
        load_corpus()


class Explosive:
    def __reduce__(self):
        return (open, ("executed", "w"))


@pytest.mark.parametrize("write", [lambda x: torch.save({"train": x, "val": x}, "tokens.pt"),
                                   lambda x: pickle.dump(x, open("tokens.pt", "wb")),
                                   lambda x: torch.save({"meta": x}, "tokens.pt", _use_new_zipfile_serialization=False)])
def test_code_in_a_token_file_is_refused_not_run(write, tmp_path):
    write(Explosive())
    with pytest.raises(UserError, match="refused"):
        load_corpus()
    assert not (tmp_path / "executed").exists()


META = {"corpus": "test", "vocab_size": 99, "bytes_per_token": {"train": 4.0, "val": 4.0}}


@pytest.mark.parametrize("stored, words", [
    ({"train": torch.ones(300).short()}, "no train and val"), ([1, 2], "no train and val"),
    ({"train": torch.ones(300), "val": torch.ones(300)}, "not a list of token ids"),
    ({"train": [1] * 300, "val": [1] * 300}, "not a list of token ids"),
    ({"train": torch.ones(30, 10).short(), "val": torch.ones(300).short()}, "not a list of token ids"),
    ({"train": torch.ones(0).short(), "val": torch.ones(300).short()}, "empty"),
    ({"train": torch.ones(300).short(), "val": torch.ones(300).short(), "meta": 7}, "meta"),
    *(({"train": torch.ones(300).short(), "val": torch.ones(300).short(), "meta": {**META, **changed}}, "meta") for changed in (
        {"vocab_size": "many"}, {"vocab_size": None}, {"vocab_size": math.inf}, {"vocab_size": 1e15}, {"vocab_size": 0}, {"vocab_size": True},
        {"vocab_size": torch.tensor(99)}, {"vocab_size": 10 ** 30}, {"corpus": 7}, {"corpus": None}, {"corpus": "two\nlines"}, {"corpus": "\x1b[2J"},
        {"corpus": "half a \udce9"}, {"bytes_per_token": 4.0}, {"bytes_per_token": {"train": 4.0}}, *(
            {"bytes_per_token": {"train": 4.0, "val": ratio}} for ratio in (0, -1.0, math.nan, math.inf, 1e300, "4", None, torch.tensor(4.0))))),
    *(({"train": strange, "val": torch.ones(300).short()}, "not a list of token ids") for strange in (
        torch.ones(300, dtype=torch.complex64), torch.ones(300, dtype=torch.uint64), torch.ones(300, dtype=torch.bool), torch.ones(300).half(),
        torch.ones(300).short().to_sparse(), torch.tensor(3), torch.ones(300, dtype=torch.long, device="meta"),
        torch.ones(1).short().expand(300), "text", None)),
    ({"train": torch.full((300,), -5).short(), "val": torch.ones(300).short()}, "wrap in int16"),
    ({"train": torch.full((300,), 8192).short(), "val": torch.ones(300).short()}, "beyond the vocabulary"),
    ({"train": torch.ones(300).short(), "val": torch.ones(129).short()}, "a context of 128 needs 130")])
def test_token_files_that_do_not_hold_what_they_should(stored, words):
    torch.save(stored, "tokens.pt")
    with pytest.raises(UserError, match=words):
        load_corpus(seq_len=128)


@pytest.mark.filterwarnings("ignore")       # torch advises against making these
@pytest.mark.parametrize("make", [lambda: torch.quantize_per_tensor(torch.ones(300), 0.1, 0, torch.quint8),
                                  lambda: torch.nested.nested_tensor([torch.ones(30), torch.ones(20)])])
def test_tensors_of_other_kinds_are_no_token_ids(make):
    torch.save({"train": make(), "val": torch.ones(300).short()}, "tokens.pt")
    with pytest.raises(UserError, match="not a (list of token ids|token file)"):
        load_corpus()


def test_ids_at_the_vocabulary_are_refused_and_below_it_not():
    check_ids(torch.tensor([0, 96]), 97, "here")
    with pytest.raises(UserError, match="here has the id 97"):
        check_ids(torch.tensor([0, 97]), 97, "here")


def test_one_window_is_the_least_and_is_enough():
    save_tokens(n_train=18, n_val=18)
    corpus = load_corpus(seq_len=16)
    x, y = sample_batch(corpus.train, 16, 4, torch.Generator().manual_seed(0))
    assert y[0].tolist() == corpus.train.arrays[0][1:17].tolist()
    with pytest.raises(UserError):
        load_corpus(seq_len=17)


@pytest.mark.parametrize("content, flags, words", [
    (None, (), "no such file"), (b"", (), "empty"), (b"  \n\n ", (), "empty"), (b"\xff\xfe\xfa" * 50, (), "--encoding"),
    (b"one paragraph only", (), "one document only"), (b"too\n\nshort", (), "too short for one context of 128"),
    (b"a\0b" * 300, (), "not text"), (b"text" * 300, ("--encoding", "klingon"), "klingon"),
    (english_text().encode(), ("--vocab-size", "100"), "--vocab-size 100"), (english_text().encode(), ("--vocab-size", "0"), "positive"),
    (english_text().encode(), ("--vocab-size", "many"), "positive"), (english_text().encode(), ("--tokenizer", "word"), "--tokenizer word: none of auto, char, byte")])
def test_texts_and_flags_that_are_refused(content, flags, words, refused, tmp_path):
    if content is not None:
        (tmp_path / "text.txt").write_bytes(content)
    refused(main, "text.txt", *flags, words=(words,))
    assert {p.name for p in tmp_path.iterdir()} <= {"text.txt"}         # nothing half-written


def test_what_is_no_file(refused, tmp_path):
    os.mkfifo("pipe")
    for place, words in ((tmp_path, "a directory"), ("pipe", "a device or a pipe"), ("/dev/zero", "a device or a pipe"), ("none", "no such file")):
        refused(main, place, words=(words,))
        with pytest.raises(UserError, match="no train shard" if place == tmp_path else words):
            load_corpus(place)


def test_a_token_file_cut_short_at_any_place_is_named():
    save_tokens()
    whole = open("tokens.pt", "rb").read()
    for size in (*range(0, 400, 37), len(whole) // 2, len(whole) - 5000, len(whole) - 1):
        with open("tokens.pt", "wb") as f:
            f.write(whole[:size])
        with pytest.raises(UserError, match="tokens.pt: not a token file"):
            load_corpus()


@pytest.mark.parametrize("encoding, content", [("utf-7", b"+2AA-" * 300), ("utf-16", b"\xff\xfe\x00\xd8a\x00" * 300), ("hex", b"00" * 300),
                                               ("undefined", b"text" * 300)], ids=lambda value: str(value)[:12])
def test_encodings_that_do_not_give_text(encoding, content, refused):
    with open("text.txt", "wb") as f:
        f.write(content)
    refused(main, "text.txt", "--encoding", encoding, words=(encoding,))


@pytest.mark.parametrize("limit, words", [(1000, "tokenizer.json cannot be written"), (30_000, "tokens.pt cannot be written")])
def test_a_full_disk_leaves_nothing(limit, words, tmp_path):
    """A limit on the size of files fails a write as a full disk does, in the library that makes it."""
    (tmp_path / "text.txt").write_text(english_text(400))
    done = run_script("prepare_data.py", "text.txt", "--vocab-size", "300",
                      preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert_one_line(done, words)
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


def test_a_directory_in_a_files_place_is_refused_before_anything_is_written(refused, tmp_path):
    (tmp_path / "text.txt").write_text(english_text())
    for name in ("tokenizer.json", "tokens.pt"):
        (tmp_path / "out" / name).mkdir(parents=True)
        refused(main, "text.txt", "--out", "out", "--force", words=(name, "directory"))
        assert [p.name for p in (tmp_path / "out").iterdir()] == [name]
        (tmp_path / "out" / name).rmdir()


def test_a_files_name_is_printed_as_one_line():
    stored = prepare(english_text(), name="two\nlines.txt")
    assert stored["meta"]["corpus"] == "two?lines.txt" == load_corpus().name


@pytest.mark.parametrize("theirs", ["tokens.pt", "tokenizer.json"])
def test_what_this_script_did_not_make_is_not_overwritten_without_force(theirs, refused, tmp_path):
    (tmp_path / "text.txt").write_text(english_text())
    if theirs == "tokens.pt":
        save_tokens(meta=False)
    else:
        (tmp_path / theirs).write_text("{}")
    before = (tmp_path / theirs).read_bytes()
    refused(main, "text.txt", words=(theirs, "--force"))
    assert (tmp_path / theirs).read_bytes() == before
    main(["text.txt", "--force"])
    main(["text.txt"])                                                  # its own it may
    assert load_corpus(seq_len=GPTConfig.seq_len).name == "text.txt"


def test_out_takes_another_directory(tmp_path):
    (tmp_path / "text.txt").write_text(english_text())
    main(["text.txt", "--out", "elsewhere/deep"])
    assert not (tmp_path / "tokens.pt").exists() and load_corpus("elsewhere/deep/tokens.pt").name == "text.txt"


# --- shards ---------------------------------------------------------------------------------------------------------

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


@pytest.fixture
def small_gpt2(monkeypatch):
    """GPT-2's splitting of text, with a vocabulary of bytes and a few merges, where a test has no network."""
    ranks = {bytes([i]): i for i in range(256)} | {merged: 256 + i for i, merged in enumerate((b"th", b" t", b"\n\n", b" th", b"an", b"  "))}
    encoding = tiktoken.Encoding("small", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 262})
    monkeypatch.setattr(prepare_data, "tiktoken_encoding", lambda name: encoding)
    return encoding


def write_jsonl(path, texts, field="text"):
    with (gzip.open if str(path).endswith(".gz") else open)(path, "wt", encoding="utf-8") as f:
        f.writelines(json.dumps({field: text, "id": i}) + "\n" for i, text in enumerate(texts))


def shard_ids(split, out="out"):
    """A split's ids, read as llm.c reads its shards."""
    parts = []
    for path in sorted(Path(out).glob(f"{split}_*.bin")):
        header = np.fromfile(path, np.int32, 256)
        parts.append(np.fromfile(path, np.uint16, offset=1024))
        assert header[:3].tolist() == [20240520, 1, len(parts[-1])] and not header[3:].any()
    return np.concatenate(parts) if parts else np.empty(0, np.uint16)


def documents_in(ids, encoding):
    """The texts between the ends."""
    return [encoding.decode(part.tolist()) for part in np.split(ids, np.flatnonzero(ids == encoding.eot_token) + 1)[:-1]] if len(ids) else []


TEXTS = [f"{english_text(2, seed=i)} <|endoftext|> document {i}\n\n\n  end " for i in range(120)]


def to_shards(*paths, flags=("--val-share", "0.1"), out="out"):
    main(["--tokenizer", "gpt2", "--out", out, *map(str, paths), *flags, "--force"])
    return json.load(open(f"{out}/meta.json"))


def test_each_document_is_encoded_and_ended_and_none_is_split_between_the_parts(small_gpt2):
    write_jsonl("a.jsonl", TEXTS)
    meta = to_shards("a.jsonl")
    end = [small_gpt2.eot_token]
    train, val = (documents_in(shard_ids(split), small_gpt2) for split in ("train", "val"))
    assert sorted(train + val) == sorted(text + "<|endoftext|>" for text in TEXTS) and not set(train) & set(val)
    assert 1 <= len(val) <= 30 and meta["documents"] == {"train": len(train), "val": len(val)} and meta["vocab_size"] == 263
    in_order = [text for text in TEXTS if text + "<|endoftext|>" in set(train)]
    assert shard_ids("train").tolist() == sum((small_gpt2.encode_ordinary(text) + end for text in in_order), [])
    assert meta["bytes_per_token"]["val"] == pytest.approx(sum(len(t) - 13 for t in val) / len(shard_ids("val")))
    corpus = load_corpus("out", seq_len=16)
    assert corpus.name == "a.jsonl" and corpus.bits_per_byte(1.0) == pytest.approx(1 / math.log(2) / meta["bytes_per_token"]["val"])
    assert not list(Path("out").glob("*.part")) and not Path("out/progress.json").exists()


def test_validation_is_the_same_documents_whatever_stands_beside_them(small_gpt2):
    write_jsonl("a.jsonl", TEXTS)
    write_jsonl("b.jsonl", TEXTS[::-1][:60] + [english_text(1, seed=500 + i) for i in range(40)])
    to_shards("a.jsonl", out="one")
    to_shards("b.jsonl", out="other")
    one, other = (set(documents_in(shard_ids("val", out), small_gpt2)) for out in ("one", "other"))
    assert {t for t in other if t.removesuffix("<|endoftext|>") in TEXTS} == {t for t in one if t.removesuffix("<|endoftext|>") in TEXTS[60:]}


def test_every_kind_of_file_gives_the_same_tokens(small_gpt2):
    write_jsonl("a.jsonl", TEXTS)
    write_jsonl("b.jsonl.gz", TEXTS, field="content")
    expected = to_shards("a.jsonl", out="a")
    assert to_shards("b.jsonl.gz", flags=("--val-share", "0.1", "--field", "content"), out="b")["tokens"] == expected["tokens"]
    kinds = ["b"]
    if importlib.util.find_spec("pyarrow"):
        import pyarrow
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), "c.parquet")
        to_shards("c.parquet", out="c")
        kinds.append("c")
    for out in kinds:
        assert all(np.array_equal(shard_ids(split, "a"), shard_ids(split, out)) for split in ("train", "val"))


def test_texts_are_cut_into_chapters_files_or_paragraphs(small_gpt2):
    Path("novel.txt").write_text(chinese_text(30), encoding="utf-8")
    with gzip.open("novel.txt.gz", "wt", encoding="gb18030") as f:
        f.write(chinese_text(30))
    assert sum(to_shards("novel.txt")["documents"].values()) == 30
    assert to_shards("novel.txt.gz", flags=("--val-share", "0.1", "--encoding", "gb18030"))["tokens"] == to_shards("novel.txt")["tokens"]
    Path("one.txt").write_text(english_text(40))
    assert sum(to_shards("one.txt")["documents"].values()) == 40
    for i in range(30):
        Path(f"{i}.txt").write_text(english_text(3, seed=i))
    assert sum(to_shards(*(f"{i}.txt" for i in range(30)))["documents"].values()) == 30


@pytest.mark.parametrize("seed", range(3))
def test_a_long_document_in_pieces_gives_the_tokens_of_the_whole(seed, monkeypatch):
    """Cuts fall where GPT-2's tokens end: every kind of blank before and after line ends."""
    monkeypatch.setattr(prepare_data, "PIECE", 50)
    rng = random.Random(seed)
    text = "".join(rng.choice(["word", "two words", " ", "\n", "\n\n", "\t", "  ", "they'll", "x\n", "\n y", "12 "]) for _ in range(3000))
    encoding = tiktoken.Encoding("small", pat_str=GPT2_PATTERN, mergeable_ranks={bytes([i]): i for i in range(256)} | {
        blanks.encode(): 256 + i for i, blanks in enumerate(("\n\n", "  ", " \n", "\n ", "\n\n\n", " \n\n"))}, special_tokens={})
    pieces = list(prepare_data.text_pieces(text.splitlines(keepends=True), lambda before, line: False))
    assert len(pieces) > 20 and "".join(piece for piece, _ in pieces) == text and [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]
    assert sum((encoding.encode_ordinary(piece) for piece, _ in pieces), []) == encoding.encode_ordinary(text)


@pytest.mark.parametrize("stop_after", [1, 3, 7, 12])
def test_interrupted_it_goes_on_to_the_same_shards(stop_after, small_gpt2, monkeypatch, capsys):
    monkeypatch.setattr(prepare_data, "PIECE", 3000)
    for name, texts in (("a.jsonl", TEXTS[:70]), ("b.jsonl", TEXTS[70:])):
        write_jsonl(name, texts)
    flags = ("--val-share", "0.1", "--shard-tokens", "9000")
    to_shards("a.jsonl", "b.jsonl", flags=flags, out="whole")
    original, calls = prepare_data.Shard.append, []

    def interrupted(self, ids):
        calls.append(1)
        if len(calls) > 2 * stop_after:
            raise KeyboardInterrupt
        original(self, ids)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_data.Shard, "append", interrupted)
        with pytest.raises(SystemExit):
            to_shards("a.jsonl", "b.jsonl", flags=flags)
    with pytest.raises(UserError):
        load_corpus("out")
    capsys.readouterr()
    to_shards("a.jsonl", "b.jsonl", flags=flags)
    assert "going on after" in capsys.readouterr().out
    files = {p.name for p in Path("whole").iterdir()}
    assert files == {p.name for p in Path("out").iterdir()} and len(files) > 5
    assert all((Path("whole") / name).read_bytes() == (Path("out") / name).read_bytes() for name in files)


def test_what_is_there_already_is_replaced_with_force_alone_and_strangers_never(small_gpt2, refused, capsys):
    write_jsonl("a.jsonl", TEXTS)
    to_shards("a.jsonl", flags=("--val-share", "0.1", "--shard-tokens", "1000"))
    Path("out/pytorch_model.bin").write_text("important")
    files = {p: p.read_bytes() for p in Path("out").iterdir()}
    refused(main, "--tokenizer", "gpt2", "--out", "out", "a.jsonl", "--field", "wrong", words=("is there, of another text", "--force"))
    main(["--tokenizer", "gpt2", "--out", "out", "a.jsonl", "--val-share", "0.1", "--shard-tokens", "1000"])
    assert "holds these shards already" in capsys.readouterr().out and files == {p: p.read_bytes() for p in Path("out").iterdir()}
    to_shards("a.jsonl")
    assert sorted(p.name for p in Path("out").glob("*.bin")) == ["pytorch_model.bin", "train_000000.bin", "val_000000.bin"]
    Path("mine").mkdir()
    Path("mine/meta.json").write_text('{"mine": 1}')
    refused(main, "--tokenizer", "gpt2", "--out", "mine", "a.jsonl", words=("mine/meta.json is there",))
    assert Path("mine/meta.json").read_text() == '{"mine": 1}'


def test_a_set_that_is_not_whole_is_not_taken_for_whole(small_gpt2, monkeypatch):
    monkeypatch.setattr(prepare_data, "PIECE", 3000)
    write_jsonl("a.jsonl", TEXTS)
    to_shards("a.jsonl", flags=("--val-share", "0.1", "--shard-tokens", "1000"))
    Path("out/train_000000.bin").rename("elsewhere.bin")
    with pytest.raises(UserError, match="one is missing or another's"):
        load_corpus("out", seq_len=16)


def test_a_text_changed_since_an_interruption_is_not_mixed_in(small_gpt2, monkeypatch, refused):
    monkeypatch.setattr(prepare_data, "PIECE", 3000)
    write_jsonl("a.jsonl", TEXTS)
    flags = ("--tokenizer", "gpt2", "--out", "out", "a.jsonl", "--shard-tokens", "9000")
    with monkeypatch.context() as patch:
        patch.setattr(prepare_data.Shard, "close", lambda self, close=prepare_data.Shard.close: close(self) or (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(SystemExit):
            main(list(flags))
    os.utime("a.jsonl", ns=(1, 1))
    refused(main, *flags, words=("of another text",))


def test_two_at_once_in_one_directory(small_gpt2, refused):
    write_jsonl("a.jsonl", TEXTS)
    Path("out").mkdir()
    lock = prepare_data.locked("out")
    refused(main, "--tokenizer", "gpt2", "--out", "out", "a.jsonl", words=("another run is writing there",))
    lock.close()


def test_empty_and_null_texts_are_no_documents(small_gpt2):
    with open("a.jsonl", "w") as f:
        f.writelines(json.dumps({"text": text}) + "\n" for text in [*TEXTS, "", None, ""])
    assert sum(to_shards("a.jsonl")["documents"].values()) == 120


@pytest.mark.parametrize("name, content, flags, words", [
    ("a.jsonl", b'{"text": "fine"}\n{"text": \n', (), "a.jsonl, line 2"), ("a.jsonl", b'{"body": "x"}\n', (), "it has body"),
    ("a.jsonl", b'{"text": 7}\n', (), "no text in a field 'text'"), ("a.jsonl", b"[1, 2]\n", (), "no JSON object"), ("a.txt", b"\xff\xfe\xfa", (), "--encoding"),
    ("a.jsonl", b"[" * 200_000, (), "a.jsonl, line 1"), ("a.txt", b"nul \0 text", (), "not text"),
    ("a.txt", b"", (), "no document fell into the train part"), ("a.txt.gz", b"not gz", (), "not a whole .gz"),
    ("a.txt.gz", gzip.compress(b"text\n\n" * 9999)[:-20], (), "not a whole .gz"),
    ("a.parquet", b"PAR1 not parquet", (), "parquet"), ("a.txt", b"text", ("--encoding", "hex"), "--encoding hex"),
    ("a.txt", b"text", ("--vocab-size", "300"), "its own vocabulary"), ("a.txt", b"text", ("--val-share", "2"), "--val-share")])
def test_corpora_that_are_refused(name, content, flags, words, small_gpt2, refused):
    Path(name).write_bytes(content)
    refused(main, "--tokenizer", "gpt2", "--out", "out", name, *flags, words=(words,))


def test_a_full_disk_is_named_and_the_same_command_goes_on(small_gpt2, refused, monkeypatch):
    write_jsonl("a.jsonl", TEXTS)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        refused(main, "--tokenizer", "gpt2", "--out", "out", "--val-share", "0.1", "a.jsonl", words=("cannot be written", "the same command goes on"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert sum(to_shards("a.jsonl")["documents"].values()) == 120


def test_without_the_vocabulary_it_says_where_to_put_it(monkeypatch, refused):
    Path("a.txt").write_text("text")

    def offline(name):
        raise ConnectionError("no network in tests")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    refused(main, "--tokenizer", "gpt2", "--out", "out", "a.txt", words=("TIKTOKEN_CACHE_DIR",))
    assert not Path("out").exists()


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="needs GPT-2's vocabulary: its directory in TIKTOKEN_CACHE_DIR")
def test_with_gpt2s_own_vocabulary():
    write_jsonl("a.jsonl", [*TEXTS, "Hello world", "halves \ud83d of characters", "三国演义"])
    meta = to_shards("a.jsonl")
    encoding = tiktoken.get_encoding("gpt2")
    assert meta["vocab_size"] == 50_257 and encoding.eot_token == 50_256
    ids = [i for split in ("train", "val") for i in shard_ids(split).tolist()]
    assert len(ids) == sum(len(encoding.encode_ordinary(t.encode(errors="replace").decode())) + 1 for t in [*TEXTS, "Hello world", "halves \ud83d of characters", "三国演义"])
    tokenizer = prepare_data.load_tokenizer("out")
    assert tokenizer.encode("Hello world").ids == [15496, 995] and tokenizer.decode([15496, 995]) == "Hello world"


def test_no_window_crosses_from_one_shard_into_another_and_all_are_there():
    arrays = [np.arange(0, 20), np.arange(100, 103), np.arange(200, 205), np.empty(0, int), np.arange(300, 309)]
    tokens, T = Tokens(arrays, 1000), 4
    assert tokens.positions(T) == 16 + 0 + 1 + 0 + 5 and len(tokens) == 37
    x, y = tokens.windows(np.arange(tokens.positions(T)), T)
    expected = [a[i:i + T + 1].tolist() for a in arrays for i in range(len(a) - T)]
    assert [[*row, last] for row, last in zip(x.tolist(), y[:, -1].tolist())] == expected
    assert torch.equal(x[:, 1:], y[:, :-1]) and x.dtype == torch.int64


def foreign(path, ids, header=(20240520, 1), dtype=np.uint16):
    """A shard as another project's script writes it."""
    with open(path, "wb") as f:
        if header:
            np.array([*header, len(ids), *[0] * 253], np.int32).tofile(f)
        np.array(ids, dtype).tofile(f)


@pytest.mark.parametrize("names, header, dtype, vocab_size", [
    (("fineweb_train_000001.bin", "fineweb_val_000000.bin"), (20240520, 1), np.uint16, 50_257),                # modded-nanogpt
    (("tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin"), (20240801, 7), np.uint32, 128_256),           # llm.c, Llama 3's tokenizer
    (("train.bin", "val.bin"), None, np.uint16, 50_257)])                                                       # nanoGPT
def test_other_projects_shards_are_read(names, header, dtype, vocab_size):
    Path("data").mkdir()
    for name, offset in zip(names, (0, 40_000)):
        foreign(f"data/{name}", range(offset, offset + 300), header, dtype)
    corpus = load_corpus("data", seq_len=16)
    assert corpus.vocab_size == vocab_size and corpus.bits_per_byte(1.0) is None
    assert corpus.train.windows([3], 16)[0][0].tolist() == list(range(3, 19)) and corpus.val.windows([0], 2)[1].tolist() == [[40_001, 40_002]]
    one = load_corpus(f"data/{names[0]}", seq_len=16)               # one shard: its last tenth is validation
    assert (len(one.train), len(one.val)) == (270, 30)


@pytest.mark.parametrize("damage, words", [
    (lambda: foreign("data/train.bin", range(300), (20240520, 2)), "of version 2"), (lambda: os.truncate("data/train.bin", 1400), "cut short"),
    (lambda: Path("data/train.bin").write_bytes(b"odd"), "neither a shard"), (lambda: Path("data/train.bin").write_bytes(b""), "neither a shard"),
    (lambda: foreign("data/train.bin", range(300), (20240522, 1)), "neither a shard"), (lambda: foreign("data/train.bin", range(300), (20240520 - 2 ** 8, 1)), "neither a shard"),
    (lambda: foreign("data/train.bin", range(300), (20240801, 7), np.uint32), "different vocabularies"), (lambda: Path("data/meta.json").write_text("[" * 200_000), "meta.json"),
    (lambda: os.remove("data/val.bin"), "no val shard"), (lambda: Path("data/meta.json").write_text("{"), "meta.json"),
    (lambda: Path("data/meta.json").write_text('{"corpus": 7}'), "meta.json"), (lambda: foreign("data/train.bin", range(10)), "a context of 16")])
def test_shards_that_are_refused(damage, words):
    Path("data").mkdir()
    for name in ("train", "val"):
        foreign(f"data/{name}.bin", range(300))
    damage()
    with pytest.raises(UserError, match=words):
        load_corpus("data", seq_len=16)


def test_an_id_beyond_the_vocabulary_is_found_in_its_window(monkeypatch):
    Path("data").mkdir()
    foreign("data/train.bin", [1] * 200 + [50_257] + [1] * 200)
    foreign("data/val.bin", [1] * 300)
    with pytest.raises(UserError, match="data: a shard has the id 50,257"):
        load_corpus("data", seq_len=16)
    monkeypatch.setattr(prepare_data, "CHECKED", 100)
    corpus = load_corpus("data", seq_len=16)
    corpus.train.windows([0, 100], 16)
    with pytest.raises(UserError, match="data: train has the id 50,257"):
        corpus.train.windows([0, 190], 16)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(small_gpt2):
    """Peak memory at ten times the text is the same."""
    code = ("import sys, tiktoken, prepare_data, resource\n"
            "prepare_data.tiktoken_encoding = lambda name: tiktoken.Encoding('s', pat_str=sys.argv[1], special_tokens={'<|endoftext|>': 256}, "
            "mergeable_ranks={bytes([i]): i for i in range(256)})\n"
            "prepare_data.main(sys.argv[2:])\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)")
    peaks = []
    for megabytes in (20, 200):
        write_jsonl("a.jsonl", (TEXTS[i % 120] * 10 + str(i) for i in range(megabytes * 1_000_000 // (10 * len(TEXTS[0])))))
        done = subprocess.run([sys.executable, "-c", code, GPT2_PATTERN, "--tokenizer", "gpt2", "--out", "out", "--force", "a.jsonl"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    assert peaks[1] < peaks[0] + 40, peaks


def test_as_a_reader_runs_it(tmp_path):
    assert_one_line(run_script("prepare_data.py", "missing.txt"), "prepare_data.py", "missing.txt", "no such file")
    (tmp_path / "novel.txt").write_text(chinese_text(), encoding="utf-8")
    done = run_script("prepare_data.py", "novel.txt")
    assert done.returncode == 0 and done.stderr == "" and "20 chapters, 2 of them for validation" in done.stdout


@pytest.mark.slow
def test_the_chapters_novel(novel, capsys):
    main([str(novel)])
    out = capsys.readouterr().out
    for figure in ("597,228 characters", "120 chapters", "410,934 training tokens", "40,717 validation tokens"):
        assert figure in out
    assert len(set(novel.read_text(encoding="utf-8"))) == 4035
