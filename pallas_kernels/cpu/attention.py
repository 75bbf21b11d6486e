"""Attention of one query token a row over its cache: the program of ``decode_attention`` and, with
RoPE and the cache's write before it, of ``rope_and_attend``.  ``cpu.attend`` plans and calls it.

A row's keys are cut into parts, in the order of ``cpu.scores``.  The cut does not depend on the
threads or the other rows:

    scores of a part's keys, their weights, sums of weight times value   phase 1, by rows and parts
    the parts joined in turn                                             phase 2, by rows, kv heads

So a query's result is the same bits for any threads and other rows, and the same as from
``cpu.prefill``.  All arithmetic is float32 on the cached values; a row of one part is done after
phase 1.

A part takes 16 tokens at a time through all heads, in the order of memory.  Each token prefetches
the one that lies 16 tokens ahead, so the cache is read at the rate of memory.

With RoPE, the part that ends with the new token first writes it to the cache.  Several consecutive
rows may be tokens of one row of the cache (a draft being verified); an extra first phase then
writes them all.  So each token gets the bits of its own decode step.  Cache arrays are operands
and results at once.

Source: Flash-Decoding's split over keys (as ``attention.op``).  Leaves out: float8 caches; head
widths that are no multiple of 16 features (32 with int4 or RoPE); RoPE before an int4 cache, which
is in another basis; so many heads that a part's stack exceeds ``attend.STACK`` bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pallas_kernels.cpu.cache import AttendForm
from pallas_kernels.cpu.handler import Phase
from pallas_kernels.cpu.parts import VALUES, CallRows, Join, KeyPart, Write, ahead
from pallas_kernels.cpu.scores import KEYS, PART

if TYPE_CHECKING:
    from pallas_kernels.cpu.emit import Emitter, Value
    from pallas_kernels.cpu.frame import CallFrame
    from pallas_kernels.cpu.target import Target


@dataclasses.dataclass(frozen=True)
class Attend(AttendForm):
    """The program of attention over a cache.

    Results: heads, parts (a record a part and head: sums, then total and largest), k, v.
    Attributes: eps, scale, window.
    """

    @property
    def results(self) -> int:
        return 2 + 2 * self.cache.arrays * self.new

    @property
    def stack(self) -> int:
        """Bytes: queries, sums and scores of all heads, scales, keys, tokens."""
        floats = self.heads * (2 * self.cache.width + PART + PART // VALUES)
        floats += self.cache.heads * PART
        return 4 * (floats + KEYS * self.cache.width) + 8 * (PART + ahead(self.cache))

    def phases(self, target: Target) -> Sequence[Phase]:
        def count_owners(e: Emitter, call: CallFrame) -> Value:
            body = CallRows(self, e, call)
            several = e.b.icmp_unsigned(">", body.sharing, e.i64(1))
            return e.b.select(several, body.owners, e.i64(0))

        def written(e: Emitter, call: CallFrame, i: Value) -> None:
            Write(self, e, call).chunk(i)

        def count_parts(e: Emitter, call: CallFrame) -> Value:
            body = CallRows(self, e, call)
            return body.batch * body.most_parts()

        def part(e: Emitter, call: CallFrame, i: Value) -> None:
            KeyPart(self, e, call).chunk(i)

        def count_joined(e: Emitter, call: CallFrame) -> Value:
            body = CallRows(self, e, call)
            many = body.most_parts() > 1
            heads = body.batch * self.cache.heads
            return e.b.select(many, heads, e.i64(0))

        def joined(e: Emitter, call: CallFrame, i: Value) -> None:
            Join(self, e, call).chunk(i)

        phases = [Phase(count_parts, part), Phase(count_joined, joined)]
        return [Phase(count_owners, written), *phases] if self.new else phases
