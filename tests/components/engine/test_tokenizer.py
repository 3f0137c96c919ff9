"""Tokenizers of folders and of GGUF metadata, against tokenizers and transformers; and their incremental decoding."""

import itertools
import json
import pathlib
import random

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from workerkit.components.engine.detokenizer import byte_level_alphabet
from workerkit.components.engine.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer
from workerkit.components.engine.tokenizer import FileTokenizer
from workerkit.framework.errors import ModelError, RequestError
from workerkit.framework.interfaces.sections import ModelSection
from workerkit.framework.interfaces.store import GGUFHeader, ModelStore

CORPUS = ["Hello world, it's 12 o'clock.  The naïve café serves 漢字 and 🙂 emoji\n\n\tdef f(x):\n    return x"] * 4
SPECIALS = ["<s>", "</s>", "<|user|>"]
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.text("a1 \n'sé漢🙂👩🏽‍🚀", max_size=40)


class Files(ModelStore):
    """A folder as it is, or GGUF metadata without a file."""

    def __init__(self, metadata=None):
        self.metadata = metadata

    def names(self):
        return {}

    def is_cached(self, name):
        raise NotImplementedError

    def fetch(self, name, progress=False):
        raise NotImplementedError

    def resolve(self, source):
        return pathlib.Path(source)

    def read_gguf(self, path):
        return GGUFHeader(path=path, metadata=self.metadata, tensors={})


def byte_level():
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<|tool call|>", special=False, normalized=False)])
    return tokenizer


def sentencepiece_vocab():
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["ll", "el", "ello", "or", "ld", "is", "▁H", "▁He", "▁Hello", "▁w", "▁wor", "▁world", "▁▁", "▁▁▁"]
    return [*pieces, *"▁Helowrditsé", *words]


def sentencepiece():
    vocab = {piece: i for i, piece in enumerate(sentencepiece_vocab())}
    merges = [("l", "l"), ("▁", "H"), ("e", "ll"), ("▁H", "e")]
    vocab["ell"] = len(vocab)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer


def save(folder, tokenizer, **config):
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | config))
    return FileTokenizer(ModelSection(source=str(folder)), Files())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {"bytes": save(root / "bytes", byte_level()), "pieces": save(root / "pieces", sentencepiece())}


# --- a folder ---------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(texts)
def test_text_comes_back(folders, text):
    part = folders["bytes"]
    ids = part.encode(text)
    assert ids == part._tokenizer.encode(text).ids
    assert part.decode(ids, skip_special_tokens=False) == text


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_decode_is_the_tokenizers_own_on_any_ids(folders, data):
    part = folders["bytes"]
    ids = data.draw(st.lists(st.integers(0, part.vocab_size + 3), max_size=30))
    skip = data.draw(st.booleans())
    assert part.decode(ids, skip) == part._tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_sentencepiece_decode_is_the_tokenizers_own_on_text(folders, data):
    """Bytes that are no UTF-8 differ on purpose: there each maximal bad run is one U+FFFD, as everywhere else."""
    part = folders["pieces"]
    ids = part._tokenizer.encode(data.draw(texts)).ids
    assert part.decode(ids) == part._tokenizer.decode(ids)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(["bytes", "pieces"]), st.data())
def test_joined_deltas_are_the_decoded_whole(folders, kind, data):
    part = folders[kind]
    some_ids = st.lists(st.integers(0, part.vocab_size - 1), max_size=25)
    ids = data.draw(some_ids | texts.map(lambda text: part.encode(text)))
    skip = data.draw(st.booleans())
    whole = part.decode(ids, skip)
    detokenizer, joined, rest = part.detokenizer([], skip), "", list(ids)
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        joined += detokenizer.push(rest[:size])
        assert "�" in whole or whole.startswith(joined)
        rest = rest[size:]
    assert joined + detokenizer.flush() == whole


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_deltas_continue_the_prompt(folders, data):
    part = folders["bytes"]
    some_ids = st.lists(st.integers(0, part.vocab_size - 1), max_size=12) | texts.map(lambda text: part.encode(text))
    prompt, output = data.draw(some_ids), data.draw(some_ids)
    before = part.detokenizer([]).push(prompt)
    detokenizer = part.detokenizer(prompt)
    after = detokenizer.push(output) + detokenizer.flush()
    assert before + after == (part.decode(prompt + output) if output else before)


def byte_ids(part, data):
    letter_of = {byte: letter for letter, byte in byte_level_alphabet().items()}
    return [part._tokenizer.token_to_id(letter_of[byte]) for byte in data]


def test_b20_a_prompt_that_ends_in_half_a_character(folders):
    part = folders["bytes"]
    detokenizer = part.detokenizer(byte_ids(part, b"Hi \xe2\x82"))
    deltas = [detokenizer.push([token]) for token in byte_ids(part, b"\xacx")]
    assert [*deltas, detokenizer.flush()] == ["€", "x", ""]


def test_b106a_an_unfinished_character_at_the_end(folders):
    part = folders["bytes"]
    detokenizer = part.detokenizer(part.encode("Hi"))
    assert detokenizer.push(byte_ids(part, b"a\xe2")) == "a"
    assert detokenizer.flush() == "�"
    assert part.detokenizer(byte_ids(part, b"\xe2")).flush() == ""  # the prompt's own damage is not output


def test_characters_of_several_tokens_appear_whole(folders):
    for kind in ("bytes", "pieces"):
        part = folders[kind]
        ids = part.encode("🦀")
        detokenizer = part.detokenizer(part.encode("x"))
        deltas = [detokenizer.push([token]) for token in ids]
        assert len(deltas) > 2
        assert deltas[-1] == "🦀"
        assert "".join(deltas[:-1]).strip() == ""


def test_special_tokens_are_not_shown(folders):
    part = folders["bytes"]
    ids = part.encode("<|user|>Hello</s>")
    assert ids[0] == 2
    assert part.decode(ids) == "Hello"
    assert part.decode(ids, skip_special_tokens=False) == "<|user|>Hello</s>"
    assert part.detokenizer([]).push(ids) == "Hello"
    assert part.detokenizer(ids, skip_special_tokens=False).push(ids) == "<|user|>Hello</s>"
    tool = part.encode("<|tool call|>")
    assert (len(tool), part.decode(tool)) == (1, "<|tool call|>")


@settings(deadline=None)
@given(st.sampled_from(["bytes", "pieces"]), texts)
def test_token_bytes_join_to_the_text(folders, kind, text):
    part = folders[kind]
    ids = part.encode(text, add_special_tokens=False)
    joined = b"".join(map(part.token_bytes, ids)).decode()
    assert joined.removeprefix(" " if kind == "pieces" else "") == part.decode(ids, skip_special_tokens=False)


def test_bytes_of_special_tokens_and_of_ids_that_are_no_token(folders):
    part = folders["bytes"]
    assert part.special_token_ids == {0, 1, 2}
    assert [part.token_bytes(i) for i in (0, 2, part.vocab_size - 1)] == [b"<s>", b"<|user|>", b"<|tool call|>"]
    assert [part.token_bytes(i) for i in (part.vocab_size, part.vocab_size + 1000)] == [b"", b""]
    pieces = folders["pieces"]
    assert {pieces.token_bytes(i) for i in pieces.special_token_ids} == {b"<unk>", b"<s>", b"</s>"}
    assert pieces.token_bytes(3 + 0xE2) == b"\xe2"


def test_sentencepiece_spaces(folders):
    part = folders["pieces"]
    assert part.decode(part.encode("Hello world")) == "Hello world"
    detokenizer = part.detokenizer(part.encode("Hello"))
    assert detokenizer.push(part.encode("world")) == " world"  # a continuation keeps its space
    assert part.detokenizer([1]).push(part.encode("world")) == "world"  # after <s> alone the text starts here


def test_properties(folders):
    part = folders["bytes"]
    assert part.vocab_size == part._tokenizer.get_vocab_size(with_added_tokens=True)
    assert (part.bos_token, part.eos_token, part.eos_token_ids) == ("<s>", "</s>", (1,))
    assert part.chat_template is None


# --- beginning and end of sequence -----------------------------------------------------------------------------


def test_b107_never_two_beginnings(tmp_path):
    """A rendered chat that starts with BOS has one, whatever is asked; plain text gets what the tokenizer says."""
    adds = save(tmp_path / "adds", byte_level(), add_bos_token=True)
    processed = byte_level()
    processed.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    own = save(tmp_path / "own", processed)
    plain = save(tmp_path / "plain", byte_level())
    for part in (adds, own, plain):
        for ask in (True, False):
            assert part.encode("<s><|user|>Hi", add_special_tokens=ask)[:2] == [0, 2]
        assert part.encode("Hi", add_special_tokens=False)[0] != 0
    assert adds.encode("Hi")[0] == own.encode("Hi")[0] == 0
    assert plain.encode("Hi")[0] != 0
    assert adds.encode("") == own.encode("") == [0]


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_a_post_processor_wins_over_the_flags_as_in_transformers(tmp_path, add_bos, add_eos):
    tokenizer = byte_level()
    part = save(tmp_path / "flags", tokenizer, add_bos_token=add_bos, add_eos_token=add_eos)
    ids = part.encode("Hello")
    assert ((ids[0] == 0), (ids[-1] == 1)) == (add_bos, add_eos)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    part = save(tmp_path / "own", tokenizer, add_bos_token=add_bos, add_eos_token=add_eos)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "own")
    assert part.encode("Hello") == oracle("Hello")["input_ids"] == [0, *ids[add_bos : len(ids) - add_eos]]


def test_eos_ids_of_all_files(tmp_path):
    save(tmp_path / "t", byte_level(), eos_token={"content": "</s>", "special": True})
    (tmp_path / "t" / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    (tmp_path / "t" / "config.json").write_text('{"eos_token_id": 9}')
    part = FileTokenizer(ModelSection(source=str(tmp_path / "t")), Files())
    assert (part.eos_token, part.eos_token_ids) == ("</s>", (1, 2, 9))


def test_where_the_chat_template_may_be(tmp_path):
    assert save(tmp_path / "a", byte_level(), chat_template="A").chat_template == "A"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert save(tmp_path / "b", byte_level(), chat_template=named).chat_template == "D"
    (tmp_path / "b" / "chat_template.jinja").write_text("J\n")
    assert FileTokenizer(ModelSection(source=str(tmp_path / "b")), Files()).chat_template == "J\n"


def test_damaged_and_missing_files(tmp_path):
    def load():
        return FileTokenizer(ModelSection(source=str(tmp_path)), Files())

    with pytest.raises(ModelError, match=r"has no tokenizer\.json$"):
        load()
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelError, match=r"tokenizer\.model alone is not read"):
        load()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not understood"):
        load()
    save(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read"):
        load()
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ModelError, match="decoder None is not supported"):
        save(tmp_path, words)


def test_text_that_is_no_text(folders):
    with pytest.raises(RequestError, match="not valid text"):
        folders["bytes"].encode("a\ud800")


# --- GGUF -------------------------------------------------------------------------------------------------------


def metadata_of(tokenizer, kind, /, **keys):
    state = json.loads(tokenizer.to_str())
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    types = [3 if token in SPECIALS else 4 if token == "<|tool call|>" else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def from_gguf(tmp_path, metadata):
    (tmp_path / "m.gguf").write_bytes(b"")
    return FileTokenizer(ModelSection(source=str(tmp_path / "m.gguf")), Files(metadata))


def test_a_gguf_tokenizer_is_the_one_it_was_made_from(tmp_path):
    original = byte_level()
    part = from_gguf(tmp_path, metadata_of(original, "gpt-2"))
    for text in [*CORPUS, "a  12", "<|user|>x<|tool call|> y</s>", "it's  \n\n 3"]:
        assert part.encode(text) == original.encode(text).ids
    assert (part.bos_token, part.eos_token, part.eos_token_ids) == ("<s>", "</s>", (1, 2))
    assert part.chat_template == "{{ messages }}"
    assert part.vocab_size == original.get_vocab_size()
    assert part.decode(part.encode("<|user|>naïve🙂")) == "naïve🙂"


def digits_then_gpt2():
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def split_then_bytes(pattern):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# Llama 3's own tokenizer.json
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ORACLES = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": digits_then_gpt2(),
    "llama-bpe": split_then_bytes(LLAMA3),
    "qwen2": transformers.Qwen2Tokenizer()._tokenizer.pre_tokenizer,
}


# Of a code point that only a newer Unicode assigns, two regex engines of one library may think differently.
assigned = st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=30)


@pytest.mark.parametrize("pre", ORACLES)
@settings(deadline=None, max_examples=150)
@given(text=assigned | st.text("aA1²½ \t\r\n'sSdD.,;:/漢é", max_size=30))
def test_text_is_split_as_the_models_own_tokenizer_does(pre, text):
    mine = build_tokenizer(metadata_of(BYTES, pre), "m.gguf").pre_tokenizer
    assert mine.pre_tokenize_str(text) == ORACLES[pre].pre_tokenize_str(text)


BYTES = byte_level()


def test_smollm_digits_stand_alone(tmp_path):
    """transformers' own GGUF reader forgets the digits: there `a  12` gives another split of the spaces."""
    part = from_gguf(tmp_path, metadata_of(BYTES, "smollm"))
    assert [part.decode([i]) for i in part.encode("x12")] == ["x", "1", "2"]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_known_pre_tokenizer_loses_no_text(tmp_path, pre):
    part = from_gguf(tmp_path, metadata_of(BYTES, pre))
    for text in CORPUS:
        assert part.decode(part.encode(text)) == text


def test_add_bos_in_gguf(tmp_path):
    for pre, keys, expected in (
        ("gpt-2", {}, False),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("gpt-2", {"add_bos_token": True}, True),
    ):
        part = from_gguf(tmp_path, metadata_of(BYTES, pre, **keys))
        assert (part.encode("Hi")[0] == 0) is expected
        assert part.encode("<s>Hi").count(0) == 1
    assert from_gguf(tmp_path, metadata_of(BYTES, "gpt-2", add_eos_token=True)).encode("Hi")[-1] == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pre": "martian"}, "tokenizer.ggml.pre 'martian' does not say how text is split; known: gpt-2"),
        ({"pre": None}, "tokenizer.ggml.pre 'None'"),
        ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not supported; gpt2 and llama are"),
        ({"model": None}, "holds no tokenizer"),
        ({"tokens": []}, "holds no tokenizer"),
        ({"token_type": [1]}, "has 1 entries"),
        ({"merges": ["no such"]}, "its tokenizer is damaged"),
        ({"model": "llama"}, "scores must have one entry"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path, keys, message):
    with pytest.raises(ModelError, match=message):
        from_gguf(tmp_path, metadata_of(BYTES, "gpt-2", **keys))


def reference_sentencepiece(text, scores):
    """SentencePiece's BPE by its definition: merge the best-scored neighbours, leftmost first; then bytes."""
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not pairs:
            break
        i = min(pairs)[1]
        symbols[i : i + 2] = ["".join(symbols[i : i + 2])]
    return [piece for s in symbols for piece in ([s] if s in scores else [f"<0x{byte:02X}>" for byte in s.encode()])]


def test_sentencepiece_scores_become_the_same_merges(tmp_path):
    tokens = sentencepiece_vocab()
    shuffled = list(range(len(tokens)))
    random.Random(4).shuffle(shuffled)
    scores = [-float(i) for i in shuffled]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    part = from_gguf(tmp_path, metadata)
    normal = dict(zip(tokens[259:], scores[259:], strict=True))

    @settings(deadline=None, max_examples=200)
    @given(st.text("Helo wrdits é漢", max_size=20))
    def check(text):
        ids = part.encode(text, add_special_tokens=False)
        assert [tokens[i] for i in ids] == reference_sentencepiece(text, normal)
        assert part.decode(ids) == text

    check()
    assert part.encode("Hello")[0] == 1  # a sentencepiece model starts with BOS unless the file says no
    assert part.encode("<s>Hello")[:2] != [1, 1]
    metadata["tokenizer.ggml.add_space_prefix"] = False
    bare = from_gguf(tmp_path, metadata)
    assert bare.decode(bare.encode(" Hello")) == " Hello"


@pytest.mark.real
def test_smollm2s_own_tokenizer():
    from workerkit.components.loader.store import LocalModelStore, LocalModelStoreConfig

    part = FileTokenizer(ModelSection(source="smollm2"), LocalModelStore(LocalModelStoreConfig()))
    assert (part.bos_token, part.eos_token, part.eos_token_ids) == ("<|im_start|>", "<|im_end|>", (2,))
    assert part.vocab_size == 49152
    assert part.encode("<|im_start|>user\nHi<|im_end|>")[0] == 1
    letters = [part._tokenizer.id_to_token(i) for i in part.encode("a  12")]
    assert letters == ["a", "ĠĠ", "1", "2"]
    for text in [*CORPUS, "👩🏽‍🚀 x=1\t{}", "Ünïcödé — “quotes”"]:
        assert part.decode(part.encode(text)) == text
