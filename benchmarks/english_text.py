"""English text from Debian's documentation as tokens: python -m benchmarks.english_text OUT

It downloads the packages of PACKAGES with `apt-get download` (Debian 12), takes the paragraphs of
prose from their pages, each once, learns a byte-pair tokenizer from them, and writes tokens.npz
with the arrays `train` and `held_out` (uint16) and tokenizer.json. No text belongs to both.
"""

import argparse
import gzip
import hashlib
import html
import random
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

PACKAGES = (
    *("anarchism", "apache2-doc", "bible-kjv-text", "debian-handbook", "debian-history"),
    *("debian-reference-en", "dict-devil", "dict-foldoc", "dict-gcide", "freebsd-manpages"),
    *("gap-doc", "gimp-help-en", "gnome-user-docs", "libboost1.81-doc", "libreoffice-help-en-us"),
    *("linux-doc-6.1", "manpages", "manpages-dev", "maxima-doc", "octave-doc", "perl-doc"),
    *("postgresql-doc-15", "python-django-doc", "python3.11-doc", "racket-doc", "rust-doc"),
)
OTHER_LANGUAGES = re.compile(r"/(?!en|C/)[a-z]{2}(-[A-Z]{2})?/|\.(?!en\.)[a-z]{2}\.html|/[a-z]{2}_")
VOCABULARY = 16384
HELD_OUT = 0.01  # of the pages


def pages(folder: Path) -> Iterator[str]:
    """Yield the text of each page of the packages in a folder."""
    for package in sorted(folder.glob("*.deb")):
        with (
            subprocess.Popen(
                ["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE
            ) as process,
            tarfile.open(fileobj=process.stdout, mode="r|") as files,
        ):
            for member in files:
                name = member.name
                if not member.isfile() or OTHER_LANGUAGES.search(name):
                    continue
                kind = re.search(
                    r"\.(x?html?|txt|rst|pod|page|xhp|\d)(\.gz)?$|\.dict(\.dz)$|bible.*raw", name
                )
                if kind is None or (stream := files.extractfile(member)) is None:
                    continue
                raw = stream.read()
                if raw[:2] == b"\x1f\x8b":
                    raw = gzip.decompress(raw)
                yield text_of(raw.decode("utf-8", "ignore"))


def text_of(page: str) -> str:
    """Return the prose of a page, without markup, one paragraph a line."""
    if "<" in page and re.search(r"<(p|para|body|page)\b", page):
        page = re.sub(r"(?s)<(script|style|pre|head|table)\b.*?</\1>", " ", page)
        page = re.sub(r"\s+", " ", page)
        page = re.sub(r"</?(p|div|li|h\d|dd|dt|para|section|ul|ol|br|title)\b[^>]*>", "\n\n", page)
        page = html.unescape(re.sub(r"<[^>]*>", "", page))
    page = re.sub(r"(?m)^\.[A-Z]{2}\b.*$|^\.\\\".*$|\\f[BIRP]|\\", "", page)  # marks of man pages
    kept = []
    for paragraph in re.split(r"\n\s*\n", page):
        line = " ".join(paragraph.split())
        prose = sum(map(line.count, "abcdefghijklmnopqrstuvwxyz ,."))
        if len(line) > 80 and prose > 0.9 * len(line) and line.count(" ") > len(line) / 9:
            kept.append(line)
    return "\n".join(kept)


def main() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--packages", type=Path, help="a folder with the packages")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    folder = arguments.packages
    if folder is None:
        folder = arguments.out
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
    seen: set[bytes] = set()
    found = []
    for page in pages(folder):
        lines = []
        for line in page.split("\n"):
            key = hashlib.blake2b(line.encode(), digest_size=8).digest()
            if line and key not in seen:
                seen.add(key)
                lines.append(line)
        # Long dictionaries and books count as many pages.
        text = "\n".join(lines)
        found += [text[i : i + 20000] for i in range(0, len(text), 20000)]
    random.Random(0).shuffle(found)
    print(f"{len(found)} pages, {sum(map(len, found)) / 1e6:.1f} million characters", flush=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(found[: len(found) // 3], trainer)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    ids = []
    for start in range(0, len(found), 500):
        ids += [
            np.array([*made.ids, 0], np.uint16)
            for made in tokenizer.encode_batch_fast(found[start : start + 500])
        ]
    split = int(len(ids) * HELD_OUT)
    train, held_out = np.concatenate(ids[split:]), np.concatenate(ids[:split])
    np.savez_compressed(arguments.out / "tokens.npz", train=train, held_out=held_out)
    print(f"{len(train)} tokens for training, {len(held_out)} held out")


if __name__ == "__main__":
    main()
