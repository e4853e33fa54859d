"""Text to tokens: the first step of every script here, and the one place that reads token files.

    python prepare_data.py                    the chapter's novel, or, offline, Python's own sources
    python prepare_data.py FILE...            any text; documents are its chapters, files or paragraphs
    python prepare_data.py --encoding gb18030 novel.txt

It writes tokens.pt ({"train", "val", "meta"}) and tokenizer.json, in seconds. On the chapter's novel it finds
597,228 characters in 120 chapters and makes 410,934 training and 40,717 validation tokens of them.

A tokens.pt with just {"train", "val"}, as the chapter's earlier scripts write it, is read as it is.
"""
import codecs
import hashlib
import math
import re
import sys
import sysconfig
import urllib.error
import urllib.request
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from model import GPTConfig, Parser, UserError, check_runs, command, positive, save_results, written_whole

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
INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64}
VALIDATION_SHARE = 10                   # one document in ten
# A heading stands at the start of a line: 第一回：, 第12章 and the like, or CHAPTER XII.
HEADING = re.compile(r"^[ \t\u3000]*(?:第[〇○零一二三四五六七八九十百千两廿卅0-9]{1,9}[回章](?=[：:\s])"
                     r"|(?:CHAPTER|Chapter)[ \t]+(?:[IVXLC]+|[0-9]+)\b)", re.M)
CJK = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]")
# Of the standard library: no tests, no installed packages; nor generated tables and what systems package apart.
STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "idlelib", "lib2to3"}


# --- reading tokens -------------------------------------------------------------------------------------------------

@dataclass
class Corpus:
    """A tokenized text: train and val are 1-D integer tensors of ids below vocab_size."""

    name: str
    train: torch.Tensor
    val: torch.Tensor
    vocab_size: int
    bytes_per_token: dict | None        # UTF-8 bytes of a split over its tokens; None where nobody recorded it

    def __str__(self):
        return (f"corpus: {self.name}: {len(self.train):,} training and {len(self.val):,} validation tokens, "
                f"vocabulary {self.vocab_size:,}")

    def bits_per_byte(self, nats, split="val"):
        """A loss in nats a token as bits a byte of the split's text; None where its bytes are unknown."""
        return nats / math.log(2) / self.bytes_per_token[split] if self.bytes_per_token else None


def load_corpus(path=TOKENS, seq_len=1):
    """Read a token file whose two parts hold at least one window of seq_len tokens and its targets.

    Where the default file is missing, the default corpus is made first. Raises UserError for a file that is missing,
    is not a token file, or holds ids that its vocabulary does not have. Nothing in the file is ever executed.
    """
    path = Path(path)
    if path == TOKENS and not path.exists():
        print(f"no {TOKENS} here: making the default one first")
        prepare_default()
    corpus = read_tokens(path)
    for split in ("train", "val"):
        n = len(getattr(corpus, split))
        if n < seq_len + 2:             # sample_batch draws a start below n - seq_len - 1
            raise UserError(f"{path}: its {split} part has {n:,} tokens, a context of {seq_len:,} needs {seq_len + 2:,}; "
                            f"give a longer text or a shorter context")
    return corpus


def add_data_flag(parser):
    parser.add_argument("--data", type=Path, default=TOKENS, metavar="FILE",
                        help=f"token file that prepare_data.py made (default: {TOKENS}, made first where there is none)")


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
    return Corpus(meta["corpus"], parts["train"], parts["val"], meta["vocab_size"], meta.get("bytes_per_token"))


def is_meta(meta):
    """Whether meta is what write records: a printable name, a vocabulary's size, and, where known, bytes per token."""
    if not isinstance(meta, dict):
        return False
    name, size, ratio = (meta.get(key) for key in ("corpus", "vocab_size", "bytes_per_token"))
    return (isinstance(name, str) and name.isprintable() and type(size) is int and 0 < size <= LARGEST_VOCAB
            and (ratio is None or isinstance(ratio, dict)
                 and all(type(ratio.get(split)) in (int, float) and 1e-3 < ratio[split] < 1e6 for split in ("train", "val"))))


def token_ids(value, where):
    """value, if it is a 1-D tensor of integers in plain memory, in a type that torch computes with; else UserError."""
    plain = (isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu" and not value.is_nested
             and value.dtype in INTEGERS and value.dim() == 1 and value.is_contiguous())
    if not plain:
        raise UserError(f"{where} is not a list of token ids (a 1-D tensor of integers); make it again with: python prepare_data.py FILE...")
    return value.long() if value.dtype in (torch.uint16, torch.uint32) else value


def known_name(path, parts):
    """A name for a token file that carries none: the chapter's readers have one of these."""
    is_novel = tuple(map(len, parts.values())) == NOVEL_TOKENS
    return printable(f"{path} ({NOVEL_NAME})" if is_novel else f"{path} (no meta)")


def printable(name):
    """A name without what a terminal would obey or could not show: line ends, escapes, stray surrogates."""
    return "".join(c if c.isprintable() else "?" for c in name)


def check_ids(ids, vocab_size, where, recorded=True):
    """Raise UserError unless ids, a 1-D integer tensor, holds values in [0, vocab_size) alone."""
    if not len(ids):
        raise UserError(f"{where} is empty")
    low, high = int(ids.min()), int(ids.max())
    if low < 0:
        raise UserError(f"{where} has the id {low}: ids of 32,768 and above wrap in int16; store them wider")
    if high >= vocab_size:
        why = "its meta says" if recorded else "it has no meta, so the chapter's is taken:"
        raise UserError(f"{where} has the id {high:,}, beyond the vocabulary ({why} {vocab_size:,}); "
                        f"make it again with: python prepare_data.py FILE...")


def windows_at(tokens, starts, seq_len):
    """The windows of a 1-D tensor of tokens that begin at starts: inputs and targets, each (len(starts), seq_len) int64."""
    windows = tokens[torch.as_tensor(starts)[:, None] + torch.arange(seq_len + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def sample_batch(tokens, seq_len, batch_size, generator):
    """Random windows, as windows_at gives them: one torch.randint a batch, as the chapter draws, so that its seeds
    give its batches."""
    return windows_at(tokens, torch.randint(0, len(tokens) - seq_len - 1, (batch_size,), generator=generator), seq_len)


def window_starts(n_tokens, seq_len, global_batch, seed, step):
    """Where the windows of a step begin: (global_batch,) int64, a function of seed and step and nothing else.

    Micro-batch i of the step is the i-th slice, whoever computes it; every position is equally likely.
    """
    return np.random.default_rng((seed, step)).integers(0, n_tokens - seq_len, global_batch)


def load_tokenizer(data=TOKENS):
    """The tokenizer.json beside a token file. Raises UserError where there is none."""
    path = Path(data).with_name("tokenizer.json")
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


# --- text to documents ----------------------------------------------------------------------------------------------

def read_text(path, encoding="utf-8"):
    """A text file's characters, newlines as \\n, without a byte order mark. Raises UserError where it is none."""
    path = regular_file(path)
    try:
        mark = codecs.lookup(encoding).name == "utf-8"
        text = path.read_text(encoding="utf-8-sig" if mark else encoding)
        text.encode()                   # utf-7 and utf-16 can decode to halves of characters, which no tokenizer takes
    except UnicodeError as error:
        raise UserError(f"{path}: not {encoding} text ({error.reason if hasattr(error, 'reason') else error}); "
                        f"name its encoding, e.g. --encoding gb18030") from None
    except LookupError:
        raise UserError(f"--encoding {encoding}: Python knows no such encoding") from None
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


def stdlib_documents():
    """The source files of the Python standard library, sorted by path: a text that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p.relative_to(root) for p in root.rglob("*.py"))
    texts = [(root / p).read_text(encoding="utf-8", errors="replace")
             for p in paths if not STDLIB_SKIPPED.intersection(p.parts)]
    return [text for text in texts if text.strip()]


def prepare_default(**options):
    """Make tokens.pt from the novel (in sanguo.txt, or fetched), else from Python's own sources; options as write's."""
    refuse_to_overwrite(options.get("out", HERE), options.get("force", False))
    if not NOVEL_FILE.exists():
        print(f"fetching {NOVEL_URL}")
        try:
            novel = fetch_novel()
        except (OSError, ValueError) as error:      # ValueError: an answer that is no HTTP, a malformed proxy
            print(f"it cannot be reached ({getattr(error, 'reason', None) or error}): using Python's own source files "
                  f"instead; to use a text of yours: python prepare_data.py FILE")
            documents = stdlib_documents()
            val = documents[VALIDATION_SHARE - 1::VALIDATION_SHARE]
            del documents[VALIDATION_SHARE - 1::VALIDATION_SHARE]
            return write(f"Python {sys.version_info.major}.{sys.version_info.minor} standard library", "files",
                         documents, val, **options)
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


def write(name, unit, train, val, kind="auto", vocab_size=VOCAB_SIZE, out=HERE, force=False):
    """Tokenize, write out/tokens.pt and out/tokenizer.json, print a summary; returns what tokens.pt holds."""
    refuse_to_overwrite(out, force)
    stored, tokenizer = tokenize(name, train, val, kind, vocab_size)
    with written_whole(out / "tokenizer.json") as tokenizer_part:
        tokenizer.save(str(tokenizer_part))
        with written_whole(out / TOKENS.name) as tokens_part:
            torch.save(stored, tokens_part)         # renamed first: tokens.pt vouches for the tokenizer beside it
    meta, n_val = stored["meta"], len(val)
    print(f"{name}: {meta['characters']:,} characters, {len(train) + n_val:,} {unit}, {n_val:,} of them for validation")
    print(f"{meta['tokenizer']} tokenizer of {meta['vocab_size']:,} tokens: "
          + ", ".join(f"{len(stored[split]):,} {label} tokens ({meta['bytes_per_token'][split]:.2f} bytes each)"
                      for split, label in (("train", "training"), ("val", "validation"))))
    print(f"wrote {out / TOKENS.name} and {out / 'tokenizer.json'}")
    save_results("prepare_data", {**meta, "tokens": {split: len(stored[split]) for split in ("train", "val")}})
    return stored


def prepare_files(paths, encoding="utf-8", **options):
    """Make tokens.pt and tokenizer.json from text files; options as write's; returns what tokens.pt holds."""
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
    name = NOVEL_NAME if is_novel else ", ".join(Path(p).name for p in paths[:3]) + (", ..." if len(paths) > 3 else "")
    return write(printable(name), unit, *split_last_tenth(documents), **options)


@command
def main(argv=None):
    parser = Parser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="text files (default: the chapter's novel)")
    parser.add_argument("--encoding", default="utf-8", help="of the files, e.g. gb18030 (default: utf-8)")
    parser.add_argument("--tokenizer", choices=("auto", "char", "byte"), default="auto",
                        help="character-level or byte-level BPE (default: auto, char for mostly Chinese text)")
    parser.add_argument("--vocab-size", type=positive(int, LARGEST_VOCAB), default=VOCAB_SIZE, help="tokens in the vocabulary (default: 8192)")
    parser.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="where to write (default: here)")
    parser.add_argument("--force", action="store_true", help="overwrite a tokens.pt that this script did not make")
    args = parser.parse_args(argv)
    check_runs()
    options = {"kind": args.tokenizer, "vocab_size": args.vocab_size, "out": args.out, "force": args.force}
    if args.files:
        prepare_files(args.files, args.encoding, **options)
    else:
        prepare_default(**options)


if __name__ == "__main__":
    main()
