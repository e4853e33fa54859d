"""prepare_data.py: what it makes of texts, what it reads, and what it refuses."""
import math
import os
import pickle
import resource

import pytest
import torch
from tokenizers import Tokenizer

import prepare_data
from conftest import assert_one_line, chinese_text, english_text, run_script, save_tokens
from model import GPTConfig, UserError
from prepare_data import (check_ids, documents_of, id_dtype, load_corpus, main, prepare_default, sample_batch,
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
    assert int(corpus.train.max()) == int(stored["train"].max()) < vocab_size


def test_encodings_line_ends_and_byte_order_marks():
    text = chinese_text()
    expected = prepare(text, name="a.txt")
    for flags, form, encoding in ((("--encoding", "gb18030"), text, "gb18030"), ((), text.replace("\n", "\r\n"), "utf-8"),
                                  ((), text, "utf-8-sig"), (("--encoding", "utf_8"), text, "utf-8-sig"), (("--encoding", "UTF8"), text, "utf-8-sig")):
        stored = prepare(form, *flags, name="b.txt", encoding=encoding)
        assert all(torch.equal(stored[split], expected[split]) for split in ("train", "val"))


def test_batches_are_drawn_as_the_chapter_draws_them():
    save_tokens()
    train = load_corpus().train
    x, y = sample_batch(train, 16, 5, torch.Generator().manual_seed(3))
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
    monkeypatch.setattr(prepare_data, "stdlib_documents", lambda: [english_text(10, seed=i) for i in range(12)])
    corpus = load_corpus()
    assert "making the default one" in capsys.readouterr().out and "standard library" in str(corpus)


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
    assert y[0].tolist() == corpus.train[1:17].tolist()
    with pytest.raises(UserError):
        load_corpus(seq_len=17)


@pytest.mark.parametrize("content, flags, words", [
    (None, (), "no such file"), (b"", (), "empty"), (b"  \n\n ", (), "empty"), (b"\xff\xfe\xfa" * 50, (), "--encoding"),
    (b"one paragraph only", (), "one document only"), (b"too\n\nshort", (), "too short for one context of 128"),
    (b"a\0b" * 300, (), "not text"), (b"text" * 300, ("--encoding", "klingon"), "klingon"),
    (english_text().encode(), ("--vocab-size", "100"), "--vocab-size 100"), (english_text().encode(), ("--vocab-size", "0"), "positive"),
    (english_text().encode(), ("--vocab-size", "many"), "positive"), (english_text().encode(), ("--tokenizer", "word"), "invalid choice")])
def test_texts_and_flags_that_are_refused(content, flags, words, refused, tmp_path):
    if content is not None:
        (tmp_path / "text.txt").write_bytes(content)
    refused(main, "text.txt", *flags, words=(words,))
    assert {p.name for p in tmp_path.iterdir()} <= {"text.txt"}         # nothing half-written


def test_what_is_no_file(refused, tmp_path):
    os.mkfifo("pipe")
    for place, words in ((tmp_path, "a directory"), ("pipe", "a device or a pipe"), ("/dev/zero", "a device or a pipe"), ("none", "no such file")):
        refused(main, place, words=(words,))
        with pytest.raises(UserError, match=words):
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
