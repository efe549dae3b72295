"""Which media messages may bring, and how many.

A multimodal model fetches any URL that it is given, from inside the cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from slo.errors import FieldError

_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"})
_MEDIA_PARTS: Final = frozenset({"image_url", "input_image", "audio_url", "video_url", "input_audio"})
_URL_KEYS: Final = frozenset({"image_url", "audio_url", "video_url"})
"""Where a part has its URL, whatever its type says: vLLM reads some by their key."""
MEDIA_KEYS: Final = _URL_KEYS | {"input_audio"}
"""Where a part has what is no text."""
_NOT_SERVED: Final = frozenset({"image_pil", "image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"})
"""Where one would have what no limit is checked on: a picture's processor takes a URL, or a file's name."""
_VIDEO: Final = "video_url"
_OF_FRAMES: Final = "data:video/jpeg;base64,"
"""So begins a video that is its frames, with commas between them."""
_FRAMES: Final = 32
"""What vLLM takes of any other, unless the model's loader or `media_io_kwargs` says otherwise."""


def refuse_media(messages: Any, domains: Collection[str], most: int) -> None:
    """Refuse media that the server would fetch from elsewhere than `domains`, or that bring their own names.

    And more than `most` pictures and sounds: a small file may be a large picture, and vLLM has all of a
    request decoded at once, a video frame by frame.

    Raises:
        FieldError: naming the message, or all of them.
    """
    media = 0
    for number, part in _parts(messages):
        field = f"messages[{number}].content"
        kind = part.get("type")
        if kind is not None and (not isinstance(kind, str) or kind not in _TEXT_PARTS | _MEDIA_PARTS):
            raise FieldError(
                field, f"has a part of type {str(kind)[:100]!r}", "use text, or a URL of an image"
            )
        if unknown := _NOT_SERVED & part.keys():
            raise FieldError(field, f"has a part with {min(unknown)}, which is not served", "use image_url")
        if kind is None and not MEDIA_KEYS & part.keys():
            raise FieldError(field, "has a part without a type", "give type")
        if kind == _VIDEO or part.get(_VIDEO) is not None:
            media += _frames(part.get(_VIDEO))
        else:
            media += kind in _MEDIA_PARTS or not MEDIA_KEYS.isdisjoint(part)
        for key in _URL_KEYS & part.keys():
            value = part[key]
            _check_url(field, value.get("url") if isinstance(value, dict) else value, domains)
        if part.get("uuid") is not None:  # vLLM's caches of media go by it, and know no tenants
            raise FieldError(field, "has a part with a uuid, which is not served", "leave uuid out")
    if media > most:
        raise FieldError(
            "messages",
            f"has {media} images, sounds and frames of videos",
            f"limits.max_media allows {most}, and a video that does not come as its frames "
            f"(data:video/jpeg) counts as {_FRAMES}",
        )


def _frames(video: Any) -> int:
    """How many pictures a video may be."""
    url = str(video.get("url") if isinstance(video, dict) else video).strip()
    commas = url.count(",")  # the first is before the data
    return commas if url[: len(_OF_FRAMES)].lower() == _OF_FRAMES else max(commas, _FRAMES)


def _check_url(field: str, url: Any, domains: Collection[str]) -> None:
    if url is None:
        return
    given = str(url).strip()
    if given[:5].lower() == "data:":
        return
    try:
        parts = urlsplit(given)
        host = parts.hostname
    except ValueError:
        raise FieldError(field, "has a URL that is none", "use a data: URL") from None
    if parts.scheme not in ("http", "https") or host not in domains or "\\" in given:
        known = f"or one of {', '.join(sorted(domains))}" if domains else "no other is configured"
        raise FieldError(
            field,
            f"has a URL of {str(host)[:100]!r}, which the server does not fetch from",
            f"use a data: URL, {known} (limits.media_domains)",
        )


def _parts(messages: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict):
                yield number, part
