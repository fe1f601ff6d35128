"""Readiness, keys, CORS, models, tokens, metrics, aborts."""

import threading
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from frontkit import Server
from scripted import ScriptedService
from sse import ask
from wirelevel import request

Start = Callable[..., Server]


class TestReadiness:
    def test_before_it_is_ready(self, start: Start) -> None:
        service = ScriptedService(ready=False)
        service.info = None
        server = start(service)
        with httpx.Client(base_url=server.url) as http:
            assert http.get("/health").status_code == 200
            ready = http.get("/ready")
            assert ready.status_code == 503 and "retry-after" in ready.headers
            assert ready.json()["state"] == "starting"
            assert ready.json()["actors"][0]["phase"] == "weights"
            assert http.get("/metrics").status_code == 200
            assert http.get("/server_info").status_code == 200
            for method, path in (
                ("POST", "/v1/chat/completions"),
                ("POST", "/v1/completions"),
                ("POST", "/generate"),
                ("POST", "/tokenize"),
                ("GET", "/v1/models"),
                ("GET", "/v1/models/x"),
            ):
                response = http.request(method, path, json={} if method == "POST" else None)
                assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
                assert response.json()["error"]["type"] == "service_unavailable_error"
            server.service.info = ScriptedService().info
            server.service.is_ready = True
            assert http.get("/server_info").json()["model"].keys() >= {"id", "device", "dtype", "quantization"}
            assert http.get("/ready").status_code == 200
            ask(http, "/v1/completions", {"model": "scripted", "prompt": "Hi"})

    def test_any_server(self, http: httpx.Client) -> None:
        assert http.get("/health").status_code == 200
        assert http.get("/ready").json()["state"] == "ready"


class TestKeys:
    @pytest.fixture
    def guarded(self, start: Start) -> Server:
        return start(api_keys=("first-key", "schlüssel"))

    def test_every_route_but_the_probes_needs_one(self, guarded: Server) -> None:
        rules = [rule for rule in guarded.app.url_map.iter_rules() if not rule.rule.endswith("<path:name>")]
        assert len(rules) > 10
        with httpx.Client(base_url=guarded.url) as http:
            for rule in rules:
                for method in (rule.methods or set()) & {"GET", "POST"}:
                    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first-key"}):
                        response = http.request(method, rule.rule, headers=headers)
                        if rule.rule in ("/health", "/ready"):
                            assert response.status_code == 200
                            continue
                        assert response.status_code == 401, rule.rule
                        assert response.json()["error"]["code"] == "invalid_api_key"
                        assert response.headers["www-authenticate"] == "Bearer"
                    right = http.request(method, rule.rule, headers={"Authorization": "bearer first-key"})
                    assert right.status_code != 401
            assert http.options("/v1/chat/completions").status_code == 200

    def test_the_openai_client(self, guarded: Server) -> None:
        wrong = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0)
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="first-key", max_retries=0) as client:
            assert client.models.list().data

    def test_keys_beyond_ascii_match_bytewise(self, guarded: Server) -> None:
        with httpx.Client(base_url=guarded.url) as http:
            headers = {b"Authorization": "Bearer schlüssel".encode()}
            assert http.get("/v1/models", headers=headers).status_code == 200  # type: ignore[arg-type]


PREFLIGHT = {
    "Origin": "http://localhost:3000",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


class TestCors:
    def test_a_preflight_needs_no_key(self, start: Start) -> None:
        server = start(api_keys=("key",))
        with httpx.Client(base_url=server.url) as http:
            response = http.options("/v1/chat/completions", headers=PREFLIGHT)
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == "*"
            assert "authorization" in response.headers["access-control-allow-headers"]
            assert "POST" in response.headers["access-control-allow-methods"]

    def test_answers_and_refusals_are_readable(self, http: httpx.Client, model: str) -> None:
        for path, status in (("/v1/models", 200), ("/v1/models/x", 404), ("/nothing", 404), ("/v1/completions", 405)):
            response = http.get(path, headers={"Origin": "http://a.example"})
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == "*"

    def test_only_configured_origins(self, start: Start) -> None:
        server = start(cors_origins=("http://good.example",))
        with httpx.Client(base_url=server.url) as http:
            good = http.get("/v1/models", headers={"Origin": "http://good.example"})
            assert (
                good.headers["access-control-allow-origin"] == "http://good.example"
                and good.headers["vary"] == "Origin"
            )
            bad = http.get("/v1/models", headers={"Origin": "http://bad.example"})
            assert "access-control-allow-origin" not in bad.headers

    def test_off(self, start: Start) -> None:
        server = start(cors_origins=())
        with httpx.Client(base_url=server.url) as http:
            response = http.get("/v1/models", headers={"Origin": "http://a.example"})
            assert "access-control-allow-origin" not in response.headers


def test_a_path_prefix(start: Start) -> None:
    server = start(root_path="/llm")
    with httpx.Client(base_url=server.url) as http:
        for prefix in ("/llm", ""):  # whether the proxy takes it off or not
            assert http.get(f"{prefix}/v1/models").status_code == 200
            assert http.get(f"{prefix}/health").status_code == 200
    with openai.OpenAI(base_url=f"{server.url}/llm/v1", api_key="none") as client:
        assert client.completions.create(model="scripted", prompt="Hi").choices[0].text


def test_models(http: httpx.Client, model: str) -> None:
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert card["id"] == model and card["object"] == "model" and card["created"] > 0 and card["owned_by"]
    assert card["max_model_len"] > 0
    assert http.get(f"/v1/models/{model}").json() == card


class TestTokens:
    @pytest.mark.parametrize("prefix", ["", "/v1"])
    def test_there_and_back(self, http: httpx.Client, prefix: str) -> None:
        text = "Grüße 世界 😀"
        answer = ask(http, f"{prefix}/tokenize", {"prompt": text})
        assert answer["count"] == len(answer["tokens"]) > 0 and answer["max_model_len"] > 0
        assert ask(http, f"{prefix}/detokenize", {"tokens": answer["tokens"]})["prompt"] == text

    def test_lists_and_chats(self, http: httpx.Client, model: str) -> None:
        assert len(ask(http, "/tokenize", {"model": model, "prompt": ["a", "b c"]})["tokens"]) == 2
        messages = [{"role": "user", "content": "Hi"}]
        count = ask(http, "/tokenize", {"model": model, "messages": messages})["count"]
        chat = ask(http, "/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 1})
        assert chat["usage"]["prompt_tokens"] == count

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/tokenize", {}),
            ("/tokenize", {"prompt": 5}),
            ("/tokenize", {"prompt": "a", "messages": []}),
            ("/tokenize", {"messages": []}),
            ("/detokenize", {}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": [999999]}),
            ("/detokenize", {"tokens": "abc"}),
        ],
    )
    def test_refusals(self, http: httpx.Client, path: str, body: dict[str, Any]) -> None:
        assert http.post(path, json=body).status_code == 400
        assert http.post(path, json=body | {"model": "x"}).status_code == 404


def test_many_at_once_count_as_they_do_alone(http: httpx.Client, base_url: str, model: str) -> None:
    texts = [f"word {i} " * (i + 1) for i in range(12)]
    alone = [ask(http, "/tokenize", {"prompt": text})["count"] for text in texts]
    counts: dict[int, int] = {}

    def one(i: int) -> None:
        with httpx.Client(base_url=base_url) as client:
            body = {"model": model, "prompt": texts[i], "max_tokens": 2}
            counts[i] = ask(client, "/v1/completions", body)["usage"]["prompt_tokens"]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [counts[i] for i in range(len(texts))] == alone


def test_metrics(start: Start) -> None:
    server = start()
    with httpx.Client(base_url=server.url) as http:
        ask(http, "/v1/completions", {"model": "scripted", "prompt": "Hi"})
        http.get("/no/such/path")
        http.get("/v1/completions")
        page = http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "scripted_running 0\n" in page.text
    assert 'runtime_http_requests_total{endpoint="/v1/completions",status="200"} 1\n' in page.text
    assert 'runtime_http_requests_total{endpoint="/v1/completions",status="405"} 1\n' in page.text
    assert 'runtime_http_requests_total{endpoint="other",status="404"} 1\n' in page.text
    assert "# TYPE runtime_http_fast_writes_total counter\n" in page.text


def test_flush_cache(scripted: Server, http: httpx.Client) -> None:
    before = scripted.service.flushed
    assert http.post("/flush_cache").json() == {"flushed": True}
    assert scripted.service.flushed == before + 1


class TestAbort:
    def test_by_id(self, start: Start) -> None:
        server = start(ScriptedService(step_s=0.001))
        body = {"text": "Hi", "rid": "mine", "stream": True}
        body["sampling_params"] = {"max_new_tokens": 8000, "ignore_eos": True}
        with server.connect() as sock, server.connect() as other:
            sock.send(request("/generate", body))
            sock.head()
            assert sock.chunk()
            assert other.ask("/abort_request", {"rid": "min"}).json == {"aborted": 0}
            assert other.ask("/abort_request", {"rid": "mine"}).json == {"aborted": 1}
            rest = b""
            while chunk := sock.chunk():
                rest += chunk
            assert chunk == b"" and b'"code":"aborted"' in rest
        server.wait_until(lambda: not server.service.live)

    def test_all(self, start: Start) -> None:
        server = start(ScriptedService(step_s=0.001))
        with server.connect() as sock, server.connect() as other:
            sock.send(request("/v1/completions", {"model": "scripted", "prompt": ["[[hang]]"] * 3}))
            server.wait_until(lambda: len(server.service.live) == 3)
            assert other.ask("/abort_request", {"abort_all": True}).json == {"aborted": 1}
            assert sock.answer().json["error"]["code"] == "aborted"
            assert other.ask("/abort_request", {}).status == 400


def test_the_clients_request_id_is_kept(http: httpx.Client, model: str) -> None:
    body = {"model": model, "prompt": "Hi", "max_tokens": 1}
    response = http.post("/v1/completions", json=body, headers={"X-Request-Id": "abc-123"})
    assert response.json()["id"] == "cmpl-abc-123" and response.headers["x-request-id"] == "cmpl-abc-123"
    response = http.post("/v1/completions", json=body, headers={"X-Request-Id": 'x" y'})
    assert response.json()["id"].startswith("cmpl-") and "x" not in response.json()["id"]
