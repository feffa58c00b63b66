"""The tokenizer in a folder of Hugging Face: tokenizer.json or tokenizer.model, and the settings beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from millpond.errors import ModelFileError, shown
from millpond.text.backends import sentencepiece_bpe, sentencepiece_unigram
from millpond.text.files import read_bytes
from millpond.text.library import faults_as
from millpond.text.sentencepiece_model import BPE, read_sentencepiece_model
from millpond.text.source import DEFAULT_TEMPLATE, NAMES_OF_ROLES, TokenizerSource, usual_ends
from millpond.text.vocabulary import BYTE_TOKEN, CONTINUED, SPACE, Spelling, TokenType, Vocabulary, check_tokens

TOKENIZER, PIECES = "tokenizer.json", "tokenizer.model"
SETTINGS, GENERATION, CONFIG = "tokenizer_config.json", "generation_config.json", "config.json"
TEMPLATE, TEMPLATE_FOLDER, OLD_TEMPLATE = "chat_template.jinja", "additional_chat_templates", "chat_template.json"
MAX_BYTES, MAX_TOKENIZER_BYTES = 64 << 20, 256 << 20


@dataclass(frozen=True, slots=True)
class _Settings:
    """tokenizer_config.json. added: by id, the tokens that it adds to the vocabulary or says more of."""

    values: Mapping[str, Any]
    added: Mapping[int, AddedToken]

    def token(self, role: str) -> str | None:
        """The text of a role's token: a string there, or an object that has it."""
        value = self.values.get(NAMES_OF_ROLES[role])
        content = value.get("content") if isinstance(value, dict) else value
        if content is not None and not isinstance(content, str):
            raise ModelFileError(f"{SETTINGS}: {NAMES_OF_ROLES[role]} must be a string, got {shown(content)}")
        return content

    def special_texts(self) -> set[str]:
        """The texts of the roles that it names."""
        return {token for role in NAMES_OF_ROLES if (token := self.token(role)) is not None}

    def roles(self, ids: Mapping[str, int]) -> dict[str, int]:
        """The ids of the roles that it names. One whose token the vocabulary lacks is no role here."""
        named = {role: token for role in NAMES_OF_ROLES if (token := self.token(role)) is not None}
        return {role: ids[token] for role, token in named.items() if token in ids}


def folder_source(folder: Path) -> TokenizerSource:
    """ModelFileError, naming the file and the field, for what is missing, inconsistent or not supported."""
    settings = _read_settings(folder)
    if (folder / TOKENIZER).is_file():
        source = _from_json(folder / TOKENIZER, settings)
    elif (folder / PIECES).is_file():
        source = _from_pieces(folder / PIECES, settings)
    else:
        raise ModelFileError(
            f"{folder.name} has no {TOKENIZER} and no {PIECES}; to be served a model needs one of them"
        )
    ends, templates = _ends(folder, source.vocabulary), _templates(folder, settings)
    return TokenizerSource(
        source.vocabulary, source.backend, source.begin, source.end, ends, source.kind, source.strips_space, templates
    )


def _from_json(path: Path, settings: _Settings) -> TokenizerSource:
    backend = _open(path)
    spelling, strips_space = _spelling(path.name, backend)
    ids = backend.get_vocab(with_added_tokens=True)
    known = backend.get_added_tokens_decoder()
    for token_id, added in sorted(settings.added.items()):
        if token_id not in known:
            backend.add_tokens([added])
            if backend.token_to_id(added.content) != token_id:
                raise ModelFileError(
                    f"{SETTINGS} adds {shown(added.content)} as {token_id}, but the vocabulary of {path.name} makes it "
                    f"{backend.token_to_id(added.content)}"
                )
    named = [token for token in ids if token in settings.special_texts() and ids[token] not in known]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in named])
    vocabulary = _vocabulary(path.name, backend, spelling, settings)
    begin, end = _around(backend, vocabulary, settings)
    words = {Spelling.BYTES: "bytes", Spelling.SPACES: "SentencePiece", Spelling.WORDS: "words"}[spelling]
    kind = f"{type(backend.model).__name__}, {words} ({path.name})"
    return TokenizerSource(vocabulary, backend, begin, end, frozenset(), kind, strips_space)


def _open(path: Path) -> tokenizers.Tokenizer:
    text = read_bytes(path, MAX_TOKENIZER_BYTES)
    with faults_as(lambda message: ModelFileError(f"{path.name} cannot be read: {message}")):
        backend = tokenizers.Tokenizer.from_buffer(text)
        backend.no_truncation()
        backend.no_padding()
    return backend


def _spelling(name: str, backend: tokenizers.Tokenizer) -> tuple[Spelling, bool]:
    """How tokens are written, and whether decoding takes a space from the front, by the decoder."""
    decoder = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps = {step.get("type"): step for step in decoder.get("decoders", [decoder])}
    if "ByteLevel" in steps:
        return Spelling.BYTES, False
    if "Metaspace" in steps:
        return Spelling.SPACES, steps["Metaspace"].get("prepend_scheme") != "never"
    if steps.get("Replace", {}).get("pattern") == {"String": SPACE}:
        strip = steps.get("Strip", {})
        return Spelling.SPACES, strip.get("content") == " " and strip.get("start", 0) > 0
    if steps.get("WordPiece", {}).get("prefix") == CONTINUED:
        return Spelling.WORDS, True
    raise ModelFileError(
        f"{name} decodes by {', '.join(map(str, steps))}; only byte-level, SentencePiece and WordPiece tokenizers are "
        "supported"
    )


def _vocabulary(name: str, backend: tokenizers.Tokenizer, spelling: Spelling, settings: _Settings) -> Vocabulary:
    ids = backend.get_vocab(with_added_tokens=True)
    size = max(ids.values(), default=-1) + 1
    if size > 2 * len(ids):
        raise ModelFileError(f"{name} has an id {size - 1} among {len(ids)} tokens")
    added, has_bytes = backend.get_added_tokens_decoder(), bool(getattr(backend.model, "byte_fallback", False))
    tokens, types = [""] * size, [int(TokenType.UNUSED)] * size
    for token, token_id in ids.items():
        is_byte = has_bytes and BYTE_TOKEN.fullmatch(token) is not None
        tokens[token_id], types[token_id] = token, TokenType.BYTE if is_byte else TokenType.NORMAL
    for token_id, described in added.items():
        types[token_id] = TokenType.CONTROL if described.special else TokenType.USER_DEFINED
    return Vocabulary(tuple(tokens), tuple(types), (), settings.roles(ids), spelling)


def _around(
    backend: tokenizers.Tokenizer, vocabulary: Vocabulary, settings: _Settings
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the tokenizer puts around a text. One that does not say does as its settings say."""
    if backend.post_processor is None:
        return _asked_for(settings, vocabulary, "bos", False), _asked_for(settings, vocabulary, "eos", False)
    text = "a"
    with faults_as(lambda message: ModelFileError(f"{TOKENIZER} cannot encode {text!r}: {message}")):
        bare, whole = (backend.encode(text, add_special_tokens=adds).ids for adds in (False, True))
    place = next(place for place in range(len(whole) + 1) if whole[place : place + len(bare)] == bare)
    return tuple(whole[:place]), tuple(whole[place + len(bare) :])


def _asked_for(settings: _Settings, vocabulary: Vocabulary, role: str, default: bool) -> tuple[int, ...]:
    is_asked_for = settings.values.get(f"add_{role}_token", default) and role in vocabulary.roles
    return (vocabulary.roles[role],) if is_asked_for else ()


def _from_pieces(path: Path, settings: _Settings) -> TokenizerSource:
    model = read_sentencepiece_model(path)
    tokens, types, scores = model.pieces, model.types, model.scores
    for token_id, added in sorted(settings.added.items()):
        if token_id > len(tokens):
            raise ModelFileError(f"{SETTINGS} adds {shown(added.content)} as {token_id}, after {len(tokens)} tokens")
        if token_id == len(tokens):
            tokens.append("")
            types.append(TokenType.UNUSED)
            scores.append(0.0)
        tokens[token_id] = added.content
        if types[token_id] != TokenType.UNKNOWN:
            types[token_id] = TokenType.CONTROL if added.special else TokenType.USER_DEFINED
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    roles = {role: token_id for role, token_id in model.roles.items() if token_id < len(tokens)}
    vocabulary = Vocabulary(
        tuple(tokens), tuple(types), (), roles | settings.roles(ids), Spelling.SPACES, tuple(scores)
    )
    check_tokens(vocabulary)
    added_tokens = {token.content: token for token in settings.added.values()}
    build = sentencepiece_bpe if model.algorithm == BPE else sentencepiece_unigram
    return TokenizerSource(
        vocabulary,
        build(vocabulary, model.normalizing, added_tokens),
        _asked_for(settings, vocabulary, "bos", model.algorithm == BPE),
        _asked_for(settings, vocabulary, "eos", False),
        frozenset(),
        f"SentencePiece {'BPE' if model.algorithm == BPE else 'unigram'} ({path.name})",
        model.normalizing.adds_space,
    )


def _read_settings(folder: Path) -> _Settings:
    values = _read_object(folder / SETTINGS)
    added: dict[int, AddedToken] = {}
    listed = values.get("added_tokens_decoder", {})
    if not isinstance(listed, dict):
        raise ModelFileError(f"{SETTINGS}: added_tokens_decoder must be an object, got {shown(listed)}")
    for key, token in listed.items():
        content = token.get("content") if isinstance(token, dict) else None
        if not re.fullmatch(r"\d{1,9}", key) or not isinstance(content, str) or not content:
            raise ModelFileError(
                f"{SETTINGS}: added_tokens_decoder has {shown(token)} as {shown(key)}, which is no token"
            )
        flags = {name: bool(token.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "special")}
        added[int(key)] = AddedToken(content, normalized=bool(token.get("normalized", False)), **flags)
    return _Settings(values, added)


def _read_object(path: Path) -> dict[str, Any]:
    """A file of JSON that may be missing; ModelFileError for one that is not an object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path.name} must be an object, got {type(value).__name__}")
    return value


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path, MAX_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path.name} cannot be read: {error}") from error


def _ends(folder: Path, vocabulary: Vocabulary) -> frozenset[int]:
    """Those of the generation config and the tokenizer's own; where neither file names any, the usual ones."""
    own = {vocabulary.roles["eos"]} if "eos" in vocabulary.roles else set()
    for name in (GENERATION, CONFIG):
        if (value := _read_object(folder / name).get("eos_token_id")) is not None:
            return frozenset(own | _checked_ids(name, value, vocabulary))
    return usual_ends(vocabulary, own)


def _checked_ids(name: str, value: object, vocabulary: Vocabulary) -> set[int]:
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < len(vocabulary.tokens):
            raise ModelFileError(
                f"{name}: eos_token_id holds {shown(token_id)}, which is none of the {len(vocabulary.tokens)} tokens"
            )
    return set(ids)


def _templates(folder: Path, settings: _Settings) -> dict[str, str]:
    """By name. A file of its own wins over the settings, as in transformers."""
    old = _read_object(folder / OLD_TEMPLATE).get("chat_template")
    listed = old if old is not None else settings.values.get("chat_template")
    templates = _listed_templates(listed)
    if (folder / TEMPLATE).is_file():
        templates[DEFAULT_TEMPLATE] = _read_text(folder / TEMPLATE)
        if not templates[DEFAULT_TEMPLATE].strip():
            raise ModelFileError(f"{TEMPLATE} is empty: no conversation could be told by it")
    for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    return templates


def _listed_templates(listed: object) -> dict[str, str]:
    if listed is None:
        return {}
    if isinstance(listed, str):
        return {DEFAULT_TEMPLATE: listed}
    if isinstance(listed, list) and all(isinstance(each, dict) for each in listed):
        pairs = [(each.get("name"), each.get("template")) for each in listed]
        if all(isinstance(part, str) for pair in pairs for part in pair):
            return dict(pairs)
    raise ModelFileError(f"{SETTINGS}: chat_template must be text or a list of named templates, got {shown(listed)}")
