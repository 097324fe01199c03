"""Finds secrets by their names, and removes them from everything that a run stores or sends."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from drivetrain.errors import listed

logger = logging.getLogger("drivetrain")

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Words, and ends of words (``PGPASSWORD``), that make a name the name of a secret.
_SECRET_ENDINGS = ("password", "passwd", "secret")
_SECRET_WORDS = frozenset(
    (
        *("passwords", "pwd", "secrets", "passphrase", "passphrases", "passcode"),
        *("apikey", "apikeys", "accesskey", "accesskeys", "privatekey", "secretkey", "authkey", "jwt"),
    )
)
# Words that make a name the name of a secret, unless a word of `_PUBLIC_SUFFIXES` follows: ``auth_type``.
_CREDENTIAL_WORDS = frozenset(
    (
        *("credential", "credentials", "cred", "creds", "auth", "oauth", "authorization", "bearer"),
        *("cookie", "cookies"),
    )
)
_PUBLIC_SUFFIXES = frozenset(
    (
        *("type", "types", "method", "methods", "mode", "scheme", "format", "scope", "scopes", "provider", "policy"),
        *("url", "uri", "endpoint", "host", "domain", "user", "username"),
    )
)
# Words before "key" or "keys" in the name of a secret.
_KEY_PREFIXES = frozenset(
    (
        *("api", "access", "private", "ssh", "gpg", "rsa", "ssl", "tls", "hmac", "encryption", "signing", "account"),
        *("deploy", "service"),
    )
)
# Services whose keys are secrets, whatever the words between the service and "key" (``aws_sagemaker_key``) are, except
# those of `_COLUMN_WORDS`.
_SERVICES = frozenset(
    (
        *("aws", "azure", "gcp", "google", "hf", "huggingface", "wandb", "comet", "neptune", "clearml", "mlflow"),
        *("openai", "anthropic", "github"),
    )
)
_COLUMN_WORDS = frozenset(
    (
        *("primary", "foreign", "sort", "partition", "cache", "public"),
        *("image", "video", "audio", "text", "label", "target", "input", "output", "dataset", "data", "metric"),
    )
)

# Words before "token" that denote a token of a tokenizer.
_TOKENIZER_WORDS = frozenset(
    (
        *("pad", "padding", "eos", "bos", "sos", "eot", "eod", "unk", "unknown", "oov", "cls", "class", "sep"),
        *("separator", "mask", "special", "start", "stop", "end", "begin", "blank", "image", "video", "audio", "box"),
        *("newline", "placeholder", "sentinel", "delimiter", "filler", "prompt", "prefix", "middle", "suffix", "fim"),
        *("register", "query", "next", "first", "last"),
    )
)
# Words that may follow "token" in the name of a secret. With other words, as in ``token_mixer``, the name is no secret.
_SECRET_SUFFIXES = frozenset(("", "value", "string", "str", "text", "secret", "key", "file", "path"))

_HEADER_LINE = re.compile(r"\s*([\w-]+):(?!//)\s*\S", re.MULTILINE)
# The text before a password in a URL, and the password, which may contain slashes that were not escaped. One that was
# replaced already is none, nor is a port.
# The scheme has a limit, so that the time of a search grows with a text's length, and not with the square of it.
_URL_PASSWORD = re.compile(
    r"([a-z][\w+.-]{0,30}://[^\s/?#:@]*:)(?!(?:\*+|\.{3})@|\d*[/?#\"'])[^\s]+(?=@)", re.IGNORECASE
)
_NAME_IN_TEXT = re.compile(r"""([\w.-]+)["']?\s*:""")
_MAX_DEPTH = 100  # the number of nested levels that are searched
_REDACTED = "..."


def names_a_secret(name: str) -> bool:
    """Return True if text with this name is a secret.

    One of the name's words (``apiToken``, ``API_TOKEN`` and ``api-token`` have two) must be token, password, passwd,
    pwd, secret, passphrase, credential, auth, authorization, bearer or cookie, or two successive words must be api key,
    access key, private key or the like, or a service must come before the word key: ``wandb_key``. Not secrets are a
    tokenizer's tokens (``pad_token``, ``eos_token_id``, ``max_tokens``), other keys (``primary_key``, ``sort_key``),
    and what is public about a credential (``auth_type``, ``oauth_scopes``).
    """
    words = [word.lower() for word in _WORD.findall(name)]
    for index, (word, before, after) in enumerate(zip(words, ["", *words], [*words[1:], ""], strict=False)):
        if (
            word.endswith(_SECRET_ENDINGS)
            or word in _SECRET_WORDS
            or (word in _CREDENTIAL_WORDS and after not in _PUBLIC_SUFFIXES)
        ):
            return True
        is_key = word in ("key", "keys") and before not in _COLUMN_WORDS
        is_of_service = not _SERVICES.isdisjoint(words[:index]) and after in _SECRET_SUFFIXES
        if is_key and (before in _KEY_PREFIXES or is_of_service):
            return True
        if word == "token" and before not in _TOKENIZER_WORDS and after in _SECRET_SUFFIXES:
            return True
    return False


def without_secrets(values: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[str]]:
    """Return ``values`` without secrets, and the names of the removed secrets. A nested name is joined by dots.

    Only text, or a container with text, can be a secret. Text is also a secret, whatever its name, if it contains a URL
    with a password (``https://user:password@host``), and so is a list of headers of which one has the name of a secret.
    Mappings, lists, tuples and dataclasses are searched. Dataclasses and named tuples with secrets become dicts.
    ``values`` does not change.
    """
    left_out: list[str] = []
    return dict(_without(values, (), left_out)), left_out


def arguments_without_secrets(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command line with secrets replaced by ``...``, and the names of their options.

    Recognises ``--api_token=X``, ``--api_token X``, ``model.api_token=X``, names within ``{"api_token": "X"}``, headers
    (``-H "Cookie: X"``) and passwords in URLs.
    """
    kept: list[str] = []
    left_out: list[str] = []
    option = ""  # the preceding option if the current argument may be its value, else ""
    for argument in arguments:
        name, has_value, value = argument.partition("=")
        is_setting = has_value and names_a_secret(name) and not names_a_secret(option)  # --set api_token=X
        if option and not argument.startswith("-") and not is_setting:
            name, prefix, value = option, "", argument
        elif has_value:
            prefix = f"{name}="
        else:
            name, prefix, value = "", "", argument
        secrets = _secrets_given(name, value)
        header = _HEADER_LINE.match(value)
        if secrets:
            kept.append(f"{prefix}{_REDACTED}")
        elif header and names_a_secret(header[1]):
            secrets = [header[1]]
            kept.append(f"{prefix}{header[1]}: {_REDACTED}")
        else:
            kept.append(without_url_passwords(argument))
            secrets = [] if kept[-1] == argument else [name or kept[-1]]
        left_out += secrets
        option = argument if argument.startswith("-") and not has_value else ""
    return kept, left_out


def without_url_passwords(text: str) -> str:
    """Return ``text`` with the passwords in its URLs replaced: ``https://user:...@host``."""
    return _URL_PASSWORD.sub(rf"\1{_REDACTED}", text)


class SecretFilter:
    """Removes secrets from values that a run stores, and warns once about each secret."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def take_out(self, values: Mapping[str, Any], warn: bool = True) -> tuple[dict[str, Any], list[str]]:
        """Remove secrets as `without_secrets` does.

        Args:
            values: the values by name.
            warn: whether to warn about secrets that were not reported yet. Only one rank passes True.
        """
        kept, left_out = without_secrets(values)
        if warn:
            self.warn(left_out)
        return kept, left_out

    def warn(self, left_out: Sequence[str]) -> None:
        """Warn about secrets that were not reported yet."""
        new = [name for name in left_out if name not in self._reported]
        if new:
            self._reported.update(new)
            logger.warning(
                "Left out of checkpoints, loggers and run.json, because their names mark them as secrets or their URLs "
                "contain passwords: %s. The module's hparams still contain them. Pass them to load_from_checkpoint as "
                "arguments.",
                listed(new),
            )


def _without(value: Any, location: tuple[str, ...], left_out: list[str], ancestors: tuple[int, ...] = ()) -> Any:
    """Return ``value`` without secrets, or ``value`` itself if it contains no secrets."""
    if len(location) > _MAX_DEPTH or id(value) in ancestors:
        return value
    ancestors = (*ancestors, id(value))
    named = _named_parts(value)
    if named is not None:
        before, kept = len(left_out), {}
        for key, part in named:
            if part is None or isinstance(part, int | float):  # also True and False
                kept[key] = part
                continue
            path = (*location, str(key))
            if isinstance(key, str) and (
                (names_a_secret(key) and any(_texts(part, within_names=True)))
                or _contains_url_password(part)
                or (_names_headers(key) and _has_secret_header(part))
            ):
                left_out.append(".".join(path))
            else:
                kept[key] = _without(part, path, left_out, ancestors)
        return value if len(left_out) == before else kept
    if isinstance(value, list | tuple):
        before = len(left_out)
        parts = [_without(part, (*location, str(index)), left_out, ancestors) for index, part in enumerate(value)]
        kept_parts = parts if isinstance(value, list) else tuple(parts)
        return value if len(left_out) == before else kept_parts
    return value


def _named_parts(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the names and parts of a mapping, dataclass or named tuple, and None for other values."""
    if isinstance(value, Mapping):
        return list(value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in fields(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=False))
    return None


def _texts(value: Any, within_names: bool, ancestors: tuple[int, ...] = ()) -> Iterator[str | bytes | bytearray]:
    """Yield the texts in a value and in its lists, and ``within_names`` also those in its named parts."""
    if isinstance(value, str | bytes | bytearray):
        yield value
        return
    if len(ancestors) > _MAX_DEPTH or id(value) in ancestors:
        return
    named, parts = _named_parts(value), []
    if named is not None and within_names:
        parts = [part for _, part in named]
    elif named is None and isinstance(value, list | tuple | set | frozenset):
        parts = list(value)
    for part in parts:
        yield from _texts(part, within_names, (*ancestors, id(value)))


def _contains_url_password(value: Any) -> bool:
    """Return whether a text, or a text in a list, contains a URL with a password. Named parts are not searched."""
    return any(isinstance(text, str) and _URL_PASSWORD.search(text) for text in _texts(value, within_names=False))


def _names_headers(name: str) -> bool:
    return not {"header", "headers"}.isdisjoint(word.lower() for word in _WORD.findall(name))


def _has_secret_header(value: Any) -> bool:
    """Return whether a text or a list of headers (``"Name: value"``, or pairs) has a header that is a secret."""
    names: list[Any] = []
    for header in value if isinstance(value, list | tuple) else [value]:
        if isinstance(header, str):
            names += _HEADER_LINE.findall(header)
        elif isinstance(header, list | tuple) and len(header) == 2:
            names.append(header[0])
    return any(isinstance(name, str) and names_a_secret(name) for name in names)


def _secrets_given(option: str, value: str) -> list[str]:
    """Return the names of the secrets in ``value``, which is given to ``option``."""
    if names_a_secret(option):
        return [option] if value else []
    if not value.startswith(("{", "[")):
        return []
    return [f"{option}.{name}".lstrip(".") for name in _NAME_IN_TEXT.findall(value) if names_a_secret(name)]
