"""The tokenizer that a GGUF file's metadata describes, rebuilt with the tokenizers library.

How text is cut before merging is named by `tokenizer.ggml.pre`; the patterns are those of the models' own
tokenizer.json (llama.cpp keeps the same list in llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workerkit.framework.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# name -> patterns, each applied to the pieces that the one before it left
PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
}
_WHOLE_WORDS_FIRST = (
    "llama-bpe",
    "llama-v3",
    "llama3",
    "tekken",
)  # a piece that is a token is not merged up from bytes
_NFC = ("qwen2", "deepseek-r1-qwen")
_CONTROL, _USER_DEFINED, _UNKNOWN = 3, 4, 2  # of tokenizer.ggml.token_type


def build_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Raises ModelError naming what the file says and what is supported."""
    tokens, kind = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.model")
    if not isinstance(tokens, list) or not tokens or kind is None:
        raise ModelError(f"{source} holds no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens)")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{source}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    try:
        if kind == "gpt2":
            tokenizer = _byte_level(metadata, tokens, source)
        elif kind == "llama":
            tokenizer = _sentencepiece(metadata, tokens, types, source)
        else:
            raise ModelError(f"{source}: tokenizer.ggml.model {kind!r} is not supported; gpt2 and llama are")
        _add_tokens(tokenizer, tokens, types)
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception, e.g. for a merge of tokens that do not exist
        raise ModelError(f"{source}: its tokenizer is damaged: {error}") from error
    return tokenizer


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """What the file says; without a word, what its kind of tokenizer does."""
    default = (
        metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS_FIRST
    )
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], source: str) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = str(metadata.get("tokenizer.ggml.pre"))
    if pre not in PRE_TOKENIZERS:
        raise ModelError(
            f"{source}: tokenizer.ggml.pre {pre!r} does not say how text is split; known: {', '.join(PRE_TOKENIZERS)}"
        )
    merges = [(left, right) for left, _, right in (pair.partition(" ") for pair in metadata["tokenizer.ggml.merges"])]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], source: str) -> Tokenizer:
    """SentencePiece's BPE has scores instead of merges: the pair whose result scores highest is merged first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelError(f"{source}: tokenizer.ggml.scores must have one entry for each of the {len(tokens)} tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    mergeable = {token for token, kind in zip(tokens, types, strict=True) if kind not in (_CONTROL, _UNKNOWN)}
    ranked = [
        (-scores[vocab[token]], vocab[token], (token[:cut], token[cut:]))
        for token in mergeable
        for cut in range(1, len(token))
        if token[:cut] in mergeable and token[cut:] in mergeable
    ]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[pair for _, _, pair in sorted(ranked)],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    strip: list[Any] = []
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        strip = [decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    from tokenizers import AddedToken

    special = [t for t, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _UNKNOWN)]
    user = [t for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in user])
