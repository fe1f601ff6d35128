"""Who computes what in the next step. One rule: close the gap between a row's two lengths, within a token budget.

Rows that decode come first, one token each. What is left of the budget goes to rows that still have a gap in their
prompt (or in what they had generated before they were retracted), then to requests that wait. While streams run, a
step takes ``mixed_tokens`` of prompt at most, so a long prompt stretches their gaps and never freezes them.

Memory is promised optimistically: a running request is expected to take a part (``caution``) of what it may still
take. When the pool runs dry all the same, the newest request of the lowest priority is retracted: it goes back into
line with its tokens, its pages stay cached as long as nobody needs them, and its client sees a pause.

Decisions depend on the order of calls only: no clocks, no sets, no hashes. Ranks that get the same calls at the same
steps do the same.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from runtime.engine.batch import I32, Batch, SlotTable
from runtime.engine.pages import PagePool
from runtime.engine.radix import Eviction, Node, RadixTree
from runtime.engine.request import Request, Rows
from runtime.engine.waiting import Policy, WaitingLine

# A running request is never expected to take more tokens than this from now on (times caution).
HORIZON_TOKENS = 4096
# Caution: the part of what they may still generate that running requests are expected to. A retraction says that it
# was too small; a step without one, that it could be smaller.
CAUTION_START, CAUTION_LEAST, CAUTION_DECAY = 0.5, 0.1, 0.998
# A prompt with this many times less to compute than the first in line may overtake it, in half of the budget.
SHORT_RATIO = 4

_NONE: I32 = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    step_tokens: int = 2048  # computed in one step, at most; also bounds how many requests run
    mixed_tokens: int = 512  # of these, prompt tokens in a step that also decodes
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
    evicted_pages: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """What a request leaves behind, until ``step``, the last that uses it, is through."""

    step: int
    pages: I32
    slot: int = -1
    node: Node | None = None
    poisoned: bool = False


class Scheduler:
    def __init__(self, table: SlotTable, num_pages: int, config: EngineConfig) -> None:
        self.table = table
        self.config = config
        self.rows = Rows(table.slots)
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(table.page_tokens, config.eviction)
        self.line = WaitingLine(config.policy)
        self.running: dict[Request, None] = {}  # in order of admission
        self.caution = CAUTION_START
        self.counts = Counts()
        self.admitted: list[tuple[Request, int]] = []  # since the caller last took them, with their cached tokens
        self._prefilling: dict[Request, None] = {}  # running, with a gap of known tokens
        self._decoding: I32 = _NONE  # slots of the rows that decode; edited when one joins or leaves
        self._joining: list[int] = []
        self._leaving = False
        self._computing: dict[tuple[str, bytes], Request] = {}  # text up to the page that this request computes next
        self._computing_key: dict[Request, tuple[str, bytes]] = {}
        self._free_slots = list(range(table.slots - 1, -1, -1))
        most = config.max_running_requests or table.slots
        self._most_running = min(most, table.slots, config.step_tokens)
        self._limbo: deque[Held] = deque()  # what steps in flight may still use
        self._launched = 0
        self._collected = 0
        # Changes of the table for the next batch.
        self._new_slots: list[int] = []
        self._page_slots: list[I32] = []
        self._page_indices: list[I32] = []
        self._swapped: list[tuple[Request, int, int]] = []  # whose pages, from which index on, and how many

    @property
    def max_tokens(self) -> int:
        """The longest a request can become: its row and the pool hold it. The last token needs no KV."""
        return min(self.table.context_tokens, self.pool.total * self.table.page_tokens + 1)

    @property
    def available_pages(self) -> int:
        return self.pool.free + self.tree.evictable_pages

    @property
    def queue_full(self) -> bool:
        room = self._most_running - len(self.running)
        return len(self.line) >= self.config.max_queued_requests + room

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
            crossing = np.flatnonzero(cached >= self.rows.capacity[slots])
            if len(crossing) > self.available_pages:
                if busy:
                    return None
                self._retract()
                retracted = True
                continue
            self._add_page_each(slots[crossing])
            grants = self._grant_prefills(len(slots), admit=not retracted)
            if len(slots) or grants:
                return self._launch(slots, cached, grants)
            if busy or not self._prefilling:
                return None
            assert len(self.running) > 1, "a request that runs alone always finds its pages"
            self._retract()
            retracted = True

    def _launch(self, slots: I32, cached: I32, grants: dict[Request, int]) -> Batch:
        rows = self.rows
        decodes = len(slots)
        extend = np.ones(decodes, np.int32)
        sample = np.ones(decodes, np.bool_)
        if grants:
            more = np.array([request.slot for request in grants], np.int32)
            tokens = np.array(list(grants.values()), np.int32)
            starts = rows.cached[more]
            closes = (starts + tokens == rows.length[more]) & (rows.length[more] < rows.limit[more])
            slots = np.concatenate([slots, more])
            cached = np.concatenate([cached, starts])
            extend = np.concatenate([extend, tokens])
            sample = np.concatenate([sample, closes])
        self._launched += 1
        ends = cached + extend
        rows.cached[slots] = ends
        rows.length[slots] += sample
        rows.last_step[slots] = self._launched
        if grants:
            for request, at_end in zip(grants, (ends[decodes:] >= rows.length[more] - closes).tolist(), strict=True):
                if at_end:
                    del self._prefilling[request]
            self._joining.extend(more[closes].tolist())
        if (rows.length[slots[:decodes]] >= rows.limit[slots[:decodes]]).any():
            rows.decoding[slots[:decodes]] = rows.length[slots[:decodes]] < rows.limit[slots[:decodes]]
            self._leaving = True
        self.caution = max(CAUTION_LEAST, self.caution * CAUTION_DECAY)
        for request, first, count in self._swapped:
            if request.slot >= 0:
                self._page_slots.append(np.full(count, request.slot, np.int32))
                self._page_indices.append(np.arange(first, first + count, dtype=np.int32))
        page_slots = np.concatenate(self._page_slots) if self._page_slots else _NONE
        page_indices = np.concatenate(self._page_indices) if self._page_indices else _NONE
        batch = Batch(
            step=self._launched,
            slots=slots,
            cached=cached,
            extend=extend,
            sample=sample,
            decodes=decodes,
            new_slots=np.array(self._new_slots, np.int32),
            page_slots=page_slots,
            page_indices=page_indices,
            page_values=self.table.pages[page_slots, page_indices],
        )
        self._new_slots, self._page_slots, self._page_indices, self._swapped = [], [], [], []
        return batch

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
        room = self.config.step_tokens - decodes
        if decodes:
            room = min(room, self.config.mixed_tokens)
        grants: dict[Request, int] = {}
        queue = list(self._prefilling)
        overtakers: list[Request] = []
        if queue:
            first, gap = queue[0], self._gap(queue[0])
            kept_back = 0
            if gap > room:
                overtakers = [request for request in queue[1:] if self._gap(request) * SHORT_RATIO <= gap]
                waiting = self.line.first if admit else None
                if overtakers or (waiting is not None and len(waiting.tokens) * SHORT_RATIO <= gap):
                    kept_back = room // 2
            self._grant(grants, first, room - kept_back)
        for request in overtakers:
            self._grant(grants, request, room - sum(grants.values()))
        left = room - sum(grants.values())
        if left > 0 and admit and self.line:
            left = self._admit(grants, left)
        for request in queue:
            if left <= 0:
                break
            left -= self._grant(grants, request, left)
        return grants

    def _gap(self, request: Request) -> int:
        return int(self.rows.length[request.slot] - self.rows.cached[request.slot])

    def _grant(self, grants: dict[Request, int], request: Request, tokens: int) -> int:
        """Give a row up to ``tokens`` more, as far as its gap goes and pages are there. Returns how many."""
        rows, page_tokens, slot = self.rows, self.table.page_tokens, request.slot
        given = grants.get(request, 0)
        start = int(rows.cached[slot]) + given
        capacity = int(rows.capacity[slot])
        tokens = min(tokens, int(rows.length[slot]) - start, capacity + self.available_pages * page_tokens - start)
        if tokens <= 0:
            return 0
        pages = -(-(start + tokens - capacity) // page_tokens)
        if pages > 0:
            self._add_pages(slot, pages)
        grants[request] = given + tokens
        return tokens

    def _admit(self, grants: dict[Request, int], room: int) -> int:
        """Let waiting requests in while budget, slots and memory allow. Returns what is left of the budget."""
        promised = -1.0
        sharing = self.config.prefix_cache
        for request in self.line.candidates(self._cached_tokens):
            if room <= 0 or len(self.running) >= self._most_running or not self._free_slots:
                break
            node, matched = self.tree.root, 0
            if sharing and request.scores is None:
                usable = len(request.tokens) - 1  # the last token is computed in any case: it yields the next
                node, matched = self.tree.match(request.tokens[:usable], request.salt)
                leader = self._leader_of(request, matched)
                if leader is not None:
                    self.line.follow(request, leader, self._common_tokens(request, leader))
                    continue
            if promised < 0:
                promised = self._promised_pages()
            expected = self._expected_pages(len(request.tokens), request.limit, matched)
            if self.running and promised + expected > self.available_pages - self.tree.unlocked_on_path(node):
                break
            self.line.admitted(request)
            self._start(request, node, matched)
            before = self.pool.used
            room -= self._grant(grants, request, room)
            promised += expected - (self.pool.used - before)
        return room

    def _start(self, request: Request, node: Node, matched: int) -> None:
        """Give a request its slot, with ``matched`` tokens of shared pages."""
        rows, table = self.rows, self.table
        slot = self._free_slots.pop()
        request.slot = slot
        request.node = node
        request.shared_pages = matched // table.page_tokens
        self.tree.lock(node)
        table.pages[slot, : request.shared_pages] = self.tree.path(node)
        request.write(table)
        rows.cached[slot] = rows.computed[slot] = rows.capacity[slot] = matched
        rows.length[slot] = len(request.tokens)
        rows.limit[slot] = request.limit
        rows.live[slot] = True
        rows.decoding[slot] = False
        rows.verbose[slot] = request.params.logprobs >= 0
        rows.id[slot], rows.attempt[slot] = request.id, request.attempt
        rows.request[slot] = request
        self.running[request] = None
        self._prefilling[request] = None
        self._new_slots.append(slot)
        self._announce(request)
        cached_tokens = min(matched, request.prompt_tokens)
        if not request.opened:
            self.counts.cached_tokens += cached_tokens
            self.counts.prompt_tokens += request.prompt_tokens
        self.admitted.append((request, cached_tokens))

    def _cached_tokens(self, request: Request) -> int:
        return self.tree.peek(request.tokens[:-1], request.salt) if self.config.prefix_cache else 0

    def _expected_pages(self, length: int, limit: int, capacity: int) -> float:
        ahead = min(limit - length, HORIZON_TOKENS) * self.caution
        return max(0.0, length + ahead - capacity) / self.table.page_tokens + 1

    def _promised_pages(self) -> float:
        """What the running requests are expected to take from now on."""
        rows = self.rows
        slots = np.array([request.slot for request in self.running], np.int32)
        length = rows.length[slots]
        ahead = np.minimum(rows.limit[slots] - length, HORIZON_TOKENS) * self.caution
        missing = np.maximum(length + ahead - rows.capacity[slots], 0)
        return float(missing.sum()) / self.table.page_tokens

    # Prefixes that are being computed

    def _announce(self, request: Request) -> None:
        """Say which page this request computes next, so that others who need it wait for it."""
        if not self.config.prefix_cache:
            return
        self._withdraw(request)
        tokens = (request.shared_pages + 1) * self.table.page_tokens
        if tokens <= len(request.tokens):
            key = (request.salt, request.tokens[:tokens].tobytes())
            if key not in self._computing:
                self._computing[key] = request
                self._computing_key[request] = key

    def _withdraw(self, request: Request) -> None:
        key = self._computing_key.pop(request, None)
        if key is not None:
            del self._computing[key]

    def _leader_of(self, request: Request, matched: int) -> Request | None:
        tokens = matched + self.table.page_tokens
        if not self._computing or tokens >= len(request.tokens):
            return None
        return self._computing.get((request.salt, request.tokens[:tokens].tobytes()))

    def _common_tokens(self, request: Request, leader: Request) -> int:
        """Up to where waiting for the leader saves work: whole pages of common text, the last token aside."""
        size = min(len(request.tokens) - 1, len(leader.tokens))
        differs = request.tokens[:size] != leader.tokens[:size]
        common = int(differs.argmax()) if differs.any() else size
        return common - common % self.table.page_tokens

    # After a step

    def collected(self, batch: Batch) -> None:
        """The oldest step in flight is through: its KV is there, and what only it used is free."""
        self._collected = batch.step
        self.rows.computed[batch.slots] = batch.cached + batch.extend
        while self._limbo and self._limbo[0].step <= self._collected:
            self._let_go(self._limbo.popleft())

    def prefilled(self, request: Request) -> None:
        """A piece of the request's gap has been computed: others may share it from now on."""
        if self.config.prefix_cache:
            self._share(request)
            self._announce(request)
        self.line.release(request, int(self.rows.computed[request.slot]))

    def _share(self, request: Request) -> None:
        """Put the whole pages that are computed into the tree. Where it has them already, the row takes the tree's."""
        slot, first, node = request.slot, request.shared_pages, request.node
        last = int(self.rows.computed[slot]) // self.table.page_tokens
        if last <= first or node is None:
            return
        row = self.table.pages[slot]
        tokens = self.table.tokens[slot, first * self.table.page_tokens : last * self.table.page_tokens]
        request.node, known = self.tree.extend(node, tokens, row[first:last], request.salt)
        request.shared_pages = last
        self.pool.keep(last - first - len(known))
        if len(known):
            copies = row[first : first + len(known)].copy()
            row[first : first + len(known)] = known
            self._swapped.append((request, first, len(known)))
            self._let_go(Held(int(self.rows.last_step[slot]), copies))

    # Leaving

    def finish(self, request: Request, poisoned: bool = False) -> None:
        """End a running request; its text stays cached, unless its KV is ``poisoned``."""
        slot, rows, node = request.slot, self.rows, request.node
        assert node is not None
        if self.config.prefix_cache and not poisoned:
            self._share(request)
            node = request.node
        own = self.table.pages[slot, request.shared_pages : rows.capacity[slot] // self.table.page_tokens].copy()
        rows.live[slot] = rows.decoding[slot] = False
        self._leaving = True
        del self.running[request]
        self._prefilling.pop(request, None)
        self._withdraw(request)
        self.line.release(request)
        request.slot, request.node, request.shared_pages = -1, None, 0
        rows.request[slot] = None
        self._let_go(Held(int(rows.last_step[slot]), own, slot, node, poisoned))

    def forget(self, request: Request) -> None:
        """Drop a request wherever it is."""
        if request.slot >= 0:
            self.finish(request)
        else:
            self.line.leave(request)

    def _retract(self) -> None:
        """Send the newest request of the lowest priority back into line. No step is in flight."""
        request = max(self.running, key=lambda running: running.rank)
        assert self._launched == self._collected and len(self.running) > 1
        slot = request.slot
        request.tokens = self.table.tokens[slot, : self.rows.length[slot]].copy()
        self.finish(request)
        if request.scores is not None:
            request.scores = [None]
        self.line.join(request)
        self.counts.retractions += 1
        self.caution = min(1.0, self.caution * 1.5 + 0.05)
        self._edit_decoding()

    def flush(self) -> int:
        """Drop cached prefixes that nobody uses. Returns how many pages that were."""
        pages = self.tree.flush()
        self.pool.reclaim(pages)
        return len(pages)

    # Pages

    def _add_page_each(self, slots: I32) -> None:
        """One more page for each of these (different) slots."""
        if len(slots):
            indices = self.rows.capacity[slots] // self.table.page_tokens
            self.table.pages[slots, indices] = self._take(len(slots))
            self.rows.capacity[slots] += self.table.page_tokens
            self._page_slots.append(slots)
            self._page_indices.append(indices)

    def _add_pages(self, slot: int, count: int) -> None:
        first = int(self.rows.capacity[slot]) // self.table.page_tokens
        self.table.pages[slot, first : first + count] = self._take(count)
        self.rows.capacity[slot] += count * self.table.page_tokens
        self._page_slots.append(np.full(count, slot, np.int32))
        self._page_indices.append(np.arange(first, first + count, dtype=np.int32))

    def _take(self, count: int) -> I32:
        if count > self.pool.free:
            evicted = self.tree.evict(count - self.pool.free)
            self.pool.reclaim(evicted)
            self.counts.evicted_pages += len(evicted)
        return self.pool.take(count)

    def _let_go(self, held: Held) -> None:
        """Free these once the last step that uses them is through."""
        if held.step > self._collected:
            self._limbo.append(held)
            return
        self.pool.give(held.pages)
        if held.slot >= 0:
            self._free_slots.append(held.slot)
        if held.node is not None:
            self.tree.unlock(held.node)
            if held.poisoned:
                self.pool.reclaim(self.tree.discard(held.node))

    def check(self) -> None:
        """Assert that every page has one owner, every slot one user, and the lengths make sense."""
        rows, page_tokens = self.rows, self.table.page_tokens
        used = [_NONE, *(held.pages for held in self._limbo)]
        slots = self._free_slots + [held.slot for held in self._limbo if held.slot >= 0]
        for request in self.running:
            slot = request.slot
            slots.append(slot)
            pages = int(rows.capacity[slot]) // page_tokens
            assert request.shared_pages <= pages and request.node is not None
            assert rows.computed[slot] <= rows.cached[slot] <= min(rows.length[slot], rows.capacity[slot])
            assert rows.length[slot] <= rows.limit[slot]
            assert np.array_equal(self.tree.path(request.node), self.table.pages[slot, : request.shared_pages])
            used.append(self.table.pages[slot, request.shared_pages : pages])
        assert sorted(slots) == list(range(self.table.slots)), "a slot is lost or used twice"
        self.pool.check(np.concatenate(used), self.tree.check())
        if not self.running and not self._limbo:
            assert self.tree.evictable_pages == self.pool.cached and not self._computing
