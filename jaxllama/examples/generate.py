"""Prompts to text: greedy, sampled, streamed.  ``python -m jaxllama.examples.generate``"""

import jaxllama as jl

# A preset's name, a directory of Hugging Face's files, a .gguf file or a hub id.
lm = jl.load("smollm2-135m")

# Several prompts are one batch, each with its own sampling and seed: a row's tokens do not depend
# on its neighbours.  Each gets a Generation: text, tokens, logprobs, finish_reason.
prompts = ["The capital of France is", "Once upon a time"]
sampling = [jl.Sampling(), jl.Sampling(temperature=0.8, top_p=0.95)]  # greedy, random
for out in lm.generate(prompts, max_new_tokens=8, sampling=sampling, seed=[0, 7]):
    print(repr(out.text), out.finish_reason, f"first logprob {out.logprobs[0]:.2f}")

# Text during decoding, with a stop string. Leaving the loop early ends the work.
for piece in lm.stream("1, 2, 3,", 40, stop=["8"]):
    print(piece, end="", flush=True)
print()

# And: lm.chat([{"role": "user", "content": "Hi"}]) answers by the model's chat template,
# lm.save("dir") writes a Hugging Face directory.
