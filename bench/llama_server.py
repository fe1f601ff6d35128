"""llama.cpp's own HTTP server, from the package xllamacpp, until its standard input closes.

    python bench/llama_server.py model.gguf --port 9000 --threads 2 --streams 16 --context 2048

Runs in any interpreter that has xllamacpp, and needs nothing of ours. Everything that is not named here is its default.
"""

import argparse
import sys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--context", type=int, required=True, help="tokens of each stream")
    args = parser.parse_args()
    try:
        import xllamacpp
    except ImportError as error:
        print(f"xllamacpp can't be imported by {sys.executable}: {error}", file=sys.stderr)
        return 3
    params = xllamacpp.CommonParams()
    params.model.path = args.gguf
    params.port = args.port
    params.n_parallel = args.streams
    params.n_ctx = args.streams * args.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
