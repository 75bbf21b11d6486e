"""Prompts that a model answers for a reward.

    prompts = PromptFile.open(config)
    training, held_out = prompts.split(last)
    training.of_step(step, count, seed)            list of Prompt

Every line of the file is an object with a "prompt", a text or a list of messages, and whatever its
reward reads ("answer", "schema", keys of your own):

    {"prompt": "12+34=", "answer": "46"}
    {"prompt": [{"role": "user", "content": "What is 12 + 34?"}], "answer": "46"}
    {"prompt": [messages], "tools": [...], ...}

The tokenizer's chat template writes messages up to where the answer begins. A seed shuffles the
prompts again for every epoch. The prompts of a step depend on (seed, step) only, so there is no
position to save.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import NamedTuple

from jaxllama.errors import JaxLlamaError
from jaxllama.text.chat.messages import content_text
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.training import conversations
from jaxllama.training.config import TrainConfig
from jaxllama.training.data import epoch_order, run_tokenizer
from jaxllama.typing import JsonObject


class Prompt(NamedTuple):
    """tokens: of the prompt. line: the file's object, which the reward reads."""

    tokens: tuple[int, ...]
    line: JsonObject

    @property
    def text(self) -> str:
        """Return the prompt, or the last message of it."""
        prompt = self.line["prompt"]
        return prompt if isinstance(prompt, str) else content_text(prompt[-1].get("content"))


@dataclasses.dataclass(frozen=True)
class PromptFile:
    """An open file of prompts."""

    tokenizer: Tokenizer
    prompts: list[Prompt]
    sha256: str

    @classmethod
    def open(cls, config: TrainConfig) -> PromptFile:
        """Open the file of a configuration. Raises JaxLlamaError naming the line that is wrong."""
        data = config.data
        assert data.prompts is not None
        tokenizer = run_tokenizer(data.tokenizer, config.init_from)
        room = config.sequence_length - config.answer_tokens
        prompts = []
        for number, line in conversations.lines(data.prompts):
            try:
                prompts.append(Prompt(_tokens(line, tokenizer, room), line))
            except JaxLlamaError as error:
                raise JaxLlamaError(f"{data.prompts}: line {number}: {error}") from None
        if len(prompts) <= data.validation_prompts:
            raise JaxLlamaError(
                f"data.prompts = {data.prompts!r}: {len(prompts)} lines, of which "
                f"data.validation_prompts = {data.validation_prompts} leaves none"
            )
        digest = hashlib.sha256(Path(data.prompts).read_bytes()).hexdigest()
        return cls(tokenizer, prompts, digest)

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def save_tokenizer(self, directory: Path) -> list[Path]:
        """Write the tokenizer's files into ``directory``, and return their paths."""
        return self.tokenizer.save(directory)

    def split(self, last: int) -> tuple[PromptFile, PromptFile]:
        """Return (all but the last ``last`` prompts, the last ones)."""
        cut = len(self) - last
        first, rest = self.prompts[:cut], self.prompts[cut:]
        return dataclasses.replace(self, prompts=first), dataclasses.replace(self, prompts=rest)

    def of_step(self, step: int, count: int, seed: int) -> list[Prompt]:
        """Return the ``count`` prompts of step ``step`` (from 0)."""
        found = []
        for number in range(step * count, (step + 1) * count):
            epoch, place = divmod(number, len(self))
            found.append(self.prompts[int(epoch_order(seed, epoch, len(self))[place])])
        return found


def _tokens(line: JsonObject, tokenizer: Tokenizer, room: int) -> tuple[int, ...]:
    prompt = line.get("prompt")
    if isinstance(prompt, str) and prompt:
        tokens = tokenizer.encode(prompt)
    elif isinstance(prompt, list):
        messages = conversations.checked(prompt, "prompt")
        tokens = tokenizer.encode_chat(messages, tools=conversations.tools_of(line))
    else:
        raise JaxLlamaError("expected a prompt, a text or a list of messages")
    if not tokens:
        raise JaxLlamaError("the prompt has no tokens")
    if len(tokens) > room:
        raise JaxLlamaError(
            f"the prompt has {len(tokens)} tokens; sequence_length less max_new_tokens "
            f"leaves {room}"
        )
    return tuple(tokens)
