"""Masks for text that is pasted into an issue: secrets by their name or shape, and the names of home directories.

Only text that people or programs read is masked, never what shim computes with. SECURITY.md lists what is masked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

__all__ = ["MASK", "masked", "masked_data", "masked_variable"]

MASK = "(masked)"  # neither Markdown nor HTML means anything by it

# Names of variables. The short words only as a part between underscores: PATH is no PAT, and BYPASS no PASS.
_WORDS = "KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PASSCODE|AUTH|CREDENTIAL|COOKIE|PRIVATE|BEARER|JWT|SESSION"
_WORDS += "|WEBHOOK|SIGNATURE|CONNECTION_?STRING|CONN_?STR"
_NAME = re.compile(rf"{_WORDS}|(?:^|_)(?:PASS|PWD|PW|PAT|CREDS?|DSN|SALT|OTP|SAS|CERT)(?:_|\d|$)", re.I)
_SWITCH = re.compile(r"\s*|[01]|true|false|on|off|yes|no|none", re.I)
_COUNT = re.compile(r"\d{1,9}")  # of a name such as MAX_TOKENS
_COUNTED = re.compile(r"TOKENS|KEYS|SESSIONS|TOKENIZERS?|(?:^|_)(?:MAX|MIN|NUM|SIZE|LEN|LENGTH|COUNT)(?:_|$)", re.I)
_CODE = re.compile(r"COMMIT|(?:^|_)(?:SHA\d*|REV|REVISION|HASH|DIGEST|UUID)(?:_|$)|VERSION", re.I)
# A whole value, or a part between separators: hexadecimal, or letters of both cases with digits.
_RANDOM = re.compile(
    r"(?<![^\s,;:=@|])(?:[0-9a-fA-F]{32,}|(?=\w*[a-z])(?=\w*[A-Z])(?=\w*\d)[A-Za-z0-9_]{32,})(?![^\s,;:=@|])"
)

# In text there are stricter rules, because "key" and "token" are words of every text about a model.
_STRONG = r"[\w.-]{0,60}(?:(?:password|passwd|passphrase|secret|api[_-]?key|access[_-]?key|private[_-]?key"
_STRONG += r"|auth[_-]?token|credential|cookie|webhook)[\w-]{0,60}|[_-]token)"
_ASSIGNED = re.compile(r"\b([A-Z][A-Z0-9_]*)=(?!\(masked\)|[\w.]+\()(\"[^\"]*\"|'[^']*'|[^\s'\"`,;|)\]}]+)")
_OPTION = re.compile(rf"(--(?:token|auth|{_STRONG})(?:=|\s+))(\"[^\"]*\"|'[^']*'|[^\s'\"`-][^\s'\"`]*)", re.I)
_MAPPED = re.compile(rf"(([\"'])(?:token|auth|{_STRONG})\2\s*:\s*)([\"'])(?:\\.|(?!\3).)*\3", re.I)
_QUERY = re.compile(r"([?&;#])([\w.%-]+)=([^&;#\s'\"`<>|]+)")
_QUERIED = re.compile(rf"{_WORDS}|(?:^|[_.-])(?:sig|pass|pwd|sas|code|pat)(?:$|[_.-])", re.I)
_OPAQUE = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w%+/.~=:,-]{24,}")
_SHAPES = (
    # A private key, as far as it is there.
    (
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)", re.S
        ),
        MASK,
    ),
    # User and password of a URL. A password may hold an unquoted slash. A path makes one slash of two.
    (
        re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,20}:/+)(?:[^\s/?#'\"`<>|]+|[^\s/:@'\"`<>|]+:(?!\d+/)[^\s@'\"`<>|]+)@"),
        rf"\1{MASK}@",
    ),
    # The same without a scheme, as git and pip take it. A digest of an image also has this form.
    (re.compile(r"(?<![\w/.~+-])[\w.+-]+:[^\s:/@'\"`<>|]+@(?!sha\d+:)(?=\w)"), f"{MASK}@"),
    (
        re.compile(r"\b((?:Proxy-)?Authorization|(?:Set-)?Cookie|X-Api-Key)(\s*[:=]\s*)[^\n'\"`|]+", re.I),
        rf"\1\2{MASK}",
    ),
    (re.compile(r"\b(Bearer|bearer)\s+[\w.~+/=-]{12,}"), rf"\1 {MASK}"),
    # Tokens by the beginnings that their makers have given them.
    (
        re.compile(
            r"(?<![A-Za-z0-9_])(?:hf_(?=\w*\d)\w{10,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}"
            r"|[srp]k_(?:live|test)_\w{10,}|(?:AKIA|ASIA|AGPA|AIDA|AROA)[0-9A-Z]{16}|xox[a-z]-[\w-]{10,}|xapp-[\w-]{10,}"
            r"|AIza[\w-]{30,}|ya29\.[\w-]{10,}|npm_\w{30,}|pypi-[\w-]{30,}|nvapi-[\w-]{16,}|gsk_\w{20,}|r8_\w{20,}"
            r"|dop_v1_\w{20,}|dckr_pat_[\w-]{16,}|hvs\.[\w-]{20,}|tskey-[\w-]{16,}|AGE-SECRET-KEY-1\w{20,}|SG\.[\w-]{16,}\.[\w-]{16,}|wandb_v\d_\w{16,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]*)?)"
        ),
        MASK,
    ),
)
# Homes of others: /home/NAME, also on a volume such as /lustre/home/NAME. The volume stays, because readers need it.
_HOMES = re.compile(r"((?:/|\b[A-Za-z]:\\)(?:home|homes|Users|users)[/\\])(?!\()([^\s/\\:;,'\"`<>|()\[\]{}&]+)")
_SHARED = ("shared", "public", "Shared", "Public", "common")


def masked(text: str) -> str:
    """The text without secrets that show by their shape, and with ~ for the home directory. Twice is as once."""
    for shape, instead in _SHAPES:
        text = shape.sub(instead, text)
    text = _QUERY.sub(_query, text)
    text = _ASSIGNED.sub(_assigned, text)
    text = _OPTION.sub(rf"\1{MASK}", text)
    text = _MAPPED.sub(rf"\1\3{MASK}\3", text)
    for home in _own_homes(os.environ.get("HOME", "")):
        text = home.sub("~", text)
    return _HOMES.sub(lambda found: found[0] if found[2] in _SHARED else found[1] + MASK, text)


def masked_variable(name: str, value: str) -> str:
    """The value of an environment variable. All of it is masked if the name says that it is a secret."""
    if _is_secret(name, value):
        return MASK
    return masked(value if _CODE.search(name) else _RANDOM.sub(MASK, value))


def masked_data(data: Any) -> Any:
    """Plain data with every text in it masked, keys included."""
    if isinstance(data, str):
        return masked(data)
    if isinstance(data, Mapping):
        return {masked_data(key): masked_data(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [masked_data(value) for value in data]
    return data if data is None or isinstance(data, (bool, int, float)) else masked(str(data))


def _is_secret(name: str, value: str) -> bool:
    if _NAME.search(name) is None or _SWITCH.fullmatch(value):
        return False
    return not (_COUNTED.search(name) and _COUNT.fullmatch(value))


def _query(found: re.Match[str]) -> str:
    mark, name, value = found.groups()
    if not _QUERIED.search(name) and not _OPAQUE.fullmatch(value):
        return found[0]
    return f"{mark}{name}={MASK}"


def _assigned(found: re.Match[str]) -> str:
    return f"{found[1]}={MASK}" if _is_secret(found[1], found[2].strip("\"'")) else found[0]


@lru_cache(maxsize=4)
def _own_homes(home: str) -> tuple[re.Pattern[str], ...]:
    """Patterns for the home directory as it is named, and as it is on disk. () if it is the root."""
    named = home or os.path.expanduser("~")
    places = {os.path.normpath(place) for place in (named, os.path.realpath(named)) if os.path.isabs(place)}
    ordered = sorted(places - {os.sep, "//"}, key=len, reverse=True)
    return tuple(re.compile(rf"(?<![\w.~-]){re.escape(place)}(?![\w.-])") for place in ordered)
