"""POST /generate, the native endpoint, in the shape that SGLang's clients know."""

from typing import Any

import anyio
from quart import Response

from runtime.limits import MAX_LOGPROBS
from runtime.messages import TokenLogprobs
from runtime.service import Delta
from runtime_http import params as p
from runtime_http.context import Call
from runtime_http.errors import ApiError, invalid
from runtime_http.job import Choice, Job, Prompt
from runtime_http.schema import NativeRequest, NativeSampling, convert
from runtime_http.sse import DONE, encode, error_event, event
from runtime_http.tokens import TokenTexts, finite


class Record:
    """One choice so far: native stream frames tell everything from the start."""

    __slots__ = ("inputs", "outputs", "text", "tokens")

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.inputs: tuple[TokenLogprobs | None, ...] = ()
        self.outputs: list[TokenLogprobs] = []

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.inputs = self.inputs or delta.prompt_logprobs
        self.outputs += delta.logprobs


class NativeDialect:
    """How /generate answers."""

    def __init__(self, request: NativeRequest, ids: list[str], texts: TokenTexts, *, single: bool) -> None:
        self.request = request
        self.ids = ids  # of each choice
        self.texts = texts
        self.single = single  # one object rather than a list
        self.records = [Record() for _ in ids]

    def opening(self, choice: Choice) -> bytes:
        return b""

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        self.records[choice.index].add(delta)
        if not delta.text and delta.finish is None:
            return b""
        frame = self._object(choice)
        return event(frame if self.single else frame | {"index": choice.index})

    def closing(self, job: Job) -> bytes:
        return DONE

    def error(self, error: ApiError) -> bytes:
        return error_event(error.body())

    def body(self, job: Job) -> bytes:
        for choice in job.choices:
            self.records[choice.index].add(choice.whole())
        objects = [self._object(choice) for choice in job.choices]
        return encode(objects[0] if self.single else objects)

    def _object(self, choice: Choice) -> dict[str, Any]:
        record, generation = self.records[choice.index], choice.generation
        meta: dict[str, Any] = {
            "id": self.ids[choice.index],
            "finish_reason": self._finish(choice),
            "prompt_tokens": generation.prompt_tokens,
            "completion_tokens": generation.completion_tokens,
            "cached_tokens": generation.cached_tokens,
            "e2e_latency": anyio.current_time() - choice.job.started_s,
        }
        if self.request.return_logprob:
            first = self._first_input(choice)
            inputs = list(zip(choice.prompt.tokens, record.inputs, strict=False))[first:]
            meta["input_token_logprobs"] = [self._entry(token, entry) for token, entry in inputs]
            meta["output_token_logprobs"] = [self._entry(entry.token, entry) for entry in record.outputs]
            if self.request.top_logprobs_num:
                meta["input_top_logprobs"] = [self._top(entry) for _, entry in inputs]
                meta["output_top_logprobs"] = [self._top(entry) for entry in record.outputs]
        return {"text": record.text, "output_ids": record.tokens, "meta_info": meta}

    def _first_input(self, choice: Choice) -> int:
        start = self.request.logprob_start_len
        return start if start >= 0 else len(choice.prompt.tokens)

    def _finish(self, choice: Choice) -> dict[str, Any] | None:
        match choice.finish:
            case None:
                return None
            case "length":
                return {"type": "length", "length": choice.generation.completion_tokens}
            case kind:
                return {"type": kind, "matched": choice.stop_match}

    def _entry(self, token: int, entry: TokenLogprobs | None) -> list[Any]:
        return [None if entry is None else finite(entry.logprob), token, self.texts.text(token)]

    def _top(self, entry: TokenLogprobs | None) -> list[list[Any]] | None:
        if entry is None:
            return None
        pairs = zip(entry.top_tokens, entry.top_logprobs, strict=True)
        return [[finite(logprob), token, self.texts.text(token)] for token, logprob in pairs]


async def generate(call: Call) -> Response:
    request = convert(await call.json(), NativeRequest)
    info = call.info
    prompts, batch = await read_prompts(call, request)
    p.whole_between("top_logprobs_num", request.top_logprobs_num, 0, MAX_LOGPROBS)
    wishes = sampling_wishes(request, len(prompts))
    n = wishes[0].n
    p.whole_between("sampling_params.n", n, 1, p.MAX_N)
    if any(wish.n != n for wish in wishes):
        raise invalid("sampling_params", "All 'sampling_params' of one request must have the same 'n'.")
    if len(prompts) * n > call.options.max_choices:
        raise invalid("text", f"{len(prompts)} prompts with n = {n} are too many for one request.")
    top = request.top_logprobs_num if request.return_logprob else -1
    params = []
    for wish, prompt in zip(wishes, prompts, strict=True):
        scored = request.return_logprob and 0 <= request.logprob_start_len < len(prompt.tokens)
        base = p.sampling_params(
            wish, info, logprobs=top, prompt_logprobs=top if scored else -1, prefix="sampling_params."
        )
        name = "text" if request.text is not None else "input_ids"
        limit_name = "sampling_params.max_new_tokens"
        if wish.max_tokens is not None:
            p.whole_between(limit_name, wish.max_tokens, 1)
        params.append(
            p.fit(
                base, info, len(prompt.tokens), wanted=wish.max_tokens, default=None, param=name, limit_name=limit_name
            )
        )
    id = call.new_id("gen-")
    ids = choice_ids(request, id, len(prompts), n)
    dialect = NativeDialect(request, ids, call.texts, single=not batch and n == 1)
    job = Job(call.front, call.exchange, dialect, id=ids[0] if len(ids) == 1 else id, stream=request.stream)
    return await job.run(prompts, params, n=n, priority=request.priority, cache_salt=request.cache_salt)


async def read_prompts(call: Call, request: NativeRequest) -> tuple[list[Prompt], bool]:
    """The prompts, and whether the answer is a list."""
    if (request.text is None) == (request.input_ids is None):
        raise invalid("text", "Exactly one of 'text' and 'input_ids' is needed.")
    if request.text is not None:
        batch = isinstance(request.text, list)
        texts = request.text if isinstance(request.text, list) else [request.text]
        prompts = [Prompt(await call.tokenizer.encode(text), text) for text in texts]
    else:
        assert request.input_ids is not None
        batch = bool(request.input_ids) and isinstance(request.input_ids[0], list)
        lists = request.input_ids if batch else [request.input_ids]
        if not all(isinstance(tokens, list) for tokens in lists):
            raise invalid("input_ids", "'input_ids' must be a list of token ids or a list of such lists.")
        prompts = [Prompt(p.known_tokens("input_ids", tokens, call.info)) for tokens in lists]
    if not prompts:
        raise invalid("text", "The list of prompts is empty.")
    return prompts, batch


def sampling_wishes(request: NativeRequest, prompts: int) -> list[NativeSampling]:
    raw = request.sampling_params
    raws = raw if isinstance(raw, list) else [raw or {}] * prompts
    if len(raws) != prompts:
        raise invalid("sampling_params", f"There are {len(raws)} 'sampling_params' for {prompts} prompts.")
    return [convert(one, NativeSampling, "sampling_params.") for one in raws]


def choice_ids(request: NativeRequest, id: str, prompts: int, n: int) -> list[str]:
    """An id for each choice: the client's where it gave some."""
    rids = request.rid
    if rids is None:
        rids = id
    if isinstance(rids, list):
        if len(rids) != prompts:
            raise invalid("rid", f"There are {len(rids)} 'rid' for {prompts} prompts.")
    else:
        rids = [rids] if prompts == 1 else [f"{rids}-{i}" for i in range(prompts)]
    return rids if n == 1 else [f"{rid}-{k}" for rid in rids for k in range(n)]
