"""What all tests share: a small corpus, each test's own directory, and no network."""
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import prepare_data

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    """Every test runs in an empty directory, where scripts leave their tokens and runs/, and cannot reach the network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def unreachable():
        raise OSError("no network in tests")

    monkeypatch.setattr(prepare_data, "fetch_novel", unreachable)
    return tmp_path


def english_text(n_paragraphs=40, words=60, seed=0):
    """Paragraphs of made-up English: a few hundred words, drawn with a fixed seed."""
    rng = random.Random(seed)
    syllables = ["ta", "ri", "mon", "ke", "lo", "shu", "ven", "dar", "pi", "so"]
    lexicon = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(300)]
    return "\n\n".join(" ".join(rng.choices(lexicon, k=words)) + "." for _ in range(n_paragraphs))


def chinese_text(chapters=20, characters=900, seed=0):
    """Chapters in the novel's form: headings 第…回：, sentences of random characters from a small alphabet."""
    rng = random.Random(seed)
    alphabet = [chr(0x4E00 + 37 * i) for i in range(200)]
    numerals = "○一二三四五六七八九"
    text = ""
    for n in range(1, chapters + 1):
        text += f"第{''.join(numerals[int(d)] for d in str(n))}回：" + "".join(rng.choices(alphabet, k=8)) + "\n"
        text += "".join(rng.choices([*alphabet, "，", "。"], k=characters)) + "。\n"
    return text


def save_tokens(path="tokens.pt", vocab_size=512, n_train=20_000, n_val=4_000, meta=True, seed=0):
    """A token file of random ids, in which each id decides the next with some noise, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.empty(n_train + n_val, dtype=torch.long)
    ids[0] = 1
    noise = torch.randint(0, 3, (len(ids),), generator=generator).tolist()
    for i in range(1, len(ids)):
        ids[i] = (ids[i - 1] * 5 + 7 + noise[i]) % vocab_size
    ids = ids.to(prepare_data.id_dtype(vocab_size))
    stored = {"train": ids[:n_train].clone(), "val": ids[n_train:].clone()}
    if meta:
        stored["meta"] = {"made_by": prepare_data.MADE_BY, "corpus": "test", "vocab_size": vocab_size,
                          "bytes_per_token": {"train": 4.0, "val": 4.0}}
    torch.save(stored, path)
    return stored


def run_script(script, *args, env=None, timeout=300, **popen):
    """Run a script as a reader does; returns the finished process, its output as text."""
    return subprocess.run([sys.executable, str(ROOT / script), *map(str, args)], capture_output=True, text=True,
                          timeout=timeout, env={**os.environ, **(env or {})}, **popen)


def assert_one_line(process_or_capture, *words):
    """The habit for what a person can put right: status 2 and one line on standard error that has these words."""
    error = process_or_capture.stderr.strip()
    assert process_or_capture.returncode == 2, error
    assert len(error.splitlines()) == 1 and "Traceback" not in error, error
    for word in words:
        assert str(word) in error, error


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Refusal:
    """Call a script's main in this process and hold what a shell would see of its refusal."""

    def __init__(self, main, argv, capsys):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([str(a) for a in argv])
        self.returncode, self.stderr = stopped.value.code, capsys.readouterr().err


@pytest.fixture
def refused(capsys):
    """refused(main, *argv, words=(...)): main refuses these arguments in one line that has these words."""
    def check(main, *argv, words=()):
        assert_one_line(Refusal(main, argv, capsys), *words)
    return check


@pytest.fixture(scope="session")
def novel():
    """The chapter's novel: ./sanguo.txt or the path in SANGUO."""
    path = Path(os.environ.get("SANGUO", ROOT / "sanguo.txt"))
    if not path.exists():
        pytest.skip("needs the novel: ./sanguo.txt, or its path in SANGUO")
    return path.resolve()
