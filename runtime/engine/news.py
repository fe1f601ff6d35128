"""What the engine has to tell its clients since the last message."""

import numpy as np
import numpy.typing as npt

from runtime.engine.batch import I32
from runtime.engine.request import Request, Rows
from runtime.messages import ErrorCode, FinishReason, Opened, StepTokens, TokenLogprobs, TokenRow

# How many prompt tokens the detokenizer gets as the left context of the text.
TAIL_TOKENS = 8

_NO_ROWS: npt.NDArray[np.int64] = np.zeros((4, 0), np.int64)


class News:
    """Gathers a round's rows. Every request is opened before its first row, also one that is refused."""

    def __init__(self, rows: Rows) -> None:
        self._columns = rows
        self._opened: list[Opened] = []
        self._rows: list[TokenRow] = []
        self._plain = _NO_ROWS
        self._origins: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._opened or self._rows or self._plain.shape[1])

    def open(self, request: Request, cached_tokens: int = 0) -> None:
        if request.slot >= 0:
            self._columns.origin[request.slot] = self._origins.setdefault(request.origin, len(self._origins))
        if request.opened:
            return
        request.opened = True
        prompt, output = request.tokens[: request.prompt_tokens], request.tokens[request.prompt_tokens :]
        self._opened.append(
            Opened(
                origin=request.origin,
                id=request.id,
                attempt=request.attempt,
                prompt_tail=prompt[-TAIL_TOKENS:].tobytes(),
                output=output[: request.resumed_tokens].tobytes(),
                stop=request.params.stop,
                include_stop=request.params.include_stop,
                skip_special_tokens=request.params.skip_special_tokens,
                prompt_tokens=request.prompt_tokens,
                cached_tokens=cached_tokens,
            )
        )

    def plain(self, slots: I32, tokens: I32) -> None:
        """One token for each of these running requests, and nothing else to say. Once a round."""
        rows = self._columns
        self._plain = np.stack([rows.origin[slots], rows.id[slots], rows.attempt[slots], tokens])

    def row(
        self,
        request: Request,
        tokens: tuple[int, ...],
        finish: FinishReason | None = None,
        *,
        stop_token: bool = False,
        logprobs: tuple[TokenLogprobs, ...] = (),
        error: str = "",
        code: ErrorCode = "",
    ) -> None:
        self.open(request)
        scores: tuple[TokenLogprobs | None, ...] = ()
        if request.scores is not None and finish != "error":
            scores, request.scores = tuple(request.scores), None
        self._rows.append(
            TokenRow(
                request.origin,
                request.id,
                request.attempt,
                tokens,
                finish=finish,
                error=error,
                code=code,
                stop_token=stop_token,
                logprobs=logprobs,
                prompt_logprobs=scores,
            )
        )

    def error(self, request: Request, code: ErrorCode, sentence: str) -> None:
        """The last word of a request that has failed."""
        self.row(request, (), "error", error=sentence, code=code)

    def message(self) -> StepTokens | None:
        """Everything since the last call; None if that is nothing."""
        if not self:
            return None
        plain = self._plain
        message = StepTokens(
            opened=tuple(self._opened),
            news=tuple(self._rows),
            origins=tuple(self._origins) if plain.shape[1] else (),
            plain=plain.tobytes(),
        )
        self._opened, self._rows, self._plain = [], [], _NO_ROWS
        return message

    def forget_origins(self) -> None:
        """When nobody runs: frontends that are gone leave their addresses."""
        self._origins = {}
