"""TextStream: what comes out in pieces is the text as a whole, whatever the pieces."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from textkit import model_folder, sentencepiece, smollm2

from runtime.detokenize import TextStream
from runtime.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def reference() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(model_folder() / "tokenizer.json"))


# Random ids hit words; texts hit characters of several tokens; the low ids are special tokens and single bytes.
ID_LISTS = st.one_of(
    st.lists(st.integers(0, 49151), max_size=12),
    st.lists(st.integers(0, 260), max_size=12),
    st.text(max_size=12).map(lambda text: smollm2().encode(text)),
    st.sampled_from(["naïve 日本語 😀👩‍🚀 ok", "\n\n  x\t", "Ελληνικά ünd"]).map(lambda text: smollm2().encode(text)),
)


def split(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    """The ids in order, cut at some places; empty pieces happen."""
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(edges)]


def whole(stream: TextStream, pieces: Sequence[Sequence[int]]) -> str:
    return "".join([stream.push(piece) for piece in pieces]) + stream.finish()


def first_match(text: str, stops: Sequence[str]) -> tuple[str, str] | None:
    """The text before the first stop string to be complete, and that stop string; reads character by character."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return None


@given(ids=ID_LISTS, cuts=st.lists(st.integers(0, 12), max_size=6), skip=st.booleans())
def test_pieces_join_to_the_whole_text(
    reference: tokenizers.Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    stream = TextStream(smollm2(), skip_special_tokens=skip)
    text = whole(stream, split(ids, cuts))
    assert text == reference.decode(ids, skip_special_tokens=skip)
    assert stream.offset == len(text)


@given(ids=ID_LISTS)
def test_what_is_out_stays(ids: list[int]) -> None:
    """After every token, what is out begins the text, and only an unfinished character is missing."""
    tokenizer = smollm2()
    stream, out = TextStream(tokenizer), ""
    for count, id in enumerate(ids, 1):
        out += stream.push([id])
        so_far = tokenizer.decode(ids[:count])
        assert so_far.startswith(out)
        assert so_far[len(out) :] in ("", "\ufffd")
        assert tokenizer.decode(ids).startswith(out)


@given(prompt=st.text(max_size=8), output=ID_LISTS, cuts=st.lists(st.integers(0, 12), max_size=4))
def test_text_goes_on_from_the_prompt(prompt: str, output: list[int], cuts: list[int]) -> None:
    tokenizer = smollm2()
    prompt_ids = tokenizer.encode(prompt)
    stream = TextStream(tokenizer, prompt_tail=prompt_ids)
    text = whole(stream, split(output, cuts))
    assert tokenizer.decode(prompt_ids) + text == tokenizer.decode(prompt_ids + output)


def test_a_character_that_begins_in_the_prompt() -> None:
    tokenizer = smollm2()
    ids = tokenizer.encode("🜚")
    assert len(ids) > 1
    stream = TextStream(tokenizer, prompt_tail=ids[:-1])
    assert stream.push(ids[-1:]) == "🜚"
    # What never becomes a character was the prompt's, and isn't shown as the answer's.
    stream = TextStream(tokenizer, prompt_tail=ids[:-1])
    assert whole(stream, [tokenizer.encode("abc")]) == "abc"
    assert whole(TextStream(tokenizer, prompt_tail=ids[:-1]), []) == ""


def test_no_half_characters() -> None:
    tokenizer = smollm2()
    stream = TextStream(tokenizer)
    deltas = [stream.push([id]) for id in tokenizer.encode("a🜚b")]
    assert "".join(deltas) == "a🜚b"
    assert all("\ufffd" not in delta for delta in deltas)


def test_bytes_that_never_become_a_character_are_replaced_once_that_is_certain() -> None:
    tokenizer = smollm2()
    begin = tokenizer.encode("🜚")[:1]
    stream = TextStream(tokenizer)
    assert stream.push(begin) == ""
    assert stream.push(tokenizer.encode("x")) == "\ufffdx"
    assert stream.push(begin) == ""
    assert stream.finish() == "\ufffd"


TEXTS = st.text(alphabet="abé😀 ", max_size=20)
STOPS = st.lists(st.text(alphabet="abé😀 ", min_size=0, max_size=4), max_size=4)


@settings(max_examples=300)
@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=6), include=st.booleans())
def test_stop_strings_cut_at_the_first_match(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    ids = smollm2().encode(text)
    stream = TextStream(smollm2(), stop=stops, include_stop=include)
    out = whole(stream, split(ids, cuts))
    match first_match(text, stops):
        case None:
            assert (out, stream.matched) == (text, None)
        case before, stop:
            assert (out, stream.matched) == (before + stop if include else before, stop)
    assert stream.offset == len(out)
    if stream.matched is not None:
        assert stream.push(ids) + stream.finish() == ""


@given(text=TEXTS, stops=STOPS)
def test_no_more_is_held_back_than_needed(text: str, stops: list[str]) -> None:
    tokenizer = smollm2()
    stream, out = TextStream(tokenizer, stop=stops), ""
    ids = tokenizer.encode(text)
    for count, id in enumerate(ids, 1):
        out += stream.push([id])
        so_far = tokenizer.decode(ids[:count]).removesuffix("\ufffd")
        if first_match(so_far, stops):
            break
        begun = [stop[:length] for stop in stops for length in range(1, len(stop))]
        needed = max((len(begin) for begin in begun if so_far.endswith(begin)), default=0)
        assert out == so_far[: len(so_far) - needed]
        assert out + stream.held == so_far


@given(ids=ID_LISTS, stops=STOPS, at=st.integers(0, 12))
def test_a_replay_goes_on_as_the_original(ids: list[int], stops: list[str], at: int) -> None:
    """Pushed one by one or at once, the same ids leave the same state."""
    original, replayed = (TextStream(smollm2(), stop=stops) for _ in range(2))
    for id in ids[:at]:
        original.push([id])
    replayed.push(ids[:at])
    assert (replayed.offset, replayed.held, replayed.matched) == (original.offset, original.held, original.matched)
    assert whole(replayed, [ids[at:]]) == whole(original, [ids[at:]])


def test_a_stop_string_over_three_tokens() -> None:
    tokenizer = smollm2()
    stream = TextStream(tokenizer, stop=["###END"])
    deltas = [stream.push([id]) for id in tokenizer.encode("one ###END two")]
    assert "".join(deltas) == "one "
    assert stream.matched == "###END"
    assert stream.finish() == ""


def test_special_tokens_are_shown_on_request() -> None:
    tokenizer = smollm2()
    ids = [tokenizer.token_id("<|im_end|>"), *tokenizer.encode("x")]
    assert whole(TextStream(tokenizer), [ids]) == "x"
    assert whole(TextStream(tokenizer, skip_special_tokens=False), [ids]) == "<|im_end|>x"


def test_ids_without_a_token_add_nothing() -> None:
    assert whole(TextStream(smollm2()), [[49152, 10**6, -1]]) == ""


# -------------------------------------------- SentencePiece: spaces are marks, unknown characters are bytes


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sentencepiece(tmp_path_factory.mktemp("sentencepiece"))


@given(data=st.data())
def test_sentencepiece_pieces_join_to_the_whole_text(spm: Tokenizer, data: st.DataObject) -> None:
    reference = tokenizers.Tokenizer.from_file(str(spm.folder / "tokenizer.json"))
    text = data.draw(st.text(alphabet="helo wrdé😀", max_size=12))
    skip = data.draw(st.booleans())
    ids = spm.encode(text)
    cuts = data.draw(st.lists(st.integers(0, 20), max_size=6))
    assert whole(TextStream(spm, skip_special_tokens=skip), split(ids, cuts)) == reference.decode(
        ids, skip_special_tokens=skip
    )


def test_the_first_space_is_dropped_at_the_beginning_only(spm: Tokenizer) -> None:
    hello, world = spm.encode("hello world", add_special=False)
    assert whole(TextStream(spm), [[hello], [world]]) == "hello world"
    assert whole(TextStream(spm, prompt_tail=[1]), [[hello]]) == "hello"
    assert whole(TextStream(spm, prompt_tail=[1, hello]), [[world]]) == " world"


def test_byte_tokens_wait_for_their_character(spm: Tokenizer) -> None:
    ids = spm.encode("é", add_special=False)
    stream = TextStream(spm)
    assert [stream.push([id]) for id in ids] == ["", "", "é"]


def test_no_space_is_dropped_where_none_was_added(tmp_path: Path) -> None:
    spm = sentencepiece(tmp_path, **{"tokenizer.ggml.add_space_prefix": False})
    ids = spm.encode(" hello", add_special=False)
    assert whole(TextStream(spm), [ids]) == " hello"
