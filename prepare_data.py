"""Text to tokens: the first step of every script here, and the one place that reads token files.

    python prepare_data.py                    the chapter's novel, or, offline, Python's own sources
    python prepare_data.py FILE...            any text; documents are its chapters, files or paragraphs
    python prepare_data.py --encoding gb18030 novel.txt
    python prepare_data.py --tokenizer gpt2 --out DIR FILE...       any amount of .txt, .jsonl, .parquet, .gz

It writes tokens.pt ({"train", "val", "meta"}) and tokenizer.json, in seconds. On the chapter's novel it finds
597,228 characters in 120 chapters and makes 410,934 training and 40,717 validation tokens of them. With GPT-2's
tokenizer it writes shards, on all cores and in bounded memory, about 10 MB of text a second and core; interrupted, the
same command goes on.

A tokens.pt with just {"train", "val"}, as the chapter's earlier scripts write it, is read as it is; so are the shards
that llm.c's and modded-nanogpt's scripts write, and nanoGPT's train.bin and val.bin.
"""
import codecs
import contextlib
import gzip
import hashlib
import json
import os
import re
import shutil
import sys
import sysconfig
import urllib.error
import urllib.request
import warnings
import zipfile
import zlib
from collections import deque
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tiktoken
import torch
from tqdm import tqdm
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from budget import bits_per_byte, cpu_count, worker_pool
from model import GPT2_VOCAB, GPTConfig, Parser, UserError, check_runs, command, locked, positive, save_results, written_whole

HERE = Path(".")
TOKENS = Path("tokens.pt")

NOVEL_URL = "https://anrans.github.io/ai-infra-handbooks/train/assets/data/sanguo.txt"
NOVEL_FILE = Path("sanguo.txt")
NOVEL_NAME = "Romance of the Three Kingdoms"
NOVEL_SHA256 = "51d2ced64cdacda08f98ae5ea37b41d434689e368d3c009efbdfa3683023c1a9"
NOVEL_CHARACTERS = 597_228
NOVEL_TOKENS = (410_934, 40_717)
CONNECT_SECONDS = 10

MADE_BY = "prepare_data.py"
UNK, EOS = "<unk>", "<eos>"
VOCAB_SIZE = GPTConfig.vocab_size
LARGEST_VOCAB = 1 << 24
BYTE_ALPHABET = 256
ENDOFTEXT = "<|endoftext|>"
# A shard: 256 int32 (this number, a version, the tokens that follow), then the tokens. llm.c's two kinds, by vocabulary.
HEADER_INTS, CHECKED = 256, 100_000
SHARD_KINDS = {20240520: (1, np.dtype("<u2"), GPT2_VOCAB), 20240801: (7, np.dtype("<u4"), 128_256)}
SHARD_TOKENS = 100_000_000
PIECE = 1 << 20                         # characters that a process tokenizes at once, about
INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64}
VALIDATION_SHARE = 10                   # one document in ten
# A heading stands at the start of a line: 第一回：, 第12章 and the like, or CHAPTER XII.
HEADING = re.compile(r"^[ \t\u3000]*(?:第[〇○零一二三四五六七八九十百千两廿卅0-9]{1,9}[回章](?=[：:\s])"
                     r"|(?:CHAPTER|Chapter)[ \t]+(?:[IVXLC]+|[0-9]+)\b)", re.M)
CJK = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]")
# Of the standard library: no tests, no installed packages; nor generated tables and what systems package apart.
STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "idlelib", "lib2to3"}


# --- reading tokens -------------------------------------------------------------------------------------------------

class Tokens:
    """The ids of a part of a corpus, below vocab_size: one or several 1-D arrays, left on the disk where they lie there.

    A window is seq_len ids and their successors. None crosses from one array into another, so there are positions(seq_len)
    of them, numbered through. where names the part in a refusal.
    """

    def __init__(self, arrays, vocab_size, where="tokens"):
        self.arrays, self.vocab_size, self.where = arrays, vocab_size, where

    def __len__(self):
        return sum(map(len, self.arrays))

    def positions(self, seq_len):
        return sum(max(0, len(array) - seq_len) for array in self.arrays)

    def windows(self, positions, seq_len):
        """The windows of these numbers: inputs and targets, each (len(positions), seq_len) int64. Raises UserError for an
        id beyond the vocabulary, before it reaches a GPU."""
        ends = np.cumsum([max(0, len(array) - seq_len) for array in self.arrays])
        windows = np.empty((len(positions), seq_len + 1), dtype=np.int64)
        for window, position in zip(windows, np.asarray(positions)):
            i = np.searchsorted(ends, position, side="right")
            start = position - (ends[i - 1] if i else 0)
            window[:] = self.arrays[i][start:start + seq_len + 1]
        check_ids(windows, self.vocab_size, self.where)
        windows = torch.from_numpy(windows)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@dataclass
class Corpus:
    """A tokenized text in its two parts."""

    name: str
    train: Tokens
    val: Tokens
    vocab_size: int
    bytes_per_token: dict | None        # UTF-8 bytes of a split over its tokens; None where nobody recorded it

    def __str__(self):
        return (f"corpus: {self.name}: {len(self.train):,} training and {len(self.val):,} validation tokens, "
                f"vocabulary {self.vocab_size:,}")

    def bits_per_byte(self, nats, split="val"):
        """A loss in nats a token as bits a byte of the split's text; None where its bytes are unknown."""
        return bits_per_byte(nats, self.bytes_per_token[split]) if self.bytes_per_token else None

    def identity(self):
        """A fingerprint, wherever the file lies: the lengths of the parts and a sample of their tokens."""
        digest, arrays = hashlib.sha256(), [*self.train.arrays, *self.val.arrays]
        for array in arrays:
            sample = array[::max(1, len(arrays) * len(array) // 100_000)]
            digest.update(f"{len(array)} {sample.tolist()}".encode())
        return f"{len(self.train):,} training tokens, {digest.hexdigest()[:16]}"


def load_corpus(path=TOKENS, seq_len=1):
    """Read a token file whose two parts hold at least one window of seq_len tokens and its targets.

    Where the default file is missing, the default corpus is made first. Raises UserError for a file that is missing,
    is not a token file, or holds ids that its vocabulary does not have. Nothing in the file is ever executed.
    """
    path = Path(path)
    if path == TOKENS and not path.exists():
        print(f"no {TOKENS} here: making the default one first")
        prepare_default()
    corpus = read_shards(path) if path.is_dir() or path.suffix == ".bin" else read_tokens(path)
    check_length(corpus, path, seq_len)
    return corpus


def check_length(corpus, where, seq_len):
    """Raise UserError where a part of the corpus has no two windows of seq_len tokens."""
    for split in ("train", "val"):
        tokens = getattr(corpus, split)
        if tokens.positions(seq_len) < 2:           # sample_batch draws below positions - 1
            raise UserError(f"{where}: its {split} part has {len(tokens):,} tokens, a context of {seq_len:,} needs {seq_len + 2:,}"
                            f"{' in one shard' if len(tokens.arrays) > 1 else ''}; give a longer text or a shorter context")


def add_data_flag(parser):
    """The flag that names the token file."""
    parser.add_argument("--data", type=Path, default=TOKENS, metavar="FILE",
                        help=f"token file or directory of shards (default: {TOKENS}, made first where there is none)")


def regular_file(path):
    """path as a Path. Raises UserError unless it is a file that can be read to its end."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if not path.is_file():
        raise UserError(f"{path}: {'a directory; name the files in it' if path.is_dir() else 'a device or a pipe, not a file'}")
    return path


def read_tokens(path):
    """The Corpus in a tokens.pt; load_corpus says what is refused."""
    path = regular_file(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")         # the unpickler's advice to programmers
            mapped = zipfile.is_zipfile(path)       # read from the disk as needed, not copied whole into memory
            stored = torch.load(path, weights_only=True, map_location="cpu", mmap=mapped)
    except Exception as error:          # the unpickler meets a stranger's bytes: it may raise anything
        if isinstance(error, OSError) and error.filename:
            raise
        raise UserError(f"{path}: not a token file (cut short, or more than plain tensors, which is refused unread); "
                        f"make one with: python prepare_data.py FILE... --force") from None
    if not (isinstance(stored, dict) and {"train", "val"} <= stored.keys()):
        raise UserError(f"{path}: not a token file: it has no train and val; make one with: python prepare_data.py")
    parts = {split: token_ids(stored[split], f"{path}: {split}") for split in ("train", "val")}
    meta = stored.get("meta") or {"corpus": known_name(path, parts), "vocab_size": VOCAB_SIZE}
    if not is_meta(meta):
        raise UserError(f"{path}: its meta is not prepare_data.py's; make it again with: python prepare_data.py FILE... --force")
    for split, ids in parts.items():
        check_ids(ids, meta["vocab_size"], f"{path}: {split}", recorded="meta" in stored)
    return new_corpus(path, {split: [ids] for split, ids in parts.items()}, meta)


def new_corpus(path, arrays, meta):
    """The Corpus of arrays by split and what meta records of it."""
    train, val = (Tokens(arrays[split], meta["vocab_size"], f"{path}: {split}") for split in ("train", "val"))
    return Corpus(meta["corpus"], train, val, meta["vocab_size"], meta.get("bytes_per_token"))


def read_shard(path):
    """(token ids, vocabulary) of a shard: llm.c's format, or, without its header, nanoGPT's bare uint16. The ids stay on
    the disk. Raises UserError for what is neither, or is cut short."""
    size = regular_file(path).stat().st_size
    header = np.fromfile(path, "<i4", HEADER_INTS)
    if len(header) == HEADER_INTS and header[0] in SHARD_KINDS:
        version, dtype, vocab_size = SHARD_KINDS[header[0]]
        held = (size - header.nbytes) / dtype.itemsize
        if header[1] != version or header[2] != held:
            raise UserError(f"{path}: a shard of version {header[1]} with {header[2]:,} tokens by its header, {held:,.0f} by its size; it is "
                            f"cut short or of another kind; make it again")
        return np.memmap(path, dtype, "r", offset=header.nbytes, shape=(int(held),)) if held else np.empty(0, dtype), vocab_size
    dated = any(re.fullmatch(r"202\d(0[1-9]|1[0-2])\d\d", str(magic)) for magic in (*header[:1], *header[:1].byteswap()))
    if not size or size % 2 or dated:   # llm.c's headers begin with a date; this one is of another kind of file
        raise UserError(f"{path}: neither a shard with a header nor bare 16-bit tokens")
    return np.memmap(path, "<u2", "r"), GPT2_VOCAB


def read_shards(path):
    """The Corpus in a directory of shards, whose names say train or val; or in one shard, its last tenth for validation."""
    if (path / "progress.json").exists():
        raise UserError(f"{path}: its shards are not all there; go on with the prepare_data.py command that makes them")
    if path.is_dir():
        files = {split: [p for p in sorted(path.glob("*.bin")) if split in re.split("[^a-z]+", p.stem.lower())] for split in ("train", "val")}
        for split, found in files.items():
            if not found:
                raise UserError(f"{path}: no {split} shard there (such as {split}_000000.bin); make them with: "
                                f"python prepare_data.py --tokenizer gpt2 --out DIR FILE...")
        shards = {split: [read_shard(p) for p in found] for split, found in files.items()}
        arrays = {split: [ids for ids, _ in found] for split, found in shards.items()}
        vocab_sizes = {vocab_size for found in shards.values() for _, vocab_size in found}
    else:
        ids, vocab_size = read_shard(path)
        cut = len(ids) - len(ids) // VALIDATION_SHARE
        arrays, vocab_sizes = {"train": [ids[:cut]], "val": [ids[cut:]]}, {vocab_size}
    if len(vocab_sizes) > 1:
        raise UserError(f"{path}: shards of different vocabularies; read them from directories of their own")
    meta = shards_meta(path) or {"corpus": printable(f"{path} (no meta)"), "vocab_size": max(vocab_sizes)}
    held = {split: sum(map(len, parts)) for split, parts in arrays.items()}
    if path.is_dir() and meta.get("tokens", held) != held:
        raise UserError(f"{path}: its shards hold {held}, by its meta.json {meta['tokens']}; one is missing or another's; "
                        f"make them again with --force")
    for array in (array for parts in arrays.values() for array in parts if len(array)):
        check_ids(array[:CHECKED], meta["vocab_size"], f"{path}: a shard")      # Tokens.windows checks the rest as it is read
    return new_corpus(path, arrays, meta)


def shards_meta(path):
    """What prepare_data.py wrote beside the shards in a directory, or beside one of them; None where it wrote nothing."""
    meta = (path if path.is_dir() else path.parent) / "meta.json"
    return read_meta(meta) if meta.exists() else None


def read_meta(path):
    """What prepare_data.py wrote beside its shards. Raises UserError where it is not that."""
    meta = read_json(path)
    if not is_meta(meta):
        raise UserError(f"{path}: not prepare_data.py's; make the shards again, or remove it to read them as they are")
    return meta


def read_json(path):
    """The object in a JSON file; None where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_meta(meta):
    """Whether meta is what write records: a printable name, a vocabulary's size, and, where known, bytes per token."""
    if not isinstance(meta, dict):
        return False
    name, size, ratio = (meta.get(key) for key in ("corpus", "vocab_size", "bytes_per_token"))
    return (isinstance(name, str) and name.isprintable() and type(size) is int and 0 < size <= LARGEST_VOCAB
            and (ratio is None or isinstance(ratio, dict)
                 and all(type(ratio.get(split)) in (int, float) and 1e-3 < ratio[split] < 1e6 for split in ("train", "val"))))


def token_ids(value, where):
    """value as an array on the same memory, if it is a 1-D tensor of integers; else UserError."""
    plain = (isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu" and not value.is_nested
             and value.dtype in INTEGERS and value.dim() == 1 and value.is_contiguous())
    if not plain:
        raise UserError(f"{where} is not a list of token ids (a 1-D tensor of integers); make it again with: python prepare_data.py FILE...")
    return value.numpy()


def known_name(path, parts):
    """A name for a token file that carries none: the chapter's readers have one of these."""
    is_novel = tuple(map(len, parts.values())) == NOVEL_TOKENS
    return printable(f"{path} ({NOVEL_NAME})" if is_novel else f"{path} (no meta)")


def printable(name):
    """A name without what a terminal would obey or could not show: line ends, escapes, stray surrogates."""
    return "".join(c if c.isprintable() else "?" for c in name)


def check_ids(ids, vocab_size, where, recorded=True):
    """Raise UserError unless ids, an array, holds values in [0, vocab_size) alone; recorded: its meta names the vocabulary."""
    if not len(ids):
        raise UserError(f"{where} is empty")
    low, high = int(ids.min()), int(ids.max())
    if low < 0:
        raise UserError(f"{where} has the id {low}: ids of 32,768 and above wrap in int16; store them wider")
    if high >= vocab_size:
        why = "" if recorded else " (it has no meta, so the chapter's is taken)"
        raise UserError(f"{where} has the id {high:,}, beyond the vocabulary of {vocab_size:,}{why}; "
                        f"make it again with: python prepare_data.py FILE...")


def sample_batch(tokens, seq_len, batch_size, generator):
    """Random windows, as Tokens.windows gives them: one torch.randint a batch, as the chapter draws, so that its seeds
    give its batches."""
    return tokens.windows(torch.randint(0, tokens.positions(seq_len) - 1, (batch_size,), generator=generator), seq_len)


def step_positions(n_positions, global_batch, seed, step):
    """The windows of a step, by number: (global_batch,) int64, a function of seed and step and nothing else.

    Micro-batch i of the step is the i-th slice, whoever computes it; every one of the n_positions is equally likely.
    """
    return np.random.default_rng((seed, step)).integers(0, n_positions, global_batch)


class TiktokenTokenizer:
    """tiktoken's encoding of that name, with the two methods of tokenizers' that the scripts use."""

    def __init__(self, name):
        self.encoding = tiktoken_encoding(name)

    def encode(self, text):
        return SimpleNamespace(ids=self.encoding.encode_ordinary(text))

    def decode(self, ids):
        return self.encoding.decode(ids)


def load_tokenizer(data=TOKENS):
    """The tokenizer of a token file, which lies beside it, or of shards. Raises UserError where there is none."""
    data = Path(data)
    if data.is_dir() or data.suffix == ".bin":
        return TiktokenTokenizer((shards_meta(data) or {}).get("tokenizer", "gpt2"))
    path = data.with_name("tokenizer.json")
    if not path.exists():
        raise UserError(f"{path}: no tokenizer beside the tokens")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:          # the library raises plain Exception for what it cannot read
        raise UserError(f"{path}: not a tokenizer ({error})") from None
    tokenizer.encode_special_tokens = True
    if tokenizer.decoder is None:       # characters, as the chapter's earlier scripts save it: joined without spaces
        tokenizer.decoder = decoders.Fuse()
    return tokenizer


# --- questions and prompts --------------------------------------------------------------------------------------------

def read_choices(path):
    """The questions of a .jsonl file in HellaSwag's or ARC's own format: a list of (line number, context, candidates, the
    right one's number). Raises UserError where a line is neither."""
    questions = []
    with open(regular_file(path), encoding="utf-8-sig", errors="replace") as f:
        lines = [(number, line) for number, line in enumerate(f, 1) if line.strip()]
    for number, line in lines:
        try:
            r = json.loads(line)
            if "ctx" in r:
                context, candidates, answer = r["ctx"], r["endings"], int(r["label"])
            else:
                question = r["question"] if isinstance(r["question"], dict) else {"stem": r["question"], "choices": r["choices"]}
                stem, choices = question["stem"], question["choices"]
                if isinstance(choices, dict):       # columns, as some copies of ARC have it
                    choices = [{"text": text, "label": label} for text, label in zip(choices["text"], choices["label"])]
                context, candidates = f"Question: {stem}\nAnswer:", [c["text"] for c in choices]
                answer = [str(c["label"]) for c in choices].index(str(r["answerKey"]))
            texts = [context, *candidates] if isinstance(candidates, list) else []
            if not (len(texts) > 1 and all(isinstance(text, str) and text for text in texts) and 0 <= answer < len(candidates)):
                raise ValueError
            "".join(texts).encode()
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{path}, line {number}: neither ctx, endings, label nor question, choices, answerKey") from None
        questions.append((number, context, candidates, answer))
    if not questions:
        raise UserError(f"{path}: no question in it")
    return questions


def load_choices(path, data, config):
    """read_choices' questions in the ids of data's tokenizer: (context's ids, each candidate's ids, their bytes, the answer).
    Raises UserError, before the run, for one that the model cannot be asked."""
    questions, found, tokenizer = [], read_choices(path), load_tokenizer(data)
    for number, context, candidates, answer in found:
        ids = [tokenizer.encode(context).ids, *(tokenizer.encode(" " + c).ids for c in candidates)]
        if not all(ids) or max(map(max, ids)) >= config.vocab_size or max(map(len, ids[1:])) > config.seq_len:
            raise UserError(f"{path}, line {number}: a text of no token, of more than the context's {config.seq_len}, or beyond the vocabulary")
        questions.append((ids[0], ids[1:], [len(c.encode()) for c in candidates], answer))
    return questions


def load_prompt(text, data, config):
    """(data's tokenizer, text in its ids). Raises UserError where there is no tokenizer, or the model cannot go on from it."""
    tokenizer = load_tokenizer(data)
    ids = tokenizer.encode(text).ids
    if not ids or max(ids) >= config.vocab_size:
        raise UserError("the prompt has a token beyond the data's vocabulary" if ids else "the prompt is empty")
    return tokenizer, ids


# --- text to documents ----------------------------------------------------------------------------------------------

def text_codec(encoding):
    """Python's name for an encoding; of UTF-8 the one that drops a byte order mark. Raises UserError where it has none."""
    try:
        with contextlib.suppress(UnicodeError):
            b"0".decode(encoding)       # refuses hex, zip and the like, which codecs.lookup knows too
        codec = codecs.lookup(encoding)
    except LookupError:
        raise UserError(f"--encoding {encoding}: Python knows no such encoding of text") from None
    return "utf-8-sig" if codec.name == "utf-8" else codec.name


def read_text(path, encoding="utf-8"):
    """A text file's characters, newlines as \\n, without a byte order mark. Raises UserError where it is none."""
    path = regular_file(path)
    try:
        text = path.read_text(encoding=text_codec(encoding))
        text.encode()                   # utf-7 and utf-16 can decode to halves of characters, which no tokenizer takes
    except UnicodeError as error:
        raise UserError(f"{path}: not {encoding} text ({error.reason if hasattr(error, 'reason') else error}); "
                        f"convert it, or name its encoding to prepare_data.py, e.g. --encoding gb18030") from None
    if not text.strip():
        raise UserError(f"{path}: empty")
    if "\0" in text:
        raise UserError(f"{path}: not text (it holds NUL characters)")
    return text


def cut(text, starts):
    """The pieces of text that begin at each of starts; what stands before the first, unless blank, is one too."""
    edges = sorted({0, *starts, len(text)})
    pieces = [text[a:b] for a, b in zip(edges, edges[1:])]
    return [piece for piece in pieces if piece.strip()]


def documents_of(texts):
    """Split texts into documents: (what they are, the documents), nothing of the text lost but blank pieces.

    Each text's chapters where it has two or more headings, else the text whole; a single text without headings is
    split into its paragraphs, at blank lines.
    """
    chapters = [[m.start() for m in HEADING.finditer(text)] for text in texts]
    if any(len(starts) > 1 for starts in chapters):
        return "chapters", [doc for text, starts in zip(texts, chapters) for doc in cut(text, starts if len(starts) > 1 else [])]
    if len(texts) > 1:
        return "files", list(texts)
    return "paragraphs", cut(texts[0], [m.end() for m in re.finditer(r"\n[ \t\r]*\n\s*", texts[0])])


def split_last_tenth(documents):
    """Training and validation documents: the last tenth, at least one, is validation."""
    held_out = max(1, len(documents) // VALIDATION_SHARE)
    return documents[:-held_out], documents[-held_out:]


def is_mostly_chinese(documents):
    """Whether more than half of the characters, blanks aside, are Chinese."""
    sample = "".join("".join(documents).split())
    return 2 * len(CJK.findall(sample)) > len(sample)


# --- documents to tokens --------------------------------------------------------------------------------------------

def train_tokenizer(documents, kind, vocab_size=VOCAB_SIZE):
    """A BPE tokenizer trained on the documents: kind "char", the chapter's, on characters, no token across a newline
    or a punctuation mark; or "byte", GPT-2's, on UTF-8 bytes, which no text can surprise."""
    if kind == "char":
        tokenizer = Tokenizer(models.BPE(unk_token=UNK))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\n"), "isolated"),
                                                           pre_tokenizers.Punctuation("isolated")])
        special, alphabet, size = [UNK, EOS], [], len(set().union(*documents))
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        special, alphabet, size = [EOS], pre_tokenizers.ByteLevel.alphabet(), BYTE_ALPHABET
    if vocab_size < size + len(special):
        raise UserError(f"--vocab-size {vocab_size} is below the {size:,} characters of the alphabet and "
                        f"{len(special)} special tokens; take {size + len(special):,} or more")
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=sys.stderr.isatty()))
    tokenizer.encode_special_tokens = True      # an "<eos>" that a text spells out is text
    return tokenizer


def id_dtype(vocab_size):
    """The narrowest of int16 and int32 that holds every id below vocab_size."""
    return torch.int16 if vocab_size <= torch.iinfo(torch.int16).max + 1 else torch.int32


def encode(tokenizer, documents):
    """The documents' ids, each document ended by <eos>, as one 1-D tensor."""
    eos = tokenizer.token_to_id(EOS)
    ids = [token for encoding in tokenizer.encode_batch(documents, add_special_tokens=False)
           for token in (*encoding.ids, eos)]
    return torch.tensor(ids, dtype=id_dtype(tokenizer.get_vocab_size()))


def tokenize(name, train, val, kind="auto", vocab_size=VOCAB_SIZE):
    """Lists of training and validation documents to ({"train", "val", "meta"}, tokenizer). The tokenizer sees both
    parts, as the chapter's does. Raises UserError where a part is too short for one context of the chapter's model."""
    documents = train + val
    if kind == "auto":
        kind = "char" if is_mostly_chinese(documents) else "byte"
    tokenizer = train_tokenizer(documents, kind, vocab_size)
    parts = {"train": encode(tokenizer, train), "val": encode(tokenizer, val)}
    for split, ids in parts.items():
        if len(ids) < GPTConfig.seq_len + 2:
            raise UserError(f"the {split} part of {name} is {len(ids)} tokens, too short for one context of "
                            f"{GPTConfig.seq_len}; give a longer text")
    n_bytes = {"train": sum(len(d.encode()) for d in train), "val": sum(len(d.encode()) for d in val)}
    meta = {"made_by": MADE_BY, "corpus": name, "vocab_size": tokenizer.get_vocab_size(), "tokenizer": f"{kind}-bpe",
            "characters": sum(map(len, documents)), "documents": {"train": len(train), "val": len(val)},
            "bytes_per_token": {split: n_bytes[split] / len(parts[split]) for split in parts}}
    return {**parts, "meta": meta}, tokenizer


# --- the default corpus ---------------------------------------------------------------------------------------------

def fetch_novel():
    """The chapter's novel as bytes. Raises OSError where the network or the site cannot be reached, or where something
    else than the novel answers (a login page, say)."""
    with urllib.request.urlopen(NOVEL_URL, timeout=CONNECT_SECONDS) as response:
        raw = response.read()
    if len(HEADING.findall(raw.decode("utf-8", errors="replace"))) < 2:
        raise urllib.error.URLError("what it answered is not the novel")
    return raw


def stdlib_parts():
    """(name, unit, training documents, validation documents) of the Python standard library: a text that every machine
    has. Its source files in order of path, every tenth held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p.relative_to(root) for p in root.rglob("*.py"))
    texts = [(root / p).read_text(encoding="utf-8", errors="replace")
             for p in paths if not STDLIB_SKIPPED.intersection(p.parts)]
    documents = [text for text in texts if text.strip()]
    val = documents[VALIDATION_SHARE - 1::VALIDATION_SHARE]
    del documents[VALIDATION_SHARE - 1::VALIDATION_SHARE]
    return f"Python {sys.version_info.major}.{sys.version_info.minor} standard library", "files", documents, val


def prepare_default(**options):
    """Make tokens.pt from the novel (in sanguo.txt, or fetched), else from Python's own sources; options as write's."""
    refuse_to_overwrite(options.get("out", HERE), options.get("force", False))
    if not NOVEL_FILE.exists():
        print(f"fetching {NOVEL_URL}")
        try:
            novel = fetch_novel()
        except (OSError, ValueError, HTTPException) as error:       # no network, a malformed proxy, an answer cut short or no HTTP
            print(f"it cannot be reached ({getattr(error, 'reason', None) or error}): using Python's own source files "
                  f"instead; to use a text of yours: python prepare_data.py FILE")
            return write(*stdlib_parts(), **options)
        with written_whole(NOVEL_FILE) as part:
            part.write_bytes(novel)
    return prepare_files([NOVEL_FILE], **options)


# --- writing --------------------------------------------------------------------------------------------------------

def refuse_to_overwrite(out, force):
    """Raise UserError where out holds a token file or a tokenizer that prepare_data.py did not make."""
    tokens, tokenizer = out / TOKENS.name, out / "tokenizer.json"
    if force:
        return
    if tokens.exists():
        try:
            ours = torch.load(tokens, weights_only=True, mmap=True)["meta"]["made_by"] == MADE_BY
        except Exception:               # unreadable, or without our meta: somebody else's
            ours = False
        if not ours:
            raise UserError(f"{tokens} is there and prepare_data.py did not make it; move it away, write elsewhere "
                            f"with --out DIR, or overwrite it with --force")
    elif tokenizer.exists():
        raise UserError(f"{tokenizer} is there without a {TOKENS.name} of prepare_data.py's; move it away, write elsewhere "
                        f"with --out DIR, or overwrite it with --force")


def tokens_text(n_tokens, meta):
    """The tokens of both parts, and how many bytes of text one stands for."""
    return ", ".join(f"{n_tokens[split]:,} {label} tokens ({meta['bytes_per_token'][split]:.2f} bytes each)"
                     for split, label in (("train", "training"), ("val", "validation")))


def names_text(paths):
    """A corpus's name by its files."""
    return printable(", ".join(Path(p).name for p in paths[:3]) + (", ..." if len(paths) > 3 else ""))


def write(name, unit, train, val, kind="auto", vocab_size=VOCAB_SIZE, out=HERE, force=False):
    """Tokenize, write out/tokens.pt and out/tokenizer.json, print a summary; returns what tokens.pt holds."""
    refuse_to_overwrite(out, force)
    stored, tokenizer = tokenize(name, train, val, kind, vocab_size)
    with written_whole(out / "tokenizer.json") as tokenizer_part:
        tokenizer.save(str(tokenizer_part))
        with written_whole(out / TOKENS.name) as tokens_part:
            torch.save(stored, tokens_part)         # renamed first: tokens.pt vouches for the tokenizer beside it
    meta, n_val, n_tokens = stored["meta"], len(val), {split: len(stored[split]) for split in ("train", "val")}
    print(f"{name}: {meta['characters']:,} characters, {len(train) + n_val:,} {unit}, {n_val:,} of them for validation")
    print(f"{meta['tokenizer']} tokenizer of {meta['vocab_size']:,} tokens: {tokens_text(n_tokens, meta)}")
    print(f"wrote {out / TOKENS.name} and {out / 'tokenizer.json'}")
    save_results("prepare_data", {**meta, "tokens": n_tokens})
    return stored


def file_parts(paths, encoding="utf-8"):
    """(name, unit, training documents, validation documents) of text files. Raises UserError where they are one document."""
    texts = [read_text(path, encoding) for path in paths]
    whole = "".join(texts)
    is_novel = hashlib.sha256(whole.encode()).hexdigest() == NOVEL_SHA256
    if NOVEL_FILE.name in {Path(path).name for path in paths} and not is_novel:
        print(f"note: this is not the text that the chapter measured ({NOVEL_CHARACTERS:,} characters; here {len(whole):,}), "
              f"so its figures will differ")
    unit, documents = documents_of(texts)
    if len(documents) < 2:
        raise UserError(f"{paths[0]}: one document only, so none is left for validation; give a text with chapters or "
                        f"blank lines, or several files")
    return NOVEL_NAME if is_novel else names_text(paths), unit, *split_last_tenth(documents)


def prepare_files(paths, encoding="utf-8", **options):
    """Make tokens.pt and tokenizer.json from text files; options as write's; returns what tokens.pt holds."""
    return write(*file_parts(paths, encoding), **options)


def byte_corpus(paths=(), seq_len=1):
    """Text files as a Corpus of their UTF-8 bytes, or, without any, the standard library: a vocabulary of 256, so that a
    loss is exact in bits a byte. Raises UserError where a part is too short for a context of seq_len."""
    name, _, *parts = file_parts(paths) if paths else stdlib_parts()
    ids = [np.frombuffer("\n".join(documents).encode(), dtype=np.uint8) for documents in parts]
    train, val = (Tokens([array], BYTE_ALPHABET, f"{name}: its {split} part") for array, split in zip(ids, ("train", "val")))
    corpus = Corpus(f"{name}, as bytes", train, val, BYTE_ALPHABET, {"train": 1.0, "val": 1.0})
    check_length(corpus, name, seq_len)
    return corpus


# --- any amount of text to shards -----------------------------------------------------------------------------------

def tiktoken_encoding(name):
    """tiktoken's encoding of that name. Raises UserError where there is none, or its vocabulary cannot be fetched."""
    try:
        return tiktoken.get_encoding(name)
    except ValueError:
        raise UserError(f"--tokenizer {name}: none of auto, char, byte, {', '.join(sorted(tiktoken.list_encoding_names()))}") from None
    except (OSError, HTTPException) as error:       # requests' errors are OSErrors
        raise UserError(f"tiktoken cannot fetch the vocabulary of {name} ({type(error).__name__}); on a machine with a network run "
                        f"TIKTOKEN_CACHE_DIR=DIR python -c 'import tiktoken; tiktoken.get_encoding(\"{name}\")', copy DIR here and set "
                        f"TIKTOKEN_CACHE_DIR to it") from None


def lines_of(path, encoding):
    """The lines of a text file, .gz or not; of one that has none, pieces."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding=text_codec(encoding)) as f:
            while line := f.readline(PIECE):
                if "\0" in line:
                    raise UserError(f"{path}: not text (it holds NUL characters)")
                yield line
    except UnicodeError as error:
        raise UserError(f"{path}: not {encoding} text ({error}); name its encoding, e.g. --encoding gb18030") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: not a whole .gz file ({error})") from None


def whole_lines(lines):
    """lines_of's lines, the pieces of a long one put together again."""
    whole = ""
    for line in lines:
        whole += line
        if line.endswith("\n"):
            yield whole
            whole = ""
    if whole:
        yield whole


def text_pieces(lines, starts_document):
    """Documents of lines, in pieces of about PIECE characters: (text, whether its document ends there).

    starts_document(line before, line) says where. Within a document a cut falls between a line end and a line that no
    further blanks surround: there GPT-2's tokens end too, so that the pieces give the tokens of the whole. (A text of
    16 times that size without such a place is cut all the same.)
    """
    buffer, size, before = [], 0, ""
    for line in lines:
        starts = buffer and starts_document(before, line)
        clean = before[-1:] == "\n" and before[-2:-1].strip() and line[0].strip()
        if starts or size >= PIECE and clean or size >= 16 * PIECE:
            yield "".join(buffer), bool(starts)
            buffer, size = [], 0
        buffer.append(line)
        size, before = size + len(line), line
    if buffer:
        yield "".join(buffer), True


def field_of(record, field, where):
    """The text in a record of a .jsonl file; UserError where it has none."""
    try:
        record = json.loads(record)
        text = record[field]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = None
    if text is None and isinstance(record, dict) and field in record:
        return ""                       # null is no text, and no fault
    if not isinstance(text, str):
        names = f"it has {', '.join(map(str, record))[:80]}" if isinstance(record, dict) else "it is no JSON object"
        raise UserError(f"{where}: no text in a field {field!r} ({names}); name it with --field")
    return text


def parquet_texts(path, field):
    """The texts in a column of a .parquet file, a batch of rows at a time."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: to read .parquet, install pyarrow: python -m pip install pyarrow") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise UserError(f"{path}: no column {field!r} (it has {', '.join(file.schema_arrow.names)[:80]}); name it with --field")
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                yield from (text for text in batch.column(0).to_pylist() if text)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a .parquet file ({str(error).splitlines()[0]})") from None


def pieces_of(path, alone, encoding, field):
    """The documents of a file in pieces, as text_pieces gives them: the records of .jsonl and .parquet; of a text its
    chapters, else its paragraphs where it is alone, else the file whole."""
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if kind == ".parquet":
        yield from ((text, True) for text in parquet_texts(path, field))
    elif kind == ".jsonl":
        for number, record in enumerate(whole_lines(lines_of(path, encoding)), 1):
            if record.strip() and (text := field_of(record, field, f"{path}, line {number}")):
                yield text, True
    else:
        chapters = sum(1 for _, line in zip(range(2), filter(HEADING.match, lines_of(path, encoding)))) == 2
        yield from text_pieces(lines_of(path, encoding), lambda before, line: bool(
            HEADING.match(line) if chapters else alone and not before.strip() and line.strip()))


def is_held_out(text, share):
    """Whether the document that begins with this piece is for validation, by its hash: the same in any company and order."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") < share * 2 ** 64


class Shard:
    """A split's shard that is being written: under another name, until close gives it its header and its own."""

    def __init__(self, path, kind):
        self.path, self.kind, self.tokens = path, kind, 0
        self.file = open(path.with_name(path.name + ".part"), "wb")
        self.write(np.zeros(HEADER_INTS, "<i4"))

    def append(self, ids):
        self.write(ids)
        self.tokens += len(ids)

    def write(self, array):
        try:
            self.file.write(array.tobytes())
            self.file.flush()
        except OSError as error:
            raise UserError(f"{self.path} cannot be written ({error.strerror}); make room, and the same command goes on") from None

    def close(self):
        header = np.zeros(HEADER_INTS, "<i4")
        header[:3] = self.kind, SHARD_KINDS[self.kind][0], self.tokens
        self.file.seek(0)
        self.write(header)
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.file.name, self.path)


def take_encoding(encoding):
    """Keep the encoding for tokenize_batch in this process."""
    tokenize_batch.encoding = encoding


def shard_kind(n_vocab):
    """The key in SHARD_KINDS whose ids are wide enough for so large a vocabulary."""
    return next(kind for kind, (_, dtype, _) in SHARD_KINDS.items() if n_vocab - 1 <= np.iinfo(dtype).max)


def tokenize_batch(documents):
    """What a process does with a list of (text, ends, held out): by split, its ids, bytes and finished documents."""
    encoding, found = tokenize_batch.encoding, {}
    dtype = SHARD_KINDS[shard_kind(encoding.n_vocab)][1]
    for split, wanted in (("train", False), ("val", True)):
        mine = [(text, ends) for text, ends, held_out in documents if held_out == wanted]
        if any(ENDOFTEXT in text for text, _ in mine):          # spelled out by a text, it is text
            ids = np.concatenate([part for text, ends in mine for part in (
                encoding.encode_to_numpy(text, disallowed_special=()), np.full(int(ends), encoding.eot_token, np.uint32))])
        else:
            ids = encoding.encode_to_numpy("".join(text + ENDOFTEXT * ends for text, ends in mine), allowed_special={ENDOFTEXT})
        found[split] = ids.astype(dtype), sum(len(text.encode()) for text, _ in mine), sum(ends for _, ends in mine)
    return found


def batches_of(paths, place, encoding, field, val_share):
    """The documents from a place (file, piece) on, in batches of about PIECE characters, each with the place after it."""
    held_out = None
    for number, path in enumerate(paths[place[0]:], place[0]):
        batch, size, skip = [], 0, place[1] if number == place[0] else 0
        for n, (text, ends) in enumerate(pieces_of(path, len(paths) == 1, encoding, field), 1):
            text = text.encode(errors="replace").decode()       # halves of characters, which JSON can spell, have no bytes
            held_out = is_held_out(text, val_share) if held_out is None else held_out
            if n > skip:
                batch.append((text, ends, held_out))
                size += len(text)
            held_out = None if ends else held_out
            if size >= PIECE:
                yield batch, (number, n)
                batch, size = [], 0
        yield batch, (number + 1, 0)


def tokenized(encoding, batches):
    """(what tokenize_batch finds, the place after it) for each batch, in order: all cores work, few batches wait.

    In processes, not threads: tiktoken's threads disturb each other, from not at all to half their speed, by chance.
    """
    pending = deque()
    # Linux's copies of this process start at once, with the encoding.
    with worker_pool(take_encoding, encoding, start_method="fork" if sys.platform == "linux" else "spawn") as pool:
        for batch, place in batches:
            pending.append((pool.submit(tokenize_batch, batch), place))
            if len(pending) > 2 * cpu_count():
                future, after = pending.popleft()
                yield future.result(), after
        for future, after in pending:
            yield future.result(), after


def write_shards(paths, name, out, encoding="utf-8", field="text", val_share=0.01, shard_tokens=SHARD_TOKENS, force=False):
    """Tokenize files by tiktoken's encoding of that name on all cores into out's shards; returns what meta.json holds.

    Memory is a few batches a core, whatever the corpus. With each full shard it notes the place it has come to, from
    where the same command goes on after an interruption.
    """
    tokenizer, paths = tiktoken_encoding(name), [regular_file(path) for path in paths]
    recipe = {"made_by": MADE_BY, "tokenizer": name, "sources": [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in paths],
              "field": field, "encoding": encoding, "val_share": val_share, "shard_tokens": shard_tokens}
    if out.is_dir() and (made := read_json(out / "meta.json")) and recipe.items() <= made.items() and is_meta(made):
        print(f"{out} holds these shards already")
        return made
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = locked(out)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror}); take another directory") from None
    with lock:
        state = fill_shards(tokenizer, paths, out, recipe, force)
        meta = {**recipe, "corpus": names_text(paths), "vocab_size": tokenizer.n_vocab, "shards": state["shards"], "documents": state["documents"],
                "tokens": state["tokens"], "bytes_per_token": {split: state["bytes"][split] / n for split, n in state["tokens"].items()}}
        with written_whole(out / "meta.json") as part:
            part.write_text(json.dumps(meta, indent=2) + "\n")
        (out / "progress.json").unlink()
    print(f"{meta['corpus']}: {sum(meta['documents'].values()):,} documents, {meta['documents']['val']:,} of them for validation")
    print(f"{name} tokenizer of {tokenizer.n_vocab:,} tokens: {tokens_text(meta['tokens'], meta)}")
    print(f"wrote {sum(meta['shards'].values())} shards and meta.json in {out}")
    save_results("prepare_data", meta)
    return meta


def fill_shards(tokenizer, paths, out, recipe, force):
    """Write all shards, from where progress.json says; returns the counts by split, as progress.json has them."""
    counts, progress, shards = ("shards", "tokens", "bytes", "documents"), out / "progress.json", {}
    kind = shard_kind(tokenizer.n_vocab)
    state = read_json(progress) or {}
    if state.get("recipe") != recipe or not {"place", *counts} <= state.keys():
        clear_shards(out, force)
        state = {"recipe": recipe, "place": [0, 0], **{what: {"train": 0, "val": 0} for what in counts}}
    else:
        for path in (out / f"{split}_{n:06d}.bin" for split in ("train", "val") for n in range(state["shards"][split])):
            if not path.exists():
                raise UserError(f"{path} is gone, so the shards cannot be finished; start over with --force")
        print(f"going on after {sum(state['tokens'].values()):,} tokens, where {out} was left")

    def note():
        for split in list(shards):
            shards.pop(split).close()
            state["shards"][split] += 1
        with written_whole(progress) as part:
            part.write_text(json.dumps(state))

    note()
    sized = all(path.suffix == ".txt" for path in paths)        # of the others the text's size is not the file's
    with tqdm(total=sum(path.stat().st_size for path in paths) if sized else None, initial=sum(state["bytes"].values()), unit="B",
              unit_scale=True, disable=None) as bar:
        batches = batches_of(paths, state["place"], recipe["encoding"], recipe["field"], recipe["val_share"])
        for found, state["place"] in tokenized(tokenizer, batches):
            for split, (ids, n_bytes, n_documents) in found.items():
                if len(ids):
                    if split not in shards:
                        shards[split] = Shard(out / f"{split}_{state['shards'][split]:06d}.bin", kind)
                    shards[split].append(ids)
                for what, value in (("tokens", len(ids)), ("bytes", n_bytes), ("documents", n_documents)):
                    state[what][split] += value
                bar.update(n_bytes)
            if "train" in shards and shards["train"].tokens >= recipe["shard_tokens"]:
                note()
    note()
    for split, n in state["tokens"].items():
        if not n:
            raise UserError(f"{out}: no document fell into the {split} part; give more documents or another --val-share")
    return state


def clear_shards(out, force):
    """Remove from out what an interrupted write left, and other shards. Raises UserError where there are such, without force."""
    for part in out.glob("*.part"):
        if part.is_dir():
            shutil.rmtree(part)
    there = [p for p in out.iterdir() if re.fullmatch(r"(train|val)_\d{6}\.bin(\.part)?|meta\.json|progress\.json", p.name)]
    if there and not force:
        raise UserError(f"{there[0]} is there, of another text, other flags or another program; write elsewhere with --out DIR, or "
                        f"replace it with --force")
    for path in there:
        path.unlink()


@command
def main(argv=None):
    parser = Parser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="text files (default: the chapter's novel)")
    parser.add_argument("--encoding", default="utf-8", help="of the files, e.g. gb18030 (default: utf-8)")
    parser.add_argument("--tokenizer", default="auto", metavar="NAME",
                        help="char or byte, trained on the text; or gpt2 or another of tiktoken's, into shards (default: auto, char "
                             "for mostly Chinese text)")
    parser.add_argument("--vocab-size", type=positive(int, LARGEST_VOCAB), help=f"tokens in a trained vocabulary (default: {VOCAB_SIZE})")
    parser.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="where to write (default: here)")
    parser.add_argument("--force", action="store_true", help="overwrite tokens that this script did not make")
    shards = parser.add_argument_group("with a tokenizer of tiktoken's")
    shards.add_argument("--field", default="text", metavar="NAME", help="of .jsonl and .parquet, that holds the text (default: text)")
    shards.add_argument("--val-share", type=positive(float, 0.5), default=0.01, metavar="X", help="of the documents, for validation (default: 0.01)")
    shards.add_argument("--shard-tokens", type=positive(int), default=SHARD_TOKENS, metavar="N", help="in one shard (default: 100000000)")
    args = parser.parse_args(argv)
    check_runs()
    if args.tokenizer not in ("auto", "char", "byte"):
        if not args.files or args.vocab_size:
            parser.error(f"--tokenizer {args.tokenizer} takes files, and brings its own vocabulary")
        write_shards(args.files, args.tokenizer, args.out, args.encoding, args.field, args.val_share, args.shard_tokens, args.force)
        return
    options = {"kind": args.tokenizer, "vocab_size": args.vocab_size or VOCAB_SIZE, "out": args.out, "force": args.force}
    if args.files:
        prepare_files(args.files, args.encoding, **options)
    else:
        prepare_default(**options)


if __name__ == "__main__":
    main()
