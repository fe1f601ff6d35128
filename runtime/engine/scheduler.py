"""Who computes what in the next step. One rule: close the gap between a row's two lengths, within a token budget.

Rows that decode come first, one token each. What is left of the budget goes to rows that still have a gap in their
prompt (or in what they had generated before they were retracted), then to requests that wait. While streams run, a
step takes ``mixed_tokens`` of prompt at most, so a long prompt stretches their gaps and never freezes them. Where it is
known what a step costs (``weight_tokens``, ``context_unit``), the budget follows: it grows with the rows that decode,
and tokens weigh more the further into their prompt they stand.

Memory is promised optimistically: a running request is expected to take a part (``caution``) of what it may still
take. When the pool runs dry all the same, the newest request of the lowest priority is retracted: it goes back into
line with its tokens, its pages stay cached as long as nobody needs them, and its client sees a pause. The same befalls
those of lower priority for whose slots or pages one of higher priority waits, if that is what lets it in.

Decisions depend on the order of calls only: no clocks, no sets, no hashes. Ranks that get the same calls at the same
steps do the same.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.engine.batch import I32, Batch, SlotTable
from runtime.engine.leaders import Leaders
from runtime.engine.memory import Memory
from runtime.engine.radix import Eviction, Node
from runtime.engine.request import Request
from runtime.engine.waiting import Policy, WaitingLine

# A running request is never expected to take more tokens than this from now on (times caution).
HORIZON_TOKENS = 4096
# Caution: the part of what they may still generate that running requests are expected to. A retraction says that it
# was too small; a step without one, that it could be smaller.
CAUTION_START, CAUTION_LEAST, CAUTION_DECAY = 0.5, 0.1, 0.998
# Prompts in a step that also decodes may cost so many times what it costs without them.
PATIENCE = 2
# A prompt with this many times less to compute than the first in line may overtake it, in half of the budget.
SHORT_RATIO = 4

_NONE: I32 = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    step_tokens: int = 2048  # computed in one step, at most; also bounds how many requests run
    mixed_tokens: int = 512  # of these, prompt tokens in a step that also decodes
    # What a step costs, in prompt tokens; then one that decodes takes no more than PATIENCE times as much on top.
    weight_tokens: int = (
        0  # reading the weights costs as much as computing so many tokens; 0 = mixed_tokens alone counts
    )
    context_unit: int = 0  # a token with so much text before it costs as much as two; 0 = all cost the same
    context_read: int = 0  # reading so much text before a piece of prompt costs as much as a token; 0 = nothing
    max_running_requests: int = 0  # 0 = as many as there are slots
    max_queued_requests: int = 1024
    policy: Policy = "fcfs"
    prefix_cache: bool = True
    eviction: Eviction = "lru"

    def __post_init__(self) -> None:
        for name in ("step_tokens", "mixed_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(slots=True)
class Counts:
    """Since the start; of requests that were admitted for the first time."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, found in the cache
    retractions: int = 0


class Scheduler:
    def __init__(self, table: SlotTable, num_pages: int, config: EngineConfig) -> None:
        self.config = config
        self.memory = Memory(table, num_pages, config.prefix_cache, config.eviction)
        self.rows = self.memory.rows
        self.line = WaitingLine(config.policy)
        self.running: dict[Request, None] = {}  # in order of admission
        self.caution = CAUTION_START
        self.counts = Counts()
        self.admitted: list[tuple[Request, int]] = []  # since the caller last took them, with their cached tokens
        self._leaders = Leaders(table.page_tokens)
        self._prefilling: dict[Request, None] = {}  # running, with a gap of known tokens
        self._decoding: I32 = _NONE  # slots of the rows that decode; edited when one joins or leaves
        self._joining: list[int] = []
        self._leaving = False
        self._giving_way: list[Request] = []  # to a waiting one that outranks them
        self._levels: dict[int, int] = {}  # how many run, by priority
        self._context_unit = self._context_read = 0  # of the step that is being planned
        self.most_running = min(config.max_running_requests or table.slots, table.slots, config.step_tokens)
        self._page_tokens = table.page_tokens

    @property
    def queue_full(self) -> bool:
        room = self.most_running - len(self.running)
        return len(self.line) >= self.config.max_queued_requests + room

    @property
    def _has_slot(self) -> bool:
        return bool(self.memory.free_slots) and len(self.running) < self.most_running

    # The next step

    def plan(self, busy: bool) -> Batch | None:
        """The next step's work. None: nothing to do, or nothing before a step in flight (``busy``) has given back.

        The plan counts as launched: the lengths have moved on.
        """
        self._edit_decoding()
        if not self.running and not self.line:
            return None
        retracted = False
        while True:
            slots = self._decoding
            cached = self.rows.cached[slots]
            crossing = slots[cached >= self.rows.capacity[slots]]
            if len(crossing) <= self.memory.available_pages:
                self.memory.add_page_each(crossing)
                grants = self._grant_prefills(len(slots), admit=not retracted)
                if self._giving_way:
                    # Nothing is launched yet: what the grants have taken stays with its rows.
                    leaving, self._giving_way = self._giving_way, []
                    if busy:
                        return None
                    for request in leaving:
                        self._retract(request)
                    continue
                if len(slots) or grants:
                    return self._launch(slots, cached, grants)
                if not self._prefilling:
                    return None
            if busy:
                return None
            assert len(self.running) > 1, "a request that runs alone always finds its pages"
            self._retract(max(self.running, key=lambda request: request.rank))
            self.caution = min(1.0, self.caution * 1.5 + 0.05)
            retracted = True

    def _launch(self, slots: I32, cached: I32, grants: dict[Request, int]) -> Batch:
        """The batch of the decoding ``slots`` and of the ``grants``; moves the lengths on."""
        rows, decodes = self.rows, len(slots)
        extend, sample = np.ones(decodes, np.int32), np.ones(decodes, np.bool_)
        if grants:
            more = np.array([request.slot for request in grants], np.int32)
            tokens = np.array(list(grants.values()), np.int32)
            starts = rows.cached[more]
            closed = starts + tokens == rows.length[more]
            samples = closed & (rows.length[more] < rows.limit[more])
            for request, gone in zip(grants, closed.tolist(), strict=True):
                if gone:
                    del self._prefilling[request]
            self._joining.extend(more[samples].tolist())
            slots, cached = np.concatenate([slots, more]), np.concatenate([cached, starts])
            extend, sample = np.concatenate([extend, tokens]), np.concatenate([sample, samples])
        rows.cached[slots] = cached + extend
        rows.length[slots] += sample
        ended = rows.length[slots[:decodes]] >= rows.limit[slots[:decodes]]
        if ended.any():
            rows.decoding[slots[:decodes][ended]] = False
            self._leaving = True
        self.caution = max(CAUTION_LEAST, self.caution * CAUTION_DECAY)
        step, new_slots, page_slots, page_indices = self.memory.launch(slots)
        page_values = self.memory.table.pages[page_slots, page_indices]
        return Batch(step, slots, cached, extend, sample, decodes, new_slots, page_slots, page_indices, page_values)

    def _edit_decoding(self) -> None:
        """Bring the list of decoding rows up to date; before any slot that was left is given to the next request."""
        if self._leaving:
            self._decoding = self._decoding[self.rows.decoding[self._decoding]]
            self._leaving = False
        if self._joining:
            more = np.array(self._joining, np.int32)
            more = more[self.rows.live[more] & (self.rows.length[more] < self.rows.limit[more])]
            self.rows.decoding[more] = True
            self._decoding = np.concatenate([self._decoding, more])
            self._joining = []

    # Prefill and admission

    def _grant_prefills(self, decodes: int, admit: bool) -> dict[Request, int]:
        """Deal what the decodes leave of the budget; pages are taken along."""
        config = self.config
        room = config.step_tokens - decodes
        self._context_unit = config.context_unit if decodes else 0
        self._context_read = config.context_read if decodes else 0
        if decodes:
            room = min(room, config.mixed_tokens)
        if decodes and config.weight_tokens:
            room = min(room, PATIENCE * (config.weight_tokens + decodes))
        grants: dict[Request, int] = {}
        queue = sorted(self._prefilling, key=lambda request: -request.priority)
        waiting = self.line.first if admit else None
        if queue and waiting is not None and waiting.priority > queue[0].priority:
            room = self._admit(grants, room, above=queue[0].priority)
            if self._giving_way:
                return grants
        overtakers: list[Request] = []
        if queue:
            first, gap = queue[0], self._gap(queue[0])
            kept_back = 0
            if gap > room:
                overtakers = [request for request in queue[1:] if self._gap(request) * SHORT_RATIO <= gap]
                if overtakers or (waiting is not None and len(waiting.tokens) * SHORT_RATIO <= gap):
                    kept_back = room // 2
            room -= self._grant(grants, first, room - kept_back)
        for request in overtakers:
            room -= self._grant(grants, request, room)
        if waiting is not None:
            room = self._admit(grants, room)
            if self._giving_way:
                return grants
        for request in queue:
            room -= self._grant(grants, request, room)
        return grants

    def _gap(self, request: Request) -> int:
        return int(self.rows.length[request.slot] - self.rows.cached[request.slot])

    def _grant(self, grants: dict[Request, int], request: Request, room: int) -> int:
        """Give a row more tokens, as far as ``room`` and its gap go and pages are there. Returns the room they take."""
        rows, memory, slot = self.rows, self.memory, request.slot
        given = grants.get(request, 0)
        start, capacity = int(rows.cached[slot]) + given, int(rows.capacity[slot])
        most = capacity + memory.available_pages * self._page_tokens
        unit = self._context_unit
        read = start // self._context_read if self._context_read and not given else 0
        affordable = (room - read) * unit // (unit + start) if unit else room - read
        if room > 0 and not grants:
            affordable = max(affordable, 1)  # a long context never stands still
        tokens = min(affordable, int(rows.length[slot]) - start, most - start)
        if tokens <= 0:
            return 0
        pages = -(-(start + tokens - capacity) // self._page_tokens)
        if pages > 0:
            memory.add_pages(slot, pages)
        grants[request] = given + tokens
        return min(room, read + (-(-tokens * (unit + start) // unit) if unit else tokens))

    def _admit(self, grants: dict[Request, int], room: int, above: int | None = None) -> int:
        """Let waiting requests in (of a priority ``above``) while budget, slots and memory allow.

        Returns what is left of the budget. Where one finds no place but outranks others, ``_giving_way`` tells whom.
        """
        memory, promised = self.memory, -1.0
        first = self.line.first
        if room <= 0 or first is None or not (self._has_slot or self._outranks(first)):
            return room
        for request in self.line.candidates(memory.peek):
            if room <= 0 or (above is not None and request.priority <= above):
                break
            if not self._has_slot and not self._outranks(request):
                break
            node, matched = memory.match(request)
            leader = self._leaders.of(request, matched) if request.scores is None else None
            if leader is not None:
                self.line.follow(request, leader, self._leaders.common_tokens(request, leader))
                continue
            if promised < 0:
                promised = self._promised_pages(np.flatnonzero(self.rows.live))
            expected = self._expected_pages(len(request.tokens), request.limit, matched)
            free = memory.available_pages - memory.tree.unlocked_on_path(node)
            if not self._has_slot or (self.running and promised + expected > free):
                if self._outranks(request):
                    self._giving_way = self._who_gives_way(request, node, promised + expected - free)
                break
            self.line.admitted(request)
            memory.open(request, node, matched)
            self.running[request] = self._prefilling[request] = None
            self._levels[request.priority] = self._levels.get(request.priority, 0) + 1
            self._announce(request)
            self._count(request, matched)
            before = memory.pool.used
            room -= self._grant(grants, request, room)
            promised += expected - (memory.pool.used - before)
        return room

    def _outranks(self, request: Request) -> bool:
        return bool(self._levels) and min(self._levels) < request.priority

    def _who_gives_way(self, request: Request, node: Node, missing_pages: float) -> list[Request]:
        """Whom to retract so that ``request`` can start at ``node``; nobody, if all below its priority are too few."""
        lower = [running for running in self.running if running.priority < request.priority]
        lower.sort(key=lambda running: running.rank, reverse=True)
        for i, pages in enumerate(self.memory.given_back(lower, node)):
            missing_pages -= self._promised_pages(np.array([lower[i].slot]))
            if missing_pages <= pages or i + 1 == len(self.running):
                return lower[: i + 1]
        return []

    def _count(self, request: Request, matched: int) -> None:
        cached_tokens = min(matched, request.prompt_tokens)
        if not request.opened:
            self.counts.cached_tokens += cached_tokens
            self.counts.prompt_tokens += request.prompt_tokens
        self.admitted.append((request, cached_tokens))

    def _announce(self, request: Request) -> None:
        if self.memory.sharing:
            self._leaders.announce(request)

    def _expected_pages(self, length: int, limit: int, capacity: int) -> float:
        ahead = min(limit - length, HORIZON_TOKENS) * self.caution
        return max(0.0, length + ahead - capacity) / self._page_tokens + 1

    def _promised_pages(self, slots: npt.NDArray[np.intp]) -> float:
        """What the requests in these slots are expected to take from now on."""
        rows = self.rows
        length = rows.length[slots]
        ahead = np.minimum(rows.limit[slots] - length, HORIZON_TOKENS) * self.caution
        missing = np.maximum(length + ahead - rows.capacity[slots], 0)
        return float(missing.sum()) / self._page_tokens

    # After a step

    def collected(self, batch: Batch) -> None:
        """The oldest step in flight is through: its KV is there, and what only it used is free."""
        self.rows.computed[batch.slots] = batch.cached + batch.extend
        self.memory.collect(batch.step)

    def prefilled(self, request: Request) -> None:
        """A piece of the request's gap has been computed: others may share it from now on."""
        self.memory.share(request)
        self._announce(request)
        self.line.release(request, int(self.rows.computed[request.slot]))

    def finish(self, request: Request, poisoned: bool = False) -> None:
        """End a running request; its text stays cached, unless its KV is ``poisoned``."""
        self.memory.close(request, poisoned)
        self._leaving = True
        del self.running[request]
        self._levels[request.priority] -= 1
        if not self._levels[request.priority]:
            del self._levels[request.priority]
        self._prefilling.pop(request, None)
        self._leaders.withdraw(request)
        self.line.release(request)

    def forget(self, request: Request) -> None:
        """Drop a request wherever it is."""
        if request.slot >= 0:
            self.finish(request)
        else:
            self.line.leave(request)

    def _retract(self, request: Request) -> None:
        """Send a running request back into line. No step is in flight."""
        assert self.memory.launched == self.memory.collected
        request.tokens = self.memory.table.tokens[request.slot, : self.rows.length[request.slot]].copy()
        self.finish(request)
        if request.scores is not None:
            request.scores = [None]
        self.line.join(request)
        self.counts.retractions += 1
        self._edit_decoding()

    def check(self) -> None:
        """Assert the invariants of memory; walks the whole cache."""
        self.memory.check(self.running)
        assert self.running or not self._leaders
        assert sum(self._levels.values()) == len(self.running)
