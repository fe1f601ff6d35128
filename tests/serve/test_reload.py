"""SIGHUP: what can change while the server runs does, also for actors that are restarted later."""

import json
import os
import signal
from pathlib import Path

from servekit import Server

BODY = {"model": "SmolLM2-135M-Instruct", "prompt": "x", "max_tokens": 1}


def status(server: Server, key: str) -> int:
    return server.request("POST", "/v1/completions", BODY, {"Authorization": f"Bearer {key}"}).status


def test_a_reload(placement: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "model.toml"
    file.write_text('[http]\napi_keys = ["old"]\n')
    with Server(tmp_path, str(file), settings=placement) as server:
        server.wait_ready()
        assert status(server, "old") == 200 and status(server, "new") == 401

        file.write_text('[http]\napi_keys = ["new"]\nkeep_alive_s = 5\n[log]\nlevel = "debug"\n')
        server.process.send_signal(signal.SIGHUP)
        server.wait_log("these need a restart to change: http.keep_alive_s")
        server.wait_log("changed: http.api_keys, log.level")
        while status(server, "new") != 200:
            assert server.process.poll() is None
        assert status(server, "old") == 401

        file.write_text("[http]\nport = what\n")
        server.process.send_signal(signal.SIGHUP)
        server.wait_log("nothing has changed")
        assert status(server, "new") == 200

        if (pid := server.actors()["http/frontend0"]["pid"]) is not None:
            os.kill(pid, signal.SIGKILL)
            server.wait_phase("http/frontend0", lambda actor: actor["generation"] == 2 and actor["state"] == "running")
            while status(server, "new") != 200:
                assert server.process.poll() is None
            assert status(server, "old") == 401


def test_a_process_of_the_front_logs_as_the_root_does(tmp_path: Path) -> None:
    tokenizer = "http/frontend0/tokenizer"
    words = f"{tokenizer} gave no answer"

    def set_file(level: str, key: str) -> None:
        file.write_text(f'[http]\napi_keys = ["{key}"]\n[log]\nformat = "json"\nlevel = "{level}"\n')

    def have_it_say_something(key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        stuck = {"actor": tokenizer, "fault": "stuck"}
        assert server.request("POST", "/debug/fault", stuck, headers).status == 200
        assert status(server, key) == 200

    file = tmp_path / "model.toml"
    set_file("warning", "old")
    settings = ("supervision.placement.frontend=process", "supervision.debug_faults=true")
    with Server(tmp_path, str(file), settings=(*settings, "supervision.hang_timeout_s=2")) as server:
        server.wait_ready()
        have_it_say_something("old")
        server.wait_log(words)
        (line,) = [line for line in server.log.splitlines() if words in line]
        assert json.loads(line)["logger"] == "runtime.tokenizer"

        set_file("error", "new")
        server.process.send_signal(signal.SIGHUP)
        while status(server, "new") != 200:
            assert server.process.poll() is None
        have_it_say_something("new")
        assert server.log.count(words) == 1
