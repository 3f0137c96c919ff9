"""The tokenizer that lies beside (tokenizer.json) or inside (GGUF) a model's weights."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import tokenizers

from workerkit.components.engine.detokenizer import (
    IncrementalDetokenizer,
    byte_level_alphabet,
    byte_level_bytes,
    sentencepiece_bytes,
)
from workerkit.components.engine.gguf_tokenizer import adds_bos, build_tokenizer
from workerkit.framework.errors import ModelError, RequestError
from workerkit.framework.interfaces.sections import ModelSection
from workerkit.framework.interfaces.store import ModelStore
from workerkit.framework.interfaces.text import Detokenizer, Tokenizer


@attrs.frozen(kw_only=True)
class _Loaded:
    """What both kinds of source come down to."""

    tokenizer: tokenizers.Tokenizer
    bos_token: str = ""
    eos_token: str = ""
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    # None: what the tokenizer's own post-processor adds
    add_bos: bool | None = None
    add_eos: bool = False


class FileTokenizer(Tokenizer):
    """Reads the model's own tokenizer; needs no transformers.

    `encode` never doubles a beginning-of-sequence token that the text already starts with, so that a prompt rendered by
    a chat template has exactly one whether or not special tokens are asked for.
    """

    def __init__(self, section: ModelSection, files: ModelStore) -> None:
        path = files.resolve(section.source)
        self._loaded = _from_folder(path) if path.is_dir() else _from_gguf(path, files)
        self._tokenizer = self._loaded.tokenizer
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes_of, self._strip_first_space = _decoding(self._tokenizer, path)
        self._token_bytes: dict[int, bytes] = {}  # of those that were asked for

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._loaded.eos_token_ids

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def bos_token(self) -> str:
        return self._loaded.bos_token

    @property
    def eos_token(self) -> str:
        return self._loaded.eos_token

    @property
    def chat_template(self) -> str | None:
        return self._loaded.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        own = add_special_tokens and self._loaded.add_bos is None
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=own).ids
        except (UnicodeError, TypeError) as error:  # a str may hold lone surrogates, which are no text
            raise RequestError(f"the prompt is not valid text: {error}") from error
        bos = self._tokenizer.token_to_id(self.bos_token) if self.bos_token else None
        if own and bos is not None and ids[:2] == [bos, bos]:
            return ids[1:]
        if add_special_tokens and self._loaded.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        eos = self._tokenizer.token_to_id(self.eos_token) if self.eos_token else None
        if add_special_tokens and self._loaded.add_eos and eos is not None:
            ids.append(eos)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        detokenizer = self.detokenizer((), skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def detokenizer(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> Detokenizer:
        shown = self._text_bytes if skip_special_tokens else self.token_bytes
        return IncrementalDetokenizer(shown, prompt_token_ids, self._strip_first_space)

    def token_bytes(self, token_id: int) -> bytes:
        known = self._token_bytes.get(token_id)
        if known is None:
            # a model's output layer may be wider than the vocabulary: such ids are no text
            token = self._tokenizer.id_to_token(token_id)
            known = self._token_bytes[token_id] = b"" if token is None else self._bytes_of(token)
        return known

    def _text_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self.token_bytes(token_id)


def _decoding(tokenizer: tokenizers.Tokenizer, path: pathlib.Path) -> tuple[Callable[[str], bytes], bool]:
    """(token -> bytes, whether a text's first space is dropped), from the description of the decoder."""
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder]) if step}
    if "ByteLevel" in steps:
        alphabet = byte_level_alphabet()
        return lambda token: byte_level_bytes(token, alphabet), False
    if "ByteFallback" in steps or "Metaspace" in steps:
        metaspace = steps.get("Metaspace", {"prepend_scheme": "never"})["prepend_scheme"] != "never"
        return sentencepiece_bytes, metaspace or steps.get("Strip", {"start": 0})["start"] > 0
    raise ModelError(
        f"{path}: the tokenizer's decoder {decoder.get('type')!r} is not supported; "
        "ByteLevel, ByteFallback and Metaspace are"
    )


def _from_gguf(path: pathlib.Path, files: ModelStore) -> _Loaded:
    metadata = files.read_gguf(path).metadata
    tokens = metadata.get("tokenizer.ggml.tokens") or []

    def token(kind: str) -> str:
        index = metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return tokens[index] if index is not None and index < len(tokens) else ""

    eos = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return _Loaded(
        tokenizer=build_tokenizer(metadata, str(path)),
        bos_token=token("bos"),
        eos_token=token("eos"),
        eos_token_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
        chat_template=metadata.get("tokenizer.chat_template"),
        add_bos=adds_bos(metadata),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and bool(token("eos")),
    )


def _from_folder(folder: pathlib.Path) -> _Loaded:
    path = folder / "tokenizer.json"
    if not path.is_file():
        hint = "; tokenizer.model alone is not read" if (folder / "tokenizer.model").is_file() else ""
        raise ModelError(f"{folder} has no tokenizer.json{hint}")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} is not understood: {error}") from error
    config = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
    bos, eos = _text_of(config.get("bos_token")), _text_of(config.get("eos_token"))
    eos_ids = [tokenizer.token_to_id(eos)] if eos else []
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        eos_ids += value if isinstance(value, list) else [value]
    # as in transformers, a post-processor that adds tokens wins over the flags, which older files have instead
    own = tokenizer.num_special_tokens_to_add(False) > 0
    return _Loaded(
        tokenizer=tokenizer,
        bos_token=bos,
        eos_token=eos,
        eos_token_ids=tuple(dict.fromkeys(i for i in eos_ids if isinstance(i, int))),
        chat_template=_chat_template(folder, config),
        add_bos=None if own else bool(config.get("add_bos_token")),
        add_eos=not own and bool(config.get("add_eos_token")),
    )


def _json(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _text_of(token: Any) -> str:
    """A special token is written as text, or as an object with `content`."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _chat_template(folder: pathlib.Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
