"""Answers of /v1/responses: a conversation's newest part as items, whole or as a stream of events.

    ResponseAnswer(run, body, messages, kept)       the answer, whole or streamed

Source: OpenAI's API reference, and its Python client's types. Reasoning tokens are not counted
separately.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel

from jaxllama.serving.api import answers
from jaxllama.serving.api.bodies import Message
from jaxllama.serving.api.logprobs import chat_logprobs
from jaxllama.serving.api.messages import TextPiece
from jaxllama.serving.api.reading import parts_of
from jaxllama.serving.api.response_bodies import (
    InputCall,
    InputMessage,
    InputReasoning,
    ReasoningText,
    Responses,
    add_items,
)
from jaxllama.serving.api.response_schemas import (
    FunctionCallItem,
    IncompleteDetails,
    InputDetails,
    MessageItem,
    OutputDetails,
    OutputText,
    ReasoningItem,
    ReasoningPart,
    ResponseError,
    ResponseObject,
    ResponseUsage,
    Status,
)
from jaxllama.serving.api.schemas import ApiError, TokenLogprob, Usage
from jaxllama.serving.http.runs import CallRun, EventAnswer
from jaxllama.serving.tools.parts import AnswerPart
from jaxllama.typing import JsonObject

OutputItem = ReasoningItem | MessageItem | FunctionCallItem


def _dump(model: BaseModel) -> JsonObject:
    return model.model_dump(exclude_none=True, by_alias=True)


def _usage(usage: Usage) -> ResponseUsage:
    cached = InputDetails(usage.prompt_tokens_details.cached_tokens)
    return ResponseUsage(
        usage.prompt_tokens, cached, usage.completion_tokens, OutputDetails(0), usage.total_tokens
    )


class ResponseAnswer(EventAnswer):
    """A response, whole or streamed.

    messages: the conversation up to the answer, without the instructions. kept: stores a response
    with the conversation that ends with it; called before the last event.
    """

    def __init__(
        self,
        run: CallRun,
        body: Responses,
        messages: list[Message],
        kept: Callable[[ResponseObject, list[Message]], Awaitable[None]],
    ) -> None:
        super().__init__(run)
        self._call, self._body, self._messages, self._kept = run.call, body, messages, kept
        self._logprobs: list[TokenLogprob] = []
        self._output: list[OutputItem] = []
        self._status: Status = "in_progress"
        self._number = 0  # of the next event

    def response(
        self,
        status: Status,
        output: list[OutputItem],
        usage: Usage | None = None,
        error: ResponseError | None = None,
    ) -> ResponseObject:
        body, form = self._body, self._body.text.format if self._body.text else None
        is_cut = status == "incomplete"
        sampling = self._call.requests[0].sampling
        return ResponseObject(
            id=self._call.id,
            object="response",
            created_at=self._call.created,
            status=status,
            error=error,
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self._call.model,
            output=output,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            store=body.store is not False,
            temperature=sampling.temperature,
            text={"format": _dump(form) if form else {"type": "text"}},
            tool_choice=body.tool_choice or "auto",
            tools=[
                {"strict": None, "parameters": None, **_dump(tool)} for tool in body.tools or ()
            ],
            top_p=sampling.top_p if body.top_p is None else body.top_p,
            truncation="disabled",
            usage=None if usage is None else _usage(usage),
            metadata=body.metadata or {},
            warnings=list(self._call.notes) or None,
            background=bool(body.background),
            top_logprobs=body.top_logprobs or 0,
        )

    def _conversation(self, output: list[OutputItem]) -> list[Message]:
        """Return the conversation with the answer."""
        items: list[Any] = []
        for item in output:
            if isinstance(item, ReasoningItem):
                texts = [ReasoningText(type="reasoning_text", text=p.text) for p in item.content]
                items.append(InputReasoning(type="reasoning", content=texts))
            elif isinstance(item, MessageItem):
                text = "".join(part.text for part in item.content)
                items.append(InputMessage(role="assistant", content=text))
            else:
                items.append(
                    InputCall(
                        type="function_call",
                        call_id=item.call_id,
                        name=item.name,
                        arguments=item.arguments,
                    )
                )
        messages = [*self._messages]
        add_items(messages, items)
        return messages

    async def keep(self, response: ResponseObject) -> None:
        await self._kept(response, self._conversation(response.output))

    def _read(self, piece: TextPiece) -> list[JsonObject]:
        found = chat_logprobs(self._call, 0, [piece])
        if found is not None:
            self._logprobs += found.content
        events = [event for part in parts_of(self._reader, piece) for event in self._take(part)]
        if piece.finish_reason is not None:
            self._status = "completed" if piece.finish_reason == "stop" else "incomplete"
            if not self._output:
                events += self._begin(AnswerPart("content", ""))
            last = self._output[-1]
            if isinstance(last, MessageItem):  # of text that a stop string held back
                last.content[0].logprobs += self._taken()
            events += self._end(self._status)
        return events

    async def _whole(self) -> ResponseObject:
        response = self.response(self._status, self._output, self.run.usage())
        await self.keep(response)
        return response

    def _first(self) -> list[JsonObject]:
        begun = self.response("in_progress", [])
        names = "created", "in_progress"
        return [{"type": f"response.{name}", "response": begun} for name in names]

    def _last(self, answer: ResponseObject) -> list[JsonObject]:
        return [{"type": f"response.{answer.status}", "response": answer}]

    def _failure(self, error: ApiError) -> bytes:
        detail = error.body().error
        return self._written(
            {"type": "error", "code": detail.code, "message": detail.message, "param": detail.param}
        )

    def _written(self, event: JsonObject) -> bytes:
        self._number += 1
        return super()._written({**event, "sequence_number": self._number - 1})

    def _take(self, part: AnswerPart) -> list[JsonObject]:
        events: list[JsonObject] = []
        kinds = {"reasoning": ReasoningItem, "content": MessageItem, "arguments": FunctionCallItem}
        if part.kind == "call" or not (
            self._output and isinstance(self._output[-1], kinds[part.kind])
        ):
            events += self._end("completed")
            events += self._begin(part)
        item = self._output[-1]
        if isinstance(item, FunctionCallItem):
            if part.kind == "arguments":
                item.arguments += part.text
                events.append(self._tell("function_call_arguments.delta", delta=part.text))
        elif part.text:
            item.content[0].text += part.text
            name = "output_text" if isinstance(item, MessageItem) else "reasoning_text"
            more: JsonObject = {}
            if isinstance(item, MessageItem):
                more = {"logprobs": self._taken()}
                item.content[0].logprobs += more["logprobs"]
            events.append(self._tell(f"{name}.delta", content_index=0, delta=part.text, **more))
        return events

    def _taken(self) -> list[TokenLogprob]:
        """Return the logprobs of the tokens since the last delta."""
        taken, self._logprobs = self._logprobs, []
        return taken

    def _begin(self, part: AnswerPart) -> list[JsonObject]:
        number = len(self._output)
        suffix = f"{self._call.id.removeprefix('resp_')}_{number}"
        if part.kind == "call":
            id = answers.tool_call_id(self._call, 0, part)
            self._output.append(
                FunctionCallItem(f"fc_{suffix}", "function_call", id, part.text, "", "in_progress")
            )
            return [self._tell("output_item.added")]
        if part.kind == "reasoning":
            item: OutputItem = ReasoningItem(f"rs_{suffix}", "reasoning", [], [], "in_progress")
            piece: Any = ReasoningPart("reasoning_text", "")
        else:
            item = MessageItem(f"msg_{suffix}", "message", "assistant", [], "in_progress")
            piece = OutputText("output_text", "", [], [])
        self._output.append(item)
        events = [self._tell("output_item.added")]
        item.content.append(piece)
        return [*events, self._tell("content_part.added", content_index=0, part=piece)]

    def _end(self, status: Status) -> list[JsonObject]:
        """Return the events that end the current item."""
        if not self._output or self._output[-1].status != "in_progress":
            return []
        item = self._output[-1]
        item.status = status
        if isinstance(item, FunctionCallItem):
            done = self._tell(
                "function_call_arguments.done", name=item.name, arguments=item.arguments
            )
            return [done, self._tell("output_item.done")]
        piece = item.content[0]
        name = "output_text" if isinstance(item, MessageItem) else "reasoning_text"
        more = {"logprobs": piece.logprobs} if isinstance(piece, OutputText) else {}
        return [
            self._tell(f"{name}.done", content_index=0, text=piece.text, **more),
            self._tell("content_part.done", content_index=0, part=piece),
            self._tell("output_item.done"),
        ]

    def _tell(self, name: str, /, **more: Any) -> JsonObject:
        """Return an event. Its values are copied, because the item still changes."""
        item, number = self._output[-1], len(self._output) - 1
        fields: JsonObject = (
            {"item": item} if name.startswith("output_item") else {"item_id": item.id}
        )
        event: JsonObject = {"type": f"response.{name}", "output_index": number, **fields, **more}
        for key, value in event.items():
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                event[key] = dataclasses.asdict(value)
        return event
