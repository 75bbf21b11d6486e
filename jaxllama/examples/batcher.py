"""Continuous batching with the pure functions.  ``python -m jaxllama.examples.batcher``

Each row of one cache is a slot. A prompt takes the slot of an answer that has ended, while the
other rows go on. The model has a layer with a recurrent state, so ``reset_rows`` must empty the
slot.
"""

from collections import deque

import jax
import jax.numpy as jnp
import numpy as np

import jaxllama as jl

SLOTS, WIDTH, NEW = 2, 8, 6  # rows, longest prompt, tokens of an answer
gla = jl.GLAConfig(n_heads=4, n_kv_heads=4, expand_k=0.5, expand_v=1.0)
small = {"n_layers": 2, "layer_types": ("gla", "attention"), "gla": gla, "vocab_size": 1000}
cfg = jl.load_config("smollm2-135m").replace(**small, eos_token_ids=())
params = jl.init_params(cfg, jax.random.key(0))

rng = np.random.default_rng(0)
prompts = [rng.integers(cfg.vocab_size, size=n).tolist() for n in (5, 8, 3, 6, 4)]
waiting = deque(enumerate(prompts))
answers: dict[int, list[int]] = {}
slots: list[int | None] = [None] * SLOTS  # the prompt of each row

cache = jl.init_cache(cfg, SLOTS, WIDTH + NEW)
newest = np.zeros(SLOTS, np.int32)
while waiting or any(slot is not None for slot in slots):
    tokens, lengths = np.zeros((SLOTS, WIDTH), np.int32), np.zeros(SLOTS, np.int32)
    for row in range(SLOTS):
        if slots[row] is None and waiting:
            slots[row], prompt = waiting.popleft()
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
    if lengths.any():
        cache = jl.reset_rows(cache, jnp.asarray(lengths > 0))
        logits, cache = jl.prefill(cfg, params, jnp.asarray(tokens), jnp.asarray(lengths), cache)
        newest = np.where(lengths > 0, logits.argmax(-1), newest)
    for row, prompt in enumerate(slots):
        if prompt is not None:
            answers.setdefault(prompt, []).append(int(newest[row]))
            if len(answers[prompt]) == NEW:
                slots[row] = None
    logits, cache = jl.decode_step(cfg, params, jnp.asarray(newest), cache)
    newest = np.asarray(logits.argmax(-1))

# Each prompt alone, in a cache of its own.
equal = 0
for number, prompt in enumerate(prompts):
    tokens, lengths = (
        jnp.asarray([prompt + [0] * (WIDTH - len(prompt))]),
        jnp.asarray([len(prompt)]),
    )
    row_cache = jl.init_cache(cfg, 1, WIDTH + NEW)
    alone = (
        jl.generate(cfg, params, tokens, lengths, row_cache, jl.Sampling(), 0, NEW)
        .tokens[0]
        .tolist()
    )
    print(f"prompt {number}: {answers[number]}")
    equal += answers[number] == alone
print(f"{equal} of {len(prompts)} answers are those of the prompt alone")
