"""Makes ``calibration.txt``, ``held.txt`` and ``test.txt`` from plain-text books of Project
Gutenberg, and calibration's larger part from what SmolLM2-135M writes itself.

    python -m jaxllama.training.corpus --out own --generate 128 --documents 192 --batch 192 --seed 7
    python make_texts.py music.txt katrine.txt pride.txt news.txt own

All four books are in the public domain (published from 1813 to 1909).  Calibration takes 12,000
characters from the middle of each of the first three, then 78,000 of documents and 40,000 of
conversations (instructions with answers, dialogue) of the model's: what it was trained on, as it
remembers it, is of every kind, and four bits cost less on kinds that it has not seen
(``quantization/README.md``).  Kinds that no choice looks at are in ``unseen/``.  The held text
takes 44,000 characters from the fourth book, so that no book is in both; methods are chosen by what
they do on it and on later parts of the model's own writing.  The test text is another 44,000
characters of that book.  The Gutenberg header and licence, page furniture and line breaks inside
paragraphs are dropped; the words are the authors'.

    music.txt    How to Listen to Music, H. E. Krehbiel, 1896   (Gutenberg 17474)
    katrine.txt  Katrine, Elinor Macartney Lane, 1909           (Gutenberg 14263)
    pride.txt    Pride and Prejudice, Jane Austen, 1813         (Gutenberg 1342)
    news.txt     News from Nowhere, William Morris, 1890        (Gutenberg 3261)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def excerpt(path: str, characters: int, thirds: int = 1) -> str:
    """Whole paragraphs of prose from so many thirds of the way into the book."""
    text = Path(path).read_bytes().decode("ascii", errors="replace").replace("\r\n", "\n")
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    prose = [p for p in paragraphs if len(p) > 120 and not re.search(r"[\[\]*|{}]|Gutenberg", p)]
    kept, size = [], 0
    for paragraph in prose[len(prose) * thirds // 3 :]:
        kept.append(paragraph.replace("_", "").replace("--", " - "))
        size += len(kept[-1])
        if size >= characters:
            break
    return "\n\n".join(kept) + "\n"


if __name__ == "__main__":
    here = Path(__file__).parent
    *calibration, other, own = sys.argv[1:]
    parts = [excerpt(path, 12_000) for path in calibration]
    for name, size, begins in (
        ("documents", 78_000, "<|endoftext|>"),
        ("written", 40_000, "<|im_s"),
    ):
        text = (Path(own) / f"{name}.txt").read_text(encoding="utf-8")
        parts.append(text[: text.rindex(begins, 0, size)])
    (here / "calibration.txt").write_text("\n".join(parts), encoding="utf-8")
    (here / "held.txt").write_text(excerpt(other, 44_000))
    (here / "test.txt").write_text(excerpt(other, 44_000, thirds=2))
