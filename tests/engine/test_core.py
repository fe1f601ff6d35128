"""The engine's core over the fake runner: whatever happens, everyone gets the tokens that its text defines."""

import pytest
from corekit import EOS, VOCAB, Bench, depths, ids
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.batch import Batch
from runtime.engine.build import WARM_UP
from runtime.engine.fake import POISON, continuation
from runtime.messages import SamplingParams, Submit, TokenLogprobs

# Single requests


@depths
def test_one_request(depth: int) -> None:
    bench = Bench(depth=depth)
    bench.submit(1, [3, 1, 4, 1, 5], max_tokens=20, ignore_eos=True)
    bench.drain()
    bench.assert_right(1)
    opened = bench.client.opened[1, 0]
    assert (opened.prompt_tokens, opened.cached_tokens, opened.prompt_tail) == (5, 0, ids([3, 1, 4, 1, 5]))


@depths
def test_a_request_ends_at_an_end_token_and_says_so(depth: int) -> None:
    bench = Bench(depth=depth, context=1000, pages=300)
    bench.submit(1, [1, 2], max_tokens=900)
    bench.drain()
    bench.assert_right(1)
    last = bench.client.last[1, 0]
    assert (last.finish, last.stop_token, last.tokens[-1] in EOS) == ("stop", True, True)


@depths
def test_stop_token_ids_end_a_request_that_ignores_the_models_own(depth: int) -> None:
    bench = Bench(depth=depth, context=1000, pages=300)
    bench.submit(1, [1, 2], max_tokens=900, ignore_eos=True, stop_token_ids=(5, 2**31 - 1))
    bench.drain()
    bench.assert_right(1)
    assert bench.client.last[1, 0].tokens == (5,)
    assert set(EOS) & set(bench.client.tokens[1, 0])


@depths
def test_no_end_before_min_tokens(depth: int) -> None:
    bench = Bench(depth=depth, context=1000, pages=300)
    bench.submit(1, [1, 2], max_tokens=900, min_tokens=200)
    bench.drain()
    bench.assert_right(1)
    assert len(bench.client.tokens[1, 0]) > 200


@depths
def test_a_request_ends_where_the_context_does(depth: int) -> None:
    bench = Bench(depth=depth, context=24)
    bench.submit(1, list(range(20)), max_tokens=100, ignore_eos=True)
    bench.drain()
    bench.assert_right(1)
    assert len(bench.client.tokens[1, 0]) == 4 and bench.client.last[1, 0].finish == "length"


@depths
def test_a_request_ends_where_the_pool_does(depth: int) -> None:
    bench = Bench(depth=depth, pages=4, page_tokens=4)
    bench.submit(1, list(range(10)), max_tokens=100, ignore_eos=True)
    bench.drain()
    assert len(bench.client.tokens[1, 0]) == 7  # 16 positions and the token after the last
    bench.assert_right(1)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "the prompt is empty"),
        (list(range(24)), "leaves no room for an answer in the context of 24 tokens"),
        (list(range(20)), "the KV pool holds 16: it can never run here"),
    ],
)
def test_what_can_never_run_is_refused_in_words(prompt: list[int], words: str) -> None:
    bench = Bench(pages=4, page_tokens=4, context=24)
    bench.submit(1, prompt)
    bench.drain()
    last = bench.client.last[1, 0]
    assert last.finish == "error" and words in last.error


def test_a_full_queue_refuses_first_attempts_only() -> None:
    bench = Bench(slots=2, max_queued_requests=1)
    for id in range(4):
        bench.submit(id, [1, 2, id], max_tokens=2)
    bench.submit(4, [1, 2, 4], attempt=2, max_tokens=2)
    bench.drain()
    assert "queue is full" in bench.client.last[3, 0].error and bench.client.last[3, 0].code == "queue_full"
    for id, attempt in ((0, 0), (1, 0), (2, 0), (4, 2)):
        bench.assert_right(id, attempt)


# Resumption and attempts


@depths
def test_a_resumed_request_goes_on_where_it_was(depth: int) -> None:
    bench = Bench(depth=depth)
    prompt, params = [3, 1, 4, 1, 5], {"max_tokens": 20, "ignore_eos": True, "seed": 9}
    tokens, _ = continuation(prompt, SamplingParams(**params), EOS, VOCAB, 128)
    for had in range(21):
        bench.submit(had, prompt, attempt=had, output=tokens[:had], **params)
        bench.drain()
        bench.assert_right(had, had, had=had)
        opened = bench.client.opened[had, had]
        assert (opened.output, opened.prompt_tokens) == (ids(tokens[:had]), 5)
        assert opened.cached_tokens <= 5


def test_an_output_that_ended_already_ends_at_once() -> None:
    bench = Bench()
    bench.submit(1, [1, 2], attempt=1, output=[9, 7], max_tokens=20)
    assert bench.step() is not None
    assert (bench.client.last[1, 1].finish, bench.client.last[1, 1].stop_token) == ("stop", True)
    assert not bench.core.has_work()


@depths
def test_a_higher_attempt_replaces_the_lower(depth: int) -> None:
    bench = Bench(depth=depth)
    bench.submit(1, [1, 2, 3], attempt=1, max_tokens=9, ignore_eos=True)
    bench.step()
    bench.submit(1, [1, 2, 3], attempt=2, max_tokens=9, ignore_eos=True)
    bench.step()
    for attempt in (1, 2):  # stale, and told before: left unread
        bench.submit(1, [1, 2, 3], attempt=attempt, max_tokens=9, ignore_eos=True)
    bench.core.abort("here", 1, 1)  # stale too
    bench.drain()
    bench.assert_right(1, 2)
    assert (1, 1) not in bench.client.last or bench.client.last[1, 1].finish is None


@depths
def test_an_abort_is_silent_and_frees_everything(depth: int) -> None:
    for steps in range(6):
        bench = Bench(depth=depth, step_tokens=8)
        bench.submit(1, list(range(20)), max_tokens=50, ignore_eos=True)
        for _ in range(steps):
            bench.step()
        bench.core.abort("here", 1, 0)
        bench.core.abort("here", 2, 0)
        bench.drain()
        assert (1, 0) not in bench.client.last or bench.client.last[1, 0].finish is None


# Faults and deadlines


@depths
def test_not_finite_logits_fail_that_request_only(depth: int) -> None:
    bench = Bench(depth=depth)
    shared = [1, 2, 3, 4, 5, 6, 7, 8]
    bench.submit(1, [*shared, 9], max_tokens=20, ignore_eos=True)
    bench.submit(2, [*shared, POISON], max_tokens=20)
    bench.drain()
    bench.assert_right(1)
    last = bench.client.last[2, 0]
    assert (last.finish, last.code) == ("error", "not_finite") and "not a number" in last.error


@depths
def test_what_was_not_finite_is_not_cached(depth: int) -> None:
    bench = Bench(depth=depth)
    for id in range(2):
        bench.submit(id, [1, 2, 3, 4, 5, 6, 7, 8, POISON], max_tokens=20)
        bench.drain()
        assert bench.client.opened[id, 0].cached_tokens == 0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@depths
def test_a_deadline_ends_a_request_in_words(depth: int) -> None:
    clock = Clock()
    bench = Bench(depth=depth, clock=clock, slots=1)
    bench.submit(1, [1, 2], max_tokens=50, ignore_eos=True, budget_s=1.0)
    bench.submit(2, [1, 2], max_tokens=50, ignore_eos=True, budget_s=0.5)
    bench.submit(3, [1, 2], max_tokens=50, ignore_eos=True, budget_s=9)
    for _ in range(5):
        bench.step()
    clock.now = 0.75
    bench.step()
    assert "time was up while it was waiting" in bench.client.last[2, 0].error
    assert bench.client.last[1, 0].finish is None
    clock.now = 1.0
    bench.drain()
    assert "time was up while it was running" in bench.client.last[1, 0].error
    bench.assert_right(3)


# The cache


@depths
def test_a_second_turn_finds_the_first_and_its_answer(depth: int) -> None:
    bench = Bench(depth=depth)
    bench.submit(1, list(range(10)), max_tokens=7, ignore_eos=True)
    bench.drain()
    turn = [*range(10), *bench.client.tokens[1, 0], 1, 2, 3]
    bench.submit(2, turn, max_tokens=3, ignore_eos=True)
    bench.drain()
    bench.assert_right(2)
    assert bench.client.opened[2, 0].cached_tokens == 16
    assert bench.core.stats()["cached_tokens"] == 16


@depths
def test_another_salt_finds_nothing(depth: int) -> None:
    bench = Bench(depth=depth)
    for id, salt in enumerate(("", "a", "b", "a")):
        bench.submit(id, list(range(10)), max_tokens=2, cache_salt=salt)
        bench.drain()
    assert [bench.client.opened[id, 0].cached_tokens for id in range(4)] == [0, 0, 0, 8]


@depths
def test_a_burst_with_one_prefix_computes_it_once(depth: int) -> None:
    bench = Bench(depth=depth, slots=16, pages=256, step_tokens=256)
    prefix = [token % VOCAB for token in range(40)]
    for id in range(16):
        bench.submit(id, [*prefix, id, id], max_tokens=4, ignore_eos=True)
    bench.drain()
    for id in range(16):
        bench.assert_right(id)
    surplus = 16 * 4
    assert bench.runner.computed_tokens <= 40 + 16 * (2 + 4) + surplus
    assert sorted(bench.client.opened[id, 0].cached_tokens for id in range(16)) == [0] + [40] * 15


@depths
def test_followers_do_not_wait_for_their_leaders_end(depth: int) -> None:
    bench = Bench(depth=depth)
    prefix = [token % VOCAB for token in range(40)]
    bench.submit(1, [*prefix, 1], max_tokens=50, ignore_eos=True)
    bench.submit(2, [*prefix, 2], max_tokens=2, ignore_eos=True)
    bench.drain()
    assert [row.id for row in bench.client.rows if row.finish is not None] == [2, 1]
    assert bench.client.opened[2, 0].cached_tokens == 40


@depths
def test_followers_go_on_when_their_leader_is_aborted(depth: int) -> None:
    bench = Bench(depth=depth)
    prefix = [token % VOCAB for token in range(40)]
    for id in range(4):
        bench.submit(id, [*prefix, id], max_tokens=4, ignore_eos=True)
    bench.step()
    bench.core.abort("here", 0, 0)
    bench.core.abort("here", 2, 0)
    bench.drain()
    bench.assert_right(1)
    bench.assert_right(3)


@depths
def test_flush_empties_what_nobody_uses(depth: int) -> None:
    bench = Bench(depth=depth)
    bench.submit(1, list(range(10)), max_tokens=40, ignore_eos=True)
    bench.submit(2, list(range(20, 30)), max_tokens=2, ignore_eos=True)
    for _ in range(8):
        bench.step()
    assert bench.core.flush() > 0
    bench.submit(3, list(range(10)), max_tokens=4, ignore_eos=True)  # the running one's prompt is still there
    bench.submit(4, list(range(20, 30)), max_tokens=4, ignore_eos=True)
    bench.drain()
    for id in (1, 2, 3, 4):
        bench.assert_right(id)
    assert bench.client.opened[3, 0].cached_tokens == 8
    assert bench.client.opened[4, 0].cached_tokens == 0
    bench.core.flush()
    assert bench.core.stats()["kv_pages_free"] == 64


# Logprobs


@depths
def test_logprobs_of_output_and_prompt(depth: int) -> None:
    bench = Bench(depth=depth, step_tokens=8)
    prompt = list(range(20))
    bench.submit(1, prompt, max_tokens=5, ignore_eos=True)
    bench.drain()
    bench.submit(2, prompt, max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    bench.drain()
    bench.assert_right(2)
    rows = [row for row in bench.client.rows if row.id == 2]
    assert [len(row.logprobs) for row in rows] == [1] * 5
    assert [row.logprobs[0].token for row in rows] == bench.client.tokens[2, 0]
    assert rows[0].logprobs[0].top_tokens == (0, 1)
    first, *others = rows[0].prompt_logprobs
    assert first is None
    assert [score.token for score in others if score] == prompt[1:]
    assert all(isinstance(score, TokenLogprobs) and score.top_tokens == (0,) for score in others)
    assert not any(row.prompt_logprobs for row in rows[1:])


@depths
def test_the_prompts_scores_alone(depth: int) -> None:
    bench = Bench(depth=depth, step_tokens=8)
    bench.submit(1, list(range(20)), max_tokens=0, prompt_logprobs=0)
    bench.submit(2, list(range(20)), max_tokens=0)
    bench.drain()
    (row,) = [row for row in bench.client.rows if row.id == 1]
    assert (row.tokens, row.finish, len(row.prompt_logprobs)) == ((), "length", 20)
    assert bench.client.last[2, 0].finish == "length"


# Anything in any order

PROMPTS = st.builds(
    lambda family, length, tail: [*[(family * 13 + i) % VOCAB for i in range(length)], *tail],
    st.integers(0, 2),
    st.integers(0, 60),
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
)
PARAMS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(0, 40),
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 5),
        "seed": st.integers(0, 1),
        "logprobs": st.sampled_from([-1, -1, -1, 1]),
        "prompt_logprobs": st.sampled_from([-1, -1, -1, 0]),
        "stop_token_ids": st.sampled_from([(), (3,)]),
        "priority": st.integers(-1, 2),
        "cache_salt": st.sampled_from(["", "", "x"]),
    }
)
OPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), PROMPTS, PARAMS),
        st.tuples(st.just("step"), st.integers(1, 12)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("resume"), st.integers(0, 30)),
        st.tuples(st.just("flush")),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(
    ops=OPS,
    depth=st.sampled_from([1, 2]),
    page_tokens=st.sampled_from([1, 16, 64]),
    tokens=st.integers(64, 260),
    step_tokens=st.sampled_from([3, 16, 256]),
    mixed_tokens=st.sampled_from([1, 8, 256]),
    context_unit=st.sampled_from([0, 1, 20]),
    slots=st.integers(1, 6),
    prefix_cache=st.booleans(),
    policy=st.sampled_from(["fcfs", "lpm"]),
    eviction=st.sampled_from(["lru", "lfu"]),
)
def test_any_interleaving(
    ops, depth, page_tokens, tokens, step_tokens, mixed_tokens, context_unit, slots, prefix_cache, policy, eviction
) -> None:
    bench = Bench(
        pages=-(-tokens // page_tokens),
        page_tokens=page_tokens,
        slots=slots,
        context=120,
        depth=depth,
        step_tokens=step_tokens,
        mixed_tokens=mixed_tokens,
        context_unit=context_unit,
        context_read=context_unit // 2,
        weight_tokens=context_unit // 2,
        prefix_cache=prefix_cache,
        policy=policy,
        eviction=eviction,
    )
    core, client = bench.core, bench.client
    newest: dict[int, int] = {}
    had: dict[tuple[int, int], int] = {}
    aborted = set()
    for op, *args in ops:
        if op == "submit":
            id = len(newest)
            newest[id] = 0
            bench.submit(id, args[0], **args[1])
        elif op == "step":
            for _ in range(args[0]):
                bench.step()
        elif op == "abort" and args[0] in newest:
            core.abort("here", args[0], newest[args[0]])
            aborted.add((args[0], newest[args[0]]))
        elif op == "resume" and args[0] in newest:
            id, attempt = args[0], newest[args[0]]
            last = client.last.get((id, attempt))
            if (id, attempt) in aborted or (last is not None and last.finish is not None):
                continue
            prompt, params = bench.sent[id, attempt]
            count = had.get((id, attempt), 0) + len(client.tokens.get((id, attempt), []))
            output = bench.expected(id, attempt)[0][:count]
            aborted.add((id, attempt))
            newest[id] = attempt + 1
            had[id, attempt + 1] = len(output)
            bench.sent[id, attempt + 1] = prompt, params
            core.submit(Submit("here", id, attempt + 1, ids(prompt), params, ids(output)))
        elif op == "flush":
            core.flush()
        core.scheduler.check()
    bench.drain()
    assert bench.runner.largest_prefill <= mixed_tokens
    assert core.stats()["generated_tokens"] == sum(map(len, client.tokens.values()))
    for id, attempt in newest.items():
        key = id, attempt
        tokens_wanted, _ = bench.expected(*key)
        tokens_got = client.tokens.get(key, [])
        if key in aborted:
            assert tokens_got == tokens_wanted[: len(tokens_got)]
            continue
        bench.assert_right(id, attempt, had.get(key, 0))
        prompt, params = bench.sent[key]
        if params.prompt_logprobs >= 0 and not had.get(key, 0):
            scores = [score for row in client.rows if (row.id, row.attempt) == key for score in row.prompt_logprobs]
            assert [score and score.token for score in scores] == [None, *prompt[1:]]


# Warming up


@depths
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_warm_up_meets_prompts_beside_few_and_many_decodes_and_leaves_nothing(
    depth: int, prefix_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(depth=depth, slots=24, pages=300, prefix_cache=prefix_cache, step_tokens=512, mixed_tokens=512)
    kinds, launch = set(), bench.runner.launch

    def noted(batch: Batch) -> object:
        decodes = "many" if batch.decodes > 8 else "few" if batch.decodes else "none"
        kinds.add((decodes, batch.decodes < len(batch.slots)))
        return launch(batch)

    monkeypatch.setattr(bench.runner, "launch", noted)
    bench.core.warm_up(WARM_UP["cuda"])
    monkeypatch.undo()
    assert {("none", True), ("few", True), ("many", True), ("many", False)} <= kinds
    assert not bench.core.has_work()
    stats = bench.core.stats()
    assert [stats[name] for name in ("steps", "generated_tokens", "prompt_tokens", "kv_pages_cached")] == [0] * 4
    bench.submit(1, [3, 1, 4], max_tokens=20)
    bench.drain()
    bench.assert_right(1)
