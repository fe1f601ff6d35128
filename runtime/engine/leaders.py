"""Which prefixes are being computed right now, and by whom: so that a burst of requests computes a common one once."""

from runtime.engine.request import Request

Text = tuple[str, bytes]  # salt, and all tokens up to a page's end


class Leaders:
    """Running requests by the text up to the end of the first page that they have not shared yet.

    A waiting request whose cached prefix ends where a leader's shared part does, and whose next page reads the same,
    would compute what the leader computes.
    """

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._by_text: dict[Text, Request] = {}
        self._text_of: dict[Request, Text] = {}

    def __len__(self) -> int:
        return len(self._by_text)

    def announce(self, request: Request) -> None:
        """Say what this request computes next; it may have done so before."""
        self.withdraw(request)
        end = (request.shared_pages + 1) * self._page_tokens
        if end <= len(request.tokens):
            text = (request.salt, request.tokens[:end].tobytes())
            if text not in self._by_text:
                self._by_text[text] = request
                self._text_of[request] = text

    def withdraw(self, request: Request) -> None:
        text = self._text_of.pop(request, None)
        if text is not None:
            del self._by_text[text]

    def of(self, request: Request, matched: int) -> Request | None:
        """Who computes the page that would be this waiting request's first, ``matched`` tokens being cached."""
        end = matched + self._page_tokens
        if not self._by_text or end >= len(request.tokens):
            return None
        return self._by_text.get((request.salt, request.tokens[:end].tobytes()))

    def common_tokens(self, request: Request, leader: Request) -> int:
        """Up to where waiting for the leader saves work: whole pages of common text, the last token aside."""
        size = min(len(request.tokens) - 1, len(leader.tokens))
        differs = request.tokens[:size] != leader.tokens[:size]
        common = int(differs.argmax()) if differs.any() else size
        return common - common % self._page_tokens
