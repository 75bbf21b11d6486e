"""Sums to learn from rewards.  ``python -m jaxllama.examples.sums data/sums``

Writes two-digit sums for ``configs/training/{tiny-sums,grpo-tiny,grpo-arithmetic}.toml``:

    sums.txt       lines such as "12+34=46", of which three in four have an answer 10 too large, so
                   that a model of this text prefers the wrong answer
    sums.jsonl     prompts such as "12+34=" with their answers
                   Both without carries: with them a tiny model learns by luck.
    chat.jsonl     the same as questions to a chat model
"""

import json
import random
import sys
from pathlib import Path

LINES = 6000
PROMPTS, QUESTIONS = 800, 1100  # of which the configurations hold out the last 100

out = Path(sys.argv[1] if len(sys.argv) > 1 else "data/sums")
draw = random.Random(0)
pairs = [(a, b) for a in range(10, 50) for b in range(10, 50)]
draw.shuffle(pairs)
plain_pairs = [(a, b) for a, b in pairs if a % 10 + b % 10 < 10]
lines = []
for number in range(LINES):
    a, b = draw.choice(plain_pairs)
    answer = a + b + (10 if number % 4 else 0)
    lines.append(f"{a}+{b}={answer}\n")
plain = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in plain_pairs[:PROMPTS]]
chat = []
for a, b in pairs[:QUESTIONS]:
    question = f"What is {a} + {b}? Answer with the number alone."
    chat.append({"prompt": [{"role": "user", "content": question}], "answer": f"{a}+{b}"})
out.mkdir(parents=True, exist_ok=True)
(out / "sums.txt").write_text("".join(lines), encoding="utf-8")
for name, rows in (("sums", plain), ("chat", chat)):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (out / f"{name}.jsonl").write_text(text, encoding="utf-8")
print(f"{out}: {LINES} lines of text, {PROMPTS} prompts")
