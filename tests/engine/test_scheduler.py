"""Scheduling rules, seen through the engine's core: who gets how much of a step, who waits, who is put back."""

import numpy as np
import pytest
from corekit import VOCAB, Bench, depths
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.batch import Batch
from runtime.engine.scheduler import EngineConfig


def prompt(length: int, family: int = 0) -> list[int]:
    return [(family * 13 + 7 * family * at + at) % VOCAB for at in range(length)]


def spy(bench: Bench) -> list[Batch]:
    """The batches that the runner gets."""
    batches: list[Batch] = []
    launch = bench.runner.launch

    def noting(batch: Batch):
        batches.append(batch)
        return launch(batch)

    bench.runner.launch = noting
    return batches


# Fairness


@depths
def test_a_long_prompt_never_freezes_running_streams(depth: int) -> None:
    bench = Bench(depth=depth, context=4096, pages=2000, step_tokens=512, mixed_tokens=32)
    for id in range(4):
        bench.submit(id, prompt(10, id), max_tokens=300, ignore_eos=True)
    for _ in range(8):
        bench.step()
    batches = spy(bench)
    bench.submit(9, prompt(3000, 9), max_tokens=5, ignore_eos=True)
    while (9, 0) not in bench.client.tokens:
        bench.step()
        assert batches[-1].decodes >= 4, "a stream had to wait"
    assert max(int(batch.extend.sum()) for batch in batches) <= 4 + 32
    assert len(batches) <= 3000 / 32 + 4, "the budget was not used"
    bench.drain()
    for id in (0, 1, 2, 3, 9):
        bench.assert_right(id)


@depths
@pytest.mark.parametrize(("context_read", "least"), [(0, 9), (100, 5)])
def test_pieces_of_a_prompt_shrink_as_its_context_grows(depth: int, context_read: int, least: int) -> None:
    """Where attention is dear: a piece's cost, with what its tokens look at and what is read for it, stays the same."""
    costs = {"context_unit": 500, "context_read": context_read}
    bench = Bench(depth=depth, context=4096, pages=2000, step_tokens=512, mixed_tokens=60, **costs)
    bench.submit(0, prompt(10, 0), max_tokens=1000, ignore_eos=True)
    for _ in range(4):
        bench.step()
    batches = spy(bench)
    bench.submit(9, prompt(3000, 9), max_tokens=5, ignore_eos=True)
    while (9, 0) not in bench.client.tokens:
        bench.step()
    pieces = [(int(batch.cached[1]), int(batch.extend[1])) for batch in batches if len(batch.slots) == 2]
    pieces = pieces[: -2 if pieces[-1][1] == 1 else -1]  # the last piece is what was left
    assert pieces[0] == (0, 60) and pieces[-1][1] <= least
    for at, tokens in pieces:
        read = at // context_read if context_read else 0
        assert 60 - (1 + at / 500) < read + tokens * (1 + at / 500) <= 60
    bench.drain()
    bench.assert_right(0)
    bench.assert_right(9)


@pytest.mark.parametrize(("streams", "tokens"), [(1, 26), (4, 32), (7, 38), (20, 40)])
def test_more_streams_have_patience_for_more(streams: int, tokens: int) -> None:
    """Twice what the step costs without the prompt, and never more than mixed_tokens."""
    bench = Bench(context=4096, pages=4000, slots=24, step_tokens=512, mixed_tokens=40, weight_tokens=12)
    for id in range(streams):
        bench.submit(id, prompt(10, id), max_tokens=300, ignore_eos=True)
    for _ in range(30):
        bench.step()
    batches = spy(bench)
    bench.submit(99, prompt(200, 99), max_tokens=5, ignore_eos=True)
    bench.step()
    assert int(batches[-1].extend[-1]) == tokens and batches[-1].decodes == streams


def test_a_prompt_alone_takes_the_whole_budget() -> None:
    bench = Bench(context=4096, pages=2000, step_tokens=512, mixed_tokens=32)
    batches = spy(bench)
    bench.submit(9, prompt(1000), max_tokens=1)
    bench.drain()
    assert [int(batch.extend.sum()) for batch in batches] == [512, 488]


def test_a_short_prompt_overtakes_a_long_one_which_goes_on() -> None:
    bench = Bench(context=4096, pages=2000, step_tokens=64)
    batches = spy(bench)
    bench.submit(1, prompt(2000, 1), max_tokens=1)
    bench.step()
    bench.submit(2, prompt(100, 2), max_tokens=1)
    for _ in range(6):
        bench.step()
    assert (2, 0) in bench.client.tokens and (1, 0) not in bench.client.tokens
    long = [int(batch.extend[list(batch.slots).index(batches[0].slots[0])]) for batch in batches]
    assert min(long) >= 32
    assert all(int(batch.extend.sum()) == 64 for batch in batches)


def test_equal_prompts_are_served_one_after_the_other() -> None:
    bench = Bench(context=4096, pages=2000, step_tokens=64)
    for id in range(3):
        bench.submit(id, prompt(640, id), max_tokens=1)
    first = []
    while bench.core.has_work():
        bench.step()
        first += [id for id, _ in bench.client.tokens if id not in first]
        assert len(first) >= bench.core.stats()["steps"] // 10
    assert first == [0, 1, 2]


def test_budgets_must_be_positive() -> None:
    with pytest.raises(ValueError, match="mixed_tokens must be at least 1, not 0"):
        EngineConfig(mixed_tokens=0)


# Order


def order_of_first_tokens(bench: Bench) -> list[int]:
    while bench.core.has_work():
        bench.step()
    return [id for id, _ in bench.client.tokens]


def test_first_come_first_served() -> None:
    bench = Bench(slots=1)
    for id in range(5):
        bench.submit(id, prompt(9, id), max_tokens=2, ignore_eos=True)
    assert order_of_first_tokens(bench) == [0, 1, 2, 3, 4]


def test_higher_priority_runs_earlier() -> None:
    bench = Bench(slots=1)
    for id, priority in enumerate((0, 1, 0, 2, 1)):
        bench.submit(id, prompt(9, id), max_tokens=2, ignore_eos=True, priority=priority)
    assert order_of_first_tokens(bench) == [3, 1, 4, 0, 2]


def test_higher_priority_does_not_wait_for_a_long_prompt_of_lower() -> None:
    bench = Bench(context=4096, pages=2000, step_tokens=64)
    bench.submit(1, prompt(2000, 1), max_tokens=1)
    bench.step()
    bench.submit(2, prompt(600, 2), max_tokens=1, priority=1)
    bench.submit(3, prompt(600, 3), max_tokens=1)
    for _ in range(11):
        bench.step()
    assert [id for id, _ in bench.client.tokens] == [2]


def test_longest_prefix_first_if_asked_and_nobody_starves() -> None:
    bench = Bench(slots=1, policy="lpm", pages=500)
    bench.submit(0, prompt(40), max_tokens=1)
    bench.drain()
    bench.submit(1, prompt(9, 1), max_tokens=1)
    for id in range(2, 400):
        bench.submit(id, [*prompt(40), id % VOCAB, id // VOCAB], max_tokens=1, ignore_eos=True)
    order = order_of_first_tokens(bench)
    assert order[1:4] == [2, 3, 4]
    assert 200 < order.index(1) < 300


# Memory


@depths
def test_retraction_is_a_pause_and_nothing_else(depth: int) -> None:
    bench = Bench(depth=depth, pages=16, page_tokens=4, slots=4)
    for id in range(4):
        bench.submit(id, prompt(8, id), max_tokens=40, ignore_eos=True)
    bench.core.scheduler.caution = 0.1
    bench.drain()
    for id in range(4):
        bench.assert_right(id)
    assert bench.core.stats()["retractions"] > 0
    # The oldest was never put back: it came first.
    ends = [row.id for row in bench.client.rows if row.finish is not None]
    assert ends[0] == 0


def test_the_lowest_priority_is_put_back_first() -> None:
    bench = Bench(pages=16, page_tokens=4, slots=3)
    for id, priority in enumerate((0, 1, 1)):
        bench.submit(id, prompt(8, id), max_tokens=40, ignore_eos=True, priority=priority)
    bench.core.scheduler.caution = 0.1
    bench.drain()
    assert bench.core.stats()["retractions"] > 0
    assert [row.id for row in bench.client.rows if row.finish is not None] == [1, 2, 0]


@depths
def test_a_higher_priority_that_finds_no_slot_takes_the_newest_of_the_lowest(depth: int) -> None:
    bench = Bench(depth=depth, slots=3, pages=200)
    for id, priority in enumerate((1, 0, 0)):
        bench.submit(id, prompt(8, id), max_tokens=60, ignore_eos=True, priority=priority)
    for _ in range(10):
        bench.step()
    bench.submit(3, prompt(8, 3), max_tokens=5, ignore_eos=True, priority=1)
    bench.submit(4, prompt(8, 4), max_tokens=5, ignore_eos=True)
    bench.submit(5, prompt(8, 5), max_tokens=5, ignore_eos=True, priority=-1)
    while 3 not in {row.id for row in bench.client.rows}:
        bench.step()
        bench.core.check()
    running = [request.id for request in bench.core.scheduler.running]
    assert running == [0, 1, 3] and bench.core.stats()["retractions"] == 1
    bench.drain()
    for id in range(6):
        bench.assert_right(id)
    assert bench.core.stats()["retractions"] == 1
    # Who gave way comes before those of its priority that came later.
    assert [row.id for row in bench.client.rows if row.finish is not None] == [3, 0, 1, 2, 4, 5]


def test_among_equals_nobody_gives_way() -> None:
    bench = Bench(slots=2, pages=200)
    for id in range(4):
        bench.submit(id, prompt(8, id), max_tokens=30, ignore_eos=True, priority=1)
    bench.drain()
    assert bench.core.stats()["retractions"] == 0


@depths
def test_a_higher_priority_that_finds_no_page_takes_as_many_as_it_needs(depth: int) -> None:
    bench = Bench(depth=depth, slots=6, pages=40, page_tokens=4)
    for id in range(4):
        bench.submit(id, prompt(20, id), max_tokens=16, ignore_eos=True)
    for _ in range(10):
        bench.step()
    assert bench.core.stats()["requests_running"] == 4
    bench.submit(9, prompt(70, 9), max_tokens=12, ignore_eos=True, priority=1)
    for _ in range(4):
        bench.step()
    # Four of eight pages each run; one that needs twenty waits until two of them are gone.
    assert [request.id for request in bench.core.scheduler.running] == [0, 1, 9]
    bench.drain()
    for id in (0, 1, 2, 3, 9):
        bench.assert_right(id)


@depths
def test_nobody_gives_way_in_vain(depth: int) -> None:
    """All pages that those below hold would not be enough: they go on."""
    bench = Bench(depth=depth, slots=6, pages=40, page_tokens=4)
    bench.core.scheduler.caution = 1.0
    bench.submit(0, prompt(20, 0), max_tokens=60, ignore_eos=True, priority=1)
    bench.submit(1, prompt(8, 1), max_tokens=16, ignore_eos=True)
    for _ in range(5):
        bench.step()
    bench.core.scheduler.caution = 1.0
    assert bench.core.stats()["requests_running"] == 2
    bench.submit(2, prompt(90, 2), max_tokens=10, ignore_eos=True, priority=1)
    for _ in range(10):
        bench.step()
    assert [request.id for request in bench.core.scheduler.running] == [0, 1]
    bench.drain()
    assert bench.core.stats()["retractions"] == 0
    for id in range(3):
        bench.assert_right(id)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 60),  # tokens of the prompt
            st.integers(1, 40),  # of output
            st.integers(0, 2),  # family: prompts of one begin alike
            st.integers(-1, 3),  # priority
            st.integers(0, 6),  # steps before the next one comes
        ),
        min_size=2,
        max_size=30,
    ),
    depth=st.sampled_from([1, 2]),
    slots=st.integers(1, 4),
    pages=st.integers(26, 60),
    policy=st.sampled_from(["fcfs", "lpm"]),
    prefix_cache=st.booleans(),
)
def test_giving_way_loses_no_token_and_comes_to_an_end(requests, depth, slots, pages, policy, prefix_cache) -> None:
    bench = Bench(depth=depth, slots=slots, pages=pages, page_tokens=4, policy=policy, prefix_cache=prefix_cache)
    scheduler = bench.core.scheduler
    retract, steps = scheduler._retract, 0

    def noted(request) -> None:
        """Nobody gives way to one of its own priority or below, or if there is none."""
        waiting = scheduler.line.first
        crossing = scheduler.rows.cached[scheduler._decoding] >= scheduler.rows.capacity[scheduler._decoding]
        dry = int(crossing.sum()) > scheduler.memory.available_pages or not len(scheduler._decoding)
        assert dry or (waiting is not None and waiting.priority > request.priority)
        retract(request)

    scheduler._retract = noted
    for id, (length, tokens, family, priority, pause) in enumerate(requests):
        bench.submit(id, prompt(length, family), max_tokens=tokens, ignore_eos=True, priority=priority)
        for _ in range(pause):
            bench.step()
            bench.core.check()
    while bench.core.has_work():
        bench.step()
        steps += 1
        assert steps < 40 * len(requests) * 60, "they hinder each other for ever"
    bench.drain()
    for id in range(len(requests)):
        bench.assert_right(id)


@depths
def test_a_prompt_that_finds_no_page_waits_or_comes_again(depth: int) -> None:
    bench = Bench(depth=depth, pages=16, page_tokens=4, mixed_tokens=1)
    bench.submit(1, prompt(4, 1), max_tokens=55, ignore_eos=True)
    bench.submit(2, prompt(40, 2), max_tokens=10, ignore_eos=True)
    bench.core.scheduler.caution = 0.1
    bench.drain()
    bench.assert_right(1)
    bench.assert_right(2)


def test_caution_learns_from_retractions_and_forgets() -> None:
    bench = Bench(pages=16, page_tokens=4, slots=4)
    scheduler = bench.core.scheduler
    scheduler.caution = 0.1
    for id in range(4):
        bench.submit(id, prompt(8, id), max_tokens=40, ignore_eos=True)
    while not scheduler.counts.retractions:
        bench.step()
    cautious = scheduler.caution
    assert cautious > 0.15
    bench.drain()
    for id in range(10, 20):
        bench.submit(id, prompt(3, id), max_tokens=50, ignore_eos=True)
        bench.drain()
    assert scheduler.caution < cautious


def test_enough_memory_is_promised_before_a_request_is_let_in() -> None:
    bench = Bench(pages=16, page_tokens=4, slots=4)
    bench.core.scheduler.caution = 1.0
    for id in range(4):
        bench.submit(id, prompt(8, id), max_tokens=20, ignore_eos=True)
    bench.step()
    assert bench.core.stats()["requests_running"] == 2
    bench.core.scheduler.caution = 1.0
    bench.drain()
    assert bench.core.stats()["retractions"] == 0


def test_the_cache_gives_way_to_requests() -> None:
    bench = Bench(pages=16, page_tokens=4)
    for id in range(30):
        bench.submit(id, prompt(20, id), max_tokens=10, ignore_eos=True)
        bench.drain()
        bench.assert_right(id)
    assert bench.core.stats()["evicted_pages"] > 0


# Ranks


@depths
def test_the_same_calls_make_the_same_batches(depth: int) -> None:
    def run() -> list[list[object]]:
        bench = Bench(depth=depth, pages=24, page_tokens=4, slots=6, policy="lpm", clock=None)
        batches = spy(bench)
        rng = np.random.default_rng(5)
        for id in range(60):
            bench.submit(id, prompt(int(rng.integers(1, 40)), id % 4), max_tokens=int(rng.integers(1, 30)))
            for _ in range(int(rng.integers(0, 4))):
                bench.step()
            if id % 7 == 0:
                bench.core.abort("here", id // 2, 0)
        bench.drain()
        return [[np.asarray(getattr(batch, name)).tolist() for name in Batch.__slots__] for batch in batches]

    assert run() == run()


def test_followers_of_another_rank_are_told_what_the_clock_said() -> None:
    bench = Bench(clock=None)
    bench.submit(1, prompt(5), max_tokens=50, ignore_eos=True, budget_s=0.0)
    for _ in range(5):
        bench.step()
    assert bench.client.last[1, 0].finish is None
    bench.core.expire("here", 1, 0)
    bench.drain()
    assert bench.client.last[1, 0].code == "deadline"
