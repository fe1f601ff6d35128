"""From logits to tokens, for a whole batch at once.

The order of operations, each only for rows that ask for it (as in transformers' processors and warpers):

1. repetition penalty: logits of every token seen (prompt or output) are divided by it if positive, else multiplied
2. presence and frequency penalties: subtracted for tokens of the *output*, once and per occurrence
3. logit bias: added
4. held-back tokens (eos and stop ids before ``min_tokens``): -inf
5. temperature 0: the largest logit (the lowest id among equals). Otherwise logits / temperature, then
6. top-k: all logits >= the k-th largest stay
7. top-p: of what is left, renormalised, the smallest set of largest probabilities whose sum reaches p
8. min-p: probabilities >= min_p * the largest stay
9. Gumbel-max: argmax(logit + noise) draws from softmax(logits) exactly

The noise of a token depends on (seed, position of the token drawn, vocabulary id) alone: a counter-based hash in
uint32 arithmetic, so that numpy, torch and GPU kernels compute the same bits, and a request draws the same tokens alone
or in a batch, before or after it was interrupted. Logprobs are those of the model: log-softmax of the untouched logits.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from runtime.engine.batch import F32, I32, SlotTable

U32 = npt.NDArray[np.uint32]
F64 = npt.NDArray[np.float64]

NOT_FINITE = -2  # the "token" of a row whose logits are not numbers
_CANDIDATES = 256  # how many of the largest logits a filtered row looks at before it sorts them all


def mix(x: U32) -> U32:
    """A bijection of 32-bit words whose output bits all depend on all input bits ("lowbias32", C. Wellons)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def row_keys(seed: npt.NDArray[np.uint64], position: I32) -> tuple[U32, U32]:
    """The two 32-bit keys of each row's noise."""
    low = (seed & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    high = (seed >> np.uint64(32)).astype(np.uint32)
    first = mix(mix(mix(low + np.uint32(0x9E3779B9)) ^ high) ^ position.astype(np.uint32))
    return first, mix(first + np.uint32(0x85EBCA6B))


def token_bits(first: U32, second: U32, token: U32) -> U32:
    """The random word of (row, vocabulary id): ``mix(mix(id ^ first) + second)``. The rule other devices repeat."""
    return mix(mix(token ^ first) + second)


def _mix_int32(x: torch.Tensor) -> torch.Tensor:
    """``mix`` on int32 tensors in place: two's complement products wrap alike; shifts are made logical by a mask."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def gumbel(first: U32, second: U32, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 [rows, n], for vocabulary ids ``tokens`` int32 [n] or [rows, n]."""
    keys = torch.from_numpy(np.stack([first, second]).view(np.int32)).to(tokens.device)
    bits = _mix_int32(_mix_int32(tokens ^ keys[0, :, None]).add_(keys[1, :, None]))
    # 23 bits and a half: the uniform is in [2^-24, 1 - 2^-24], exact in float32, so both logarithms are finite.
    uniform = (bits >> 9).bitwise_and_(0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


class Rows(Protocol):
    """What sampling asks of logits float32 [rows, vocab]; ``which`` lists the rows asked about."""

    def best(self, logits: torch.Tensor) -> tuple[F32, I32]:
        """Of every row the largest logit and its first place; NaN where a logit is NaN or +inf."""
        ...

    def draw(self, logits: torch.Tensor, which: I32, temperature: F32, first: U32, second: U32) -> I32:
        """Steps 5 and 9: argmax(logits / temperature + noise)."""
        ...

    def largest(self, logits: torch.Tensor, which: I32, temperature: F32, count: int) -> tuple[F32, I32, F64]:
        """The ``count`` largest of logits / temperature, descending, with their places, and the sum over all of
        exp(logit / temperature - the largest)."""
        ...


class TorchRows:
    """``Rows`` in plain torch."""

    def best(self, logits: torch.Tensor) -> tuple[F32, I32]:
        best = logits.max(dim=1)  # a maximum propagates NaN and shows +inf
        values: F32 = best.values.numpy()
        return np.where(np.isposinf(values), np.float32(np.nan), values), best.indices.numpy().astype(np.int32)

    def draw(self, logits: torch.Tensor, which: I32, temperature: F32, first: U32, second: U32) -> I32:
        noise = gumbel(first, second, torch.arange(logits.shape[1], dtype=torch.int32))
        best = noise.add_(_scaled(logits, which, temperature)).argmax(dim=1)
        return best.numpy().astype(np.int32)

    def largest(self, logits: torch.Tensor, which: I32, temperature: F32, count: int) -> tuple[F32, I32, F64]:
        scaled = _scaled(logits, which, temperature)
        values, ids = scaled.topk(count, dim=1)
        mass = (scaled - values[:, :1]).exp_().sum(dim=1, dtype=torch.float64)
        return values.numpy(), ids.numpy().astype(np.int32), mass.numpy()


def _scaled(logits: torch.Tensor, which: I32, temperature: F32) -> torch.Tensor:
    return logits[torch.from_numpy(which)] / torch.from_numpy(temperature)[:, None]


_TORCH = TorchRows()


@dataclass(slots=True)
class Sampled:
    """``tokens`` [n]; ``logprobs``: row -> (logprob of the token, top ids, top logprobs) where asked."""

    tokens: I32
    logprobs: dict[int, tuple[float, I32, F32]] = field(default_factory=dict)


def sample(logits: torch.Tensor, slots: SlotTable, rows: I32, positions: I32, kernels: Rows = _TORCH) -> Sampled:
    """Draws one token for each row of ``logits`` (float32 [n, vocab], untouched), whose request stands at slot
    ``rows[i]`` and whose new token will stand at ``positions[i]``. Rows with NaN or +inf get NOT_FINITE."""
    edited = _edit(logits, slots, rows, positions)
    values, tokens = kernels.best(edited)
    random = np.flatnonzero((slots.temperature[rows] > 0) & ~np.isnan(values)).astype(np.int32)
    if random.size:
        filtered = slots.filters[rows[random]]
        for which, draw in ((random[~filtered], _draw), (random[filtered], _draw_filtered)):
            if which.size:
                first, second = row_keys(slots.seed[rows[which]], positions[which])
                tokens[which] = draw(edited, slots, rows[which], which, first, second, kernels)
    tokens[np.isnan(values)] = NOT_FINITE
    return Sampled(tokens, _logprobs(logits, tokens, slots.logprobs[rows], kernels))


def _edit(logits: torch.Tensor, slots: SlotTable, rows: I32, positions: I32) -> torch.Tensor:
    """Steps 1 to 4, on a copy where any row needs them."""
    penalized = np.flatnonzero(slots.penalties[rows])
    biased = [i for i, slot in enumerate(rows) if slots.bias[slot]]
    held = np.flatnonzero(positions < slots.min_length[rows])
    if not penalized.size and not biased and not held.size:
        return logits
    logits = logits.clone()
    if penalized.size:
        _penalize(logits, slots, penalized, rows[penalized], positions[penalized])
    for i in biased:
        bias = slots.bias[rows[i]] or {}
        ids = torch.tensor([token for token in bias if 0 <= token < logits.shape[1]], dtype=torch.int64)
        logits[i, ids] += torch.tensor([bias[int(token)] for token in ids], dtype=torch.float32)
    for i in held.tolist():
        logits[i, list(slots.held_back[rows[i]])] = -torch.inf
    return logits


def _penalize(logits: torch.Tensor, slots: SlotTable, which: npt.NDArray[np.intp], rows: I32, positions: I32) -> None:
    """Steps 1 and 2 in place, for the rows ``which`` of ``logits``: only tokens that occur are touched."""
    vocab = logits.shape[1]
    tokens = slots.tokens[rows, : int(positions.max())]
    row, place = np.nonzero((np.arange(tokens.shape[1]) < positions[:, None]) & (tokens >= 0) & (tokens < vocab))
    token = tokens[row, place].astype(np.int64)
    generated = place >= slots.prompt_tokens[rows][row]
    keys, inverse = np.unique(row * vocab + token, return_inverse=True)
    counts = np.bincount(inverse[generated], minlength=len(keys)).astype(np.float32)
    row, token = keys // vocab, keys % vocab
    values = logits.numpy()[which[row], token]
    repetition = slots.repetition_penalty[rows][row]
    values = np.where(values > 0, values / repetition, values * repetition)
    values -= slots.frequency_penalty[rows][row] * counts + slots.presence_penalty[rows][row] * (counts > 0)
    logits.numpy()[which[row], token] = values


def _draw(logits: torch.Tensor, slots: SlotTable, slot: I32, which: I32, first: U32, second: U32, kernels: Rows) -> I32:
    """Steps 5 and 9 for the rows ``which``, whose requests stand at ``slot``."""
    return kernels.draw(logits, which, slots.temperature[slot], first, second)


def _draw_filtered(
    logits: torch.Tensor, slots: SlotTable, slot: I32, which: I32, first: U32, second: U32, kernels: Rows
) -> I32:
    """Steps 5 to 9 for the rows ``which``: on a few candidates, on more only for rows that need them."""
    vocab = logits.shape[1]
    k = np.where((slots.top_k[slot] <= 0) | (slots.top_k[slot] > vocab), vocab, slots.top_k[slot])[:, None]
    p = np.where(slots.top_p[slot] >= 1, np.inf, slots.top_p[slot])[:, None]
    with np.errstate(divide="ignore"):
        floor = np.log(slots.min_p[slot])[:, None]
    tokens: I32 = np.empty(len(which), np.int32)
    count, pending = min(vocab, _CANDIDATES), np.arange(len(which))
    while pending.size:
        values, ids, mass = kernels.largest(logits, which[pending], slots.temperature[slot[pending]], count)
        threshold = _threshold(values, k[pending], p[pending], floor[pending], mass[:, None], vocab)
        # A row whose smallest candidate stays, or whose top-k ends further down, must see more.
        cut = (values[:, -1:] < threshold) & ((k[pending] <= count) | (k[pending] == vocab))
        done = cut[:, 0] | (count == vocab)
        values, ids, settled = values[done], ids[done], pending[done]
        noise = gumbel(first[settled], second[settled], torch.from_numpy(ids)).numpy()
        best = np.where(values < threshold[done], -np.inf, values + noise).argmax(axis=1)
        tokens[settled] = ids[np.arange(len(ids)), best]
        count, pending = min(vocab, 8 * count), pending[~done]
    return tokens


def _threshold(values: F32, k: I32, p: F64, floor: F32, mass: F64, vocab: int) -> F32:
    """The smallest logit that stays [rows, 1]: equal logits stay or go together, whatever their order.

    ``values`` are each row's largest logits, descending. Sums are sequential, in float64: they don't depend on how many
    candidates follow, so neither does the verdict.
    """
    kth = np.take_along_axis(values, np.minimum(k, values.shape[1]) - 1, axis=1)
    within = (k == vocab) | (values >= kth)
    weights = np.where(within, np.exp((values - values[:, :1]).astype(np.float64)), 0)
    running = weights.cumsum(axis=1)
    mass = np.where(k < vocab, running[:, -1:], mass)
    stays = within & (running - weights < p * mass) & (values >= values[:, :1] + floor)
    last = np.maximum(stays.sum(axis=1, keepdims=True), 1) - 1
    return np.take_along_axis(values, last, axis=1)


def _logprobs(logits: torch.Tensor, tokens: I32, wanted: I32, kernels: Rows) -> dict[int, tuple[float, I32, F32]]:
    asking = np.flatnonzero((wanted >= 0) & (tokens >= 0)).astype(np.int32)
    if not asking.size:
        return {}
    chosen, ids, values = token_logprobs(logits, asking, tokens[asking], int(wanted[asking].max()), kernels)
    return {int(i): (float(chosen[j]), ids[j, : wanted[i]], values[j, : wanted[i]]) for j, i in enumerate(asking)}


def token_logprobs(
    logits: torch.Tensor, which: I32, tokens: I32, top: int, kernels: Rows = _TORCH
) -> tuple[F32, I32, F32]:
    """Log-softmax of the rows ``which`` of ``logits``: of the given tokens [n]; ids and values of the ``top`` largest
    [n, top]."""
    count = min(max(top, 1), logits.shape[1])
    values, ids, mass = kernels.largest(logits, which, np.ones(len(which), np.float32), count)
    normalizer = (values[:, 0] + np.log(mass)).astype(np.float32)
    chosen: F32 = logits.numpy()[which, tokens] - normalizer
    return chosen, ids[:, :top], values[:, :top] - normalizer[:, None]
