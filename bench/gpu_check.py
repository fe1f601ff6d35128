"""Is what the GPU computes right? Kernels against float32 references on the shapes of real models in bfloat16, and the
engine's greedy tokens against the decoder in float32, teacher-forced: alone, batched, with cached prefixes."""

import concurrent.futures
import dataclasses
import json
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_shapes import SHAPES

from runtime.engine.batch import SlotTable
from runtime.engine.core import EngineCore
from runtime.engine.cuda import CudaRunner
from runtime.engine.kernels import (
    activation,
    decode_attention,
    extend_attention,
    gemv,
    inputs,
    norm,
    rotary,
    sample,
)
from runtime.engine.kv import causal_attention
from runtime.engine.sampling import row_keys, token_bits
from runtime.engine.scheduler import EngineConfig
from runtime.messages import SamplingParams, Submit
from runtime.models.config import ModelConfig
from runtime.models.decoder import Decoder
from runtime.models.loader import dummy, plan
from runtime.tokenizer import Tokenizer

BF16 = torch.bfloat16
PAGE = 16


_STORED = {torch.bfloat16: "BF16", torch.float32: "F32"}


def write_checkpoint(folder: Path, config: ModelConfig, weights: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Weights of our names and fusions as safetensors files of the usual names, a tensor in host memory at a time."""
    params = plan(config)
    files: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    index = {}
    for i, param in enumerate(params):
        number, row = i * shards // len(params), 0
        for part in param.parts:
            files[number][part.name] = weights[param.name][row : row + part.shape[0]]
            index[part.name] = f"model-{number:05d}-of-{shards:05d}.safetensors"
            row += part.shape[0]
    for number, tensors in enumerate(files):
        name = "model.safetensors" if shards == 1 else f"model-{number:05d}-of-{shards:05d}.safetensors"
        header, at = {}, 0
        for key, tensor in tensors.items():
            span = [at, at + tensor.nbytes]
            header[key] = {"dtype": _STORED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
            at += tensor.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                file.write(tensor.contiguous().view(torch.uint8).cpu().numpy().data)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def _prepare() -> None:
    """In a worker: one of many that share the cores."""
    torch.set_num_threads(1)


def check() -> None:
    """Every part in a process of its own: most of the time goes into compiling, which they then share among cores."""
    failed = []
    jobs = (
        [(engine, name) for name in TINY] + [(compile_shape, n) for n in SHAPES] + [(kernel, name) for name in KERNELS]
    )
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(14, mp_context=context, initializer=_prepare) as pool:
        for future in [pool.submit(job, name) for job, name in jobs]:
            try:
                good, lines = future.result(timeout=240)
            except Exception as error:
                good, lines = False, [f"FAIL {type(error).__name__}: {str(error)[:500]}"]
            print("\n".join(lines), flush=True)
            failed += [] if good else [lines[0][:60]]
    print("check:", "all right" if not failed else f"FAILED: {failed}", flush=True)


def kernel(name: str) -> tuple[bool, list[str]]:
    torch.manual_seed(0)
    try:
        worst = KERNELS[name]()
    except Exception as error:
        return False, [f"FAIL {name:40s} {type(error).__name__}: {str(error)[:500]}"]
    return worst < 1e-2, [f"{'ok  ' if worst < 1e-2 else 'FAIL'} {name:40s} relative error {worst:.2e}"]


def compile_shape(name: str) -> tuple[bool, list[str]]:
    """Run a real shape's first two layers, so that its kernels are in Triton's cache when they are measured."""
    config = dataclasses.replace(SHAPES[name], layers=2)
    slots = SlotTable(256, config.context_tokens, PAGE)
    runner = CudaRunner(None, config, slots, dummy_weights=True, kv_tokens=65536)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 10000, n).tolist() for n in (3, 700, 40)]
    greedy(runner, slots, prompts, 3, False)
    runner.capture_all()
    return True, [f"ok   {name} shape, 2 layers, ran"]


def error(given: torch.Tensor, wanted: torch.Tensor) -> float:
    given, wanted = given.float(), wanted.float()
    value = float((given - wanted).norm() / wanted.norm())
    return value if value == value else float("inf")


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(BF16)


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device="cuda")


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=BF16, device="cuda")


def check_norm() -> float:
    worst = 0.0
    for width in (1024, 4096):
        x, residual, weight, out = normal(37, width), normal(37, width), normal(width), poisoned(37, width)
        wanted, sums = norm.rms_norm_reference(x, weight, 1e-6, residual)
        norm.rms_norm(x, weight, 1e-6, out, residual)
        assert sums is not None
        worst = max(worst, error(out, wanted), error(residual, sums))
        wanted, _ = norm.rms_norm_reference(x, weight, 1e-6)
        norm.rms_norm(x, weight, 1e-6, out)
        worst = max(worst, error(out, wanted))
    return worst


def check_silu() -> float:
    gate_up, out = normal(33, 2 * 14336), poisoned(33, 14336)
    activation.silu_mul(gate_up, out)
    return error(out, activation.silu_mul_reference(gate_up))


class Paged:
    """Random rows in a cache; unused memory is NaN."""

    def __init__(self, q_heads: int, kv_heads: int, lengths: list[int], head_dim: int = 128) -> None:
        rng = np.random.default_rng(1)
        counts = [-(-n // PAGE) for n in lengths]
        order = rng.permutation(sum(counts) + 1)
        self.table = np.zeros((len(lengths), max(counts) + 1), np.int32)
        self.k, self.v = (poisoned(len(order), kv_heads, PAGE, head_dim) for _ in range(2))
        at = 0
        for i, (n, count) in enumerate(zip(lengths, counts, strict=True)):
            pages = order[at : at + count]
            at += count
            self.table[i, :count] = pages
            for cache in (self.k, self.v):
                cache[torch.tensor(pages, device="cuda")] = normal(count, kv_heads, PAGE, head_dim)
                cache[int(pages[-1]), :, n - (count - 1) * PAGE :] = float("nan")
        self.pages, self.lengths = ints(self.table), lengths
        self.slots = ints(np.arange(len(lengths)))
        self.q_heads, self.kv_heads, self.head_dim = q_heads, kv_heads, head_dim
        angles = torch.outer(torch.arange(max(lengths) + 1).float(), 1e4 ** -(torch.arange(head_dim // 2) / 64))
        self.cos, self.sin = angles.cos().cuda(), angles.sin().cuda()

    def qkv(self, tokens: int) -> torch.Tensor:
        return normal(tokens, (self.q_heads + 2 * self.kv_heads) * self.head_dim)


def check_rotary() -> float:
    worst = 0.0
    for q_heads, kv_heads, normed in ((16, 8, True), (32, 8, False), (28, 4, False)):
        paged = Paged(q_heads, kv_heads, [50, 3, 800])
        weight = normal(128) if normed else None
        slot, position = ints([0, 0, 1, 2, 2]), ints([48, 49, 2, 700, 16])
        qkv = paged.qkv(5)
        args = (weight, weight, paged.cos, paged.sin, paged.k, paged.v, paged.pages, slot, position, 1e-6)
        q, k, v = rotary.rotate_store_reference(qkv, *args, q_heads=q_heads)
        rotary.rotate_store(qkv, *args, q_heads=q_heads)
        q, held = q.reshape(5, -1), ~torch.isnan(k)
        worst = max(worst, error(qkv[:, : q.shape[1]], q), error(paged.k[held], k[held]), error(paged.v[held], v[held]))
    return worst


def check_decode(pdl: bool = False) -> float:
    """As in a step: cut, rotate and store, attend."""
    worst = 0.0
    rng = np.random.default_rng(0)
    for q_heads, kv_heads, head_dim in ((16, 8, 128), (32, 8, 128), (28, 4, 128), (9, 3, 64)):
        for lengths in ([1], [300], [4000], [20000, 5], list(map(int, rng.integers(1, 900, 200)))):
            paged = Paged(q_heads, kv_heads, lengths, head_dim)
            weight = normal(head_dim) if q_heads == 16 else None
            rows, padding = len(lengths), 3
            slots, positions = ints([*range(rows), 0, 0, 0]), ints([*(n - 1 for n in lengths), 1, 1, 1])
            fresh, pages, count = paged.qkv(rows + padding), paged.pages, ints([rows])
            fixed = (weight, weight, paged.cos, paged.sin, paged.k, paged.v, pages)
            q, k, v = rotary.rotate_store_reference(
                fresh[:rows], *fixed, slots[:rows], positions[:rows], 1e-6, q_heads=q_heads
            )
            wanted = decode_attention.decode_attention_reference(
                q.reshape(rows, -1), k, v, pages, slots[:rows], positions[:rows], 0.09, q_heads=q_heads
            )
            work = decode_attention.Pieces(rows + padding, q_heads, kv_heads, head_dim, torch.device("cuda"))
            for _ in range(3):
                out, qkv = poisoned(rows + padding, q_heads * head_dim), fresh.clone()
                decode_attention.cut(slots, positions, count, rows + padding, work, PAGE)
                rotary.rotate_store(qkv, *fixed, slots, positions, 1e-6, q_heads=q_heads, count=count, pdl=pdl)
                decode_attention.decode_attention(qkv, paged.k, paged.v, pages, work, out, 0.09, pdl=pdl)
                worst = max(worst, error(out[:rows], wanted))
                assert torch.isnan(out[rows:]).all()
            for cache, held in ((paged.k, k), (paged.v, v)):
                there = ~torch.isnan(held)
                worst = max(worst, error(cache[there], held[there]))
                assert torch.isnan(cache[~there]).all()
    return worst


def check_extend() -> float:
    worst = 0.0
    for q_heads, kv_heads, head_dim in ((16, 8, 128), (32, 8, 128), (28, 4, 128), (9, 3, 64)):
        for rows in ([(0, 1)], [(0, 1024)], [(3000, 700), (0, 65), (64, 64), (5, 1), (128, 129)], [(16, 17)] * 9):
            paged = Paged(q_heads, kv_heads, [sum(row) for row in rows], head_dim)
            cached, extend = (np.array(column, np.int32) for column in zip(*rows, strict=True))
            starts = np.concatenate([[0], np.cumsum(extend)])
            qkv = paged.qkv(int(starts[-1]))
            out = poisoned(len(qkv), q_heads * head_dim)
            row, index = extend_attention.tiles(cached, extend, q_heads // kv_heads)
            args = (qkv, paged.k, paged.v, paged.pages, paged.slots, ints(cached), ints(starts))
            extend_attention.extend_attention(*args, ints(row), ints(index), out, 0.09)
            wanted = extend_attention.extend_attention_reference(*args, 0.09, q_heads=q_heads)
            worst = max(worst, error(out, wanted))
    return worst


def check_gemv(pdl: bool = False) -> float:
    worst = 0.0
    for rows in (1, 2, 4, 8):
        for width, outputs, options in (
            (1024, 4096, {}), (2048, 1024, {"add": True}), (1024, 3072, {"gated": True}), (3072, 1024, {"add": True}),
            (4096, 6144, {}), (14336, 4096, {"add": True}), (4096, 14336, {"gated": True}), (896, 1152, {"bias": True}),
            (576, 1500, {"gated": True, "bias": True}),
        ):  # fmt: skip
            lines = outputs * (2 if options.get("gated") else 1)
            x, weight, residual = normal(rows, width), normal(lines, width, scale=width**-0.5), normal(rows, outputs)
            given: dict[str, Any] = {
                "bias": normal(lines) if options.get("bias") else None,
                "gated": bool(options.get("gated")),
                "residual": residual if options.get("add") else None,
            }
            wanted = gemv.gemv_reference(x, weight, **given)
            tile = gemv.tile_for(rows, outputs, width, given["gated"])
            gemv.gemv(x, weight, residual, tile, **given, pdl=pdl)
            worst = max(worst, error(residual, wanted))
    return worst


def check_inputs() -> float:
    tokens, table = ints(np.random.default_rng(0).integers(0, 999, (4, 5000))), normal(999, 1024)
    slots, cached, starts = ints([2, 0, 3]), ints([7, 0, 100]), ints([0, 1, 3000, 3005])
    slot, position = (torch.zeros(3005, dtype=torch.int32, device="cuda") for _ in range(2))
    inputs.expand(3, slots, cached, starts, slot, position)
    wanted = inputs.expand_reference(3, slots, cached, starts)
    assert torch.equal(slot, wanted[0])
    assert torch.equal(position, wanted[1])
    out = poisoned(3005, 1024)
    inputs.embed(tokens, slot, position, table, out)
    return error(out, inputs.embed_reference(tokens, slot, position, table))


def check_sample() -> float:
    """Token by token against the CPU sampler's noise; a token may differ where two scores are within rounding."""
    rng = np.random.default_rng(0)
    rows, vocab = 64, 151936
    seed, position = rng.integers(0, 2**64, rows, dtype=np.uint64), rng.integers(0, 4000, rows).astype(np.int32)
    heat = torch.tensor(np.resize([0.0, 0.6, 1.0], rows), dtype=torch.float32, device="cuda")
    logits = normal(rows, vocab, scale=3.0)
    logits[5, 70000] = float("nan")
    first, second = row_keys(seed, position + 1)
    bits = token_bits(first[:, None], second[:, None], np.arange(vocab, dtype=np.uint32)[None, :])
    noise = -np.log(-np.log(((bits >> 9) + 0.5) * 2.0**-23))
    scores = logits.double().cpu().numpy()
    warm = heat.double().cpu().numpy()[:, None]
    scores = np.where(warm > 0, scores / np.maximum(warm, 1e-9) + noise, scores)
    halves = seed.view(np.int32).reshape(-1, 2)
    tokens = torch.full((rows, 5000), -1, dtype=torch.int32, device="cuda")
    out, scratch = ints([-9] * rows), sample.Scratch(rows, vocab, torch.device("cuda"))
    slots = ints(np.arange(rows))
    args = (slots, ints(position), ints([1] * rows), ints([rows]), heat, ints(halves[:, 0]), ints(halves[:, 1]))
    sample.sample(logits, *args, tokens, out, scratch)
    drawn = out.cpu().numpy()
    assert drawn[5] == -2, drawn[5]
    others = np.arange(rows) != 5
    gap = np.nanmax(scores[others], 1) - scores[others, drawn[others]]
    assert torch.equal(tokens[torch.arange(rows), ints(position).long() + 1][6:], out[6:])
    k, p, floor = (np.zeros(rows, np.int32), np.ones(rows, np.float32), np.zeros(rows, np.float32))
    k[0::4], p[1::4], floor[2::4], k[3::4], p[3::4] = 50, 0.9, 0.02, 100, 0.8
    columns = (heat, ints(k), torch.tensor(p, device="cuda"), torch.tensor(floor, device="cuda"))
    logits[5] = logits[4]
    threshold = torch.zeros(rows, device="cuda")
    sample.thresholds(logits, slots, *columns, threshold)
    wanted = sample.thresholds_reference(logits.cpu(), *(column.cpu() for column in columns)).cuda()
    kept = [(logits.float() >= bound[:, None]).sum(1) for bound in (threshold, wanted)]
    off = (kept[0] - kept[1]).abs().max().item()
    assert off <= 2, f"thresholds keep up to {off} tokens more or less"
    return float(gap.max()) / 100 if gap.max() < 1e-3 else float("inf")


KERNELS: dict[str, Callable[[], float]] = {
    "add, RMSNorm": check_norm,
    "silu * mul": check_silu,
    "head norm, rotary, KV store": check_rotary,
    "decode attention": check_decode,
    "decode attention, overlapped launch": lambda: check_decode(True),
    "extend attention": check_extend,
    "few-row product": check_gemv,
    "few-row product, overlapped launch": lambda: check_gemv(True),
    "inputs": check_inputs,
    "sampling": check_sample,
}


# The engine

TINY = {
    "llama": ModelConfig(
        "llama", vocab_size=5003, hidden_size=512, layers=4, q_heads=8, kv_heads=2, head_dim=64, mlp_size=1376,
        context_tokens=2048,
    ),
    "qwen3": ModelConfig(
        "qwen3", vocab_size=5003, hidden_size=384, layers=4, q_heads=8, kv_heads=4, head_dim=128, mlp_size=1024,
        context_tokens=2048, qk_norm=True, tied_head=True,
    ),
    "qwen2": ModelConfig(
        "qwen2", vocab_size=5003, hidden_size=448, layers=4, q_heads=14, kv_heads=2, head_dim=64, mlp_size=1200,
        context_tokens=2048, qkv_bias=True, tied_head=True,
    ),
}  # fmt: skip


def greedy(
    runner: CudaRunner, slots: SlotTable, prompts: list[list[int]], together: int, cache: bool, rounds: int = 1
) -> list[list[int]]:
    core = EngineCore(
        runner,
        slots,
        EngineConfig(
            step_tokens=512, mixed_tokens=256, max_running_requests=together, prefix_cache=cache,
            max_queued_requests=4096,
        ),
        clock=None,
    )  # fmt: skip
    for _ in range(rounds):
        rows: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
        for i, prompt in enumerate(prompts):
            core.submit(
                Submit("check", i, 0, np.asarray(prompt, np.int32).tobytes(),
                       SamplingParams(max_tokens=64, temperature=0, ignore_eos=True))
            )  # fmt: skip
        while core.has_work():
            message = core.step()
            for row in message.rows if message else ():
                assert not row.error, row.error
                rows[row.id] += row.tokens
        core.check()
    return list(rows.values())


def engine(name: str) -> tuple[bool, list[str]]:
    """Greedy tokens of a small model; where they differ from the reference's, by how much."""
    try:
        return judge(name)
    except Exception as error:
        return False, [f"FAIL engine {name} {type(error).__name__}: {error}", traceback.format_exc()[-1500:]]


def judge(name: str, count: int = 48) -> tuple[bool, list[str]]:
    config = TINY[name]
    with tempfile.TemporaryDirectory() as folder:
        weights = {k: v.to(BF16) for k, v in dummy(config, torch.float32, seed=1)}
        for key in weights:  # sharper than random: greedy choices are clear, as a trained model's are
            if key.endswith((".qkv", ".o", ".gate_up", ".down")):
                weights[key] *= 1.5
        write_checkpoint(Path(folder), config, weights, shards=2)
        slots = SlotTable(64, config.context_tokens, PAGE)
        runner = CudaRunner(folder, config, slots, kv_tokens=65536, step_tokens=2048, dtype="bfloat16")
    for key, tensor in runner_weights(runner).items():
        assert torch.equal(tensor.cpu(), weights[key]), f"{key} was loaded wrong"
    rng = np.random.default_rng(2)
    shared = rng.integers(0, config.vocab_size, 100).tolist()
    prompts = [
        (shared if i % 2 else []) + rng.integers(0, config.vocab_size, int(rng.integers(1, 300))).tolist()
        for i in range(count)
    ]
    return compare(name, config, runner, slots, prompts, 12, 0.0)


def check_real(folder: str) -> None:
    """With real weights: 100 prompts of 64 tokens of output, 10 of them also alone."""
    config = ModelConfig.from_folder(folder)
    slots = SlotTable(64, config.context_tokens, PAGE)
    runner = CudaRunner(folder, config, slots, kv_tokens=65536, step_tokens=2048, dtype="bfloat16")
    tokenizer = Tokenizer(folder)
    prompts = [tokenizer.encode(f"{opening} {topic}") for opening in OPENINGS for topic in TOPICS]
    good, lines = compare(Path(folder).name, config, runner, slots, prompts, 10, 0.99)
    print("\n".join(lines), flush=True)
    print("check real:", "all right" if good else "FAILED", flush=True)


OPENINGS = (
    "Once upon a time there was a story about", "The most important thing to know about", "In the year 1900,",
    "A short letter to a friend about", "Scientists have long asked questions about", "How to learn more about",
    "My grandmother used to tell me about", "The history of Europe shows that", "Here is a list of facts about",
    "def main():  # a program about",
)  # fmt: skip
TOPICS = (
    "the sea", "small towns in the mountains", "bread and how it is made", "the moon", "machines that think",
    "a dog called Max", "prime numbers", "rain in the desert", "old books", "the price of gold",
)  # fmt: skip


def compare(
    name: str, config: ModelConfig, runner: CudaRunner, slots: SlotTable, prompts: list[list[int]], alone: int,
    least: float,
) -> tuple[bool, list[str]]:  # fmt: skip
    """The engine's greedy tokens against the decoder in float32 with the same weights, teacher-forced.

    Where another token than the reference's best was taken, the two must be a near-tie: no further apart than bfloat16
    can tell. How far that is depends on the model, so it is measured: the same decoder, run by torch in bfloat16, is
    off by r (root mean square) in a logit, so the difference of two by sqrt(2) r; five times that is the bound, which
    none of some thousand tokens should pass by chance. How many tokens agree depends on how often two logits are that
    near, which with random weights is often: at least ``least`` must (real weights), and no fewer, but for 2 %, than
    of the bfloat16 decoder's own choices.
    """
    lines, all_good = [], True
    weights = runner_weights(runner)
    exact = Decoder(config, ((k, v.float()) for k, v in weights.items()))
    rounded = Decoder(config, weights.items())
    for how, given in (
        ("in a batch", greedy(runner, slots, prompts, 64, False)),
        ("cached prefixes", greedy(runner, slots, prompts, 64, True, rounds=2)),
        ("alone", [greedy(runner, slots, [prompt], 1, False)[0] for prompt in prompts[:alone]]),
    ):
        agree, theirs, total, worst, squares, scale = 0, 0, 0, 0.0, 0.0, 0.0
        for prompt, output in zip(prompts, given, strict=False):
            assert len(output) == 64
            ids = torch.tensor(prompt + output, device=runner.device.on)
            logits, near = (logits_of(decoder, ids, len(prompt)) for decoder in (exact, rounded))
            best = logits.max(1).values
            gap = best - logits.gather(1, ids[len(prompt) :, None])[:, 0]
            agree += int((gap == 0).sum())
            theirs += int((logits.gather(1, near.argmax(1)[:, None])[:, 0] == best).sum())
            total += len(gap)
            worst = max(worst, float(gap.max()))
            squares += float((near - logits).square().mean()) / len(given)
            scale += float(logits.std()) / len(given)
        bound = 5 * (2 * squares) ** 0.5
        share, other = agree / total, theirs / total
        good = worst <= bound and share >= max(least, other - 0.02)
        lines.append(
            f"{'ok  ' if good else 'FAIL'} {name:6s} greedy {how:16s} top-1 agreement {share:.4f} of {total} (torch in "
            f"bfloat16 {other:.4f}), largest gap {worst / scale:.4f}, bound {bound / scale:.4f} standard "
            "deviations of the logits"
        )
        all_good = all_good and good
    runner.close()
    return all_good, lines


def logits_of(decoder: Decoder, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """float32, of the places whose next token was generated."""
    with torch.inference_mode():
        hidden = decoder.hidden(
            ids[:-1], torch.arange(len(ids) - 1, device=ids.device), lambda _, q, k, v: causal_attention(q, k, v, 0)
        )
        return decoder.logits(hidden[prompt - 1 :]).float()


def runner_weights(runner: CudaRunner) -> dict[str, torch.Tensor]:
    forward = runner.forward
    out = {"embed": forward.embedding, "norm": forward.norm}
    if not runner.config.tied_head:
        out["head"] = forward.head
    for i, layer in enumerate(forward.layers):
        # In the loader's order: a layer is complete with its last product.
        for name in sorted(layer.__slots__, key=lambda name: name.startswith("down")):
            tensor = getattr(layer, name)
            if tensor is not None:
                out[f"layers.{i}.{name}"] = tensor
    return out
