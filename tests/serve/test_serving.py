"""What a client gets from a ready server, with the actors as tasks and as processes."""

import concurrent.futures
import json

import openai
import pytest
from servekit import MODEL, Server

STORY = "Once upon a time there was a small town by the sea, and in it"


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


def test_chat_with_the_openai_client(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)  # type: ignore[arg-type]
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None and whole.usage.completion_tokens == 8
    parts = client.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL,
        messages=messages,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(parts)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 8


def test_joined_deltas_equal_the_unstreamed_text(server: Server) -> None:
    # Emoji come in several tokens each: half of one must never be sent.
    prompt = "Repeat: 😀😃😄😁 😀😃😄😁 😀😃😄😁 😀😃😄😁 😀😃"
    whole = server.complete(prompt, max_tokens=24)["choices"][0]
    stream = server.stream(prompt, max_tokens=24).wait_end()
    assert stream.done and stream.whole
    assert stream.text == whole["text"]
    assert stream.finish == whole["finish_reason"] == "length"
    assert "\ufffd" not in stream.text.rstrip("\ufffd")


def test_the_same_answer_alone_and_among_others(server: Server) -> None:
    prompts = [f"{STORY} number {i}" for i in range(8)]
    alone = [server.complete(prompt, max_tokens=12)["choices"][0]["text"] for prompt in prompts[:3]]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda p: server.complete(p, max_tokens=12)["choices"][0]["text"], prompts))
    assert together[:3] == alone


def test_a_seed_gives_the_same_tokens_again(server: Server) -> None:
    def draw(seed: int) -> str:
        body = server.complete(STORY, max_tokens=12, temperature=1.0, seed=seed)
        text: str = body["choices"][0]["text"]
        return text

    assert draw(7) == draw(7)
    assert len({draw(seed) for seed in range(4)}) > 1


def test_a_stop_string_across_tokens_ends_the_text_before_it(server: Server) -> None:
    whole = server.complete(STORY, max_tokens=24)["choices"][0]["text"]
    stop = whole[20:27]
    cut = server.complete(STORY, max_tokens=24, stop=[stop])
    assert cut["choices"][0]["text"] == whole[: whole.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    stream = server.stream(STORY, max_tokens=24, stop=[stop]).wait_end()
    assert (stream.text, stream.finish) == (whole[: whole.index(stop)], "stop")


def test_a_common_prefix_is_computed_once(server: Server) -> None:
    prompt = STORY + " lived a very old woman who knew each ship by its name" * 4
    server.complete(prompt, max_tokens=2)
    again = server.complete(prompt, max_tokens=2)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48


def test_a_client_that_hangs_up_frees_its_place(server: Server) -> None:
    stream = server.stream(STORY, max_tokens=4000, ignore_eos=True)
    stream.wait_events(2)
    server.wait_metric("runtime_requests_running", 1)
    stream.hang_up()
    server.wait_metric("runtime_requests_running", 0)
    server.wait_metric("runtime_kv_pages", 0, state="used")
    server.wait_metric("runtime_requests_open", 0)


def test_models_health_ready_and_metrics(server: Server) -> None:
    assert [model["id"] for model in server.get("/v1/models").json["data"]] == [MODEL]
    assert server.get("/health").status == 200
    ready = server.get("/ready")
    assert ready.status == 200 and ready.json["state"] == "ready"
    assert {actor["state"] for actor in ready.json["actors"]} == {"running"}
    paths = {actor["path"] for actor in ready.json["actors"]}
    assert {"metrics", "model", "detokenizer", "replica0/scheduler0", "http/frontend0/tokenizer"} <= paths
    metrics = server.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert 'runtime_actor_up{actor="replica0/scheduler0"} 1.0' in metrics.body.decode()


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"model": "no-such-model", "prompt": "x"}, 404, "no-such-model"),
        ({"model": MODEL, "prompt": "x", "max_tokens": 100_000}, 400, "maximum context length"),
        ({"model": MODEL, "prompt": "x", "temperature": "hot"}, 400, "temperature"),
        ({"model": MODEL, "prompt": [10**6]}, 400, "49151"),
        ({"model": MODEL}, 400, "prompt"),
    ],
)
def test_a_wrong_request_is_that_requests_error_only(
    server: Server, body: dict[str, object], status: int, word: str
) -> None:
    other = server.stream(STORY, max_tokens=16)
    reply = server.post("/v1/completions", body)
    assert reply.status == status, reply.body
    assert word in reply.json["error"]["message"], reply.body
    assert other.wait_end().finish == "length"


def test_the_native_endpoint(server: Server) -> None:
    body = {"text": STORY, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    reply = server.post("/generate", body)
    assert reply.status == 200, reply.body
    assert reply.json["text"] == server.complete(STORY, max_tokens=8)["choices"][0]["text"]


def test_many_choices_of_one_prompt(server: Server) -> None:
    body = server.complete(STORY, max_tokens=6, n=3, temperature=1.0, seed=1)
    assert len({choice["text"] for choice in body["choices"]}) > 1
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 18


def test_a_stream_is_one_json_object_an_event(server: Server) -> None:
    stream = server.stream(None, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
    stream.wait_end()
    assert all(event["object"] == "chat.completion.chunk" for event in stream.events)
    assert json.dumps(stream.events)
