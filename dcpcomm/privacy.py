"""What of a process's surroundings may be shown to others: settings that matter to a merge, and no secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["HIDDEN", "scrubbed", "settings", "without_secrets"]

HIDDEN = "(left out)"
#: What is shown is listed: what a variable of another kind holds nobody knows.
_SHOWN = re.compile(
    r"(DCPCOMM|NCCL|CUDA|CUDNN|NVIDIA|NVSHMEM|TORCH|TORCHELASTIC|PYTORCH|GLOO|TP|UCX|FLASHINFER|TRITON|VLLM|SGLANG|SGL|TRTLLM|OMP|"
    r"MKL|CUPY)_[A-Z0-9_]*|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|LOCAL_WORLD_SIZE|MASTER_PORT|LD_LIBRARY_PATH|LD_PRELOAD"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|PWD|AUTH|CRED|COOKIE|SESSION|PRIVATE|SIGNATURE|BEARER", re.I)
#: Up to the last @: a password may hold one itself, and a /. A path with an @ in it is left out too.
_USER_IN_URL = re.compile(r"(?<=://)[^\s?#]*@")
_SECRET_IN_URL = re.compile(rf"([?&][^=&#\s]*(?:{_SECRET.pattern}|sig)[^=&#\s]*=)[^&#\s]+", re.I)
_LOOKS_SECRET = re.compile(r"\b(hf|sk|ghp|gho|github_pat|glpat|xox[abp]|AKIA)[-_]?[A-Za-z0-9_-]{16,}")
_SECRET_WORD = r"[\w-]*(?:api[_-]?key|token(?!s)|secret|passw(?:or)?d|passphrase|authorization|credential)[\w-]*"
#: What follows such a word in a text: `--password x`, `token: x`, `Authorization: Bearer x`.
_SECRET_IN_TEXT = re.compile(
    rf"(--?{_SECRET_WORD}(?:\s+|=)[\"']?|\b{_SECRET_WORD}[\"']?\s*[=:]\s*[\"']?(?:(?:bearer|basic|token)\s+)?|"
    r"\b(?:bearer|basic)\s+)(?!\(left)[^\s\"',;&]+",
    re.I,
)
_SHORTEST = 6


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Of an environment the variables that matter here, by name; the value of one that may be a secret is HIDDEN."""
    shown = {name: value for name, value in environ.items() if _SHOWN.fullmatch(name)}
    return {name: HIDDEN if _SECRET.search(name) else shown[name] for name in sorted(shown)}


def without_secrets(values: Any) -> Any:
    """Plain data with what stands under a key that sounds like a secret's replaced."""
    if isinstance(values, Mapping):
        return {key: HIDDEN if _SECRET.search(str(key)) else without_secrets(one) for key, one in values.items()}
    if isinstance(values, list | tuple):
        return [without_secrets(one) for one in values]
    return values


def scrubbed(text: str, environ: Mapping[str, str]) -> str:
    """A text without passwords and tokens in URLs, without what looks like a token, without the values of the
    environment's secrets wherever they stand, and with the home folder as `~`.
    """
    secrets = {value for name, value in environ.items() if _SECRET.search(name) and len(value) >= _SHORTEST}
    for secret in sorted(secrets, key=len, reverse=True):
        if not os.path.exists(secret):  # a path to a file with a secret in it tells none, nor does PWD
            text = text.replace(secret, HIDDEN)
    text = _SECRET_IN_URL.sub(rf"\1{HIDDEN}", _USER_IN_URL.sub(f"{HIDDEN}@", text))
    text = _SECRET_IN_TEXT.sub(rf"\1{HIDDEN}", _LOOKS_SECRET.sub(HIDDEN, text))
    home = environ.get("HOME", "")
    return text.replace(home, "~") if len(home) > 1 else text
