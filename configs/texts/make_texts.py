"""Makes ``calibration.txt``, ``held.txt`` and ``test.txt`` from plain-text books of Project
Gutenberg.

    python make_texts.py music.txt katrine.txt pride.txt news.txt

All four are in the public domain (published from 1813 to 1909).  Calibration takes 24,000
characters from the middle of the first three, the held text 44,000 from the fourth, so that no
book is in both.  Methods are chosen by what they do on the held text; published figures are of the
test text, another 44,000 characters of that book, which no choice has looked at.  The Gutenberg
header and licence, page furniture and line breaks inside paragraphs are dropped; the words are the
authors'.

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
    *calibration, other = sys.argv[1:]
    (here / "calibration.txt").write_text("\n".join(excerpt(p, 24_000) for p in calibration))
    (here / "held.txt").write_text(excerpt(other, 44_000))
    (here / "test.txt").write_text(excerpt(other, 44_000, thirds=2))
