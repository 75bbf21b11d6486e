"""Grammars that take too much: of the compiler, of the engine's memory, of the engine's thread."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("llguidance")

from jaxllama.engine import grammar, grammar_process
from jaxllama.engine.grammar import GrammarCompiler
from jaxllama.engine.request import Grammar, QueueFull
from jaxllama.errors import JaxLlamaError
from jaxllama.text.tokenizer import Tokenizer

STATES = Grammar("json_schema", '{"type": "integer", "multipleOf": 99999989}')
WORDS = Grammar("json_schema", json.dumps({"enum": list(range(20_000))}))
FEW = Grammar("regex", "[ab]{3}")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Tokenizer.byte_level(), 258, [257])


@pytest.mark.core
def test_a_compilation_ends_at_its_limits_and_the_next_one_begins(compiler, monkeypatch):
    monkeypatch.setattr(grammar_process, "CPU_SECONDS", 0)  # two seconds at most
    monkeypatch.setattr(grammar_process, "MEMORY", 2**34)
    with pytest.raises(JaxLlamaError, match="json_schema: .* more than 0 s of computing"):
        compiler.matcher(STATES)
    monkeypatch.undo()
    monkeypatch.setattr(grammar_process, "MEMORY", 8 * 2**20)
    with pytest.raises(JaxLlamaError, match="json_schema: .* more than 8 MiB of memory"):
        compiler.matcher(WORDS)
    assert compiler.matcher(FEW).ahead().known == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "hostile",
    [
        STATES,
        Grammar("json_schema", json.dumps({"items": json.loads(STATES.source)})),
        Grammar("lark", "start: %json " + STATES.source),
        Grammar("json_schema", json.dumps({"enum": list(range(300_000))})),
        Grammar("lark", 'start: A\nA: "a"{1000000}{1000000}'),
        Grammar("lark", "start: " + "(" * 200_000 + '"a"' + ")" * 200_000),
        Grammar("lark", '{"grammars": 5}'),
        Grammar("regex", "(" * 50_000 + "a" + ")" * 50_000),
    ],
)
def test_hostile_grammars_are_refused_with_a_sentence(compiler, hostile):
    with pytest.raises(JaxLlamaError, match=f"^{hostile.kind}: "):
        compiler.matcher(hostile)
    assert compiler.matcher(FEW).ahead().known == 1


def test_the_grammars_of_all_requests_share_a_bound(compiler, monkeypatch):
    first = compiler.matcher(WORDS)
    monkeypatch.setattr(grammar, "MEMORY", sum(compiler._sizes) + 2**20)
    with pytest.raises(QueueFull, match="large grammars"):
        compiler.matcher(WORDS)
    compiler.matcher(FEW)
    del first
    compiler.matcher(WORDS)


def test_masks_that_take_too_much_of_the_engines_thread_end_their_request(compiler, monkeypatch):
    monkeypatch.setattr(grammar, "SECONDS", 0.1)
    monkeypatch.setattr(grammar, "SECONDS_A_TOKEN", 0.0)
    ambiguous = compiler.matcher(Grammar("lark", 'start: a\na: a a | "a" | "b"'))
    with pytest.raises(JaxLlamaError, match="masks take too much time"):
        for _ in range(400):
            ambiguous.ahead()
            ambiguous.read([97])


def test_a_child_that_was_killed_is_replaced(compiler):
    compiler.matcher(FEW)
    grammar_process._idle[-1]._process.kill()
    grammar_process._idle[-1]._process.wait()
    assert compiler.matcher(FEW).ahead().known == 1


def test_a_schema_keeps_what_the_library_knows_of_it():
    kept = {"properties": {"a": {"type": "string"}, "d": {"type": "integer"}}}
    given = {"properties": {**kept["properties"], "a": {"type": "string", "pattern": "(?=b)c"}}}
    assert grammar_process.enforceable([given, kept]) == [
        (kept, ("Unsupported pattern: (?=b)c",)),
        (kept, ()),
    ]
