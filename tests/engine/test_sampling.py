"""The sampler against a slow, literal reference in numpy; its random numbers against the laws they claim to follow."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modelkit import built_library

from runtime.engine import native
from runtime.engine.batch import SlotTable
from runtime.engine.native.model import NativeRows
from runtime.engine.sampling import NOT_FINITE, Rows, TorchRows, gumbel, row_keys, sample, token_bits

PARAMS: dict[str, Any] = {
    "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "seed": 0, "bias": None, "min_length": 0, "held_back": (), "logprobs": -1,
}  # fmt: skip


@pytest.fixture(scope="module", params=["torch", "native"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rows]:
    if request.param == "torch":
        yield TorchRows()
        return
    built_library(tmp_path_factory.mktemp("native"))
    library = native.library()
    assert library is not None
    engine = library.engine_new(2)
    yield NativeRows(library, engine)
    library.engine_free(engine)


def table(rows: list[dict[str, Any]], context: int = 64) -> SlotTable:
    slots = SlotTable(len(rows), context, 16)
    for i, given_params in enumerate(rows):
        given_params = dict(given_params)
        prompt, output = given_params.pop("prompt", [1]), given_params.pop("output", [])
        slots.tokens[i, : len(prompt) + len(output)] = [*prompt, *output]
        slots.prompt_tokens[i] = len(prompt)
        for name, value in {**PARAMS, **given_params}.items():
            getattr(slots, name)[i] = value
        slots.filters[i] = slots.top_p[i] < 1 or slots.top_k[i] > 0 or slots.min_p[i] > 0
        slots.penalties[i] = (
            slots.repetition_penalty[i] != 1 or slots.presence_penalty[i] != 0 or slots.frequency_penalty[i] != 0
        )
    return slots


def positions(rows: list[dict[str, Any]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array([len(row.get("prompt", [1])) + len(row.get("output", [])) for row in rows], np.int32)


def draw(kernels: Rows, logits: torch.Tensor, rows: list[dict[str, Any]], order: list[int] | None = None) -> list[int]:
    index = np.array(range(len(rows)) if order is None else order, np.int32)
    picked = logits[torch.from_numpy(index).long()]
    return sample(picked, table(rows), index, positions(rows)[index], kernels).tokens.tolist()


def mix32(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def noise_of(seed: int, position: int, token: int) -> float:
    first = mix32(mix32(mix32((seed + 0x9E3779B9) & 0xFFFFFFFF) ^ (seed >> 32)) ^ position)
    second = mix32((first + 0x85EBCA6B) & 0xFFFFFFFF)
    bits = mix32((mix32(token ^ first) + second) & 0xFFFFFFFF)
    return float(-np.log(-np.log((np.float64(bits >> 9) + 0.5) * 2.0**-23)))


def reference_scores(logits: list[float], row: dict[str, Any]) -> list[float]:
    """What the module's docstring says, one token at a time; the final scores (-inf = dropped)."""
    row = {**PARAMS, "prompt": [1], "output": [], **row}
    scores = [float(x) for x in logits]
    for token in range(len(scores)):
        if token in row["prompt"] or token in row["output"]:
            penalty = row["repetition_penalty"]
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        count = row["output"].count(token)
        scores[token] -= row["frequency_penalty"] * count + row["presence_penalty"] * (count > 0)
        scores[token] += (row["bias"] or {}).get(token, 0.0)
    if len(row["prompt"]) + len(row["output"]) < row["min_length"]:
        for token in row["held_back"]:
            scores[token] = -np.inf
    if row["temperature"] == 0:
        return scores
    scaled = np.array(scores) / row["temperature"]
    if 0 < row["top_k"] < len(scaled):
        scaled[scaled < np.sort(scaled)[-row["top_k"]]] = -np.inf
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    if row["top_p"] < 1:
        threshold = scaled.max()
        total = 0.0
        for i in np.argsort(-scaled, kind="stable"):
            if total >= row["top_p"]:
                break
            total += probabilities[i]
            threshold = scaled[i]
        scaled[scaled < threshold] = -np.inf
    scaled[probabilities < row["min_p"] * probabilities.max()] = -np.inf
    position = len(row["prompt"]) + len(row["output"])
    return [x + noise_of(row["seed"], position, i) for i, x in enumerate(scaled)]


PARAM_ROWS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_p": st.sampled_from([1.0, 0.9, 0.5, 0.1]),
        "top_k": st.sampled_from([0, 1, 3, 10, 1000]),
        "min_p": st.sampled_from([0.0, 0.05, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
        "presence_penalty": st.sampled_from([0.0, 0.7, -0.7]),
        "frequency_penalty": st.sampled_from([0.0, 0.4]),
        "seed": st.integers(0, 2**64 - 1),
        "bias": st.sampled_from([None, {3: 5.0}, {0: -100.0, 7: 2.5}]),
        "min_length": st.sampled_from([0, 40]),
        "held_back": st.sampled_from([(), (2,), (2, 5)]),
        "prompt": st.lists(st.integers(0, 19), min_size=1, max_size=12),
        "output": st.lists(st.integers(0, 19), max_size=12),
    }
)


@settings(max_examples=150, deadline=None)
@given(st.lists(PARAM_ROWS, min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_equals_the_reference(kernels: Rows, rows: list[dict[str, Any]], seed: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (len(rows), 20)).astype(np.float32))
    for row, chosen, given_logits in zip(rows, draw(kernels, logits, rows), logits.tolist(), strict=True):
        scores = reference_scores(given_logits, row)
        # Equal but for float32's last bits.
        assert scores[chosen] >= max(scores) - 1e-4


@settings(max_examples=50, deadline=None)
@given(st.lists(PARAM_ROWS, min_size=2, max_size=6), st.randoms())
def test_a_row_draws_the_same_alone_and_in_any_batch(kernels: Rows, rows: list[dict[str, Any]], shuffler: Any) -> None:
    # A vocabulary wide enough that filters look at candidates first, and flat enough that some need them all.
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 1, (len(rows), 3000)).astype(np.float32))
    together = draw(kernels, logits, rows)
    order = shuffler.sample(range(len(rows)), len(rows))
    assert draw(kernels, logits, rows, order) == [together[i] for i in order]
    for i in range(len(rows)):
        assert draw(kernels, logits, rows, [i]) == [together[i]]


def chi_square(counts: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """The statistic's distance from its mean in standard deviations; cells too rare to count are left out."""
    cells = expected >= 5
    statistic = float(((counts - expected)[cells] ** 2 / expected[cells]).sum())
    freedom = int(cells.sum()) - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_softmax(kernels: Rows, vary: str) -> None:
    n, vocab = 60_000, 50
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 1.5, vocab).astype(np.float32))
    slots = SlotTable(n, 1, 1)
    slots.temperature[:] = 0.8
    slots.seed[:] = np.arange(n) if vary == "seed" else 7
    where = np.arange(n, dtype=np.int32) if vary == "position" else np.full(n, 9, np.int32)
    drawn = sample(logits.expand(n, vocab), slots, np.arange(n, dtype=np.int32), where, kernels).tokens
    expected = (logits / 0.8).softmax(0).double().numpy() * n
    assert chi_square(np.bincount(drawn, minlength=vocab), expected) < 4


def test_consecutive_draws_are_independent(kernels: Rows) -> None:
    n, vocab = 80_000, 12
    slots = SlotTable(n, 1, 1)
    slots.temperature[:] = 1
    slots.seed[:] = 3
    drawn = sample(
        torch.zeros(n, vocab), slots, np.arange(n, dtype=np.int32), np.arange(n, dtype=np.int32), kernels
    ).tokens
    pairs = np.bincount(drawn[:-1] * vocab + drawn[1:], minlength=vocab**2)
    assert chi_square(pairs, np.full(vocab**2, (n - 1) / vocab**2)) < 4


def test_filters_draw_from_the_renormalised_rest(kernels: Rows) -> None:
    n = 40_000
    logits = torch.log(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]))
    slots = SlotTable(n, 1, 1)
    slots.temperature[:], slots.filters[:] = 1, True
    slots.seed[:] = np.arange(n)
    slots.top_p[:] = 0.8  # keeps 0.4 + 0.3 + 0.15
    drawn = sample(logits.expand(n, 5), slots, np.arange(n, dtype=np.int32), np.full(n, 3, np.int32), kernels).tokens
    counts = np.bincount(drawn, minlength=5)
    assert counts[3:].sum() == 0
    assert chi_square(counts[:3], np.array([0.4, 0.3, 0.15]) / 0.85 * n) < 4


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5), st.integers(0, 2**31 - 1))
def test_torch_and_numpy_compute_the_same_bits(seeds: list[int], position: int) -> None:
    keys = row_keys(np.array(seeds, np.uint64), np.full(len(seeds), position, np.int32))
    tokens = np.array([0, 1, 2, 49151, 151935, 2**31 - 1], np.uint32)
    bits = token_bits(keys[0][:, None], keys[1][:, None], tokens)
    expected = -np.log(-np.log(((bits >> np.uint32(9)) + 0.5) * 2.0**-23))
    noise = gumbel(*keys, torch.from_numpy(tokens.view(np.int32))).numpy()
    np.testing.assert_allclose(noise, expected, rtol=1e-4, atol=1e-5)
    assert noise[0, 1] == pytest.approx(noise_of(seeds[0], position, 1), rel=1e-4, abs=1e-5)


def test_the_noise_is_pinned() -> None:
    """These numbers are what seeds mean: changing them changes the text of every seeded request."""
    first, second = row_keys(np.array([0, 42, 2**63 + 5], np.uint64), np.array([0, 7, 1000], np.int32))
    bits = token_bits(first[:, None], second[:, None], np.array([0, 1, 49151], np.uint32))
    assert bits.tolist() == [
        [2455106972, 2939305750, 913202427],
        [137819623, 4279914390, 374078960],
        [4000611165, 3037740250, 2285822199],
    ]


def test_not_finite_rows_fail_alone(kernels: Rows) -> None:
    logits = torch.zeros(4, 300)
    logits[:, 5] = 3
    logits[1, 250] = torch.nan
    logits[2, 8] = torch.inf
    rows: list[dict[str, Any]] = [{}, {"temperature": 1.0, "top_p": 0.5}, {"logprobs": 3}, {"logprobs": 2}]
    slots = table(rows)
    result = sample(logits, slots, np.arange(4, dtype=np.int32), positions(rows), kernels)
    assert result.tokens.tolist() == [5, NOT_FINITE, NOT_FINITE, 5]
    assert result.logprobs.keys() == {3}


def test_greedy_takes_the_first_of_equals_and_leaves_logits_alone(kernels: Rows) -> None:
    logits = torch.zeros(3, 5000)
    logits[0, [700, 701]] = 1
    logits[1, [4999, 40]] = 1
    before = logits.clone()
    rows: list[dict[str, Any]] = [{}, {}, {"bias": {9: 1.0}}]
    assert draw(kernels, logits, rows) == [700, 40, 9]
    assert torch.equal(logits, before)


def test_logprobs_are_the_models_own(kernels: Rows) -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 2, (3, 90)).astype(np.float32))
    rows = [{"logprobs": 0}, {"logprobs": 4, "temperature": 1.5, "bias": {3: 50.0}}, {}]
    result = sample(logits, table(rows), np.arange(3, dtype=np.int32), positions(rows), kernels)
    assert result.tokens[1] == 3 and result.logprobs.keys() == {0, 1}
    expected = logits.double().log_softmax(1)
    for row, top in ((0, 0), (1, 4)):
        chosen, ids, values = result.logprobs[row]
        assert chosen == pytest.approx(float(expected[row, result.tokens[row]]), abs=1e-5)
        best = expected[row].topk(top)
        assert ids.tolist() == best.indices.tolist()
        np.testing.assert_allclose(values, best.values.numpy(), atol=1e-5)
