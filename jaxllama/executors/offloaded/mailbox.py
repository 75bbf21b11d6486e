"""Mailbox: a run's thread that computes experts while the device's program waits for them.

    box = Mailbox(store, policy, width)
    with box.serving(kind, sizes, experts):       the CPU's part of some layers, a turn each
        programs.fetched(..., box.mail)           the device posts these turns, and waits in each

The host dispatches both and waits for neither. Each is one program, so no turn needs Python. The
thread waits for the device's words in machine code (``pallas_kernels.cpu.mail``). Turns are served
in the order of the calls.

Left out: experts on disk, those without a handler on the CPU, and more than ``CPU_PAIRS`` pairs.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Generator
from typing import Any

import jax
import numpy as np

from jaxllama.executors.offloaded import expert_programs as programs
from jaxllama.executors.offloaded.cpu_attention import cpu
from jaxllama.offload.policy import CPU_PAIRS, Policy
from jaxllama.offload.store import Store
from pallas_kernels.cpu.mail import ANSWERED, POSTED, MailLayout
from pallas_kernels.experts.mail import turn_at, words_of

SECONDS = 10.0  # for turns that the device has to post before one that it will not
# The last turn of each job, and the arguments of ``served``; None ends the thread.
Jobs = queue.SimpleQueue[tuple[int, tuple[Any, ...]] | None]


class Mailbox:
    """The mail of one run, and its thread; see the module docstring.

    mail: what the device knows of it.  width: floats of a token.
    """

    def __init__(self, store: Store, policy: Policy, width: int) -> None:
        nbytes = MailLayout(CPU_PAIRS, width, CPU_PAIRS).nbytes
        self._memory = store.pin(np.zeros(nbytes, np.uint8))
        start = self._memory.unsafe_buffer_pointer()
        words = words_of(start)
        mail = programs.Mail(words, None, None)
        if not policy.computes_all:
            costs = (np.array(cost, np.float32) for cost in (policy.cpu_expert, policy.cpu_token))
            mail = programs.Mail(words, *costs)
        self.mail = jax.device_put(mail, store.on_device)
        self._start = jax.device_put(words, cpu())
        self._turn = 0
        self._failed: list[BaseException] = []
        self._jobs: Jobs = queue.SimpleQueue()
        work = self._jobs, self._memory, self._failed
        threading.Thread(target=_work, args=work, name="offload-mail", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    @contextlib.contextmanager
    def serving(
        self,
        kind: programs.CpuKind,
        sizes: MailLayout,
        experts: programs.CpuExperts,
    ) -> Generator[None]:
        """Begin to wait for the next turns of the mail, one a layer, and to compute their experts.

        The body dispatches the program that posts them; if it raises, nobody waits for it.
        Raises what an earlier turn has raised.
        """
        self.check()
        first, self._turn = self._turn + 1, self._turn + experts.tables[0].shape[0]
        self._jobs.put((self._turn, (kind, sizes, self._start, words_of(first), experts)))
        try:
            yield
        except BaseException:
            start, until = self._memory.unsafe_buffer_pointer(), time.monotonic() + SECONDS
            while turn_at(start + ANSWERED).value < first - 1 and time.monotonic() < until:
                time.sleep(1e-3)  # the device still posts earlier turns, over this one
            turn_at(start + POSTED).value = self._turn
            raise

    def check(self) -> None:
        """Raise what a turn has raised."""
        if self._failed:
            raise self._failed[0]


def _work(jobs: Jobs, memory: jax.Array, failed: list[BaseException]) -> None:
    """Serve layers until there is None."""
    answered = turn_at(memory.unsafe_buffer_pointer() + ANSWERED)
    while (job := jobs.get()) is not None:
        turn, what = job
        try:
            programs.served(*what).block_until_ready()
        except BaseException as error:  # noqa: BLE001  the caller raises it in its own thread
            failed.append(error)
            answered.value = turn  # the device waits
