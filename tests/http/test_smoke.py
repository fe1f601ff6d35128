import httpx


def test_x(http, model):
    r = http.post("/v1/completions", json={"model": model, "prompt": "Hi", "max_tokens": 50, "temperature": 0})
    print(r.status_code, r.text)
    with http.stream(
        "POST",
        "/v1/completions",
        json={"model": model, "prompt": "Hi", "max_tokens": 50, "temperature": 0, "stream": True},
    ) as r:
        print(r.status_code, r.headers)
        for l in r.iter_lines():
            print(l)
    r = http.get("/server_info")
    print(r.text)
