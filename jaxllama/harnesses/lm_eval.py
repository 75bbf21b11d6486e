"""lm-eval's model ``jaxllama``: ``python -m jaxllama.harnesses.lm_eval run --model jaxllama ...``

The command is lm-eval's own, with this model registered; lm-eval finds no models of other packages
by itself. ``--model_args`` takes ``pretrained=MODEL`` and the options of ``LocalModel``:

    pretrained=DIR,dtype=float32,quantize=w8a8,max_len=4096,deterministic=True,state=DIR

``--batch_size N`` sets the engine's ``max_slots``. The digest is in lm-eval's results (``config``)
and in the last line that is printed. Left out: several processes, truncation on the right, audio
and images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxllama import extras
from jaxllama.errors import JaxLlamaError
from jaxllama.harnesses.local_model import LocalModel
from jaxllama.typing import JsonObject

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    if not extras.is_optional(error.name):
        raise
    missing = extras.missing(str(error.name), "this model of lm-eval")
    if __name__ == "__main__":
        raise SystemExit(f"error: {missing}") from None
    raise missing from None

SAMPLED = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty")
UNUSED = ("do_sample", "until", "max_gen_toks", "max_new_tokens", "max_tokens")
_open: list[LocalModel] = []


@register_model("jaxllama")
class JaxLlamaLM(TemplateLM):
    """A model of lm-eval. pretrained: as for ``jaxllama.load``. max_gen_toks: of an answer whose
    task names no number."""

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str | None = None,
        max_gen_toks: int = 256,
        device: str | None = None,
        max_batch_size: int | None = None,
        local: LocalModel | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if device not in (None, "cuda:0"):  # lm-eval's default
            raise JaxLlamaError(f"device = {device}: choose it by the variable JAX_PLATFORMS")
        if batch_size not in (None, "auto", 1, "1"):
            options.setdefault("max_slots", int(batch_size))
        self._local = local or LocalModel.load(pretrained, **options)
        if self._local.lm.tokenizer is None:
            raise JaxLlamaError(f"{pretrained}: lm-eval needs a model with a tokenizer")
        _open.append(self._local)
        self.tokenizer = self._local.lm.tokenizer
        self._max_gen_toks = max_gen_toks
        self.batch_size = self._local.engine.options.max_slots

    def get_model_info(self) -> JsonObject:
        """Return what lm-eval writes beside its results."""
        origin = {f"model_{key}": value for key, value in self._local.origin.items()}
        return {**origin, "model_digest": self._local.digest}

    # Texts

    @property
    def eot_token_id(self) -> int:
        return self._local.lm.config.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        return self._local.engine.options.max_len

    @property
    def tokenizer_name(self) -> str:
        return self._local.name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        if add_special_tokens is None:  # as a template may have written the first token
            bos = self.tokenizer.bos_id
            begins = None if bos is None else self.tokenizer.token(bos)
            add_special_tokens = not (begins and string.startswith(begins))
        return self.tokenizer.encode(string, add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        # Without a beginning, the answer goes on behind the last message.
        return self.tokenizer.apply_chat_template(
            chat_history, continue_final_message=not add_generation_prompt
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return (self.tokenizer.chat_template or "") if chat_template else None

    # Questions

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        bodies: list[JsonObject] = []
        counts: list[int] = []
        for _texts, context, continuation in requests:
            if not continuation:
                raise JaxLlamaError("a continuation has no tokens of its own")
            tokens = [*context, *continuation][-self.max_length :]
            counts.append(min(len(continuation), len(tokens) - 1))
            bodies.append({"prompt": tokens, "max_tokens": 0, "prompt_logprobs": 0})
        answers = self._local.post_all("/v1/completions", bodies)
        scores: list[tuple[float, bool]] = []
        for body, answer, count in zip(bodies, answers, counts, strict=True):
            entries = answer["choices"][0]["prompt_logprobs"][-count:]
            row = body["prompt"][-count:]
            found = [entry[str(token)] for entry, token in zip(entries, row, strict=True)]
            total = sum(token["logprob"] for token in found)
            scores.append((total, all(token["rank"] == 1 for token in found)))
        for (texts, _, _), score in zip(requests, scores, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        windows: list[tuple[Any, list[int], list[int]]] = []
        counts: list[int] = []
        for [text] in (request.args for request in requests):
            text_windows = [
                make_disjoint_window(pair)
                for pair in get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length - 1,
                    context_len=1,
                )
            ]
            windows += [(None, context, continuation) for context, continuation in text_windows]
            counts.append(len(text_windows))
        scores = iter(self._loglikelihood_tokens(windows))
        totals = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        bodies = [self._body(*request.args) for request in requests]
        answers = self._local.post_all("/v1/completions", bodies)
        texts = [answer["choices"][0]["text"] for answer in answers]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _body(self, context: str, wanted: JsonObject) -> JsonObject:
        for name in wanted:
            if name not in (*SAMPLED, *UNUSED):
                known = ", ".join(sorted((*SAMPLED, *UNUSED)))
                raise JaxLlamaError(f"generation_kwargs: {name}: unknown; known are {known}")
        lengths = (wanted.get(name) for name in ("max_gen_toks", "max_new_tokens", "max_tokens"))
        count = next((n for n in lengths if n is not None), self._max_gen_toks)
        count = min(count, self.max_length - 1)
        until = wanted.get("until") or []
        body: JsonObject = {name: wanted[name] for name in SAMPLED if name in wanted}
        if not wanted.get("do_sample", body.get("temperature", 0) > 0):
            body["temperature"] = 0
        row = self.tok_encode(context)[-(self.max_length - count) :]
        return {
            **body,
            "prompt": row,
            "max_tokens": count,
            "stop": [until] if isinstance(until, str) else until,
        }


def main() -> None:
    """Run lm-eval's command, and print each model's digest behind its table."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
        for local in _open:
            print(f"jaxllama {local.name}: {local.said()}")
    except JaxLlamaError as error:
        raise SystemExit(f"error: {error}") from None
    finally:
        while _open:
            _open.pop().close()


if __name__ == "__main__":
    main()
