"""The tokenizer and chat templates agree with transformers on the default model, and with the model's original."""

import json
import shutil
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textkit import model_folder, sentencepiece, smollm2

from runtime.tokenizer import TemplateError, Tokenizer, TokenizerError


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder())


HARD_TEXT = (
    "  Größe 12345 3.14 0x1F don't WE'LL I'm\n\n\t\tdef f(x):\r\n    return x**2  # naïve\n"
    "日本語 مرحبا Ελληνικά ភាសាខ្មែរ 👩‍🚀😀 ½ … 'tis <|im_start|>user<|im_end|> <repo_name>x\u00a0y\u200b  "
)


def test_hard_text_is_cut_as_the_original_model_cuts_it() -> None:
    """The digest is of a tokenizer that was checked against the one published with the model."""
    ids = smollm2().encode(HARD_TEXT)
    assert sha256(str(ids).encode()).hexdigest() == "7daa0cc5048d19a2180b4e57477f79ce817d157e1214c4aae678204eca0f4612"
    assert smollm2().decode(ids, skip_special=False) == HARD_TEXT


@given(text=st.text())
def test_encode_agrees_with_transformers(reference: Any, text: str) -> None:
    assert smollm2().encode(text) == reference.encode(text)
    assert smollm2().encode(text, add_special=False) == reference.encode(text, add_special_tokens=False)


@given(ids=st.lists(st.integers(0, 49151), max_size=20), skip=st.booleans())
def test_decode_agrees_with_transformers(reference: Any, ids: list[int], skip: bool) -> None:
    assert smollm2().decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


@given(text=st.text(alphabet=st.characters(exclude_categories=["C"])))
def test_text_survives_the_round_trip(text: str) -> None:
    assert smollm2().decode(smollm2().encode(text), skip_special=False) == text


CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n"}],
    [
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "<b>&amp; 'quoted' 日本</b>"},
    ],
]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_chats_agree_with_transformers(reference: Any, chat: list[dict[str, Any]], prompt: bool) -> None:
    text = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
    assert smollm2().render_chat(chat, add_generation_prompt=prompt) == text
    ids = reference.apply_chat_template(chat, tokenize=True, add_generation_prompt=prompt, return_dict=False)
    assert smollm2().encode_chat(chat, add_generation_prompt=prompt) == ids


@pytest.mark.parametrize("last", ["The answer is", "The answer is ", "  ", "x\n"])
def test_a_message_may_be_continued(reference: Any, last: str) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": last}]
    text = smollm2().render_chat(chat, continue_final_message=True)
    assert text.endswith(f"<|im_start|>assistant\n{last}")
    if last.strip():
        assert text == reference.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert chat[-1]["content"] == last


def test_special_tokens() -> None:
    tokenizer = smollm2()
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.vocab_size) == ((2,), 1, 49152)
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.token_id("<|im_end|>") == 2
    assert tokenizer.token_id("no such token") is None
    assert tokenizer.token_bytes([2, *tokenizer.encode("é"), 10**6]) == [b"<|im_end|>", "é".encode(), b""]


def test_threads_may_share_a_tokenizer() -> None:
    tokenizer, texts = Tokenizer(model_folder()), [f"text number {n}, {'x' * n}" for n in range(50)]
    wanted = [smollm2().encode(text) for text in texts]
    wrong: list[str] = []

    def work() -> None:
        for text, ids in zip(texts, wanted, strict=True):
            if tokenizer.encode(text) != ids or tokenizer.decode(ids) != text:
                wrong.append(text)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ------------------------------------------------------------------------------------- folders of other shapes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the default model's text files, to be changed."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(model_folder() / name, tmp_path)
    return tmp_path


def change(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **values}))


def with_template(folder: Path, template: Any) -> Tokenizer:
    change(folder / "tokenizer_config.json", chat_template=template)
    return Tokenizer(folder)


@pytest.mark.parametrize("flag", [True, False])
def test_the_begin_mark_is_put_where_tokenizer_json_says_so(folder: Path, flag: bool) -> None:
    """As in transformers: what tokenizer_config.json says about it doesn't count."""
    from transformers import AutoTokenizer

    mark = {"id": "<|im_start|>", "type_id": 0}
    framed = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": mark}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            {"SpecialToken": mark},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    change(folder / "tokenizer.json", post_processor=framed if flag else None)
    change(folder / "tokenizer_config.json", add_bos_token=not flag)
    ids = Tokenizer(folder).encode("hello")
    assert ids == AutoTokenizer.from_pretrained(folder).encode("hello")
    assert ids == [*([1] if flag else []), *smollm2().encode("hello")]
    assert Tokenizer(folder).encode("hello", add_special=False) == smollm2().encode("hello")


def test_every_end_of_an_answer_is_known(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=[0, 7])
    assert Tokenizer(folder).eos_ids == (0, 7, 2)
    (folder / "generation_config.json").unlink()
    change(folder / "config.json", eos_token_id=5)
    assert Tokenizer(folder).eos_ids == (5, 2)


def test_tokens_that_only_the_config_knows(folder: Path) -> None:
    change(folder / "tokenizer_config.json", added_tokens_decoder={"49152": {"content": "<extra>", "special": True}})
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("<extra>") == [49152]
    assert 49152 in tokenizer.special_ids


def test_truncation_in_the_file_is_ignored(folder: Path) -> None:
    limit = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    change(folder / "tokenizer.json", truncation=limit)
    assert len(Tokenizer(folder).encode("one two three four five six seven")) > 4


def test_templates_from_a_file_win(folder: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    (folder / "chat_template.jinja").write_text("from the folder: {{ messages[0].content }}")
    assert Tokenizer(folder).render_chat(chat) == "from the folder: Hi"
    mine = tmp_path / "mine.jinja"
    mine.write_text("mine: {{ messages[0].content }}")
    assert Tokenizer(folder, chat_template=mine).render_chat(chat) == "mine: Hi"


def test_named_templates(folder: Path) -> None:
    tokenizer = with_template(
        folder, [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | tojson }}"}]
    )
    assert tokenizer.render_chat([]) == "plain"
    assert tokenizer.render_chat([], [{"name": "f"}]) == '[{"name": "f"}]'


def test_templates_have_what_transformers_gives_them(folder: Path) -> None:
    """The functions, filters, tags and names that published templates use."""
    from transformers import AutoTokenizer

    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "  {% generation %}[{{ m.role }}|{{ m['content'] | trim }}]{% endgeneration %}{% endfor %}\n"
        "{% set ns = namespace(x=1) %}{{ tools | tojson(indent=2) }}{{ ns.x }}{{ flag }}{{ eos_token }}"
        "{% if add_generation_prompt %}>{% endif %}{{ strftime_now('%Y') | length }}"
    )
    tokenizer = with_template(folder, template)
    chat = [{"role": "user", "content": " <é> "}, {"role": "skip", "content": "x"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "é": "<>&"}}}]
    assert tokenizer.render_chat(chat, tools, flag=3) == AutoTokenizer.from_pretrained(folder).apply_chat_template(
        chat, tools=tools, tokenize=False, add_generation_prompt=True, flag=3
    )


def test_messages_as_openai_clients_send_them(folder: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.x }}"
    tokenizer = with_template(folder, template + "{% endif %}{% if 'name' in m %}named{% endif %}{% endfor %}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": parts, "name": None},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    assert tokenizer.render_chat(chat) == "ab5"
    assert call["function"] == {"name": "f", "arguments": '{"x": 5}'}


def test_names_of_a_request_cannot_replace_the_chat(folder: Path) -> None:
    kwargs: dict[str, Any] = {"messages": [], "tools": "x"}
    assert (
        with_template(folder, "{{ messages | length }}{{ tools }}").render_chat([{"role": "user"}], **kwargs) == "1None"
    )


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "can't render"),
        ("{{ messages[5].content.upper() }}", "refuses"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "can't render"),
    ],
)
def test_what_a_template_cannot_do_is_a_sentence(folder: Path, template: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words) as caught:
        with_template(folder, template).render_chat([{"role": "user", "content": "Hi"}])
    assert "\n" not in str(caught.value)


def test_a_broken_template_is_found_when_it_is_loaded(folder: Path) -> None:
    with pytest.raises(TemplateError, match="broken in line 2"):
        with_template(folder, "x\n{% if %}")


def test_a_model_without_a_template(folder: Path) -> None:
    tokenizer = with_template(folder, None)
    assert not tokenizer.has_chat_template
    with pytest.raises(TemplateError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "Hi"}])


def test_broken_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"nowhere/tokenizer\.json is missing"):
        Tokenizer(tmp_path / "nowhere")
    (folder / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"cut off')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json can't be used"):
        Tokenizer(folder)


def test_a_decoder_that_is_not_concatenation_is_refused(folder: Path) -> None:
    change(folder / "tokenizer.json", decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(TokenizerError, match="'WordPiece' is not supported"):
        Tokenizer(folder)


def test_sentencepiece_begins_with_a_mark_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    assert tokenizer.encode("hello") == [1, tokenizer.token_id("▁hello")]
    assert tokenizer.encode("hello world", add_special=False) == [
        tokenizer.token_id("▁hello"),
        tokenizer.token_id("▁world"),
    ]
    assert tokenizer.token_bytes(tokenizer.encode("é", add_special=False)) == [b" ", b"\xc3", b"\xa9"]
    assert tokenizer.encode("<|tool|>", add_special=False) == [tokenizer.token_id("<|tool|>")]
    assert tokenizer.decode(tokenizer.encode("hello é world")) == "hello é world"
